//! `tensord queue` and `tensord why`: what waits for devices of a running pool, and why.

use serde::Serialize;
use tensord_proto::{
    ids::LeaseId,
    v1::{
        DevicesOfLease, LeaseInfo, LeftWorker, ListWaitingRequest, NeededDevices, Waiting,
        WaitingList,
    },
};
use tensord_transport::PoolUrl;

use super::{
    admin::{self, error::AdminError, into_reply, with_token},
    leases::{self, non_empty},
    tenants,
};
use crate::{
    config::QueueConfig,
    explanation::{Reader, explanation, suitable_text, waiter, wanted_text},
    failure::Failure,
    human, stdout, table,
};

const HEADER: [&str; 7] = [
    "#",
    "ID",
    "TENANT",
    "TOKEN",
    "WAITS FOR",
    "WAITED",
    "SUITABLE DEVICES",
];

/// The JSON for what waits. Programs depend on the field names.
#[derive(Serialize)]
struct WaitingJson<'a> {
    /// Its position among all that wait, leases included, from 1 on.
    position: u32,
    /// The lease's id; of a request, the id that its lease gets.
    id: String,
    /// "request" or "lease".
    waiter: &'static str,
    tenant: &'a str,
    token: &'a str,
    /// What was requested, in words; null for a lease.
    requested: Option<&'a str>,
    /// Null for a lease that was lost or interrupted.
    waited_ms: Option<u64>,
    /// The time after which a lease ends if it still waits then, or its program is not connected.
    ends_in_ms: Option<u64>,
    /// Why a lease has no devices; null if somebody suspended and resumed it.
    cause: Option<&'a str>,
    /// The workers that get the lease's snapshots, and have devices for it.
    receivers: &'a [String],
    /// The workers that a lease has left because they could not be reached, or could not reach others.
    left_workers: Vec<LeftJson<'a>>,
    /// Whether it is a lease whose program is not connected.
    program_away: bool,
    /// Whether it is a lease that was suspended for a request that was entitled to its devices.
    reclaimed: bool,
    /// Whether it waits because its tenant would have more than its limit.
    at_limit: bool,
    /// Whether a request is within its tenant's guarantee; null for a lease.
    guaranteed: Option<bool>,
    /// Whether others get devices for which a request is next only if they can be suspended for it; null for a
    /// lease.
    has_reservation: Option<bool>,
    /// The request that has such a reservation of devices which this one could get.
    reserved_for: Option<String>,
    /// The time within which enough suitable devices will be free, as leases that declare how long they take will
    /// have ended; null if that is not known.
    enough_in_ms: Option<u64>,
    /// The priority of a request among those of its tenant; null for a lease.
    priority: Option<i32>,
    needs: Vec<NeedsJson<'a>>,
}

/// The JSON for a worker to which a lease does not come back yet.
#[derive(Serialize)]
struct LeftJson<'a> {
    worker: &'a str,
    /// The time after which the lease may go on there again.
    remaining_ms: u64,
}

/// The JSON for a number of devices that are needed, and how the suitable ones are used.
#[derive(Serialize)]
struct NeedsJson<'a> {
    devices: u32,
    /// The part of the time of the only device that is needed, in thousandths; null for whole devices.
    share_permille: Option<u32>,
    at_one_worker: bool,
    free: u32,
    free_at_one_worker: u32,
    leased: u32,
    held_back: u32,
    ending: u32,
    out_of_service: u32,
    unreachable: u32,
    draining: u32,
    /// Filled by `tensord why` only.
    leased_by: Vec<DevicesOfLeaseJson<'a>>,
    /// Filled by `tensord why` only.
    held_back_for: Vec<DevicesOfLeaseJson<'a>>,
}

#[derive(Serialize)]
struct DevicesOfLeaseJson<'a> {
    lease: String,
    tenant: &'a str,
    token: &'a str,
    devices: u32,
    /// What the lease has of the device's time, in thousandths; null if it has all.
    share_permille: Option<u32>,
}

/// Makes the calls and prints their result.
pub(super) async fn run(config: QueueConfig) -> Result<(), Failure> {
    let url = admin::url(config.admin)?;
    let text = admin::with_deadline(&url, async {
        let listed = list(&url, config.lease).await?;
        match config.lease {
            None if config.json => Ok(stdout::json(&serde_json::json!({
                "count": listed.count,
                "waiting": listed.waiting.iter().map(waiting_json).collect::<Vec<_>>(),
            }))),
            None => Ok(to_table(&listed)),
            Some(id) => why(id, &listed, config.json),
        }
    });
    stdout::print(&text.await?)
}

