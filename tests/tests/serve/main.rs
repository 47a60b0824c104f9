//! Models of a pool of real processes, served to real clients.

mod client;
mod models;
mod protocol;
mod replicas;
mod requests;
mod triton;
