//! Replicas on the devices of a pool: lost, replaced, given back, and without a pool.

use std::{
    convert::Infallible,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, sleep},
    time::{Duration, Instant},
};

use burn::prelude::*;
use tensord_client::{Pool, data};
use tensord_serve::{BATCH, Model, Port, Serve};
use tensord_testkit::cluster::Cluster;

use crate::{
    client::{Connection, elements, get, infer, metric, request_bytes},
    models::{READY_WITHIN, bind, double, request_of, serve, slow, without_delay},
};

/// Waits until something holds.
#[track_caller]
fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + READY_WITHIN;
    while !holds() {
        assert!(
            Instant::now() < until,
            "{what} does not hold after {READY_WITHIN:?}"
        );
        sleep(Duration::from_millis(20));
    }
}

fn leases(pool: &Pool) -> usize {
    pool.status().expect("the pool answers").leases as usize
}

#[test]
fn no_request_fails_when_a_worker_is_killed() {
    let cluster = Cluster::start(&["flex", "flex", "flex"]);
    let model = double().replicas(2..=2).batching(without_delay());
    let server = serve(cluster.pool(), [model]);
    let address = server.address();
    let is_over = AtomicBool::new(false);
    let answered = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for client in 0..4 {
            let (is_over, answered) = (&is_over, &answered);
            scope.spawn(move || {
                let mut connection = Connection::open(address);
                for number in 0.. {
                    if is_over.load(Ordering::Relaxed) {
                        return;
                    }
                    let value = f64::from(1000 * client + number % 1000);
                    let started = Instant::now();
                    let answer = connection.infer("double", &request_of(&[value; 4], 4));
                    assert_eq!(elements(&answer), [2.0 * value + 1.0; 4]);
                    answered.lock().unwrap().push(started);
                }
            });
        }
        let ends = Ends(&is_over);
        wait_until("some requests are answered", || {
            answered.lock().unwrap().len() > 50
        });
        let victim = cluster.worker_of_lease().expect("a worker has a lease");
        cluster.workers[victim].signal_all("KILL");
        let killed = Instant::now();
        wait_until("requests are answered again", || {
            let answered = answered.lock().unwrap();
            answered
                .iter()
                .filter(|it| **it > killed + Duration::from_secs(3))
                .count()
                > 50
        });
        drop(ends);
    });
    // Both replicas compute again, on the workers that are left.
    wait_until("there are two leases", || {
        leases(&cluster.pool()) == 2 && server.is_ready()
    });
}

#[test]
fn another_replica_answers_while_a_worker_is_silent() {
    let cluster = Cluster::start(&["flex", "flex"]);
    let model = double().replicas(2..=2).batching(without_delay());
    let server = serve(cluster.pool(), [model]);
    wait_until("there are two replicas", || {
        metric(&server, "tensord_serve_replicas") == 2.0
    });
    let address = server.address();
    let infer = |value: f64| {
        let answer = infer(address, "double", &request_of(&[value; 4], 4));
        assert_eq!(elements(&answer), [2.0 * value + 1.0; 4]);
    };
    (0..20).for_each(|it| infer(f64::from(it)));
    let silent = cluster.worker_of_lease().expect("a worker has a lease");
    cluster.workers[silent].signal_all("STOP");
    thread::scope(|scope| {
        for client in 0..8 {
            scope.spawn(move || (0..20).for_each(|it| infer(f64::from(100 * client + it))));
        }
    });
    assert!(metric(&server, "tensord_serve_handed_over_total") > 0.0);
    cluster.workers[silent].signal_all("CONT");
}

#[test]
fn no_request_fails_when_a_worker_is_stopped() {
    let cluster = Cluster::start(&["flex", "flex"]);
    let server = serve(cluster.pool(), [double().batching(without_delay())]);
    let mut connection = Connection::open(server.address());
    let mut infer = |value: f64| {
        let answer = connection.infer("double", &request_of(&[value; 4], 4));
        assert_eq!(elements(&answer), [2.0 * value + 1.0; 4]);
    };
    infer(1.0);
    let stopped = cluster.worker_of_lease().expect("a worker has the lease");
    cluster.workers[stopped].signal("TERM");
    // The lease moves to the other worker, or another replica is started there.
    let mut number = 0.0;
    wait_until("the other worker computes", || {
        number += 1.0;
        infer(number);
        cluster.worker_of_lease().is_some_and(|it| it != stopped)
    });
    (0..50).for_each(|it| infer(f64::from(it)));
}

/// Has clients stop, also if the test fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn weights_are_uploaded_once_for_the_replicas_of_a_host() {
    let cluster = Cluster::start(&["flex*2"]);
    // 4 MiB of weights, which are not all equal.
    let load = |device: &Device| {
        let weights: Vec<f32> = (0..1 << 20).map(|it| it as f32).collect();
        let weights: Tensor<2> = data::from_data(TensorData::new(weights, [4, 1 << 18]), device);
        Ok::<_, Infallible>(move |x: Tensor<2>| x.matmul(weights.clone()).slice(s![.., ..4]))
    };
    let input = Port::f32("x", [BATCH, 4]);
    let model = Model::new("heavy", input, Port::f32("y", [BATCH, 4]), load);
    let server = serve(cluster.pool(), [model.replicas(2..=2)]);
    wait_until("there are two replicas", || {
        metric(&server, "tensord_serve_replicas") == 2.0
    });
    let bytes = metric(&server, "tensord_serve_load_bytes_total");
    assert!(bytes > 4e6 && bytes < 5e6, "{bytes} bytes");
}

