//! Contenders measured in turn, so that noise affects all alike.
//!
//! Every round measures each contender once, in an order that changes from round to round.
//! The first round warms up servers, caches and the contenders' own state, and does not
//! count.

use anyhow::{Context as _, Result};
use serde_json::{Map, Value, json};

use crate::{
    progress::Progress,
    stats::{Summary, ratio, round},
};

type Measure<'a> = Box<dyn FnMut(usize) -> Result<f64> + 'a>;

/// Something to measure.
pub(crate) struct Contender<'a> {
    key: String,
    label: String,
    measure: Measure<'a>,
}

impl<'a> Contender<'a> {
    /// Creates a contender that is called `key` in JSON and `label` in tables. `measure`
    /// receives the number of the round and returns one sample.
    pub(crate) fn new(
        key: impl Into<String>,
        label: impl Into<String>,
        measure: impl FnMut(usize) -> Result<f64> + 'a,
    ) -> Self {
        Self {
            key: key.into(),
            label: label.into(),
            measure: Box::new(measure),
        }
    }

    /// Returns the contender's name in JSON.
    pub(crate) fn key(&self) -> &str {
        &self.key
    }
}

/// The results of a race, in the order of the contenders.
#[derive(Debug, Clone)]
pub(crate) struct Results(Vec<ContenderResult>);

/// The result of one contender.
#[derive(Debug, Clone)]
pub(crate) struct ContenderResult {
    /// The contender's name in JSON.
    pub(crate) key: String,
    /// The contender's name in tables.
    pub(crate) label: String,
    /// A summary of its samples.
    pub(crate) summary: Summary,
    /// The largest sample.
    pub(crate) max: f64,
}

/// Measures every contender `runs` times, in turn.
///
/// # Errors
///
/// The first error of a contender, with its label.
pub(crate) fn race(
    title: &str,
    mut contenders: Vec<Contender<'_>>,
    runs: usize,
    progress: &Progress,
) -> Result<Results> {
    let count = contenders.len();
    let mut samples = vec![Vec::with_capacity(runs); count];
    for run in 0..=runs {
        for index in contender_order(count, run) {
            let contender = &mut contenders[index];
            progress.update(&format!("{title}: {run}/{runs} {}", contender.label));
            let sample = (contender.measure)(run);
            let sample = sample.with_context(|| format!("{title}: {}", contender.label))?;
            if run > 0 {
                samples[index].push(sample);
            }
        }
    }
    let found = contenders.into_iter().zip(samples);
    let found = found.map(|(Contender { key, label, .. }, samples)| {
        let summary = Summary::of(&samples).with_context(|| format!("{title} has no samples"))?;
        Ok(ContenderResult {
            key,
            label,
            summary,
            max: samples.into_iter().fold(f64::NEG_INFINITY, f64::max),
        })
    });
    Ok(Results(found.collect::<Result<_>>()?))
}

/// Returns the order in which a round measures `count` contenders.
///
/// A contender's state affects the next one: pages held by the system or its host, a
/// processor that is warm or has slept. In 2 `count` rounds each contender follows each
/// other one equally often, and in fewer rounds nearly so (E. J. Williams, "Experimental
/// Designs Balanced for the Estimation of Residual Effects of Treatments", 1949). With
/// three or more contenders, none follows itself.
fn contender_order(count: usize, round: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |turn| {
        let turn = match round % 2 {
            0 => turn,
            _ => count - 1 - turn,
        };
        // 0, 1, -1, 2, -2, …
        let step = match turn % 2 {
            0 => count - turn / 2,
            _ => turn / 2 + 1,
        };
        // By two, or a round would begin with the last contender of the previous round.
        (round / 2 + round % 2 * 2 + step) % count
    })
}

impl Results {
    /// Returns the findings, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &ContenderResult> {
        self.0.iter()
    }

    /// Returns the median of the contender called `key`, if it took part.
    pub(crate) fn median(&self, key: &str) -> Option<f64> {
        let finding = self.0.iter().find(|finding| finding.key == key);
        finding.map(|finding| finding.summary.median)
    }

    /// Returns the ratio of the median of `key` to that of `base`.
    pub(crate) fn ratio(&self, key: &str, base: &str) -> Option<f64> {
        ratio(self.median(key)?, self.median(base)?)
    }

    /// Returns the medians by key, all quartiles under `quartiles`, and the largest samples under `max`.
    pub(crate) fn to_json(&self) -> Map<String, Value> {
        let medians = self
            .0
            .iter()
            .map(|f| (f.key.clone(), json!(round(f.summary.median))));
        let mut all: Map<String, Value> = medians.collect();
        let quartiles = self.0.iter().map(|f| {
            let both = json!([round(f.summary.q1), round(f.summary.q3)]);
            (f.key.clone(), both)
        });
        let quartiles: Map<String, Value> = quartiles.collect();
        all.insert("quartiles".into(), quartiles.into());
        let max = self.0.iter().map(|f| (f.key.clone(), json!(round(f.max))));
        all.insert("max".into(), max.collect::<Map<_, _>>().into());
        all
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn rounds_take_turns_and_the_first_does_not_count() {
        let order = RefCell::new(Vec::new());
        let contender = |name: char, scale: f64| {
            let order = &order;
            Contender::new(name, name.to_uppercase().to_string(), move |run| {
                order.borrow_mut().push((run, name));
                Ok(scale * if run == 0 { 1000.0 } else { run as f64 })
            })
        };
        let contenders = vec![contender('a', 1.0), contender('b', 10.0)];
        let found = race("test", contenders, 3, &Progress::hidden()).unwrap();
        let order: String = order.borrow().iter().map(|(_, name)| *name).collect();
        assert_eq!(order, "abbabaab");
        assert_eq!(found.median("a"), Some(2.0));
        assert_eq!(found.ratio("b", "a"), Some(10.0));
        assert_eq!(found.median("c"), None);
        let json = Value::from(found.to_json());
        assert_eq!(json["b"], 20.0);
        assert_eq!(json["quartiles"]["a"], json!([1.5, 2.5]));
        assert_eq!(json["max"]["a"], 3.0);
    }

    #[test]
    fn each_contender_follows_each_other_equally_often() {
        assert_eq!(contender_order(5, 0).collect::<Vec<_>>(), [0, 1, 4, 2, 3]);
        assert_eq!(contender_order(5, 3).collect::<Vec<_>>(), [1, 0, 2, 4, 3]);
        for count in 1..9 {
            let mut follows = vec![vec![0; count]; count];
            let mut last = None;
            for round in 0..2 * count {
                let order: Vec<_> = contender_order(count, round).collect();
                assert!((0..count).all(|index| order.contains(&index)), "{order:?}");
                order
                    .windows(2)
                    .for_each(|two| follows[two[0]][two[1]] += 1);
                assert!(count < 3 || last != Some(order[0]), "{order:?}");
                last = order.last().copied();
            }
            for (index, row) in follows.iter().enumerate() {
                let others = |other: usize| if other == index { 0 } else { 2 };
                let expected: Vec<_> = (0..count).map(others).collect();
                assert_eq!(*row, expected, "{count} contenders");
            }
        }
    }

    #[test]
    fn an_error_names_its_contender() {
        let failing = Contender::new("x", "the slow one", |_| anyhow::bail!("out of luck"));
        let error = race("test", vec![failing], 1, &Progress::hidden()).unwrap_err();
        let error = format!("{error:#}");
        assert!(
            error.contains("the slow one") && error.contains("out of luck"),
            "{error}"
        );
    }
}
