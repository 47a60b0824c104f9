//! Which devices a request gets, and with which error it is refused. The placement
//! algorithm itself is tested in `crate::placement`.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::placement::{Candidate, choose};

fn demand(devices: u32, kind: Option<&str>, gib: u64) -> Demand {
    Demand {
        devices,
        kind: kind.map(str::to_owned),
        memory_bytes: gib << 30,
        durability: Durability::Off,
        recover_within: None,
        max_duration: None,
        is_spot: false,
        may_end: false,
        share_permille: None,
    }
}

/// Two flex devices on worker 1, two cuda devices on worker 2.
fn mixed_pool() -> [Step; 3] {
    [
        (0, join(1, &[flex(16), flex(16)]), vec![]),
        (0, join(2, &[cuda(8), cuda(80)]), vec![]),
        (0, attach(9), vec![]),
    ]
}

/// Checks one demand in the mixed pool: it gets these devices, or is refused with this
/// error.
fn check_mixed(demand: Demand, expected: Result<&[(u64, u32, DeviceSpec)], &str>) {
    let mut engine = check(mixed_pool());
    let commands = without_numbers(engine.handle(request_for(9, 1, demand), at(0)));
    match (expected, &commands[..]) {
        (Ok(devices), commands) => assert_eq!(commands, [granted(9, 1, devices)]),
        (Err(text), [Command::Refused { reason, .. }]) => assert_eq!(reason.to_string(), text),
        (Err(text), commands) => panic!("expected {text:?}, got {commands:?}"),
    }
}

#[test]
fn granted_devices_match_kind_and_memory() {
    check_mixed(demand(1, Some("cuda"), 0), Ok(&[(2, 0, cuda(8))]));
    check_mixed(demand(1, Some("cuda"), 9), Ok(&[(2, 1, cuda(80))]));
    check_mixed(demand(1, None, 8), Ok(&[(2, 0, cuda(8))]));
    check_mixed(demand(1, None, 16), Ok(&[(1, 0, flex(16))]));
    check_mixed(
        demand(2, Some("flex"), 16),
        Ok(&[(1, 0, flex(16)), (1, 1, flex(16))]),
    );
}

#[test]
fn unsatisfiable_requests_are_refused_with_the_inventory() {
    let has = "the pool has 1 cuda (8.0 GiB), 1 cuda (80.0 GiB), 2 flex (16.0 GiB)";
    check_mixed(
        demand(4, Some("cuda"), 8),
        Err(&format!(
            "requested 4 devices of kind cuda with 8.0 GiB each; {has}"
        )),
    );
    check_mixed(
        demand(1, Some("vulkan"), 0),
        Err(&format!("requested 1 device of kind vulkan; {has}")),
    );
    check_mixed(
        demand(2, None, 17),
        Err(&format!(
            "requested 2 devices of any kind with 17.0 GiB each; {has}"
        )),
    );
    check_mixed(
        demand(u32::MAX, None, 0),
        Err(&format!(
            "requested {} devices of any kind; {has}",
            u32::MAX
        )),
    );
    check_mixed(
        demand(0, None, 0),
        Err("a lease request must name at least one device"),
    );
}

#[test]
fn empty_pool_refuses_requests() {
    let mut engine = check([(0, attach(9), vec![])]);
    let commands = engine.handle(request(9, 1, 1), at(0));
    assert_eq!(commands, [unsatisfiable(9, 1, 1, &[])]);
    let [Command::Refused { reason, .. }] = &commands[..] else {
        unreachable!()
    };
    assert_eq!(
        reason.to_string(),
        "requested 1 device of any kind; no worker has joined the pool"
    );
}

#[test]
fn inventory_in_errors_is_bounded() {
    let devices: Vec<_> = (1..=20).map(cuda).collect();
    let mut engine = check([(0, join(1, &devices), vec![]), (0, attach(9), vec![])]);
    let commands = engine.handle(request(9, 1, 21), at(0));
    let [Command::Refused { reason, .. }] = &commands[..] else {
        panic!("{commands:?}")
    };
    assert!(
        reason.to_string().ends_with("1 cuda (8.0 GiB) and 12 more"),
        "{reason}"
    );
}

#[test]
fn requests_for_busy_devices_are_queued() {
    check([
        (0, join(1, &[flex(16), flex(16)]), vec![]),
        (0, attach(9), vec![]),
        (
            0,
            request(9, 1, 1),
            vec![granted(9, 1, &[(1, 0, flex(16))])],
        ),
        (0, request(9, 2, 2), vec![queued(9, 2, 1)]),
    ]);
}

#[test]
fn a_gang_spans_workers_if_it_must() {
    check([
        (0, join(1, &[flex(16)]), vec![]),
        (0, join(2, &[flex(16), flex(16)]), vec![]),
        (0, attach(9), vec![]),
        (
            0,
            request(9, 1, 3),
            vec![granted(
                9,
                1,
                &[(1, 0, flex(16)), (2, 0, flex(16)), (2, 1, flex(16))],
            )],
        ),
    ]);
}

fn device_of((gib, is_cuda): (u64, bool)) -> DeviceSpec {
    if is_cuda { cuda(gib) } else { flex(gib) }
}

/// Returns the devices that a request gets, chosen among all free devices of the pool.
fn chosen_among_all(engine: &Engine, demand: &Demand) -> Option<Vec<DeviceRef>> {
    let workers = engine.snapshot().workers.into_iter();
    let candidates = workers.filter(|worker| !worker.draining).map(|worker| {
        let devices = (0..).zip(worker.devices);
        let free = devices.filter(|(_, it)| it.leases.is_empty() && demand.accepts(&it.device));
        let free = free.map(|(index, it)| (it.device.memory_bytes, index));
        Candidate::new(worker.worker, free.collect())
    });
    choose(candidates.collect(), demand.devices as usize)
}

proptest! {
    /// The engine looks at a few workers of those that are alike only.
    #[test]
    fn the_devices_are_those_chosen_among_all(
        workers in vec(vec((1..3_u64, prop::bool::ANY), 0..4), 1..8),
        drained in 0..20_u64,
        demands in vec((1..6_u32, prop::option::of(prop::bool::ANY), 0..3_u64), 1..10),
    ) {
        let mut engine = check([(0, attach(9), vec![])]);
        for (id, devices) in (1..).zip(workers) {
            let devices: Vec<_> = devices.into_iter().map(device_of).collect();
            engine.handle(join(id, &devices), at(0));
        }
        engine.handle(Event::Drain { worker: WorkerId(drained), is_drained: true }, at(0));
        for (number, (devices, is_cuda, gib)) in (1..).zip(demands) {
            let kind = is_cuda.map(|is_cuda| if is_cuda { "cuda" } else { "flex" });
            let demand = demand(devices, kind, gib);
            let expected = chosen_among_all(&engine, &demand);
            let commands = engine.handle(request_for(9, number, demand), at(0));
            let granted = commands.iter().find_map(|command| match command {
                Command::Granted { devices, .. } => {
                    Some(devices.iter().map(|device| device.device_ref).collect())
                }
                _ => None,
            });
            prop_assert_eq!(granted, expected);
        }
    }
}
