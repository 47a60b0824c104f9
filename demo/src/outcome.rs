//! The result of a demo run, as a table for people and as JSON for programs.
//!
//! Pure formatting: both forms depend on an [`Outcome`] alone, and tests fix their text.

use serde::Serialize;

use crate::models::Model;

/// The result of one training run.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The network that was trained.
    pub model: Model,
    /// The number of devices that trained the model.
    pub devices: usize,
    /// The names of the devices' workers. The caller fills this in, as the training does
    /// not know them.
    pub workers: Vec<String>,
    /// Whether the devices give the same bits each time. The caller fills this in.
    pub is_exact: bool,
    /// The number of optimiser steps, each taken by all devices together.
    pub steps: usize,
    /// The share of the test set that the trained model classifies correctly, from 0 to 1.
    pub test_accuracy: f64,
    /// Wall time of the training in seconds, including the test after each epoch.
    pub seconds: f64,
    /// Tensor and op bytes sent to the devices. The caller fills this in.
    pub bytes_up: u64,
    /// Bytes received from the devices. The caller fills this in.
    pub bytes_down: u64,
    /// The epochs that ran to their end, in order.
    pub epochs: Vec<Epoch>,
    /// Whether the user stopped the training before its last epoch.
    pub interrupted: bool,
    /// What was done to the workers, if they were killed. The caller fills this in.
    pub chaos: Option<Chaos>,
}

/// The kills of workers during a training run, and their effect.
#[derive(Clone, Debug, PartialEq)]
pub struct Chaos {
    /// The workers that were killed, in order.
    pub kills: Vec<Kill>,
    /// The losses of each step, one for each device.
    pub losses: Vec<f64>,
    /// Those of a run in which no worker was killed, as far as the other one went.
    pub undisturbed: Vec<f64>,
    /// The index of the first step whose losses are not the same, bit by bit; `None` if all are.
    pub first_difference: Option<usize>,
}

/// The kill of a worker.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Kill {
    /// The number of steps until then.
    pub step: usize,
    /// The worker's name.
    pub worker: String,
    /// The time until the next loss in milliseconds, if the worker trained.
    pub recovery_ms: Option<u64>,
}

impl Chaos {
    /// Returns the rows of the table, for devices that give the same bits each time, or do not.
    fn rows(&self, is_exact: bool) -> [(&'static str, String); 3] {
        let mut recovery_ms = self.recovery_ms();
        recovery_ms.sort_unstable();
        let kills = format!(
            "{}, {} of them of a worker that trained",
            self.kills.len(),
            recovery_ms.len()
        );
        let recovery = match (recovery_ms.get(recovery_ms.len() / 2), recovery_ms.last()) {
            (Some(median), Some(longest)) => format!("median {median} ms, longest {longest} ms"),
            _ => "none was needed".to_owned(),
        };
        let losses = match (self.first_difference, is_exact) {
            (None, _) => format!("all {} identical to those without kills", self.losses.len()),
            (Some(at), true) => format!(
                "different from those without kills, first at step {}",
                at + 1
            ),
            (Some(at), false) => format!(
                "first different from those without kills at step {}; these devices are not exact",
                at + 1
            ),
        };
        [("kills", kills), ("recovery", recovery), ("losses", losses)]
    }

    /// Returns the time until the next loss for each kill of a worker that trained, in milliseconds.
    fn recovery_ms(&self) -> Vec<u64> {
        let recovered = self.kills.iter().filter_map(|kill| kill.recovery_ms);
        recovered.collect()
    }

    /// Formats the losses and the kills as JSON, from which `tensord-bench plot` draws a figure: the
    /// losses of each step are their mean over the devices.
    pub fn to_json(&self, model: &str, devices: usize) -> String {
        #[derive(Serialize)]
        struct Whole<'a> {
            chaos: Curve<'a>,
        }
        #[derive(Serialize)]
        struct Curve<'a> {
            model: &'a str,
            devices: usize,
            losses: Vec<f64>,
            undisturbed: Vec<f64>,
            kills: &'a [Kill],
        }
        let means = |losses: &[f64]| {
            let mean = |step: &[f64]| step.iter().sum::<f64>() / devices as f64;
            losses.chunks(devices).map(mean).collect()
        };
        let chaos = Curve {
            model,
            devices,
            losses: means(&self.losses),
            undisturbed: means(&self.undisturbed),
            kills: &self.kills,
        };
        serde_json::to_string(&Whole { chaos }).expect("numbers and texts can be written as JSON")
    }
}

