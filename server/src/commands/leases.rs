//! `tensord lease`: lists, moves, suspends, resumes and ends the leases of a running pool, and changes the
//! priorities of requests.

use serde::Serialize;
use tensord_proto::{
    ids::{ClientId, LeaseId},
    share::Percent,
    v1::{
        EndLeaseRequest, LeaseInfo, LeasePlace, ListLeasesRequest, MoveLeaseRequest,
        ResumeLeaseRequest, ResumedLease, SetPriorityRequest, SuspendLeaseRequest,
    },
};
use tensord_transport::PoolUrl;

use super::admin::{self, error::AdminError, into_reply, with_token};
use crate::{
    config::{LeasesAction, LeasesConfig},
    failure::Failure,
    stdout, table,
};

const HEADER: [&str; 6] = ["LEASE", "TENANT", "TOKEN", "DEVICES", "MOVES", "STATE"];

/// The column of the table that has numbers.
const MOVES: usize = 4;

/// The JSON for a lease. Programs depend on the field names.
#[derive(Serialize)]
struct Lease<'a> {
    lease: String,
    /// Null until a client has claimed the lease after a restart of the scheduler.
    client: Option<String>,
    tenant: &'a str,
    token: &'a str,
    places: Vec<Place<'a>>,
    moves: u64,
    /// Why the lease waits for a device; null if it does not.
    waits: Option<&'a str>,
    /// The worker to which it could move now; null if it cannot move.
    move_to: Option<&'a str>,
    cannot_move: Option<&'a str>,
    /// If it is suspended: the workers that have its state. Otherwise empty.
    suspended_at: &'a [String],
    /// Whether it was resumed, and waits for devices of these workers.
    resumed: bool,
    /// Whether it needs devices of each of these workers to go on.
    needs_all: bool,
    /// Whether it could go on from a snapshot store, at any workers that have it open.
    in_store: bool,
    /// Whether the scheduler has suspended it because it was idle.
    idle: bool,
}

#[derive(Serialize)]
struct Place<'a> {
    worker: &'a str,
    kind: &'a str,
    devices: &'a [u32],
    /// What the lease has of the device; null if it has all of the devices.
    share: Option<Share>,
}

#[derive(Serialize)]
struct Share {
    /// The part of its time, in thousandths.
    permille: u32,
    memory_bytes: u64,
}

/// Makes one call and prints its result.
pub(super) async fn run(config: LeasesConfig) -> Result<(), Failure> {
    let url = admin::url(config.admin)?;
    let text = admin::with_deadline(&url, execute(&url, config.action)).await?;
    stdout::print(&text)
}

async fn execute(url: &PoolUrl, action: LeasesAction) -> Result<String, AdminError> {
    match action {
        LeasesAction::List { json } => {
            let leases = list(url).await?;
            Ok(match json {
                true => to_json(&leases),
                false => to_table(&leases),
            })
        }
        LeasesAction::Move { lease } => {
            let mut admin = admin::connect(url).await?;
            let request = MoveLeaseRequest { lease_id: lease.0 };
            let moved = admin.move_lease(with_token(request, url)?).await;
            let worker = into_reply(url, moved)?.worker;
            Ok(format!("lease {lease} moves to worker {worker}\n"))
        }
        LeasesAction::Suspend { lease } => {
            let mut admin = admin::connect(url).await?;
            let request = SuspendLeaseRequest { lease_id: lease.0 };
            let suspended = admin.suspend_lease(with_token(request, url)?).await;
            let workers = into_reply(url, suspended)?.workers;
            let workers = names(&workers, "and");
            Ok(format!(
                "lease {lease} is suspended; its state is at {workers}\n"
            ))
        }
        LeasesAction::Resume { lease } => {
            let mut admin = admin::connect(url).await?;
            let request = ResumeLeaseRequest { lease_id: lease.0 };
            let resumed = admin.resume_lease(with_token(request, url)?).await;
            let resumed = into_reply(url, resumed)?;
            Ok(format!("lease {lease} {}\n", resumed_text(&resumed)))
        }
        LeasesAction::End { lease } => {
            let mut admin = admin::connect(url).await?;
            let request = EndLeaseRequest { lease_id: lease.0 };
            let ended = admin.end_lease(with_token(request, url)?).await;
            Ok(match into_reply(url, ended)?.was_request {
                true => format!("request {lease} is refused\n"),
                false => format!("lease {lease} is ended\n"),
            })
        }
        LeasesAction::Priority { lease, priority } => {
            let mut admin = admin::connect(url).await?;
            let request = SetPriorityRequest {
                lease_id: lease.0,
                priority,
            };
            let set = admin.set_priority(with_token(request, url)?).await;
            Ok(match into_reply(url, set)?.position {
                0 => format!("request {lease} has priority {priority}, and waits no more\n"),
                position => {
                    format!(
                        "request {lease} has priority {priority}, and is at position {position}\n"
                    )
                }
            })
        }
    }
}

