use std::collections::BTreeSet;

use proptest::{collection::vec, prelude::*};

use super::*;

/// A queue of numbered requests, at a time in ms.
struct Check {
    queue: BatchQueue<usize>,
    start: Instant,
}

impl Check {
    fn new(max_size: usize, max_delay: u64, max_queue: usize) -> Self {
        Self {
            queue: BatchQueue::new(Batching {
                max_size,
                max_delay: Duration::from_millis(max_delay),
                max_queue,
            }),
            start: Instant::now(),
        }
    }

    fn at(&self, ms: u64) -> Instant {
        self.start + Duration::from_millis(ms)
    }

    /// Returns a request with its deadline a second later.
    fn request(&self, ms: u64, number: usize, rows: usize, columns: usize) -> Waiting<usize> {
        Waiting {
            request: number,
            rows,
            row_shapes: vec![vec![columns]],
            since: self.at(ms),
            deadline: self.at(ms + 1000),
            is_alone: false,
        }
    }

    fn push(&mut self, ms: u64, number: usize, rows: usize, columns: usize) {
        let request = self.request(ms, number, rows, columns);
        self.queue.push(request);
    }

    /// Returns the numbers of the next batch.
    fn take(&mut self, ms: u64, is_idle: bool) -> Vec<usize> {
        match self.queue.take(self.at(ms), is_idle) {
            Next::Batch(batch) => batch.iter().map(|it| it.request).collect(),
            Next::At(_) | Next::Nothing => Vec::new(),
        }
    }

    /// Returns after how many ms there is a batch for an idle replica, if it is known.
    fn next_at(&mut self, ms: u64) -> Option<u128> {
        match self.queue.take(self.at(ms), true) {
            Next::At(at) => Some((at - self.start).as_millis()),
            Next::Batch(_) | Next::Nothing => None,
        }
    }

    /// A batch of so many rows was computed within some ms.
    fn computed(&mut self, ms: u64, padded_rows: usize, took_ms: u64) {
        let now = self.at(ms);
        let took = Duration::from_millis(took_ms);
        self.queue.computed(now, padded_rows, took);
    }

    /// Returns why there is no room for a row at a time, with a deadline: `Some(true)` if the queue is full.
    fn refusal(&self, ms: u64, deadline: u64) -> Option<bool> {
        let refused = self.queue.has_room(self.at(ms), 1, self.at(deadline)).err();
        refused.map(|full| full.is_full)
    }
}

#[test]
fn an_idle_replica_waits_for_more_until_the_delay_is_over() {
    let mut check = Check::new(8, 5, 100);
    assert_eq!(check.next_at(0), None);
    check.push(0, 1, 1, 4);
    check.push(3, 2, 1, 4);
    assert_eq!(check.next_at(4), Some(5));
    assert_eq!(check.take(5, true), [1, 2]);
    assert_eq!(check.queue.rows(), 0);
}

#[test]
fn a_full_batch_waits_for_nothing_and_goes_to_a_replica_that_computes() {
    let mut check = Check::new(4, 5, 100);
    for number in 1..=6 {
        check.push(0, number, 1, 4);
    }
    assert_eq!(check.take(0, false), [1, 2, 3, 4]);
    assert!(check.take(9, false).is_empty());
    assert_eq!(check.take(9, true), [5, 6]);
}

#[test]
fn a_batch_is_full_if_the_next_request_does_not_fit() {
    let mut check = Check::new(4, 5, 100);
    check.push(0, 1, 3, 4);
    check.push(0, 2, 2, 4);
    check.push(0, 3, 1, 4);
    // The third fits, but the second is not passed.
    assert_eq!(check.take(0, false), [1]);
    assert_eq!(check.take(5, true), [2, 3]);
}

#[test]
fn requests_of_different_shapes_are_not_put_together() {
    let mut check = Check::new(2, 5, 100);
    check.push(0, 1, 1, 4);
    check.push(0, 2, 1, 8);
    check.push(0, 3, 1, 8);
    // The first full batch, although another request is first.
    assert_eq!(check.take(0, false), [2, 3]);
    assert_eq!(check.take(5, true), [1]);
}

#[test]
fn full_batches_of_another_shape_do_not_keep_the_first_waiting_for_ever() {
    let mut check = Check::new(2, 5, 100);
    check.push(0, 1, 1, 4);
    for number in 2..=5 {
        check.push(0, number, 1, 8);
    }
    assert_eq!(check.take(4, false), [2, 3]);
    assert_eq!(check.take(5, false), [1]);
    assert_eq!(check.take(5, false), [4, 5]);
}

#[test]
fn a_request_that_must_be_alone_is() {
    let mut check = Check::new(8, 5, 100);
    let mut suspects = vec![check.request(0, 1, 1, 4), check.request(0, 2, 1, 4)];
    suspects.iter_mut().for_each(|it| it.is_alone = true);
    check.push(0, 3, 1, 4);
    check.push(0, 4, 1, 4);
    check.queue.put_back(suspects);
    assert_eq!(check.take(0, false), [1]);
    assert_eq!(check.take(0, false), [2]);
    assert_eq!(check.take(5, true), [3, 4]);
}

#[test]
fn requests_that_are_late_or_given_up_are_removed() {
    let mut check = Check::new(8, 0, 100);
    check.push(0, 1, 2, 4);
    check.push(500, 2, 2, 4);
    check.push(500, 3, 2, 4);
    check
        .queue
        .remove_dead(check.at(1000), |number| *number == 2);
    assert_eq!(check.queue.rows(), 2);
    assert_eq!(check.take(1000, true), [3]);
}

