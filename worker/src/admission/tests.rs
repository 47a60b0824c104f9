//! Tests of the decisions by examples, and of random events against a model that keeps
//! every lease.

mod lanes;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// A token that never expires.
const NEVER_EXPIRES: u64 = u64::MAX;

fn grant(count: u64) -> GrantNumber {
    GrantNumber { term: 3, count }
}

fn claim(lease: u64, device: u32, count: u64) -> Claim {
    Claim {
        lease: LeaseId(lease),
        device,
        grant: grant(count),
        share: None,
    }
}

/// A claim to a share of a device.
fn share_claim(lease: u64, device: u32, lane: u32, count: u64) -> Claim {
    let share = DeviceShare {
        permille: 100,
        memory_bytes: 1 << 20,
        lane,
    };
    Claim {
        share: (lane != WHOLE_LANE).then_some(share),
        ..claim(lease, device, count)
    }
}

/// The end of a lane's grants, as it is in messages.
fn ended(device_index: u32, lane: u32, count: u64) -> DeviceGrant {
    DeviceGrant {
        device_index,
        grant: Some(grant(count).into()),
        share: (lane != WHOLE_LANE).then(|| v1::DeviceShare {
            lane,
            ..v1::DeviceShare::default()
        }),
    }
}

/// The state for devices of which leases can have the whole, or shares.
fn admission(devices: u32) -> Admission {
    Admission::new((0..devices).map(|index| (index, Lanes::All)))
}

fn is_superseded<T>(result: Result<T, AdmissionError>) -> bool {
    matches!(result, Err(AdmissionError::Superseded { .. }))
}

#[test]
fn later_grant_takes_the_device_and_the_earlier_token_is_refused() {
    let now = Instant::now();
    let mut admission = admission(1);
    let (first, second) = (claim(10, 0, 1), claim(20, 0, 2));
    assert_eq!(admission.open(first, NEVER_EXPIRES, now), Ok(vec![]));
    assert_eq!(
        admission.open(first, NEVER_EXPIRES, now),
        Ok(vec![]),
        "once more"
    );
    assert_eq!(admission.check(first), Ok(()));
    assert!(
        is_superseded(admission.check(second)),
        "it has opened nothing"
    );
    let earlier = admission.open(second, NEVER_EXPIRES, now);
    assert_eq!(earlier, Ok(vec![LeaseId(10)]));
    assert!(is_superseded(admission.open(first, NEVER_EXPIRES, now)));
    assert!(is_superseded(admission.check(first)));
    assert_eq!(admission.check(second), Ok(()));
}

#[test]
fn grant_is_valid_for_one_lease_only() {
    let now = Instant::now();
    let mut admission = admission(1);
    admission.open(claim(10, 0, 1), NEVER_EXPIRES, now).unwrap();
    assert!(is_superseded(admission.open(
        claim(11, 0, 1),
        NEVER_EXPIRES,
        now
    )));
}

#[test]
fn tokens_of_ended_and_earlier_grants_are_refused() {
    let now = Instant::now();
    let mut admission = admission(2);
    admission.open(claim(10, 0, 4), NEVER_EXPIRES, now).unwrap();
    admission.end(&ended(0, 0, 4));
    let lease = LeaseId(10);
    let refused = Err(AdmissionError::Ended { lease });
    assert_eq!(admission.open(claim(10, 0, 4), NEVER_EXPIRES, now), refused);
    assert_eq!(
        admission.check(claim(10, 0, 4)),
        Err(AdmissionError::Ended { lease })
    );
    // A grant that was never used: the worker learns of it when it ends.
    admission.end(&ended(0, 0, 6));
    assert!(is_superseded(admission.open(
        claim(11, 0, 5),
        NEVER_EXPIRES,
        now
    )));
    // The end of an earlier grant arrives late.
    admission.open(claim(12, 0, 7), NEVER_EXPIRES, now).unwrap();
    admission.end(&ended(0, 0, 6));
    assert_eq!(admission.check(claim(12, 0, 7)), Ok(()));
    // The other device is not affected.
    assert_eq!(
        admission.open(claim(10, 1, 4), NEVER_EXPIRES, now),
        Ok(vec![])
    );
}

#[test]
fn new_grant_ends_the_previous_claim() {
    let now = Instant::now();
    let mut admission = admission(1);
    admission.open(claim(10, 0, 1), NEVER_EXPIRES, now).unwrap();
    assert_eq!(admission.granted(claim(20, 0, 2)), [LeaseId(10)]);
    assert_eq!(admission.granted(claim(20, 0, 2)), []);
    assert_eq!(admission.granted(claim(21, 0, 2)), [], "another lease");
    assert!(is_superseded(admission.open(
        claim(10, 0, 1),
        NEVER_EXPIRES,
        now
    )));
    assert_eq!(
        admission.open(claim(20, 0, 2), NEVER_EXPIRES, now),
        Ok(vec![])
    );
    assert_eq!(admission.granted(claim(10, 0, 1)), [], "it comes late");
    assert_eq!(admission.check(claim(20, 0, 2)), Ok(()));
}