/// Returns all leases of the pool.
pub(super) async fn list(url: &PoolUrl) -> Result<Vec<LeaseInfo>, AdminError> {
    let mut admin = admin::connect(url).await?;
    let listed = admin.list_leases(with_token(ListLeasesRequest {}, url)?);
    Ok(into_reply(url, listed.await)?.leases)
}

/// Returns what happens to a lease that was resumed, without the subject.
fn resumed_text(resumed: &ResumedLease) -> String {
    let ResumedLease {
        workers,
        waits_for,
        needs_all,
    } = resumed;
    match (waits_for.is_empty(), needs_all) {
        (true, _) => format!("goes on at {}", names(workers, "and")),
        (false, false) => format!(
            "goes on when {}, or another worker, has devices for it",
            names(waits_for, "or")
        ),
        (false, true) => format!(
            "goes on when {}, or other workers, have devices for it",
            names(waits_for, "and")
        ),
    }
}

/// Returns the names of workers as part of a sentence.
fn names(workers: &[String], conjunction: &str) -> String {
    let workers = workers.iter().map(|worker| match worker.contains(' ') {
        // No name: words for a worker that is not there.
        true => worker.clone(),
        false => format!("worker {worker}"),
    });
    let workers: Vec<_> = workers.collect();
    workers.join(&format!(" {conjunction} "))
}

/// Returns a lease's id as people write it.
pub(super) fn lease_name(lease: &LeaseInfo) -> String {
    LeaseId(lease.lease_id).to_string()
}

/// Formats `leases` as JSON, with a newline at the end.
fn to_json(leases: &[LeaseInfo]) -> String {
    let leases: Vec<_> = leases.iter().map(json_of).collect();
    stdout::json(&serde_json::json!({ "leases": leases }))
}

/// Returns `None` for the empty text, which stands for an absent one in messages.
pub(super) fn non_empty(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.is_empty())
}

/// Returns the JSON for a lease.
pub(super) fn json_of(lease: &LeaseInfo) -> impl Serialize {
    let client = Some(lease.client_id).filter(|id| *id != 0);
    Lease {
        lease: lease_name(lease),
        client: client.map(|id| ClientId(id).to_string()),
        tenant: &lease.tenant,
        token: &lease.token,
        places: lease.places.iter().map(place_of).collect(),
        moves: lease.moves,
        waits: non_empty(&lease.waits),
        move_to: non_empty(&lease.move_to),
        cannot_move: non_empty(&lease.cannot_move),
        suspended_at: &lease.suspended_at,
        resumed: lease.resumed,
        needs_all: lease.needs_all,
        in_store: lease.in_store,
        idle: lease.idle,
    }
}

fn place_of(place: &LeasePlace) -> Place<'_> {
    Place {
        worker: &place.worker,
        kind: &place.kind,
        devices: &place.device_indices,
        share: (place.share_permille > 0).then_some(Share {
            permille: place.share_permille,
            memory_bytes: place.share_memory_bytes,
        }),
    }
}

/// Formats `leases` as a table, with a newline at the end.
fn to_table(leases: &[LeaseInfo]) -> String {
    if leases.is_empty() {
        return "the pool has no leases\n".into();
    }
    table::text(HEADER, &[MOVES], leases.iter().map(row))
}

/// Returns the devices of a lease, such as `gpu-1 cuda:0,1, gpu-2 cuda:3`, or `25 % of gpu-1 cuda:0`.
pub(super) fn places_text(lease: &LeaseInfo) -> String {
    let place = |place: &LeasePlace| {
        let devices = place.device_indices.iter().map(u32::to_string);
        let devices: Vec<_> = devices.collect();
        let devices = format!("{} {}:{}", place.worker, place.kind, devices.join(","));
        match place.share_permille {
            0 => devices,
            permille => format!("{} of {devices}", Percent(permille)),
        }
    };
    let places: Vec<_> = lease.places.iter().map(place).collect();
    places.join(", ")
}

