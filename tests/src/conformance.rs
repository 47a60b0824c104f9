//! Conformance suite: cases that cover what a Burn program may do with a device.
//!
//! A case is a pure function of a [`Device`] that uses only Burn's public `Tensor` API.
//! [`run_all`] runs every case on a device and on a reference and compares the results, so
//! one suite serves every backend and every kind of connection to it. The suite must not
//! depend on what implements the device: no URL, no worker, no backend type.
//!
//! A case's name has the form `theme.op` or `theme.op/variant`.

mod autodiff;
mod case;
mod compare;
mod data;
mod runner;

mod activation;
mod attention;
mod bools;
mod cast;
mod conv;
mod creation;
mod gradients;
mod indexing;
mod int;
mod layers;
mod linalg;
mod losses;
mod math;
mod norm;
mod optimizers;
mod pool;
mod program;
mod random;
mod reductions;
mod shape;
mod sort;

pub use case::{Case, Outputs, Tolerance};
pub use compare::{Agreement, Difference, Value, compare};
pub use runner::{Failure, Reason, Report, check, run, run_all};

#[cfg(doc)]
use burn::tensor::Device;

/// Returns all cases of the suite.
pub fn cases() -> Vec<Case> {
    let themes = [
        creation::cases,
        math::cases,
        linalg::cases,
        reductions::cases,
        shape::cases,
        indexing::cases,
        sort::cases,
        bools::cases,
        int::cases,
        cast::cases,
        activation::cases,
        conv::cases,
        pool::cases,
        norm::cases,
        attention::cases,
        layers::cases,
        losses::cases,
        optimizers::cases,
        gradients::cases,
        random::cases,
        program::cases,
    ];
    themes.iter().flat_map(|cases| cases()).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use burn::tensor::{Device, TensorData};

    use super::case::Body;
    use super::*;

    /// Cases that fill a tensor with one value.
    const FILLED: &str = "empty empty_like zeros ones full zeros_like ones_like";

    #[test]
    fn the_suite_covers_200_ops_under_unique_names() {
        let cases = cases();
        let names: HashSet<_> = cases.iter().map(|case| case.name).collect();
        assert_eq!(names.len(), cases.len(), "a name is used twice");

        // A gradient is not another op, so gradient cases do not count.
        let ops: HashSet<_> = cases
            .iter()
            .filter(|case| case.theme() != "grad")
            .map(Case::op)
            .collect();
        assert!(
            ops.len() >= 200,
            "{} ops in {} cases",
            ops.len(),
            cases.len()
        );
    }

    #[test]
    fn a_device_conforms_to_itself() {
        let device = Device::flex();
        run(&cases(), &device, &device, Agreement::Bitwise).assert_all_passed();
    }

    #[test]
    fn run_all_skips_and_reports_gaps() {
        let device = Device::flex();
        let report = run_all(&device, &device);
        report.assert_all_passed();
        assert!(!report.gaps.is_empty());
        assert_eq!(report.total() + report.gaps.len(), cases().len());
    }

    /// A result that is all zeros or all NaN would agree with many wrong results.
    #[test]
    fn results_are_not_constant() {
        let device = Device::flex();
        for case in cases() {
            let Body::Values(run) = &case.body else {
                continue;
            };
            let outputs = run(&device);
            let values: Vec<f64> = outputs
                .iter()
                .flat_map(TensorData::iter::<f64>)
                .filter(|value| value.is_finite())
                .collect();
            let varied = values.iter().any(|&value| value != values[0]);
            let single = values.len() == 1 && values[0] != 0.0;
            let filled = FILLED
                .split(' ')
                .any(|op| case.op() == format!("creation.{op}"));
            assert!(
                varied || single || filled,
                "{} yields {values:?}",
                case.name
            );
        }
    }
}
