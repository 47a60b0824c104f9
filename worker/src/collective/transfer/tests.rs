use tensord_proto::v1::LeaseShare;

use super::*;

const KEY: Capability = [1; 16];
const OTHER: WorkerId = WorkerId(2);

/// Lease ranks 0 and 1 are on this worker, 2 is on another.
fn lease_members() -> LeaseMembers {
    let share = |worker_id| LeaseShare {
        worker_id,
        ..LeaseShare::default()
    };
    LeaseMembers::new([1, 1, 2].map(share).to_vec(), WorkerId(1))
}

fn value() -> Value {
    Value {
        shape: Shape::new([4]),
        dtype: DType::U8,
        bytes: Bytes::from_static(b"abcd"),
    }
}

fn offer(from: u32, to: u32) -> Offer {
    Offer {
        from,
        to,
        value: Ok(value()),
        _memory: None,
    }
}

fn take(from: u32, to: u32) -> Take {
    Take {
        from,
        to,
        ticket: Some(9),
        size: 4,
    }
}

fn ended() -> Arc<Fault> {
    Arc::new(Fault {
        reason: "over".into(),
        ..Fault::default()
    })
}

fn delivered(to: u32) -> TransferAction {
    TransferAction::Deliver {
        to,
        ticket: 9,
        outcome: Ok(value()),
    }
}

#[test]
fn local_transfer_delivers_the_value_once() {
    let mut transfers = Transfers::default();
    assert_eq!(transfers.offer(KEY, offer(0, 1)), None);
    assert_eq!(
        transfers.take(KEY, take(0, 1), &lease_members()),
        Some(delivered(1))
    );
    // The same with the take first.
    assert_eq!(transfers.take(KEY, take(0, 1), &lease_members()), None);
    assert_eq!(transfers.offer(KEY, offer(0, 1)), Some(delivered(1)));
    assert_eq!(transfers.take(KEY, take(0, 1), &lease_members()), None);
}

#[test]
fn remote_value_is_fetched_in_parts() {
    let (mut transfers, lease_members) = (Transfers::default(), lease_members());
    let action = transfers.take(KEY, take(2, 1), &lease_members);
    let fetch = TransferAction::Fetch {
        worker: OTHER,
        capability: KEY,
        from: 2,
        to: 1,
    };
    assert_eq!(action, Some(fetch));
    let kind = Some((Shape::new([4]), DType::U8));
    let parts = [(kind, &b"ab"[..]), (None, b"cd")];
    let actions = parts.map(|(kind, bytes)| {
        let part = FetchedPart::Bytes(kind, Bytes::from_static(bytes));
        transfers.fetched(OTHER, KEY, part, &lease_members).unwrap()
    });
    assert_eq!(actions, [None, Some(delivered(1))]);
}

#[test]
fn worker_can_fetch_only_what_is_offered_to_it() {
    let (mut transfers, lease_members) = (Transfers::default(), lease_members());
    let sent = |value| TransferAction::Send {
        worker: OTHER,
        capability: KEY,
        value,
    };
    assert_eq!(transfers.fetch(OTHER, KEY, 0, 2, &lease_members), Ok(None));
    assert_eq!(transfers.offer(KEY, offer(0, 2)), Some(sent(Ok(value()))));
    transfers.offer(KEY, offer(0, 1));
    let Ok(Some(TransferAction::Send {
        value: Err(fault), ..
    })) = transfers.fetch(OTHER, KEY, 0, 2, &lease_members)
    else {
        panic!("it is offered to a session of this worker");
    };
    assert!(fault.reason.contains("offered to another device"));
    let broke = transfers
        .fetch(OTHER, KEY, 2, 0, &lease_members)
        .unwrap_err();
    assert!(
        broke
            .to_string()
            .contains("requested a value from place 2 for place 0")
    );
}

#[test]
fn pending_takes_fail_with_the_reason_when_the_source_is_lost() {
    let (mut transfers, lease_members) = (Transfers::default(), lease_members());
    transfers.take(KEY, take(0, 1), &lease_members);
    transfers
        .fetch(OTHER, [2; 16], 0, 2, &lease_members)
        .unwrap();
    let actions = transfers.leave(0, &ended());
    assert_eq!(actions.len(), 2, "{actions:?}");
    transfers.take(KEY, take(2, 1), &lease_members);
    let actions = transfers.fail_transfers_from(OTHER, "gone", &lease_members);
    let TransferAction::Deliver { outcome, .. } = &actions[0] else {
        panic!("{actions:?}");
    };
    let failure = Failure::New(FaultKind::Peer, "gone".into());
    assert_eq!(outcome, &Err(failure));
    assert!(transfers.takes.is_empty());
}

