//! Workers that impersonate others, and workers that break rules.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use tensord_client::LeaseRequest;
use tensord_proto::{
    v1::{Abort, ErrorCode, Join, Register, frame::Body},
    version,
};
use tensord_testkit::{
    cluster::{Cluster, Process, binary},
    models::Mlp,
    raw::{self, ClientStream, RawSession, RawWorker, Target, carriers, join_over},
    training::losses,
};
use tensord_transport::{Dialer, channel::duplex::Duplex, identity::worker_id};
use tokio::time::timeout;

/// Timeout for any single step, long enough for a slow machine.
const STEP_TIMEOUT: Duration = Duration::from_secs(30);

const STEPS: usize = 12;

/// Runs an administrator's command on the scheduler's state and returns its output.
fn administer(cluster: &Cluster, args: &[&str]) -> String {
    let mut command = Command::new(binary());
    command.env_remove("TENSORD_URL").args(args);
    let output = command.arg("--state").arg(cluster.path("state")).output();
    let output = output.expect("the system starts processes");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {errors}");
    text
}

/// Extracts the URL from the output of `tensord token create`.
fn url_in(text: &str) -> String {
    text.split('\'').nth(1).expect("a URL").to_owned()
}

/// Leases a device of the worker that is trained on, with a raw client.
async fn leased(cluster: &Cluster) -> (ClientStream, Target) {
    let mut attached = ClientStream::to(cluster.client_url()).await.unwrap();
    let target = attached.lease(1).await.unwrap().remove(0);
    (attached, target)
}

/// Trains on a device of the only worker, with `attack` in the middle. The losses must
/// equal those of an undisturbed training.
fn train_during(cluster: &Cluster, attack: impl FnOnce()) {
    let pool = cluster.pool();
    let run = |attack: &mut dyn FnMut(usize)| {
        let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
        let losses = losses::<Mlp>(&lease.devices()[0], STEPS, attack).unwrap();
        assert_eq!(lease.ended(), None);
        losses
    };
    let undisturbed = run(&mut |_| {});
    let mut attack = Some(attack);
    let disturbed = run(&mut |step| {
        if step == STEPS / 2 {
            attack.take().expect("one step is in the middle")();
        }
    });
    assert_eq!(disturbed, undisturbed);
}

