//! The figures of each chart.

use serde_json::Value;

use super::chart::{Chart, Group};
use crate::models::Model;

/// The key of one peer's bars in the JSON, and their label in the legend.
struct Series {
    key: &'static str,
    label: &'static str,
}

const fn series(key: &'static str, label: &'static str) -> Series {
    Series { key, label }
}

/// Returns a chart of the step time of each model.
pub(super) fn step(all: &Value) -> Option<Chart> {
    let peers = [
        series("local_ms", "local Flex"),
        series("burn_remote_ms", "burn-remote"),
        series("tensord_ms", "tensord"),
    ];
    let found = all.get("step")?;
    let groups = Model::ALL.map(|model| group(found.get(model.name())?, model.name(), &peers));
    chart("Training step", "ms, less is better", &peers, groups)
}

/// Returns a chart of the throughput by size and direction.
pub(super) fn bulk(all: &Value) -> Option<Chart> {
    let peers = [
        series("tls_gbs", "TLS socket"),
        series("burn_remote_gbs", "burn-remote"),
        series("tensord_gbs", "tensord"),
    ];
    let sizes = all.get("bulk")?.get("sizes")?.as_array()?;
    let groups = ["up", "down"].into_iter().flat_map(|way| {
        let peers = &peers;
        sizes.iter().map(move |size| {
            let name = format!("{} MiB {way}", size.get("mib")?);
            group(size.get(way)?, &name, peers)
        })
    });
    let groups: Vec<_> = groups.collect();
    chart("Large tensors", "GB/s, more is better", &peers, groups)
}

/// Returns a chart of the step time relative to the local one, by round trip.
pub(super) fn rtt(all: &Value) -> Option<Chart> {
    let peers = [
        series("burn_remote_ratio", "burn-remote"),
        series("ratio_to_local", "tensord"),
    ];
    let rtts = all.get("rtt")?.get("rtts")?.as_array()?;
    let groups = rtts.iter().map(|rtt| {
        let name = format!("{} ms", rtt.get("rtt_ms")?);
        group(rtt, &name, &peers)
    });
    let title = "Step of 100 ms by round trip";
    chart(
        title,
        "times the local step, less is better",
        &peers,
        groups,
    )
}

/// Returns a chart of the bus bandwidth of all-reduces over links without latency, and of
/// the links' own bandwidth.
pub(super) fn allreduce(all: &Value) -> Option<Chart> {
    let peers = [
        series("link_gbs", "the link"),
        series("gloo_busbw_gbs", "Gloo"),
        series("busbw_gbs", "tensord"),
    ];
    let runs = all.get("allreduce")?.get("runs")?.as_array()?;
    let near = |run: &&Value| run.get("latency_ms").and_then(Value::as_u64) == Some(0);
    let groups = runs.iter().filter(near).map(|run| {
        let name = format!("{} × {} MiB", run.get("world")?, run.get("mib")?);
        group(run, &name, &peers)
    });
    let unit = "bus GB/s, more is better";
    chart("All-reduce between workers", unit, &peers, groups)
}

/// Returns a chart of the steps per second of data-parallel training, by number of workers.
pub(super) fn ddp(all: &Value) -> Option<Chart> {
    let worlds = [
        series("1", "1 worker"),
        series("2", "2 workers"),
        series("4", "4 workers"),
    ];
    let models = all.get("ddp")?.get("models")?.as_object()?;
    let groups = models
        .iter()
        .map(|(name, found)| group(found.get("steps_per_s")?, name, &worlds));
    let unit = "steps/s, more is better";
    chart("Data-parallel training on tensord", unit, &worlds, groups)
}

fn group(found: &Value, name: &str, peers: &[Series]) -> Option<Group> {
    let value = |peer: &Series| found.get(peer.key).and_then(Value::as_f64);
    let bars: Vec<Option<f64>> = peers.iter().map(value).collect();
    let any = bars.iter().any(Option::is_some);
    any.then(|| Group {
        name: name.to_owned(),
        bars,
    })
}

fn chart(
    title: &str,
    unit: &str,
    peers: &[Series],
    groups: impl IntoIterator<Item = Option<Group>>,
) -> Option<Chart> {
    let groups: Vec<Group> = groups.into_iter().flatten().collect();
    (!groups.is_empty()).then(|| Chart {
        title: title.to_owned(),
        unit: unit.to_owned(),
        series: peers.iter().map(|peer| peer.label.to_owned()).collect(),
        groups,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn missing_measurements_are_omitted() {
        assert!(step(&json!({})).is_none());
        assert!(bulk(&json!({ "bulk": { "sizes": [] } })).is_none());
        let all = json!({ "step": { "mlp": { "local_ms": 1.0, "tensord_ms": 2.0 } } });
        let chart = step(&all).unwrap();
        assert_eq!(chart.groups.len(), 1);
        assert_eq!(chart.groups[0].bars, [Some(1.0), None, Some(2.0)]);
    }

    #[test]
    fn collectives_are_shown_by_workers() {
        let run = |latency_ms: u32| {
            json!({ "world": 2, "mib": 64, "latency_ms": latency_ms,
                    "busbw_gbs": 0.1, "link_gbs": 0.12, "gloo_busbw_gbs": null })
        };
        let all = json!({
            "allreduce": { "runs": [run(0), run(20)] },
            "ddp": { "models": { "mlp": { "steps_per_s": { "1": 5.0, "2": 7.0 } } } },
        });
        let groups = allreduce(&all).unwrap().groups;
        assert_eq!(groups.len(), 1);
        assert_eq!(groups[0].name, "2 × 64 MiB");
        assert_eq!(groups[0].bars, [Some(0.12), None, Some(0.1)]);
        let groups = ddp(&all).unwrap().groups;
        assert_eq!(groups[0].bars, [Some(5.0), Some(7.0), None]);
        assert!(allreduce(&json!({})).is_none() && ddp(&json!({})).is_none());
    }

    #[test]
    fn both_directions_of_every_size_are_shown() {
        let way = json!({ "tls_gbs": 1.0 });
        let size = |mib: u32| json!({ "mib": mib, "up": way, "down": way });
        let all = json!({ "bulk": { "sizes": [size(1), size(16)] } });
        let groups = bulk(&all).unwrap().groups;
        let names: Vec<_> = groups.iter().map(|group| group.name.as_str()).collect();
        assert_eq!(
            names,
            ["1 MiB up", "16 MiB up", "1 MiB down", "16 MiB down"]
        );
    }
}
