//! A picture of a simulation of a small pool: which job has which device when, and below it which jobs wait.
//!
//! A job has the colour of its tenant, and its number in the trace. A torn edge is where it was suspended, and
//! where it goes on.

mod axis;
mod layout;

use std::fmt::Write;

use tensord_proto::share::{Percent, WHOLE_PERMILLE};

use self::{
    axis::Axis,
    layout::{Part, free_parts, rows, union, without},
};
use super::{
    metrics::{JobOutcome, Outcome},
    pieces::Piece,
    svg::{
        COLOURS, LEFT, MAX_TENANTS, RIGHT, WIDTH, push_legend, push_text, push_title, shortened,
        start,
    },
    trace::Job,
};
use crate::human;

/// Height of a device without shares, and of one with shares.
const DEVICE_HEIGHT: f64 = 24.0;
const SHARED_HEIGHT: f64 = 72.0;
const DEVICE_GAP: f64 = 3.0;
/// Height of a job that waits, with the gap below it.
const WAIT_HEIGHT: f64 = 17.0;
const TOP: f64 = 56.0;
/// Room for the title above the jobs that wait.
const WAITS_TITLE: f64 = 26.0;
const AXIS_HEIGHT: f64 = 48.0;

/// Mean width of a character, in the size of the picture's text.
const CHARACTER: f64 = 6.6;

/// The least width of what is drawn.
const MIN_WIDTH: f64 = 1.5;

/// Colours of text on those of tenants: white where that has the higher contrast.
const TEXT_COLOURS: [&str; MAX_TENANTS + 1] = [
    "#fff", "#000", "#fff", "#000", "#000", "#fff", "#000", "#000",
];

/// What fills a device that is free although jobs wait.
const FREE: &str = "<defs><pattern id=\"free\" width=\"7\" height=\"7\" patternUnits=\"userSpaceOnUse\" \
    patternTransform=\"rotate(45)\"><rect width=\"7\" height=\"7\" fill=\"#f6f8fa\"/>\
    <rect width=\"1.5\" height=\"7\" fill=\"#8c959f\"/></pattern></defs>\n";

/// The most characters of the name of a device.
const NAME_CHARS: usize = 10;

/// A rectangle of a job: from one device, or a part of it, to another.
struct Bar {
    job: usize,
    /// The position of the piece among those of the job.
    piece: usize,
    top: f64,
    bottom: f64,
}

/// A time for which a job has no devices.
#[derive(Clone, Copy)]
struct Wait {
    job: usize,
    from_ms: u64,
    to_ms: u64,
    /// Whether it had devices before.
    is_suspended: bool,
}

/// Returns a picture of each of these runs of a trace, one below the other, with one axis of time. `names` are those
/// of the devices of the pool.
pub(super) fn svg(outcomes: &[Outcome], jobs: &[Job], names: &[String]) -> String {
    let has_shares = jobs.iter().any(|job| job.share_permille.is_some());
    let device_height = if has_shares {
        SHARED_HEIGHT
    } else {
        DEVICE_HEIGHT
    };
    let starts = outcomes.iter().map(|outcome| outcome.start_ms);
    let start_ms = starts.min().unwrap_or_default();
    let ends = outcomes.iter().map(last_ms).max();
    let span_ms = ends.unwrap_or_default().saturating_sub(start_ms).max(1);
    let axis = Axis { start_ms, span_ms };
    let mut body = String::new();
    let mut top = 0.0;
    for outcome in outcomes {
        let chart = Chart {
            outcome,
            jobs,
            axis,
            top: top + TOP,
            device_height,
            colours: colours(outcome, jobs),
        };
        top = chart.push(&mut body, names, top);
    }
    start(top, "Jobs on devices over time") + FREE + &body + "</svg>\n"
}

/// Returns when the last job of a run ended.
fn last_ms(outcome: &Outcome) -> u64 {
    let pieces = outcome.jobs.iter().flat_map(|job| &job.pieces);
    let ends = pieces.map(|piece| piece.to_ms);
    ends.max().unwrap_or_default().max(outcome.end_ms)
}

/// Returns the position of the colour of each job: that of its tenant, in the order of names.
fn colours(outcome: &Outcome, jobs: &[Job]) -> Vec<usize> {
    let of_job = jobs.iter().map(|job| {
        let tenants = &outcome.tenants;
        let tenant = tenants.partition_point(|tenant| tenant.name < job.tenant);
        tenant.min(MAX_TENANTS)
    });
    of_job.collect()
}

