//! A value that outlives its process: it is read from memory, and each change is written
//! to a file of the state directory.
//!
//! A change that cannot be written to disk does not take effect. Changes are made one at a
//! time and block on the disk; readers wait for neither.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use serde::{Serialize, de::DeserializeOwned};

use super::{StateError, files};

/// A value with a copy on disk; see the module's documentation.
#[derive(Debug)]
pub(crate) struct Persisted<T> {
    path: PathBuf,
    current: RwLock<Arc<T>>,
    /// Held during a change, including its write to disk.
    write_lock: Mutex<()>,
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
            current: RwLock::new(Arc::new(value)),
            write_lock: Mutex::default(),
        })
    }

    /// Returns the current value.
    pub(crate) fn read(&self) -> Arc<T> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        current.clone()
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
        // Poisoning can be ignored: a change that panicked has not stored its value.
        let _changing = self
            .write_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut value = T::clone(&self.read());
        let result = change(&mut value)?;
        let content = serde_json::to_vec(&value).map_err(|e| {
            let path = self.path.clone();
            let reason = format!("its new content cannot be written as JSON: {e}");
            StateError::Damaged { path, reason }
        })?;
        files::replace_private(&self.path, &content)?;
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        *current = Arc::new(value);
        Ok(result)
    }
}
