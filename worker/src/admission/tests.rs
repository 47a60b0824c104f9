//! Tests of the decisions by examples, and of random events against a model that keeps
//! every lease.

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
    }
}

fn is_superseded<T>(result: Result<T, AdmissionError>) -> bool {
    matches!(result, Err(AdmissionError::Superseded { .. }))
}

#[test]
fn later_grant_takes_the_device_and_the_earlier_token_is_refused() {
    let now = Instant::now();
    let mut admission = Admission::new(0..1);
    let (first, second) = (claim(10, 0, 1), claim(20, 0, 2));
    assert_eq!(admission.open(first, NEVER_EXPIRES, now), Ok(None));
    assert_eq!(
        admission.open(first, NEVER_EXPIRES, now),
        Ok(None),
        "once more"
    );
    assert_eq!(admission.check(first), Ok(()));
    assert!(
        is_superseded(admission.check(second)),
        "it has opened nothing"
    );
    let earlier = admission.open(second, NEVER_EXPIRES, now);
    assert_eq!(earlier, Ok(Some(LeaseId(10))));
    assert!(is_superseded(admission.open(first, NEVER_EXPIRES, now)));
    assert!(is_superseded(admission.check(first)));
    assert_eq!(admission.check(second), Ok(()));
}

#[test]
fn grant_is_valid_for_one_lease_only() {
    let now = Instant::now();
    let mut admission = Admission::new(0..1);
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
    let mut admission = Admission::new(0..2);
    admission.open(claim(10, 0, 4), NEVER_EXPIRES, now).unwrap();
    admission.end(0, grant(4));
    let lease = LeaseId(10);
    let refused = Err(AdmissionError::Ended { lease });
    assert_eq!(admission.open(claim(10, 0, 4), NEVER_EXPIRES, now), refused);
    assert_eq!(
        admission.check(claim(10, 0, 4)),
        Err(AdmissionError::Ended { lease })
    );
    // A grant that was never used: the worker learns of it when it ends.
    admission.end(0, grant(6));
    assert!(is_superseded(admission.open(
        claim(11, 0, 5),
        NEVER_EXPIRES,
        now
    )));
    // The end of an earlier grant arrives late.
    admission.open(claim(12, 0, 7), NEVER_EXPIRES, now).unwrap();
    admission.end(0, grant(6));
    assert_eq!(admission.check(claim(12, 0, 7)), Ok(()));
    // The other device is not affected.
    assert_eq!(
        admission.open(claim(10, 1, 4), NEVER_EXPIRES, now),
        Ok(None)
    );
}

#[test]
fn new_grant_ends_the_previous_claim() {
    let now = Instant::now();
    let mut admission = Admission::new(0..1);
    admission.open(claim(10, 0, 1), NEVER_EXPIRES, now).unwrap();
    assert_eq!(admission.granted(claim(20, 0, 2)), Some(LeaseId(10)));
    assert_eq!(admission.granted(claim(20, 0, 2)), None);
    assert_eq!(admission.granted(claim(21, 0, 2)), None, "another lease");
    assert!(is_superseded(admission.open(
        claim(10, 0, 1),
        NEVER_EXPIRES,
        now
    )));
    assert_eq!(
        admission.open(claim(20, 0, 2), NEVER_EXPIRES, now),
        Ok(None)
    );
    assert_eq!(admission.granted(claim(10, 0, 1)), None, "it comes late");
    assert_eq!(admission.check(claim(20, 0, 2)), Ok(()));
}

#[test]
fn tokens_without_a_grant_or_for_an_unknown_device_are_refused() {
    let now = Instant::now();
    let mut admission = Admission::new(0..1);
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
    admission.end(9, grant(1));
    assert_eq!(admission.granted(claim(1, 9, 1)), None);
}

#[test]
fn reports_hold_granted_and_ended_leases() {
    let now = Instant::now();
    let mut admission = Admission::new(0..4);
    admission.open(claim(10, 0, 5), NEVER_EXPIRES, now).unwrap();
    admission.end(1, grant(6));
    admission.granted(claim(11, 2, 7));
    assert_eq!(
        admission.active_claims().collect::<Vec<_>>(),
        [claim(10, 0, 5), claim(11, 2, 7)]
    );
    let ended: Vec<_> = admission.ended().collect();
    assert_eq!(ended, [(0, grant(4)), (1, grant(6)), (2, grant(6))]);
}

