//! Leases with shares of one device: each has its time and memory, and its own death.

use std::sync::mpsc;

use burn::tensor::{Device, Tensor};
use tensord_client::{DeviceStatus, Durability, Lease, LeaseRequest, Pool};
use tensord_testkit::{administrator::Administrator, cluster::Cluster};

use crate::usage::{agrees_with_devices, usage, wait_for_release, work};

const MIB: u64 = 1 << 20;

fn share_of(pool: &Pool, part: f64) -> Lease {
    pool.lease(LeaseRequest::devices(1).share(part)).unwrap()
}

/// Returns the only device of the pool, as last reported.
fn device_status(pool: &Pool) -> DeviceStatus {
    let mut status = pool.status().unwrap();
    status.workers.remove(0).devices.remove(0)
}

fn sum(device: &Device) -> Result<f32, String> {
    let data = Tensor::<1>::ones([5], device).sum().try_into_data();
    let data = data.map_err(|e| e.to_string())?;
    Ok(data.try_to_vec::<f32>().map_err(|e| e.to_string())?[0])
}

#[test]
fn leases_with_shares_compute_on_one_device_at_the_same_time() {
    let cluster = Cluster::start(&["flex"]);
    let administrator = Administrator::of(&cluster);
    let pool = cluster.pool();
    let whole_bytes = device_status(&pool).memory_bytes;
    let leases = [share_of(&pool, 0.5), share_of(&cluster.pool(), 0.25)];
    let devices = leases.each_ref().map(|lease| lease.devices()[0].clone());
    let descriptions = leases
        .each_ref()
        .map(|lease| lease.descriptions().remove(0));
    assert_eq!(descriptions[0].share(), Some(0.5));
    assert_eq!(descriptions[1].share(), Some(0.25));
    assert_eq!(descriptions[0].memory_bytes, whole_bytes / 2);
    assert_eq!(device_status(&pool).shared(), Some(0.75));
    // A third share has no room, and a whole device none either.
    let (granted, grants) = mpsc::channel();
    std::thread::scope(|scope| {
        let waiting = cluster.pool();
        let whole = scope.spawn(move || {
            let lease = waiting.lease(LeaseRequest::devices(1)).unwrap();
            granted.send(()).unwrap();
            sum(&lease.devices()[0])
        });
        let working = devices
            .each_ref()
            .map(|device| scope.spawn(|| work(device)));
        administrator.wait("the request", || {
            administrator.run(&["queue"]).contains("1 device")
        });
        devices.iter().for_each(work);
        working
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        assert!(grants.try_recv().is_err(), "a whole device was granted");
        drop(leases);
        assert_eq!(whole.join().unwrap(), Ok(5.0));
    });
    wait_for_release(&cluster);
    // What two processes report of the device at the same time, the scheduler counts with later heartbeats.
    administrator.wait("the device's own account", || {
        agrees_with_devices(&usage(&administrator, "lease"))
    });
}

#[test]
fn shares_and_the_whole_device_after_them_outlive_the_scheduler() {
    let mut cluster = Cluster::start(&["flex"]);
    let pool = cluster.pool();
    let leases = [share_of(&pool, 0.5), share_of(&pool, 0.25)];
    for lease in &leases {
        assert_eq!(sum(&lease.devices()[0]), Ok(5.0));
    }
    cluster.restart_scheduler_with(&[]);
    let shared = |pool: &Pool| {
        let mut workers = pool
            .status()
            .map(|status| status.workers)
            .unwrap_or_default();
        workers
            .pop()
            .and_then(|mut worker| worker.devices.remove(0).shared())
    };
    cluster.wait("the shares", || shared(&pool) == Some(0.75));
    for lease in &leases {
        assert_eq!(sum(&lease.devices()[0]), Ok(5.0));
    }
    drop(leases);
    let whole = pool.lease(LeaseRequest::devices(1)).unwrap();
    assert_eq!(sum(&whole.devices()[0]), Ok(5.0));
    cluster.restart_scheduler_with(&[]);
    let leases = |pool: &Pool| pool.status().map_or(0, |status| status.leases);
    cluster.wait("the lease", || leases(&pool) == 1);
    assert_eq!(sum(&whole.devices()[0]), Ok(5.0));
}

