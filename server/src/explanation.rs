//! Why a lease or request waits, in words: for `tensord why`, and for the program that owns it.

use tensord_proto::{
    ids::LeaseId,
    share::Percent,
    v1::{DevicesOfLease, NeededDevices, TenantInfo, Waiting},
};

use crate::{human, table, tenant_text};

/// The most holders of suitable devices that a program is shown for each part of what it needs. With more lines, the
/// last ones would be cut off, which have what ends the wait.
const MAX_HOLDERS: usize = 16;

/// For whom an explanation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reader {
    Administrator {
        /// The number of leases and requests that wait.
        count: u32,
    },
    /// The program that owns the lease or request. The text has no lease or request of another tenant, and not how long
    /// the program has waited, which it knows.
    Program,
}

/// Returns what a lease or request waits for, who has that, under which rule, and what would end the
/// wait.
pub(crate) fn explanation(waiting: &Waiting, reader: Reader) -> String {
    let id = LeaseId(waiting.lease_id);
    let holder = match reader {
        Reader::Administrator { .. } => holder(&waiting.tenant, &waiting.token),
        Reader::Program => String::new(),
    };
    let mut text = format!(
        "{} {id}{holder} waits for {}\n",
        waiter(waiting),
        wanted_text(waiting)
    );
    let lines = [
        position_lines(waiting, reader),
        reservation_lines(waiting, reader),
        device_lines(waiting, reader),
        end_lines(waiting),
    ];
    for (name, value) in lines.into_iter().flatten() {
        table::push_line(&mut text, name, &value);
    }
    text
}

