//! A data-parallel training goes on elsewhere when two of its workers cannot reach each other, or its program cannot
//! reach one of them, although the scheduler reaches all. It computes the same bits.

use std::{
    net::SocketAddr,
    process,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread::{scope, sleep},
    time::Duration,
};

use burn::module::Module;
use tensord_client::{Lease, LeaseEvent, LeaseRequest};
use tensord_testkit::{
    cluster::Cluster,
    models::{Classifier, Mlp, ModelSize},
    relay::Relay,
    replicas::{replicas, replicas_while, training_lock},
};

/// From the start of the training until the network breaks: longer than until the first snapshots.
const STEADY: Duration = Duration::from_secs(6);

/// Starts three workers, each behind a relay on an address of its own.
fn start() -> (Cluster, Vec<Relay>) {
    let mut cluster = Cluster::start(&[]);
    let relays = (0..3_u8).map(|number| {
        let host = [127, 0, 0, 10 + number];
        let advertise = host.map(|it| it.to_string()).join(".");
        cluster.add_worker_with("flex", &["--advertise", &advertise]);
        let worker = &cluster.workers[usize::from(number)];
        let listening = || {
            let log = worker.log();
            let (_, address) = log.split_once("address=")?;
            address
                .split_whitespace()
                .next()?
                .parse::<SocketAddr>()
                .ok()
        };
        cluster.wait("the worker to listen", || listening().is_some());
        let target = listening().expect("it listens");
        Relay::start((host, target.port()).into(), target).unwrap()
    });
    let relays = relays.collect();
    cluster.wait_for_workers(3);
    (cluster, relays)
}

/// Leases two devices, and initialises a model on the first.
fn lease_and_model(cluster: &Cluster, request: LeaseRequest) -> (Lease, Mlp) {
    let lease = cluster.pool().lease(request).unwrap();
    let first = lease.devices()[0].clone().autodiff();
    first.seed(42);
    let model = Mlp::new(&ModelSize::SMALL, &first).fork(&first);
    (lease, model)
}

/// Trains on two of three workers, and calls `break_network` after a while, with the numbers of the two. Checks that the
/// lease leaves one of them, and that the training computes the same bits as an undisturbed one.
fn check(break_network: impl Fn(&Cluster, &[Relay], [usize; 2])) {
    let _alone = training_lock();
    let (cluster, relays) = start();
    let reasons = Arc::new(Mutex::new(Vec::new()));
    let request = LeaseRequest::devices(2).on_event({
        let reasons = reasons.clone();
        move |event| {
            if let LeaseEvent::Waiting { reason } = event {
                reasons.lock().unwrap().push(reason);
            }
        }
    });
    let (lease, model) = lease_and_model(&cluster, request);
    let workers = [0, 1].map(|rank: usize| {
        let name = &lease.descriptions()[rank].worker;
        name.strip_prefix("worker-").unwrap().parse().unwrap()
    });
    let (is_over, last_epoch) = (Arc::new(AtomicBool::new(false)), OnceLock::new());
    let ours = scope(|scope| {
        let ends = is_over.clone();
        let training = scope.spawn(|| {
            replicas_while(&model, lease.devices(), move |epoch| {
                if ends.load(Ordering::Relaxed) {
                    last_epoch.get_or_init(|| epoch);
                }
                last_epoch.get().is_none_or(|last| epoch <= *last)
            })
        });
        sleep(STEADY);
        break_network(&cluster, &relays, workers);
        cluster.wait("the lease to leave", || !reasons.lock().unwrap().is_empty());
        sleep(STEADY);
        is_over.store(true, Ordering::Relaxed);
        training.join().unwrap()
    });
    let reasons = reasons.lock().unwrap();
    assert!(reasons[0].contains("cannot reach worker"), "{reasons:?}");
    assert_eq!(lease.ended(), None);
    drop(lease);
    let undisturbed = Cluster::start(&["flex", "flex"]);
    let (lease, model) = lease_and_model(&undisturbed, LeaseRequest::devices(2));
    let expected = replicas(&model, lease.devices(), ours[0].weights.len());
    for (ours, expected) in ours.iter().zip(&expected) {
        assert_eq!(ours.losses, expected.losses, "{}", cluster.logs());
        assert!(ours.weights == expected.weights);
    }
}

#[test]
fn training_leaves_one_of_two_workers_that_cannot_reach_each_other() {
    check(|cluster, relays, [first, second]| {
        relays[second].refuse_worker(cluster.workers[first].id());
        relays[first].refuse_worker(cluster.workers[second].id());
    });
}

#[test]
fn training_leaves_a_worker_that_its_program_cannot_reach() {
    check(|_, relays, [_, second]| relays[second].refuse(process::id()));
}
