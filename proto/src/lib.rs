//! What tensord's processes say to each other.
//!
//! Everything that crosses a process boundary is defined here and nowhere
//! else: the messages (`proto/tensord/v1/*.proto`), ids, error codes, version
//! rules and the op codec. Clients, workers and the scheduler know of each
//! other only through this crate; it knows none of them, no runtime, no I/O.
//!
//! - [`v1`]: the generated messages; with the feature `rpc`, the gRPC services.
//! - [`credential`]: what a client's id is bound to.
//! - [`grant`]: which grant of a device is the current one.
//! - [`ids`]: typed ids.
//! - [`text`]: a peer's text, safe to show.
//! - [`version`]: what "compatible" means.
//! - `aligned` (feature `ir`): memory that Burn takes as it is.
//! - `bulk` (feature `ir`): tensor bytes divided for the wire.
//! - `content` (feature `ir`): where the bytes of uploads are.
//! - `codec` (feature `ir`): ops, tensor types and tensors to bytes and back.

pub mod credential;
pub mod error;
pub mod grant;
pub mod ids;
pub mod text;
pub mod version;

#[cfg(feature = "ir")]
pub mod aligned;
#[cfg(feature = "ir")]
pub mod bulk;
#[cfg(feature = "ir")]
pub mod codec;
#[cfg(feature = "ir")]
pub mod content;

/// The generated messages of `tensord.v1`. Their documentation stands in the
/// `.proto` files.
#[allow(missing_docs, clippy::all, unreachable_pub)]
pub mod v1 {
    include!(concat!(env!("OUT_DIR"), "/tensord.v1.rs"));
}

/// Largest frame on a link, in bytes, header included. Both ends enforce it, so
/// a peer can make the other hold no more than this before it is understood.
pub const MAX_FRAME_BYTES: usize = 4 << 20;

/// Reads in one frame, at most: each has a place in the other end's memory.
pub const MAX_READS_PER_FRAME: usize = 256;

/// Tensor bytes in one frame; larger tensors go in several. Small enough that a
/// processor's cache has what came when it is put where it belongs, and that a read reply
/// or an ack is never stuck for long behind an upload.
pub const CHUNK_BYTES: usize = 256 << 10;