fn row(lease: &LeaseInfo) -> [String; 6] {
    let standing = match (lease.waits.as_str(), lease.move_to.as_str()) {
        _ if lease.resumed => {
            let conjunction = match lease.needs_all {
                true => "and",
                false => "or",
            };
            let workers = names(&lease.suspended_at, conjunction);
            format!("waits for devices of {workers}, or like ones elsewhere")
        }
        _ if !lease.suspended_at.is_empty() => {
            let cause = match lease.idle {
                true => " as it was idle",
                false => "",
            };
            format!(
                "suspended{cause}; its state is at {}",
                names(&lease.suspended_at, "and")
            )
        }
        ("", "") => format!("cannot move: {}", lease.cannot_move),
        ("", worker) => format!("can move to {worker}"),
        (reason, _) => format!("waits: {reason}"),
    };
    [
        lease_name(lease),
        lease.tenant.clone(),
        lease.token.clone(),
        places_text(lease),
        lease.moves.to_string(),
        standing,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leases() -> [LeaseInfo; 6] {
        let place = |worker: &str, kind: &str, device_indices: &[u32]| LeasePlace {
            worker: worker.into(),
            kind: kind.into(),
            device_indices: device_indices.into(),
            ..LeasePlace::default()
        };
        let lease = |lease_id, places| LeaseInfo {
            lease_id,
            client_id: 7,
            tenant: "research".into(),
            token: "ci".into(),
            places,
            ..LeaseInfo::default()
        };
        [
            LeaseInfo {
                move_to: "gpu-2".into(),
                moves: 12,
                ..lease(
                    0x9a,
                    vec![LeasePlace {
                        share_permille: 250,
                        share_memory_bytes: 4 << 30,
                        ..place("gpu-1", "flex", &[0])
                    }],
                )
            },
            LeaseInfo {
                cannot_move: "it has devices of several workers".into(),
                ..lease(
                    0x9b,
                    vec![
                        place("gpu-1", "cuda", &[0, 1]),
                        place("gpu-2", "cuda", &[3]),
                    ],
                )
            },
            LeaseInfo {
                waits: "worker gpu-3 was lost".into(),
                cannot_move: "no device".into(),
                client_id: 0,
                ..lease(0x9c, Vec::new())
            },
            LeaseInfo {
                suspended_at: vec!["gpu-1".into()],
                cannot_move: "it is suspended".into(),
                ..lease(0x9d, Vec::new())
            },
            LeaseInfo {
                suspended_at: vec!["gpu-1".into(), "gpu-2".into()],
                resumed: true,
                cannot_move: "it is suspended".into(),
                ..lease(0x9e, Vec::new())
            },
            LeaseInfo {
                suspended_at: vec!["gpu-1".into(), "gpu-2".into()],
                resumed: true,
                needs_all: true,
                cannot_move: "it is suspended".into(),
                ..lease(0x9f, Vec::new())
            },
        ]
    }

    #[test]
    fn leases_are_listed_in_columns() {
        let expected = "\
LEASE             TENANT    TOKEN  DEVICES                       MOVES  STATE
000000000000009a  research  ci     25 % of gpu-1 flex:0             12  can move to gpu-2
000000000000009b  research  ci     gpu-1 cuda:0,1, gpu-2 cuda:3      0  cannot move: it has devices of several workers
000000000000009c  research  ci                                       0  waits: worker gpu-3 was lost
000000000000009d  research  ci                                       0  suspended; its state is at worker gpu-1
000000000000009e  research  ci                                       0  waits for devices of worker gpu-1 or worker gpu-2, or like ones elsewhere
000000000000009f  research  ci                                       0  waits for devices of worker gpu-1 and worker gpu-2, or like ones elsewhere
";
        assert_eq!(to_table(&leases()), expected);
        assert_eq!(to_table(&[]), "the pool has no leases\n");
    }

    #[test]
    fn lease_that_was_idle_is_listed_as_such() {
        let [.., suspended, _, _] = leases();
        let idle = LeaseInfo {
            idle: true,
            ..suspended
        };
        let [.., standing] = row(&idle);
        assert_eq!(
            standing,
            "suspended as it was idle; its state is at worker gpu-1"
        );
    }

    #[test]
    fn text_of_a_resumed_lease_names_the_workers_that_it_needs() {
        let both = || vec!["gpu-1".into(), "gpu-2".into()];
        let in_store = || vec!["a worker with snapshot store 00000000000000ab".into()];
        let text = |workers, waits_for, needs_all| {
            resumed_text(&ResumedLease {
                workers,
                waits_for,
                needs_all,
            })
        };
        let runs = text(both(), vec![], false);
        assert_eq!(runs, "goes on at worker gpu-1 and worker gpu-2");
        assert_eq!(
            text(vec![], both(), false),
            "goes on when worker gpu-1 or worker gpu-2, or another worker, has devices for it"
        );
        assert_eq!(
            text(vec![], in_store(), false),
            "goes on when a worker with snapshot store 00000000000000ab, or another worker, has devices for it"
        );
        assert_eq!(
            text(vec![], both(), true),
            "goes on when worker gpu-1 and worker gpu-2, or other workers, have devices for it"
        );
    }

    #[test]
    fn json_has_null_for_what_does_not_apply() {
        let parsed: serde_json::Value = serde_json::from_str(&to_json(&leases())).unwrap();
        let [first, _, third] = [0, 1, 2].map(|at| &parsed["leases"][at]);
        assert_eq!(first["lease"], "000000000000009a");
        assert_eq!(first["places"][0]["devices"], serde_json::json!([0]));
        let share = serde_json::json!({ "permille": 250, "memory_bytes": 4_u64 << 30 });
        assert_eq!(first["places"][0]["share"], share);
        let second = &parsed["leases"][1];
        assert!(second["places"][0]["share"].is_null());
        assert_eq!(
            (&first["waits"], &first["move_to"]),
            (&serde_json::Value::Null, &"gpu-2".into())
        );
        assert!(third["client"].is_null() && third["move_to"].is_null());
        assert_eq!(third["waits"], "worker gpu-3 was lost");
        let last = &parsed["leases"][4];
        assert_eq!(last["suspended_at"], serde_json::json!(["gpu-1", "gpu-2"]));
        assert_eq!(
            (&first["resumed"], &last["resumed"]),
            (&false.into(), &true.into())
        );
    }
}
