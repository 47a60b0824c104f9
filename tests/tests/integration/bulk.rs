//! Bulk bytes: large tensors over links that break, and no upload sent twice.

use std::time::Duration;

use burn::tensor::{Device, Tensor, TensorData};
use tensord_client::{Lease, LeaseRequest, Pool, data, testing::Options};
use tensord_proto::{
    content::hash,
    v1::{Held, Opened, Synced, frame::Body},
};
use tensord_testkit::{
    cluster::Cluster,
    raw::{self, RawPool, ServedTrack},
};
use tensord_transport::faults::FaultSwitch;

/// Elements of an upload of 1 MiB, whose content differs in every round.
const ELEMENTS: usize = 1 << 18;

fn content(round: usize) -> Vec<f32> {
    (0..ELEMENTS).map(|i| (i % 1000 + round) as f32).collect()
}

fn upload(values: Vec<f32>, device: &Device) -> Tensor<1> {
    let shape = [values.len()];
    data::from_data(TensorData::new(values, shape), device)
}

fn lease_with(cluster: &Cluster, option: &str, switch: &FaultSwitch) -> Lease {
    let options = Options {
        faults: Some(switch.clone()),
    };
    let pool = cluster.pool_with(option, options);
    pool.lease(LeaseRequest::devices(1)).unwrap()
}

#[test]
fn large_tensors_survive_link_cuts_on_every_carrier() {
    let cluster = Cluster::start(&["flex"]);
    for option in [
        "transport=auto",
        "transport=quic",
        "transport=grpc",
        "transport=tcp",
    ] {
        let switch = FaultSwitch::default();
        let lease = lease_with(&cluster, option, &switch);
        let device = &lease.devices()[0];
        let mut reads = Vec::new();
        for round in 0..20 {
            let tensor = upload(content(round), device);
            if round % 4 == 3 {
                switch.cut();
            }
            reads.push(data::into_data_async(tensor * 2.0));
        }
        switch.cut();
        for (round, read) in reads.into_iter().enumerate() {
            let read = burn_std::future::block_on(read).unwrap();
            let doubled = content(round)
                .iter()
                .map(|value| value * 2.0)
                .collect::<Vec<_>>();
            assert!(
                read.try_to_vec::<f32>().unwrap() == doubled,
                "{option}, round {round}"
            );
        }
        // Two tracks, and at least one more link: cuts in a row may find a track disconnected.
        assert!(switch.links() >= 3, "{option}: {} links", switch.links());
    }
}

#[test]
fn repeated_uploads_are_cached_across_epochs_and_programs() {
    let cluster = Cluster::start(&["flex"]);
    let items: Vec<Vec<f32>> = (0..200)
        .map(|item| (0..784).map(|i| (item * 784 + i) as f32).collect())
        .collect();
    let epoch = |lease: &Lease, reversed: bool| {
        let before = lease.traffic().bytes_up;
        let device = &lease.devices()[0];
        let mut order: Vec<_> = items.iter().collect();
        if reversed {
            order.reverse();
        }
        let tensors = order
            .iter()
            .map(|&item| upload(item.clone(), device))
            .collect();
        let sum = Tensor::stack::<2>(tensors, 0).sum();
        let sum = data::into_data(sum).unwrap().try_to_vec::<f32>().unwrap()[0];
        (lease.traffic().bytes_up - before, sum)
    };
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let (first, sum) = epoch(&lease, false);
    assert!(first >= 200 * 784 * 4, "{first}");
    let (second, again) = epoch(&lease, true);
    assert!(100 * second <= first, "{second} bytes after {first}");
    assert!((sum - again).abs() <= sum * 1e-5);
    drop(lease);
    // A restarted program. The worker sorts kept uploads in the background.
    let mut bytes = first;
    cluster.wait("the worker to offer what it kept", || {
        let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
        bytes = epoch(&lease, false).0;
        100 * bytes <= first
    });
}