#[test]
fn worker_url_cannot_replace_a_live_worker() {
    let cluster = Cluster::start(&["flex*2"]);
    train_during(&cluster, || {
        raw::block(async {
            let (_attached, victim) = leased(&cluster).await;
            let join = async |change: &dyn Fn(&mut RawWorker)| {
                let mut rogue = RawWorker::new("rogue", 1);
                change(&mut rogue);
                let error = rogue.join(cluster.worker_url()).await.map(|_| ());
                let error = error.expect_err("it is turned away");
                assert_eq!(error.code(), ErrorCode::Enrolment, "{error}");
                error.message
            };
            let error = join(&|rogue| rogue.register.name = "worker-0".into()).await;
            assert!(
                error.contains("\"worker-0\" is enrolled with another key"),
                "{error}"
            );
            let error = join(&|rogue| rogue.register.worker_id = victim.worker_id).await;
            assert!(error.contains("the worker's id is not derived"), "{error}");
            // The victim's own registration, sent over another connection: the message has
            // the victim's certificate, but the connection proves another one.
            let replayed = |rogue: &mut RawWorker| {
                let pinned = victim.certificate();
                rogue.register = Register {
                    name: "worker-0".into(),
                    worker_id: victim.worker_id,
                    certificate_sha256: pinned.to_vec().into(),
                    address: victim.address.clone(),
                    ..rogue.register.clone()
                };
            };
            let error = join(&replayed).await;
            let expected =
                "the worker registered a certificate that differs from the one it presented";
            assert_eq!(error, expected);
        });
    });
    let status = cluster.pool().status().unwrap();
    let names: Vec<_> = status.workers.iter().map(|worker| &*worker.name).collect();
    assert_eq!(names, ["worker-0"]);
    let listed = administer(&cluster, &["worker", "list", "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed["workers"].as_array().unwrap().len(), 1, "{listed}");
}

#[test]
fn rogue_worker_gets_only_its_own_enrolment() {
    let cluster = Cluster::start(&["flex*2"]);
    train_during(&cluster, || {
        raw::block(async {
            let mut rogue = RawWorker::new("rogue", 1);
            let first = rogue.join(cluster.worker_url()).await.unwrap();
            // A second process with the same key, as if the first were gone.
            let again: [u8; 16] = [7; 16];
            let mut second = rogue.clone();
            second.register.start = again.to_vec().into();
            second.register.worker_id = worker_id(&rogue.identity.fingerprint(), &again).0;
            let error = second.join(cluster.worker_url()).await.map(|_| ());
            let error = error.expect_err("the first is there");
            assert!(error.message.contains("already in the pool"), "{error}");
            // A programs' token gives it no more rights than no token.
            let device = rogue.register.devices[0].clone();
            rogue.register.devices.push(device);
            let error = rogue.join(cluster.client_url()).await.map(|_| ());
            let error = error.expect_err("it has enrolled one device");
            assert!(
                error.message.contains("is enrolled with 1 flex device"),
                "{error}"
            );
            // An administrator removes it; its leases end.
            administer(&cluster, &["worker", "remove", "rogue"]);
            let error = first.ended().await.expect("a reason");
            assert!(error.message.contains("\"rogue\" was removed"), "{error}");
            let error = rogue.join(cluster.client_url()).await.map(|_| ());
            assert_eq!(error.expect_err("no token").code(), ErrorCode::Token);
        });
    });
}

#[test]
fn a_token_enrols_as_many_workers_as_it_says() {
    let cluster = Cluster::start(&[]);
    let args = ["token", "create", "--role", "worker", "--uses", "1"];
    let url = url_in(&administer(&cluster, &args));
    let start = |name: &str, devices: &str| {
        let state = cluster.path("hosts").join(name);
        let args = ["worker", "--name", name, "--devices", devices];
        let listen = ["--listen", "127.0.0.1:0"];
        let args: Vec<_> = args.into_iter().chain(listen).collect();
        let state = state.to_str().unwrap();
        let env = [("TENSORD_URL", url.as_str()), ("TENSORD_STATE", state)];
        Process::start(&args, &env, cluster.path(&format!("{name}.log")))
    };
    let turned_away = |mut process: Process, expected: &str| {
        assert_eq!(process.exit_code(STEP_TIMEOUT), Some(1));
        let log = process.log();
        let error = log.lines().find(|line| line.starts_with("error: "));
        assert!(error.is_some_and(|line| line.contains(expected)), "{log}");
    };
    let first = start("one", "flex");
    cluster.wait_for_workers(1);
    turned_away(start("two", "flex"), "has reached its limit of uses");
    // The first worker does not need the token again, unless it is to offer more.
    drop(first);
    cluster.wait_for_workers(0);
    turned_away(start("one", "flex*2"), "and is enrolled with 1 flex device");
    let _again = start("one", "flex");
    cluster.wait_for_workers(1);
}

/// Leases a device on each of two workers, and opens a session of `cohort` on each.
async fn gang(cluster: &Cluster, cohort: u64) -> (ClientStream, Vec<Target>, Vec<RawSession>) {
    let mut attached = ClientStream::to(cluster.client_url()).await.unwrap();
    let targets = attached.lease(2).await.unwrap();
    let mut sessions = Vec::new();
    for target in &targets {
        let mut open = target.open();
        open.cohort = cohort;
        sessions.push(RawSession::open_with(target, open).await.unwrap());
    }
    (attached, targets, sessions)
}

fn join(cohort: u64, from: &Target, to: &Target) -> Join {
    Join {
        hello: Some(version::hello()),
        lease_token: to.token.clone(),
        cohort,
        from_worker_id: from.worker_id,
        to_worker_id: to.worker_id,
        credit_bytes: 1 << 20,
        ..Join::default()
    }
}

/// All workers and programs of a lease have its token, so the token proves nothing.
#[test]
fn worker_cannot_impersonate_another_in_its_lease() {
    let cluster = Cluster::start(&["flex", "flex"]);
    raw::block(async {
        let (_attached, targets, _sessions) = gang(&cluster, 5).await;
        let [one, two] = &targets[..] else {
            panic!("a lease of two devices");
        };
        let rogue = RawWorker::new("rogue", 1);
        for carrier in carriers() {
            let posing = rogue.dial(carrier, two, join(5, one, two)).await;
            let error = posing.map(|_| ()).expect_err("it is another");
            assert_eq!(error.code(), ErrorCode::Protocol);
            let expected = "of the lease: it presented the certificate sha256:";
            assert!(error.message.contains(expected), "{error}");
            // A program has no certificate.
            let posing = join_over(Dialer::new(carrier), two, join(5, one, two)).await;
            let error = posing.map(|_| ()).expect_err("it is a program");
            assert!(
                error.message.contains("it presented no certificate"),
                "{error}"
            );
        }
    });
}

/// One worker of the lease belongs to the test. The other one accepts its frames until a
/// frame breaks a rule, and then accepts no more connections from it.
#[test]
fn peer_worker_that_breaks_a_rule_is_disconnected() {
    let cluster = Cluster::start(&["flex"]);
    raw::block(async {
        let rogue = RawWorker::new("rogue", 1);
        let _registered = rogue.join(cluster.worker_url()).await.unwrap();
        let mut attached = ClientStream::to(cluster.client_url()).await.unwrap();
        let targets = attached.lease(2).await.unwrap();
        let own = |target: &&Target| target.worker_id == rogue.register.worker_id;
        let from = targets.iter().find(own).expect("a device of each");
        let to = targets
            .iter()
            .find(|target| !own(target))
            .expect("likewise");
        let mut open = to.open();
        open.cohort = 5;
        let _session = RawSession::open_with(to, open).await.unwrap();
        let carrier = carriers()[0];
        let mut link = rogue.dial(carrier, to, join(5, from, to)).await.unwrap();
        let mut duplex = Duplex::new(1 << 20, 1 << 20, 1 << 20);
        // The group id is invalid.
        duplex.push(Body::Abort(Abort {
            group: vec![9],
            reason: String::new(),
        }));
        let frame = duplex.next_to_send().unwrap();
        link.sender.send(&frame).await.unwrap();
        let over = timeout(STEP_TIMEOUT, async {
            while let Ok(Some(_)) = link.receiver.recv().await {}
        });
        over.await.expect("the link ends");
        let started = Instant::now();
        let error = loop {
            match rogue.dial(carrier, to, join(5, from, to)).await {
                Err(error) => break error,
                // The reader that ends the link records the reason a moment before or
                // after.
                Ok(_) => assert!(started.elapsed() < STEP_TIMEOUT, "it may go on"),
            }
        };
        let expected = "worker rogue at 127.0.0.1:9 broke the protocol between workers";
        assert!(error.message.contains(expected), "{error}");
    });
}
