//! The training that `tensord demo` runs to show a pool at work.
//!
//! It trains a small network on real hand-written digits with Burn's own training stack
//! (`SupervisedTraining`, metrics, checkpoints, dashboard) on the devices that the caller
//! passes in, data-parallel if there are several. It leases nothing: the caller leases the
//! devices, counts the bytes and adds both to the [`Outcome`], and the tests train on a
//! local device with the same code.
//!
//! It is a crate of its own, so that the binary's own code has nothing of Burn.
//!
//! ```text
//! TrainOptions ─► train ─► Outcome ─► render_table, to_json
//! ```

mod data;
mod lockstep;
mod losses;
mod models;
mod outcome;
mod panics;
mod progress;
mod train;

pub use burn::train::Interrupter;

pub use losses::{Losses, by_step, first_difference};
pub use models::Model;
pub use outcome::{Chaos, Epoch, Kill, Outcome, render_table, to_json};
pub use panics::Panics;
pub use progress::View;
pub use train::{BATCH_SIZE, DEVICE_COUNTS, TrainError, TrainOptions, train};
