//! A data-parallel training goes on when the process or the worker of its lease dies, and computes
//! the same bits.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{sleep, spawn},
    time::Duration,
};

use tensord_client::LeaseRequest;
use tensord_testkit::{
    administrator::Administrator,
    cluster::{Cluster, Process},
    models::{Classifier, Mlp, ModelSize, Transformer},
    replicas::{TrainingRecord, replicas, training_lock},
};

/// Pause between two kills: shorter than the time between two cuts, so that the sessions go on from
/// some cuts twice.
const PAUSE: Duration = Duration::from_millis(1300);

/// How long a worker that is stopped may take to exit after its lease has left it.
const EXIT_DEADLINE: Duration = Duration::from_secs(60);

/// Devices of a lease on one worker, or on two.
const RANKS: usize = 2;

/// Trains replicas of a model on a lease of `ranks` devices of `cluster`, while `disturb` is called
/// again and again, with the number of calls before. Returns what each device has recorded, and how
/// often `disturb` was called.
fn train<M: Classifier + 'static>(
    cluster: &Arc<Mutex<Cluster>>,
    ranks: usize,
    epochs: usize,
    disturb: impl Fn(&mut Cluster, usize) + Send + 'static,
) -> (Vec<TrainingRecord>, usize) {
    let pool = cluster.lock().unwrap().pool();
    let lease = pool.lease(LeaseRequest::devices(ranks as u32)).unwrap();
    let first = lease.devices()[0].clone().autodiff();
    first.seed(42);
    let model = M::new(&ModelSize::SMALL, &first).fork(&first);
    let is_over = Arc::new(AtomicBool::new(false));
    let disturber = spawn({
        let (is_over, cluster) = (is_over.clone(), cluster.clone());
        move || {
            for count in 0.. {
                sleep(PAUSE);
                if is_over.load(Ordering::Relaxed) {
                    return count;
                }
                disturb(&mut cluster.lock().unwrap(), count);
            }
            unreachable!("the training ends")
        }
    });
    let records = replicas(&model, lease.devices(), epochs);
    is_over.store(true, Ordering::Relaxed);
    let count = disturber.join().unwrap();
    assert_eq!(lease.ended(), None);
    (records, count)
}

/// Waits until both sessions have snapshots.
fn wait_for_cut(cluster: &Cluster, worker: &Process) {
    cluster.wait("snapshots of both sessions", || {
        worker.snapshots_bytes().len() >= RANKS
    });
}

/// Checks that two trainings have computed the same bits on each device.
fn assert_same(ours: &[TrainingRecord], undisturbed: &[TrainingRecord], log: &str) {
    assert_eq!(ours.len(), undisturbed.len());
    for (rank, (ours, undisturbed)) in ours.iter().zip(undisturbed).enumerate() {
        assert_eq!(ours.losses, undisturbed.losses, "rank {rank}: {log}");
        assert!(ours.weights == undisturbed.weights, "rank {rank}: {log}");
    }
}

fn start(workers: &[&str]) -> Arc<Mutex<Cluster>> {
    Arc::new(Mutex::new(Cluster::start(workers)))
}

fn undisturbed<M: Classifier + 'static>(
    workers: &[&str],
    ranks: usize,
    epochs: usize,
) -> Vec<TrainingRecord> {
    train::<M>(&start(workers), ranks, epochs, |_, _| {}).0
}

/// Trains while the process of the lease is killed at least `kills` times.
fn check_process_killed<M: Classifier + 'static>(epochs: usize, kills: usize) {
    let _alone = training_lock();
    let expected = undisturbed::<M>(&["flex*2"], RANKS, epochs);
    let cluster = start(&["flex*2"]);
    let (records, killed) = train::<M>(&cluster, RANKS, epochs, |cluster, _| {
        let worker = &cluster.workers[0];
        wait_for_cut(cluster, worker);
        worker.signal_child(worker.process_of_lease(), "KILL");
    });
    let log = cluster.lock().unwrap().workers[0].log();
    assert_same(&records, &expected, &log);
    assert!(killed >= kills, "{killed} kills");
}

#[test]
fn mlp_trains_on_when_its_process_is_killed() {
    check_process_killed::<Mlp>(60, 3);
}

#[test]
fn transformer_trains_on_when_its_process_is_killed() {
    check_process_killed::<Transformer>(8, 2);
}

#[test]
fn mlp_trains_on_when_its_worker_is_killed() {
    const EPOCHS: usize = 60;
    let _alone = training_lock();
    let expected = undisturbed::<Mlp>(&["flex*2"], RANKS, EPOCHS);
    let cluster = start(&["flex*2", "flex*2"]);
    let (records, killed) = train::<Mlp>(&cluster, RANKS, EPOCHS, |cluster, _| {
        cluster.wait("a worker to run the lease", || {
            cluster.worker_of_lease().is_some()
        });
        let running = cluster.worker_of_lease().unwrap();
        let others = || {
            let others = (0..).zip(&cluster.workers).filter(|(at, _)| *at != running);
            others.flat_map(|(_, worker)| worker.snapshots_bytes())
        };
        cluster.wait("snapshots at the other worker", || {
            others().count() >= RANKS
        });
        cluster.workers[running].kill();
        cluster.add_worker("flex*2");
    });
    let logs = cluster.lock().unwrap().logs();
    assert_same(&records, &expected, &logs);
    assert!(killed >= 2, "{killed} kills");
}

