//! The results of simulations, as tables for people and as JSON.

use std::{collections::BTreeMap, fmt::Write};

use serde::Serialize;
use serde_json::Number;
use tensord_scheduler::RequestOrder;

use super::metrics::{Outcome, TenantOutcome, Waits};
use crate::{human, stdout, table};

/// The most reasons of refusals that the text names for each order.
const MAX_REASONS: usize = 5;

/// Returns the name of an order on the command line.
pub(crate) fn order_name(order: RequestOrder) -> &'static str {
    match order {
        RequestOrder::Fair => "fair",
        RequestOrder::Backfill => "backfill",
        RequestOrder::Fifo => "fifo",
    }
}

/// Returns the results of one trace in several orders as text. `workers` is the number of workers of the pool.
pub(crate) fn text(outcomes: &[Outcome], workers: u64) -> String {
    let mut text = String::new();
    if let Some(first) = outcomes.first() {
        let devices = human::plural(first.devices as usize, "device");
        let jobs = human::plural(first.jobs.len(), "job");
        let tenants = human::plural(first.tenants.len(), "tenant");
        let workers = human::plural(workers as usize, "worker");
        // Writing to a string does not fail.
        let _ = writeln!(text, "{jobs} of {tenants} on {devices} of {workers}\n");
    }
    text += &summary(outcomes);
    for outcome in outcomes {
        push_failures(&mut text, outcome);
    }
    text.push('\n');
    text += &by_tenant(outcomes);
    text.push('\n');
    text += &by_gang(outcomes);
    text
}

fn summary(outcomes: &[Outcome]) -> String {
    let header = [
        "ORDER",
        "LENGTH",
        "UTILISATION",
        "DONE",
        "REFUSED",
        "SUSPENSIONS",
        "UNFAIR",
        "JAIN",
        "MEDIAN WAIT",
        "P99",
        "WORST",
    ];
    let rows = outcomes.iter().map(|outcome| {
        let [median, p99, worst] = wait_cells(&outcome.waits);
        [
            order_name(outcome.order).into(),
            human::duration(outcome.end_ms - outcome.start_ms),
            percent(outcome.utilisation),
            human::count(outcome.done as u64),
            human::count(outcome.failures.values().sum::<usize>() as u64),
            human::count(outcome.suspensions),
            percent(outcome.fair_share_error),
            format!("{:.3}", outcome.jains_index),
            median,
            p99,
            worst,
        ]
    });
    table::text(header, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], rows)
}

/// Adds why jobs were refused or still wait.
fn push_failures(text: &mut String, outcome: &Outcome) {
    let order = order_name(outcome.order);
    let mut by_count: Vec<_> = outcome.failures.iter().collect();
    by_count.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    for (reason, count) in by_count.iter().take(MAX_REASONS) {
        let _ = writeln!(text, "{order}: {}: {reason}", human::plural(**count, "job"));
    }
    if by_count.len() > MAX_REASONS {
        let more = by_count.len() - MAX_REASONS;
        let _ = writeln!(text, "{order}: {} more", human::plural(more, "reason"));
    }
    if outcome.unfinished > 0 {
        let jobs = human::plural(outcome.unfinished, "job");
        let _ = writeln!(
            text,
            "{order}: {jobs} still waited when nothing happened any more"
        );
    }
}

fn by_tenant(outcomes: &[Outcome]) -> String {
    let header = [
        "TENANT",
        "ORDER",
        "WEIGHT",
        "JOBS",
        "DEVICE-HOURS",
        "FAIR",
        "MEDIAN WAIT",
        "P99",
        "WORST",
    ];
    let count = outcomes.first().map_or(0, |outcome| outcome.tenants.len());
    let rows = (0..count).flat_map(|at| outcomes.iter().map(move |it| (it.order, &it.tenants[at])));
    let rows = rows.map(|(order, tenant)| {
        let [median, p99, worst] = wait_cells(&tenant.waits);
        [
            tenant.name.clone(),
            order_name(order).into(),
            tenant.weight.to_string(),
            human::count(tenant.waits.jobs as u64),
            hours(tenant.device_seconds),
            hours(tenant.fair_device_seconds),
            median,
            p99,
            worst,
        ]
    });
    table::text(header, &[2, 3, 4, 5, 6, 7, 8], rows)
}

