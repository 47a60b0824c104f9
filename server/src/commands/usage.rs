//! `tensord usage`: what leases have used of the devices of a running pool.

use std::{iter::once, time::SystemTime};

use serde_json::{Map, Value, json};
use tensord_proto::{
    ids::LeaseId,
    v1::{SumUsageRequest, UsageRow, UsageSum, UsageSums},
};
use tensord_transport::PoolUrl;

use super::admin::{self, error::AdminError, into_reply, with_token};
use crate::{
    config::{Column, UsageConfig, UsageFormat},
    dates,
    failure::Failure,
    human, stdout, table,
};

/// Microseconds in a second.
const MICROS: f64 = 1e6;

/// Byte seconds in an hour of a GiB.
const GIB_HOUR: f64 = 3600.0 * (1_u64 << 30) as f64;

/// Milliseconds in an hour.
const HOUR_MS: u64 = 3_600_000;

/// The columns of amounts in the table, which are aligned right.
const AMOUNTS: [&str; 5] = ["DEVICE TIME", "BUSY", "MEMORY TIME", "MOVED", "OPS"];

/// The columns of amounts in CSV, and the fields of amounts in JSON. Programs depend on the names.
const FIELDS: [&str; 5] = [
    "device_seconds",
    "busy_seconds",
    "memory_gib_hours",
    "moved_bytes",
    "ops",
];

/// The rows beyond the longest ones, and a tenant that is not known, in CSV.
const OTHERS: &str = "(others)";
const UNKNOWN: &str = "(unknown)";

/// Makes the call and prints its result.
pub(super) async fn run(config: UsageConfig) -> Result<(), Failure> {
    let url = admin::url(config.admin)?;
    let request = SumUsageRequest {
        since_ms: config.since.unix_ms(SystemTime::now()),
        by: config.by.iter().map(|it| it.message().into()).collect(),
    };
    let sums = admin::with_deadline(&url, sum_up(&url, request)).await?;
    if sums.other_rows > 0 {
        let others = human::count(sums.other_rows);
        eprintln!(
            "warning: {others} rows are shown as one sum; for fewer rows, name fewer columns in --by"
        );
    }
    stdout::print(&match config.format {
        UsageFormat::Table => to_table(&config.by, &sums),
        UsageFormat::Json => stdout::json(&to_json(&config.by, &sums)),
        UsageFormat::Csv => to_csv(&config.by, &sums),
    })
}

async fn sum_up(url: &PoolUrl, request: SumUsageRequest) -> Result<UsageSums, AdminError> {
    let mut admin = admin::connect(url).await?;
    let sums = admin.sum_usage(with_token(request, url)?);
    into_reply(url, sums.await)
}

/// Formats sums as a table, with a newline at the end.
fn to_table(by: &[Column], sums: &UsageSums) -> String {
    let since = time_text(sums.since_ms);
    let busy = human::duration(sums.devices_busy_us / 1000);
    let devices = format!("busy by the devices' own count: {busy}");
    if sums.rows.is_empty() {
        return format!("no lease has used a device since {since}; {devices}\n");
    }
    let names: Vec<_> = by.iter().map(|it| it.name().to_uppercase()).collect();
    let header: Vec<_> = names.iter().map(String::as_str).chain(AMOUNTS).collect();
    let right: Vec<_> = (by.len()..header.len()).collect();
    let rows = sums.rows.iter().map(|row| {
        let cells = by.iter().map(|column| match cell(*column, row) {
            Some(text) => text,
            None => "-".into(),
        });
        with_amounts(cells, sum_of(row.sum.as_ref()))
    });
    let labelled = |label: String, sum: &Option<UsageSum>| {
        let blank = vec![String::new(); by.len().saturating_sub(1)];
        with_amounts(once(label).chain(blank), sum_of(sum.as_ref()))
    };
    let others = (sums.other_rows > 0).then(|| {
        let label = format!("{} more", human::count(sums.other_rows));
        labelled(label, &sums.others)
    });
    let total = labelled("total".into(), &sums.total);
    let mut text = table::text_of(&header, &right, rows.chain(others).chain([total]));
    text += &format!("since {since}; {devices}\n");
    text
}

