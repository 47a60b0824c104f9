//! The audit log's entries about clients and workers.

use serde_json::Value;

use super::*;
use crate::audit::{Audit, Settings};

/// Returns whether `entry` has all these fields and values.
fn is_in(expected: &[(&str, Value)], entry: &Value) -> bool {
    expected.iter().all(|(key, value)| entry[*key] == *value)
}

#[tokio::test]
async fn audit_log_records_admissions_grants_denials_and_ends() {
    let log = tempfile::tempdir().unwrap();
    let settings = Settings {
        directory: log.path().into(),
        file_bytes: 1 << 20,
        files: 2,
    };
    let audit = Audit::open(settings).unwrap();
    let options = Options {
        audit: audit.clone(),
        ..options()
    };
    let rig = Rig::with(options).await;
    let mut worker = rig.worker(7, 1).await;
    rig.wait_for_status(|status| status.workers.len() == 1)
        .await;
    let mut client = rig.client(9).await;
    client.request(1, 1).await;
    let lease = client.granted().await;
    // Requests more devices than the pool has.
    client.request(2, 500).await;
    client.refused(2).await;
    client.release(&lease).await;
    assert_eq!(worker.end_lease().await, lease.lease_id);
    let wrong = Secret::new("0123456789abcdef");
    rig.status_with(&wrong).await.unwrap_err();
    client.close().await;
    worker.close().await;
    // A worker whose stream breaks stays in the pool for a while, but the end of its stream
    // is logged at once.
    let path = log.path().join("audit.jsonl");
    let last = async {
        while std::fs::read_to_string(&path).unwrap().lines().count() < 8 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    with_timeout("eighth entry", last).await;
    rig.scheduler.stop().await;
    // Dropping the last handle ensures that all entries are on disk.
    drop(audit);

    let text = std::fs::read_to_string(&path).unwrap();
    check_entries(&text, lease.lease_id);
    assert!(!text.contains(wrong.reveal()), "a token is on record");
}

/// Checks the entries about client 9, worker 7 and their lease.
fn check_entries(text: &str, lease: u64) {
    let entries: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let (client, worker) = (
        Value::from(credential(9).hash().client_id().to_string()),
        Value::from(worker_id(7).to_string()),
    );
    let lease = Value::from(format!("{lease:016x}"));
    let of = |event: &str| ("event", Value::from(event));
    let mut at = 0;
    for expected in [
        vec![
            of("admitted"),
            ("worker", worker.clone()),
            ("devices", 1.into()),
        ],
        vec![of("admitted"), ("client", client.clone())],
        vec![
            of("granted"),
            ("client", client.clone()),
            ("lease", lease.clone()),
            ("devices", 1.into()),
        ],
        vec![of("denied"), ("client", client.clone())],
        vec![of("ended"), ("worker", worker.clone()), ("lease", lease)],
        vec![
            of("denied"),
            ("role", "program".into()),
            ("client", Value::Null),
        ],
        vec![of("ended"), ("client", client), ("lease", Value::Null)],
        vec![of("ended"), ("worker", worker), ("lease", Value::Null)],
    ] {
        let found = entries[at..]
            .iter()
            .position(|entry| is_in(&expected, entry));
        let found = found.unwrap_or_else(|| panic!("no {expected:?} from {at} on in\n{text}"));
        let entry = &entries[at + found];
        let address = entry["address"].as_str().unwrap_or_default();
        assert!(address.starts_with("127.0.0.1:"), "from where? {entry}");
        assert!(
            entry["event"] != "denied" || entry["reason"].is_string(),
            "why? {entry}"
        );
        at += found + 1;
    }
}
