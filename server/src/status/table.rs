//! A pool's status for people: a summary line, and one row per device.

use tensord_proto::{
    share::Percent,
    text::{MESSAGE_CHARS, NAME_CHARS, sanitize},
    v1::{DeviceStatus, StatusReply, WorkerStatus},
};

use crate::{human, table};

const HEADER: [&str; 10] = [
    "WORKER", "ADDRESS", "DEVICE", "KIND", "MEMORY", "LEASED", "SESSIONS", "LIVE", "RESERVED",
    "OPS",
];

/// Columns of numbers, which are aligned right.
const RIGHT: [usize; 5] = [4, 6, 7, 8, 9];

/// How long after its last heartbeat a worker is shown as silent, in milliseconds.
/// By then it has missed at least five heartbeats.
const SILENT_MS: u64 = 3000;

/// Formats `reply` as text, each line with its newline.
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
    let outages: String = reply.workers.iter().flat_map(outages).collect();
    if !outages.is_empty() {
        text.push('\n');
        text.push_str(&outages);
    }
    text
}

/// Formats the counts of the pool, and the scheduler's version and uptime.
fn summary(reply: &StatusReply) -> String {
    let devices = || reply.workers.iter().flat_map(|worker| &worker.devices);
    let mut states = format!(
        "{} leased",
        devices()
            .filter(|device| device.leased && device.shared_permille == 0)
            .count()
    );
    let is_shared = |device: &&DeviceStatus| device.shared_permille > 0;
    let not_free = [
        ("shared", devices().filter(is_shared).count()),
        ("ending", devices().filter(|device| device.ending).count()),
        (
            "out of service",
            devices().filter(|device| is_out_of_service(device)).count(),
        ),
    ];
    for (state, count) in not_free.iter().filter(|(_, count)| *count > 0) {
        states.push_str(&format!(", {count} {state}"));
    }
    format!(
        "{}, {} ({states}), {}, {} waiting; {}, up {}",
        human::plural(reply.workers.len(), "worker"),
        human::plural(devices().count(), "device"),
        human::plural(reply.leases as usize, "lease"),
        human::plural(reply.waiting_requests as usize, "request"),
        sanitized(&reply.software),
        human::duration(reply.uptime_ms),
    )
}

/// Escapes and cuts text from the pool, so that it is safe on a terminal.
fn sanitized(text: &str) -> String {
    sanitize(text, NAME_CHARS).to_string()
}

fn rows(worker: &WorkerStatus) -> Vec<[String; 10]> {
    let name = sanitized(&worker.name);
    let name = match worker.last_beat_ms {
        silent if silent > SILENT_MS => {
            format!("{name} (silent for {})", human::duration(silent))
        }
        _ if worker.draining => format!("{name} (draining)"),
        _ => name,
    };
    let mut place = [name, sanitized(&worker.address)];
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

/// Formats the columns for one device.
fn cells(index: usize, status: &DeviceStatus) -> [String; 8] {
    let device = status.device.clone().unwrap_or_default();
    let leased = match status {
        _ if status.shared_permille > 0 => shared_text(status),
        _ if status.leased => "yes".into(),
        _ if status.ending => "ending".into(),
        _ if is_out_of_service(status) => "out".into(),
        _ => "-".into(),
    };
    [
        format!("{index} {}", sanitized(&device.name)),
        sanitized(&device.kind),
        human::bytes(device.memory_bytes),
        leased,
        human::count(status.sessions.into()),
        human::bytes(status.live_bytes),
        status.reserved_bytes.map_or("-".into(), human::bytes),
        human::count(status.ops_executed),
    ]
}

/// Returns which part of a device leases have, such as `75 % by 2 leases`.
fn shared_text(status: &DeviceStatus) -> String {
    let part = Percent(status.shared_permille);
    let leases = human::plural(status.shares as usize, "lease");
    format!("{part} by {leases}")
}

fn is_out_of_service(device: &DeviceStatus) -> bool {
    !device.out_of_service.is_empty()
}

/// Formats one line for each device that its worker cannot offer, with the reason.
fn outages(worker: &WorkerStatus) -> Vec<String> {
    let line = |(index, device): (usize, &DeviceStatus)| {
        let name = sanitized(&worker.name);
        let reason = sanitize(&device.out_of_service, MESSAGE_CHARS);
        format!("Device {index} of {name} is out of service: {reason}\n")
    };
    let devices = worker.devices.iter().enumerate();
    devices
        .filter(|(_, device)| is_out_of_service(device))
        .map(line)
        .collect()
}
