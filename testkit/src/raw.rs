//! Clients that use the real protocol and can break any rule of it.
//!
//! Nothing here uses `tensord-client`, so a test can send what honest code cannot.
//! [`ClientStream`] is a stream to the scheduler, with any hello and any message on it.
//! [`RawSession`] is one track of a session with a worker, with any opening, any ops and
//! any frame. [`RawWorker`] registers at the scheduler under any identity, and dials other
//! workers. [`RawPool`] gives programs leases on a worker that the test implements. By
//! default all of them keep every rule: they number and acknowledge frames, respect credit
//! and send beats. So a test breaks only the rule that it is about.
//!
//! ```no_run
//! use tensord_testkit::{cluster::Cluster, raw::{self, ClientStream, RawSession}};
//!
//! let cluster = Cluster::start(&["flex"]);
//! raw::block(async {
//!     let mut attached = ClientStream::to(cluster.client_url()).await.unwrap();
//!     let target = attached.lease(1).await.unwrap().remove(0);
//!     let mut session = RawSession::open(&target).await.unwrap();
//!     let tensor = session.upload(&[1.0, 2.0]);
//!     let read = session.fetch(&tensor).await.unwrap();
//!     assert_eq!(raw::floats(&read.unwrap()), [1.0, 2.0]);
//! });
//! ```
//!
//! Note:
//!
//! - A [`RawSession`] has no task of its own. It sends and acknowledges frames only while
//!   one of its `async` methods is awaited, and a worker drops a connection that is silent
//!   for 2.5 s. Call [`RawSession::stay_connected`] to stay connected without doing anything.
//! - The lease ends when its [`ClientStream`] is dropped, after the scheduler's lease expiry.

mod calls;
mod error;
mod pool;
mod scheduler;
mod session;
mod worker;

use std::{future::Future, sync::OnceLock, time::Duration};

use burn_backend::{DType, Shape};
use burn_ir::{TensorId, TensorIr, TensorStatus};
use prost::Message;
use tensord_proto::v1::{Frame, frame};
use tokio::runtime::Runtime;

pub use self::{
    calls::open_call,
    error::SessionError,
    pool::{RAW_WORKER, RawPool, ServedTrack},
    scheduler::{ClientStream, Target, authorised, channel, hello},
    session::{RawSession, carriers, refusal, type_of},
    worker::{RawWorker, WorkerStream, join_over},
};

/// How long a raw client waits for a reply before the test fails. Debug builds on a busy
/// machine are slow.
pub const ANSWER_DEADLINE: Duration = Duration::from_secs(30);

/// Runs `work` to its end on a runtime that all tests of this process share.
///
/// # Panics
///
/// If called from async code, or if the runtime cannot be started.
pub fn block<T>(work: impl Future<Output = T>) -> T {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    let runtime = RUNTIME.get_or_init(|| {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let built = builder.worker_threads(2).enable_all().build();
        built.expect("the system starts threads")
    });
    runtime.block_on(work)
}

/// Returns a reference to an `f32` tensor for an op that reads the tensor and keeps it.
pub fn tensor(id: u64, shape: &[usize]) -> TensorIr {
    typed(id, shape, DType::F32)
}

/// Like [`tensor`], for any dtype.
pub fn typed(id: u64, shape: &[usize], dtype: DType) -> TensorIr {
    TensorIr {
        id: TensorId::new(id),
        shape: Shape::from(shape.to_vec()),
        status: TensorStatus::ReadOnly,
        dtype,
    }
}

/// Returns a reference to an `f32` tensor for an op that creates the tensor.
pub fn out(id: u64, shape: &[usize]) -> TensorIr {
    TensorIr {
        status: TensorStatus::NotInit,
        ..tensor(id, shape)
    }
}

/// Returns `tensor` marked as read for the last time.
pub fn last(tensor: &TensorIr) -> TensorIr {
    TensorIr {
        status: TensorStatus::ReadWrite,
        ..tensor.clone()
    }
}

/// Returns `values` as little-endian bytes, their wire format.
pub fn bytes_of(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

/// Decodes the content of an `f32` tensor. Ignores a remainder of fewer than 4 bytes.
pub fn floats(bytes: &[u8]) -> Vec<f32> {
    let (values, _) = bytes.as_chunks();
    values
        .iter()
        .map(|value| f32::from_le_bytes(*value))
        .collect()
}

/// Encodes a frame numbered `seq`, or an unnumbered frame if `seq` is 0. The frame
/// acknowledges nothing and grants no credit. For [`RawSession::send_bytes`].
pub fn frame(seq: u64, body: frame::Body) -> Vec<u8> {
    Frame {
        seq,
        body: Some(body),
        ..Frame::default()
    }
    .encode_to_vec()
}
