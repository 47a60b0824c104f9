//! What must hold on every kind of device that a build has and this host offers.
//!
//! `TENSORD_BINARY` names the build whose devices are tried; without it, it is the
//! one built along, which has none but the CPU. A kind that is not there is left out
//! with the reason, or fails if `TENSORD_REQUIRE` (such as `vulkan,cuda`) names it.
//! `TENSORD_KERNELS` names a directory that keeps compiled kernels from run to run.

mod custom_op;
mod host;
mod isolation;
mod mixed;
mod suite;
