use std::collections::HashSet;

use proptest::{collection::vec, prelude::*};
use tensord_scheduler::DeviceSpec;

use super::*;

const NOW: UnixMillis = UnixMillis(1_000_000_000);

const DAY: Duration = Duration::from_secs(86_400);

fn key(n: u8) -> Fingerprint {
    Fingerprint([n; 32])
}

/// A worker with `count` devices of `memory_bytes` each.
fn joining(name: &str, certificate: u8, count: usize, memory_bytes: u64) -> JoinRequest {
    let device = DeviceSpec {
        kind: "flex".into(),
        name: "CPU".into(),
        memory_bytes,
        fingerprint: None,
        takes_shares: false,
    };
    JoinRequest {
        name: name.into(),
        certificate: key(certificate),
        offer: Offer::of(&vec![device; count]).unwrap(),
    }
}

fn enrol(
    registry: &mut WorkerRegistry,
    joining: JoinRequest,
    now: UnixMillis,
) -> Result<(), EnrolError> {
    registry.enrol(joining, "worker", |_| false, now)
}

/// Worker `a` with key 1 and two devices of 8 bytes.
fn registry() -> WorkerRegistry {
    let mut registry = WorkerRegistry::default();
    enrol(&mut registry, joining("a", 1, 2, 8), NOW).unwrap();
    registry
}

#[test]
fn enrolment_status_depends_on_name_key_and_devices() {
    let registry = registry();
    let enrolled = Ok(EnrolmentStatus::Enrolled { update_seen: false });
    let taken = Err(EnrolError::Taken("a".into()));
    let renamed = Err(EnrolError::Renamed {
        known: "a".into(),
        name: "b".into(),
    });
    let more = "it offers 3 flex devices of 8 B at most and is enrolled with 2 flex devices of 8 B at most";
    let larger =
        "it offers 1 flex device of 9 B at most and is enrolled with 2 flex devices of 8 B at most";
    let table = [
        (joining("a", 1, 2, 8), enrolled.clone()),
        (joining("a", 1, 1, 4), enrolled.clone()),
        (joining("a", 1, 0, 0), enrolled),
        (
            joining("a", 1, 3, 8),
            Ok(EnrolmentStatus::ExceedsOffer(more.into())),
        ),
        (
            joining("a", 1, 1, 9),
            Ok(EnrolmentStatus::ExceedsOffer(larger.into())),
        ),
        (joining("a", 2, 2, 8), taken.clone()),
        (joining("a", 2, 9, 9), taken),
        (joining("b", 1, 2, 8), renamed),
        (joining("b", 2, 9, 9), Ok(EnrolmentStatus::New)),
        (joining("", 2, 1, 1), Err(EnrolError::Name(String::new()))),
        (joining("a b", 2, 1, 1), Err(EnrolError::Name("a b".into()))),
    ];
    for (joining, expected) in table {
        assert_eq!(registry.status(&joining, NOW), expected, "{joining:?}");
    }
}

#[test]
fn errors_say_what_to_do_in_one_line() {
    let registry = registry();
    let error = |joining: JoinRequest| registry.status(&joining, NOW).unwrap_err().to_string();
    assert_eq!(
        error(joining("a", 2, 1, 1)),
        "the worker name \"a\" is enrolled with another key; give this worker another --name or the --state with that key, or free the name with `tensord worker remove a` on the scheduler's host"
    );
    assert_eq!(
        error(joining("b", 1, 1, 1)),
        "this worker's key is enrolled under the name \"a\", and the worker registered as \"b\"; start it with --name a, or with another --state"
    );
}

#[test]
fn re_enrolment_replaces_the_entry() {
    let mut registry = registry();
    registry
        .enrol(joining("a", 1, 4, 2), "other", |_| false, NOW)
        .unwrap();
    assert_eq!(
        registry.status(&joining("a", 1, 4, 2), NOW),
        Ok(EnrolmentStatus::Enrolled { update_seen: false })
    );
    assert!(matches!(
        registry.status(&joining("a", 1, 2, 8), NOW),
        Ok(EnrolmentStatus::ExceedsOffer(_))
    ));
    assert_eq!(registry.get("a", &key(1)).unwrap().token, "other");
    assert_eq!(registry.get("a", &key(2)), None);
}

