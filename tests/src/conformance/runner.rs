//! Runs cases on a device and on its reference, and reports what differs.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use burn::tensor::{Device, TensorData};

use super::case::{Body, Case};
use super::compare::{Agreement, Difference, compare};

/// Allows one case at a time in a process: the CPU backend has one random generator
/// per process, and a case that seeds it must not share it with another case.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Why a case failed.
#[derive(Clone, Debug, PartialEq)]
pub enum Reason {
    /// The device under test panicked, with this message.
    DevicePanicked(String),
    /// The reference panicked, with this message: the case itself is wrong.
    ReferencePanicked(String),
    /// Unequal numbers of outputs: actual, expected.
    Outputs(usize, usize),
    /// An output, by its index, differs.
    Differs(usize, Difference),
    /// A stated property does not hold.
    PropertyViolated(String),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DevicePanicked(message) => write!(f, "panicked: {message}"),
            Self::ReferencePanicked(message) => write!(f, "the reference panicked: {message}"),
            Self::Outputs(seen, expected) => write!(f, "{seen} outputs, expected {expected}"),
            Self::Differs(output, difference) => write!(f, "output {output}: {difference}"),
            Self::PropertyViolated(message) => f.write_str(message),
        }
    }
}

/// A case that failed, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// Name of the case.
    pub case: &'static str,
    /// Why it failed.
    pub reason: Reason,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.case, self.reason)
    }
}

impl std::error::Error for Failure {}

/// The outcome of a run.
#[derive(Debug, Default)]
pub struct Report {
    /// Number of cases that passed.
    pub passed: usize,
    /// Cases skipped because the device lacks an element type that they need.
    pub skipped: Vec<&'static str>,
    /// Cases that failed, in suite order.
    pub failures: Vec<Failure>,
    /// Cases that were not run because they are [gaps](Case::gap) of Burn's Remote device.
    pub gaps: Vec<&'static str>,
}

impl Report {
    /// Returns the number of cases that passed, failed or were skipped.
    pub fn total(&self) -> usize {
        self.passed + self.skipped.len() + self.failures.len()
    }

    /// Panics with every failure unless all cases passed and none was skipped.
    #[track_caller]
    pub fn assert_all_passed(&self) {
        assert!(self.passed > 0 && self.passed == self.total(), "{self}");
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} cases passed, {} failed, {} skipped, {} known gaps",
            self.passed,
            self.total(),
            self.failures.len(),
            self.skipped.len(),
            self.gaps.len()
        )?;
        for failure in &self.failures {
            write!(f, "\n  failed  {failure}")?;
        }
        for case in &self.skipped {
            write!(f, "\n  skipped {case}")?;
        }
        for case in &self.gaps {
            write!(f, "\n  gap     {case}")?;
        }
        Ok(())
    }
}

/// Runs one case on both devices and compares what they computed.
pub fn check(
    case: &Case,
    device: &Device,
    reference: &Device,
    agreement: Agreement,
) -> Result<(), Failure> {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let result = match &case.body {
        Body::Law(law) => catch(|| law(device))
            .map_err(Reason::DevicePanicked)
            .and_then(|held| held.map_err(Reason::PropertyViolated)),
        Body::Values(run) => catch(|| run(device))
            .map_err(Reason::DevicePanicked)
            .and_then(|actual| {
                let expected = catch(|| run(reference)).map_err(Reason::ReferencePanicked)?;
                compare_all(&actual, &expected, case, agreement)
            }),
    };
    result.map_err(|reason| Failure {
        case: case.name,
        reason,
    })
}

/// Runs cases one after the other, and continues after a failure.
pub fn run(cases: &[Case], device: &Device, reference: &Device, agreement: Agreement) -> Report {
    let mut report = Report::default();
    for case in cases {
        // Devices with the same kind of backend have the same types, so no case may be
        // skipped.
        let may_skip = agreement == Agreement::Tolerance;
        if may_skip
            && !case
                .dtypes
                .iter()
                .all(|&dtype| device.supports_dtype(dtype))
        {
            report.skipped.push(case.name);
            continue;
        }
        match check(case, device, reference, agreement) {
            Ok(()) => report.passed += 1,
            Err(failure) => report.failures.push(failure),
        }
    }
    report
}