/// Returns what waits, or only this lease or request.
async fn list(url: &PoolUrl, lease: Option<LeaseId>) -> Result<WaitingList, AdminError> {
    let mut admin = admin::connect(url).await?;
    let request = ListWaitingRequest {
        lease_id: lease.map(|lease| lease.0),
    };
    let listed = admin.list_waiting(with_token(request, url)?);
    into_reply(url, listed.await)
}

/// Returns why a lease or request waits, or what it does otherwise.
///
/// # Errors
///
/// If there is none with this id.
fn why(id: LeaseId, listed: &WaitingList, json: bool) -> Result<String, AdminError> {
    match (listed.waiting.first(), listed.lease.as_ref()) {
        (None, None) => Err(AdminError::NothingWithId(id)),
        (waiting, lease) if json => Ok(stdout::json(&serde_json::json!({
            "id": id.to_string(),
            "waiting": waiting.map(waiting_json),
            "tenant": waiting.and_then(|it| it.tenant_info.as_ref()).map(tenants::json_of),
            "lease": lease.map(leases::json_of),
        }))),
        (Some(waiting), _) => {
            let count = listed.count;
            Ok(explanation(waiting, Reader::Administrator { count }))
        }
        (None, Some(lease)) => Ok(does_not_wait(lease)),
    }
}

/// Returns what a lease does that does not wait.
fn does_not_wait(lease: &LeaseInfo) -> String {
    let id = leases::lease_name(lease);
    let places = leases::places_text(lease);
    match (lease.suspended_at.is_empty(), places.is_empty()) {
        (false, _) if lease.idle => format!(
            "lease {id} does not wait for devices: it is suspended, as it computed nothing for a while and others waited for its devices; it goes on when its program uses it\n"
        ),
        (false, _) => format!(
            "lease {id} does not wait for devices: it is suspended; `tensord lease resume {id}` lets it go on\n"
        ),
        (true, false) => format!("lease {id} does not wait: it has {places}\n"),
        // After a restart of the scheduler.
        (true, true) => format!("lease {id} waits until all its workers have joined again\n"),
    }
}

fn waiting_json(waiting: &Waiting) -> WaitingJson<'_> {
    let is_request = !waiting.requested.is_empty();
    WaitingJson {
        position: waiting.position,
        id: LeaseId(waiting.lease_id).to_string(),
        waiter: waiter(waiting),
        tenant: &waiting.tenant,
        token: &waiting.token,
        requested: non_empty(&waiting.requested),
        waited_ms: waiting.waited_ms,
        ends_in_ms: waiting.ends_in_ms,
        cause: non_empty(&waiting.cause),
        receivers: &waiting.receivers,
        left_workers: waiting.left_workers.iter().map(left_json).collect(),
        program_away: waiting.client_away,
        reclaimed: waiting.reclaimed,
        at_limit: waiting.at_limit,
        guaranteed: is_request.then_some(waiting.guaranteed),
        has_reservation: is_request.then_some(waiting.has_reservation),
        reserved_for: waiting.reserved_for.map(|id| LeaseId(id).to_string()),
        enough_in_ms: waiting.enough_in_ms,
        priority: is_request.then_some(waiting.priority),
        needs: waiting.needs.iter().map(needs_json).collect(),
    }
}

fn left_json(left: &LeftWorker) -> LeftJson<'_> {
    LeftJson {
        worker: &left.name,
        remaining_ms: left.remaining_ms,
    }
}

fn needs_json(needed: &NeededDevices) -> NeedsJson<'_> {
    NeedsJson {
        devices: needed.count,
        share_permille: non_zero(needed.share_permille),
        at_one_worker: needed.at_one_worker,
        free: needed.free,
        free_at_one_worker: needed.free_at_one_worker,
        leased: needed.leased,
        held_back: needed.held_back,
        ending: needed.ending,
        out_of_service: needed.out_of_service,
        unreachable: needed.unreachable,
        draining: needed.draining,
        leased_by: needed.leased_by.iter().map(devices_json).collect(),
        held_back_for: needed.held_back_for.iter().map(devices_json).collect(),
    }
}

fn devices_json(devices: &DevicesOfLease) -> DevicesOfLeaseJson<'_> {
    DevicesOfLeaseJson {
        lease: LeaseId(devices.lease_id).to_string(),
        tenant: &devices.tenant,
        token: &devices.token,
        devices: devices.count,
        share_permille: non_zero(devices.share_permille),
    }
}

