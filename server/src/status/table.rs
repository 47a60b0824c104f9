//! A pool's status for people: a line that sums it up, and a row a device.

use tensord_proto::{
    text::{NAME_CHARS, foreign},
    v1::{DeviceStatus, StatusReply, WorkerStatus},
};

use crate::{human, table};

const HEADER: [&str; 10] = [
    "WORKER", "ADDRESS", "DEVICE", "KIND", "MEMORY", "LEASED", "SESSIONS", "LIVE", "RESERVED",
    "OPS",
];

/// Columns of numbers.
const RIGHT: [usize; 5] = [4, 6, 7, 8, 9];

/// A worker that was not heard for longer than this is shown as silent: it
/// missed at least two heartbeats.
const SILENT_MS: u64 = 3000;

/// The text for `reply`, each line with its end.
pub(crate) fn table(reply: &StatusReply) -> String {
    let mut text = summary(reply);
    text.push('\n');
    if reply.workers.is_empty() {
        text.push_str("\nNo worker has joined yet: start one with `tensord worker`.\n");
        return text;
    }
    text.push('\n');
    let rows = reply.workers.iter().flat_map(rows);
    text.push_str(&table::text(HEADER, &RIGHT, rows));
    text
}

/// Counts, and what runs there since when.
fn summary(reply: &StatusReply) -> String {
    let devices = || reply.workers.iter().flat_map(|worker| &worker.devices);
    format!(
        "{}, {} ({} leased), {}, {} waiting; {}, up {}",
        human::plural(reply.workers.len(), "worker"),
        human::plural(devices().count(), "device"),
        devices().filter(|device| device.leased).count(),
        human::plural(reply.leases as usize, "lease"),
        human::plural(reply.waiting_requests as usize, "request"),
        shown(&reply.software),
        human::duration(reply.uptime_ms),
    )
}

/// Text of a pool as a terminal may have it.
fn shown(text: &str) -> String {
    foreign(text, NAME_CHARS).to_string()
}

fn rows(worker: &WorkerStatus) -> Vec<[String; 10]> {
    let name = shown(&worker.name);
    let name = match worker.last_beat_ms {
        silent if silent > SILENT_MS => {
            format!("{name} (silent for {})", human::duration(silent))
        }
        _ if worker.draining => format!("{name} (draining)"),
        _ => name,
    };
    let mut place = [name, shown(&worker.address)];
    let mut rows = Vec::new();
    for (index, device) in worker.devices.iter().enumerate() {
        let [worker, address] = std::mem::take(&mut place);
        let [device, kind, memory, leased, sessions, live, reserved, ops] = cells(index, device);
        rows.push([
            worker, address, device, kind, memory, leased, sessions, live, reserved, ops,
        ]);
    }
    if rows.is_empty() {
        let [worker, address] = place;
        let mut row: [String; 10] = Default::default();
        (row[0], row[1]) = (worker, address);
        rows.push(row);
    }
    rows
}

/// The columns that tell of one device.
fn cells(index: usize, status: &DeviceStatus) -> [String; 8] {
    let device = status.device.clone().unwrap_or_default();
    let leased = if status.leased { "yes" } else { "-" };
    [
        format!("{index} {}", shown(&device.name)),
        shown(&device.kind),
        human::bytes(device.memory_bytes),
        leased.into(),
        human::count(status.sessions.into()),
        human::bytes(status.live_bytes),
        status.reserved_bytes.map_or("-".into(), human::bytes),
        human::count(status.ops_executed),
    ]
}
