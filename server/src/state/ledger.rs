//! A value that outlives its process: read in memory, and in a file of the state
//! directory from the moment it changes.
//!
//! A change that cannot be written down does not happen. Changes come one at a time and
//! wait for the disk; readers never wait for either.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use serde::{Serialize, de::DeserializeOwned};

use super::{StateError, files};

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Ledger<T> {
    path: PathBuf,
    current: RwLock<Arc<T>>,
    /// Held by whoever changes it.
    changing: Mutex<()>,
}

impl<T: Clone + Default + Serialize + DeserializeOwned> Ledger<T> {
    /// Reads the value in the file at `path`; the default if there is none.
    pub(super) fn open(path: &Path) -> Result<Self, StateError> {
        let value = match files::read_private(path)? {
            None => T::default(),
            Some(content) => serde_json::from_slice(&content).map_err(|e| StateError::Damaged {
                path: path.into(),
                reason: format!("it is not what tensord wrote: {e}"),
            })?,
        };
        Ok(Self {
            path: path.into(),
            current: RwLock::new(Arc::new(value)),
            changing: Mutex::default(),
        })
    }

    /// The value as it is now.
    pub(crate) fn read(&self) -> Arc<T> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        current.clone()
    }

    /// Changes the value, and returns what `change` does once that is on disk. Blocks
    /// for as long as the disk takes.
    ///
    /// # Errors
    ///
    /// Those of `change`, and those of writing it down; the value stays as it was.
    pub(crate) fn change<R, E: From<StateError>>(
        &self,
        change: impl FnOnce(&mut T) -> Result<R, E>,
    ) -> Result<R, E> {
        // A change that panicked left the value alone.
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
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