/// Trains on a lease of one device of each of `workers`, while `victims` returns whose processes of
/// the lease are killed, for each number of kills before.
fn check_processes_killed_on_several_workers(
    workers: &[&str],
    epochs: usize,
    kills: usize,
    victims: impl Fn(usize) -> Vec<usize> + Send + 'static,
) {
    let _alone = training_lock();
    let ranks = workers.len();
    let expected = undisturbed::<Mlp>(workers, ranks, epochs);
    let cluster = start(workers);
    let (records, killed) = train::<Mlp>(&cluster, ranks, epochs, move |cluster, count| {
        cluster.wait("a snapshot at each worker", || {
            let mut workers = cluster.workers.iter();
            workers.all(|worker| !worker.snapshots_bytes().is_empty())
        });
        for victim in victims(count) {
            let worker = &cluster.workers[victim];
            worker.signal_child(worker.process_of_lease(), "KILL");
        }
    });
    let logs = cluster.lock().unwrap().logs();
    assert_same(&records, &expected, &logs);
    assert!(killed >= kills, "{killed} kills");
}

#[test]
fn mlp_on_two_workers_trains_on_when_processes_are_killed() {
    let one = |count| vec![count % 2];
    check_processes_killed_on_several_workers(&["flex", "flex"], 40, 3, one);
}

#[test]
fn mlp_on_four_workers_trains_on_when_two_processes_are_killed_at_once() {
    let two = |count| vec![count % 4, (count + 1 + count / 4) % 4];
    check_processes_killed_on_several_workers(&["flex"; 4], 12, 2, two);
}

#[test]
fn mlp_on_two_workers_trains_on_when_it_is_suspended() {
    const EPOCHS: usize = 30;
    let _alone = training_lock();
    let workers = ["flex", "flex"];
    let expected = undisturbed::<Mlp>(&workers, RANKS, EPOCHS);
    let cluster = start(&workers);
    let administrator = Administrator::of(&cluster.lock().unwrap());
    let (records, suspended) = train::<Mlp>(&cluster, RANKS, EPOCHS, move |_, _| {
        administrator.suspend_running();
        assert_eq!(administrator.holders(), RANKS);
        administrator.resume_suspended();
    });
    let logs = cluster.lock().unwrap().logs();
    assert_same(&records, &expected, &logs);
    assert!(suspended >= 3, "{suspended} suspensions");
}

/// Has one of the workers of the lease leave the pool by `remove` once its snapshots are at another one,
/// and adds a worker in its place.
fn replace_worker(cluster: &mut Cluster, count: usize, remove: impl FnOnce(&mut Process)) {
    let is_running = |worker: &Process| !worker.processes_of_leases().is_empty();
    let mut running = Vec::new();
    cluster.wait(
        "the lease to run, with its snapshots at another worker",
        || {
            let (workers, others): (Vec<_>, Vec<_>) = (0..)
                .zip(&cluster.workers)
                .partition(|(_, it)| is_running(it));
            let kept = others
                .iter()
                .map(|(_, worker)| worker.snapshots_bytes().len());
            running = workers.iter().map(|(index, _)| *index).collect();
            // A session has two snapshots at most, so some are of each session.
            running.len() == RANKS && kept.sum::<usize>() > 2 * (RANKS - 1)
        },
    );
    remove(&mut cluster.workers[running[count % RANKS]]);
    cluster.add_worker("flex");
}

/// Trains on a lease of two of three workers, which leave the pool one after the other by `remove`, while
/// others take their places.
fn check_workers_replaced(remove: impl Fn(&mut Process) + Send + 'static) {
    const EPOCHS: usize = 60;
    let _alone = training_lock();
    let expected = undisturbed::<Mlp>(&["flex", "flex"], RANKS, EPOCHS);
    let cluster = start(&["flex"; 3]);
    let (records, replaced) = train::<Mlp>(&cluster, RANKS, EPOCHS, move |cluster, count| {
        replace_worker(cluster, count, &remove);
    });
    let logs = cluster.lock().unwrap().logs();
    assert_same(&records, &expected, &logs);
    assert!(replaced >= 3, "{replaced} workers were replaced");
}

#[test]
fn mlp_on_two_workers_trains_on_when_workers_are_killed() {
    check_workers_replaced(Process::kill);
}

#[test]
fn mlp_on_two_workers_trains_on_when_workers_are_stopped() {
    check_workers_replaced(|worker| {
        worker.signal("TERM");
        assert_eq!(worker.exit_code(EXIT_DEADLINE), Some(0));
    });
}

#[test]
fn mlp_on_two_workers_trains_on_when_both_are_killed() {
    const EPOCHS: usize = 40;
    let _alone = training_lock();
    let expected = undisturbed::<Mlp>(&["flex", "flex"], RANKS, EPOCHS);
    let cluster = start(&[]);
    let add_worker = |cluster: &mut Cluster| cluster.add_worker_with_store("flex");
    let administrator = {
        let mut cluster = cluster.lock().unwrap();
        (0..RANKS).for_each(|_| add_worker(&mut cluster));
        cluster.wait_for_workers(RANKS);
        Administrator::of(&cluster)
    };
    let (records, killed) = train::<Mlp>(&cluster, RANKS, EPOCHS, move |cluster, _| {
        administrator.wait("the snapshots in the store", || {
            administrator.leases()[0]["in_store"] == true
        });
        let moves = || administrator.leases()[0]["moves"].as_u64().unwrap();
        let moves_before = moves();
        for worker in cluster.workers.iter_mut().rev().take(RANKS) {
            worker.kill();
        }
        (0..RANKS).for_each(|_| add_worker(cluster));
        administrator.wait("the lease to go on", || moves() > moves_before);
    });
    let logs = cluster.lock().unwrap().logs();
    assert_same(&records, &expected, &logs);
    assert!(killed >= 2, "{killed} times");
}
