//! Why a lease or request waits, in words.

use std::fmt::Write;

use tensord_proto::{
    ids::LeaseId,
    v1::{DevicesOfLease, NeededDevices, Waiting},
};

use super::{suitable_text, waiter, wanted_text};
use crate::human;

/// Width of the names of the lines after the first one.
const NAME_WIDTH: usize = 10;

/// Returns what a lease or request waits for, who has that, under which rule, and what would end the
/// wait. `count` is the number of all that wait.
pub(super) fn explanation(waiting: &Waiting, count: u32) -> String {
    let id = LeaseId(waiting.lease_id);
    let mut text = format!(
        "{} {id}{} waits for {}\n",
        waiter(waiting),
        holder(&waiting.tenant, &waiting.token),
        wanted_text(waiting)
    );
    let mut line = |name: &str, value: &str| {
        // Writing to a string does not fail.
        let _ = writeln!(text, "  {name:NAME_WIDTH$} {value}");
    };
    if let Some(waited_ms) = waiting.waited_ms {
        line("waited", &human::duration(waited_ms));
    }
    if waiting.requested.is_empty() {
        let cause = match waiting.cause.is_empty() {
            true => "it was suspended, and resumed",
            false => &waiting.cause,
        };
        line("cause", cause);
    }
    let position = format!("{} of {count}; {}", waiting.position, rule(waiting));
    line("position", &position);
    for needed in &waiting.needs {
        line("devices", &devices_text(needed));
        let leased = needed.leased_by.iter().map(|it| leased_text(it, "has"));
        let waiting_leases = needed.held_back_for.iter();
        let held_back = waiting_leases.map(|it| leased_text(it, "waits, and gets"));
        for lease in leased.chain(held_back) {
            line("", &lease);
        }
    }
    if !waiting.receivers.is_empty() {
        let receivers = waiting.receivers.join(" and ");
        line(
            "moving",
            &format!("its snapshots are being sent to {receivers}"),
        );
    }
    line("ends when", &ends_text(waiting));
    if let Some(ends_in_ms) = waiting.ends_in_ms {
        let ends_in = human::duration(ends_in_ms);
        line(
            "time limit",
            &format!("the lease ends in {ends_in} if it has no devices by then"),
        );
    }
    line("estimate", "none: leases have no limit of time");
    text
}

/// Returns the rule by which it gets devices.
fn rule(waiting: &Waiting) -> &'static str {
    match waiting.requested.is_empty() {
        true => "leases that are to go on get devices before all requests",
        false => {
            "requests get devices in the order of their arrival, but a later one that fits does not wait"
        }
    }
}

fn devices_text(needed: &NeededDevices) -> String {
    let place = match needed.at_one_worker {
        true => " at one worker",
        false => "",
    };
    let count = human::plural(needed.count as usize, "device");
    format!(
        "{count}{place}; of those that would do: {}",
        suitable_text(needed)
    )
}

fn leased_text(devices: &DevicesOfLease, has: &str) -> String {
    let count = human::plural(devices.count as usize, "device");
    let id = LeaseId(devices.lease_id);
    format!(
        "lease {id}{} {has} {count}",
        holder(&devices.tenant, &devices.token)
    )
}

fn holder(tenant: &str, token: &str) -> String {
    match tenant.is_empty() {
        // No client has claimed it since the scheduler's restart.
        true => String::new(),
        false => format!(" of tenant {tenant} (token {token})"),
    }
}

/// Returns what would end the wait.
fn ends_text(waiting: &Waiting) -> String {
    let any = |count: fn(&NeededDevices) -> u32| waiting.needs.iter().any(|it| count(it) > 0);
    let ends = [
        (!waiting.receivers.is_empty(), "the snapshots have arrived"),
        (
            any(|it| it.leased),
            "one of these leases ends or is suspended",
        ),
        (
            any(|it| it.held_back),
            "the leases that wait have got their devices",
        ),
        (any(|it| it.ending), "an ended lease has left its devices"),
        (any(|it| it.out_of_service), "a device is in service again"),
        (any(|it| it.unreachable), "a worker connects again"),
        (any(|it| it.draining), "a worker no longer drains"),
    ];
    let joins = "a worker with such devices joins";
    let ends = ends
        .iter()
        .filter(|(applies, _)| *applies)
        .map(|(_, end)| *end);
    let ends: Vec<_> = ends.chain([joins]).collect();
    ends.join(", or ")
}

#[cfg(test)]
mod tests {
    use super::{super::tests::listed, *};

    #[test]
    fn request_is_told_who_has_the_devices() {
        let listed = listed();
        let expected = "\
request 000000000000009b of tenant default (token program) waits for 2 devices of kind cuda with 40.0 GiB each
  waited     1 min 1 s
  position   2 of 2; requests get devices in the order of their arrival, but a later one that fits does not wait
  devices    2 devices; of those that would do: 1 free, 6 leased, 1 held back, 1 out of service
             lease 000000000000009c of tenant research (token ci) has 4 devices
             lease 000000000000009d of tenant research (token night) has 2 devices
             lease 000000000000009a of tenant research (token ci) waits, and gets 1 device
  ends when  one of these leases ends or is suspended, or the leases that wait have got their devices, or a device is in service again, or a worker with such devices joins
  estimate   none: leases have no limit of time
";
        assert_eq!(explanation(&listed.waiting[1], listed.count), expected);
    }

    #[test]
    fn lease_is_told_why_it_has_no_devices() {
        let listed = listed();
        let expected = "\
lease 000000000000009a of tenant research (token ci) waits for 3 devices of 2 workers, like those it had
  cause      worker gpu-1 was lost
  position   1 of 2; leases that are to go on get devices before all requests
  devices    1 device at one worker; of those that would do: 1 free
  devices    2 devices at one worker; of those that would do: none
  moving     its snapshots are being sent to gpu-3
  ends when  the snapshots have arrived, or a worker with such devices joins
  time limit the lease ends in 59 min 0 s if it has no devices by then
  estimate   none: leases have no limit of time
";
        assert_eq!(explanation(&listed.waiting[0], listed.count), expected);
    }
}