#[test]
fn what_would_wait_beyond_its_deadline_is_refused() {
    let mut check = Check::new(2, 5, 8);
    check.push(0, 0, 1, 4);
    // Nothing is known of how long batches take.
    assert_eq!(check.refusal(0, 1), None);
    check.queue.set_replicas(1);
    check.computed(0, 2, 100);
    assert_eq!(check.refusal(0, 100), None);
    assert_eq!(check.refusal(0, 99), Some(false));
    for number in 1..4 {
        check.push(0, number, 1, 4);
    }
    // Three batches, of which two replicas compute two at a time.
    assert_eq!(check.refusal(0, 299), Some(false));
    check.queue.set_replicas(2);
    assert_eq!(check.refusal(0, 299), None);
    for number in 4..8 {
        check.push(0, number, 1, 4);
    }
    assert_eq!(check.refusal(0, 10_000), Some(true));
}

#[test]
fn small_batches_do_not_count_once_a_full_one_was_computed() {
    let mut check = Check::new(4, 5, 100);
    check.push(0, 0, 1, 4);
    check.computed(0, 1, 10);
    check.computed(0, 4, 100);
    check.computed(0, 1, 10);
    assert_eq!(check.refusal(0, 99), Some(false));
    assert_eq!(check.refusal(0, 100), None);
}

#[test]
fn a_batch_takes_very_long_by_what_full_ones_take() {
    let mut check = Check::new(4, 5, 100);
    let patience = |check: &Check| check.queue.patience().as_millis();
    assert_eq!(patience(&check), 10_000);
    check.queue.full_took(Duration::from_millis(10));
    assert_eq!(patience(&check), 250);
    let mut check = Check::new(4, 5, 100);
    check.computed(0, 4, 100);
    assert_eq!(patience(&check), 800);
    // Smaller ones are no measure.
    check.computed(0, 1, 10);
    assert_eq!(patience(&check), 800);
    // One that took very long counts as eight times the usual time, with a weight of a fifth.
    check.computed(0, 4, 60_000);
    assert_eq!(patience(&check), 1920);
}

#[test]
fn one_slow_batch_keeps_nobody_out_for_ever() {
    let mut check = Check::new(4, 5, 100);
    check.computed(0, 4, 60_000);
    // The first that waits is always accepted.
    assert_eq!(check.refusal(0, 10), None);
    check.push(0, 0, 1, 4);
    assert_eq!(check.refusal(0, 10), Some(false));
    assert_eq!(check.refusal(5000, 5010), None);
    // What was measured before counts no more.
    check.computed(5000, 1, 7);
    assert_eq!(check.refusal(5000, 5007), None);
    assert_eq!(check.refusal(5000, 5006), Some(false));
}

#[test]
fn batches_have_few_sizes() {
    for (rows, size) in [(1, 1), (3, 4), (5, 8), (8, 8), (9, 12), (12, 12)] {
        assert_eq!(padded(rows, 12), size, "{rows}");
    }
}

#[derive(Debug, Clone)]
enum Op {
    Push {
        rows: usize,
        columns: usize,
    },
    Take {
        is_idle: bool,
    },
    /// The last batch failed, or its replica was lost.
    PutBack {
        is_alone: bool,
    },
    Wait {
        ms: u64,
    },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (1..=4_usize, 1..=3_usize).prop_map(|(rows, columns)| Op::Push { rows, columns }),
        3 => any::<bool>().prop_map(|is_idle| Op::Take { is_idle }),
        1 => any::<bool>().prop_map(|is_alone| Op::PutBack { is_alone }),
        2 => (0..8_u64).prop_map(|ms| Op::Wait { ms }),
    ]
}

proptest! {
    /// Every request is in one batch, with others of its shape and no more rows than a batch may have; and an idle
    /// replica gets all of them once they have waited.
    #[test]
    fn requests_are_neither_lost_nor_repeated(ops in vec(op(), 1..100)) {
        let mut check = Check::new(4, 5, usize::MAX);
        let (mut now, mut next, mut last) = (0, 0, Vec::new());
        let mut waiting = BTreeSet::new();
        for op in ops {
            match op {
                Op::Push { rows, columns } => {
                    check.push(now, next, rows, columns);
                    waiting.insert(next);
                    next += 1;
                }
                Op::Take { is_idle } => {
                    if let Next::Batch(batch) = check.queue.take(check.at(now), is_idle) {
                        check_batch(&batch, &mut waiting);
                        last = batch;
                    }
                }
                Op::PutBack { is_alone } => {
                    last.iter_mut().for_each(|it| it.is_alone |= is_alone);
                    waiting.extend(last.iter().map(|it| it.request));
                    check.queue.put_back(std::mem::take(&mut last));
                }
                Op::Wait { ms } => now += ms,
            }
            let rows: usize = check.queue.waiting.iter().map(|it| it.rows).sum();
            prop_assert_eq!(check.queue.rows(), rows);
        }
        while !waiting.is_empty() {
            let Next::Batch(batch) = check.queue.take(check.at(now + 5), true) else {
                panic!("{waiting:?} wait, and there is no batch");
            };
            check_batch(&batch, &mut waiting);
        }
        prop_assert_eq!(check.queue.rows(), 0);
    }
}

/// Checks a batch and removes its requests from those that wait.
fn check_batch(batch: &[Waiting<usize>], waiting: &mut BTreeSet<usize>) {
    assert!(!batch.is_empty());
    let rows: usize = batch.iter().map(|it| it.rows).sum();
    assert!(rows <= 4);
    assert!(batch.len() == 1 || batch.iter().all(|it| !it.is_alone));
    assert!(batch.iter().all(|it| it.row_shapes == batch[0].row_shapes));
    assert!(batch.is_sorted_by_key(|it| it.request));
    for it in batch {
        assert!(waiting.remove(&it.request), "{} is not waiting", it.request);
    }
}