#[test]
fn a_name_is_free_again_once_its_worker_is_removed_or_its_token_revoked() {
    for remove in [
        (|registry| registry.remove("a")) as fn(&mut WorkerRegistry),
        |registry| registry.remove_token("worker"),
    ] {
        let mut registry = registry();
        registry
            .enrol(joining("b", 2, 1, 1), "other", |_| false, NOW)
            .unwrap();
        remove(&mut registry);
        assert_eq!(
            registry.status(&joining("a", 3, 1, 1), NOW),
            Ok(EnrolmentStatus::New)
        );
        assert_eq!(registry.name_of(&key(1)), None);
        assert_eq!(registry.name_of(&key(2)), Some("b"));
    }
}

#[test]
fn last_seen_is_updated_once_a_day() {
    let mut registry = registry();
    let status = |registry: &WorkerRegistry, at| registry.status(&joining("a", 1, 1, 1), at);
    let later = NOW.after(DAY);
    assert_eq!(
        status(&registry, later),
        Ok(EnrolmentStatus::Enrolled { update_seen: true })
    );
    registry.record_seen("a", later);
    assert_eq!(
        status(&registry, later),
        Ok(EnrolmentStatus::Enrolled { update_seen: false })
    );
    assert_eq!(registry.get("a", &key(1)).unwrap().seen, later);
}

#[test]
fn full_registry_evicts_the_least_recently_seen() {
    let mut registry = WorkerRegistry::default();
    let of = |n: usize| {
        let mut certificate = [0; 32];
        certificate[..8].copy_from_slice(&(n as u64).to_le_bytes());
        JoinRequest {
            certificate: Fingerprint(certificate),
            ..joining(&format!("w{n}"), 0, 1, 1)
        }
    };
    for n in 0..MAX_WORKERS {
        enrol(
            &mut registry,
            of(n),
            NOW.after(Duration::from_millis(n as u64)),
        )
        .unwrap();
    }
    let one_more = |registry: &mut WorkerRegistry, now| {
        let live = |name: &str| name == "w0";
        registry.enrol(of(MAX_WORKERS), "worker", live, now)
    };
    assert_eq!(
        one_more(&mut registry, NOW.after(29 * DAY)),
        Err(EnrolError::Full)
    );
    assert_eq!(registry.iter().count(), MAX_WORKERS);
    assert_eq!(one_more(&mut registry, NOW.after(31 * DAY)), Ok(()));
    assert_eq!(registry.iter().count(), MAX_WORKERS);
    let names: HashSet<_> = registry.iter().map(|(name, _)| name).collect();
    assert!(names.contains("w0"), "it is in the pool");
    assert!(!names.contains("w1"), "it is the oldest that is not");
}

#[test]
fn full_registry_survives_serialization_and_fits_its_file() {
    let text = serde_json::to_string(&registry()).unwrap();
    let read: WorkerRegistry = serde_json::from_str(&text).unwrap();
    assert_eq!(
        read.status(&joining("a", 1, 2, 8), NOW),
        Ok(EnrolmentStatus::Enrolled { update_seen: false })
    );
    let kinds = (0..8).map(|n| DeviceSpec {
        kind: format!("{n}{}", "x".repeat(31)),
        name: String::new(),
        memory_bytes: u64::MAX,
        fingerprint: None,
        takes_shares: false,
    });
    let mut largest = WorkerRegistry::default();
    let worker = JoinRequest {
        name: "n".repeat(MAX_NAME_BYTES),
        certificate: key(1),
        offer: Offer::of(&kinds.collect::<Vec<_>>()).unwrap(),
    };
    let token = "t".repeat(64);
    let late = UnixMillis(u64::MAX);
    largest.enrol(worker, &token, |_| false, late).unwrap();
    let bytes = serde_json::to_vec(&largest).unwrap().len() * MAX_WORKERS;
    assert!(
        bytes < 8 << 20,
        "{bytes} bytes are more than are read again"
    );
}

