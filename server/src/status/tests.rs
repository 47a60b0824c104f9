//! Status replies, and the exact texts they are formatted as.

use tensord_proto::v1::{Device, DeviceFingerprint, DeviceStatus, WorkerStatus};

use super::*;

fn device(kind: &str, name: &str, gib: u64) -> DeviceStatus {
    let device = Device {
        kind: kind.into(),
        name: name.into(),
        memory_bytes: gib << 30,
        fingerprint: Some(DeviceFingerprint {
            hash: vec![1, 2].into(),
            is_exact: true,
        }),
    };
    DeviceStatus {
        device: Some(device),
        ..DeviceStatus::default()
    }
}

fn reply() -> StatusReply {
    let busy = DeviceStatus {
        leased: true,
        sessions: 2,
        live_bytes: 13_002_342,
        reserved_bytes: Some(64 << 20),
        ops_executed: 1_234_567,
        ..device("cuda", "NVIDIA H200", 141)
    };
    let gpu = WorkerStatus {
        name: "gpu-1".into(),
        address: "10.0.0.5:7462".into(),
        last_beat_ms: 412,
        devices: vec![busy, device("cuda", "NVIDIA H200", 141)],
        draining: true,
    };
    let cpu = WorkerStatus {
        name: "cpu-1".into(),
        address: "[fd00::9]:7462".into(),
        last_beat_ms: 7_100,
        devices: vec![device("flex", "16 cores", 64)],
        draining: false,
    };
    StatusReply {
        software: "tensord 0.1.0".into(),
        uptime_ms: 3_723_000,
        workers: vec![gpu, cpu],
        waiting_requests: 3,
        leases: 1,
    }
}

#[test]
fn the_table_has_a_line_for_the_pool_and_a_row_for_each_device() {
    let expected = "\
2 workers, 3 devices (1 leased), 1 lease, 3 requests waiting; tensord 0.1.0, up 1 h 2 min

WORKER                  ADDRESS         DEVICE         KIND     MEMORY  LEASED  SESSIONS      LIVE  RESERVED        OPS
gpu-1 (draining)        10.0.0.5:7462   0 NVIDIA H200  cuda  141.0 GiB  yes            2  12.4 MiB  64.0 MiB  1,234,567
                                        1 NVIDIA H200  cuda  141.0 GiB  -              0       0 B         -          0
cpu-1 (silent for 7 s)  [fd00::9]:7462  0 16 cores     flex   64.0 GiB  -              0       0 B         -          0
";
    assert_eq!(table(&reply()), expected, "\n{}", table(&reply()));
}

#[test]
fn busy_devices_are_not_shown_as_free() {
    let mut reply = reply();
    reply.workers[0].devices[1].ending = true;
    reply.workers[1].devices[0].out_of_service = "it answers no test\u{1b}".into();
    let expected = "\
2 workers, 3 devices (1 leased, 1 ending, 1 out of service), 1 lease, 3 requests waiting; tensord 0.1.0, up 1 h 2 min

WORKER                  ADDRESS         DEVICE         KIND     MEMORY  LEASED  SESSIONS      LIVE  RESERVED        OPS
gpu-1 (draining)        10.0.0.5:7462   0 NVIDIA H200  cuda  141.0 GiB  yes            2  12.4 MiB  64.0 MiB  1,234,567
                                        1 NVIDIA H200  cuda  141.0 GiB  ending         0       0 B         -          0
cpu-1 (silent for 7 s)  [fd00::9]:7462  0 16 cores     flex   64.0 GiB  out            0       0 B         -          0

Device 0 of cpu-1 is out of service: it answers no test\\u{1b}
";
    assert_eq!(table(&reply), expected, "\n{}", table(&reply));
    let value: serde_json::Value = serde_json::from_str(&json(&reply)).unwrap();
    assert_eq!(value["workers"][0]["devices"][1]["ending"], true);
    let out = &value["workers"][1]["devices"][0]["out_of_service"];
    assert_eq!(out, "it answers no test\u{1b}");
}