/// Uploads 8 MiB to a lease, checks that they have arrived, and returns how many tensor bytes that has
/// sent.
fn load(lease: &Lease) -> u64 {
    let before = lease.traffic().tensor_bytes_up;
    let device = &lease.devices()[0];
    let uploads: Vec<_> = (0..8).map(|at| upload(content(at), device)).collect();
    for (at, uploaded) in uploads.into_iter().enumerate() {
        let read = data::into_data(uploaded).unwrap();
        assert!(read.try_to_vec::<f32>().unwrap() == content(at));
    }
    lease.traffic().tensor_bytes_up - before
}

#[test]
fn running_lease_shares_its_uploads_when_asked_to() {
    const ALL: u64 = 8 << 20;
    let cluster = Cluster::start(&["flex*5"]);
    let pool = cluster.pool();
    let lease = |devices| pool.lease(LeaseRequest::devices(devices)).unwrap();
    let first = lease(2);
    assert_eq!(load(&first), ALL);
    let second = lease(1);
    assert_eq!(load(&second), ALL, "nothing was shared");
    first.share_uploads().unwrap();
    let third = lease(1);
    assert_eq!(load(&third), 0);
    // The first lease goes on, and shares what it uploads later, too.
    assert_eq!(load(&first), 0);
    let later = content(100);
    drop(upload(later.clone(), &first.devices()[1]));
    first.share_uploads().unwrap();
    first.share_uploads().unwrap();
    drop(first);
    let fourth = lease(1);
    drop(upload(later, &fourth.devices()[0]));
    fourth.devices()[0].sync().unwrap();
    assert_eq!(load(&fourth), 0);
    assert_eq!(fourth.traffic().tensor_bytes_up, 0);
}

/// A worker that has the upload `content`, and is slow to say so.
fn slow_worker_with(content: &[f32]) -> RawPool {
    let hashes = hash(&raw::bytes_of(content)).to_vec();
    raw::block(RawPool::start(move |mut track: ServedTrack| {
        let hashes = hashes.clone();
        async move {
            let has_held = !track.open.bulk;
            let opened = Opened {
                has_held,
                ..ServedTrack::opened()
            };
            track.greet(Body::Opened(opened)).await;
            if has_held {
                tokio::time::sleep(Duration::from_millis(300)).await;
                let hashes = hashes.into();
                track.push(Body::Held(Held { hashes }));
            }
            while let Some(body) = track.next().await {
                if let Body::Sync(sync) = body {
                    track.push(Body::Synced(Synced {
                        request_id: sync.request_id,
                        fault: None,
                    }));
                }
            }
        }
    }))
}

#[test]
fn new_lease_knows_what_its_worker_keeps_before_it_uploads() {
    let content = content(0);
    let worker = slow_worker_with(&content);
    let pool = Pool::connect(worker.url()).unwrap();
    let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
    let device = &lease.devices()[0];
    let _uploaded = upload(content, device);
    device.sync().unwrap();
    assert_eq!(lease.traffic().tensor_bytes_up, 0);
}

#[test]
fn uploads_that_are_not_kept_are_not_shared() {
    let mut cluster = Cluster::start(&[]);
    cluster.add_worker_with("flex*2", &["--upload-cache", "0"]);
    cluster.wait_for_workers(1);
    let pool = cluster.pool();
    let lease = || pool.lease(LeaseRequest::devices(1)).unwrap();
    let first = lease();
    let sent = load(&first);
    first.share_uploads().unwrap();
    assert_eq!(load(&lease()), sent);
}

#[test]
fn uploads_block_while_the_program_is_far_ahead() {
    let mut cluster = Cluster::start(&[]);
    cluster.add_worker_with("flex", &["--upload-cache", "0"]);
    cluster.wait_for_workers(1);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let device = &lease.devices()[0];
    let before = resident_bytes();
    let mut most = 0;
    for round in 0..400 {
        drop(upload(content(round), device));
        most = most.max(resident_bytes());
    }
    device.sync().unwrap();
    let grown = most.saturating_sub(before) >> 20;
    assert!(grown < 200, "{grown} MiB for 400 MiB of uploads");
}

/// Returns the resident memory of this process, from Linux's `/proc`.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = status.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}
