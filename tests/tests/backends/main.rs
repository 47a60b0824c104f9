//! What must hold on every kind of device that a build has and this host offers;
//! `tensord_tests::host` says which build that is.

mod custom_op;
mod indices;
mod isolation;
mod leases;
mod leftovers;
mod suite;
