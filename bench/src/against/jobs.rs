//! The jobs that both builds measure, and the figures that are compared.
//!
//! For `ops`, `step`, `read` and `attach` a job is one turn of one contender, and only
//! tensord's contenders take part, plus a local one as a control. `wire` and `bulk` are run
//! as a whole, and one of their other contenders is the control.

use std::ops::RangeInclusive;

use serde_json::{Value, json};
use tensord_transport::TransportChoice;

use crate::bench::Bench;

/// Maximum number of rounds of `wire`: its figures are bytes, which hardly differ from run
/// to run.
const WIRE_ROUNDS: usize = 3;

/// Maximum time of an attach in ms, independent of the earlier build's.
const MAX_ATTACH_MS: f64 = 20.0;

/// A unit of measurement, run in one process of a build.
pub(super) struct Job {
    /// The bench that the job belongs to.
    pub(super) bench: Bench,
    /// The job's name in progress reports.
    pub(super) title: String,
    /// The turn to take, or `None` for the whole bench.
    pub(super) turn: Option<TurnTemplate>,
    /// The figures of the result that are compared.
    pub(super) figures: Vec<Figure>,
}

/// A figure in a job's result.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Figure {
    /// The figure's name, which ends with its unit.
    pub(super) name: String,
    /// JSON pointer to the figure in the result.
    pub(super) pointer: String,
    /// How the figure is judged.
    pub(super) kind: FigureKind,
    /// Upper limit, independent of the earlier build's figure.
    pub(super) upper_limit: Option<f64>,
}

/// The rule by which a figure is judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FigureKind {
    /// Less is better.
    Cost,
    /// More is better.
    Rate,
    /// Does not use tensord, so it shows how much other load the machine had.
    Control,
    /// Must be the same in every sample.
    Constant,
}

/// A turn without the pool's URL.
pub(super) struct TurnTemplate {
    peer: PeerKind,
    before: &'static str,
    after: &'static str,
}

#[derive(Clone, Copy)]
enum PeerKind {
    Local,
    Tcp,
    Quic,
    Grpc,
}

impl TurnTemplate {
    /// Returns the task, for a pool whose URLs `url` returns.
    pub(super) fn task(&self, url: impl Fn(TransportChoice) -> String) -> Value {
        let peer = match self.peer {
            PeerKind::Local => json!("Local"),
            PeerKind::Tcp => json!({ "Tensord": url(TransportChoice::Auto) }),
            PeerKind::Quic => json!({ "TensordQuic": url(TransportChoice::Quic) }),
            PeerKind::Grpc => json!({ "TensordGrpc": url(TransportChoice::Grpc) }),
        };
        let text = format!("{}{peer}{}", self.before, self.after);
        serde_json::from_str(&text).expect("the parts of a task are JSON")
    }
}

impl Job {
    /// Returns the rounds, of `rounds`, in which the job is measured. Round 0 warms up
    /// pools and machine, and does not count; whole benches warm up by themselves.
    pub(super) fn rounds(&self, rounds: usize) -> RangeInclusive<usize> {
        match (&self.turn, self.bench) {
            (Some(_), _) => 0..=rounds,
            (None, Bench::Wire) => 1..=rounds.min(WIRE_ROUNDS),
            (None, _) => 1..=rounds,
        }
    }
}

/// Returns the jobs of `benches`, in order. With `quick`, `bulk` has one size.
pub(super) fn jobs(benches: &[Bench], quick: bool) -> Vec<Job> {
    let jobs_of = |bench: &Bench| match bench {
        Bench::Ops => ops(),
        Bench::Wire => vec![whole_bench_job(Bench::Wire, wire())],
        Bench::Step => step(),
        Bench::Read => read(),
        Bench::Bulk => vec![whole_bench_job(Bench::Bulk, bulk(quick))],
        Bench::Attach => attach(),
        _ => Vec::new(),
    };
    benches.iter().flat_map(jobs_of).collect()
}