/// A line of an explanation: its name, or nothing if it goes on with the line before, and its text.
type Line = (&'static str, String);

/// Returns since when something waits and why, where, and what its tenant has.
fn position_lines(waiting: &Waiting, reader: Reader) -> Vec<Line> {
    let mut lines = Vec::new();
    if let (Some(waited_ms), Reader::Administrator { .. }) = (waiting.waited_ms, reader) {
        lines.push(("waited", human::duration(waited_ms)));
    }
    if waiting.requested.is_empty() {
        let cause = match waiting.cause.is_empty() {
            true => "it was suspended, and resumed",
            false => &waiting.cause,
        };
        lines.push(("cause", cause.to_owned()));
    }
    let position = match reader {
        Reader::Administrator { count } => format!("{} of {count}", waiting.position),
        Reader::Program => waiting.position.to_string(),
    };
    lines.push(("position", format!("{position}; {}", rule(waiting))));
    let tenant = waiting.tenant_info.as_ref();
    lines.extend(tenant.map(|tenant| ("tenant", tenant_text(tenant))));
    lines
}

/// Returns whether something waits because of the limit of its tenant, or of a reservation.
fn reservation_lines(waiting: &Waiting, reader: Reader) -> Vec<Line> {
    let mut lines = Vec::new();
    if waiting.at_limit {
        let limit = "there may be enough devices, but its tenant would have more than its limit";
        lines.push(("limit", limit.into()));
    }
    if waiting.has_reservation {
        let own = "later requests get its devices only with leases that can be suspended for it";
        lines.push(("reserved", own.into()));
    }
    if let Some(id) = waiting.reserved_for {
        let request = match reader {
            Reader::Administrator { .. } => format!("request {}", LeaseId(id)),
            Reader::Program => "a request".into(),
        };
        let of_other = format!(
            "some devices are for {request}, which comes first and has waited for long; a durable lease on devices of one kind could have them meanwhile"
        );
        lines.push(("reserved", of_other));
    }
    lines
}

/// Returns which devices something needs, and who has suitable ones, as far as the reader may know.
fn device_lines(waiting: &Waiting, reader: Reader) -> Vec<Line> {
    let is_shown = |devices: &&DevicesOfLease| match reader {
        Reader::Administrator { .. } => true,
        // The tenant of a lease that no client has claimed since the scheduler's restart is not known.
        Reader::Program => !devices.tenant.is_empty() && devices.tenant == waiting.tenant,
    };
    let of_needed = |needed: &NeededDevices| {
        let leased = needed.leased_by.iter().filter(is_shown).map(leased_text);
        let held_back = needed.held_back_for.iter().filter(is_shown);
        let held_back = held_back.map(held_back_text);
        let holders: Vec<_> = leased.chain(held_back).collect();
        let shown = match reader {
            Reader::Administrator { .. } => holders.len(),
            Reader::Program => holders.len().min(MAX_HOLDERS),
        };
        let more = holders.len() - shown;
        let more = (more > 0).then(|| format!("and {more} more of its tenant"));
        let holders = holders.into_iter().take(shown).chain(more);
        let holders = holders.map(|text| ("", text));
        let needed = ("devices", devices_text(needed));
        std::iter::once(needed).chain(holders).collect::<Vec<_>>()
    };
    waiting.needs.iter().flat_map(of_needed).collect()
}

/// Returns what else a lease waits for, what ends the wait, and when.
fn end_lines(waiting: &Waiting) -> Vec<Line> {
    let mut lines = Vec::new();
    if waiting.client_away {
        let away = "not connected to the scheduler; the lease goes on once it is";
        lines.push(("program", away.into()));
    }
    for left in &waiting.left_workers {
        let (name, remaining) = (&left.name, human::duration(left.remaining_ms));
        let text = format!(
            "worker {name}, which could not be reached, or could not reach others; the lease may go on there again in {remaining}"
        );
        lines.push(("has left", text));
    }
    if !waiting.receivers.is_empty() {
        let receivers = waiting.receivers.join(" and ");
        lines.push((
            "moving",
            format!("its snapshots are being sent to {receivers}"),
        ));
    }
    lines.push(("may end if", ends_text(waiting)));
    if let Some(ends_in_ms) = waiting.ends_in_ms {
        let ends_in = human::duration(ends_in_ms);
        let missing = match waiting.client_away {
            true => "its program is not connected",
            false => "it has no devices",
        };
        let ends = format!("the lease ends in {ends_in} if {missing} by then");
        lines.push(("time limit", ends));
    }
    lines.push(("estimate", estimate(waiting)));
    lines
}

/// Returns when a lease or request gets devices, as far as that is known, and how it is known.
fn estimate(waiting: &Waiting) -> String {
    match waiting.enough_in_ms {
        Some(0) => "soon, if the leases that passed it can be suspended: with their devices, there are enough".into(),
        Some(millis) => format!(
            "in {} at the latest, unless others before it get the devices: leases that declare how long they take (max_duration) will have ended by then",
            human::duration(millis)
        ),
        None => {
            "none, as too few leases with suitable devices declare how long they take (max_duration)"
                .into()
        }
    }
}

/// Returns the rule by which a lease or request gets devices.
fn rule(waiting: &Waiting) -> &'static str {
    match waiting.requested.is_empty() {
        true if waiting.reclaimed => {
            "it goes on after requests that are entitled to devices, and before all other requests"
        }
        true => "leases that are to go on get devices before requests",
        false if waiting.guaranteed => {
            "it is within its tenant's guarantee, and such requests come first"
        }
        false => {
            "the tenant with the least present and past use, by weight, is next; a later request that fits need not wait"
        }
    }
}

/// Returns what a tenant has, and its guarantee, limit and weight.
fn tenant_text(tenant: &TenantInfo) -> String {
    let mut texts = vec![format!(
        "{} has {}",
        tenant.name,
        tenant_text::has_text(tenant)
    )];
    let guarantee = tenant_text::guarantee_text(tenant);
    if !guarantee.is_empty() {
        texts.push(format!("guaranteed {guarantee}"));
    }
    let limit = tenant_text::limit_text(tenant);
    if !limit.is_empty() {
        texts.push(format!("limit {limit}"));
    }
    texts.push(format!("past use {}", tenant_text::past_text(tenant)));
    texts.push(format!("weight {}", tenant.weight));
    texts.join("; ")
}

fn devices_text(needed: &NeededDevices) -> String {
    let count = count_text(needed.count, needed.share_permille);
    let place = match (needed.at_one_worker, are_free_ones_spread(needed)) {
        (true, true) => {
            let most = needed.free_at_one_worker;
            format!(" at one worker (at most {most} free at one)")
        }
        (true, false) => " at one worker".into(),
        (false, _) => String::new(),
    };
    format!("{count}{place}; suitable: {}", suitable_text(needed))
}