impl Outcome {
    /// Returns the steps per second over the whole training.
    pub fn steps_per_s(&self) -> f64 {
        self.steps as f64 / self.seconds
    }
}

/// One pass over the training set, and the test after it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Epoch {
    /// The epoch's number, from 1.
    pub number: usize,
    /// Mean training loss.
    pub loss: f64,
    /// Training accuracy in percent.
    pub accuracy: f64,
    /// Mean loss on the test set.
    pub test_loss: f64,
    /// Accuracy on the test set in percent.
    pub test_accuracy: f64,
    /// The number of optimiser steps.
    pub steps: usize,
    /// Wall time in seconds, including the test.
    pub seconds: f64,
}

impl Epoch {
    /// Formats the epoch as one line of progress out of `epochs`; the lines of a run align.
    pub(crate) fn line(&self, epochs: usize) -> String {
        let width = epochs.to_string().len();
        format!(
            "epoch {:>width$}/{epochs}  loss {:.3}  accuracy {:>5.1} %  \
             test accuracy {:>5.1} %  {:>4.0} steps/s",
            self.number,
            self.loss,
            self.accuracy,
            self.test_accuracy,
            self.steps as f64 / self.seconds,
        )
    }
}

/// Formats the outcome as aligned rows, the last one without a newline.
pub fn render_table(outcome: &Outcome) -> String {
    let rows = [
        ("model", outcome.model.name().to_owned()),
        ("devices", outcome.devices.to_string()),
        ("workers", outcome.workers.join(", ")),
        (
            "test accuracy",
            format!("{:.1} %", 100.0 * outcome.test_accuracy),
        ),
        ("steps", outcome.steps.to_string()),
        ("speed", format!("{:.1} steps/s", outcome.steps_per_s())),
        ("time", format!("{:.1} s", outcome.seconds)),
        ("sent", human_bytes(outcome.bytes_up)),
        ("received", human_bytes(outcome.bytes_down)),
    ];
    let chaos = outcome.chaos.iter();
    let chaos = chaos.flat_map(|chaos| chaos.rows(outcome.is_exact));
    let lines = rows.into_iter().chain(chaos);
    let lines = lines.map(|(name, value)| format!("{name:<15}{value}"));
    lines.collect::<Vec<_>>().join("\n")
}

/// Formats the outcome as one JSON object on one line.
pub fn to_json(outcome: &Outcome) -> String {
    #[derive(Serialize)]
    struct Json<'a> {
        model: &'static str,
        devices: usize,
        workers: &'a [String],
        steps: usize,
        test_accuracy: f64,
        seconds: f64,
        steps_per_s: f64,
        bytes_up: u64,
        bytes_down: u64,
        #[serde(flatten)]
        chaos: Option<ChaosJson>,
    }
    #[derive(Serialize)]
    struct ChaosJson {
        kills: usize,
        recovery_ms: Vec<u64>,
        identical: bool,
    }
    let chaos = outcome.chaos.as_ref().map(|chaos| ChaosJson {
        kills: chaos.kills.len(),
        recovery_ms: chaos.recovery_ms(),
        identical: chaos.first_difference.is_none(),
    });
    let json = Json {
        model: outcome.model.name(),
        devices: outcome.devices,
        workers: &outcome.workers,
        steps: outcome.steps,
        test_accuracy: round(outcome.test_accuracy, 4),
        seconds: round(outcome.seconds, 3),
        steps_per_s: round(outcome.steps_per_s(), 1),
        bytes_up: outcome.bytes_up,
        bytes_down: outcome.bytes_down,
        chaos,
    };
    serde_json::to_string(&json).expect("numbers and names are always valid JSON")
}

fn round(value: f64, decimals: i32) -> f64 {
    let scale = 10f64.powi(decimals);
    (value * scale).round() / scale
}

