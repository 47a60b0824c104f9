use proptest::prelude::*;

use super::*;

const LIMITS: Limits = Limits {
    unadmitted: 8,
    served: 4,
    served_per_address: 2,
    admitted: 5,
    reserved: 2,
    new_peer_age: Duration::from_secs(2),
    time_slice: Duration::from_secs(1),
    admission_timeout: Duration::from_secs(5),
};

fn source(number: u8) -> SourceNetwork {
    IpAddr::from([10, 0, 0, number]).into()
}

/// A state machine and its clock.
struct World {
    admission: PeerAdmission,
    now: Instant,
}

impl World {
    fn new() -> Self {
        Self {
            admission: PeerAdmission::new(LIMITS),
            now: Instant::now(),
        }
    }

    fn accepted(&mut self, address: u8) -> (ConnectionId, Vec<GateAction>) {
        self.admission.accepted(source(address), self.now)
    }

    fn after(&mut self, seconds: f64) -> Vec<GateAction> {
        self.now += Duration::from_secs_f64(seconds);
        self.admission.tick(self.now)
    }
}

#[test]
fn ipv6_sources_are_grouped_by_network() {
    let of = |text: &str| SourceNetwork::from(text.parse::<IpAddr>().unwrap());
    assert_eq!(of("1.2.3.4"), of("::ffff:1.2.3.4"));
    assert_ne!(of("1.2.3.4"), of("1.2.3.5"));
    assert_eq!(of("2001:db8:1:2::1"), of("2001:db8:1:2:ffff::"));
    assert_ne!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
    assert_ne!(of("127.0.0.1"), of("::1"));
}

#[test]
fn unadmitted_peers_are_served_at_once_while_places_are_free() {
    let mut world = World::new();
    for address in [1, 1, 2, 2] {
        let (id, actions) = world.accepted(address);
        assert_eq!(actions, [GateAction::Serve(id)]);
    }
    let (_, actions) = world.accepted(3);
    assert_eq!(actions, []);
    assert_eq!(world.admission.unadmitted(), (4, 1));
}

#[test]
fn newest_waiting_peer_of_an_address_is_served_next() {
    let mut world = World::new();
    let (first, _) = world.accepted(1);
    world.after(0.1);
    let (second, _) = world.accepted(1);
    let (third, actions) = world.accepted(1);
    assert_eq!(actions, []);
    let (fourth, actions) = world.accepted(1);
    assert_eq!(actions, []);
    assert_eq!(world.after(0.8), []);
    let both = [GateAction::Close(first), GateAction::Serve(fourth)];
    assert_eq!(world.after(0.1), both);
    // No other stranger is closed for it.
    let (other, actions) = world.accepted(2);
    assert_eq!(actions, [GateAction::Serve(other)]);
    let admitted = world.admission.admit(fourth, false, world.now).unwrap();
    assert_eq!(admitted, [GateAction::Serve(third)]);
    assert_eq!(world.after(0.05), []);
    assert!(world.admission.served_since(second).is_some());
}

#[test]
fn peers_that_connect_at_once_are_expelled_gradually() {
    let limits = Limits {
        unadmitted: 1000,
        served: 100,
        served_per_address: 100,
        ..LIMITS
    };
    let (mut admission, mut now) = (PeerAdmission::new(limits), Instant::now());
    for _ in 0..500 {
        admission.accepted(source(1), now);
    }
    let mut closed = Vec::new();
    for _ in 0..60 {
        now += Duration::from_millis(50);
        let actions = admission.tick(now);
        closed.push(
            actions
                .iter()
                .filter(|a| matches!(a, GateAction::Close(_)))
                .count(),
        );
    }
    assert_eq!(closed[..19].iter().sum::<usize>(), 0, "a turn is a second");
    // A twentieth of a hundred in each twentieth of a second; then of 75, once all
    // waiting strangers have waited so long that a quarter of the places is closed to
    // them.
    assert!(closed[20..40].iter().all(|count| *count == 5), "{closed:?}");
    assert_eq!(closed[55..], [4; 5], "{closed:?}");
}