/// Returns a number of devices in words, or the share of one, such as `25 % of a device`.
fn count_text(count: u32, share_permille: u32) -> String {
    match share_permille {
        0 => human::plural(count as usize, "device"),
        permille => format!("{} of a device", Percent(permille)),
    }
}

/// Returns whether all devices must be of one worker, and the free ones are of several.
fn are_free_ones_spread(needed: &NeededDevices) -> bool {
    needed.at_one_worker && needed.free > needed.free_at_one_worker
}

fn leased_text(devices: &DevicesOfLease) -> String {
    let count = count_text(devices.count, devices.share_permille);
    let id = LeaseId(devices.lease_id);
    format!(
        "lease {id}{} has {count}",
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

fn held_back_text(devices: &DevicesOfLease) -> String {
    let id = LeaseId(devices.lease_id);
    let (count, holder) = (devices.count, holder(&devices.tenant, &devices.token));
    format!("{count} held back for lease or request {id}{holder}, which needs more")
}

/// Returns what may end the wait. One such change may not be enough.
fn ends_text(waiting: &Waiting) -> String {
    let any = |count: fn(&NeededDevices) -> u32| waiting.needs.iter().any(|it| count(it) > 0);
    let is_lease = waiting.requested.is_empty();
    let ends = [
        (waiting.client_away, "its program connects again"),
        (!waiting.receivers.is_empty(), "its snapshots arrive"),
        (
            !waiting.left_workers.is_empty(),
            "the time is over for which it stays away from a worker that it has left",
        ),
        (
            is_lease && !waiting.cause.is_empty() && !waiting.reclaimed,
            "its worker joins again",
        ),
        (
            waiting.at_limit,
            "a lease of its tenant ends or is suspended, an earlier request of the tenant is withdrawn, or its limit is raised",
        ),
        (
            waiting.reserved_for.is_some(),
            "the request for which devices are reserved gets some, or ends",
        ),
        (
            any(|it| it.leased) && !waiting.at_limit,
            "a lease with suitable devices ends or is suspended",
        ),
        (
            any(|it| it.held_back),
            "a lease or request for which devices are held back gets others, or ends",
        ),
        (any(|it| it.ending), "a device is released"),
        (
            waiting.needs.iter().any(are_free_ones_spread),
            "more devices of one worker are free",
        ),
        (any(|it| it.out_of_service), "a device is in service again"),
        (any(|it| it.unreachable), "a worker connects again"),
        (any(|it| it.draining), "a worker no longer drains"),
        (!waiting.at_limit, "a worker with such devices joins"),
    ];
    let ends = ends
        .iter()
        .filter(|(applies, _)| *applies)
        .map(|(_, end)| *end);
    ends.collect::<Vec<_>>().join(", or ")
}

/// Returns what waits: a request or a lease.
pub(crate) fn waiter(waiting: &Waiting) -> &'static str {
    match waiting.requested.is_empty() {
        true => "lease",
        false => "request",
    }
}

/// Returns the devices that are needed, in words.
pub(crate) fn wanted_text(waiting: &Waiting) -> String {
    if !waiting.requested.is_empty() {
        return waiting.requested.clone();
    }
    let counts = waiting.needs.iter().map(|it| it.count as usize);
    let counts: Vec<_> = counts.collect();
    let devices = human::plural(counts.iter().sum(), "device");
    match counts.len() {
        0 | 1 => format!("{devices} like those it had"),
        workers => format!("{devices} of {workers} workers, like those it had"),
    }
}

/// Returns how the suitable devices are used, such as `1 free, 2 leased`.
pub(crate) fn suitable_text(needed: &NeededDevices) -> String {
    let counts = [
        (needed.free, "free"),
        (needed.leased, "leased"),
        (needed.held_back, "held back"),
        (needed.ending, "not released yet"),
        (needed.out_of_service, "out of service"),
        (needed.unreachable, "of workers without connection"),
        (needed.draining, "of workers that drain"),
    ];
    let present = counts.iter().filter(|(count, _)| *count > 0);
    let present: Vec<_> = present.map(|(n, what)| format!("{n} {what}")).collect();
    match present.is_empty() {
        true => "none".into(),
        false => present.join(", "),
    }
}

#[cfg(test)]
pub(crate) mod tests;
