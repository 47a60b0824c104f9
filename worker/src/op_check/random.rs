//! Random tensors.

use burn_backend::Distribution;
use burn_ir::RandomOpIr;

use super::{
    OpCheckResult, RuleViolation,
    rules::{Kind, check_volume, must},
};

/// Checks the distribution, as backends panic on an invalid one, some while they hold a
/// lock.
pub(super) fn check(op: &RandomOpIr, kind: Kind) -> OpCheckResult {
    kind.of(&op.out)?;
    distribution(&op.distribution)?;
    check_volume(&op.out)?;
    Ok(0)
}

fn distribution(distribution: &Distribution) -> Result<(), RuleViolation> {
    let holds = match *distribution {
        Distribution::Default => true,
        Distribution::Bernoulli(p) => (0.0..=1.0).contains(&p),
        Distribution::Uniform(low, high) => low.is_finite() && high.is_finite() && low <= high,
        Distribution::Normal(mean, deviation) => {
            mean.is_finite() && deviation.is_finite() && deviation >= 0.0
        }
    };
    must!(holds, "{distribution:?} is not a valid distribution");
    Ok(())
}