fn non_zero(permille: u32) -> Option<u32> {
    Some(permille).filter(|permille| *permille > 0)
}

/// Formats what waits as a table, with a newline at the end.
fn to_table(listed: &WaitingList) -> String {
    if listed.waiting.is_empty() {
        return "nothing waits for devices\n".into();
    }
    let mut text = table::text(HEADER, &[0], listed.waiting.iter().map(row));
    let more = (listed.count as usize).saturating_sub(listed.waiting.len());
    if more > 0 {
        text += &format!("and {} more\n", human::count(more as u64));
    }
    text
}

fn row(waiting: &Waiting) -> [String; 7] {
    let suitable = waiting.needs.iter().map(suitable_text);
    let limit = waiting
        .at_limit
        .then(|| "its tenant is at its limit".to_owned());
    let suitable: Vec<_> = suitable.chain(limit).collect();
    [
        waiting.position.to_string(),
        LeaseId(waiting.lease_id).to_string(),
        waiting.tenant.clone(),
        waiting.token.clone(),
        wanted_text(waiting),
        waiting.waited_ms.map_or_else(String::new, human::duration),
        suitable.join("; "),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::explanation::tests::listed;

    #[test]
    fn what_waits_is_listed_in_order() {
        let expected = "\
#  ID                TENANT    TOKEN    WAITS FOR                                  WAITED     SUITABLE DEVICES
1  000000000000009a  research  ci       3 devices of 2 workers, like those it had             3 free; none
2  000000000000009b  research  program  2 devices of kind cuda with 40.0 GiB each  1 min 1 s  1 free, 6 leased, 1 held back, 1 out of service
";
        assert_eq!(to_table(&listed()), expected);
        let longer = WaitingList {
            count: 1236,
            ..listed()
        };
        assert_eq!(to_table(&longer), format!("{expected}and 1,234 more\n"));
        let nothing = to_table(&WaitingList::default());
        assert_eq!(nothing, "nothing waits for devices\n");
    }

    #[test]
    fn json_has_null_for_what_does_not_apply() {
        let listed = listed();
        let json = |at: usize| serde_json::to_value(waiting_json(&listed.waiting[at])).unwrap();
        let (lease, request) = (json(0), json(1));
        assert_eq!(
            (&lease["waiter"], &request["waiter"]),
            (&"lease".into(), &"request".into())
        );
        assert!(lease["requested"].is_null() && lease["waited_ms"].is_null());
        let left = serde_json::json!([{ "worker": "gpu-2", "remaining_ms": 543_000 }]);
        assert_eq!(lease["left_workers"], left);
        assert!(request["cause"].is_null() && request["ends_in_ms"].is_null());
        assert_eq!(
            request["needs"][0]["leased_by"][1]["lease"],
            "000000000000009d"
        );
        assert_eq!(request["needs"][0]["leased_by"][1]["devices"], 2);
    }

    #[test]
    fn lease_that_does_not_wait_is_described() {
        let lease = LeaseInfo {
            lease_id: 0x9a,
            places: vec![tensord_proto::v1::LeasePlace {
                worker: "gpu-1".into(),
                kind: "cuda".into(),
                device_indices: vec![0, 1],
                ..tensord_proto::v1::LeasePlace::default()
            }],
            ..LeaseInfo::default()
        };
        assert_eq!(
            does_not_wait(&lease),
            "lease 000000000000009a does not wait: it has gpu-1 cuda:0,1\n"
        );
        let without_worker = LeaseInfo {
            lease_id: 0x9a,
            ..LeaseInfo::default()
        };
        assert_eq!(
            does_not_wait(&without_worker),
            "lease 000000000000009a waits until all its workers have joined again\n"
        );
        let suspended = LeaseInfo {
            lease_id: 0x9a,
            suspended_at: vec!["gpu-1".into()],
            ..LeaseInfo::default()
        };
        assert_eq!(
            does_not_wait(&suspended),
            "lease 000000000000009a does not wait for devices: it is suspended; `tensord lease resume 000000000000009a` lets it go on\n"
        );
        let idle = LeaseInfo {
            idle: true,
            ..suspended
        };
        assert_eq!(
            does_not_wait(&idle),
            "lease 000000000000009a does not wait for devices: it is suspended, as it computed nothing for a while and others waited for its devices; it goes on when its program uses it\n"
        );
    }
}
