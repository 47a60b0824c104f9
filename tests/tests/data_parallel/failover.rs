//! A data-parallel training goes on when the process or the worker of its lease dies, and computes
//! the same bits.

use std::{
    sync::{Arc, Mutex, OnceLock},
    thread::{sleep, spawn},
    time::Duration,
};

use tensord_client::{Lease, LeaseRequest};
use tensord_testkit::{
    administrator::Administrator,
    cluster::{Cluster, Process},
    models::{Classifier, Mlp, ModelSize, Transformer},
    random_kills::RandomKills,
    replicas::{TrainingRecord, replicas, replicas_while, training_lock},
};

/// Pause between two kills: shorter than the time between two cuts, so that the sessions go on from
/// some cuts twice.
const PAUSE: Duration = Duration::from_millis(1300);

/// How long a worker that is stopped may take to exit after its lease has left it.
const EXIT_DEADLINE: Duration = Duration::from_secs(60);

/// Longer than the time between two heartbeats of a worker.
const REPORT_INTERVAL: Duration = Duration::from_millis(1500);

/// From when a lease could go on elsewhere, workers are killed within this time: longer than from one mark to the next.
const LONGEST_WAIT: Duration = Duration::from_millis(2500);

/// Devices of a lease on one worker, or on two.
const RANKS: usize = 2;

/// Leases `ranks` devices of `cluster`, and initialises a model on the first.
fn model<M: Classifier>(cluster: &Cluster, ranks: usize) -> (Lease, M) {
    let request = LeaseRequest::devices(ranks as u32);
    let lease = cluster.pool().lease(request).unwrap();
    let first = lease.devices()[0].clone().autodiff();
    first.seed(42);
    let model = M::new(&ModelSize::SMALL, &first).fork(&first);
    (lease, model)
}

/// Trains replicas of a model on a lease of `ranks` devices of `cluster`. Meanwhile `disturb` is
/// called `count` times, with the number of calls before. The training ends after the first epoch
/// that has begun after the last call. Checks that it computes the same bits as an undisturbed one
/// on `workers`.
fn check_disturbed<M: Classifier + 'static>(
    cluster: &Arc<Mutex<Cluster>>,
    workers: &[&str],
    ranks: usize,
    count: usize,
    disturb: impl Fn(&mut Cluster, usize) + Send + 'static,
) {
    let (lease, model) = model::<M>(&cluster.lock().unwrap(), ranks);
    let running = Arc::new(());
    let is_running = Arc::downgrade(&running);
    let disturber = spawn({
        let cluster = cluster.clone();
        move || {
            for number in 0..count {
                sleep(PAUSE);
                disturb(&mut cluster.lock().unwrap(), number);
            }
            drop(running);
        }
    });
    let last_epoch = OnceLock::new();
    let ours = replicas_while(&model, lease.devices(), move |epoch| {
        if is_running.strong_count() == 0 {
            last_epoch.get_or_init(|| epoch);
        }
        last_epoch.get().is_none_or(|last| epoch <= *last)
    });
    disturber.join().unwrap();
    assert_eq!(lease.ended(), None);
    drop(lease);
    let undisturbed = undisturbed::<M>(workers, ranks, ours[0].weights.len());
    assert_same(&ours, &undisturbed, &cluster.lock().unwrap().logs());
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
    let cluster = Cluster::start(workers);
    let (lease, model) = model::<M>(&cluster, ranks);
    replicas(&model, lease.devices(), epochs)
}

/// Trains while the process of the lease is killed `kills` times.
fn check_process_killed<M: Classifier + 'static>(kills: usize) {
    let _alone = training_lock();
    let workers = ["flex*2"];
    check_disturbed::<M>(&start(&workers), &workers, RANKS, kills, |cluster, _| {
        let worker = &cluster.workers[0];
        wait_for_cut(cluster, worker);
        worker.signal_child(worker.process_of_lease(), "KILL");
    });
}

#[test]
fn mlp_trains_on_when_its_process_is_killed() {
    check_process_killed::<Mlp>(4);
}

#[test]
fn transformer_trains_on_when_its_process_is_killed() {
    check_process_killed::<Transformer>(2);
}

