//! Tests of grants of shares, by examples.

use tensord_proto::share::MAX_LANES;

use super::*;

#[test]
fn leases_have_a_device_together_only_in_lanes_of_their_own() {
    let now = Instant::now();
    let mut admission = admission(1);
    let whole = claim(10, 0, 1);
    let (first, second) = (share_claim(20, 0, 1, 2), share_claim(30, 0, 16, 3));
    assert_eq!(admission.open(whole, NEVER_EXPIRES, now), Ok(vec![]));
    // A share ends the grant of the whole device, and nothing else.
    assert_eq!(admission.granted(first), [LeaseId(10)]);
    assert!(is_superseded(admission.check(whole)));
    assert_eq!(admission.open(second, NEVER_EXPIRES, now), Ok(vec![]));
    for claim in [first, second] {
        assert_eq!(admission.check(claim), Ok(()));
    }
    // A claim to another lane by the same grant.
    assert!(is_superseded(admission.check(share_claim(20, 0, 2, 2))));
    // A later grant of the lane.
    let third = share_claim(40, 0, 1, 4);
    assert_eq!(admission.granted(third), [LeaseId(20)]);
    assert!(is_superseded(admission.check(first)));
    assert_eq!(admission.check(second), Ok(()));
    // A grant of the whole device ends all others, also those that come late, of any lane.
    let all = claim(50, 0, 6);
    assert_eq!(admission.granted(all), [LeaseId(40), LeaseId(30)]);
    assert_eq!(admission.granted(share_claim(60, 0, 5, 5)), []);
    for claim in [first, second, third, share_claim(60, 0, 5, 5)] {
        assert!(is_superseded(admission.check(claim)));
        assert!(admission.open(claim, NEVER_EXPIRES, now).is_err());
    }
    assert_eq!(admission.check(all), Ok(()));
}

/// The grant of the whole device is seen after a later share of another lane.
#[test]
fn an_outdated_grant_of_the_whole_device_ends_earlier_shares() {
    let mut admission = admission(1);
    let (first, late, second) = (
        share_claim(20, 0, 1, 2),
        claim(30, 0, 5),
        share_claim(40, 0, 2, 7),
    );
    admission.granted(first);
    assert_eq!(admission.granted(second), []);
    assert_eq!(admission.granted(late), [LeaseId(20)]);
    assert!(is_superseded(admission.check(first)));
    assert!(is_superseded(admission.check(late)));
    assert_eq!(admission.check(second), Ok(()));
}

/// A scheduler that restarts learns from these reports which grants it must refuse.
#[test]
fn lanes_report_the_ends_of_their_own_grants_only() {
    let mut admission = admission(1);
    admission.granted(share_claim(20, 0, 1, 2));
    admission.granted(share_claim(30, 0, 2, 4));
    assert_eq!(admission.ended_grants(), [ended(0, 1, 1), ended(0, 2, 3)]);
    admission.granted(claim(40, 0, 6));
    let shares = [ended(0, 1, 2), ended(0, 2, 4)];
    assert_eq!(admission.ended_grants()[0], ended(0, 0, 5));
    assert_eq!(admission.ended_grants()[1..], shares);
    admission.granted(share_claim(50, 0, 2, 8));
    let reported = [ended(0, 0, 6), ended(0, 1, 2), ended(0, 2, 7)];
    assert_eq!(admission.ended_grants(), reported);
}

#[test]
fn ends_are_of_one_lane() {
    let mut admission = admission(1);
    let (first, second) = (share_claim(20, 0, 1, 2), share_claim(30, 0, 2, 3));
    admission.granted(first);
    admission.granted(second);
    admission.end(&ended(0, 2, 3));
    let lease = LeaseId(30);
    assert_eq!(
        admission.check(second),
        Err(AdmissionError::Ended { lease })
    );
    assert_eq!(admission.check(first), Ok(()));
    // A lane that does not exist.
    admission.end(&ended(0, MAX_LANES + 1, 9));
    admission.end(&ended(0, 0, 9));
    assert_eq!(admission.check(first), Ok(()));
    assert!(admission.check(claim(40, 0, 9)).is_err());
    let ends: Vec<_> = admission.ended_grants();
    assert_eq!(ends, [ended(0, 0, 9), ended(0, 1, 1), ended(0, 2, 3)]);
    let left = BTreeMap::from([((LeaseId(30), 0), second.share)]);
    let held = admission.held_devices(left);
    let held_device = |claim: Claim, ended| HeldDevice {
        lease_id: claim.lease.0,
        device_index: 0,
        grant: Some(claim.grant.into()),
        ended,
        share: claim.share.map(Into::into),
    };
    assert_eq!(held, [held_device(first, false), held_device(second, true)]);
}

#[test]
fn a_process_admits_its_own_lane_only() {
    let now = Instant::now();
    let mut shared = Admission::new([(0, Lanes::Only(3))]);
    let mut whole = Admission::new([(0, Lanes::Only(WHOLE_LANE))]);
    let own = share_claim(10, 0, 3, 4);
    assert_eq!(shared.open(own, NEVER_EXPIRES, now), Ok(vec![]));
    for other in [share_claim(20, 0, 2, 9), claim(30, 0, 9)] {
        let (device, lane) = (0, other.lane());
        let refused = Err(AdmissionError::NoLane { device, lane });
        assert_eq!(shared.open(other, NEVER_EXPIRES, now), refused);
        assert_eq!(shared.granted(other), []);
    }
    assert_eq!(shared.check(own), Ok(()));
    let error = whole.open(own, NEVER_EXPIRES, now).unwrap_err().to_string();
    assert_eq!(
        error,
        "the token is for a share (lane 3) of device 0, which leases cannot have here"
    );
    assert_eq!(whole.open(claim(30, 0, 9), NEVER_EXPIRES, now), Ok(vec![]));
}

#[test]
fn claims_without_a_valid_share_are_refused() {
    let grant = |share| DeviceGrant {
        device_index: 2,
        grant: Some(grant(5).into()),
        share,
    };
    let share = |permille, lane| v1::DeviceShare {
        permille,
        memory_bytes: 9,
        lane,
    };
    let lease = LeaseId(7);
    for message in [grant(None), grant(Some(share(999, 16)))] {
        let claim = Claim::new(lease, &message).unwrap();
        assert_eq!((claim.lease, claim.to_grant()), (lease, message));
    }
    let refused = [
        (share(0, 1), ShareError::Permille(0)),
        (share(1000, 1), ShareError::Permille(1000)),
        (share(1, 0), ShareError::Lane(0)),
        (share(1, 17), ShareError::Lane(17)),
    ];
    for (share, error) in refused {
        assert_eq!(Claim::new(lease, &grant(Some(share))), Err(error));
    }
}