/// Runs the suite against a reference with the same kind of backend: every value must be
/// equal bit for bit. Leaves out the [gaps](Case::gap) of Burn's Remote device.
pub fn run_all(device: &Device, reference: &Device) -> Report {
    let (cases, gaps): (Vec<_>, Vec<_>) = super::cases()
        .into_iter()
        .partition(|case| case.gap.is_none());
    Report {
        gaps: gaps.iter().map(|case| case.name).collect(),
        ..run(&cases, device, reference, Agreement::Bitwise)
    }
}

fn compare_all(
    actual: &[TensorData],
    expected: &[TensorData],
    case: &Case,
    agreement: Agreement,
) -> Result<(), Reason> {
    if actual.len() != expected.len() {
        return Err(Reason::Outputs(actual.len(), expected.len()));
    }
    for (output, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        compare(actual, expected, case.tolerance, agreement)
            .map_err(|difference| Reason::Differs(output, difference))?;
    }
    Ok(())
}

fn catch<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    // A case has no state that a panic could leave inconsistent.
    catch_unwind(AssertUnwindSafe(run)).map_err(|payload| message(payload.as_ref()))
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("(no message)").to_owned()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use burn::tensor::Tensor;

    use super::super::compare::Value;
    use super::*;

    fn reason(case: &Case) -> Option<Reason> {
        let device = Device::flex();
        check(case, &device, &device, Agreement::Bitwise)
            .err()
            .map(|failure| failure.reason)
    }

    #[test]
    fn a_wrong_result_is_detected() {
        // The device under test runs first and adds 0; the reference adds 1.
        let calls = AtomicU32::new(0);
        let wrong = Case::exact("self.wrong", move |device| {
            let call = calls.fetch_add(1, Ordering::Relaxed) as f32;
            Tensor::<1>::from_floats([3.0, 5.0 + call], device).exp()
        });
        let Some(Reason::Differs(
            0,
            Difference::Element {
                position,
                actual,
                expected,
                differing,
            },
        )) = reason(&wrong)
        else {
            panic!("the wrong element was not found");
        };
        assert_eq!((position, differing), (1, 1));
        let (Value::Float(actual), Value::Float(expected)) = (actual, expected) else {
            panic!("not floats");
        };
        assert!(actual < 149.0 && expected > 403.0, "{actual} {expected}");
    }

    #[test]
    fn a_missing_output_a_panic_and_a_broken_law_are_detected() {
        let calls = AtomicU32::new(0);
        let missing = Case::exact("self.missing", move |device| {
            let outputs = 1 + calls.fetch_add(1, Ordering::Relaxed) as usize;
            vec![Tensor::<1>::ones([2], device); outputs]
        });
        assert_eq!(reason(&missing), Some(Reason::Outputs(1, 2)));

        let panics = Case::exact("self.panics", |device| {
            let column = Tensor::<2>::ones([3, 1], device);
            column.clone().matmul(column)
        });
        assert!(matches!(reason(&panics), Some(Reason::DevicePanicked(_))));

        let broken = Case::law("self.broken", |_| Err("two is not three".into()));
        assert_eq!(
            reason(&broken),
            Some(Reason::PropertyViolated("two is not three".into()))
        );
    }

    #[test]
    fn a_run_goes_on_after_a_failure() {
        let cases = [
            Case::law("self.fails", |_| panic!("on purpose")),
            Case::exact("self.passes", |device| Tensor::<1>::ones([2], device)),
        ];
        let device = Device::flex();
        let report = run(&cases, &device, &device, Agreement::Bitwise);
        assert_eq!((report.passed, report.total()), (1, 2));
        assert_eq!(
            report.failures[0].to_string(),
            "self.fails: panicked: on purpose"
        );
    }
}
