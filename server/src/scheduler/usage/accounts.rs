//! The last report of each grant, and what a later one adds.
//!
//! A pure data structure: the time is an argument, and what is to be written is returned. A report has
//! sums since the grant, so a lost one does no harm, and a repeated one adds nothing.

use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    ops::Range,
    sync::Arc,
};

use tensord_proto::grant::GrantNumber;

use super::amount::{Amount, HOUR_MS, MAX_SPAN_MS, Subject, SumKey, by_hours};
use crate::scheduler::access::UnixMillis;

/// How long the last report of a grant is kept that the worker does not repeat. A worker that is cut off
/// for longer and then reports again is counted twice, from the grant on.
const SILENCE_MS: u64 = MAX_SPAN_MS;

/// How much of a device's latest work a report may lack, which the next report then has, in microseconds: the
/// process of a lease reports to its worker four times a second, and may wait for a core.
const MAX_UNREPORTED_US: u64 = 2_000_000;

/// Most grants of a worker. Beyond that, the one with the oldest report is forgotten: more than a worker
/// has and remembers.
const MAX_PER_WORKER: usize = 8192;

/// Most grants of all workers: a worker gets another id with each start, so the bound for each does not
/// bound their sum.
const MAX_ACCOUNTS: usize = 65_536;

/// How many accounts are forgotten at once when there are [`MAX_ACCOUNTS`], as all must be looked at to
/// choose them.
const FORGOTTEN_AT_ONCE: usize = MAX_ACCOUNTS / 16;

/// Most sums by lease that wait for the disk. Beyond that, sums are by tenant and user only.
const MAX_SUMS: usize = 100_000;

/// A grant of a worker's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct AccountKey {
    /// The worker's id, which is another one after each start.
    pub(super) worker: u64,
    pub(super) device: u32,
    /// Zero: the device itself, for all leases.
    pub(super) grant: GrantNumber,
}

impl AccountKey {
    /// Returns the key of a device itself.
    pub(super) fn of_device(worker: u64, device: u32) -> Self {
        Self {
            worker,
            device,
            grant: GrantNumber::ZERO,
        }
    }

    /// Returns a key that sorts before all others of a worker.
    fn first_of(worker: u64) -> Self {
        Self::of_device(worker, 0)
    }
}

/// The last report of a grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Account {
    pub(super) subject: Subject,
    pub(super) kind: Arc<str>,
    /// What was counted so far.
    pub(super) counted: Amount,
    /// When that was, in milliseconds since 1970.
    pub(super) counted_at: u64,
    /// Time before that in which the device may have worked for the grant without a report that says
    /// so yet, in microseconds: at most [`MAX_UNREPORTED_US`].
    pub(super) unreported_us: u64,
    /// If the grant is released: the number of the changes that have its final report.
    pub(super) ended_in: Option<u64>,
}

/// What a worker reports of a grant.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reported {
    /// The sum since the grant.
    pub(super) amount: Amount,
    /// Whether the grant is released.
    pub(super) is_final: bool,
}

/// Changes to write, all of them or none.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Changes {
    /// Higher than that of earlier changes.
    pub(super) number: u64,
    /// What is to be added to sums.
    pub(super) sums: BTreeMap<SumKey, Amount>,
    /// The new last reports; `None`: forgotten.
    pub(super) accounts: BTreeMap<AccountKey, Option<Account>>,
}

impl Changes {
    /// Returns whether there is nothing to write.
    pub(super) fn is_empty(&self) -> bool {
        self.sums.is_empty() && self.accounts.is_empty()
    }

    /// Adds changes that follow these.
    pub(super) fn append(&mut self, later: Self) {
        for (key, amount) in later.sums {
            self.sums.entry(key).or_default().add(&amount);
        }
        self.accounts.extend(later.accounts);
        self.number = self.number.max(later.number);
        if self.sums.len() > MAX_SUMS {
            self.drop_leases();
        }
    }

    /// Keeps the sums, and drops which leases they are of.
    fn drop_leases(&mut self) {
        for (mut key, amount) in std::mem::take(&mut self.sums) {
            key.subject = key.subject.without_lease();
            self.sums.entry(key).or_default().add(&amount);
        }
    }

