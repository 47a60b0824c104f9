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
    cluster::{Cluster, Process},
    models::{Classifier, Mlp, ModelSize, Transformer},
    replicas::{TrainingRecord, replicas, training_lock},
};

/// Pause between two kills: shorter than the time between two cuts, so that the sessions go on from
/// some cuts twice.
const PAUSE: Duration = Duration::from_millis(1300);

const RANKS: usize = 2;

/// Trains replicas of a model on a lease of two devices of `cluster`, while `disturb` is called again
/// and again. Returns what each device has recorded, and how often `disturb` was called.
fn train<M: Classifier + 'static>(
    cluster: &Arc<Mutex<Cluster>>,
    epochs: usize,
    disturb: impl Fn(&mut Cluster) + Send + 'static,
) -> (Vec<TrainingRecord>, usize) {
    let pool = cluster.lock().unwrap().pool();
    let lease = pool.lease(LeaseRequest::devices(RANKS as u32)).unwrap();
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
                disturb(&mut cluster.lock().unwrap());
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

fn undisturbed<M: Classifier + 'static>(epochs: usize) -> Vec<TrainingRecord> {
    let cluster = Arc::new(Mutex::new(Cluster::start(&["flex*2"])));
    train::<M>(&cluster, epochs, |_| {}).0
}

/// Trains while the process of the lease is killed at least `kills` times.
fn check_process_killed<M: Classifier + 'static>(epochs: usize, kills: usize) {
    let _alone = training_lock();
    let expected = undisturbed::<M>(epochs);
    let cluster = Arc::new(Mutex::new(Cluster::start(&["flex*2"])));
    let (records, killed) = train::<M>(&cluster, epochs, |cluster| {
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
    let expected = undisturbed::<Mlp>(EPOCHS);
    let cluster = Arc::new(Mutex::new(Cluster::start(&["flex*2", "flex*2"])));
    let (records, killed) = train::<Mlp>(&cluster, EPOCHS, |cluster| {
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
