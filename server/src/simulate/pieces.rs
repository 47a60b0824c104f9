//! When jobs had which devices: what a picture of a small pool shows.

/// The largest pool of which this is kept, in devices.
const MAX_DEVICES: u64 = 16;

/// The longest trace of which this is kept, in jobs. With more, a picture of each job could not be read.
const MAX_JOBS: usize = 100;

/// A time for which a job had devices without a break.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) from_ms: u64,
    pub(super) to_ms: u64,
    /// The positions of the devices among those of the pool.
    pub(super) devices: Vec<usize>,
}

/// Returns whether pieces are kept of so many jobs on so many devices.
pub(super) fn are_kept(devices: u64, jobs: usize) -> bool {
    devices <= MAX_DEVICES && jobs <= MAX_JOBS
}