    /// Adds an amount that was used in a time, in milliseconds since 1970.
    pub(super) fn add(
        &mut self,
        subject: &Subject,
        kind: &Arc<str>,
        time_ms: Range<u64>,
        amount: &Amount,
    ) {
        for (time, part) in by_hours(time_ms.start, time_ms.end, amount) {
            let key = SumKey {
                time,
                subject: subject.clone(),
                kind: kind.clone(),
            };
            self.sums.entry(key).or_default().add(&part);
        }
    }
}

/// The last reports of all grants.
#[derive(Debug)]
pub(super) struct Accounts {
    accounts: BTreeMap<AccountKey, Account>,
    /// The number of accounts of each worker.
    sizes: HashMap<u64, usize>,
    /// When accounts are looked for that are too old. At first zero, which is long ago.
    expire_at: u64,
}

impl Accounts {
    /// Creates the accounts with what an earlier scheduler has written.
    pub(super) fn new(known: BTreeMap<AccountKey, Account>) -> Self {
        let mut sizes = HashMap::new();
        for key in known.keys() {
            *sizes.entry(key.worker).or_default() += 1;
        }
        Self {
            accounts: known,
            sizes,
            expire_at: 0,
        }
    }

    /// Records whose lease has got a device. Does nothing if the grant is known.
    pub(super) fn begin(
        &mut self,
        now: UnixMillis,
        key: AccountKey,
        subject: Subject,
        kind: &str,
        changes: &mut Changes,
    ) {
        if self.accounts.contains_key(&key) {
            return;
        }
        let account = Account {
            subject,
            kind: kind.into(),
            counted: Amount::default(),
            counted_at: now.0,
            unreported_us: 0,
            ended_in: None,
        };
        self.insert(now, key, account, changes);
    }

    fn insert(
        &mut self,
        now: UnixMillis,
        key: AccountKey,
        account: Account,
        changes: &mut Changes,
    ) {
        self.make_room(now, key.worker, changes);
        changes.accounts.insert(key, Some(account.clone()));
        self.accounts.insert(key, account);
        *self.sizes.entry(key.worker).or_default() += 1;
    }

    /// Returns whether there is an account of a grant.
    pub(super) fn contains(&self, key: &AccountKey) -> bool {
        self.accounts.contains_key(key)
    }

    /// Counts what a report adds, but no more than was possible since the earlier report. `subject` finds
    /// for whom, if that is not known from the grant; without an answer, nothing is counted until the grant
    /// is released, as a client may yet claim the lease. Returns whether the grant has ended by this report.
    pub(super) fn observe(
        &mut self,
        now: UnixMillis,
        key: AccountKey,
        reported: Reported,
        kind: &str,
        subject: impl FnOnce() -> Option<Subject>,
        changes: &mut Changes,
    ) -> bool {
        let Reported { amount, is_final } = reported;
        if !self.accounts.contains_key(&key) {
            let unknown = || is_final.then_some(Subject::Unknown);
            let Some(subject) = subject().or_else(unknown) else {
                return false;
            };
            // The grant is as old as the lease has had the device, or older if it has a share, for which only a
            // part of the time counts. What is longer ago than a week, or cannot be, is never counted.
            let age_ms = (amount.held_us.max(amount.busy_us) / 1000).min(MAX_SPAN_MS);
            let account = Account {
                subject,
                kind: kind.into(),
                counted: amount.since(&amount.at_most_in(age_ms, 0)),
                counted_at: now.0.saturating_sub(age_ms),
                unreported_us: 0,
                ended_in: None,
            };
            self.insert(now, key, account, changes);
        }
        let Some(account) = self.accounts.get_mut(&key) else {
            return false;
        };
        let elapsed_ms = now.0.saturating_sub(account.counted_at);
        let added = amount
            .since(&account.counted)
            .at_most_in(elapsed_ms, account.unreported_us);
        account.unreported_us = account
            .unreported_us
            .saturating_add(elapsed_ms.saturating_mul(1000))
            .saturating_sub(added.busy_us)
            .min(MAX_UNREPORTED_US);
        let has_ended = is_final && account.ended_in.is_none();
        if added.is_zero() && !has_ended {
            // A device without work needs no write, and is not forgotten.
            account.counted_at = now.0;
            return false;
        }
        let (subject, kind) = (&account.subject, &account.kind);
        changes.add(subject, kind, account.counted_at..now.0, &added);
        // The rest counts with later reports, as far as it is possible then: the earlier report may have
        // been under way for longer than this one.
        account.counted.add(&added);
        account.counted_at = now.0;
        if has_ended {
            account.ended_in = Some(changes.number);
        }
        changes.accounts.insert(key, Some(account.clone()));
        has_ended
    }

