//! Tests that must pass on every kind of device that the build supports and this host has;
//! `tensord_testkit::host` defines the build.

mod custom_op;
mod failover;
mod indices;
mod isolation;
mod leases;
mod leftovers;
mod shares;
mod suite;