fn by_gang(outcomes: &[Outcome]) -> String {
    let header = ["DEVICES", "ORDER", "JOBS", "MEDIAN WAIT", "P99", "WORST"];
    let sizes = outcomes.first().into_iter().flat_map(|it| it.gangs.keys());
    let rows = sizes.flat_map(|size| outcomes.iter().map(move |it| (it.order, *size, &it.gangs)));
    let rows = rows.filter_map(|(order, size, gangs)| {
        let waits = gangs.get(&size)?;
        let [median, p99, worst] = wait_cells(waits);
        let jobs = human::count(waits.jobs as u64);
        Some([
            human::thousandths(size),
            order_name(order).into(),
            jobs,
            median,
            p99,
            worst,
        ])
    });
    table::text(header, &[0, 2, 3, 4, 5], rows)
}

fn wait_cells(waits: &Waits) -> [String; 3] {
    match waits.jobs {
        0 => ["-", "-", "-"].map(Into::into),
        _ => [waits.median_ms, waits.p99_ms, waits.worst_ms].map(human::duration),
    }
}

fn percent(part: f64) -> String {
    format!("{:.1} %", 100.0 * part)
}

fn hours(seconds: f64) -> String {
    format!("{:.1}", seconds / 3600.0)
}

/// The JSON for simulations. Programs depend on the field names.
#[derive(Serialize)]
pub(crate) struct ReportJson<'a> {
    workers: u64,
    devices: u64,
    jobs: usize,
    orders: Vec<OrderJson<'a>>,
}

#[derive(Serialize)]
struct OrderJson<'a> {
    order: &'static str,
    start_seconds: f64,
    end_seconds: f64,
    utilisation: f64,
    done: usize,
    refused: &'a BTreeMap<String, usize>,
    unfinished: usize,
    suspensions: u64,
    fair_share_error: f64,
    jains_index: f64,
    waiting: WaitsJson,
    tenants: Vec<TenantJson<'a>>,
    gangs: Vec<GangJson>,
}

#[derive(Serialize)]
struct TenantJson<'a> {
    tenant: &'a str,
    weight: u32,
    device_seconds: f64,
    fair_device_seconds: f64,
    waiting: WaitsJson,
}

#[derive(Serialize)]
struct GangJson {
    /// Not a whole number for shares of a device.
    devices: Number,
    waiting: WaitsJson,
}

#[derive(Serialize)]
struct WaitsJson {
    jobs: usize,
    median_seconds: f64,
    p99_seconds: f64,
    worst_seconds: f64,
}

/// Returns the results of one trace in several orders as JSON. `workers` is the number of workers of the pool.
pub(crate) fn json(outcomes: &[Outcome], workers: u64) -> ReportJson<'_> {
    let first = outcomes.first();
    ReportJson {
        workers,
        devices: first.map_or(0, |outcome| outcome.devices),
        jobs: first.map_or(0, |outcome| outcome.jobs.len()),
        orders: outcomes.iter().map(order_json).collect(),
    }
}

fn order_json(outcome: &Outcome) -> OrderJson<'_> {
    let gangs = outcome.gangs.iter().map(|(devices, waits)| GangJson {
        devices: stdout::thousandths(*devices),
        waiting: waits_json(waits),
    });
    OrderJson {
        order: order_name(outcome.order),
        start_seconds: seconds(outcome.start_ms),
        end_seconds: seconds(outcome.end_ms),
        utilisation: outcome.utilisation,
        done: outcome.done,
        refused: &outcome.failures,
        unfinished: outcome.unfinished,
        suspensions: outcome.suspensions,
        fair_share_error: outcome.fair_share_error,
        jains_index: outcome.jains_index,
        waiting: waits_json(&outcome.waits),
        tenants: outcome.tenants.iter().map(tenant_json).collect(),
        gangs: gangs.collect(),
    }
}

fn tenant_json(tenant: &TenantOutcome) -> TenantJson<'_> {
    TenantJson {
        tenant: &tenant.name,
        weight: tenant.weight,
        device_seconds: tenant.device_seconds,
        fair_device_seconds: tenant.fair_device_seconds,
        waiting: waits_json(&tenant.waits),
    }
}

fn waits_json(waits: &Waits) -> WaitsJson {
    WaitsJson {
        jobs: waits.jobs,
        median_seconds: seconds(waits.median_ms),
        p99_seconds: seconds(waits.p99_ms),
        worst_seconds: seconds(waits.worst_ms),
    }
}

fn seconds(millis: u64) -> f64 {
    millis as f64 / 1000.0
}