/// An operation on a book. Names, keys and tokens are few, so that they collide.
#[derive(Clone, Debug)]
enum Step {
    Join(u8, u8, usize, u64, u8),
    Remove(u8),
    Revoke(u8),
}

fn step() -> impl Strategy<Value = Step> {
    let join = (0..4u8, 0..4u8, 0..3usize, 0..3u64, 0..2u8);
    prop_oneof![
        6 => join.prop_map(|(name, key, count, memory, token)| Step::Join(name, key, count, memory, token)),
        1 => (0..4u8).prop_map(Step::Remove),
        1 => (0..2u8).prop_map(Step::Revoke),
    ]
}

/// The whole content, for comparison.
fn content(registry: &WorkerRegistry) -> String {
    serde_json::to_string(registry).unwrap()
}

proptest! {
    /// A name belongs to one key until it is removed, a key belongs to one name, and no
    /// worker is admitted with more than it enrolled.
    #[test]
    fn names_and_keys_cannot_be_taken_over(steps in vec(step(), 0..60)) {
        let mut registry = WorkerRegistry::default();
        for step in steps {
            match step {
                Step::Join(name, certificate, count, memory, token) => {
                    let (name, token) = (format!("w{name}"), format!("t{token}"));
                    let joining = joining(&name, certificate, count, memory);
                    let owner = registry.iter().find(|(known, _)| *known == name);
                    let owner = owner.map(|(_, worker)| (worker.certificate(), worker.offer.clone()));
                    let before = content(&registry);
                    let status = registry.status(&joining, NOW);
                    match (&status, owner) {
                        (Ok(EnrolmentStatus::New), owner) => {
                            prop_assert!(owner.is_none() && registry.name_of(&key(certificate)).is_none());
                        }
                        (Ok(EnrolmentStatus::Enrolled { .. }), Some((owner, offer))) => {
                            prop_assert_eq!(owner, key(certificate));
                            prop_assert_eq!(joining.offer.excess_over(&offer), None);
                        }
                        (Ok(EnrolmentStatus::ExceedsOffer(_)), Some((owner, offer))) => {
                            prop_assert_eq!(owner, key(certificate));
                            prop_assert!(joining.offer.excess_over(&offer).is_some());
                        }
                        (Ok(status), None) => prop_assert!(false, "{status:?} of a name that is free"),
                        (Err(_), Some((owner, _))) => prop_assert!(owner != key(certificate)),
                        (Err(_), None) => prop_assert!(registry.name_of(&key(certificate)).is_some()),
                    }
                    let enrolled = registry.enrol(joining.clone(), &token, |_| false, NOW);
                    match status {
                        Ok(_) => {
                            prop_assert_eq!(enrolled, Ok(()));
                            let after = registry.status(&joining, NOW);
                            prop_assert_eq!(after, Ok(EnrolmentStatus::Enrolled { update_seen: false }));
                        }
                        Err(e) => {
                            prop_assert_eq!(enrolled, Err(e));
                            prop_assert_eq!(content(&registry), before);
                        }
                    }
                }
                Step::Remove(name) => {
                    let name = format!("w{name}");
                    registry.remove(&name);
                    prop_assert!(registry.iter().all(|(known, _)| known != name));
                }
                Step::Revoke(token) => {
                    let token = format!("t{token}");
                    registry.remove_token(&token);
                    prop_assert!(registry.iter().all(|(_, worker)| worker.token != token));
                }
            }
            let keys: HashSet<_> = registry.iter().map(|(_, worker)| worker.certificate()).collect();
            prop_assert_eq!(keys.len(), registry.iter().count());
        }
    }
}
