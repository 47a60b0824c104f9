//! The sums and last reports on disk, in `usage.redb`.
//!
//! Sums are by hour, and by lease, for [`DETAILED_DAYS`]. Then those of a day become one, for each tenant,
//! user and kind of device, and are kept for [`KEPT_DAYS`]. If there are too many, the oldest ones are
//! summed up or dropped earlier, and further ones of today do not tell leases apart.

use std::{
    collections::BTreeMap,
    fs::File,
    ops::Range,
    path::{Path, PathBuf},
};

use redb::{
    Database, ReadableDatabase, ReadableTable, ReadableTableMetadata, Table, TableDefinition,
    WriteTransaction,
};
use serde::{Deserialize, Serialize};
use tensord_proto::{grant::GrantNumber, ids::LeaseId};
use tracing::warn;

use super::{
    accounts::{Account, AccountKey, Changes},
    amount::{Amount, HOUR_MS, HOURS_A_DAY, Owner, Subject, SumKey},
    totals::{Query, Totals},
};
use crate::{
    scheduler::access::UnixMillis,
    state::{
        StateDir, StateError,
        database::{self, DatabaseError},
    },
};

/// Days for which there are sums by hour and lease.
pub(super) const DETAILED_DAYS: u32 = 90;

/// Days for which there are sums by day.
pub(super) const KEPT_DAYS: u32 = 5 * 365;

/// Most sums by hour that tell leases apart: 230 leases at any time for 90 days. They take some 200 MiB.
const MAX_HOURLY: u64 = 500_000;

/// Most sums by day: 100 combinations of tenant, user and kind for 5 years.
const MAX_DAILY: u64 = 200_000;

/// A sum's time, tenant, user, lease and kind. A lease [`DEVICES`] with an empty tenant and user has the
/// devices' own count, and lease 0 with an empty tenant and user the leases of unknown owners.
type StoredKey<'a> = (u32, &'a str, &'a str, u64, &'a str);

type SumTable = TableDefinition<'static, StoredKey<'static>, &'static [u8]>;

/// The sums by hour, as JSON.
const HOURS: SumTable = TableDefinition::new("hours");

/// The sums by day, as JSON.
const DAYS: SumTable = TableDefinition::new("days");

/// The last reports of grants, as JSON, by worker, device, and term and count of the grant.
const ACCOUNTS: TableDefinition<'_, (u64, u32, u64, u64), &[u8]> = TableDefinition::new("accounts");

/// The number of the last changes, under the key 0.
const BATCHES: TableDefinition<'_, u8, u64> = TableDefinition::new("batches");

/// Stands for the devices' own count, where the id of a lease would be.
const DEVICES: u64 = u64::MAX;

/// Name of the file in the state directory.
const FILE: &str = "usage.redb";

/// The last report of a grant, on disk.
#[derive(Debug, Serialize, Deserialize)]
struct AccountRecord {
    tenant: String,
    user: String,
    lease: u64,
    kind: String,
    counted: Amount,
    counted_at: u64,
    is_ended: bool,
}

/// The file.
#[derive(Debug)]
pub(super) struct Store {
    path: PathBuf,
    /// `None` after an error: redb refuses all writes until the file is opened again.
    database: Option<Database>,
    limits: Limits,
}

/// Most records in the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) hourly: u64,
    pub(super) daily: u64,
}

/// What an earlier scheduler has written.
#[derive(Debug, Default)]
pub(super) struct Loaded {
    /// The number of its last changes.
    pub(super) batch: u64,
    pub(super) accounts: BTreeMap<AccountKey, Account>,
}

