//! A picture of a simulation: the devices that tenants have over time, and below it those for which they wait.

use std::fmt::Write;

use super::{
    metrics::Outcome,
    recorder::Sample,
    svg::{
        COLOURS, LEFT, MAX_TENANTS, RIGHT, WIDTH, push_axis_title, push_legend, push_text,
        push_title, start,
    },
};
use crate::human;

/// Number of points of each area. The mean over the time of each is drawn.
const POINTS: usize = 180;

const CHART_HEIGHT: f64 = 190.0;
const CHART_TOP: f64 = 70.0;
const CHART_GAP: f64 = 44.0;
/// Height of one order: two charts, their titles, and the axis of time.
const ORDER_HEIGHT: f64 = CHART_TOP + 2.0 * CHART_HEIGHT + CHART_GAP + 52.0;

/// The devices of each area by point: those in use, and those waited for.
struct Areas {
    names: Vec<String>,
    held: Vec<Vec<f64>>,
    waiting: Vec<Vec<f64>>,
}

/// Returns a picture of each of these runs of one trace, one below the other, with one axis of time.
pub(super) fn svg(outcomes: &[Outcome]) -> String {
    let height = ORDER_HEIGHT * outcomes.len() as f64;
    let mut svg = start(height, "Devices of tenants over time");
    let starts = outcomes.iter().map(|outcome| outcome.start_ms);
    let ends = outcomes.iter().map(|outcome| outcome.end_ms);
    let start_ms = starts.min().unwrap_or_default();
    let span_ms = ends
        .max()
        .unwrap_or_default()
        .saturating_sub(start_ms)
        .max(1);
    let Some(first) = outcomes.first() else {
        return svg + "</svg>\n";
    };
    for (at, outcome) in outcomes.iter().enumerate() {
        // Each tenant has the same colour in all runs.
        let areas = areas(outcome, first, span_ms);
        push_order(&mut svg, outcome, &areas, ORDER_HEIGHT * at as f64, span_ms);
    }
    svg += "</svg>\n";
    svg
}

/// Returns the areas of a run, over `span_ms` from its start. The tenants with an area of their own are those
/// that had most in the run `first`.
fn areas(outcome: &Outcome, first: &Outcome, span_ms: u64) -> Areas {
    let mut by_use: Vec<_> = (0..outcome.tenants.len()).collect();
    by_use.sort_by(|a, b| {
        let [a, b] = [a, b].map(|at| first.tenants[*at].device_seconds);
        b.total_cmp(&a)
    });
    // One more tenant needs no area for others.
    let own = match by_use.len() <= COLOURS.len() {
        true => by_use.len(),
        false => MAX_TENANTS,
    };
    let mut area_of = vec![own; by_use.len()];
    for (area, tenant) in by_use.iter().take(own).enumerate() {
        area_of[*tenant] = area;
    }
    let names = by_use
        .iter()
        .take(own)
        .map(|at| outcome.tenants[*at].name.clone());
    let mut names: Vec<_> = names.collect();
    let others = by_use.len() - own;
    names.extend((others > 0).then(|| format!("{} others", human::count(others as u64))));
    let mut areas = Areas {
        held: vec![vec![0.0; POINTS]; names.len()],
        waiting: vec![vec![0.0; POINTS]; names.len()],
        names,
    };
    let mut last = vec![None::<Sample>; by_use.len()];
    let finish = (0..by_use.len()).map(|tenant| Sample {
        at_ms: outcome.start_ms + span_ms,
        tenant: tenant as u32,
        held: 0,
        waiting: 0,
    });
    for sample in outcome.samples.iter().copied().chain(finish) {
        let tenant = sample.tenant as usize;
        if let Some(before) = last[tenant].replace(sample) {
            let from = (before.at_ms - outcome.start_ms) as f64 / span_ms as f64;
            let to = (sample.at_ms - outcome.start_ms) as f64 / span_ms as f64;
            let area = area_of[tenant];
            add(&mut areas.held[area], from, to, before.held.into());
            add(&mut areas.waiting[area], from, to, before.waiting);
        }
    }
    areas
}

