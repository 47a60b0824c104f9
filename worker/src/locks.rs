//! One way to take a lock.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, whoever panicked while holding it: that is a bug which was reported, and
/// what the worker's locks guard is whole between statements, and better used than stuck.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
