//! The laws of links, one suite for every implementation, and what the two
//! ends of a link do when the other end, or the network, does not play by them.
//!
//! - `laws`, `endings`: the laws at the top of `src/link.rs`. Every law is a
//!   function of an implementation; the macro below makes a test of each pair.
//! - `oversized`: the part of law 2 that needs a peer which breaks it.
//! - `faults`: what a `FaultSwitch` promises on top of the laws.
//! - `dialling`, `trust`: which error says what, and whom a dialler trusts.
//! - `shown`: whom the accepting side knows.
//! - `binding`: why a listener does not start.
//! - `control`: the server of the control plane.
//! - `hostile`: what the accepting side puts up with.
//!
//! Nothing is timed. Deadlines are there to tell a hang from a slow machine.

/// Makes a test of each law for each implementation, named after both.
macro_rules! laws {
    ($($law:ident)*) => {
        $(mod $law {
            laws!(@test $law, quic, crate::harness::QUIC);
            laws!(@test $law, grpc, crate::harness::GRPC);
            laws!(@test $law, tcp, crate::harness::TCP);
            laws!(@test $law, quic_through_a_switch, crate::harness::QUIC.through_a_switch());
            laws!(@test $law, grpc_through_a_switch, crate::harness::GRPC.through_a_switch());
            laws!(@test $law, tcp_through_a_switch, crate::harness::TCP.through_a_switch());
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
mod control;
mod dialling;
mod endings;
mod faults;
mod harness;
mod hostile;
mod laws;
mod oversized;
mod raw;
mod shown;
mod trust;
mod validation;
