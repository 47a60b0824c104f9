//! `tensord demo`: a real training run that shows a pool at work.
//!
//! It trains a small network on real hand-written digits with Burn's own training stack
//! (`SupervisedTraining`, metrics, checkpoints, dashboard) on the devices that the caller
//! passes in, data-parallel if there are several. Nothing here depends on tensord: the
//! caller leases the devices and counts the bytes, and the tests train on a local device
//! with the same code.
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

pub(crate) use losses::{Losses, by_step, first_difference};
pub(crate) use models::Model;
pub(crate) use outcome::{Chaos, Kill, Outcome, render_table, to_json};
pub(crate) use panics::Panics;
pub(crate) use progress::View;
pub(crate) use train::{BATCH_SIZE, DEVICE_COUNTS, TrainError, TrainOptions, train};
