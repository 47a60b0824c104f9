//! The laws of links, as one suite for every implementation, and the behaviour of the two
//! ends of a link when the other end or the network breaks them.
//!
//! - `laws`, `endings`: the laws at the top of `src/link.rs`. Every law is a function of
//!   an implementation; the macro below makes a test of each pair.
//! - `oversized`: the part of law 2 that needs a peer which breaks it.
//! - `faults`: what a `FaultSwitch` guarantees on top of the laws.
//! - `dialling`, `trust`: the errors of dialling, and which peers a dialler trusts.
//! - `shown`: the certificates that the accepting side sees.
//! - `binding`: why a listener does not start.
//! - `control`: the server of the control plane.
//! - `hostile`: what the accepting side withstands.
//!
//! Nothing is timed. Deadlines only detect hangs.

/// Makes a test of each law for each implementation, named after both.
macro_rules! laws {
    ($($law:ident)*) => {
        $(mod $law {
            laws!(@test $law, quic, crate::harness::QUIC);
            laws!(@test $law, grpc, crate::harness::GRPC);
            laws!(@test $law, tcp, crate::harness::TCP);
            laws!(@test $law, quic_with_fault_switch, crate::harness::QUIC.with_fault_switch());
            laws!(@test $law, grpc_with_fault_switch, crate::harness::GRPC.with_fault_switch());
            laws!(@test $law, tcp_with_fault_switch, crate::harness::TCP.with_fault_switch());
        })*
    };
    (@test $law:ident, $name:ident, $kind:expr) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            crate::harness::no_hang(super::$law($kind)).await;
        }
    };
}

mod binding;
mod client_certificate;
mod control;
mod dialling;
mod endings;
mod faults;
mod harness;
mod hostile;
mod laws;
#[cfg(target_os = "linux")]
mod lease_processes;
mod oversized;
mod raw;
mod trust;
mod validation;