/// The picture of a run.
struct Chart<'a> {
    outcome: &'a Outcome,
    jobs: &'a [Job],
    axis: Axis,
    /// The top of the first device.
    top: f64,
    device_height: f64,
    /// By job.
    colours: Vec<usize>,
}

impl Chart<'_> {
    /// Adds the picture below `top`. Returns its bottom.
    fn push(&self, svg: &mut String, names: &[String], top: f64) -> f64 {
        let waits = self.waits();
        let extents: Vec<_> = waits.iter().map(|wait| self.extent(wait)).collect();
        let rows = rows(&extents);
        let row_count = rows.iter().map(|row| row + 1).max().unwrap_or_default();
        let devices_bottom = self.device_top(names.len()) - DEVICE_GAP;
        let bottom = match row_count {
            0 => devices_bottom,
            count => devices_bottom + WAITS_TITLE + WAIT_HEIGHT * count as f64,
        };
        push_title(svg, self.outcome, top);
        let tenants = self
            .outcome
            .tenants
            .iter()
            .map(|tenant| tenant.name.clone());
        let mut tenants: Vec<_> = tenants.collect();
        if tenants.len() > MAX_TENANTS + 1 {
            let others = tenants.split_off(MAX_TENANTS).len();
            tenants.push(format!("{others} others"));
        }
        push_legend(svg, &tenants, top);
        push_legend_of_free(svg, top);
        self.axis.push(svg, self.top - 2.0, bottom);
        for (device, name) in names.iter().enumerate() {
            let middle = self.device_top(device) + self.device_height / 2.0;
            push_text(
                svg,
                LEFT - 6.0,
                middle + 4.0,
                "end",
                &shortened(name, NAME_CHARS),
            );
        }
        self.push_free(svg, names.len(), &waits);
        for bar in self.bars(names.len()) {
            self.push_bar(svg, &bar);
        }
        if row_count > 0 {
            let title = devices_bottom + WAITS_TITLE - 8.0;
            push_text(svg, LEFT - 6.0, title + 15.0, "end", "waiting");
        }
        for (wait, row) in waits.iter().zip(rows) {
            let y = devices_bottom + WAITS_TITLE - 4.0 + WAIT_HEIGHT * row as f64;
            self.push_wait(svg, wait, y);
        }
        bottom + AXIS_HEIGHT
    }

    fn device_top(&self, device: usize) -> f64 {
        self.top + (self.device_height + DEVICE_GAP) * device as f64
    }

    /// Returns the times for which jobs wait that are long enough to be seen, in the order of their start.
    fn waits(&self) -> Vec<Wait> {
        let mut waits = Vec::new();
        for (job, (arrived, outcome)) in self.jobs.iter().zip(&self.outcome.jobs).enumerate() {
            let mut from_ms = arrived.arrival_ms;
            for (number, piece) in outcome.pieces.iter().enumerate() {
                waits.push(Wait {
                    job,
                    from_ms,
                    to_ms: piece.from_ms,
                    is_suspended: number > 0,
                });
                from_ms = piece.to_ms;
            }
            if outcome.done_ms.is_none() && outcome.failure.is_none() {
                waits.push(Wait {
                    job,
                    from_ms,
                    to_ms: self.axis.start_ms + self.axis.span_ms,
                    is_suspended: !outcome.pieces.is_empty(),
                });
            }
        }
        waits.retain(|wait| self.axis.x(wait.to_ms) - self.axis.x(wait.from_ms) > 2.0 * MIN_WIDTH);
        waits.sort_by_key(|wait| (wait.from_ms, wait.job));
        waits
    }

    /// Returns the rectangles of all jobs. Devices below each other that a job has at the same time are one.
    fn bars(&self, devices: usize) -> Vec<Bar> {
        let mut pieces: Vec<_> = self.pieces().collect();
        pieces.sort_by_key(|(job, number, piece)| (piece.from_ms, *job, *number));
        // What is taken of each device, until when.
        let mut taken = vec![Vec::<(u64, Part)>::new(); devices];
        let mut bars = Vec::<Bar>::new();
        for (job, number, piece) in pieces {
            let share = self.jobs[job].share_permille;
            let first = bars.len();
            for &device in &piece.devices {
                let top = self.device_top(device);
                let parts = match share {
                    None => vec![(0, WHOLE_PERMILLE)],
                    Some(permille) => {
                        taken[device].retain(|(until_ms, _)| *until_ms > piece.from_ms);
                        let used = taken[device].iter().map(|(_, part)| *part);
                        let parts = free_parts(used.collect(), permille);
                        taken[device].extend(parts.iter().map(|part| (piece.to_ms, *part)));
                        parts
                    }
                };
                for (from, to) in parts {
                    let [from, to] = [from, to].map(|at| {
                        top + self.device_height * f64::from(at) / f64::from(WHOLE_PERMILLE)
                    });
                    match bars[first..].last_mut() {
                        Some(above) if share.is_none() && from - above.bottom <= DEVICE_GAP => {
                            above.bottom = to;
                        }
                        _ => bars.push(Bar {
                            job,
                            piece: number,
                            top: from,
                            bottom: to,
                        }),
                    }
                }
            }
        }
        bars
    }

    /// Returns all pieces, with their jobs and their positions among those of the job.
    fn pieces(&self) -> impl Iterator<Item = (usize, usize, &Piece)> {
        let jobs = self.outcome.jobs.iter().enumerate();
        jobs.flat_map(|(job, outcome)| {
            let pieces = outcome.pieces.iter().enumerate();
            pieces.map(move |(number, piece)| (job, number, piece))
        })
    }

    /// Adds hatched areas where a device is free although jobs wait.
    fn push_free(&self, svg: &mut String, devices: usize, waits: &[Wait]) {
        let waiting = union(
            waits
                .iter()
                .map(|wait| (wait.from_ms, wait.to_ms))
                .collect(),
        );
        for device in 0..devices {
            let used = self
                .pieces()
                .filter(|(_, _, piece)| piece.devices.contains(&device));
            let used = union(
                used.map(|(_, _, piece)| (piece.from_ms, piece.to_ms))
                    .collect(),
            );
            for (from_ms, to_ms) in without(&waiting, &used) {
                let (from, to) = (self.axis.x(from_ms), self.axis.x(to_ms));
                if to - from > 2.0 * MIN_WIDTH {
                    let (y, height) = (self.device_top(device), self.device_height);
                    let _ = writeln!(
                        svg,
                        "<path d=\"M{from:.1} {y}H{to:.1}v{height}H{from:.1}z\" fill=\"url(#free)\"/>"
                    );
                }
            }
        }
    }

    fn push_bar(&self, svg: &mut String, bar: &Bar) {
        let outcome = &self.outcome.jobs[bar.job];
        let piece = &outcome.pieces[bar.piece];
        let from = self.axis.x(piece.from_ms);
        let to = self.axis.x(piece.to_ms).max(from + MIN_WIDTH);
        // A gap of a pixel between jobs that follow each other.
        let to = (to - 1.0).max(from + MIN_WIDTH);
        let colour = self.colours[bar.job];
        let opacity = match self.jobs[bar.job].is_spot {
            true => " fill-opacity=\"0.6\"",
            false => "",
        };
        let _ = writeln!(
            svg,
            "<path d=\"{}\" fill=\"{}\"{opacity}/>",
            outline(bar, from, to, torn(outcome, bar.piece)),
            COLOURS[colour]
        );
        let text = self.bar_text(bar.job, to - from);
        let middle = (bar.top + bar.bottom) / 2.0;
        if !text.is_empty() && bar.bottom - bar.top >= 12.0 {
            let text_colour = match self.jobs[bar.job].is_spot {
                true => "#000",
                false => TEXT_COLOURS[colour],
            };
            let _ = writeln!(
                svg,
                "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{text_colour}\" text-anchor=\"middle\">{text}</text>",
                (from + to) / 2.0,
                middle + 4.0
            );
        }
    }

    /// Returns the longest text for a job that fits into so much width.
    fn bar_text(&self, job: usize, width: f64) -> String {
        let Job {
            user,
            share_permille,
            is_spot,
            priority,
            ..
        } = &self.jobs[job];
        let number = (job + 1).to_string();
        let mut words = vec![];
        words.extend((!user.is_empty()).then(|| user.clone()));
        words.extend(is_spot.then(|| "spot".into()));
        words.extend(share_permille.map(|it| Percent(it).to_string()));
        words.extend((*priority != 0).then(|| format!("priority {priority}")));
        let long = match words.is_empty() {
            true => number.clone(),
            false => format!("{number}: {}", words.join(", ")),
        };
        let fitting = [long, number].into_iter();
        let mut fitting =
            fitting.filter(|text| text.chars().count() as f64 * CHARACTER + 4.0 <= width);
        fitting.next().unwrap_or_default()
    }

    fn push_wait(&self, svg: &mut String, wait: &Wait, y: f64) {
        let (from, to) = (self.axis.x(wait.from_ms), self.axis.x(wait.to_ms));
        let height = WAIT_HEIGHT - 3.0;
        let colour = COLOURS[self.colours[wait.job]];
        let dashes = match wait.is_suspended {
            true => " stroke-dasharray=\"4 2\"",
            false => "",
        };
        let _ = writeln!(
            svg,
            "<path d=\"M{from:.1} {y:.1}H{to:.1}v{height}H{from:.1}z\" fill=\"{colour}\" fill-opacity=\"0.2\" \
             stroke=\"{colour}\"{dashes}/>"
        );
        // A text that has no room at the right is at the left.
        let (x, anchor) = match self.extent(wait).0 < from {
            true => (from - 4.0, "end"),
            false => (from + 4.0, "start"),
        };
        push_text(svg, x, y + 11.0, anchor, &self.wait_text(wait));
    }

    /// Returns from where to where a job that waits is, with its text.
    fn extent(&self, wait: &Wait) -> (f64, f64) {
        let (from, to) = (self.axis.x(wait.from_ms), self.axis.x(wait.to_ms));
        let text = self.wait_text(wait).chars().count() as f64 * CHARACTER + 8.0;
        match from + text > WIDTH {
            true => (from - text, to),
            false => (from, to.max(from + text)),
        }
    }

    fn wait_text(&self, wait: &Wait) -> String {
        let job = &self.jobs[wait.job];
        let number = wait.job + 1;
        if wait.is_suspended {
            return format!("{number} suspended");
        }
        let mut text = match job.share_permille {
            Some(permille) => format!("{number} for {} of a device", Percent(permille)),
            None => format!(
                "{number} for {}",
                human::plural(job.devices as usize, "device")
            ),
        };
        if job.is_spot {
            text += ", spot";
        }
        if job.priority != 0 {
            let _ = write!(text, ", priority {}", job.priority);
        }
        text
    }
}