/// 1,500 strangers of one address, each back two seconds after it was closed: twice as
/// many as can be served. Among them comes one honest peer after the other.
#[test]
fn new_peer_is_served_soon_despite_many_reconnecting_peers() {
    const TICK: Duration = Duration::from_millis(50);
    const AWAY: u32 = 40;
    let limits = Limits {
        unadmitted: 10_000,
        served: 512,
        served_per_address: 256,
        new_peer_age: Duration::from_secs(1),
        time_slice: Duration::from_millis(750),
        ..LIMITS
    };
    let (mut admission, mut now) = (PeerAdmission::new(limits), Instant::now());
    let mut away: VecDeque<u32> = (0..1500).map(|number| number / 100).collect();
    let (mut honest, mut slowest) = (None, 0);
    for tick in 0..2400 {
        now += TICK;
        let mut actions = admission.tick(now);
        if tick >= 200 && honest.is_none() {
            let (id, more) = admission.accepted(source(1), now);
            honest = Some((id, tick));
            actions.extend(more);
        }
        while away.front().is_some_and(|back| *back <= tick) {
            away.pop_front();
            actions.extend(admission.accepted(source(1), now).1);
        }
        for action in actions {
            match (action, honest) {
                (GateAction::Serve(id), Some((peer, since))) if peer == id => {
                    slowest = slowest.max(tick - since);
                    // It is admitted, makes its call, and leaves.
                    admission.admit(id, false, now).unwrap();
                    admission.closed(id, now);
                    honest = None;
                }
                (GateAction::Close(_), _) => away.push_back(tick + AWAY),
                (GateAction::Serve(_), _) => {}
            }
        }
    }
    let waits = honest.map_or(0, |(_, since)| 2400 - since);
    assert!(slowest.max(waits) <= 4, "{slowest} ticks, and {waits} now");
}

#[test]
fn peer_is_served_until_the_timeout_while_nobody_waits() {
    let mut world = World::new();
    let (id, _) = world.accepted(1);
    assert_eq!(world.after(4.9), []);
    assert_eq!(world.after(0.1), [GateAction::Close(id)]);
    assert_eq!(world.admission.unadmitted(), (0, 0));
}

#[test]
fn address_with_fewest_served_peers_is_served_next() {
    let mut world = World::new();
    let first = [1, 1, 2, 2].map(|address| world.accepted(address).0);
    let (_, actions) = world.accepted(2);
    assert_eq!(actions, []);
    let (rare, actions) = world.accepted(3);
    assert_eq!(actions, []);
    let (_, actions) = world.accepted(1);
    assert_eq!(actions, []);
    let actions = world.after(1.0);
    let served = actions.iter().find(|a| matches!(a, GateAction::Serve(_)));
    assert_eq!(served, Some(&GateAction::Serve(rare)));
    assert_eq!(actions[0], GateAction::Close(first[0]));
}

#[test]
fn full_queue_evicts_oldest_peer_of_the_address_with_most_waiting() {
    let mut world = World::new();
    let ids: Vec<ConnectionId> = (0..6).map(|_| world.accepted(1).0).collect();
    world.accepted(2);
    world.accepted(2);
    assert_eq!(world.admission.unadmitted(), (4, 4));
    let (id, actions) = world.accepted(3);
    assert_eq!(actions, [GateAction::Close(ids[2])]);
    assert!(world.admission.peers.contains_key(&id));
}

#[test]
fn unadmitted_peers_cannot_take_places_of_admitted_peers() {
    let mut world = World::new();
    for _ in 0..3 {
        let (id, _) = world.accepted(1);
        assert_eq!(world.admission.admit(id, false, world.now), Ok(vec![]));
    }
    let (id, _) = world.accepted(1);
    let full = Err(AdmissionLimitError { limit: 3 });
    assert_eq!(world.admission.admit(id, false, world.now), full);
    // A place kept for peers with a reserved place is free for them.
    assert_eq!(world.admission.admit(id, true, world.now), Ok(vec![]));
    let (id, _) = world.accepted(1);
    assert_eq!(world.admission.admit(id, true, world.now), Ok(vec![]));
    let (id, _) = world.accepted(1);
    let full = Err(AdmissionLimitError { limit: 5 });
    assert_eq!(world.admission.admit(id, true, world.now), full);
    assert_eq!(world.admission.unadmitted(), (1, 0));
}