#[test]
fn a_share_has_its_memory_and_no_more() {
    let cluster = Cluster::start(&["flex"]);
    let pool = cluster.pool();
    let request = LeaseRequest::devices(1).share(0.1).memory_bytes(64 * MIB);
    let small = pool.lease(request).unwrap();
    let other = share_of(&pool, 0.5);
    let (small, other) = (&small.devices()[0], &other.devices()[0]);
    let floats_of = |mib: u64| [(mib * MIB / 4) as usize];
    let most = Tensor::<1>::ones(floats_of(30), small);
    assert_eq!(most.clone().max().into_scalar::<f32>(), 1.0);
    let too_much = Tensor::<1>::ones(floats_of(40), small).try_into_data();
    let error = too_much.unwrap_err().to_string();
    assert!(
        error.contains("needs more memory than the device has left"),
        "{error}"
    );
    // The other lease has memory, and the first one goes on.
    let large = Tensor::<1>::ones(floats_of(80), other);
    assert_eq!(large.max().into_scalar::<f32>(), 1.0);
    drop(most);
    assert_eq!(sum(small), Ok(5.0));
}

/// Three deaths within a minute would take a device out of service that one lease has.
#[test]
fn the_death_of_a_process_is_not_seen_by_the_other_lease() {
    let cluster = Cluster::start(&["flex"]);
    let pool = cluster.pool();
    let survivor = share_of(&pool, 0.5);
    let device = &survivor.devices()[0];
    let kept = Tensor::<1>::ones([5], device);
    assert_eq!(kept.clone().sum().into_scalar::<f32>(), 5.0);
    let own = cluster.workers[0].processes_of_leases();
    assert_eq!(own.len(), 1);
    for _ in 0..4 {
        let request = LeaseRequest::devices(1)
            .share(0.25)
            .durable(Durability::Off);
        let victim = pool.lease(request).unwrap();
        assert_eq!(sum(&victim.devices()[0]), Ok(5.0));
        let processes = cluster.workers[0].processes_of_leases();
        let id = processes.iter().find(|id| !own.contains(id)).unwrap();
        let killed = std::process::Command::new("kill")
            .args(["-KILL", &id.to_string()])
            .status();
        assert!(killed.unwrap().success());
        cluster.wait("the end of the lease", || victim.ended().is_some());
        sum(&victim.devices()[0]).unwrap_err();
        work(device);
    }
    assert_eq!(kept.sum().into_scalar::<f32>(), 5.0);
    assert_eq!(survivor.ended(), None);
    assert_eq!(device_status(&pool).out_of_service, None);
}

#[test]
fn a_suspended_share_goes_on_beside_another_lease() {
    let cluster = Cluster::start(&["flex"]);
    let administrator = Administrator::of(&cluster);
    let pool = cluster.pool();
    let lease = share_of(&pool, 0.6);
    let device = &lease.devices()[0];
    let kept = Tensor::<1>::ones([5], device) * 3.0;
    assert_eq!(kept.clone().sum().into_scalar::<f32>(), 15.0);
    administrator.suspend_running();
    let other = share_of(&pool, 0.3);
    work(&other.devices()[0]);
    administrator.resume_suspended();
    assert_eq!(kept.sum().into_scalar::<f32>(), 15.0);
    work(&other.devices()[0]);
    assert_eq!(device_status(&pool).shared(), Some(0.9));
    assert_eq!(lease.descriptions()[0].share(), Some(0.6));
}

#[test]
fn a_share_that_is_none_is_refused_with_the_reason() {
    let cluster = Cluster::start(&["flex*2"]);
    let pool = cluster.pool();
    let reason = |request: LeaseRequest| pool.lease(request).unwrap_err().to_string();
    for part in [0.0, -0.5, 1.01, f64::NAN, f64::INFINITY] {
        let refused = reason(LeaseRequest::devices(1).share(part));
        assert!(refused.contains(&part.to_string()), "{refused}");
    }
    let refused = reason(LeaseRequest::devices(2).share(0.5));
    assert!(refused.contains("one device"), "{refused}");
    let refused = reason(LeaseRequest::devices(1).share(0.5).memory_bytes(1 << 60));
    assert!(refused.contains("50 % of 1 device"), "{refused}");
    let all = share_of(&pool, 1.0);
    assert_eq!(all.descriptions()[0].share(), None);
}