#[test]
fn a_replica_is_there_on_demand_and_given_back() {
    let cluster = Cluster::start(&["flex*2"]);
    let pool = cluster.pool();
    let model = double()
        .replicas(0..=2)
        .idle_after(Duration::from_millis(500));
    let server = serve(cluster.pool(), [model]);
    assert_eq!(leases(&pool), 0);
    for _ in 0..2 {
        assert_eq!(
            elements(&infer(
                server.address(),
                "double",
                &request_of(&[1.0; 4], 4)
            )),
            [3.0; 4]
        );
        assert_eq!(leases(&pool), 1);
        wait_until("the device is given back", || leases(&pool) == 0);
        assert!(server.is_ready());
    }
}

#[test]
fn there_are_more_replicas_while_requests_wait() {
    let cluster = Cluster::start(&["flex*2"]);
    let pool = cluster.pool();
    let model = slow(Duration::from_millis(100)).batching(tensord_serve::Batching {
        max_size: 1,
        ..without_delay()
    });
    let model = model.replicas(1..=2).idle_after(Duration::from_millis(500));
    let server = serve(cluster.pool(), [model]);
    let address = server.address();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let answer = infer(address, "slow", &request_of(&[1.0; 4], 4));
                    assert_eq!(elements(&answer), [3.0; 4]);
                }
            });
        }
        let ends = Ends(&is_over);
        wait_until("there are two replicas", || leases(&pool) == 2);
        drop(ends);
    });
    wait_until("one is given back", || leases(&pool) == 1);
    assert_eq!(
        elements(&infer(address, "slow", &request_of(&[1.0; 4], 4))),
        [3.0; 4]
    );
}

#[test]
fn a_server_without_its_pool_says_so_and_is_ready_again_by_itself() {
    let mut cluster = Cluster::start(&["flex"]);
    let server = serve(cluster.pool(), [double()]);
    let address = server.address();
    cluster.workers[0].signal_all("KILL");
    let answer = loop {
        let answer = infer(address, "double", &request_of(&[1.0; 4], 4));
        if answer.status == 503 {
            break answer;
        }
        assert!(
            [200, 429, 504].contains(&answer.status),
            "{}",
            answer.text()
        );
    };
    assert!(
        answer
            .error()
            .starts_with("model `double` has no device at present: "),
        "{}",
        answer.error()
    );
    assert!(answer.header("retry-after").is_some());
    assert_eq!(get(address, "/v2/health/ready").status, 503);
    assert_eq!(get(address, "/v2/health/live").status, 200);
    cluster.add_worker("flex");
    wait_until("the server is ready", || {
        get(address, "/v2/health/ready").status == 200
    });
    assert_eq!(
        elements(&infer(address, "double", &request_of(&[1.0; 4], 4))),
        [3.0; 4]
    );
}

#[test]
fn a_server_that_ends_answers_what_it_has_begun() {
    let cluster = Cluster::start(&["flex"]);
    let pool = cluster.pool();
    let model = slow(Duration::from_millis(500)).batching(without_delay());
    let server = serve(cluster.pool(), [model]);
    let address = server.address();
    let mut connection = Connection::open(address);
    connection.send(&request_bytes("slow", &request_of(&[1.0; 4], 4)));
    sleep(Duration::from_millis(200));
    server.shutdown();
    assert_eq!(elements(&connection.answer()), [3.0; 4]);
    assert!(std::net::TcpStream::connect(address).is_err());
    wait_until("the device is given back", || leases(&pool) == 0);
}

#[test]
fn a_model_that_cannot_be_loaded_is_not_ready_and_says_why() {
    let cluster = Cluster::start(&["flex"]);
    let input = tensord_serve::Port::f32("x", [tensord_serve::BATCH, 1]);
    let output = tensord_serve::Port::f32("y", [tensord_serve::BATCH, 1]);
    let load = |_: &burn::tensor::Device| {
        Err::<fn(burn::tensor::Tensor<2>) -> burn::tensor::Tensor<2>, _>("weights.bin is missing")
    };
    let broken = Model::new("broken", input, output, load);
    let server = bind(Serve::new(cluster.pool()).model(broken));
    let answer = infer(server.address(), "broken", &request_of(&[1.0], 1));
    let expected =
        "model `broken` has no device at present: cannot load the model: weights.bin is missing";
    assert_eq!((answer.status, answer.error().as_str()), (503, expected));
    assert!(!server.is_ready());
}

#[test]
fn a_model_on_demand_is_loaded_again_after_a_failure() {
    let cluster = Cluster::start(&["flex"]);
    let tries = AtomicUsize::new(0);
    let load = move |_: &Device| match tries.fetch_add(1, Ordering::Relaxed) {
        0 => Err("the disk is away"),
        _ => Ok(|x: Tensor<2>| x * 2.0 + 1.0),
    };
    let input = Port::f32("x", [BATCH, 4]);
    let model = Model::new("flaky", input, Port::f32("y", [BATCH, 4]), load);
    let server = serve(cluster.pool(), [model.replicas(0..=1)]);
    let infer = || infer(server.address(), "flaky", &request_of(&[1.0; 4], 4));
    let first = infer();
    assert_eq!(first.status, 503);
    assert!(
        first.error().ends_with("the disk is away"),
        "{}",
        first.error()
    );
    wait_until("the model answers", || infer().status == 200);
}
