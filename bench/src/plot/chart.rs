//! Layout of a chart of horizontal bars in groups.
//!
//! Each group has its own scale, because steps of different models cannot be compared. The
//! number is next to each bar.

use super::svg::{Anchor, Picture, Style};
use crate::report::format_number;

const WIDTH: f64 = 640.0;
const LEFT: f64 = 110.0;
const RIGHT: f64 = 70.0;
const TOP: f64 = 62.0;
const BAR: f64 = 14.0;
const GAP: f64 = 3.0;
const GROUP_GAP: f64 = 16.0;

/// The content of a chart.
pub(super) struct Chart {
    pub(super) title: String,
    pub(super) unit: String,
    /// One name for each bar of a group.
    pub(super) series: Vec<String>,
    pub(super) groups: Vec<Group>,
}

/// Bars that are compared with each other.
pub(super) struct Group {
    pub(super) name: String,
    pub(super) bars: Vec<Option<f64>>,
}

impl Chart {
    /// Returns the chart as SVG text.
    pub(super) fn draw(&self) -> String {
        let group = self.series.len() as f64 * (BAR + GAP) + GROUP_GAP;
        let height = TOP + self.groups.len() as f64 * group;
        let mut picture = Picture::new(WIDTH, height, &format!("{}: {}", self.title, self.unit));
        picture.text(8.0, 20.0, Anchor::Start, Style::Title, &self.title);
        picture.text(WIDTH - 8.0, 20.0, Anchor::End, Style::Faint, &self.unit);
        self.draw_key(&mut picture);
        for (at, one) in self.groups.iter().enumerate() {
            self.draw_group(&mut picture, one, TOP + at as f64 * group);
        }
        picture.finish()
    }

    fn draw_key(&self, picture: &mut Picture) {
        for (series, name) in self.series.iter().enumerate() {
            let x = LEFT + series as f64 * 130.0;
            picture.bar(x, 34.0, BAR, BAR, series, self.series.len());
            picture.text(x + BAR + 6.0, 45.5, Anchor::Start, Style::Normal, name);
        }
    }

    fn draw_group(&self, picture: &mut Picture, group: &Group, top: f64) {
        let values = group.bars.iter().flatten();
        let max_value = values.copied().fold(0.0, f64::max);
        let scale = if max_value > 0.0 {
            (WIDTH - LEFT - RIGHT) / max_value
        } else {
            0.0
        };
        let middle = top + self.series.len() as f64 * (BAR + GAP) / 2.0 + 3.0;
        picture.text(LEFT - 10.0, middle, Anchor::End, Style::Normal, &group.name);
        for (series, value) in group.bars.iter().enumerate() {
            let y = top + series as f64 * (BAR + GAP);
            let Some(value) = *value else { continue };
            // At least 1 px, so that the smallest values are visible.
            let width = (value * scale).max(1.0);
            picture.bar(LEFT, y, width, BAR, series, self.series.len());
            let x = LEFT + width + 6.0;
            picture.text(
                x,
                y + 11.5,
                Anchor::Start,
                Style::Normal,
                &format_number(value),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_has_its_own_scale_and_its_numbers() {
        let group = |name: &str, bars: [f64; 2]| Group {
            name: name.into(),
            bars: bars.map(Some).to_vec(),
        };
        let chart = Chart {
            title: "a <title>".into(),
            unit: "ms".into(),
            series: vec!["one".into(), "two".into()],
            groups: vec![group("small", [1.0, 2.0]), group("large", [1000.0, 500.0])],
        };
        let picture = chart.draw();
        let widest = format!("width=\"{}\"", WIDTH - LEFT - RIGHT);
        assert_eq!(picture.matches(&widest).count(), 2, "{picture}");
        assert!(
            picture.contains("a &lt;title&gt;") && picture.contains(">1,000<"),
            "{picture}"
        );
    }

    #[test]
    fn all_zero_values_can_be_drawn() {
        let chart = Chart {
            title: String::new(),
            unit: String::new(),
            series: vec!["one".into()],
            groups: vec![Group {
                name: "none".into(),
                bars: vec![Some(0.0)],
            }],
        };
        assert!(!chart.draw().contains("NaN"));
    }
}
