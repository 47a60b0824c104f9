//! NVIDIA's client from PyPI, unchanged, over TLS.

use std::{fs, process::Command, time::Duration};

use tensord_serve::Serve;
use tensord_testkit::{
    cluster::{Cluster, Process},
    host,
};

use crate::models::{READY_WITHIN, several};

/// The variable that names the directory with the client's Python modules: what
/// `pip install --target DIR -r .ci/triton-client.txt` has left there.
const MODULES: &str = "TENSORD_TRITON_CLIENT";

/// How long the script may take: it loads some hundred Python modules.
const DEADLINE: Duration = Duration::from_secs(120);

#[test]
fn nvidias_client_works() {
    let Some(modules) = std::env::var_os(MODULES) else {
        let reason = format!("{MODULES} is not set");
        assert!(!host::is_required("triton"), "there is no client: {reason}");
        println!("left out, as there is no client of NVIDIA's: {reason}");
        return;
    };
    let cluster = Cluster::start(&["flex"]);
    let serve = Serve::new(cluster.pool()).model(several());
    let server = serve.bind("127.0.0.1:0").expect("the server starts");
    assert!(server.wait_ready(READY_WITHIN));
    let certificate = cluster.path("server.pem");
    fs::write(&certificate, server.certificate().expect("it has TLS")).unwrap();
    let address = format!("localhost:{}", server.address().port());
    let mut command = Command::new("python3");
    command
        .arg(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/serve/triton.py"
        ))
        .arg(address)
        .arg(&certificate)
        .env(
            "SERVE_TOKEN",
            server.token().expect("it has a token").reveal(),
        )
        .env("PYTHONPATH", modules)
        .env("NO_PROXY", "localhost");
    let mut script = Process::spawn(command, cluster.path("triton.log"));
    let is_done = |line: &str| (line == "done").then_some(());
    let done = script.try_wait_for("the last line", DEADLINE, is_done);
    done.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(script.exit_code(DEADLINE), Some(0));
}
