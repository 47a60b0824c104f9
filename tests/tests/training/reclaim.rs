//! A training beyond its tenant's guarantee makes room for another tenant, and goes on after that with the
//! same bits.

use std::time::Duration;

use burn::tensor::{Device, Tensor};
use tensord_client::{Durability, LeaseEvent, LeaseRequest, Pool, data};
use tensord_testkit::{
    administrator::Administrator, cluster::Cluster, models::Mlp, training::losses,
};

use crate::events::{changes, with_events};

#[test]
fn lent_device_comes_back_and_the_training_goes_on_later() {
    let cluster = Cluster::start(&["flex"]);
    let administrator = Administrator::of(&cluster);
    administrator.run(&["tenant", "add", "owner", "--guarantee", "flex=1"]);
    let url = administrator.create_token(&["--tenant", "owner"]);
    let owner = Pool::connect(&url).unwrap();
    let undisturbed = losses::<Mlp>(&Device::flex(), 20, |_| {}).unwrap();
    let (request, events) = with_events(LeaseRequest::devices(1));
    let lease = cluster.pool().lease(request).unwrap();
    let ours = losses::<Mlp>(&lease.devices()[0], 20, |step| {
        if step != 8 {
            return;
        }
        cluster.wait("a snapshot", || lease.durability_status().commits > 0);
        let own = owner.lease(LeaseRequest::devices(1)).unwrap();
        let ones = Tensor::<1>::ones([4], &own.devices()[0]);
        let sum = data::into_data(ones.sum()).unwrap();
        assert_eq!(sum.try_to_vec::<f32>().unwrap(), [4.0]);
        let listed = administrator.leases();
        let mut reclaimed = listed.iter().filter(|it| it["tenant"] == "default");
        let id = reclaimed.next().expect("the first lease")["lease"].clone();
        let why = administrator.run(&["why", id.as_str().unwrap()]);
        let cause = "  cause      its devices were beyond the guarantee of its tenant";
        assert!(why.contains(cause), "{why}");
        drop(own);
    });
    assert_eq!(ours, Ok(undisturbed), "{}", cluster.logs());
    assert_eq!(lease.ended(), None);
    drop(lease);
    let events = changes(&events);
    let reason = "its devices were beyond the guarantee of its tenant, and are needed by what comes first: a request within the guarantee of another tenant, one that this lease had passed in the queue, or, as this is a spot lease, any other request or lease that waits";
    let [
        LeaseEvent::Waiting { reason: waits, .. },
        LeaseEvent::Moving { .. },
        LeaseEvent::Running { .. },
    ] = &events[..]
    else {
        panic!("{events:?}");
    };
    assert!(waits.contains(reason), "{waits}");
}

/// Neither lease can be suspended; only one of them may end.
#[test]
fn lease_that_may_end_makes_room_before_one_that_may_not() {
    let cluster = Cluster::start(&["flex*2"]);
    let administrator = Administrator::of(&cluster);
    administrator.run(&["tenant", "add", "owner", "--guarantee", "flex=2"]);
    let url = administrator.create_token(&["--tenant", "owner"]);
    let pool = cluster.pool();
    let request = || LeaseRequest::devices(1).durable(Durability::Off);
    let kept = pool.lease(request()).unwrap();
    let ended = pool.lease(request().may_end()).unwrap();
    let owner = Pool::connect(&url).unwrap();
    let own = owner.lease(LeaseRequest::devices(1).timeout(Duration::from_secs(60)));
    let own = own.unwrap();
    let reason = ended.wait_ended(Duration::from_secs(10)).unwrap();
    assert!(
        reason.contains("its devices were beyond the guarantee of its tenant"),
        "{reason}"
    );
    for lease in [&kept, &own] {
        let ones = Tensor::<1>::ones([4], &lease.devices()[0]);
        assert_eq!(ones.sum().into_scalar::<f32>(), 4.0);
    }
    // Nothing makes room for the other device of the guarantee.
    let refused = owner.lease(LeaseRequest::devices(1).timeout(Duration::from_secs(1)));
    assert!(refused.is_err(), "{refused:?}");
    assert_eq!(kept.ended(), None);
}
