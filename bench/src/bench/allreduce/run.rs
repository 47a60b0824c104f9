//! The result for all-reduces of one size, and its report.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{
    report::{Report, format_number, format_optional, table},
    stats::{Summary, round},
};

/// The result for all-reduces of one size between `world` workers.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Run {
    pub(super) mib: usize,
    pub(super) world: usize,
    pub(super) latency_ms: u64,
    pub(super) rate_mbit: u64,
    pub(super) network: String,
    pub(super) seconds: Summary,
    pub(super) busbw_gbs: f64,
    pub(super) link_gbs: f64,
    pub(super) link_rtt_ms: f64,
    pub(super) ring_bound_ratio: Option<f64>,
    pub(super) bytes_sent_per_rank_ratio: Option<f64>,
    pub(super) gloo_busbw_gbs: Option<f64>,
}

/// Builds the report of the results.
pub(super) fn report(runs: &[Run]) -> Report {
    let mut rows = table(
        &["workers", "MiB", "latency, ms", "links"],
        &[
            "ms",
            "bus GB/s",
            "link GB/s",
            "× link",
            "× bytes",
            "Gloo GB/s",
        ],
    );
    for run in runs {
        rows.add_row([
            run.world.to_string(),
            run.mib.to_string(),
            run.latency_ms.to_string(),
            run.network.clone(),
            format_number(run.seconds.median * 1000.0),
            format_number(run.busbw_gbs),
            format_number(run.link_gbs),
            format_optional(run.ring_bound_ratio),
            run.bytes_sent_per_rank_ratio
                .map_or_else(|| "–".into(), |ratio| format!("{ratio:.4}")),
            format_optional(run.gloo_busbw_gbs),
        ]);
    }
    let runs: Vec<Value> = runs.iter().map(to_json).collect();
    Report {
        json: json!({ "runs": runs }),
        table: rows.to_string(),
    }
}

fn to_json(run: &Run) -> Value {
    // Differences of a thousandth matter here.
    let exact = |ratio: f64| (ratio * 1e4).round() / 1e4;
    let ms = |seconds: f64| round(seconds * 1000.0);
    json!({
        "mib": run.mib,
        "world": run.world,
        "latency_ms": run.latency_ms,
        "rate_mbit": run.rate_mbit,
        "network": run.network,
        "ms": ms(run.seconds.median),
        "quartiles": { "ms": [ms(run.seconds.q1), ms(run.seconds.q3)] },
        "busbw_gbs": round(run.busbw_gbs),
        "link_gbs": round(run.link_gbs),
        "link_rtt_ms": round(run.link_rtt_ms),
        "ring_bound_ratio": run.ring_bound_ratio.map(exact),
        "bytes_sent_per_rank_ratio": run.bytes_sent_per_rank_ratio.map(exact),
        "gloo_busbw_gbs": run.gloo_busbw_gbs.map(round),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_become_a_table() {
        let run = json!({
            "mib": 64, "world": 2, "latency_ms": 0, "rate_mbit": 1000, "network": "relay",
            "seconds": { "median": 0.6, "q1": 0.5, "q3": 0.7 },
            "busbw_gbs": 0.111_847, "link_gbs": 0.12, "link_rtt_ms": 0.1,
            "ring_bound_ratio": 0.932_06, "bytes_sent_per_rank_ratio": 1.003_12,
            "gloo_busbw_gbs": null,
        });
        let report = report(&[serde_json::from_value(run).unwrap()]);
        let run = &report.json["runs"][0];
        assert_eq!(run["bytes_sent_per_rank_ratio"], 1.0031);
        assert_eq!(run["ring_bound_ratio"], 0.9321);
        assert_eq!(run["gloo_busbw_gbs"], Value::Null);
        assert!(report.table.contains("1.0031"));
    }
}
