//! What the integration tests and the benchmarks share: real processes on loopback, raw
//! clients that can break any rule of the protocol, and models and data to train.
//!
//! No crate of the product depends on this one. It depends on `tensord-client` alone among
//! those that compute: it starts the scheduler and the workers as processes.

pub mod administrator;
pub mod cluster;
pub mod digits;
pub mod gateway;
pub mod host;
pub mod models;
pub mod quiet;
pub mod random_kills;
pub mod raw;
pub mod relay;
pub mod replicas;
pub mod resource_usage;
pub mod s3;
pub mod training;