#[test]
fn shared_devices_show_the_shares_of_visible_leases() {
    let mut reply = reply();
    let mut share = |worker: usize, index: usize, permille, leases| {
        let device = &mut reply.workers[worker].devices[index];
        device.leased = true;
        (device.shared_permille, device.shares) = (permille, leases);
    };
    share(0, 0, 750, 2);
    share(0, 1, 125, 1);
    // Others have shares of it.
    share(1, 0, 0, 0);
    let expected = "\
2 workers, 3 devices (1 leased, 2 shared), 1 lease, 3 requests waiting; tensord 0.1.0, up 1 h 2 min

WORKER                  ADDRESS         DEVICE         KIND     MEMORY  LEASED             SESSIONS      LIVE  RESERVED        OPS
gpu-1 (draining)        10.0.0.5:7462   0 NVIDIA H200  cuda  141.0 GiB  75 % by 2 leases          2  12.4 MiB  64.0 MiB  1,234,567
                                        1 NVIDIA H200  cuda  141.0 GiB  12.5 % by 1 lease         0       0 B         -          0
cpu-1 (silent for 7 s)  [fd00::9]:7462  0 16 cores     flex   64.0 GiB  yes                       0       0 B         -          0
";
    assert_eq!(table(&reply), expected, "\n{}", table(&reply));
    let value: serde_json::Value = serde_json::from_str(&json(&reply)).unwrap();
    let shared = &value["workers"][0]["devices"][1]["shared"];
    let expected = serde_json::json!({
        "permille": 125, "leases": 1
    });
    assert_eq!(*shared, expected);
}

#[test]
fn empty_pool_shows_instructions() {
    let empty = StatusReply {
        software: "tensord 0.1.0".into(),
        ..StatusReply::default()
    };
    let expected = "\
0 workers, 0 devices (0 leased), 0 leases, 0 requests waiting; tensord 0.1.0, up 0 s

No worker has joined yet: start one with `tensord worker`.
";
    assert_eq!(table(&empty), expected);
}

#[test]
fn json_has_the_same_content() {
    let text = json(&reply());
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(value["workers"][0]["devices"][0]["ops_executed"], 1_234_567);
    assert_eq!(value["workers"][1]["last_beat_ms"], 7_100);
    let expected = r#"{
  "software": "tensord 0.1.0",
  "uptime_ms": 0,
  "leases": 0,
  "waiting_requests": 0,
  "workers": [
    {
      "name": "cpu-1",
      "address": "h:1",
      "last_beat_ms": 5,
      "draining": false,
      "devices": [
        {
          "index": 0,
          "kind": "flex",
          "name": "16 cores",
          "memory_bytes": 68719476736,
          "fingerprint": {
            "hash": "0102",
            "exact": true
          },
          "leased": false,
          "shared": null,
          "ending": false,
          "out_of_service": null,
          "sessions": 0,
          "live_bytes": 0,
          "reserved_bytes": null,
          "ops_executed": 0
        }
      ]
    }
  ]
}
"#;
    let one = StatusReply {
        software: "tensord 0.1.0".into(),
        workers: vec![WorkerStatus {
            name: "cpu-1".into(),
            address: "h:1".into(),
            last_beat_ms: 5,
            devices: vec![device("flex", "16 cores", 64)],
            draining: false,
        }],
        ..StatusReply::default()
    };
    assert_eq!(json(&one), expected);
}

#[test]
fn control_sequences_from_the_pool_are_escaped() {
    let mut reply = reply();
    reply.workers[0].name = "gpu\u{1b}[2J\nforged".into();
    reply.workers[1].devices[0] = device("flex\r", &"x".repeat(5000), 1);
    reply.software = "tensord\u{7}".into();
    let shown = table(&reply);
    assert!(shown.contains("gpu\\u{1b}[2J\\nforged"), "{shown}");
    assert!(
        shown.contains("flex\\r") && shown.contains("tensord\\u{7}"),
        "{shown}"
    );
    assert!(!shown.contains(['\u{1b}', '\r', '\u{7}']) && shown.lines().count() == 6);
    assert!(
        shown.lines().all(|line| line.chars().count() < 500),
        "{shown}"
    );
}