/// Adds thousandths of devices from one part of the time to another to the means of the points.
fn add(points: &mut [f64], from: f64, to: f64, permille: u64) {
    if permille == 0 {
        return;
    }
    let scale = points.len() as f64;
    let (from, to) = (from * scale, (to * scale).min(scale));
    for at in from as usize..(to.ceil() as usize).min(points.len()) {
        let overlap = to.min(at as f64 + 1.0) - from.max(at as f64);
        points[at] += overlap.max(0.0) * permille as f64 / 1000.0;
    }
}

/// Adds the two charts of a run below `top`.
fn push_order(svg: &mut String, outcome: &Outcome, areas: &Areas, top: f64, span_ms: u64) {
    push_title(svg, outcome, top);
    push_legend(svg, &areas.names, top);
    let y = top + CHART_TOP;
    let devices = outcome.devices as f64;
    push_text(svg, LEFT, y - 8.0, "start", "devices in use");
    push_chart(svg, &areas.held, y, devices);
    let y = y + CHART_HEIGHT + CHART_GAP;
    let sums = (0..POINTS).map(|at| areas.waiting.iter().map(|area| area[at]).sum::<f64>());
    let most = sums.fold(1.0, f64::max);
    push_text(svg, LEFT, y - 8.0, "start", "devices waited for");
    push_chart(svg, &areas.waiting, y, round_up(most));
    push_time_axis(svg, y + CHART_HEIGHT, span_ms);
}

/// Adds stacked areas, with an axis up to `most` devices.
fn push_chart(svg: &mut String, areas: &[Vec<f64>], top: f64, most: f64) {
    let bottom = top + CHART_HEIGHT;
    let y_of = |value: f64| bottom - (value / most).min(1.0) * CHART_HEIGHT;
    let x_of = |at: usize| LEFT + (WIDTH - LEFT - RIGHT) * at as f64 / POINTS as f64;
    let mut below = vec![0.0; POINTS];
    for (area, colour) in areas.iter().zip(COLOURS) {
        let above: Vec<_> = below
            .iter()
            .zip(area)
            .map(|(below, it)| below + it)
            .collect();
        // A point lasts until the next one, so the line has steps.
        let mut path = String::new();
        for (at, value) in above.iter().enumerate() {
            let y = y_of(*value);
            let _ = match at {
                0 => write!(path, "M{:.1} {y:.1}", x_of(at)),
                _ => write!(path, "V{y:.1}"),
            };
            let _ = write!(path, "H{:.1}", x_of(at + 1));
        }
        for (at, value) in below.iter().enumerate().rev() {
            let _ = write!(path, "V{:.1}H{:.1}", y_of(*value), x_of(at));
        }
        let _ = writeln!(svg, "<path d=\"{path}Z\" fill=\"{colour}\"/>");
        below = above;
    }
    push_value_axis(svg, bottom, most);
}

fn push_value_axis(svg: &mut String, bottom: f64, most: f64) {
    let right = WIDTH - RIGHT;
    for part in [0.0, 0.5, 1.0] {
        let y = bottom - part * CHART_HEIGHT;
        let _ = writeln!(
            svg,
            "<path d=\"M{LEFT} {y}H{right}\" stroke=\"#57606a\" stroke-opacity=\"0.5\" fill=\"none\"/>"
        );
        let value = human::count((part * most).round() as u64);
        push_text(svg, LEFT - 6.0, y + 4.0, "end", &value);
    }
}

fn push_time_axis(svg: &mut String, bottom: f64, span_ms: u64) {
    const MARKS: u64 = 5;
    for mark in 0..=MARKS {
        let x = LEFT + (WIDTH - LEFT - RIGHT) * mark as f64 / MARKS as f64;
        let anchor = match mark {
            0 => "start",
            MARKS => "end",
            _ => "middle",
        };
        let time = human::duration(span_ms / MARKS * mark);
        push_text(svg, x, bottom + 18.0, anchor, &time);
    }
    push_axis_title(svg, bottom + 36.0);
}

/// Returns the next number that has one digit and zeros, or is half of such a number.
fn round_up(most: f64) -> f64 {
    let scale = 10_f64.powf(most.log10().floor());
    (most / scale * 2.0).ceil() / 2.0 * scale
}