#[test]
fn mlp_trains_on_when_its_worker_is_killed() {
    let _alone = training_lock();
    let cluster = start(&["flex*2", "flex*2"]);
    check_disturbed::<Mlp>(&cluster, &["flex*2"], RANKS, 3, |cluster, _| {
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
}

/// Trains on a lease of one device of each of `workers`, while processes of the lease are killed
/// `kills` times: `victims` returns on which workers, for each number of times before.
fn check_processes_killed_on_several_workers(
    workers: &[&str],
    kills: usize,
    victims: impl Fn(usize) -> Vec<usize> + Send + 'static,
) {
    let _alone = training_lock();
    let kill = move |cluster: &mut Cluster, count| {
        cluster.wait("a snapshot at each worker", || {
            let mut workers = cluster.workers.iter();
            workers.all(|worker| !worker.snapshots_bytes().is_empty())
        });
        for victim in victims(count) {
            let worker = &cluster.workers[victim];
            worker.signal_child(worker.process_of_lease(), "KILL");
        }
    };
    check_disturbed::<Mlp>(&start(workers), workers, workers.len(), kills, kill);
}

#[test]
fn mlp_on_two_workers_trains_on_when_processes_are_killed() {
    let one = |count| vec![count % 2];
    check_processes_killed_on_several_workers(&["flex", "flex"], 4, one);
}

#[test]
fn mlp_on_four_workers_trains_on_when_two_processes_are_killed_at_once() {
    let two = |count| vec![count % 4, (count + 1 + count / 4) % 4];
    check_processes_killed_on_several_workers(&["flex"; 4], 3, two);
}

#[test]
fn mlp_on_two_workers_trains_on_when_it_is_suspended() {
    let _alone = training_lock();
    let workers = ["flex", "flex"];
    let cluster = start(&workers);
    let administrator = Administrator::of(&cluster.lock().unwrap());
    check_disturbed::<Mlp>(&cluster, &workers, RANKS, 4, move |_, _| {
        administrator.suspend_running();
        assert_eq!(administrator.holders(), RANKS);
        administrator.resume_suspended();
    });
}

/// Waits until a lease of one device of each of `ranks` workers runs and has its snapshots at others. Returns the
/// indices of its workers.
fn wait_for_copies(cluster: &Cluster, ranks: usize) -> Vec<usize> {
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
            running.len() == ranks && kept.sum::<usize>() > 2 * (ranks - 1)
        },
    );
    running
}

/// Has one of the workers of the lease leave the pool by `remove` once its snapshots are at another one,
/// and adds a worker in its place.
fn replace_worker(cluster: &mut Cluster, count: usize, remove: impl FnOnce(&mut Process)) {
    let running = wait_for_copies(cluster, RANKS);
    remove(&mut cluster.workers[running[count % RANKS]]);
    cluster.add_worker("flex");
}

/// Trains on a lease of one device of each of `ranks` workers of a pool of `ranks + spare`, while `at_once` of them are
/// killed at random moments, and others take their places.
fn check_killed_at_random(ranks: usize, spare: usize, at_once: usize) {
    let _alone = training_lock();
    let random = RandomKills::new(1);
    let kills = random.kills;
    let random = Mutex::new(random);
    let kill = move |cluster: &mut Cluster, _| {
        let running = wait_for_copies(cluster, ranks);
        let mut random = random.lock().unwrap();
        sleep(random.time(LONGEST_WAIT));
        for victim in random.choose(at_once, ranks) {
            cluster.workers[running[victim]].kill();
        }
        (0..at_once).for_each(|_| cluster.add_worker("flex"));
    };
    let pool = vec!["flex"; ranks + spare];
    check_disturbed::<Mlp>(&start(&pool), &pool[..ranks], ranks, kills, kill);
}

#[test]
fn mlp_on_two_workers_survives_kills_at_random() {
    check_killed_at_random(2, 1, 1);
}

#[test]
fn mlp_on_four_workers_survives_kills_of_two_at_once_at_random() {
    check_killed_at_random(4, 2, 2);
}

/// Trains on a lease of two of three workers, which leave the pool one after the other by `remove`, while
/// others take their places.
fn check_workers_replaced(remove: impl Fn(&mut Process) + Send + 'static) {
    let _alone = training_lock();
    let replace = move |cluster: &mut Cluster, count| replace_worker(cluster, count, &remove);
    check_disturbed::<Mlp>(&start(&["flex"; 3]), &["flex"; 2], RANKS, 4, replace);
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

/// The lease has all devices of the pool, so each of its workers keeps the snapshots of the other one,
/// and gives them to the worker that takes the other one's place.
#[test]
fn mlp_on_two_workers_trains_on_when_one_of_a_pool_of_two_is_killed() {
    let _alone = training_lock();
    let workers = ["flex", "flex"];
    let kill = |cluster: &mut Cluster, count: usize| {
        let mut running = Vec::new();
        cluster.wait("each worker to have the snapshots of both", || {
            let workers = (0..).zip(&cluster.workers);
            // A session has two snapshots at most.
            let has_both = |worker: &Process| {
                !worker.processes_of_leases().is_empty() && worker.snapshots_bytes().len() > 2
            };
            let with_both = workers.filter(|(_, worker)| has_both(worker));
            running = with_both.map(|(index, _)| index).collect();
            running.len() == RANKS
        });
        // The scheduler learns of it by a heartbeat.
        sleep(REPORT_INTERVAL);
        cluster.workers[running[count % RANKS]].kill();
        cluster.add_worker("flex");
    };
    check_disturbed::<Mlp>(&start(&workers), &workers, RANKS, 4, kill);
}

#[test]
fn mlp_on_two_workers_trains_on_when_both_are_killed() {
    let _alone = training_lock();
    let cluster = start(&[]);
    let add_worker = |cluster: &mut Cluster| cluster.add_worker_with_store("flex");
    let administrator = {
        let mut cluster = cluster.lock().unwrap();
        (0..RANKS).for_each(|_| add_worker(&mut cluster));
        cluster.wait_for_workers(RANKS);
        Administrator::of(&cluster)
    };
    check_disturbed::<Mlp>(&cluster, &["flex"; 2], RANKS, 3, move |cluster, _| {
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
}
