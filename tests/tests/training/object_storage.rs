//! A training goes on from snapshots in a bucket.

use std::{fs, thread::sleep};

use burn::tensor::{Distribution, Tensor};
use tensord_client::{Lease, LeaseRequest, data};
use tensord_testkit::{
    administrator::Administrator, cluster::Cluster, models::Mlp, s3::S3Server, training::losses,
};

use crate::snapshot_store::{EXIT_DEADLINE, MARK_INTERVAL, STEPS, undisturbed, wait_for_store};

/// A pool whose workers have a store in a bucket, and a lease of a device.
struct BucketPool {
    server: S3Server,
    cluster: Cluster,
    lease: Lease,
    administrator: Administrator,
}

impl BucketPool {
    /// Starts a pool with a worker, if this host has an S3 server.
    fn start() -> Option<Self> {
        let mut cluster = Cluster::start(&[]);
        let server = S3Server::start(cluster.path("s3.log"))?;
        add_worker(&mut cluster, &server);
        cluster.wait_for_workers(1);
        let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
        let administrator = Administrator::of(&cluster);
        Some(Self {
            server,
            cluster,
            lease,
            administrator,
        })
    }

    fn add_worker(&mut self) {
        add_worker(&mut self.cluster, &self.server);
    }
}

fn add_worker(cluster: &mut Cluster, server: &S3Server) {
    let url = server.url("pools/one");
    cluster.add_worker_in("flex", &["--snapshots", &url], &server.variables());
}

#[test]
fn training_outlives_the_only_worker_and_the_scheduler() {
    let Some(mut pool) = BucketPool::start() else {
        return;
    };
    let undisturbed = undisturbed();
    let device = pool.lease.devices()[0].clone();
    let ours = losses::<Mlp>(&device, STEPS, |step| {
        if step == 5 || step == 12 {
            wait_for_store(&pool.administrator);
            let last = pool.cluster.workers.len() - 1;
            pool.cluster.workers[last].kill();
            if step == 12 {
                pool.cluster.restart_scheduler_with(&[]);
            }
            pool.add_worker();
        }
    });
    assert_eq!(ours, Ok(undisturbed), "{}", pool.cluster.logs());
    assert_eq!(pool.lease.ended(), None);
    // The credentials stay in the worker.
    let worker = pool.cluster.workers.last().unwrap();
    let variables = environment(worker.id());
    assert!(variables.contains("AWS_SECRET_ACCESS_KEY="), "{variables}");
    let variables = environment(worker.process_of_lease());
    assert!(variables.contains("NO_PROXY="), "{variables}");
    assert!(!variables.contains("AWS_"), "{variables}");
    drop(pool.lease);
    // The id of the store stays.
    pool.administrator
        .wait("the snapshots to be deleted", || pool.server.objects() == 1);
}

/// Returns the environment variables of a process.
fn environment(process: u32) -> String {
    let variables = fs::read(format!("/proc/{process}/environ")).unwrap();
    String::from_utf8_lossy(&variables).into_owned()
}

#[test]
fn large_state_is_stored_in_parts() {
    let Some(mut pool) = BucketPool::start() else {
        return;
    };
    // 40 MiB: two whole parts and a smaller one.
    let device = &pool.lease.devices()[0];
    let tensor = Tensor::<2>::random([1024, 10_240], Distribution::Default, device);
    let before = data::into_data(tensor.clone()).unwrap();
    pool.cluster.wait("a snapshot with the tensor", || {
        // The next mark is placed with an op.
        tensor
            .clone()
            .slice([0..1, 0..1])
            .sum()
            .into_scalar::<f32>();
        pool.server.objects_in_parts(3) > 0
    });
    wait_for_store(&pool.administrator);
    pool.cluster.workers[0].kill();
    pool.add_worker();
    let after = data::into_data(tensor).unwrap();
    assert!(after == before, "{}", pool.cluster.logs());
    drop(pool.lease);
    pool.administrator.wait("the snapshots to be deleted", || {
        (pool.server.objects(), pool.server.incomplete_uploads()) == (1, 0)
    });
}

#[test]
fn training_goes_on_without_its_bucket() {
    let Some(mut pool) = BucketPool::start() else {
        return;
    };
    let undisturbed = undisturbed();
    let device = pool.lease.devices()[0].clone();
    let ours = losses::<Mlp>(&device, STEPS, |step| match step {
        5 => {
            wait_for_store(&pool.administrator);
            pool.server.kill();
            // The next op is after the interval of marks.
            sleep(MARK_INTERVAL);
        }
        10 => pool.cluster.wait("the warning", || {
            let log = pool.cluster.workers[0].log();
            // The first attempt fails, or takes too long as it is repeated.
            let warnings = [
                "not stored in s3://snapshots/pools/one",
                "s3://snapshots/pools/one has not stored a snapshot",
            ];
            warnings.iter().any(|warning| log.contains(warning))
        }),
        _ => {}
    });
    assert_eq!(ours, Ok(undisturbed), "{}", pool.cluster.logs());
    assert_eq!(pool.lease.ended(), None);
    // A worker that cannot open the store does not start, and says why.
    pool.add_worker();
    let code = pool.cluster.workers[1].exit_code(EXIT_DEADLINE);
    let log = pool.cluster.workers[1].log();
    assert_ne!(code, Some(0), "{log}");
    assert!(
        log.contains("cannot open the snapshot store s3://snapshots/pools/one"),
        "{log}"
    );
    assert!(!log.contains("test-secret"), "{log}");
}
