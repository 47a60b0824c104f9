//! A lease is suspended or resumed by its program.

use super::Lease;
use crate::{StandingError, blocking::block_on};

impl Lease {
    /// Gives the devices back, and keeps the state of the sessions, until [`resume`](Self::resume).
    /// Other leases can use the devices meanwhile. Reads of tensors wait, and so does a thread that
    /// records many ops. [`LeaseEvent::Suspended`](crate::LeaseEvent::Suspended) is reported.
    ///
    /// Blocks until the pool has taken the devices, or refuses. The ops since the last snapshot, usually
    /// of the last 2 s at most, are executed again later.
    ///
    /// ```no_run
    /// use tensord_client::{LeaseRequest, Pool};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let lease = Pool::connect_env()?.lease(LeaseRequest::devices(1))?;
    /// // … train …
    /// lease.suspend()?;
    /// // … wait for a person, or for the night …
    /// lease.resume()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// The pool's reason: for example, that the lease has no snapshots yet, or that it is not
    /// [durable](crate::LeaseRequest::durable). See `docs/durability.md`.
    pub fn suspend(&self) -> Result<(), StandingError> {
        block_on(self.suspend_async(), None).unwrap_or(Err(StandingError::Closed))
    }

    /// As [`suspend`](Self::suspend), without blocking the thread. Runs on any executor.
    ///
    /// # Errors
    ///
    /// As [`suspend`](Self::suspend).
    pub fn suspend_async(
        &self,
    ) -> impl Future<Output = Result<(), StandingError>> + Send + 'static + use<> {
        let (control, lease) = (self.control.clone(), self.id);
        async move {
            control
                .change_standing(lease, true)
                .await
        }
    }

    /// Lets the lease go on after [`suspend`](Self::suspend): as soon as a worker that has its state
    /// has free devices, ahead of other requests. Does not wait for that; reads do.
    ///
    /// # Errors
    ///
    /// The pool's reason: for example, that the lease is not suspended, or that an administrator has
    /// suspended it.
    pub fn resume(&self) -> Result<(), StandingError> {
        block_on(self.resume_async(), None).unwrap_or(Err(StandingError::Closed))
    }

    /// As [`resume`](Self::resume), without blocking the thread. Runs on any executor.
    ///
    /// # Errors
    ///
    /// As [`resume`](Self::resume).
    pub fn resume_async(
        &self,
    ) -> impl Future<Output = Result<(), StandingError>> + Send + 'static + use<> {
        let (control, lease) = (self.control.clone(), self.id);
        async move { control.change_standing(lease, false).await }
    }
}
