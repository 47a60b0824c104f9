//! Why a lease or request waits, in words: for `tensord why`, and for the program whose it is.

use tensord_proto::{
    ids::LeaseId,
    share::Percent,
    v1::{DevicesOfLease, NeededDevices, TenantInfo, Waiting},
};

use crate::{human, table, tenant_text};

/// For whom an explanation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reader {
    Administrator {
        /// The number of leases and requests that wait.
        count: u32,
    },
    /// The program whose lease or request it is. The text has no lease or request of another tenant, and
    /// changes only if what is known of the wait does.
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
    let mut line = |name: &str, value: &str| table::push_line(&mut text, name, value);
    if let (Some(waited_ms), Reader::Administrator { .. }) = (waiting.waited_ms, reader) {
        line("waited", &human::duration(waited_ms));
    }
    if waiting.requested.is_empty() {
        let cause = match waiting.cause.is_empty() {
            true => "it was suspended, and resumed",
            false => &waiting.cause,
        };
        line("cause", cause);
    }
    let position = match reader {
        Reader::Administrator { count } => format!("{} of {count}", waiting.position),
        Reader::Program => waiting.position.to_string(),
    };
    line("position", &format!("{position}; {}", rule(waiting)));
    if let Some(tenant) = &waiting.tenant_info {
        line("tenant", &tenant_text(tenant));
    }
    if waiting.at_limit {
        line(
            "limit",
            "there may be enough devices, but its tenant would have more than its limit",
        );
    }
    if waiting.has_reservation {
        line(
            "reserved",
            "later requests get its devices only with leases that can be suspended for it",
        );
    }
    if let Some(id) = waiting.reserved_for {
        let request = match reader {
            Reader::Administrator { .. } => format!("request {}", LeaseId(id)),
            Reader::Program => "a request".into(),
        };
        line(
            "reserved",
            &format!(
                "some devices are for {request}, which comes first and has waited for long; a durable lease on devices of one kind could have them meanwhile"
            ),
        );
    }
    let is_shown = |devices: &&DevicesOfLease| match reader {
        Reader::Administrator { .. } => true,
        // The tenant of a lease that no client has claimed since the scheduler's restart is not known.
        Reader::Program => !devices.tenant.is_empty() && devices.tenant == waiting.tenant,
    };
    for needed in &waiting.needs {
        line("devices", &devices_text(needed));
        let leased = needed.leased_by.iter().filter(is_shown).map(leased_text);
        let held_back = needed.held_back_for.iter().filter(is_shown);
        let held_back = held_back.map(held_back_text);
        for lease in leased.chain(held_back) {
            line("", &lease);
        }
    }
    if waiting.client_away {
        line(
            "program",
            "not connected to the scheduler; the lease goes on once it is",
        );
    }
    if !waiting.receivers.is_empty() {
        let receivers = waiting.receivers.join(" and ");
        line(
            "moving",
            &format!("its snapshots are being sent to {receivers}"),
        );
    }
    line("may end if", &ends_text(waiting));
    if let Some(ends_in_ms) = waiting.ends_in_ms {
        let ends_in = human::duration(ends_in_ms);
        let missing = match waiting.client_away {
            true => "its program is not connected",
            false => "it has no devices",
        };
        line(
            "time limit",
            &format!("the lease ends in {ends_in} if {missing} by then"),
        );
    }
    line("estimate", &estimate(waiting));
    text
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
pub(crate) mod tests {
    use tensord_proto::v1::WaitingList;

    use super::*;
    use crate::commands::tenants::tests::research;

    const BY_ADMIN: Reader = Reader::Administrator { count: 2 };

