//! Deferred work, and what each task waits for.
//!
//! A task waits for pending values, for earlier tasks that make a tensor that it uses,
//! and, if it consumes a tensor, for earlier tasks that still use that tensor. Each event
//! visits only the tasks that waited for it, so the cost of an event does not depend on
//! the length of the queue.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use burn_ir::TensorId;

use super::{SyncRequest, plan::Task};

/// Maximum number of deferred tasks and syncs. At the limit all other work waits.
const MAX_DEFERRED: usize = 8192;

/// Maximum size of deferred tasks, as [`Task::plain_bytes`] counts it: more than [`MAX_DEFERRED`] usual ops have. The
/// last one may exceed it.
const MAX_DEFERRED_BYTES: usize = 1 << 20;

/// Deferred tasks and syncs.
#[derive(Default)]
pub(super) struct Deferred {
    /// Tasks by number, in the order they were deferred.
    waiting: BTreeMap<u64, DeferredTask>,
    /// Size of these tasks.
    waiting_bytes: usize,
    next: u64,
    /// Numbers of the tasks that no longer wait.
    ready: BTreeSet<u64>,
    /// The task that makes a tensor, and the tasks that use it.
    makers: HashMap<TensorId, u64>,
    users: HashMap<TensorId, Vec<u64>>,
    /// The tasks that wait for a pending value.
    values: HashMap<TensorId, Vec<u64>>,
    /// Syncs, which wait for all work before them: the number of the next task at the
    /// time, the op number, and the request.
    syncs: VecDeque<(u64, u64, SyncRequest)>,
}

struct DeferredTask {
    /// `None` while the caller of [`Deferred::next_ready`] has the task.
    task: Option<Task>,
    plain_bytes: usize,
    made: Vec<TensorId>,
    used: Vec<TensorId>,
    /// Number of events that the task waits for.
    blockers: usize,
    /// Tasks that wait for this one.
    dependents: Vec<u64>,
}

/// Returns each tensor that `task` uses once, and whether the task consumes it. An op may mention a tensor any number
/// of times.
fn used_once(task: &Task) -> Vec<(TensorId, bool)> {
    let mut used = Vec::new();
    task.visit_used(&mut |id, is_consumed| used.push((id, is_consumed)));
    // The mention that consumes a tensor comes first, and stays.
    used.sort_unstable_by_key(|(id, is_consumed)| (id.value(), !is_consumed));
    used.dedup_by_key(|(id, _)| *id);
    used
}

impl Deferred {
    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether no more may be deferred.
    pub(super) fn is_full(&self) -> bool {
        self.len() >= MAX_DEFERRED || self.waiting_bytes >= MAX_DEFERRED_BYTES
    }

    fn len(&self) -> usize {
        self.waiting.len() + self.syncs.len()
    }

    /// Returns whether `task` uses a tensor that a deferred task makes, or consumes one
    /// that a deferred task uses.
    pub(super) fn must_follow(&self, task: &Task) -> bool {
        if self.waiting.is_empty() {
            return false;
        }
        let mut held = false;
        task.visit_used(&mut |id, is_consumed| {
            held |= self.makers.contains_key(&id) || is_consumed && self.users.contains_key(&id);
        });
        held
    }

    /// Defers `task`, behind all others. `is_pending` returns whether a value is pending.
    /// The task that makes the tensor `after` must run first.
    pub(super) fn put(
        &mut self,
        task: Task,
        after: Option<TensorId>,
        is_pending: impl Fn(TensorId) -> bool,
    ) {
        let number = self.next;
        self.next += 1;
        let mut made = Vec::new();
        task.visit_made(&mut |id| made.push(id));
        let used = used_once(&task);
        let plain_bytes = task.plain_bytes();
        self.waiting_bytes += plain_bytes;
        self.waiting.insert(
            number,
            DeferredTask {
                task: None,
                plain_bytes,
                made: Vec::new(),
                used: Vec::new(),
                blockers: 0,
                dependents: Vec::new(),
            },
        );
        self.wait(number, task, &used, after, is_pending);
        for id in &made {
            self.makers.insert(*id, number);
        }
        for &(id, is_consumed) in &used {
            let users = self.users.entry(id).or_default();
            if is_consumed {
                // It waits for the earlier users, so later tasks need not wait for them.
                users.clear();
            }
            users.push(number);
        }
        if let Some(waiting) = self.waiting.get_mut(&number) {
            waiting.made = made;
            waiting.used = used.into_iter().map(|(id, _)| id).collect();
        }
    }

    /// Defers a task once more, under its old number: [`next_ready`](Self::next_ready)
    /// returned it, but it must still wait. The arguments are as for [`put`](Self::put).
    pub(super) fn put_back(
        &mut self,
        number: u64,
        task: Task,
        after: Option<TensorId>,
        is_pending: impl Fn(TensorId) -> bool,
    ) {
        let used = used_once(&task);
        self.wait(number, task, &used, after, is_pending);
    }

    /// Lets a task wait for what it needs. `used` has the tensors that it [uses](used_once).
    fn wait(
        &mut self,
        number: u64,
        task: Task,
        used: &[(TensorId, bool)],
        after: Option<TensorId>,
        is_pending: impl Fn(TensorId) -> bool,
    ) {
        let (mut dependents, mut values) = (Vec::new(), Vec::new());
        for &(id, is_consumed) in used {
            match self.makers.get(&id) {
                Some(maker) => dependents.push(*maker),
                None if is_pending(id) => values.push(id),
                None => {}
            }
            if is_consumed {
                dependents.extend(self.users.get(&id).into_iter().flatten());
            }
        }
        dependents.extend(after.and_then(|id| self.makers.get(&id)));
        // A task waits for earlier tasks only, not for later ones or itself.
        dependents.retain(|other| *other < number);
        dependents.sort_unstable();
        dependents.dedup();
        let blockers = dependents.len() + values.len();
        for other in dependents {
            if let Some(other) = self.waiting.get_mut(&other) {
                other.dependents.push(number);
            }
        }
        for id in values {
            self.values.entry(id).or_default().push(number);
        }
        if let Some(waiting) = self.waiting.get_mut(&number) {
            (waiting.task, waiting.blockers) = (Some(task), blockers);
        }
        if blockers == 0 {
            self.ready.insert(number);
        }
    }

