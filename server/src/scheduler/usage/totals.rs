//! Sums of what was used, by the columns that an administrator has chosen.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use tensord_proto::v1::{UsageColumn, UsageRow, UsageSum, UsageSums};

use super::amount::{Amount, Subject, SumKey};
use crate::scheduler::access::UnixMillis;

/// Most rows of a reply; the sum of the others is one more. So it is some 100 KiB at most.
pub(super) const MAX_ROWS: usize = 1000;

/// What to sum up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::scheduler) struct Query {
    /// From when on.
    pub(in crate::scheduler) since: UnixMillis,
    /// The columns by which usage is grouped into rows.
    pub(in crate::scheduler) by: BTreeSet<UsageColumn>,
}

/// What a row is of. What is not a chosen column has its default.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct RowKey {
    day: u32,
    tenant: Arc<str>,
    user: Arc<str>,
    kind: Arc<str>,
    lease: u64,
}

/// Sums by row.
#[derive(Debug, PartialEq)]
pub(in crate::scheduler) struct Totals {
    by: BTreeSet<UsageColumn>,
    since_ms: u64,
    rows: BTreeMap<RowKey, Amount>,
    total: Amount,
    devices_busy_us: u64,
}

impl Totals {
    /// Creates sums from `since_ms` on, milliseconds since 1970.
    pub(super) fn new(query: &Query, since_ms: u64) -> Self {
        Self {
            by: query.by.clone(),
            since_ms,
            rows: BTreeMap::new(),
            total: Amount::default(),
            devices_busy_us: 0,
        }
    }

    /// Records that the sums begin earlier, as only the sum of a whole day is kept.
    pub(super) fn begin_at(&mut self, since_ms: u64) {
        self.since_ms = self.since_ms.min(since_ms);
    }

    /// Adds an amount of a day.
    pub(super) fn add(&mut self, day: u32, key: &SumKey, amount: &Amount) {
        let mut row = RowKey::default();
        let has = |column| self.by.contains(&column);
        match &key.subject {
            Subject::Devices => {
                self.devices_busy_us = self.devices_busy_us.saturating_add(amount.busy_us);
                return;
            }
            Subject::Unknown => {}
            Subject::Lease(owner, lease) => {
                if has(UsageColumn::Tenant) {
                    row.tenant = owner.tenant.clone();
                }
                if has(UsageColumn::User) {
                    row.user = owner.user.clone();
                }
                if has(UsageColumn::Lease) {
                    row.lease = lease.0;
                }
            }
        }
        if has(UsageColumn::Kind) {
            row.kind = key.kind.clone();
        }
        if has(UsageColumn::Day) {
            row.day = day;
        }
        self.total.add(amount);
        if !self.by.is_empty() {
            self.rows.entry(row).or_default().add(amount);
        }
    }

    /// Returns the reply at `now`: the rows with the longest time of devices, and the sum of the others.
    pub(in crate::scheduler) fn into_reply(self, now: UnixMillis) -> UsageSums {
        let mut rows: Vec<_> = self.rows.into_iter().collect();
        rows.sort_by(|a, b| longest_first(a).cmp(&longest_first(b)));
        let rest = rows.split_off(rows.len().min(MAX_ROWS));
        let mut others = Amount::default();
        rest.iter().for_each(|(_, amount)| others.add(amount));
        // The sort is stable. The days are 0 if they are not a column.
        rows.sort_by_key(|(row, _)| row.day);
        UsageSums {
            rows: rows.into_iter().map(row_message).collect(),
            other_rows: rest.len() as u64,
            others: Some(sum_message(&others)),
            total: Some(sum_message(&self.total)),
            devices_busy_us: self.devices_busy_us,
            since_ms: self.since_ms,
            until_ms: now.0,
        }
    }
}

fn longest_first((row, amount): &(RowKey, Amount)) -> (Reverse<u64>, &RowKey) {
    (Reverse(amount.held_us), row)
}

fn row_message((row, amount): (RowKey, Amount)) -> UsageRow {
    UsageRow {
        tenant: row.tenant.to_string(),
        user: row.user.to_string(),
        lease_id: row.lease,
        kind: row.kind.to_string(),
        day: row.day,
        sum: Some(sum_message(&amount)),
    }
}

fn sum_message(amount: &Amount) -> UsageSum {
    UsageSum {
        held_us: amount.held_us,
        busy_us: amount.busy_us,
        byte_seconds: amount.byte_seconds as f64,
        moved_bytes: amount.moved_bytes,
        ops: amount.ops,
    }
}
