//! The figures of the bench, and how they are shown.

use serde_json::json;

use super::overload::Overload;
use crate::{
    load::LoadResult,
    race::Results,
    report::{Report, add_results, format_number, table},
    stats::round,
};

/// What was measured.
pub(super) struct Figures {
    pub(super) found: Results,
    /// The 99th percentile of latencies at half the load.
    pub(super) p99_ms: f64,
    pub(super) overload: Overload,
    pub(super) kill: LoadResult,
    pub(super) failed: usize,
}

impl Figures {
    pub(super) fn report(&self) -> Report {
        let Self {
            found,
            overload,
            kill,
            ..
        } = self;
        let median = |key| found.median(key).unwrap_or(f64::NAN);
        let added_ms = median("single_ms") - median("direct_ms");
        let ratio = found.ratio("batch32_rps", "direct_batch32_rps");
        let ratio = ratio.unwrap_or(f64::NAN);
        let in_time = kill.in_time();
        let mut rows = table(&["what"], &["median", "quartiles"]);
        add_results(&mut rows, &[], found);
        let lines = [
            format!(
                "32 images by the server, relative to the lease: {}",
                round(ratio)
            ),
            format!(
                "a request takes {} ms more than the lease",
                format_number(added_ms)
            ),
            format!(
                "99 of 100 requests at half the load take less than {} ms",
                format_number(self.p99_ms)
            ),
            format!(
                "at ten times the load: {} of its best, {} refused per second, {} of all not sent, memory {} MiB more; of half the load 2 s later: {}",
                round(overload.goodput),
                format_number(overload.refused_per_s),
                round(overload.unsent),
                format_number(overload.memory_mib),
                round(overload.recovered)
            ),
            format!(
                "a worker killed at half the load: {} of {} requests in time, {} refused",
                kill.answered,
                kill.accepted(),
                kill.refused
            ),
            format!("failed: {}", self.failed),
        ];
        let mut figures = found.to_json();
        for (key, value) in [
            ("batch32_ratio", ratio),
            ("added_ms", added_ms),
            ("p99_ms", self.p99_ms),
            ("overload_goodput", overload.goodput),
            ("overload_refused_per_s", overload.refused_per_s),
            ("overload_unsent", overload.unsent),
            ("overload_memory_mib", overload.memory_mib),
            ("recovered_ratio", overload.recovered),
            ("kill_in_time", in_time),
        ] {
            figures.insert(key.into(), json!(round(value)));
        }
        figures.insert("kill_requests".into(), json!(kill.accepted()));
        figures.insert("failed".into(), json!(self.failed));
        Report {
            json: figures.into(),
            table: format!("{rows}\n\n{}", lines.join("\n")),
        }
    }
}
