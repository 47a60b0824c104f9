//! Compares the samples of two builds. Pure: no I/O, no clock.

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::jobs::{Figure, FigureKind, Job};
use crate::{
    report::{format_number, format_optional, format_quartiles, table},
    stats::{Summary, ratio, round},
};

/// All figures of two builds, side by side.
pub(super) struct Comparison {
    rows: Vec<Row>,
    tolerance: f64,
}

struct Row {
    bench: &'static str,
    figure: Figure,
    /// Summaries of this build and of the earlier one.
    summaries: [Summary; 2],
    verdict: Verdict,
}

/// The verdict on one figure of this build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// Within the tolerance, or better.
    Fine,
    /// Worse by more than the tolerance.
    Worse,
    /// Above the figure's own upper limit.
    OverLimit,
    /// Not judged.
    Control,
    /// Should be the same in every sample, but is not.
    Differs,
}

impl Verdict {
    const fn name(self) -> &'static str {
        match self {
            Self::Fine => "fine",
            Self::Worse => "worse",
            Self::OverLimit => "over its bound",
            Self::Control => "control",
            Self::Differs => "differs",
        }
    }
}

impl Comparison {
    /// Compares the samples of each figure of `jobs`, this build's and the earlier one's. A
    /// median may be worse by the share `tolerance`.
    ///
    /// # Errors
    ///
    /// If a figure has no samples, or a NaN among them.
    pub(super) fn of(jobs: &[Job], samples: Vec<[Vec<f64>; 2]>, tolerance: f64) -> Result<Self> {
        let figures = jobs.iter().flat_map(|job| {
            let bench = job.bench.name();
            job.figures.iter().map(move |figure| (bench, figure))
        });
        let row = |((bench, figure), samples): ((_, &Figure), [Vec<f64>; 2])| {
            let summary = |samples: &[f64]| {
                let summary = Summary::of(samples);
                summary.with_context(|| format!("{bench} {} has no samples", figure.name))
            };
            let summaries = [summary(&samples[0])?, summary(&samples[1])?];
            Ok(Row {
                bench,
                figure: figure.clone(),
                summaries,
                verdict: judge(figure, &samples, summaries, tolerance),
            })
        };
        let rows = figures.zip(samples).map(row).collect::<Result<_>>()?;
        Ok(Self { rows, tolerance })
    }

    /// Returns whether a median of this build is worse by more than the tolerance, or above
    /// its limit.
    pub(super) fn is_worse(&self) -> bool {
        self.rows.iter().any(|row| row.is_worse())
    }

    /// Returns the comparison as a table for people.
    pub(super) fn table(&self) -> String {
        let numbers = ["this", "quartiles", "earlier", "quartiles", "this/earlier"];
        let mut rows = table(&["bench", "figure"], &numbers);
        for row in &self.rows {
            let [this, earlier] = &row.summaries;
            rows.add_row([
                row.bench.to_owned(),
                match row.verdict {
                    Verdict::Fine => row.figure.name.clone(),
                    verdict => format!("{} ({})", row.figure.name, verdict.name()),
                },
                format_number(this.median),
                format_quartiles(this),
                format_number(earlier.median),
                format_quartiles(earlier),
                format_optional(row.ratio()),
            ]);
        }
        let mut text = rows.to_string();
        for line in self.conclusions() {
            text.push('\n');
            text.push_str(&line);
        }
        text
    }

    fn conclusions(&self) -> Vec<String> {
        let percent = round(self.tolerance * 100.0);
        let of = |verdict| self.rows.iter().filter(move |row| row.verdict == verdict);
        let names = |rows: Vec<&Row>| -> String {
            let names = rows
                .iter()
                .map(|row| format!("{} {}", row.bench, row.figure.name));
            names.collect::<Vec<_>>().join(", ")
        };
        let mut lines = Vec::new();
        let worse: Vec<_> = self.rows.iter().filter(|row| row.is_worse()).collect();
        lines.push(match worse.is_empty() {
            true => format!("no median is worse by more than {percent} %"),
            false => format!(
                "worse by more than {percent} %, or over a bound: {}",
                names(worse)
            ),
        });
        let differ: Vec<_> = of(Verdict::Differs).collect();
        if !differ.is_empty() {
            lines.push(format!(
                "these figures must be the same in both builds, but differ: {}",
                names(differ)
            ));
        }
        let moved = |row: &&Row| {
            let ratio = row.ratio().unwrap_or(1.0);
            (ratio - 1.0).abs() > self.tolerance
        };
        let noisy: Vec<_> = of(Verdict::Control).filter(moved).collect();
        if !noisy.is_empty() {
            lines.push(format!(
                "other load disturbed the runs: these figures do not use tensord but differ: {}",
                names(noisy)
            ));
        }
        lines
    }

    /// Returns the comparison as JSON for programs.
    pub(super) fn to_json(&self) -> Value {
        let rows = self.rows.iter().map(|row| {
            let [this, earlier] = &row.summaries;
            let quartiles = |summary: &Summary| json!([round(summary.q1), round(summary.q3)]);
            json!({
                "bench": row.bench,
                "figure": row.figure.name,
                "this": round(this.median),
                "earlier": round(earlier.median),
                "ratio": row.ratio().map(round),
                "this_quartiles": quartiles(this),
                "earlier_quartiles": quartiles(earlier),
                "verdict": row.verdict.name(),
            })
        });
        json!({
            "figures": rows.collect::<Vec<_>>(),
            "tolerance_percent": self.tolerance * 100.0,
            "worse": self.is_worse(),
        })
    }
}

