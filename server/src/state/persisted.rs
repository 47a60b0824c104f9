//! A value that outlives its process, as a file of the state directory has it.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::{Serialize, de::DeserializeOwned};

use super::{StateError, files, write_through::WriteThrough};

/// A value of which each change is written to a file.
#[derive(Debug)]
pub(crate) struct Persisted<T> {
    path: PathBuf,
    value: WriteThrough<T>,
}

impl<T: Clone + Default + Serialize + DeserializeOwned> Persisted<T> {
    /// Reads the value from the file at `path`; takes the default if there is none.
    pub(super) fn open(path: &Path) -> Result<Self, StateError> {
        let value = match files::read_private(path)? {
            None => T::default(),
            Some(content) => serde_json::from_slice(&content).map_err(|e| StateError::Damaged {
                path: path.into(),
                reason: format!("it cannot be parsed: {e}"),
            })?,
        };
        Ok(Self {
            path: path.into(),
            value: WriteThrough::new(value),
        })
    }

    /// Returns the current value.
    pub(crate) fn read(&self) -> Arc<T> {
        self.value.read()
    }

    /// Changes the value with `change`, and returns its result once the new value is on
    /// disk. Blocks until then.
    ///
    /// # Errors
    ///
    /// Those of `change` and of the write. The value then remains unchanged.
    pub(crate) fn change<R, E: From<StateError>>(
        &self,
        change: impl FnOnce(&mut T) -> Result<R, E>,
    ) -> Result<R, E> {
        self.value.change(change, |value, _| Ok(self.write(value)?))
    }

    fn write(&self, value: &T) -> Result<(), StateError> {
        let content = serde_json::to_vec(value).map_err(|e| {
            let path = self.path.clone();
            let reason = format!("its new content cannot be written as JSON: {e}");
            StateError::Damaged { path, reason }
        })?;
        files::replace_private(&self.path, &content)
    }
}