#[test]
fn invalid_takes_and_parts_are_refused() {
    let (mut transfers, lease_members) = (Transfers::default(), lease_members());
    let failure = |action: Option<TransferAction>| match action {
        Some(TransferAction::Deliver {
            outcome: Err(Failure::New(kind, why)),
            ..
        }) => (kind, why),
        action => panic!("{action:?}"),
    };
    let (kind, why) = failure(transfers.take(KEY, take(7, 1), &lease_members));
    assert_eq!(kind, FaultKind::Mismatch);
    assert!(why.contains("place 7"), "{why}");
    transfers.take(KEY, take(2, 1), &lease_members);
    let (_, why) = failure(transfers.take(KEY, take(2, 1), &lease_members));
    assert!(why.contains("in use"), "{why}");
    let mut part = |kind, bytes: &'static [u8]| {
        let part = FetchedPart::Bytes(kind, Bytes::from_static(bytes));
        transfers
            .fetched(OTHER, KEY, part, &lease_members)
            .unwrap_err()
            .to_string()
    };
    assert!(part(None, b"a").contains("has no type"));
    let kind = Some((Shape::new([5]), DType::U8));
    assert!(part(kind, b"abcde").contains("exceeds its 4 bytes"));
}

#[test]
fn value_of_a_session_that_has_ended_is_not_waited_for() {
    let (mut transfers, lease_members) = (Transfers::default(), lease_members());
    assert_eq!(transfers.leave(0, &ended()), []);
    let failed = TransferAction::Deliver {
        to: 1,
        ticket: 9,
        outcome: Err(Failure::Inherited(ended())),
    };
    assert_eq!(
        transfers.take(KEY, take(0, 1), &lease_members),
        Some(failed)
    );
    let sent = TransferAction::Send {
        worker: OTHER,
        capability: KEY,
        value: Err(ended()),
    };
    let fetched = transfers.fetch(OTHER, KEY, 0, 2, &lease_members);
    assert_eq!(fetched, Ok(Some(sent)));
    assert_eq!(transfers.pending(), 0);
    // Nobody takes what is offered to it, before its end or after.
    transfers.offer([2; 16], offer(1, 0));
    transfers.enter(0);
    transfers.offer([3; 16], offer(1, 0));
    assert_eq!(transfers.take([4; 16], take(0, 1), &lease_members), None);
    assert_eq!(transfers.pending(), 2, "the new session may offer and take");
    transfers.leave(0, &ended());
    assert_eq!(transfers.pending(), 0);
}

#[test]
fn value_without_room_is_taken_and_dropped() {
    let (mut transfers, lease_members) = (Transfers::default(), lease_members());
    let unwanted = |from| Take {
        ticket: None,
        ..take(from, 1)
    };
    transfers.offer(KEY, offer(0, 1));
    assert_eq!(transfers.take(KEY, unwanted(0), &lease_members), None);
    assert_eq!(transfers.pending(), 0);
    assert_eq!(transfers.take(KEY, unwanted(0), &lease_members), None);
    assert_eq!(transfers.offer(KEY, offer(0, 1)), None);
    assert_eq!(transfers.pending(), 0);
    // Another worker's is fetched, so that it does not stay there.
    assert!(transfers.take(KEY, unwanted(2), &lease_members).is_some());
    let kind = Some((Shape::new([4]), DType::U8));
    for (kind, bytes, pending) in [(kind, &b"ab"[..], 1), (None, b"cd", 0)] {
        let part = FetchedPart::Bytes(kind, Bytes::from_static(bytes));
        let fetched = transfers.fetched(OTHER, KEY, part, &lease_members);
        assert_eq!((fetched, transfers.pending()), (Ok(None), pending));
        let partial = transfers.takes.get(&KEY).and_then(|it| it.partial.as_ref());
        assert_eq!(partial.map_or(0, |partial| partial.bytes.capacity()), 0);
    }
}

#[test]
fn offers_beyond_the_limit_have_a_fault_instead_of_a_value() {
    let (mut transfers, lease_members) = (Transfers::default(), lease_members());
    let key = |number: usize| {
        let mut key = KEY;
        key[..8].copy_from_slice(&number.to_le_bytes());
        key
    };
    for number in 0..=MAX_REFUSED_OFFERS {
        transfers.offer(key(number), offer(0, 1));
    }
    assert_eq!(transfers.pending(), MAX_REFUSED_OFFERS);
    let last = key(MAX_REFUSED_OFFERS - 1);
    transfers.offers.retain(|key, _| *key == last);
    let refused = transfers.take(last, take(0, 1), &lease_members);
    let Some(TransferAction::Deliver { outcome, .. }) = refused else {
        panic!("{refused:?}");
    };
    let failure = Failure::Inherited(Arc::new(too_many_pending()));
    assert_eq!(outcome, Err(failure));
}