impl Row {
    fn ratio(&self) -> Option<f64> {
        let [this, earlier] = &self.summaries;
        ratio(this.median, earlier.median)
    }

    fn is_worse(&self) -> bool {
        matches!(self.verdict, Verdict::Worse | Verdict::OverLimit)
    }
}

fn judge(
    figure: &Figure,
    samples: &[Vec<f64>; 2],
    [this, earlier]: [Summary; 2],
    tolerance: f64,
) -> Verdict {
    let upper_limit = figure.upper_limit.unwrap_or(f64::INFINITY);
    let worse = match figure.kind {
        FigureKind::Control => return Verdict::Control,
        FigureKind::Constant => {
            let mut all = samples.iter().flatten();
            let first = all.next();
            return match all.all(|sample| Some(sample) == first) {
                true => Verdict::Fine,
                false => Verdict::Differs,
            };
        }
        FigureKind::Cost => this.median > earlier.median * (1.0 + tolerance),
        FigureKind::Rate => this.median < earlier.median * (1.0 - tolerance),
    };
    match worse {
        _ if this.median > upper_limit => Verdict::OverLimit,
        true => Verdict::Worse,
        false => Verdict::Fine,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Bench;

    fn figure(name: &str, kind: FigureKind, upper_limit: Option<f64>) -> Figure {
        Figure {
            name: name.into(),
            pointer: String::new(),
            kind,
            upper_limit,
        }
    }

    fn compared(
        kind: FigureKind,
        upper_limit: Option<f64>,
        this: &[f64],
        earlier: &[f64],
    ) -> Comparison {
        let job = Job {
            bench: Bench::Ops,
            title: "ops".into(),
            turn: None,
            figures: vec![figure("a_us", kind, upper_limit)],
        };
        let samples = vec![[this.to_vec(), earlier.to_vec()]];
        Comparison::of(&[job], samples, 0.05).unwrap()
    }

    #[test]
    fn median_may_be_worse_within_the_tolerance() {
        let check = |kind, this: f64, expected| {
            let found = compared(kind, None, &[this], &[100.0]);
            assert_eq!(found.rows[0].verdict, expected, "{kind:?} {this}");
            assert_eq!(found.is_worse(), expected == Verdict::Worse);
        };
        check(FigureKind::Cost, 50.0, Verdict::Fine);
        check(FigureKind::Cost, 105.0, Verdict::Fine);
        check(FigureKind::Cost, 105.1, Verdict::Worse);
        check(FigureKind::Rate, 200.0, Verdict::Fine);
        check(FigureKind::Rate, 95.0, Verdict::Fine);
        check(FigureKind::Rate, 94.9, Verdict::Worse);
        check(FigureKind::Control, 500.0, Verdict::Control);
    }

    #[test]
    fn outliers_do_not_affect_the_verdict() {
        let found = compared(FigureKind::Cost, None, &[1.0, 1.0, 9.0], &[1.0, 1.0, 1.0]);
        assert!(!found.is_worse());
    }

    #[test]
    fn upper_limit_applies_regardless_of_the_base_build() {
        let found = compared(FigureKind::Cost, Some(20.0), &[20.5], &[20.4]);
        assert_eq!(found.rows[0].verdict, Verdict::OverLimit);
        assert!(found.is_worse());
        assert!(!compared(FigureKind::Cost, Some(20.0), &[19.0], &[19.0]).is_worse());
    }

    #[test]
    fn constants_are_compared_sample_by_sample() {
        let found = compared(FigureKind::Constant, None, &[1.5, 1.5], &[1.5, 1.25]);
        assert_eq!(found.rows[0].verdict, Verdict::Differs);
        assert!(
            found
                .table()
                .contains("these figures must be the same in both builds, but differ: ops a_us")
        );
        let found = compared(FigureKind::Constant, None, &[1.5, 1.5], &[1.5]);
        assert_eq!(found.rows[0].verdict, Verdict::Fine);
    }

    #[test]
    fn report_shows_regressions_and_noise() {
        let found = compared(FigureKind::Cost, None, &[3.0], &[2.0]);
        let text = found.table();
        assert!(
            text.contains("a_us (worse)") && text.contains("1.5"),
            "{text}"
        );
        assert!(text.contains("worse by more than 5 %, or over a bound: ops a_us"));
        let json = found.to_json();
        assert_eq!(json["worse"], true);
        assert_eq!(json["figures"][0]["ratio"], 1.5);
        assert_eq!(json["figures"][0]["verdict"], "worse");
        let text = compared(FigureKind::Control, None, &[3.0], &[2.0]).table();
        assert!(
            text.contains("no median is worse by more than 5 %"),
            "{text}"
        );
        assert!(text.contains("other load disturbed"), "{text}");
    }

    #[test]
    fn a_figure_without_samples_is_an_error() {
        let job = Job {
            bench: Bench::Ops,
            title: "ops".into(),
            turn: None,
            figures: vec![figure("a_us", FigureKind::Cost, None)],
        };
        let error = Comparison::of(&[job], vec![[vec![1.0], Vec::new()]], 0.05).err();
        assert!(
            error
                .unwrap()
                .to_string()
                .contains("ops a_us has no samples")
        );
    }
}
