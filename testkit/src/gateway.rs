//! A gateway for stock Burn programs.

use crate::cluster::{Cluster, Process};

/// The token of the gateways of tests.
pub const GATEWAY_TOKEN: &str = "a-token-of-this-test";

/// A gateway to the pool of a cluster. It ends when this is dropped.
pub struct Gateway {
    _process: Process,
    /// Its URL for Burn's remote client, without the token.
    pub url: String,
}

impl Gateway {
    /// Starts a gateway on loopback, and waits until it listens.
    ///
    /// # Panics
    ///
    /// If it does not start, or prints no URL in time.
    pub fn start(cluster: &Cluster) -> Self {
        let state = cluster.path("gateway");
        let state = state.to_str().expect("the path is UTF-8");
        let args = ["gateway", "--listen", "127.0.0.1:0", "--state", state];
        let env = [
            ("TENSORD_URL", cluster.client_url()),
            ("TENSORD_GATEWAY_TOKEN", GATEWAY_TOKEN),
        ];
        let process = Process::start(&args, &env, cluster.path("gateway.log"));
        let url = process.wait_for("address", |line| {
            let at = line.find("ws://")?;
            let end = line[at..].find(['"', ' ', ')']);
            let end = end.map_or(line.len(), |end| at + end);
            Some(line[at..end].to_owned())
        });
        Self {
            _process: process,
            url,
        }
    }
}
