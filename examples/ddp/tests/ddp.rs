//! Runs the example with a pool of two workers.

use std::{path::Path, time::Duration};

use tensord_testkit::cluster::{Cluster, Process};

#[test]
fn two_devices_of_two_workers_learn() {
    let cluster = Cluster::start(&["flex", "flex"]);
    let env = [("TENSORD_URL", cluster.client_url())];
    let example = Path::new(env!("CARGO_BIN_EXE_ddp"));
    let mut process = Process::start_of(example, &["2"], &env, cluster.path("ddp.log"));
    let accuracy = |line: &str| {
        let words = line.strip_prefix("2 devices, test accuracy ")?;
        words.strip_suffix(" %")?.parse::<f32>().ok()
    };
    let seen = process.try_wait_for("the accuracy", Duration::from_secs(120), accuracy);
    let accuracy = seen.unwrap_or_else(|e| panic!("{e}"));
    assert!(accuracy >= 90.0, "{accuracy} %");
    assert_eq!(process.exit_code(Duration::from_secs(20)), Some(0));
}
