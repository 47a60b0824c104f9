//! Explanations for administrators and for programs.

use tensord_proto::v1::{LeftWorker, WaitingList};

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
        left_workers: vec![LeftWorker {
            name: "gpu-2".into(),
            remaining_ms: 543_000,
        }],
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
  has left   worker gpu-2, which could not be reached, or could not reach others; the lease may go on there again in 9 min 3 s
  moving     its snapshots are being sent to gpu-3
  may end if its program connects again, or its snapshots arrive, or the time is over for which it stays away from a worker that it has left, or its worker joins again, or more devices of one worker are free, or a worker with such devices joins
  time limit the lease ends in 59 min 0 s if its program is not connected by then
  estimate   none, as too few leases with suitable devices declare how long they take (max_duration)
";
    assert_eq!(explanation(&listed.waiting[0], BY_ADMIN), expected);
}
