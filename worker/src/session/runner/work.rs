//! What a runner is given to do, and what it replies.

use std::{sync::Arc, time::Duration};

use burn_backend::{ExecutionError, TensorData};
use burn_ir::{TensorId, TensorIr};
use burn_std::future::DynFut;
use bytes::Bytes;
use tensord_proto::v1::{Fault, Mark};

use super::{super::snapshot::SnapshotError, capture::Captured, fault::FaultContext};
use crate::collective::Capability;

/// A piece of work, as received from the client.
pub(crate) enum Work {
    Ops {
        count: u32,
        encoded: Bytes,
        contents: Bytes,
    },
    Poison {
        id: TensorId,
        fault: Fault,
    },
    Alias {
        id: TensorId,
        source: TensorId,
    },
    Read {
        request: u64,
        tensor: TensorIr,
    },
    Sync(SyncRequest),
    Seed(u64),
    /// Captures the state, once all earlier work is done.
    Mark(Mark),
    Offer {
        tensor: TensorIr,
        capability: Capability,
        to: u32,
    },
    Take {
        out: TensorIr,
        capability: Capability,
        from: u32,
    },
}

/// A request for a reply when all earlier work is done.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SyncRequest {
    pub(crate) id: u64,
    /// Whether the session's kept uploads are to be shared before the reply.
    pub(crate) shares_uploads: bool,
}

/// A reply to the client.
pub(crate) enum Reply {
    Value {
        request: u64,
        result: Result<TensorData, Arc<Fault>>,
    },
    /// The device is still reading the value, which the future returns.
    InFlight {
        request: u64,
        /// Bytes of host memory that the value takes once it is read.
        bytes: usize,
        read: DynFut<Result<TensorData, ExecutionError>>,
        context: FaultContext,
    },
    Synced {
        request: SyncRequest,
        fault: Option<Arc<Fault>>,
    },
    /// The state of the session at a mark.
    Captured {
        mark: Mark,
        captured: Result<Box<Captured>, SnapshotError>,
        /// How long the capture took.
        cost: Duration,
    },
}
