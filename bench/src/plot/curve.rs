//! The losses of a training whose workers were killed, and those of an undisturbed one.

use anyhow::{Result, ensure};
use serde::Deserialize;

use super::svg::{Anchor, Picture, Stroke, Style};

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 320.0;
const LEFT: f64 = 48.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 84.0;
const BOTTOM: f64 = 36.0;

/// Width of the part of the curve whose losses are averaged: those of single steps differ so
/// much that they would hide the course.
const BIN: f64 = 3.0;

/// The losses of a training, from the file that `tensord demo --chaos --artifacts` writes.
#[derive(Debug, Deserialize)]
pub(super) struct Curve {
    model: String,
    devices: usize,
    /// The loss of each step.
    losses: Vec<f64>,
    /// The same without kills.
    undisturbed: Vec<f64>,
    kills: Vec<Kill>,
}

#[derive(Debug, Deserialize)]
struct Kill {
    /// The number of steps until then.
    step: usize,
    /// The time until the next loss, if the worker trained.
    recovery_ms: Option<u64>,
}

/// Where the values of the axes are in the picture.
struct Axes {
    steps: usize,
    /// Decimal logarithms of the bounds of the losses.
    least: f64,
    most: f64,
}

impl Axes {
    fn x(&self, step: f64) -> f64 {
        LEFT + step / self.steps as f64 * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, loss: f64) -> f64 {
        let part = (loss.log10() - self.least) / (self.most - self.least);
        HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)
    }
}

/// Returns the means of the losses of some steps each, out of `steps` steps, with the middle of these
/// steps.
fn means(losses: &[f64], steps: usize) -> Vec<(f64, f64)> {
    let bins = (WIDTH - LEFT - RIGHT) / BIN;
    let size = ((steps as f64 / bins).ceil() as usize).max(1);
    let mean = |(at, bin): (usize, &[f64])| {
        let middle = (at * size) as f64 + bin.len() as f64 / 2.0;
        (middle, bin.iter().sum::<f64>() / bin.len() as f64)
    };
    losses.chunks(size).enumerate().map(mean).collect()
}

/// Returns a power of ten as text.
fn power(decade: i32) -> String {
    if (-2..=2).contains(&decade) {
        return 10_f64.powi(decade).to_string();
    }
    let raised = |digit: char| match digit {
        '-' => '⁻',
        '1' => '¹',
        '2' => '²',
        '3' => '³',
        digit => char::from_u32('⁰' as u32 + digit as u32 - '0' as u32).unwrap_or(digit),
    };
    let exponent = decade.to_string();
    format!("10{}", exponent.chars().map(raised).collect::<String>())
}

impl Curve {
    /// Returns the figure as SVG text.
    ///
    /// # Errors
    ///
    /// If there are no losses, or some are not positive numbers.
    pub(super) fn draw(&self) -> Result<String> {
        let all = || self.losses.iter().chain(&self.undisturbed).copied();
        ensure!(
            !self.losses.is_empty() && all().all(|loss| loss.is_finite() && loss > 0.0),
            "a curve of losses needs at least one step, and positive numbers"
        );
        let steps = self.losses.len();
        let curves = [&self.undisturbed, &self.losses].map(|losses| means(losses, steps));
        let shown = || curves.iter().flatten().map(|(_, mean)| *mean);
        let axes = Axes {
            steps,
            least: shown().fold(f64::INFINITY, f64::min).log10().floor(),
            // A different bound, also if all losses are equal to a power of ten.
            most: shown().fold(0.0, f64::max).log10().floor() + 1.0,
        };
        let devices = match self.devices {
            1 => "one device".to_owned(),
            devices => format!("{devices} devices, each of a worker of its own"),
        };
        let title = format!("Losses of {} on {devices}", self.model);
        let mut picture = Picture::new(WIDTH, HEIGHT, &title);
        picture.text(8.0, 20.0, Anchor::Start, Style::Title, &title);
        draw_key(&mut picture);
        draw_axes(&mut picture, &axes);
        for kill in &self.kills {
            draw_kill(&mut picture, axes.x(kill.step as f64), kill);
        }
        for (curve, stroke) in curves.iter().zip([Stroke::Wide, Stroke::Main]) {
            let points = curve
                .iter()
                .map(|(step, mean)| (axes.x(*step), axes.y(*mean)));
            picture.path(&points.collect::<Vec<_>>(), stroke);
        }
        Ok(picture.finish())
    }
}

