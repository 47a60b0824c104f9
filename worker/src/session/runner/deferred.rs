//! Work that is put aside, and what each piece of it waits for.
//!
//! A piece waits for the values of tensors that are on their way, for pieces that
//! make what it uses, and, if it takes a tensor away, for pieces that still use it.
//! Each event frees those that waited for it and touches no others, so a long queue
//! behind one value costs no more than a short one.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use burn_ir::TensorId;

use super::schedule::Task;

/// Work that waits.
#[derive(Default)]
pub(super) struct Deferred {
    /// By number, in the order it came.
    waiting: BTreeMap<u64, DeferredTask>,
    next: u64,
    /// Those that wait for nothing any more.
    ready: BTreeSet<u64>,
    /// Who makes a tensor, and who uses it.
    makers: HashMap<TensorId, u64>,
    users: HashMap<TensorId, Vec<u64>>,
    /// Who waits for a value.
    values: HashMap<TensorId, Vec<u64>>,
    /// Syncs, which wait for all that came before: the number that the next piece of
    /// work had then, their op's number, and the request.
    syncs: VecDeque<(u64, u64, u64)>,
}

struct DeferredTask {
    /// `None` while it is being looked at.
    task: Option<Task>,
    made: Vec<TensorId>,
    used: Vec<TensorId>,
    /// Events that it waits for.
    events: usize,
    /// Who waits for it.
    others: Vec<u64>,
}

impl Deferred {
    pub(super) fn len(&self) -> usize {
        self.waiting.len() + self.syncs.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether `task` uses what waits to be made, or takes away what is still to be
    /// used.
    pub(super) fn must_follow(&self, task: &Task) -> bool {
        if self.waiting.is_empty() {
            return false;
        }
        let mut held = false;
        task.visit_used(&mut |id, takes_away| {
            held |= self.makers.contains_key(&id) || takes_away && self.users.contains_key(&id);
        });
        held
    }

    /// Puts `task` aside, behind all others. `on_the_way` says which values are;
    /// `behind` is a tensor whose maker goes first.
    pub(super) fn put(
        &mut self,
        task: Task,
        behind: Option<TensorId>,
        on_the_way: impl Fn(TensorId) -> bool,
    ) {
        let number = self.next;
        self.next += 1;
        let (mut made, mut used) = (Vec::new(), Vec::new());
        task.visit_made(&mut |id| made.push(id));
        task.visit_used(&mut |id, _| used.push(id));
        self.waiting.insert(
            number,
            DeferredTask {
                task: None,
                made: Vec::new(),
                used: Vec::new(),
                events: 0,
                others: Vec::new(),
            },
        );
        self.wait(number, task, behind, on_the_way);
        for id in &made {
            self.makers.insert(*id, number);
        }
        for id in &used {
            self.users.entry(*id).or_default().push(number);
        }
        if let Some(waiting) = self.waiting.get_mut(&number) {
            (waiting.made, waiting.used) = (made, used);
        }
    }

    /// Puts one that was ready back in its place, as it has to wait again.
    pub(super) fn put_back(
        &mut self,
        number: u64,
        task: Task,
        behind: Option<TensorId>,
        on_the_way: impl Fn(TensorId) -> bool,
    ) {
        self.wait(number, task, behind, on_the_way);
    }

    fn wait(
        &mut self,
        number: u64,
        task: Task,
        behind: Option<TensorId>,
        on_the_way: impl Fn(TensorId) -> bool,
    ) {
        let (mut others, mut values) = (Vec::new(), Vec::new());
        task.visit_used(&mut |id, takes_away| {
            match self.makers.get(&id) {
                Some(maker) => others.push(*maker),
                None if on_the_way(id) => values.push(id),
                None => {}
            }
            if takes_away {
                others.extend(self.users.get(&id).into_iter().flatten());
            }
        });
        others.extend(behind.and_then(|id| self.makers.get(&id)));
        // What came later does not go first, and nothing waits for itself.
        others.retain(|other| *other < number);
        let events = others.len() + values.len();
        for other in others {
            if let Some(other) = self.waiting.get_mut(&other) {
                other.others.push(number);
            }
        }
        for id in values {
            self.values.entry(id).or_default().push(number);
        }
        if let Some(waiting) = self.waiting.get_mut(&number) {
            (waiting.task, waiting.events) = (Some(task), events);
        }
        if events == 0 {
            self.ready.insert(number);
        }
    }

    /// The first piece of work that waits for nothing any more, with its number.
    /// Must be followed by [`done`](Self::done) or [`put_back`](Self::put_back).
    pub(super) fn next_ready(&mut self) -> Option<(u64, Task)> {
        let number = self.ready.pop_first()?;
        let task = self.waiting.get_mut(&number)?.task.take()?;
        Some((number, task))
    }

    /// The first that is ready, if there is one.
    pub(super) fn peek_ready(&self) -> Option<&Task> {
        self.waiting.get(self.ready.first()?)?.task.as_ref()
    }

    /// A piece of work was carried out.
    pub(super) fn done(&mut self, number: u64) {
        let Some(waiting) = self.waiting.remove(&number) else {
            return;
        };
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
        self.free(waiting.others);
    }

    /// The value of `id` is there, or will never be.
    pub(super) fn settled(&mut self, id: TensorId) {
        let who = self.values.remove(&id).unwrap_or_default();
        self.free(who);
    }

    fn free(&mut self, who: Vec<u64>) {
        for number in who {
            if let Some(waiting) = self.waiting.get_mut(&number) {
                waiting.events -= 1;
                if waiting.events == 0 {
                    self.ready.insert(number);
                }
            }
        }
    }

    /// Puts a sync aside.
    pub(super) fn put_sync(&mut self, op_number: u64, request: u64) {
        self.syncs.push_back((self.next, op_number, request));
    }

    /// The first sync before which nothing waits, if `is_over` says that nothing is
    /// on the way of what came up to its op.
    pub(super) fn next_sync(&mut self, is_over: impl Fn(u64) -> bool) -> Option<(u64, u64)> {
        let (number, op_number, request) = *self.syncs.front()?;
        let first = self.waiting.first_key_value().map(|(first, _)| *first);
        if first.is_some_and(|first| first < number) || !is_over(op_number) {
            return None;
        }
        self.syncs.pop_front();
        Some((op_number, request))
    }
}
