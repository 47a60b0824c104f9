//! A pool's status for people: a line that sums it up, and a row a device.

use comfy_table::{CellAlignment, Table, presets::NOTHING};
use tensord_proto::v1::{DeviceStatus, StatusReply, WorkerStatus};

use super::human;

const HEADER: [&str; 9] = [
    "WORKER", "ADDRESS", "DEVICE", "KIND", "MEMORY", "LEASED", "SESSIONS", "LIVE", "OPS",
];

/// Columns of numbers.
const RIGHT: [usize; 4] = [4, 6, 7, 8];

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
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(HEADER);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    for index in RIGHT {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    reply
        .workers
        .iter()
        .for_each(|worker| add_rows(&mut table, worker));
    text.push('\n');
    for line in table.lines() {
        text.push_str(line.trim_end());
        text.push('\n');
    }
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
        reply.software,
        human::duration(reply.uptime_ms),
    )
}

fn add_rows(table: &mut Table, worker: &WorkerStatus) {
    let name = match worker.last_beat_ms {
        silent if silent > SILENT_MS => {
            format!("{} (silent for {})", worker.name, human::duration(silent))
        }
        _ => worker.name.clone(),
    };
    let mut place = [name, worker.address.clone()];
    if worker.devices.is_empty() {
        table.add_row(place.iter());
    }
    for (index, device) in worker.devices.iter().enumerate() {
        let cells = std::mem::take(&mut place)
            .into_iter()
            .chain(cells(index, device));
        table.add_row(cells);
    }
}

/// The columns that tell of one device.
fn cells(index: usize, status: &DeviceStatus) -> [String; 7] {
    let device = status.device.clone().unwrap_or_default();
    let leased = if status.leased { "yes" } else { "-" };
    [
        format!("{index} {}", device.name),
        device.kind,
        human::bytes(device.memory_bytes),
        leased.into(),
        human::count(status.sessions.into()),
        human::bytes(status.live_bytes),
        human::count(status.ops_executed),
    ]
}
