//! The conformance suite on each kind of device, against Flex, and memory accounting.

use std::sync::{Mutex, PoisonError};

use burn::tensor::{Device, Tensor};
use tensord_client::LeaseRequest;
use tensord_testkit::host;
use tensord_tests::conformance::{self, Agreement, Failure};

/// Messages of Burn 0.22.1's CubeCL backend for an op, or a mode of an op, that it lacks.
const NOT_IN_CUBECL: [&str; 2] = [
    "is not supported by JIT backend",
    "Unsupported grid_sample interpolation mode",
];

/// Prefixes of the names of cases whose results differ between Burn 0.22.1's CubeCL backend
/// and Flex; `docs/gpu.md` has the details.
const DIFFERS_IN_CUBECL: [&str; 4] = [
    "random.uniform/int",
    "conv.deform_conv2d",
    "nn.deform_conv2d",
    "cast.arithmetic/f64",
];

/// A part of the suite's cases. A driver that compiles kernels on one core has a core for each part. The
/// second one is smaller, as its kernels take longer to compile.
#[derive(Clone, Copy)]
enum Part {
    First,
    Second,
}

/// Runs a part of the suite on the first device of `kind`, within the tolerances of Burn's own
/// backend tests.
fn conforms(kind: &str, part: Part) {
    if !host::has(kind) || !host::kinds().contains(&kind) {
        return;
    }
    // One kind at a time, so that kernels compiled by one are reused by others of the same
    // driver.
    static ONE_AT_A_TIME: [Mutex<()>; 2] = [const { Mutex::new(()) }; 2];
    let turn = ONE_AT_A_TIME[part as usize].lock();
    let _turn = turn.unwrap_or_else(PoisonError::into_inner);
    let cluster = host::cluster(&[kind]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1).kind(kind));
    let lease = lease.unwrap();
    let cases = conformance::cases().into_iter();
    let mut cases: Vec<_> = cases.filter(|case| case.gap.is_none()).collect();
    let second = cases.split_off(cases.len() * 3 / 4);
    if let Part::Second = part {
        cases = second;
    }
    let (device, reference) = (&lease.devices()[0], Device::flex());
    let report = conformance::run(&cases, device, &reference, Agreement::Tolerance);
    println!("{report}");
    let is_lacking = |failure: &&Failure| {
        let reason = failure.reason.to_string();
        let begins = |name: &&str| failure.case.starts_with(name);
        NOT_IN_CUBECL.iter().any(|words| reason.contains(words))
            || DIFFERS_IN_CUBECL.iter().any(begins)
    };
    let (lacking, failed): (Vec<_>, Vec<_>) = report.failures.iter().partition(is_lacking);
    assert!(failed.is_empty(), "{failed:#?}");
    // A backend lacks little, including element types: 11 cases in both parts together.
    let most_lacking = match part {
        Part::First => 10,
        Part::Second => 1,
    };
    assert!(
        lacking.len() <= most_lacking && report.passed * 10 >= report.total() * 9,
        "{report}"
    );
}

#[test]
fn cuda_agrees_with_flex() {
    conforms("cuda", Part::First);
}

#[test]
fn cuda_agrees_with_flex_in_the_second_part() {
    conforms("cuda", Part::Second);
}

#[test]
fn rocm_agrees_with_flex() {
    conforms("rocm", Part::First);
}

#[test]
fn rocm_agrees_with_flex_in_the_second_part() {
    conforms("rocm", Part::Second);
}

#[test]
fn metal_agrees_with_flex() {
    conforms("metal", Part::First);
}

#[test]
fn metal_agrees_with_flex_in_the_second_part() {
    conforms("metal", Part::Second);
}

#[test]
fn vulkan_agrees_with_flex() {
    conforms("vulkan", Part::First);
}

#[test]
fn vulkan_agrees_with_flex_in_the_second_part() {
    conforms("vulkan", Part::Second);
}

#[test]
fn webgpu_agrees_with_flex() {
    conforms("webgpu", Part::First);
}

#[test]
fn webgpu_agrees_with_flex_in_the_second_part() {
    conforms("webgpu", Part::Second);
}

/// A tensor that does not fit is refused with the figures, in the session that requested
/// it. The memory of an ended session is free for the next.
#[test]
fn memory_is_accounted_limited_and_released() {
    for kind in host::kinds().into_iter().chain(["flex"]) {
        let mut cluster = host::cluster(&[]);
        cluster.add_worker_with(kind, &["--memory", "64MiB"]);
        cluster.wait_for_workers(1);
        let pool = cluster.pool();
        for _ in 0..3 {
            let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
            let device = &lease.devices()[0];
            let held = Tensor::<1>::ones([10 << 20], device);
            let more = Tensor::<1>::ones([10 << 20], device);
            let refused = more.try_into_data().unwrap_err().to_string();
            let figures = "40.0 MiB requested, 24.0 MiB free";
            assert!(refused.contains(figures), "{refused}");
            let some: f32 = held.slice(5..9).sum().into_scalar();
            assert_eq!(some, 4.0);
        }
        let status = || pool.status().unwrap().workers[0].devices[0].clone();
        cluster.wait("the memory of the last session", || {
            status().live_bytes == 0
        });
    }
}