    /// Returns the first task that no longer waits, with its number. [`done`](Self::done)
    /// or [`put_back`](Self::put_back) must follow.
    pub(super) fn next_ready(&mut self) -> Option<(u64, Task)> {
        let number = self.ready.pop_first()?;
        let task = self.waiting.get_mut(&number)?.task.take()?;
        Some((number, task))
    }

    /// Returns the first task that no longer waits, and leaves it in place.
    pub(super) fn peek_ready(&self) -> Option<&Task> {
        self.waiting.get(self.ready.first()?)?.task.as_ref()
    }

    /// Removes a task that was executed, and frees those that waited for it.
    pub(super) fn done(&mut self, number: u64) {
        let Some(waiting) = self.waiting.remove(&number) else {
            return;
        };
        self.waiting_bytes -= waiting.plain_bytes;
        for id in &waiting.made {
            self.makers.remove(id);
        }
        for id in &waiting.used {
            if let Some(users) = self.users.get_mut(id) {
                users.retain(|user| *user != number);
                if users.is_empty() {
                    self.users.remove(id);
                }
            }
        }
        self.free(waiting.dependents);
    }

    /// Frees the tasks that waited for the value of `id`, which has arrived or failed.
    pub(super) fn settled(&mut self, id: TensorId) {
        let tasks = self.values.remove(&id).unwrap_or_default();
        self.free(tasks);
    }

    fn free(&mut self, tasks: Vec<u64>) {
        for number in tasks {
            if let Some(waiting) = self.waiting.get_mut(&number) {
                waiting.blockers -= 1;
                if waiting.blockers == 0 {
                    self.ready.insert(number);
                }
            }
        }
    }

    /// Defers a sync.
    pub(super) fn put_sync(&mut self, op_number: u64, request: SyncRequest) {
        self.syncs.push_back((self.next, op_number, request));
    }

    /// Removes the first sync, and returns its op number and the request, if no earlier
    /// task is deferred and `is_over(op_number)` is true. `is_over` must return whether no
    /// result of an op up to that number is in flight.
    pub(super) fn next_sync(
        &mut self,
        is_over: impl Fn(u64) -> bool,
    ) -> Option<(u64, SyncRequest)> {
        let (number, op_number, request) = *self.syncs.front()?;
        let first = self.waiting.first_key_value().map(|(first, _)| *first);
        if first.is_some_and(|first| first < number) || !is_over(op_number) {
            return None;
        }
        self.syncs.pop_front();
        Some((op_number, request))
    }
}

#[cfg(test)]
mod tests {
    use burn_backend::DType;
    use burn_ir::{BaseOperationIr, CatOpIr, OperationIr, TensorIr, TensorStatus};
    use tensord_proto::codec::DecodedOp;

    use super::{super::plan::TaskKind, *};

    /// Size of a task in this test: four of them are the limit.
    const TASK_BYTES: u32 = (MAX_DEFERRED_BYTES / 4) as u32;

    /// Returns a task that mentions tensor 1 many times.
    fn mentions(out: u64, status: TensorStatus) -> Task {
        let tensor = |id, status| TensorIr {
            id: TensorId::new(id),
            shape: [2].into(),
            status,
            dtype: DType::F32,
        };
        let cat = BaseOperationIr::Cat(CatOpIr {
            tensors: vec![tensor(1, status); 20_000],
            dim: 0,
            out: tensor(out, TensorStatus::NotInit),
        });
        let decoded = DecodedOp {
            op: Box::new(OperationIr::BaseFloat(cat)),
            plain_bytes: TASK_BYTES,
        };
        Task {
            kind: TaskKind::Op(decoded),
            number: out,
        }
    }

    #[test]
    fn task_waits_once_for_each_task_and_value_however_often_it_mentions_a_tensor() {
        let mut deferred = Deferred::default();
        let value = TensorId::new(1);
        let statuses = [
            TensorStatus::ReadOnly,
            TensorStatus::ReadOnly,
            TensorStatus::ReadWrite,
            // No honest client uses a tensor again that it has consumed.
            TensorStatus::ReadWrite,
        ];
        for (out, status) in (10..).zip(statuses) {
            assert!(!deferred.is_full());
            deferred.put(mentions(out, status), None, |id| id == value);
        }
        let waiting = deferred.waiting.values();
        let waiting: Vec<_> = waiting
            .map(|it| (it.blockers, &it.dependents[..]))
            .collect();
        let expected: [(usize, &[u64]); 4] = [(1, &[2]), (1, &[2]), (3, &[3]), (2, &[])];
        assert_eq!(waiting, expected);
        assert_eq!(deferred.values[&value], [0, 1, 2, 3]);
        assert!(deferred.is_full(), "by the size of the tasks");
        deferred.settled(value);
        let mut done = Vec::new();
        while let Some((number, _)) = deferred.next_ready() {
            done.push(number);
            deferred.done(number);
            assert!(!deferred.is_full());
        }
        assert_eq!(done, [0, 1, 2, 3]);
        assert!(deferred.is_empty() && deferred.users.is_empty());
        assert_eq!(deferred.waiting_bytes, 0);
    }
}
