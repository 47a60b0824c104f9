//! `tensord worker list`, `drain` and `remove`: the workers that may join a running pool.

mod drain;

use std::time::{Duration, SystemTime};

use serde::Serialize;
use tensord_proto::v1::{EnrolledDevices, EnrolledWorker, ListWorkersRequest, RemoveWorkerRequest};
use tensord_transport::PoolUrl;

use super::admin::{self, error::AdminError, into_reply, with_token};
use crate::{
    config::{WorkersAction, WorkersConfig},
    failure::Failure,
    human, stdout, table,
};

const HEADER: [&str; 6] = ["NAME", "STANDING", "MAY OFFER", "TOKEN", "ENROLLED", "SEEN"];

/// The JSON for a worker. Programs depend on the field names.
#[derive(Serialize)]
struct Worker<'a> {
    name: &'a str,
    joined: bool,
    certificate_sha256: String,
    token: &'a str,
    enrolled_ms: u64,
    seen_ms: u64,
    devices: Vec<Devices<'a>>,
}

#[derive(Serialize)]
struct Devices<'a> {
    kind: &'a str,
    count: u32,
    memory_bytes: u64,
}

/// Makes one call and prints its result.
pub(super) async fn run(config: WorkersConfig) -> Result<(), Failure> {
    let url = admin::url(config.admin)?;
    if let WorkersAction::Drain { name, undo, wait } = config.action {
        return drain::run(&url, &name, undo, wait).await;
    }
    let text = admin::with_deadline(&url, execute(&url, config.action)).await?;
    stdout::print(&text)
}

/// Carries out the action, and returns the text to print.
async fn execute(url: &PoolUrl, action: WorkersAction) -> Result<String, AdminError> {
    let mut admin = admin::connect(url).await?;
    match action {
        WorkersAction::List { json } => {
            let listed = admin.list_workers(with_token(ListWorkersRequest {}, url)?);
            let workers = into_reply(url, listed.await)?.workers;
            Ok(match json {
                true => to_json(&workers),
                false => to_table(&workers),
            })
        }
        WorkersAction::Drain { .. } => unreachable!("`run` drains"),
        WorkersAction::Remove { name } => {
            let request = RemoveWorkerRequest { name: name.clone() };
            let removed = admin.remove_worker(with_token(request, url)?).await;
            Ok(match into_reply(url, removed)?.was_joined {
                true => format!(
                    "worker {name} is removed; its leases have ended, or go on at other workers\n"
                ),
                false => format!("worker {name} is removed; it was not in the pool\n"),
            })
        }
    }
}

/// Formats `workers` as JSON, with a newline at the end.
fn to_json(workers: &[EnrolledWorker]) -> String {
    let workers: Vec<_> = workers.iter().map(worker).collect();
    stdout::json(&serde_json::json!({ "workers": workers }))
}

fn worker(worker: &EnrolledWorker) -> Worker<'_> {
    let devices = worker.devices.iter().map(|devices| Devices {
        kind: &devices.kind,
        count: devices.count,
        memory_bytes: devices.memory_bytes,
    });
    Worker {
        name: &worker.name,
        joined: worker.joined,
        certificate_sha256: human::hex(&worker.certificate_sha256),
        token: &worker.token,
        enrolled_ms: worker.enrolled_ms,
        seen_ms: worker.seen_ms,
        devices: devices.collect(),
    }
}

/// Formats `workers` as a table, with a newline at the end.
fn to_table(workers: &[EnrolledWorker]) -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    table_at(workers, now.unwrap_or_default())
}

fn table_at(workers: &[EnrolledWorker], now: Duration) -> String {
    let now_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    table::text(
        HEADER,
        &[],
        workers.iter().map(|worker| row(worker, now_ms)),
    )
}

fn row(worker: &EnrolledWorker, now_ms: u64) -> [String; 6] {
    let (standing, seen) = match worker.joined {
        true => ("joined", "now".into()),
        false => ("away", human::relative(worker.seen_ms, now_ms)),
    };
    let devices = |devices: &EnrolledDevices| {
        let memory = human::bytes(devices.memory_bytes);
        format!("{} {} of {memory}", devices.count, devices.kind)
    };
    let devices: Vec<_> = worker.devices.iter().map(devices).collect();
    [
        worker.name.clone(),
        standing.into(),
        devices.join(", "),
        worker.token.clone(),
        human::relative(worker.enrolled_ms, now_ms),
        seen,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_listed_in_columns() {
        let devices = |kind: &str, count| EnrolledDevices {
            kind: kind.into(),
            count,
            memory_bytes: 16 << 30,
        };
        let worker = |name: &str, joined, devices| EnrolledWorker {
            name: name.into(),
            joined,
            devices,
            certificate_sha256: vec![0xab; 32].into(),
            token: "worker".into(),
            enrolled_ms: 40_000,
            seen_ms: 90_000,
        };
        let workers = [
            worker("gpu-1", true, vec![devices("cuda", 4), devices("flex", 1)]),
            worker("gpu-2", false, vec![devices("cuda", 2)]),
        ];
        let expected = "\
NAME   STANDING  MAY OFFER                          TOKEN   ENROLLED       SEEN
gpu-1  joined    4 cuda of 16.0 GiB, 1 flex of 16.0 GiB  worker  1 min 0 s ago  now
gpu-2  away      2 cuda of 16.0 GiB  worker  1 min 0 s ago  10 s ago
";
        let trimmed = |text: &str| -> Vec<Vec<String>> {
            let words = |line: &str| line.split_whitespace().map(str::to_owned).collect();
            text.lines().map(words).collect()
        };
        let listed = table_at(&workers, Duration::from_secs(100));
        assert_eq!(trimmed(&listed), trimmed(expected));
        let parsed: serde_json::Value = serde_json::from_str(&to_json(&workers)).unwrap();
        assert_eq!(parsed["workers"][0]["devices"][0]["kind"], "cuda");
        assert_eq!(parsed["workers"][1]["joined"], false);
        assert_eq!(parsed["workers"][1]["certificate_sha256"], "ab".repeat(32));
    }
}
