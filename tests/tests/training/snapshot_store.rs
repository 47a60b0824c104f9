//! A training goes on from a snapshot store when all workers with its snapshots in memory are gone.

use std::{fs, path::Path, thread::sleep, time::Duration};

use burn::tensor::Device;
use tensord_client::{LeaseRequest, Pool};
use tensord_testkit::{
    administrator::Administrator,
    cluster::{Cluster, Process, SNAPSHOTS, binary},
    models::Mlp,
    training::losses,
};
use tensord_transport::PoolUrl;

use crate::worker_failover::wait_for_keeper;

pub(crate) const STEPS: usize = 20;

/// Longer than the least interval between two marks.
pub(crate) const MARK_INTERVAL: Duration = Duration::from_millis(2_500);

/// How long a pool that is stopped may take to exit: its leases have 10 s to end.
pub(crate) const EXIT_DEADLINE: Duration = Duration::from_secs(60);

pub(crate) fn undisturbed() -> Vec<f32> {
    losses::<Mlp>(&Device::flex(), STEPS, |_| {}).unwrap()
}

/// Starts a pool of workers with a device each, which share a snapshot store.
fn start(workers: usize) -> Cluster {
    let mut cluster = Cluster::start(&[]);
    (0..workers).for_each(|_| cluster.add_worker_with_store("flex"));
    cluster.wait_for_workers(workers);
    cluster
}

/// Returns the sizes of the files below a directory.
fn file_sizes(directory: &Path) -> Vec<u64> {
    let mut sizes = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => sizes.extend(file_sizes(&entry.path())),
            Ok(metadata) => sizes.push(metadata.len()),
            // It was deleted meanwhile.
            Err(_) => {}
        }
    }
    sizes
}

/// Waits until the only lease of the pool could go on from the store.
pub(crate) fn wait_for_store(administrator: &Administrator) {
    administrator.wait("a snapshot in the store", || {
        administrator.leases()[0]["in_store"] == true
    });
}

#[test]
fn training_outlives_the_only_worker_and_the_scheduler() {
    let mut cluster = start(1);
    let undisturbed = undisturbed();
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let administrator = Administrator::of(&cluster);
    let mut last = 0;
    let ours = losses::<Mlp>(&lease.devices()[0], STEPS, |step| match step {
        4 | 12 => {
            wait_for_store(&administrator);
            cluster.workers[last].kill();
            if step == 12 {
                cluster.restart_scheduler_with(&[]);
            }
            cluster.add_worker_with_store("flex");
            last += 1;
        }
        // A stopped worker has nowhere to move its lease to.
        8 => {
            wait_for_store(&administrator);
            cluster.workers[last].signal("TERM");
            cluster.add_worker_with_store("flex");
            last += 1;
        }
        _ => {}
    });
    assert_eq!(ours, Ok(undisturbed), "{}", cluster.logs());
    assert_eq!(lease.ended(), None);
    drop(lease);
    // The id of the store stays.
    let directory = cluster.path(SNAPSHOTS);
    administrator.wait("the snapshots to be deleted", || {
        file_sizes(&directory).len() == 1
    });
}

#[test]
fn training_goes_on_when_its_worker_and_its_keeper_are_killed_at_once() {
    let mut cluster = start(2);
    let undisturbed = undisturbed();
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let administrator = Administrator::of(&cluster);
    let ours = losses::<Mlp>(&lease.devices()[0], STEPS, |step| {
        if step == 5 {
            wait_for_keeper(&administrator);
            wait_for_store(&administrator);
            cluster.workers.iter_mut().for_each(Process::kill);
            cluster.add_worker_with_store("flex");
        }
    });
    assert_eq!(ours, Ok(undisturbed), "{}", cluster.logs());
    assert_eq!(lease.ended(), None);
}

#[test]
fn suspended_training_outlives_its_worker() {
    let mut cluster = start(1);
    let undisturbed = undisturbed();
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let administrator = Administrator::of(&cluster);
    let ours = losses::<Mlp>(&lease.devices()[0], STEPS, |step| {
        if step == 5 {
            wait_for_store(&administrator);
            let id = administrator.suspend_running();
            cluster.workers[0].kill();
            cluster.restart_scheduler_with(&[]);
            cluster.add_worker_with_store("flex");
            administrator.wait("the new worker", || administrator.holders() == 1);
            administrator.command(&["resume", &id]).unwrap();
        }
    });
    assert_eq!(ours, Ok(undisturbed), "{}", cluster.logs());
    assert_eq!(lease.ended(), None);
}

#[test]
fn training_goes_on_although_nothing_can_be_stored() {
    let mut cluster = start(2);
    let undisturbed = undisturbed();
    let store = cluster.path(SNAPSHOTS);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let administrator = Administrator::of(&cluster);
    let ours = losses::<Mlp>(&lease.devices()[0], STEPS, |step| match step {
        // A file in the place of the store, as if its disk were gone.
        4 => {
            fs::rename(&store, store.with_extension("gone")).unwrap();
            fs::write(&store, "").unwrap();
            // The next op is after the interval of marks.
            sleep(MARK_INTERVAL);
        }
        8 => {
            wait_for_keeper(&administrator);
            let source = cluster.worker_of_lease().unwrap();
            cluster.wait("the warning", || {
                let log = cluster.workers[source].log();
                log.contains("are not stored in")
            });
            cluster.workers[source].kill();
        }
        _ => {}
    });
    assert_eq!(ours, Ok(undisturbed), "{}", cluster.logs());
    assert_eq!(lease.ended(), None);
}

/// Returns the path of an entry of a directory.
fn path_in(directory: impl AsRef<Path>, name: &str) -> String {
    let path = directory.as_ref().join(name).into_os_string();
    path.into_string().expect("temporary paths are text")
}

/// Starts a pool of one process on a state directory, on this port. Returns it with the URL for
/// programs.
fn start_up(directory: &Path, port: u16, log: &str) -> (Process, String) {
    let listen = format!("127.0.0.1:{port}");
    let [state, store] = ["state", SNAPSHOTS].map(|name| path_in(directory, name));
    let args = [
        "up",
        "--listen",
        &listen,
        "--state",
        &state,
        "--devices",
        "flex",
        "--snapshots",
        &store,
    ];
    let process = Process::start_of(&binary(), &args, &[], directory.join(log));
    let url = process.printed_url("program");
    (process, url)
}

#[test]
fn training_outlives_a_pool_of_one_process() {
    let directory = tempfile::tempdir().unwrap();
    let (mut up, url) = start_up(directory.path(), 0, "0.log");
    let undisturbed = undisturbed();
    let lease = Pool::connect(&url)
        .unwrap()
        .lease(LeaseRequest::devices(1))
        .unwrap();
    let administrator = Administrator::with_state(path_in(&directory, "state"));
    let PoolUrl { port, .. } = url.parse().unwrap();
    let ours = losses::<Mlp>(&lease.devices()[0], STEPS, |step| {
        match step {
            5 => {
                wait_for_store(&administrator);
                up.kill();
            }
            10 => {
                wait_for_store(&administrator);
                up.signal("TERM");
                assert_eq!(up.exit_code(EXIT_DEADLINE), Some(0), "{}", up.log());
            }
            _ => return,
        }
        (up, _) = start_up(directory.path(), port, &format!("{step}.log"));
    });
    assert_eq!(ours, Ok(undisturbed), "{}", up.log());
    assert_eq!(lease.ended(), None);
}