impl Store {
    /// Opens the file of a state directory, or creates it. If it is damaged, puts it aside and begins a new
    /// one.
    ///
    /// # Errors
    ///
    /// If it can neither be opened nor created.
    pub(super) fn open_or_put_aside(state: &StateDir) -> Result<(Self, Loaded), StateError> {
        let path = state.path().join(FILE);
        let loss = "the usage so far is lost";
        let (database, loaded) = database::open_or_put_aside(state, FILE, loss, load)?;
        let store = Self {
            path,
            database: Some(database),
            limits: Limits {
                hourly: MAX_HOURLY,
                daily: MAX_DAILY,
            },
        };
        Ok((store, loaded))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    #[cfg(test)]
    pub(super) fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Writes changes: all of them or none. May be called again after an error: changes that are on disk
    /// although writing them has returned an error are not written twice.
    pub(super) fn write(&mut self, changes: &Changes) -> Result<(), DatabaseError> {
        self.with_database(|database, limits| {
            let transaction = database.begin_write()?;
            if write_changes(&transaction, changes, limits)? {
                transaction.commit()?;
            }
            Ok(())
        })
    }

    /// Sums up details that are old, or too many, and drops what is too old.
    pub(super) fn tidy(&mut self, now: UnixMillis) -> Result<(), DatabaseError> {
        let today = day_of(now.0);
        self.with_database(|database, limits| {
            while sum_up_oldest_day(database, today, limits)? {}
            drop_old_days(database, today, limits)
        })
    }

    /// Sums up what was used.
    pub(super) fn sum(&mut self, query: &Query) -> Result<Totals, DatabaseError> {
        self.with_database(|database, _| {
            let transaction = database.begin_read()?;
            let (first_hour, first_day) = (hour_of(query.since.0), day_of(query.since.0));
            let mut totals = Totals::new(query, u64::from(first_hour) * HOUR_MS);
            let table = transaction.open_table(DAYS)?;
            for entry in table.range(first_of(first_day)..)? {
                let (key, bytes) = entry?;
                let key = sum_key(key.value());
                if key.time == first_day {
                    totals.begin_at(u64::from(first_day * HOURS_A_DAY) * HOUR_MS);
                }
                totals.add(key.time, &key, &amount(bytes.value()));
            }
            let table = transaction.open_table(HOURS)?;
            for entry in table.range(first_of(first_hour)..)? {
                let (key, bytes) = entry?;
                let key = sum_key(key.value());
                totals.add(key.time / HOURS_A_DAY, &key, &amount(bytes.value()));
            }
            Ok(totals)
        })
    }

    /// Runs `access` on the database, which is opened again after an error.
    fn with_database<T>(
        &mut self,
        access: impl FnOnce(&Database, Limits) -> Result<T, DatabaseError>,
    ) -> Result<T, DatabaseError> {
        let database = match self.database.take() {
            Some(database) => database,
            None => load(File::options().read(true).write(true).open(&self.path)?)?.0,
        };
        let result = access(&database, self.limits)?;
        self.database = Some(database);
        Ok(result)
    }
}

/// Opens the database in a file, and reads the last reports.
fn load(file: File) -> Result<(Database, Loaded), DatabaseError> {
    let database = database::open(file, HOURS)?;
    let transaction = database.begin_write()?;
    transaction.open_table(DAYS)?;
    transaction.open_table(ACCOUNTS)?;
    transaction.open_table(BATCHES)?;
    transaction.commit()?;
    let transaction = database.begin_read()?;
    let batch = transaction.open_table(BATCHES)?.get(0_u8)?;
    let mut loaded = Loaded {
        batch: batch.map_or(0, |number| number.value()),
        accounts: BTreeMap::new(),
    };
    for entry in transaction.open_table(ACCOUNTS)?.iter()? {
        let (key, bytes) = entry?;
        let (worker, device, term, count) = key.value();
        let grant = GrantNumber { term, count };
        let key = AccountKey {
            worker,
            device,
            grant,
        };
        match serde_json::from_slice(bytes.value()) {
            Ok(record) => drop(loaded.accounts.insert(key, account(record))),
            Err(e) => warn!("a report of usage is dropped, as this version cannot read it: {e}"),
        }
    }
    drop(transaction);
    Ok((database, loaded))
}

/// Writes changes, unless they are written. Returns whether there is something to commit. If there are too
/// many sums by hour, further ones do not tell leases apart.
fn write_changes(
    transaction: &WriteTransaction,
    changes: &Changes,
    limits: Limits,
) -> Result<bool, DatabaseError> {
    let mut batches = transaction.open_table(BATCHES)?;
    let last = batches
        .insert(0_u8, changes.number)?
        .map_or(0, |it| it.value());
    if last >= changes.number {
        return Ok(false);
    }
    let mut hours = transaction.open_table(HOURS)?;
    for (key, added) in &changes.sums {
        let is_new = || Ok::<_, DatabaseError>(hours.get(stored(key))?.is_none());
        if hours.len()? >= limits.hourly && is_new()? {
            let subject = key.subject.without_lease();
            add(
                &mut hours,
                &SumKey {
                    subject,
                    ..key.clone()
                },
                added,
            )?;
        } else {
            add(&mut hours, key, added)?;
        }
    }
    let mut accounts = transaction.open_table(ACCOUNTS)?;
    for (key, account) in &changes.accounts {
        let AccountKey {
            worker,
            device,
            grant,
        } = *key;
        let key = (worker, device, grant.term, grant.count);
        match account {
            Some(account) => accounts.insert(key, &*encode(&record(account)))?,
            None => accounts.remove(key)?,
        };
    }
    Ok(true)
}

/// Adds an amount to a sum.
fn add(
    table: &mut Table<'_, StoredKey<'static>, &'static [u8]>,
    key: &SumKey,
    added: &Amount,
) -> Result<(), DatabaseError> {
    let stored = stored(key);
    let known = table.get(stored)?.map(|bytes| amount(bytes.value()));
    let mut sum = known.unwrap_or_default();
    sum.add(added);
    table.insert(stored, &*encode(&sum))?;
    Ok(())
}

/// Makes sums by day of the oldest day that has sums by hour, if it is old enough or there are too many.
/// Returns whether it has.
fn sum_up_oldest_day(
    database: &Database,
    today: u32,
    limits: Limits,
) -> Result<bool, DatabaseError> {
    let transaction = database.begin_write()?;
    {
        let mut hours = transaction.open_table(HOURS)?;
        let oldest = hours.first()?.map(|(key, _)| key.value().0 / HOURS_A_DAY);
        let is_due = |day: &u32| day.saturating_add(DETAILED_DAYS) < today;
        let is_full = hours.len()? > limits.hourly;
        let Some(day) = oldest.filter(|day| is_due(day) || (is_full && *day < today)) else {
            return Ok(false);
        };
        let Range { start, end } = day * HOURS_A_DAY..(day + 1) * HOURS_A_DAY;
        let mut sums = BTreeMap::<SumKey, Amount>::new();
        for entry in hours.range(first_of(start)..first_of(end))? {
            let (key, bytes) = entry?;
            let key = sum_key(key.value());
            let key = SumKey {
                time: day,
                subject: key.subject.without_lease(),
                kind: key.kind,
            };
            sums.entry(key).or_default().add(&amount(bytes.value()));
        }
        hours.retain_in(first_of(start)..first_of(end), |_, _| false)?;
        let mut days = transaction.open_table(DAYS)?;
        for (key, sum) in &sums {
            add(&mut days, key, sum)?;
        }
    }
    transaction.commit()?;
    Ok(true)
}

/// Drops sums by day that are too old, or too many.
fn drop_old_days(database: &Database, today: u32, limits: Limits) -> Result<(), DatabaseError> {
    let transaction = database.begin_write()?;
    {
        let mut days = transaction.open_table(DAYS)?;
        let first = today.saturating_sub(KEPT_DAYS);
        days.retain_in(..first_of(first), |_, _| false)?;
        while days.len()? > limits.daily {
            days.pop_first()?;
        }
    }
    transaction.commit()?;
    Ok(())
}

/// Returns a key that sorts before all others of an hour or day.
fn first_of(time: u32) -> StoredKey<'static> {
    (time, "", "", 0, "")
}