/// Formats a size in the largest binary unit in which it is at least 1.
fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    // From 1023.95 on, the value would be printed as 1024.0.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome() -> Outcome {
        Outcome {
            model: Model::Transformer,
            devices: 2,
            workers: vec!["gpu-1".into(), "gpu-2".into()],
            is_exact: true,
            steps: 330,
            test_accuracy: 350.0 / 360.0,
            seconds: 2.5004,
            bytes_up: 5_662_310,
            bytes_down: 980,
            epochs: Vec::new(),
            interrupted: false,
            chaos: None,
        }
    }

    fn outcome_with_kills(first_difference: Option<usize>) -> Outcome {
        let kills = [Some(900), None, Some(400), Some(650)];
        let kill = |(step, recovery_ms)| Kill {
            step,
            worker: "demo-1".into(),
            recovery_ms,
        };
        let chaos = Chaos {
            kills: (100..).zip(kills).map(kill).collect(),
            losses: vec![0.5; 330],
            undisturbed: vec![0.5; 330],
            first_difference,
        };
        Outcome {
            chaos: Some(chaos),
            ..outcome()
        }
    }

    #[test]
    fn kills_are_reported() {
        let table = render_table(&outcome_with_kills(None));
        let expected = "
kills          4, 3 of them of a worker that trained
recovery       median 650 ms, longest 900 ms
losses         all 330 identical to those without kills";
        assert!(table.ends_with(expected), "{table}");
        let table = render_table(&outcome_with_kills(Some(9)));
        let expected = "
losses         different from those without kills, first at step 10";
        assert!(table.ends_with(expected), "{table}");
        let table = render_table(&Outcome {
            is_exact: false,
            ..outcome_with_kills(Some(9))
        });
        let expected = "
losses         first different from those without kills at step 10; these devices are not exact";
        assert!(table.ends_with(expected), "{table}");
        let outcome = outcome_with_kills(None);
        let curve = outcome.chaos.as_ref().unwrap().to_json("mlp", 2);
        let expected = r#"{"chaos":{"model":"mlp","devices":2,"losses":[0.5,"#;
        assert!(curve.starts_with(expected), "{curve}");
        let expected = r#","kills":[{"step":100,"worker":"demo-1","recovery_ms":900},{"step":101,"worker":"demo-1","recovery_ms":null},"#;
        assert!(curve.contains(expected), "{curve}");
        let json = to_json(&outcome);
        let expected = r#","kills":4,"recovery_ms":[900,400,650],"identical":true}"#;
        assert!(json.ends_with(expected), "{json}");
    }

    #[test]
    fn the_table_aligns() {
        let expected = "\
model          transformer
devices        2
workers        gpu-1, gpu-2
test accuracy  97.2 %
steps          330
speed          132.0 steps/s
time           2.5 s
sent           5.4 MiB
received       980 B";
        assert_eq!(render_table(&outcome()), expected);
    }

    #[test]
    fn the_json_is_one_line_in_a_fixed_order() {
        let expected = concat!(
            r#"{"model":"transformer","devices":2,"workers":["gpu-1","gpu-2"],"#,
            r#""steps":330,"test_accuracy":0.9722,"seconds":2.5,"steps_per_s":132.0,"#,
            r#""bytes_up":5662310,"bytes_down":980}"#,
        );
        assert_eq!(to_json(&outcome()), expected);
    }

    #[test]
    fn lines_of_one_run_align() {
        let epoch = |number, accuracy| Epoch {
            number,
            loss: 0.2118,
            accuracy,
            test_loss: 0.3,
            test_accuracy: 95.23,
            steps: 22,
            seconds: 0.1864,
        };
        assert_eq!(
            epoch(3, 94.06).line(12),
            "epoch  3/12  loss 0.212  accuracy  94.1 %  test accuracy  95.2 %   118 steps/s"
        );
        assert_eq!(
            epoch(12, 100.0).line(12),
            "epoch 12/12  loss 0.212  accuracy 100.0 %  test accuracy  95.2 %   118 steps/s"
        );
    }

    #[test]
    fn sizes_are_readable() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            (1024 * 1024 - 1, "1.0 MiB"),
            (3 << 30, "3.0 GiB"),
            (5_000 << 40, "5000.0 TiB"),
        ];
        for (bytes, expected) in cases {
            assert_eq!(human_bytes(bytes), expected);
        }
    }
}