/// Adds what the hatched areas mean, beside the title of a run.
fn push_legend_of_free(svg: &mut String, top: f64) {
    let (x, y) = (WIDTH - RIGHT - 152.0, top + 10.5);
    let _ = writeln!(
        svg,
        "<rect x=\"{x}\" y=\"{y}\" width=\"24\" height=\"11\" fill=\"url(#free)\" stroke=\"#8c959f\"/>"
    );
    push_text(svg, x + 30.0, y + 9.5, "start", "free while jobs wait");
}

/// Returns whether the left and the right edge of a piece of a job are torn: it goes on there after it was suspended,
/// or is suspended.
fn torn(outcome: &JobOutcome, piece: usize) -> (bool, bool) {
    let is_over = outcome.done_ms.is_some() || outcome.failure.is_some();
    let is_last = piece + 1 == outcome.pieces.len();
    (piece > 0, !(is_last && is_over))
}

/// Returns the path around a bar, whose torn edges are zigzag lines.
fn outline(bar: &Bar, from: f64, to: f64, (left, right): (bool, bool)) -> String {
    /// Half the height of a tooth, and its width.
    const TOOTH: f64 = 3.0;
    let height = bar.bottom - bar.top;
    let teeth = (height / (2.0 * TOOTH)).round().max(1.0);
    let step = height / teeth / 2.0;
    let depth = TOOTH.min((to - from) / 2.0);
    let mut path = format!("M{from:.1} {:.1}H{to:.1}", bar.top);
    let edge = |path: &mut String, depth: f64, step: f64| {
        for _ in 0..teeth as usize {
            // Writing to a string does not fail.
            let _ = write!(path, "l{:.1} {step:.1}l{depth:.1} {step:.1}", -depth);
        }
    };
    match right {
        true => edge(&mut path, depth, step),
        false => path += &format!("V{:.1}", bar.bottom),
    }
    path += &format!("H{from:.1}");
    if left {
        edge(&mut path, -depth, -step);
    }
    path + "z"
}