fn draw_key(picture: &mut Picture) {
    let entries = [
        (Stroke::Wide, "undisturbed"),
        (Stroke::Main, "with kills"),
        (Stroke::Mark, "kill of a worker that trains"),
        (Stroke::Faint, "of another one"),
    ];
    let mut x = LEFT;
    for (stroke, name) in entries {
        picture.path(&[(x, 40.0), (x + 18.0, 40.0)], stroke);
        picture.text(x + 24.0, 44.0, Anchor::Start, Style::Normal, name);
        x += 44.0 + 6.2 * name.len() as f64;
    }
}

fn draw_axes(picture: &mut Picture, axes: &Axes) {
    for decade in axes.least as i32..=axes.most as i32 {
        let y = axes.y(10_f64.powi(decade));
        picture.path(&[(LEFT, y), (WIDTH - RIGHT, y)], Stroke::Faint);
        picture.text(
            LEFT - 6.0,
            y + 4.0,
            Anchor::End,
            Style::Faint,
            &power(decade),
        );
    }
    let below = HEIGHT - BOTTOM + 18.0;
    let axes_label = "loss by step; at the top, ms from a kill to the next loss";
    picture.text(LEFT, below, Anchor::Start, Style::Faint, axes_label);
    let steps = format!("{} steps", axes.steps);
    picture.text(WIDTH - RIGHT, below, Anchor::End, Style::Faint, &steps);
}

fn draw_kill(picture: &mut Picture, x: f64, kill: &Kill) {
    let stroke = match kill.recovery_ms {
        Some(_) => Stroke::Mark,
        None => Stroke::Faint,
    };
    picture.path(&[(x, TOP - 6.0), (x, HEIGHT - BOTTOM)], stroke);
    if let Some(ms) = kill.recovery_ms {
        let label = ms.to_string();
        picture.text(x + 10.0, TOP - 10.0, Anchor::End, Style::Faint, &label);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(losses: Vec<f64>) -> Curve {
        Curve {
            model: "mlp".into(),
            devices: 2,
            undisturbed: losses.clone(),
            losses,
            kills: vec![
                Kill {
                    step: 1,
                    recovery_ms: Some(583),
                },
                Kill {
                    step: 2,
                    recovery_ms: None,
                },
            ],
        }
    }

    #[test]
    fn curves_and_kills_are_drawn() {
        let picture = curve(vec![10.0, 1.0, 0.1, 0.01]).draw().unwrap();
        // Four entries of the key, the decades from 0.01 to 100, two kills, and two curves.
        assert_eq!(picture.matches("<polyline").count(), 4 + 5 + 2 + 2);
        assert!(picture.contains(">583<") && picture.contains(">0.01<"));
        let [first, .., last] = [10.0, 0.1, 0.01].map(|loss: f64| {
            let axes = Axes {
                steps: 4,
                least: -2.0,
                most: 2.0,
            };
            axes.y(loss)
        });
        assert!(first < last && (last - (HEIGHT - BOTTOM)).abs() < 1e-9);
    }

    #[test]
    fn many_steps_become_one_point_for_each_bin() {
        let points = means(&vec![2.0; 100_000], 100_000);
        assert!(points.len() <= 200, "{}", points.len());
        assert!(points.iter().all(|(_, mean)| *mean == 2.0));
        assert_eq!(means(&[1.0, 3.0], 2), [(0.5, 1.0), (1.5, 3.0)]);
    }

    #[test]
    fn small_powers_have_an_exponent() {
        let texts = [2, 0, -2, -3, -15, 12].map(power);
        assert_eq!(texts, ["100", "1", "0.01", "10⁻³", "10⁻¹⁵", "10¹²"]);
    }

    #[test]
    fn losses_that_cannot_be_drawn_are_refused() {
        for losses in [vec![], vec![1.0, 0.0], vec![f64::NAN], vec![-1.0]] {
            assert!(curve(losses.clone()).draw().is_err(), "{losses:?}");
        }
        assert!(curve(vec![1.0]).draw().is_ok());
    }
}
