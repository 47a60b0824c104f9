//! Counts of the ops' outcomes, by variant.

use std::fmt;

use tensord_proto::v1::FaultKind;
use tensord_worker::testing::OpOutcome;

use super::templates::{NEVER_EXECUTED, NEVER_REFUSED, Templates};

/// Counts of one variant.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    executed: u64,
    /// Refused by a rule.
    refused: u64,
    /// Failed because the backend panicked, which does not end the session.
    panicked: u64,
    /// Not executed because an input was poisoned.
    poisoned: u64,
}

/// Counts of a run.
#[derive(Debug, Clone, Default)]
pub struct Report {
    counts: Vec<Count>,
    names: Vec<String>,
    /// Sessions that were closed.
    pub sessions: u64,
    /// Corrupted frames that were refused as a whole.
    pub frames_refused: u64,
    /// Corrupted frames that the decoder accepted.
    pub frames_taken: u64,
}

impl Report {
    /// Creates a report in which all counts are 0.
    pub fn new(templates: &Templates) -> Self {
        let names = (0..templates.len()).map(|i| templates.get(i).0.to_string());
        Self {
            counts: vec![Count::default(); templates.len()],
            names: names.collect(),
            ..Self::default()
        }
    }

    pub(super) fn note(&mut self, variant: usize, outcome: &OpOutcome) {
        let count = &mut self.counts[variant];
        match outcome {
            OpOutcome::Executed => count.executed += 1,
            OpOutcome::Refused(FaultKind::Panic, _) => count.panicked += 1,
            OpOutcome::Refused(..) => count.refused += 1,
            OpOutcome::Poisoned => count.poisoned += 1,
        }
    }

    /// Adds the counts of another report.
    pub fn add(&mut self, other: &Self) {
        for (count, other) in self.counts.iter_mut().zip(&other.counts) {
            count.executed += other.executed;
            count.refused += other.refused;
            count.panicked += other.panicked;
            count.poisoned += other.poisoned;
        }
        self.sessions += other.sessions;
        self.frames_refused += other.frames_refused;
        self.frames_taken += other.frames_taken;
    }

    /// Returns the number of ops with an outcome.
    pub fn ops(&self) -> u64 {
        let sum = |c: &Count| c.executed + c.refused + c.panicked + c.poisoned;
        self.counts.iter().map(sum).sum()
    }

    /// Returns a line for each variant that was executed or refused fewer than `least` times.
    pub fn undertested_variants(&self, least: u64) -> Vec<String> {
        let mut lacks = Vec::new();
        for (name, count) in self.names.iter().zip(&self.counts) {
            let refused = count.refused + count.panicked;
            let (executed, name) = (count.executed, name.as_str());
            if executed < least && !NEVER_EXECUTED.contains(&name) {
                lacks.push(format!("{name} was executed {executed} times"));
            }
            if refused < least && !NEVER_REFUSED.contains(&name) {
                lacks.push(format!("{name} was refused {refused} times"));
            }
        }
        lacks
    }

    /// Returns the smallest number of executions and of refusals of a variant, without the
    /// variants that cannot be executed or refused.
    pub fn minimum_counts(&self) -> (u64, u64) {
        let all = || self.names.iter().zip(&self.counts);
        let executed = all().filter(|(name, _)| !NEVER_EXECUTED.contains(&name.as_str()));
        let refused = all().filter(|(name, _)| !NEVER_REFUSED.contains(&name.as_str()));
        let executed = executed.map(|(_, count)| count.executed).min();
        let refused = refused.map(|(_, count)| count.refused + count.panicked);
        (executed.unwrap_or(0), refused.min().unwrap_or(0))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.names.iter().map(String::len).max().unwrap_or(0);
        let header = ["executed", "refused", "panicked", "poisoned"];
        write!(f, "{:width$}", "variant")?;
        header
            .iter()
            .try_for_each(|name| write!(f, " {name:>10}"))?;
        writeln!(f)?;
        let mut rows: Vec<_> = self.names.iter().zip(&self.counts).collect();
        rows.sort_by_key(|(name, _)| *name);
        for (name, count) in rows {
            let Count {
                executed,
                refused,
                panicked,
                poisoned,
            } = count;
            writeln!(
                f,
                "{name:width$} {executed:>10} {refused:>10} {panicked:>10} {poisoned:>10}"
            )?;
        }
        let (executed, refused) = self.minimum_counts();
        write!(
            f,
            "{} ops in {} sessions; each variant executed at least {executed} times and refused \
             at least {refused} times; of the corrupted frames, {} were refused and {} were accepted",
            self.ops(),
            self.sessions,
            self.frames_refused,
            self.frames_taken
        )
    }
}