#[test]
fn expired_token_is_refused_but_ends_no_session() {
    let start = Instant::now();
    let after = |seconds| start + Duration::from_secs(seconds);
    let mut admission = Admission::new(0..1);
    admission.set_time(1_000_000, start);
    let token = claim(10, 0, 1);
    assert_eq!(admission.open(token, 1_002_000, start), Ok(None));
    let late = admission.open(token, 1_002_000, after(4));
    let lease = LeaseId(10);
    assert_eq!(late, Err(AdmissionError::Expired { lease, seconds: 2 }));
    assert_eq!(admission.check(token), Ok(()), "links resume");
    // The renewed token that the scheduler sent in time.
    assert_eq!(admission.open(token, 1_602_000, after(4)), Ok(None));
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
    let mut admission = Admission::new(0..2);
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
        assert_eq!(opened, Ok(None), "nobody could have renewed the token");
    }
    // The lease has both devices, but had no session on this one yet.
    assert_eq!(admission.open(given, end, after(3000)), Ok(None));
    // The scheduler is back, with another term, and adopts the lease.
    admission.set_time(time(3660), after(3660));
    assert_eq!(admission.active_claims().count(), 2);
    assert_eq!(admission.check(token), Ok(()));
    assert!(admission.open(token, end, after(3661)).is_err());
    let renewed = time(3660 + 600);
    assert_eq!(admission.open(token, renewed, after(3661)), Ok(None));
}

/// Admission keeps no list of leases, so an old token stays invalid after any number of
/// leases.
#[test]
fn old_token_is_refused_after_100_000_leases() {
    let now = Instant::now();
    let mut admission = Admission::new(0..1);
    let old = claim(1, 0, 1);
    admission.open(old, NEVER_EXPIRES, now).unwrap();
    admission.end(0, grant(1));
    for count in 2..100_002 {
        let next = claim(count, 0, count);
        admission.open(next, NEVER_EXPIRES, now).unwrap();
        if count % 3 != 0 {
            admission.end(0, grant(count));
        }
        assert!(is_superseded(admission.open(old, NEVER_EXPIRES, now)));
    }
    assert!(is_superseded(admission.check(old)));
}

#[derive(Clone, Debug)]
enum Op {
    /// The scheduler grants a device again; `delivered`: the worker is notified.
    Grant {
        device: u32,
        delivered: bool,
    },
    /// The lease of the latest grant ends; `delivered`: the worker is notified.
    End {
        device: u32,
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
    prop_oneof![
        3 => (0..3_u32, delivered()).prop_map(|(device, delivered)| Op::Grant { device, delivered }),
        2 => (0..3_u32, delivered()).prop_map(|(device, delivered)| Op::End { device, delivered }),
        6 => (0..64_usize).prop_map(|nth| Op::Open { nth }),
        3 => (0..64_usize).prop_map(|nth| Op::Resume { nth }),
    ]
}

/// What a worker knows: every end it was notified of, and the latest grant it has seen.
#[derive(Default)]
struct Model {
    tokens: Vec<Claim>,
    ended: BTreeSet<(u32, GrantNumber)>,
    seen: BTreeMap<u32, GrantNumber>,
    user: BTreeMap<u32, LeaseId>,
}

impl Model {
    fn may_open(&self, token: Claim) -> bool {
        let seen = self.seen.get(&token.device).copied().unwrap_or_default();
        let is_ended =
            |(device, grant): &(u32, GrantNumber)| *device == token.device && *grant >= token.grant;
        token.grant >= seen && !self.ended.iter().any(is_ended)
    }

    fn see(&mut self, device: u32, grant: GrantNumber) {
        let seen = self.seen.entry(device).or_default();
        if grant > *seen {
            *seen = grant;
            self.user.remove(&device);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn only_the_latest_grant_that_has_not_ended_is_admitted(ops in vec(op(), 1..200)) {
        let now = Instant::now();
        let mut admission = Admission::new(0..3);
        let mut model = Model::default();
        let mut count = 0;
        for op in ops {
            match op {
                Op::Grant { device, delivered } => {
                    count += 1;
                    let token = claim(1000 + count, device, count);
                    model.tokens.push(token);
                    if delivered {
                        let user = model.user.get(&device).copied();
                        prop_assert_eq!(admission.granted(token), user);
                        model.see(device, token.grant);
                        model.user.insert(device, token.lease);
                    }
                }
                Op::End { device, delivered } => {
                    let latest = model.tokens.iter().rev().find(|t| t.device == device);
                    if let Some(token) = latest.copied().filter(|_| delivered) {
                        admission.end(device, token.grant);
                        model.see(device, token.grant);
                        model.ended.insert((device, token.grant));
                        model.user.remove(&device);
                    }
                }
                Op::Open { nth } => {
                    let Some(&token) = model.tokens.get(nth) else { continue };
                    let before = model.user.get(&token.device).copied();
                    let opened = admission.open(token, NEVER_EXPIRES, now);
                    prop_assert_eq!(opened.is_ok(), model.may_open(token), "{:?}", token);
                    if let Ok(earlier) = opened {
                        let other = before.filter(|lease| *lease != token.lease);
                        prop_assert_eq!(earlier, other);
                        model.see(token.device, token.grant);
                        model.user.insert(token.device, token.lease);
                    }
                }
                Op::Resume { nth } => {
                    let Some(&token) = model.tokens.get(nth) else { continue };
                    let uses = model.user.get(&token.device) == Some(&token.lease);
                    prop_assert_eq!(admission.check(token).is_ok(), uses);
                }
            }
            let held = admission.active_claims().map(|held| (held.device, held.lease));
            prop_assert_eq!(held.collect::<BTreeMap<_, _>>(), model.user.clone());
        }
    }
}
