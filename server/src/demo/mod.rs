//! `tensord demo`: a real training run, to see a pool at work.
//!
//! It trains a small network on real hand-written digits with Burn's own training stack
//! (`SupervisedTraining`, metrics, checkpoints, dashboard) on whatever devices it is given, on
//! several of them data-parallel.
//! Nothing here knows of tensord: leasing devices and counting bytes are the caller's part, and
//! the same code trains on a local device in the tests.
//!
//! ```text
//! TrainOptions ─► train ─► Outcome ─► render_table, to_json
//! ```

mod data;
mod models;
mod outcome;
mod pace;
mod panics;
mod progress;
mod train;

pub(crate) use models::Model;
pub(crate) use outcome::{Outcome, render_table, to_json};
pub(crate) use panics::Panics;
pub(crate) use progress::View;
pub(crate) use train::{BATCH_SIZE, DEVICE_COUNTS, TrainError, TrainOptions, train};