    /// Returns what stands for those of the `released` grants whose final report is on disk. `written` is the
    /// number of the last changes that are.
    pub(super) fn recorded<'a, T>(
        &'a self,
        released: &'a BTreeMap<AccountKey, T>,
        written: u64,
    ) -> impl Iterator<Item = &'a T> {
        let recorded = released
            .iter()
            .filter(move |(key, _)| self.is_recorded(**key, written));
        recorded.map(|(_, it)| it)
    }

    /// Forgets the grants of a worker whose final report is on disk, and which the worker has forgotten:
    /// they are not among those that it still reports as `released`.
    pub(super) fn forget_released<T>(
        &mut self,
        worker: u64,
        released: &BTreeMap<AccountKey, T>,
        written: u64,
        changes: &mut Changes,
    ) {
        let of_worker = self.of_worker(worker);
        let gone = of_worker.filter(|key| !released.contains_key(key));
        let gone: Vec<_> = gone.filter(|key| self.is_recorded(*key, written)).collect();
        for key in gone {
            self.forget(key, changes);
        }
    }

    /// Forgets grants whose workers have not reported them for a long time. Must be called often: if it
    /// was not for an hour, or the clock was set, workers may have had no time to report, and nothing is
    /// forgotten for an hour.
    pub(super) fn expire(&mut self, now: UnixMillis, changes: &mut Changes) {
        if now.0 < self.expire_at && self.expire_at - now.0 <= HOUR_MS {
            return;
        }
        let is_late = now.0 < self.expire_at || now.0 - self.expire_at > HOUR_MS;
        self.expire_at = now.0 + HOUR_MS;
        if is_late {
            return;
        }
        let is_old = |account: &Account| account.counted_at.saturating_add(SILENCE_MS) < now.0;
        let old = self.accounts.iter().filter(|(_, account)| is_old(account));
        let old: Vec<_> = old.map(|(key, _)| *key).collect();
        for key in old {
            self.forget(key, changes);
        }
    }

    fn is_recorded(&self, key: AccountKey, written: u64) -> bool {
        let ended_in = self.accounts.get(&key).and_then(|account| account.ended_in);
        ended_in.is_some_and(|number| number <= written)
    }

    fn of_worker(&self, worker: u64) -> impl Iterator<Item = AccountKey> {
        let from = self.accounts.range(AccountKey::first_of(worker)..);
        let of_worker = from.take_while(move |(key, _)| key.worker == worker);
        of_worker.map(|(key, _)| *key)
    }

    fn make_room(&mut self, now: UnixMillis, worker: u64, changes: &mut Changes) {
        if self.accounts.len() >= MAX_ACCOUNTS {
            self.forget_oldest(now, changes);
        }
        if self
            .sizes
            .get(&worker)
            .is_none_or(|size| *size < MAX_PER_WORKER)
        {
            return;
        }
        let counted_at = |key: &AccountKey| self.accounts.get(key).map(|it| it.counted_at);
        if let Some(oldest) = self.of_worker(worker).min_by_key(counted_at) {
            self.forget(oldest, changes);
        }
    }

    /// Forgets accounts: the released ones first that no worker has reported for an hour, and then those with
    /// the oldest reports. One that is reported again would be counted twice.
    fn forget_oldest(&mut self, now: UnixMillis, changes: &mut Changes) {
        let rank = |account: &Account| {
            let is_reported = account.counted_at.saturating_add(HOUR_MS) >= now.0;
            let is_over = account.ended_in.is_some() && !is_reported;
            (!is_over, account.counted_at)
        };
        let accounts = self.accounts.iter();
        let mut ranked: Vec<_> = accounts.map(|(key, it)| (rank(it), *key)).collect();
        ranked.sort_unstable();
        for (_, key) in ranked.into_iter().take(FORGOTTEN_AT_ONCE) {
            self.forget(key, changes);
        }
    }

    fn forget(&mut self, key: AccountKey, changes: &mut Changes) {
        self.accounts.remove(&key);
        if let Entry::Occupied(mut size) = self.sizes.entry(key.worker) {
            *size.get_mut() -= 1;
            if *size.get() == 0 {
                size.remove();
            }
        }
        changes.accounts.insert(key, None);
    }
}