    /// A request, and a lease that has run on two workers.
    pub(crate) fn listed() -> WaitingList {
        let of_lease = |lease_id, token: &str, count| DevicesOfLease {
            lease_id,
            tenant: "research".into(),
            token: token.into(),
            count,
            share_permille: 0,
        };
        let lease = Waiting {
            lease_id: 0x9a,
            tenant: "research".into(),
            token: "ci".into(),
            position: 1,
            ends_in_ms: Some(3_540_000),
            cause: "worker gpu-1 was lost".into(),
            client_away: true,
            receivers: vec!["gpu-3".into()],
            needs: vec![
                NeededDevices {
                    count: 1,
                    at_one_worker: true,
                    free: 3,
                    free_at_one_worker: 1,
                    ..NeededDevices::default()
                },
                NeededDevices {
                    count: 2,
                    at_one_worker: true,
                    ..NeededDevices::default()
                },
            ],
            ..Waiting::default()
        };
        let request = Waiting {
            lease_id: 0x9b,
            tenant: "research".into(),
            token: "program".into(),
            position: 2,
            tenant_info: Some(research()),
            requested: "2 devices of kind cuda with 40.0 GiB each".into(),
            waited_ms: Some(61_000),
            needs: vec![NeededDevices {
                count: 2,
                free: 1,
                leased: 6,
                held_back: 1,
                out_of_service: 1,
                leased_by: vec![of_lease(0x9c, "ci", 4), of_lease(0x9d, "night", 2)],
                held_back_for: vec![of_lease(0x9a, "ci", 1)],
                ..NeededDevices::default()
            }],
            ..Waiting::default()
        };
        WaitingList {
            waiting: vec![lease, request],
            count: 2,
            lease: None,
        }
    }

    #[test]
    fn explanation_of_a_request_names_the_leases_with_its_devices() {
        let listed = listed();
        let expected = "\
request 000000000000009b of tenant research (token program) waits for 2 devices of kind cuda with 40.0 GiB each
  waited     1 min 1 s
  position   2 of 2; the tenant with the least present and past use, by weight, is next; a later request that fits need not wait
  tenant     research has 3 cuda with 240.0 GiB in 2 leases; guaranteed 4 cuda; limit 8 cuda, 2 flex, 640 GiB; past use 12 %; weight 2
  devices    2 devices; suitable: 1 free, 6 leased, 1 held back, 1 out of service
             lease 000000000000009c of tenant research (token ci) has 4 devices
             lease 000000000000009d of tenant research (token night) has 2 devices
             1 held back for lease or request 000000000000009a of tenant research (token ci), which needs more
  may end if a lease with suitable devices ends or is suspended, or a lease or request for which devices are held back gets others, or ends, or a device is in service again, or a worker with such devices joins
  estimate   none, as too few leases with suitable devices declare how long they take (max_duration)
";
        assert_eq!(explanation(&listed.waiting[1], BY_ADMIN), expected);
    }

    #[test]
    fn explanation_names_the_limit_and_the_guarantee_of_the_tenant() {
        let mut waiting = listed().waiting.remove(1);
        waiting.at_limit = true;
        waiting.guaranteed = true;
        waiting.needs[0] = NeededDevices {
            count: 2,
            free: 5,
            leased: 3,
            ..NeededDevices::default()
        };
        let expected = "\
request 000000000000009b of tenant research (token program) waits for 2 devices of kind cuda with 40.0 GiB each
  waited     1 min 1 s
  position   1 of 1; it is within its tenant's guarantee, and such requests come first
  tenant     research has 3 cuda with 240.0 GiB in 2 leases; guaranteed 4 cuda; limit 8 cuda, 2 flex, 640 GiB; past use 12 %; weight 2
  limit      there may be enough devices, but its tenant would have more than its limit
  devices    2 devices; suitable: 5 free, 3 leased
  may end if a lease of its tenant ends or is suspended, an earlier request of the tenant is withdrawn, or its limit is raised
  estimate   none, as too few leases with suitable devices declare how long they take (max_duration)
";
        waiting.position = 1;
        assert_eq!(
            explanation(&waiting, Reader::Administrator { count: 1 }),
            expected
        );
    }

    #[test]
    fn explanation_of_a_request_for_a_share_names_the_shares_of_others() {
        let mut listed = listed();
        let waiting = &mut listed.waiting[1];
        waiting.requested = "50 % of 1 device of kind cuda with 4.0 GiB".into();
        waiting.tenant_info = None;
        let needed = &mut waiting.needs[0];
        (needed.count, needed.share_permille) = (1, 500);
        (
            needed.free,
            needed.leased,
            needed.held_back,
            needed.out_of_service,
        ) = (0, 2, 0, 0);
        needed.held_back_for.clear();
        for (lease, permille) in needed.leased_by.iter_mut().zip([625, 0]) {
            (lease.count, lease.share_permille) = (1, permille);
        }
        let expected = "\
request 000000000000009b of tenant research (token program) waits for 50 % of 1 device of kind cuda with 4.0 GiB
  waited     1 min 1 s
  position   2 of 2; the tenant with the least present and past use, by weight, is next; a later request that fits need not wait
  devices    50 % of a device; suitable: 2 leased
             lease 000000000000009c of tenant research (token ci) has 62.5 % of a device
             lease 000000000000009d of tenant research (token night) has 1 device
  may end if a lease with suitable devices ends or is suspended, or a worker with such devices joins
  estimate   none, as too few leases with suitable devices declare how long they take (max_duration)
";
        assert_eq!(explanation(&listed.waiting[1], BY_ADMIN), expected);
    }