fn hour_of(ms: u64) -> u32 {
    u32::try_from(ms / HOUR_MS).unwrap_or(u32::MAX)
}

fn day_of(ms: u64) -> u32 {
    hour_of(ms) / HOURS_A_DAY
}

/// Returns the key of a sum, as it is on disk.
fn stored(key: &SumKey) -> StoredKey<'_> {
    let (tenant, user, lease) = names(&key.subject);
    (key.time, tenant, user, lease, &key.kind)
}

/// Returns tenant, user and lease of a subject, as they are on disk.
fn names(subject: &Subject) -> (&str, &str, u64) {
    match subject {
        Subject::Lease(owner, lease) => (&owner.tenant, &owner.user, lease.0),
        Subject::Unknown => ("", "", 0),
        Subject::Devices => ("", "", DEVICES),
    }
}

fn subject(tenant: &str, user: &str, lease: u64) -> Subject {
    match (tenant, lease) {
        ("", DEVICES) => Subject::Devices,
        ("", _) => Subject::Unknown,
        _ => {
            let owner = Owner {
                tenant: tenant.into(),
                user: user.into(),
            };
            Subject::Lease(owner, LeaseId(lease))
        }
    }
}

fn sum_key((time, tenant, user, lease, kind): StoredKey<'_>) -> SumKey {
    SumKey {
        time,
        subject: subject(tenant, user, lease),
        kind: kind.into(),
    }
}

fn account(record: AccountRecord) -> Account {
    Account {
        subject: subject(&record.tenant, &record.user, record.lease),
        kind: record.kind.into(),
        counted: record.counted,
        counted_at: record.counted_at,
        unreported_us: 0,
        // What is on disk is recorded.
        ended_in: record.is_ended.then_some(0),
    }
}

fn record(account: &Account) -> AccountRecord {
    let (tenant, user, lease) = names(&account.subject);
    AccountRecord {
        tenant: tenant.into(),
        user: user.into(),
        lease,
        kind: (*account.kind).into(),
        counted: account.counted,
        counted_at: account.counted_at,
        is_ended: account.ended_in.is_some(),
    }
}

fn encode(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("numbers and texts can be encoded")
}

/// Returns the amount of a sum. One that this version cannot read counts as nothing.
fn amount(bytes: &[u8]) -> Amount {
    serde_json::from_slice(bytes).unwrap_or_default()
}
