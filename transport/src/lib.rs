//! Links between tensord's processes.
//!
//! A [`Link`] is a framed, ordered, secured duplex between two processes. It has three
//! carriers: a plain TLS stream, QUIC and a gRPC stream. All three follow the same laws
//! (see [`link`]) and pass the same conformance suite. All run over TLS 1.3; there is no
//! plaintext mode. This crate does not know what the frames mean.
//!
//! - [`url`]: the pool URL, which holds a pool's address, its token and how to trust it.
//! - [`identity`], [`tls`]: certificates, and what a peer must prove.
//! - [`link`], [`dial`], [`listen`]: the link itself and its two ends.
//! - [`faults`]: a link that drops, delays, cuts or goes half-open on command.
//! - [`channel`]: frames that survive their connection, and the pump that exchanges them.
//! - `handoff`: passes accepted connections to other processes of the host (Linux).
//! - [`token`]: lease tokens, signed by the scheduler, checked by workers.

mod admission;
mod allowance;
mod carriers;
pub mod channel;
mod connection;
pub mod control;
pub mod dial;
pub mod faults;
mod fingerprint;
mod gate;
#[cfg(target_os = "linux")]
pub mod handoff;
mod handshakes;
pub mod identity;
pub mod link;
pub mod listen;
pub mod tls;
pub mod token;
pub mod url;

pub use admission::AdmissionLimitError;
pub use dial::Dialer;
pub use identity::Identity;
pub use link::{Carrier, Link, LinkError, LinkReceiver, LinkSender};
pub use listen::Listener;
pub use url::{PoolUrl, Secret, TransportChoice};