#[test]
fn tokens_without_a_grant_or_for_an_unknown_device_are_refused() {
    let now = Instant::now();
    let mut admission = admission(1);
    let none = Claim {
        grant: GrantNumber::ZERO,
        ..claim(1, 0, 0)
    };
    for wrong in [none, claim(1, 1, 5)] {
        let refused = Err(AdmissionError::NoGrant {
            device: wrong.device,
        });
        assert_eq!(admission.open(wrong, NEVER_EXPIRES, now), refused);
    }
    admission.end(&ended(9, 0, 1));
    assert_eq!(admission.granted(claim(1, 9, 1)), []);
}

#[test]
fn reports_hold_granted_and_ended_leases() {
    let now = Instant::now();
    let mut admission = admission(4);
    admission.open(claim(10, 0, 5), NEVER_EXPIRES, now).unwrap();
    admission.end(&ended(1, 0, 6));
    admission.granted(claim(11, 2, 7));
    assert_eq!(
        admission.active_claims().collect::<Vec<_>>(),
        [claim(10, 0, 5), claim(11, 2, 7)]
    );
    let ended: Vec<_> = admission.ended().collect();
    assert_eq!(
        ended,
        [(0, 0, grant(4)), (1, 0, grant(6)), (2, 0, grant(6))]
    );
}

#[test]
fn expired_token_is_refused_but_ends_no_session() {
    let start = Instant::now();
    let after = |seconds| start + Duration::from_secs(seconds);
    let mut admission = admission(1);
    admission.set_time(1_000_000, start);
    let token = claim(10, 0, 1);
    assert_eq!(admission.open(token, 1_002_000, start), Ok(vec![]));
    let late = admission.open(token, 1_002_000, after(4));
    let lease = LeaseId(10);
    assert_eq!(late, Err(AdmissionError::Expired { lease, seconds: 2 }));
    assert_eq!(admission.check(token), Ok(()), "links resume");
    // The renewed token that the scheduler sent in time.
    assert_eq!(admission.open(token, 1_602_000, after(4)), Ok(vec![]));
    // An expired token with a later grant does not take the device over.
    let stolen = claim(20, 0, 2);
    assert!(admission.open(stolen, 1_002_000, after(4)).is_err());
    assert_eq!(admission.check(token), Ok(()));
}

/// The scheduler is down for an hour, with tokens that expire after ten minutes.
#[test]
fn hour_long_scheduler_outage_ends_no_session() {
    let start = Instant::now();
    let after = |seconds| start + Duration::from_secs(seconds);
    let time = |seconds| 1_000_000 + seconds * 1000;
    let mut admission = admission(2);
    for second in 0..60 {
        admission.set_time(time(second), after(second));
    }
    let (token, end) = (claim(10, 0, 1), time(600));
    admission.open(token, end, after(30)).unwrap();
    let given = claim(10, 1, 1);
    admission.mark_unreachable();
    for second in (60..3660).step_by(10) {
        assert_eq!(admission.check(token), Ok(()), "a link breaks and resumes");
        let opened = admission.open(token, end, after(second));
        assert_eq!(opened, Ok(vec![]), "nobody could have renewed the token");
    }
    // The lease has both devices, but had no session on this one yet.
    assert_eq!(admission.open(given, end, after(3000)), Ok(vec![]));
    // The scheduler is back, with another term, and adopts the lease.
    admission.set_time(time(3660), after(3660));
    assert_eq!(admission.active_claims().count(), 2);
    assert_eq!(admission.check(token), Ok(()));
    assert!(admission.open(token, end, after(3661)).is_err());
    let renewed = time(3660 + 600);
    assert_eq!(admission.open(token, renewed, after(3661)), Ok(vec![]));
}

/// Admission keeps no list of leases, so an old token stays invalid after any number of
/// leases.
#[test]
fn old_token_is_refused_after_100_000_leases() {
    let now = Instant::now();
    let mut admission = admission(1);
    let old = claim(1, 0, 1);
    admission.open(old, NEVER_EXPIRES, now).unwrap();
    admission.end(&ended(0, 0, 1));
    for count in 2..100_002 {
        let next = claim(count, 0, count);
        admission.open(next, NEVER_EXPIRES, now).unwrap();
        if count % 3 != 0 {
            admission.end(&ended(0, 0, count));
        }
        assert!(is_superseded(admission.open(old, NEVER_EXPIRES, now)));
    }
    assert!(is_superseded(admission.check(old)));
}

