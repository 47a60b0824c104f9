//! Runs every bench with its smallest sizes, with real processes, and checks the JSON.

use std::{path::Path, process::Command};

use serde_json::Value;

/// Paths of the figures in the JSON that programs rely on. Each must be a number, and not below zero.
const FIELDS: &[&str] = &[
    "/machine/cores",
    "/ops/local_us",
    "/ops/burn_remote_us",
    "/ops/tensord_us",
    "/ops/backend_us",
    "/ops/router_floor_us",
    "/wire/mlp/tensord_bytes",
    "/wire/cnn/burn_remote_bytes",
    "/wire/transformer/ops_per_step",
    "/step/mlp/local_ms",
    "/step/cnn/burn_remote_ms",
    "/step/transformer/tensord_ms",
    "/bulk/sizes/0/mib",
    "/bulk/sizes/0/up/tcp_gbs",
    "/bulk/sizes/0/up/tls_gbs",
    "/bulk/sizes/0/down/burn_remote_gbs",
    "/bulk/sizes/0/down/tensord_gbs",
    "/read/rtt_us",
    "/read/burn_remote_us",
    "/read/tensord_us",
    "/read/pipelined_us",
    "/rtt/rtts/0/rtt_ms",
    "/rtt/rtts/1/ratio_to_local",
    "/rtt/rtts/1/burn_remote_ratio",
    "/epoch/epoch1",
    "/epoch/epoch2",
    "/epoch/epoch3",
    "/attach/ms",
    "/transfer/gbs",
    "/transfer/client_bytes",
    "/allreduce/runs/0/mib",
    "/allreduce/runs/0/world",
    "/allreduce/runs/0/busbw_gbs",
    "/allreduce/runs/0/link_gbs",
    "/ddp/steps_per_s/1",
    "/ddp/steps_per_s/2",
    "/ddp/loss_vs_single",
    "/ddp/overlap/silent_ms",
    "/attack/mlp/attack_ms",
    "/attack/cnn/speed_ratio",
    "/scheduler/placements_per_s",
    "/scheduler/p99_ms",
    "/scheduler/workers",
    "/scheduler/leases",
    "/scheduler/waiting",
    "/scheduler/bytes_per_lease",
    "/scheduler/rules/placements_per_s",
    "/scheduler/rules/p99_ms",
    "/scheduler/rules_small/p99_ms",
    "/sharing/share_error",
    "/sharing/work_conserving",
    "/durability/0/state_mib",
    "/durability/0/detect_ms",
    "/durability/0/silent_detect_ms",
    "/durability/0/first_new_answer_ms",
    "/durability/0/restore_ms",
    "/durability/0/redone_s",
    "/durability/0/move_pause_ms",
    "/serve/batch1_rps",
    "/serve/batch32_rps",
    "/serve/direct_batch32_rps",
    "/serve/p99_ms",
    "/serve/failed",
];

/// Such figures that are below zero if what is measured with the smallest sizes is shorter than what is taken off.
const DIFFERENCES: &[&str] = &[
    "/sharing/victim_p99_ratio",
    "/durability/0/overhead",
    "/serve/added_ms",
];

fn bench(args: &[&str]) -> Vec<u8> {
    let output = Command::new(env!("CARGO_BIN_EXE_tensord-bench"))
        .args(args)
        .output();
    let output = output.expect("the system starts processes");
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {log}");
    output.stdout
}

fn plot(json: &str, dir: &Path) -> Vec<String> {
    let file = dir.join("figures.json");
    std::fs::write(&file, json).unwrap();
    let to = dir.to_str().unwrap();
    bench(&["plot", file.to_str().unwrap(), "-o", to]);
    let names = [
        "step.svg",
        "bulk.svg",
        "rtt.svg",
        "allreduce.svg",
        "ddp.svg",
    ];
    names
        .map(|name| std::fs::read_to_string(dir.join(name)).unwrap())
        .to_vec()
}

#[test]
fn every_bench_prints_its_fields_and_they_can_be_plotted() {
    let stdout = String::from_utf8(bench(&["all", "--quick", "--json"])).unwrap();
    let last = stdout.lines().last().expect("the JSON is the last line");
    let json: Value = serde_json::from_str(last).expect("the last line is JSON");
    for field in FIELDS.iter().chain(DIFFERENCES) {
        let value = json.pointer(field).and_then(Value::as_f64);
        let value = value.unwrap_or_else(|| panic!("{field} is no number in {last}"));
        let is_possible = value >= 0.0 || DIFFERENCES.contains(field);
        assert!(is_possible && value.is_finite(), "{field}: {value}");
    }
    assert_eq!(json["ddp"]["weights_identical"], true, "{last}");
    assert!(
        stdout.contains("burn-remote, WebSocket"),
        "there is a table"
    );
    let dir = tempfile::tempdir().unwrap();
    for picture in plot(last, dir.path()) {
        assert!(
            picture.starts_with("<svg") && picture.ends_with("</svg>\n"),
            "{picture}"
        );
        assert!(picture.contains("tensord"), "{picture}");
    }
}
