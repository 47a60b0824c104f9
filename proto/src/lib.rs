//! The messages between tensord's processes.
//!
//! Everything that crosses a process boundary is defined here and nowhere else: the
//! messages (`proto/tensord/v1/*.proto`), ids, error codes, version rules and the op
//! codec. Clients, workers and the scheduler share only this crate; it depends on none of
//! them, on no runtime and on no I/O.
//!
//! - [`v1`]: the generated messages; with the feature `rpc`, the gRPC services.
//! - [`credential`]: the secret from which a client's id is derived.
//! - [`grant`]: which grant of a device is the current one.
//! - [`ids`]: typed ids.
//! - [`share`]: parts of a device.
//! - [`text`]: a peer's text, made safe to show.
//! - [`version`]: which versions are compatible.
//! - `aligned` (feature `ir`): memory that Burn uses without a copy.
//! - `bulk` (feature `ir`): tensor bytes split for the wire.
//! - `content` (feature `ir`): where the bytes of uploads are.
//! - `collective_op` (feature `ir`): the ops of collectives in Burn's IR.
//! - `codec` (feature `ir`): ops, tensor types and tensors to bytes and back.

pub mod credential;
mod debug;
pub mod error;
pub mod grant;
pub mod ids;
pub mod share;
pub mod text;
pub mod version;

#[cfg(feature = "ir")]
pub mod aligned;
#[cfg(feature = "ir")]
pub mod bulk;
#[cfg(feature = "ir")]
pub mod codec;
#[cfg(feature = "ir")]
pub mod collective_op;
#[cfg(feature = "ir")]
pub mod content;

/// The generated messages of `tensord.v1`. They are documented in the `.proto` files.
#[allow(missing_docs, clippy::all, unreachable_pub)]
pub mod v1 {
    include!(concat!(env!("OUT_DIR"), "/tensord.v1.rs"));
}

/// Largest frame on a link, in bytes, header included. Both ends enforce it, so a peer
/// can make the other end buffer no more than this before the frame is decoded.
pub const MAX_FRAME_BYTES: usize = 4 << 20;

/// Maximum number of reads in one frame: each takes memory at the other end.
pub const MAX_READS_PER_FRAME: usize = 256;

/// Most suspended leases whose snapshots a worker holds: the scheduler sends a command for each of them when the worker
/// joins again, and queues at most 1024.
pub const MAX_SUSPENDED_LEASES: usize = 512;

/// Most leases in a worker's report of what its snapshot store has.
pub const MAX_STORED_LEASES: usize = 1024;

/// Most leases whose memory for snapshots a heartbeat reports. The memory of further leases is not counted.
pub const MAX_LEASES_WITH_SNAPSHOTS: usize = 4096;

/// Tensor bytes in one frame; larger tensors are split. Small enough that the bytes are
/// still in the processor's cache when they are copied to their tensor, and that an
/// upload never delays a read reply or an acknowledgement for long.
pub const CHUNK_BYTES: usize = 256 << 10;
