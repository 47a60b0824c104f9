//! Faults are data: they propagate through the dataflow, and nothing else is affected.

use std::time::{Duration, Instant};

use burn::tensor::{Device, Int, Tensor, TensorData};
use tensord_client::{Durability, Lease, LeaseRequest, testing::Options};
use tensord_testkit::cluster::Cluster;
use tensord_transport::faults::FaultSwitch;

fn ones(device: &Device) -> Tensor<1> {
    Tensor::ones([4], device)
}

fn values(tensor: Tensor<1>) -> Result<Vec<f32>, String> {
    let data = tensor.try_into_data().map_err(|e| e.to_string())?;
    data.try_to_vec().map_err(|e| e.to_string())
}

/// Returns the output of an op that makes Flex panic: its index is out of bounds.
fn panicking(device: &Device) -> Tensor<1> {
    ones(device).select(0, Tensor::<1, Int>::from_data([99], device))
}

#[test]
fn backend_panic_poisons_only_dependents() {
    let cluster = Cluster::start(&["flex*2"]);
    let pool = cluster.pool();
    let lease = pool.lease(LeaseRequest::devices(2)).unwrap();
    let [device, other] = lease.devices() else {
        panic!("two devices were leased")
    };
    let (fine, elsewhere) = (ones(device), ones(other));
    let bad = panicking(device);
    let worse = (bad.clone() + 1.0).exp();
    let error = values(worse).unwrap_err();
    for part in ["op ", "Select", "worker-0", "panic"] {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
    assert_eq!(
        values(bad).unwrap_err(),
        error,
        "the first cause is the same for all"
    );
    assert_eq!(values(fine * 3.0).unwrap(), [3.0; 4]);
    assert_eq!(values(elsewhere * 2.0).unwrap(), [2.0; 4]);
    let unseen = panicking(device);
    drop(unseen);
    assert!(
        device.sync().is_err(),
        "a sync tells of a fault that nobody read"
    );
    assert!(device.sync().is_ok(), "and only once");
}

#[test]
fn fault_is_reported_to_the_program_although_an_upload_has_waited_for_long() {
    /// With the uploads that go before it, the last one is more than a session records ahead.
    const BYTES: usize = 12 << 20;
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let device = &lease.devices()[0];
    drop(panicking(device));
    // Only what was sent has a snapshot. The value of another tensor reports no fault.
    assert_eq!(values(ones(device)).unwrap(), [1.0; 4]);
    let until = Instant::now() + Duration::from_secs(20);
    while let Err(e) = lease.suspend() {
        assert!(Instant::now() < until, "{e}");
        std::thread::sleep(Duration::from_millis(50));
    }
    let upload = |value: u8| {
        let data = TensorData::new(vec![f32::from(value); BYTES / 4], [BYTES / 4]);
        tensord_client::data::from_data::<1, _>(data, device)
    };
    let uploads: Vec<Tensor<1>> = (0..5).map(upload).collect();
    // An upload that the bridge has not taken after 5 s is looked for, which may take as long again.
    std::thread::sleep(Duration::from_secs(11));
    lease.resume().unwrap();
    let error = device.sync().unwrap_err().to_string();
    assert!(error.contains("Select"), "{error}");
    for (value, upload) in (0..).zip(uploads) {
        assert_eq!(upload.max().into_scalar::<f32>(), value as f32);
    }
}

#[test]
fn out_of_memory_fault_names_the_requested_bytes() {
    let mut cluster = Cluster::start(&[]);
    cluster.add_worker_with("flex", &["--memory", "1MiB"]);
    cluster.wait_for_workers(1);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let device = &lease.devices()[0];
    let kept = ones(device);
    let error = values(Tensor::<1>::ones([1 << 20], device)).unwrap_err();
    assert!(error.contains("4.0 MiB requested"), "{error}");
    let data = TensorData::new(vec![0f32; 1 << 20], [1 << 20]);
    let error = values(Tensor::<1>::from_data(data, device)).unwrap_err();
    assert!(
        error.contains("Upload") && error.contains("4.0 MiB requested"),
        "{error}"
    );
    assert_eq!(values(kept).unwrap(), [1.0; 4]);
}

#[test]
fn killed_worker_is_named_within_ten_seconds_and_replaced() {
    let mut cluster = Cluster::start(&["flex", "flex"]);
    let pool = cluster.pool();
    let request = LeaseRequest::devices(1).durable(Durability::Off);
    let lease = pool.lease(request).unwrap();
    let worker = lease.descriptions()[0].worker.clone();
    let device = &lease.devices()[0];
    let tensor = ones(device);
    assert_eq!(values(tensor.clone()).unwrap(), [1.0; 4]);
    let at: usize = worker.strip_prefix("worker-").unwrap().parse().unwrap();
    cluster.workers[at].kill();
    let begun = Instant::now();
    let error = values(tensor).unwrap_err();
    assert!(
        begun.elapsed() < Duration::from_secs(10),
        "{:?}",
        begun.elapsed()
    );
    assert!(error.contains(&worker), "{error}");
    drop(lease);
    let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
    assert_ne!(lease.descriptions()[0].worker, worker);
    assert_eq!(values(ones(&lease.devices()[0])).unwrap(), [1.0; 4]);
}

/// Creates a lease whose links are controlled by a fault switch.
fn lease_with_fault_switch() -> (Cluster, FaultSwitch, Lease) {
    lease_in(Cluster::start(&["flex"]), LeaseRequest::devices(1))
}

fn lease_in(cluster: Cluster, request: LeaseRequest) -> (Cluster, FaultSwitch, Lease) {
    let switch = FaultSwitch::default();
    let options = Options {
        faults: Some(switch.clone()),
    };
    let pool = cluster.pool_with("transport=auto", options);
    let lease = pool.lease(request).unwrap();
    (cluster, switch, lease)
}

#[test]
fn silent_connection_is_replaced() {
    let (_cluster, switch, lease) = lease_with_fault_switch();
    let tensor = ones(&lease.devices()[0]);
    assert_eq!(values(tensor.clone()).unwrap(), [1.0; 4]);
    switch.half_open();
    let reading = std::thread::spawn(move || values(tensor * 2.0));
    // Longer than a connection may be silent, shorter than the time after which a worker
    // counts as lost.
    std::thread::sleep(Duration::from_secs(5));
    switch.heal();
    assert_eq!(reading.join().unwrap().unwrap(), [2.0; 4]);
    assert!(switch.links() > 1, "the silent connection was kept");
}

#[test]
fn unreachable_worker_is_named_within_ten_seconds() {
    let request = LeaseRequest::devices(1).durable(Durability::Off);
    let (_cluster, switch, lease) = lease_in(Cluster::start(&["flex"]), request);
    let tensor = ones(&lease.devices()[0]);
    assert_eq!(values(tensor.clone()).unwrap(), [1.0; 4]);
    switch.half_open();
    let begun = Instant::now();
    let error = values(tensor).unwrap_err();
    assert!(
        begun.elapsed() < Duration::from_secs(10),
        "{:?}",
        begun.elapsed()
    );
    assert!(error.contains("worker-0"), "{error}");
}

#[test]
fn lease_moves_when_its_program_alone_cannot_reach_its_worker() {
    let cluster = Cluster::start(&["flex", "flex"]);
    let (cluster, switch, lease) = lease_in(cluster, LeaseRequest::devices(1));
    let tensor = ones(&lease.devices()[0]);
    assert_eq!(values(tensor.clone()).unwrap(), [1.0; 4]);
    switch.half_open();
    let reading = std::thread::spawn(move || values(tensor * 2.0));
    let scheduler = cluster.scheduler.as_ref().unwrap();
    cluster.wait("the lease to move", || {
        scheduler.log().contains("lease goes on at worker")
    });
    switch.heal();
    assert_eq!(reading.join().unwrap().unwrap(), [2.0; 4]);
    assert_eq!(lease.ended(), None);
}

#[test]
fn lost_frames_are_resent() {
    let (_cluster, switch, lease) = lease_with_fault_switch();
    let mut tensor = ones(&lease.devices()[0]);
    for round in 1..=3 {
        switch.drop_next(2);
        tensor = tensor + 1.0;
        assert_eq!(values(tensor.clone()).unwrap(), [1.0 + round as f32; 4]);
    }
}
