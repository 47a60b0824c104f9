//! A lease is suspended, resumed or moved by its program.

use super::Lease;
use crate::{StandingError, blocking::block_on, control::handle::StandingChange};

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
        self.change_standing(StandingChange::Suspend)
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
        self.change_standing(StandingChange::Resume)
    }

    /// Has the lease go on at another worker: the one that keeps its snapshots. For a program that knows that its
    /// worker is about to be needed, or is slow. The pool moves a lease by itself if its worker stops, is lost, or
    /// cannot be reached. [`LeaseEvent::Moving`](crate::LeaseEvent::Moving) is reported, and
    /// [`Running`](crate::LeaseEvent::Running).
    ///
    /// Blocks until the pool has granted the devices there, or refuses. The ops since the last snapshot are executed
    /// again.
    ///
    /// ```no_run
    /// use tensord_client::{LeaseRequest, Pool, StandingError};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let lease = Pool::connect_env()?.lease(LeaseRequest::devices(1))?;
    /// // … train …
    /// match lease.move_elsewhere() {
    ///     Ok(()) => println!("goes on at another worker"),
    ///     Err(StandingError::Refused { reason }) => println!("stays where it is: {reason}"),
    ///     Err(error) => return Err(error.into()),
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// The pool's reason: for example, that no other worker has the snapshots and free devices, or that the lease
    /// has devices of several workers.
    pub fn move_elsewhere(&self) -> Result<(), StandingError> {
        block_on(self.move_elsewhere_async(), None).unwrap_or(Err(StandingError::Closed))
    }

    /// As [`move_elsewhere`](Self::move_elsewhere), without blocking the thread. Runs on any executor.
    ///
    /// # Errors
    ///
    /// As [`move_elsewhere`](Self::move_elsewhere).
    pub fn move_elsewhere_async(
        &self,
    ) -> impl Future<Output = Result<(), StandingError>> + Send + 'static + use<> {
        self.change_standing(StandingChange::Move)
    }

    fn change_standing(
        &self,
        change: StandingChange,
    ) -> impl Future<Output = Result<(), StandingError>> + Send + 'static + use<> {
        let (control, lease) = (self.control.clone(), self.id);
        async move { control.change_standing(lease, change).await }
    }
}