fn figure(name: impl Into<String>, pointer: impl Into<String>, kind: FigureKind) -> Figure {
    Figure {
        name: name.into(),
        pointer: pointer.into(),
        kind,
        upper_limit: None,
    }
}

/// Returns a job of one turn whose result is a number of µs.
fn turn(
    bench: Bench,
    name: &str,
    peer: PeerKind,
    (before, after): (&'static str, &'static str),
) -> Job {
    let kind = match peer {
        PeerKind::Local => FigureKind::Control,
        _ => FigureKind::Cost,
    };
    Job {
        bench,
        title: format!("{} {name}", bench.name()),
        turn: Some(TurnTemplate {
            peer,
            before,
            after,
        }),
        figures: vec![figure(name, "", kind)],
    }
}

fn whole_bench_job(bench: Bench, figures: Vec<Figure>) -> Job {
    Job {
        bench,
        title: bench.name().into(),
        turn: None,
        figures,
    }
}

fn ops() -> Vec<Job> {
    let read = (r#"{"Tensors":["#, r#","Read"]}"#);
    let issued = (r#"{"Tensors":["#, r#","Issued"]}"#);
    let below_read = (r#"{"Tensord":["#, r#","Read"]}"#);
    let below_issued = (r#"{"Tensord":["#, r#","Issued"]}"#);
    [
        ("tensord_us", PeerKind::Tcp, read),
        ("tensord_quic_us", PeerKind::Quic, read),
        ("tensord_grpc_us", PeerKind::Grpc, read),
        ("tensord_issue_us", PeerKind::Tcp, issued),
        ("backend_whole_us", PeerKind::Tcp, below_read),
        ("backend_us", PeerKind::Tcp, below_issued),
        ("local_us", PeerKind::Local, read),
    ]
    .map(|(name, peer, around)| turn(Bench::Ops, name, peer, around))
    .into()
}

/// Measures only TCP, because a turn takes seconds; `ops`, `read` and `bulk` cover the
/// other carriers.
fn step() -> Vec<Job> {
    let models = [
        ("mlp", r#","Mlp","Helper"]}"#, r#","Mlp","Plain"]}"#),
        ("cnn", r#","Cnn","Helper"]}"#, r#","Cnn","Plain"]}"#),
        (
            "transformer",
            r#","Transformer","Helper"]}"#,
            r#","Transformer","Plain"]}"#,
        ),
    ];
    let jobs_of = |(model, helper, plain): (&str, _, _)| {
        [("tensord", helper), ("tensord_plain", plain)].map(|(way, after)| {
            let name = format!("{model}/{way}_ms");
            let mut job = turn(Bench::Step, &name, PeerKind::Tcp, (r#"{"Peer":["#, after));
            let loss = figure(format!("{model}/{way}_loss"), "/loss", FigureKind::Constant);
            job.figures = vec![figure(name, "/ms", FigureKind::Cost), loss];
            job
        })
    };
    models.into_iter().flat_map(jobs_of).collect()
}

fn read() -> Vec<Job> {
    let (one, many) = ((r#"{"One":"#, "}"), (r#"{"Many":"#, "}"));
    [
        ("tensord_us", PeerKind::Tcp, one),
        ("tensord_quic_us", PeerKind::Quic, one),
        ("tensord_grpc_us", PeerKind::Grpc, one),
        ("pipelined_us", PeerKind::Tcp, many),
        ("local_us", PeerKind::Local, one),
    ]
    .map(|(name, peer, around)| turn(Bench::Read, name, peer, around))
    .into()
}

fn attach() -> Vec<Job> {
    let peers = [
        ("ms", PeerKind::Tcp),
        ("quic_ms", PeerKind::Quic),
        ("grpc_ms", PeerKind::Grpc),
    ];
    let job = |(name, peer)| {
        let mut job = turn(Bench::Attach, name, peer, ("", ""));
        let upper_limit = matches!(peer, PeerKind::Tcp).then_some(MAX_ATTACH_MS);
        job.figures = vec![Figure {
            upper_limit,
            ..figure(name, "/ms", FigureKind::Cost)
        }];
        job
    };
    peers.map(job).into()
}

fn wire() -> Vec<Figure> {
    let keys = [
        ("tensord_bytes", FigureKind::Cost),
        ("tensord_plain_bytes", FigureKind::Cost),
        ("tensord_grpc_bytes", FigureKind::Cost),
        ("tensord_down_bytes", FigureKind::Cost),
        ("burn_remote_bytes", FigureKind::Control),
    ];
    let models = ["mlp", "cnn", "transformer"];
    let figures_of = |model| {
        keys.map(|(key, kind)| {
            let name = format!("{model}/{key}");
            figure(name.clone(), format!("/json/{name}"), kind)
        })
    };
    models.into_iter().flat_map(figures_of).collect()
}

fn bulk(quick: bool) -> Vec<Figure> {
    let keys = [
        ("tensord_gbs", FigureKind::Rate),
        ("tensord_plain_gbs", FigureKind::Rate),
        ("tensord_quic_gbs", FigureKind::Rate),
        ("tensord_grpc_gbs", FigureKind::Rate),
        ("tls_gbs", FigureKind::Control),
    ];
    let sizes = ["1", "16", "64", "256"];
    let sizes = sizes.iter().enumerate().take(if quick { 1 } else { 4 });
    let figures_of = |(at, mib): (usize, &&str)| {
        ["up", "down"].map(|way| {
            keys.map(|(key, kind)| {
                let name = format!("{mib}_mib/{way}/{key}");
                figure(name, format!("/json/sizes/{at}/{way}/{key}"), kind)
            })
        })
    };
    sizes.flat_map(figures_of).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::against::COMPARABLE;

    #[test]
    fn turn_templates_match_the_benches() {
        let jobs = jobs(&COMPARABLE, false);
        let url = |transport: TransportChoice| format!("tensord://{transport}");
        for job in &jobs {
            if let Some(turn) = &job.turn {
                let task = turn.task(url);
                let understood = job.bench.is_valid_task(task.clone());
                assert!(understood.is_ok(), "{}: {task}: {understood:?}", job.title);
            }
        }
        let tasks: Vec<_> = jobs.iter().filter_map(|job| job.turn.as_ref()).collect();
        let first = json!({ "Tensors": [{ "Tensord": "tensord://auto" }, "Read"] });
        assert_eq!(tasks[0].task(url), first);
        let last = json!({ "TensordGrpc": "tensord://grpc" });
        assert_eq!(tasks.last().unwrap().task(url), last);
        assert!(Bench::Ops.is_valid_task(json!({ "Tensors": 1 })).is_err());
    }

    #[test]
    fn figure_names_are_unique_and_end_with_a_unit() {
        for bench in COMPARABLE {
            let jobs = jobs(&[bench], false);
            let figures: Vec<_> = jobs.iter().flat_map(|job| &job.figures).collect();
            let mut names: Vec<_> = figures.iter().map(|figure| &figure.name).collect();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), figures.len(), "{names:?}");
            for figure in figures {
                let unit = figure.name.rsplit(['_', '/']).next().unwrap();
                let fits = match figure.kind {
                    FigureKind::Cost => ["us", "ms", "bytes"].contains(&unit),
                    FigureKind::Rate => unit == "gbs",
                    FigureKind::Constant => unit == "loss",
                    FigureKind::Control => true,
                };
                assert!(fits, "{figure:?}");
            }
        }
    }

    #[test]
    fn whole_benches_have_no_warmup_round() {
        let rounds = |bench| jobs(&[bench], false)[0].rounds(7);
        assert_eq!(rounds(Bench::Ops), 0..=7);
        assert_eq!(rounds(Bench::Bulk), 1..=7);
        assert_eq!(rounds(Bench::Wire), 1..=3);
        assert_eq!(jobs(&[Bench::Bulk], true)[0].figures.len(), 10);
    }
}