    #[test]
    fn explanation_names_reservations() {
        let mut waiting = listed().waiting.remove(1);
        waiting.has_reservation = true;
        let text = explanation(&waiting, BY_ADMIN);
        let own = "\n  reserved   later requests get its devices only with leases that can be suspended for it\n";
        assert!(text.contains(own), "{text}");
        (waiting.has_reservation, waiting.reserved_for) = (false, Some(0x9a));
        let text = explanation(&waiting, BY_ADMIN);
        let of_other = "\n  reserved   some devices are for request 000000000000009a, which comes first and has waited for long; a durable lease on devices of one kind could have them meanwhile\n";
        assert!(text.contains(of_other), "{text}");
    }

    #[test]
    fn estimate_names_its_basis() {
        let mut waiting = listed().waiting.remove(1);
        waiting.enough_in_ms = Some(2_100_000);
        let text = explanation(&waiting, BY_ADMIN);
        let estimate = "\n  estimate   in 35 min 0 s at the latest, unless others before it get the devices: leases that declare how long they take (max_duration) will have ended by then\n";
        assert!(text.contains(estimate), "{text}");
    }

    #[test]
    fn explanation_for_a_program_names_only_leases_of_its_tenant() {
        let mut waiting = listed().waiting.remove(1);
        let needed = &mut waiting.needs[0];
        needed.leased_by[1].tenant = "students".into();
        needed.leased_by.push(DevicesOfLease {
            tenant: String::new(),
            ..needed.leased_by[0].clone()
        });
        needed.held_back_for[0].tenant = "students".into();
        waiting.reserved_for = Some(0x9f);
        let expected = "\
request 000000000000009b waits for 2 devices of kind cuda with 40.0 GiB each
  position   2; the tenant with the least present and past use, by weight, is next; a later request that fits need not wait
  tenant     research has 3 cuda with 240.0 GiB in 2 leases; guaranteed 4 cuda; limit 8 cuda, 2 flex, 640 GiB; past use 12 %; weight 2
  reserved   some devices are for a request, which comes first and has waited for long; a durable lease on devices of one kind could have them meanwhile
  devices    2 devices; suitable: 1 free, 6 leased, 1 held back, 1 out of service
             lease 000000000000009c of tenant research (token ci) has 4 devices
  may end if the request for which devices are reserved gets some, or ends, or a lease with suitable devices ends or is suspended, or a lease or request for which devices are held back gets others, or ends, or a device is in service again, or a worker with such devices joins
  estimate   none, as too few leases with suitable devices declare how long they take (max_duration)
";
        assert_eq!(explanation(&waiting, Reader::Program), expected);
    }

    #[test]
    fn explanation_of_a_lease_names_the_cause_and_the_time_limit() {
        let listed = listed();
        let expected = "\
lease 000000000000009a of tenant research (token ci) waits for 3 devices of 2 workers, like those it had
  cause      worker gpu-1 was lost
  position   1 of 2; leases that are to go on get devices before requests
  devices    1 device at one worker (at most 1 free at one); suitable: 3 free
  devices    2 devices at one worker; suitable: none
  program    not connected to the scheduler; the lease goes on once it is
  moving     its snapshots are being sent to gpu-3
  may end if its program connects again, or its snapshots arrive, or its worker joins again, or more devices of one worker are free, or a worker with such devices joins
  time limit the lease ends in 59 min 0 s if its program is not connected by then
  estimate   none, as too few leases with suitable devices declare how long they take (max_duration)
";
        assert_eq!(explanation(&listed.waiting[0], BY_ADMIN), expected);
    }
}