#[derive(Clone, Debug)]
enum Event {
    Accepted(u8),
    Admitted(usize, bool),
    Closed(usize),
    Tick(u16),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (0u8..4).prop_map(Event::Accepted),
        2 => (any::<usize>(), any::<bool>()).prop_map(|(at, reserved)| Event::Admitted(at, reserved)),
        2 => any::<usize>().prop_map(Event::Closed),
        2 => (0u16..3000).prop_map(Event::Tick),
    ]
}

proptest! {
    /// The actions are consistent, and no limit is ever exceeded.
    #[test]
    fn limits_hold_for_any_event_sequence(events in prop::collection::vec(event(), 0..200)) {
        let mut world = World::new();
        // The state of a gate: the open connections, and whether each is served.
        let mut open: Vec<(ConnectionId, u8, bool)> = Vec::new();
        for event in events {
            let actions = match event {
                Event::Accepted(address) => {
                    let (id, actions) = world.accepted(address);
                    open.push((id, address, false));
                    actions
                }
                Event::Admitted(at, reserved) if !open.is_empty() => {
                    let at = at % open.len();
                    // No peer can be admitted before it is served.
                    let (id, _, served) = open[at];
                    match served {
                        true => world.admission.admit(id, reserved, world.now).unwrap_or_default(),
                        false => Vec::new(),
                    }
                }
                Event::Closed(at) if !open.is_empty() => {
                    let (id, ..) = open.swap_remove(at % open.len());
                    world.admission.closed(id, world.now)
                }
                Event::Tick(millis) => world.after(f64::from(millis) / 1000.0),
                Event::Admitted(..) | Event::Closed(_) => Vec::new(),
            };
            for action in actions {
                match action {
                    GateAction::Serve(id) => {
                        let peer = open.iter_mut().find(|(peer, ..)| *peer == id);
                        let peer = peer.expect("only open connections are served");
                        prop_assert!(!peer.2, "nobody is served twice");
                        peer.2 = true;
                    }
                    GateAction::Close(id) => {
                        let at = open.iter().position(|(peer, ..)| *peer == id);
                        open.swap_remove(at.expect("only open connections are closed"));
                    }
                }
            }
            check(&world, &open)?;
        }
        for (id, ..) in open {
            world.admission.closed(id, world.now);
        }
        let PeerAdmission { peers, address_queues, by_fewest_served, by_most_waiting, admitted, unreserved, .. } = &world.admission;
        prop_assert!(peers.is_empty() && address_queues.is_empty() && by_fewest_served.is_empty() && by_most_waiting.is_empty());
        prop_assert_eq!((*admitted, *unreserved, world.admission.unadmitted()), (0, 0, (0, 0)));
    }
}

fn check(world: &World, open: &[(ConnectionId, u8, bool)]) -> Result<(), TestCaseError> {
    let admission = &world.admission;
    let (served, waiting) = admission.unadmitted();
    prop_assert_eq!(open.len(), admission.peers.len());
    prop_assert_eq!(open.len(), served + waiting + admission.admitted);
    prop_assert_eq!(
        open.iter().filter(|(_, _, served)| !served).count(),
        waiting
    );
    prop_assert!(served + waiting <= LIMITS.unadmitted);
    prop_assert!(served <= LIMITS.served);
    prop_assert!(admission.admitted <= LIMITS.admitted);
    prop_assert!(admission.unreserved <= LIMITS.admitted - LIMITS.reserved);
    for queue in admission.address_queues.values() {
        prop_assert!(queue.served <= LIMITS.served_per_address);
        // No stranger waits while a place is free for it.
        let Some(&newest) = queue.waiting.last() else {
            continue;
        };
        let place =
            served < LIMITS.served && queue.served < admission.place_limit(newest, world.now);
        prop_assert!(!place);
    }
    Ok(())
}
