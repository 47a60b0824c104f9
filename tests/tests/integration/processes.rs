//! Processes that start and stop: restarts, the gateway, orderly ends.

use std::time::Duration;

use burn::{
    remote::RemoteHost,
    tensor::{Device, Int, Tensor},
};
use tensord_client::{LeaseRequest, PoolUrl};
use tensord_testkit::{
    cluster::Cluster,
    gateway::{GATEWAY_TOKEN, Gateway},
};

fn sum(device: &Device) -> Result<f32, String> {
    let data = Tensor::<1>::ones([5], device).sum().try_into_data();
    Ok(data
        .map_err(|e| e.to_string())?
        .try_to_vec::<f32>()
        .unwrap()[0])
}

#[test]
fn sessions_survive_a_scheduler_restart() {
    let mut cluster = Cluster::start(&["flex", "flex"]);
    let pool = cluster.pool();
    let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
    let device = lease.devices()[0].clone();
    let kept = Tensor::<1>::ones([5], &device);
    let port = cluster.client_url().parse::<PoolUrl>().unwrap().port;
    cluster.scheduler.take().unwrap().kill();
    assert_eq!(
        sum(&device),
        Ok(5.0),
        "a scheduler that is down stops no step"
    );
    cluster.start_scheduler(&format!("127.0.0.1:{port}"));
    cluster.wait_for_workers(2);
    assert_eq!((kept * 2.0).sum().into_scalar::<f32>(), 10.0);
    assert_eq!(lease.ended(), None);
    // The scheduler knows which device is in use: one is free, two are not.
    let other = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    assert_ne!(
        other.descriptions()[0].worker,
        lease.descriptions()[0].worker
    );
    drop(other);
    drop(lease);
    let both = LeaseRequest::devices(2).timeout(Duration::from_secs(20));
    let both = cluster.pool().lease(both);
    let log = cluster.scheduler.as_ref().unwrap().log();
    assert!(
        both.is_ok(),
        "a lease from before the restart is not released: {both:?}\n{log}"
    );
}

#[test]
fn a_stock_program_works_through_the_gateway() {
    let cluster = Cluster::start(&["flex"]);
    let Gateway { url, .. } = &Gateway::start(&cluster);
    let wrong = RemoteHost::websocket(url).with_credential("wrong");
    assert!(wrong.devices().is_err(), "the gateway wants its token");
    let host = RemoteHost::websocket(url).with_credential(GATEWAY_TOKEN);
    let device = host.devices().unwrap().into_iter().next().unwrap();
    assert_eq!(sum(&device), Ok(5.0));
    let fine = Tensor::<1>::ones([5], &device);
    let bad = fine
        .clone()
        .select(0, Tensor::<1, Int>::from_data([99], &device));
    let error = bad.try_into_data().unwrap_err().to_string();
    assert!(
        error.contains("Select") && error.contains("worker-0"),
        "{error}"
    );
    assert_eq!((fine + 1.0).sum().into_scalar::<f32>(), 10.0);
}

#[test]
fn processes_shut_down_in_order_on_request() {
    let mut cluster = Cluster::start(&["flex"]);
    let pool = cluster.pool();
    let mut worker = cluster.workers.remove(0);
    worker.signal("TERM");
    assert_eq!(worker.exit_code(Duration::from_secs(20)), Some(0));
    cluster.wait("the worker to be gone", || {
        pool.status().unwrap().workers.is_empty()
    });
    let mut scheduler = cluster.scheduler.take().unwrap();
    scheduler.signal("INT");
    assert_eq!(scheduler.exit_code(Duration::from_secs(20)), Some(0));
}