/// Returns the cells of a row, then those of its amounts.
fn with_amounts(cells: impl Iterator<Item = String>, sum: UsageSum) -> Vec<String> {
    let byte_hours = (sum.byte_seconds / 3600.0) as u64;
    let amounts = [
        human::duration(sum.held_us / 1000),
        human::duration(sum.busy_us / 1000),
        format!("{} h", human::bytes(byte_hours)),
        human::bytes(sum.moved_bytes),
        human::count(sum.ops),
    ];
    cells.chain(amounts).collect()
}

fn to_json(by: &[Column], sums: &UsageSums) -> Value {
    let rows = sums.rows.iter().map(|row| {
        let mut fields = Map::new();
        for column in by {
            fields.insert(column.name().into(), json!(cell(*column, row)));
        }
        fields.extend(amount_fields(&sum_of(row.sum.as_ref())));
        Value::Object(fields)
    });
    let amounts = |sum: &Option<UsageSum>| amount_fields(&sum_of(sum.as_ref()));
    json!({
        "since_ms": sums.since_ms,
        "until_ms": sums.until_ms,
        "rows": rows.collect::<Vec<_>>(),
        "other_rows": sums.other_rows,
        "others": amounts(&sums.others),
        "total": amounts(&sums.total),
        "devices_busy_seconds": sums.devices_busy_us as f64 / MICROS,
    })
}

fn amount_fields(sum: &UsageSum) -> Map<String, Value> {
    let values = [
        json!(sum.held_us as f64 / MICROS),
        json!(sum.busy_us as f64 / MICROS),
        json!(sum.byte_seconds / GIB_HOUR),
        json!(sum.moved_bytes),
        json!(sum.ops),
    ];
    let names = FIELDS.map(ToOwned::to_owned);
    names.into_iter().zip(values).collect()
}

/// Formats the rows as CSV, with a header. If there are others, their sum is the last row, with [`OTHERS`] in
/// the chosen columns. An unknown tenant is [`UNKNOWN`]; no tenant can have such a name.
fn to_csv(by: &[Column], sums: &UsageSums) -> String {
    let names = by.iter().map(|column| column.name()).chain(FIELDS);
    let mut text = names.collect::<Vec<_>>().join(",") + "\n";
    let line = |cells: Vec<String>, sum: UsageSum| {
        let fields = amount_fields(&sum);
        let amounts = FIELDS.map(|name| fields[name].to_string());
        cells
            .into_iter()
            .chain(amounts)
            .collect::<Vec<_>>()
            .join(",")
            + "\n"
    };
    for row in &sums.rows {
        let cells = by.iter().map(|column| match (column, cell(*column, row)) {
            (_, Some(text)) => quoted(&text),
            (Column::Tenant, None) => UNKNOWN.into(),
            (_, None) => String::new(),
        });
        text += &line(cells.collect(), sum_of(row.sum.as_ref()));
    }
    if sums.other_rows > 0 {
        text += &line(vec![OTHERS.into(); by.len()], sum_of(sums.others.as_ref()));
    }
    text
}

/// Returns a value of CSV, in quotes if it needs them.
fn quoted(text: &str) -> String {
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    }
}

/// Returns what a row is of, or `None` if that is not known.
fn cell(column: Column, row: &UsageRow) -> Option<String> {
    let known = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    match column {
        Column::Tenant => known(&row.tenant),
        Column::User => known(&row.user),
        Column::Lease => (row.lease_id > 0).then(|| LeaseId(row.lease_id).to_string()),
        Column::Kind => known(&row.kind),
        Column::Day => Some(dates::format(row.day)),
    }
}

fn sum_of(sum: Option<&UsageSum>) -> UsageSum {
    sum.copied().unwrap_or_default()
}

/// Formats the beginning of an hour.
fn time_text(ms: u64) -> String {
    let hours = ms / HOUR_MS;
    let days = u32::try_from(hours / 24).unwrap_or(u32::MAX);
    format!("{} {:02}:00 UTC", dates::format(days), hours % 24)
}

#[cfg(test)]
mod tests;