#[derive(Clone, Debug)]
enum Op {
    /// The scheduler grants a device, or a lane of it, again; `delivered`: the worker is notified.
    Grant {
        device: u32,
        lane: u32,
        delivered: bool,
    },
    /// The lease of the latest grant ends; `delivered`: the worker is notified.
    End {
        device: u32,
        lane: u32,
        delivered: bool,
    },
    /// A client presents the token of the nth grant.
    Open {
        nth: usize,
    },
    Resume {
        nth: usize,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let delivered = || prop::bool::weighted(0.7);
    let place = || (0..2_u32, 0..4_u32, delivered());
    prop_oneof![
        3 => place().prop_map(|(device, lane, delivered)| Op::Grant { device, lane, delivered }),
        2 => place().prop_map(|(device, lane, delivered)| Op::End { device, lane, delivered }),
        6 => (0..64_usize).prop_map(|nth| Op::Open { nth }),
        3 => (0..64_usize).prop_map(|nth| Op::Resume { nth }),
    ]
}

/// A device and a lane of it.
type Place = (u32, u32);

/// What a worker knows: every end it was notified of, and every grant it has seen.
#[derive(Default)]
struct Model {
    tokens: Vec<Claim>,
    ended: BTreeSet<(Place, GrantNumber)>,
    seen: BTreeSet<(Place, GrantNumber)>,
    users: BTreeMap<Place, LeaseId>,
    /// The latest grant of each place of which the worker was notified, or whose token opened a session.
    latest: BTreeMap<Place, GrantNumber>,
}

/// Returns whether a grant of one place ends earlier ones of another.
fn excludes((device, lane): Place, (of_device, of_lane): Place) -> bool {
    device == of_device && (lane == of_lane || lane == WHOLE_LANE || of_lane == WHOLE_LANE)
}

fn place(claim: &Claim) -> Place {
    (claim.device, claim.lane())
}

impl Model {
    fn may_open(&self, token: Claim) -> bool {
        let is_later = |(of, grant): &(Place, GrantNumber)| {
            excludes(*of, place(&token)) && *grant > token.grant
        };
        let is_end =
            |(of, grant): &(Place, GrantNumber)| *of == place(&token) && *grant >= token.grant;
        !self.seen.iter().any(is_later) && !self.ended.iter().any(is_end)
    }

    fn record(&mut self, of: Place, grant: GrantNumber) {
        let latest = self.latest.entry(of).or_default();
        *latest = grant.max(*latest);
    }

    /// Returns the number up to which the grants of each place have ended.
    fn reports(&self) -> Vec<(u32, u32, GrantNumber)> {
        let latest = self.latest.iter();
        let ended = latest.map(|(of, grant)| match self.users.contains_key(of) {
            true => (of.0, of.1, grant.previous()),
            false => (of.0, of.1, *grant),
        });
        ended
            .filter(|(.., grant)| *grant != GrantNumber::ZERO)
            .collect()
    }

    /// Records that a grant that may be used is known. Returns the other leases that lose the device.
    fn grant(&mut self, token: Claim) -> Vec<LeaseId> {
        let own = place(&token);
        self.record(own, token.grant);
        let is_known = self.users.get(&own) == Some(&token.lease);
        if is_known || !self.may_open(token) {
            return Vec::new();
        }
        self.seen.insert((own, token.grant));
        let losers: Vec<_> = self
            .users
            .extract_if(.., |of, _| excludes(own, *of))
            .collect();
        self.users.insert(own, token.lease);
        losers.into_iter().map(|(_, lease)| lease).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn only_the_latest_grants_that_have_not_ended_are_admitted(ops in vec(op(), 1..200)) {
        let now = Instant::now();
        let mut admission = admission(2);
        let mut model = Model::default();
        let mut count = 0;
        for op in ops {
            match op {
                Op::Grant { device, lane, delivered } => {
                    count += 1;
                    let token = share_claim(1000 + count, device, lane, count);
                    model.tokens.push(token);
                    if delivered {
                        prop_assert_eq!(admission.granted(token), model.grant(token));
                    }
                }
                Op::End { device, lane, delivered } => {
                    let of = (device, lane);
                    let latest = model.tokens.iter().rev().find(|token| place(token) == of);
                    if let Some(token) = latest.copied().filter(|_| delivered) {
                        let message = ended(device, lane, token.grant.count);
                        admission.end(&message);
                        model.ended.insert((of, token.grant));
                        model.record(of, token.grant);
                        model.users.remove(&of);
                    }
                }
                Op::Open { nth } => {
                    let Some(&token) = model.tokens.get(nth) else { continue };
                    let opened = admission.open(token, NEVER_EXPIRES, now);
                    prop_assert_eq!(opened.is_ok(), model.may_open(token), "{:?}", token);
                    if let Ok(losers) = opened {
                        prop_assert_eq!(losers, model.grant(token));
                    }
                }
                Op::Resume { nth } => {
                    let Some(&token) = model.tokens.get(nth) else { continue };
                    let uses = model.users.get(&place(&token)) == Some(&token.lease);
                    prop_assert_eq!(admission.check(token).is_ok(), uses);
                }
            }
            let held = admission.active_claims().map(|held| (place(&held), held.lease));
            prop_assert_eq!(held.collect::<BTreeMap<_, _>>(), model.users.clone());
            prop_assert_eq!(admission.ended().collect::<Vec<_>>(), model.reports());
            // Leases that have a device together have lanes of their own.
            for one in admission.active_claims() {
                let mut others = admission.active_claims().filter(|other| *other != one);
                prop_assert!(!others.any(|other| excludes(place(&one), place(&other))));
            }
        }
    }
}
