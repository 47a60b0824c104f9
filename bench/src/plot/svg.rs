//! Minimal SVG: bars and text that can be read on light and on dark pages.
//!
//! Text follows the reader's colour scheme; bars have colours of middle lightness that
//! contrast with both. There is no background.

use std::fmt::Write;

/// Colours of the last peer, the one before it, and so on. The last peer is the subject of
/// the chart, so it has the most salient colour.
const COLOURS: [&str; 3] = ["#e8590c", "#4c8dd6", "#8a94a0"];

/// The style of a line.
#[derive(Debug, Clone, Copy)]
pub(super) enum Stroke {
    /// Wide and pale, to be seen below another line.
    Wide,
    /// Narrow, in the most salient colour.
    Main,
    /// Marks a moment.
    Mark,
    /// Marks a less important moment, or a value of an axis.
    Faint,
}

impl Stroke {
    fn attributes(self) -> String {
        let [main, mark, faint] = COLOURS;
        match self {
            Self::Wide => format!("stroke=\"{faint}\" stroke-width=\"6\" stroke-opacity=\"0.5\""),
            Self::Main => format!("stroke=\"{main}\" stroke-width=\"1.5\""),
            Self::Mark => format!("stroke=\"{mark}\" stroke-width=\"1.5\""),
            Self::Faint => format!("stroke=\"{faint}\" stroke-dasharray=\"2 4\""),
        }
    }
}

/// Alignment of a text at its position.
#[derive(Debug, Clone, Copy)]
pub(super) enum Anchor {
    /// The text starts at the position.
    Start,
    /// The text ends at the position.
    End,
}

/// The style of a text.
#[derive(Debug, Clone, Copy)]
pub(super) enum Style {
    Title,
    Normal,
    Faint,
}

/// An SVG picture under construction.
pub(super) struct Picture(String);

impl Picture {
    /// Creates an empty picture; `label` is its description for screen readers.
    pub(super) fn new(width: f64, height: f64, label: &str) -> Self {
        let label = escape(label);
        Self(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
             role=\"img\" aria-label=\"{label}\" font-family=\"system-ui, sans-serif\" \
             font-size=\"12\">\n\
             <style>text{{fill:#24292f}}.title{{font-size:14px;font-weight:600}}\
             .faint{{fill:#57606a}}@media(prefers-color-scheme:dark)\
             {{text{{fill:#e6edf3}}.faint{{fill:#9da7b3}}}}</style>\n"
        ))
    }

    /// Adds a bar in the colour of `series`, one of `count`.
    pub(super) fn bar(
        &mut self,
        x: f64,
        y: f64,
        width: f64,
        height: f64,
        series: usize,
        count: usize,
    ) {
        let colour = COLOURS[(count - 1 - series) % COLOURS.len()];
        let width = (width * 10.0).round() / 10.0;
        let bar = format!(
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" rx=\"2\" fill=\"{colour}\"/>"
        );
        self.line(&bar);
    }

    /// Adds a line through points.
    pub(super) fn path(&mut self, points: &[(f64, f64)], stroke: Stroke) {
        let point = |(x, y): &(f64, f64)| format!("{x:.1},{y:.1}");
        let points: Vec<_> = points.iter().map(point).collect();
        let (points, stroke) = (points.join(" "), stroke.attributes());
        self.line(&format!(
            "<polyline points=\"{points}\" fill=\"none\" {stroke}/>"
        ));
    }

    /// Adds a line of text.
    pub(super) fn text(&mut self, x: f64, y: f64, anchor: Anchor, style: Style, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::End => " text-anchor=\"end\"",
        };
        let class = match style {
            Style::Title => " class=\"title\"",
            Style::Normal => "",
            Style::Faint => " class=\"faint\"",
        };
        let x = (x * 10.0).round() / 10.0;
        let text = escape(text);
        self.line(&format!(
            "<text x=\"{x}\" y=\"{y}\"{anchor}{class}>{text}</text>"
        ));
    }

    fn line(&mut self, element: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.0, "{element}");
    }

    /// Returns the picture as text.
    pub(super) fn finish(mut self) -> String {
        self.line("</svg>");
        self.0
    }
}

fn escape(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        let mut picture = Picture::new(10.0, 10.0, "a \"label\"");
        picture.text(1.0, 2.0, Anchor::End, Style::Faint, "<b> & co");
        let picture = picture.finish();
        assert!(
            picture.contains("aria-label=\"a &quot;label&quot;\""),
            "{picture}"
        );
        assert!(picture.contains("&lt;b&gt; &amp; co</text>"), "{picture}");
    }
}
