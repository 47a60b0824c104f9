//! A value that is read from memory, and of which each change is written before it takes effect.
//!
//! A change that cannot be written does not take effect. Changes are made one at a time and may block on the
//! disk; readers wait for neither.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

/// A value with a copy elsewhere; see the module's documentation.
#[derive(Debug)]
pub(crate) struct WriteThrough<T> {
    current: RwLock<Arc<T>>,
    /// Held during a change, including its write.
    write_lock: Mutex<()>,
}

impl<T: Clone> WriteThrough<T> {
    /// Creates one of a value that is written already.
    pub(crate) fn new(value: T) -> Self {
        Self {
            current: RwLock::new(Arc::new(value)),
            write_lock: Mutex::default(),
        }
    }

    /// Returns the current value.
    pub(crate) fn read(&self) -> Arc<T> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        current.clone()
    }

    /// Keeps the value from being changed until the guard is dropped.
    pub(crate) fn hold(&self) -> MutexGuard<'_, ()> {
        // Poisoning can be ignored: a change that panicked has not stored its value.
        let lock = self.write_lock.lock();
        lock.unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the value with `change`, has `write` write the new value, with the result of `change`, and
    /// returns that result.
    ///
    /// # Errors
    ///
    /// Those of `change` and of `write`. The value then remains unchanged.
    pub(crate) fn change<R, E>(
        &self,
        change: impl FnOnce(&mut T) -> Result<R, E>,
        write: impl FnOnce(&T, &R) -> Result<(), E>,
    ) -> Result<R, E> {
        let _changing = self.hold();
        let mut value = T::clone(&self.read());
        let result = change(&mut value)?;
        write(&value, &result)?;
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        *current = Arc::new(value);
        Ok(result)
    }
}
