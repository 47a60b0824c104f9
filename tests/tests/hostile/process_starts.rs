//! The processes that a worker starts: which program they run, and how much memory they take.

use std::{fs, os::unix::fs::PermissionsExt};

use burn::tensor::Tensor;
use tensord_client::LeaseRequest;
use tensord_testkit::{
    cluster::Cluster,
    host,
    resource_usage::{ResourceUsage, signal_process},
};

/// Most memory of a spare.
const MAX_SPARE_BYTES: u64 = 15 << 20;

/// Most memory of the process of a lease on a CPU device, with few and small tensors.
const MAX_LEASE_BYTES: u64 = 30 << 20;

#[test]
fn spares_and_processes_of_leases_take_little_memory() {
    let cluster = Cluster::start(&["flex*2"]);
    let worker = &cluster.workers[0];
    worker.wait_for_processes(0, 2);
    for spare in worker.children() {
        let usage = ResourceUsage::of(spare);
        assert!(usage.resident_bytes <= MAX_SPARE_BYTES, "a spare: {usage}");
    }
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let sum = Tensor::<1>::ones([4], &lease.devices()[0]).sum();
    assert_eq!(sum.into_scalar::<f32>(), 4.0);
    let usage = ResourceUsage::of(worker.process_of_lease());
    let is_small = usage.resident_bytes <= MAX_LEASE_BYTES;
    assert!(is_small, "the process of a lease: {usage}");
}

#[test]
fn worker_whose_program_is_replaced_starts_processes_of_its_own_program() {
    let elsewhere = tempfile::tempdir().unwrap();
    let program = elsewhere.path().join("tensord");
    fs::copy(host::binary(), &program).unwrap();
    let cluster = Cluster::start_with(program.clone(), &["flex"]);
    let worker = &cluster.workers[0];
    worker.wait_for_processes(0, 1);
    let update = elsewhere.path().join("update");
    fs::write(&update, "#!/bin/sh\nexit 1\n").unwrap();
    fs::set_permissions(&update, fs::Permissions::from_mode(0o755)).unwrap();
    fs::rename(update, program).unwrap();
    // The processes that were started before the update are gone.
    let before = worker.children();
    for &id in &before {
        signal_process(id, "KILL");
    }
    let is_new = |ids: Vec<u32>| ids.iter().any(|id| !before.contains(id));
    cluster.wait("a new process", || is_new(worker.children()));
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let sum = Tensor::<1>::ones([4], &lease.devices()[0]).sum();
    assert_eq!(sum.into_scalar::<f32>(), 4.0);
}
