//! The losses of a training run, step by step, while it runs.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The loss of each step so far. Clones share the losses.
///
/// A run on several devices reports a loss for each device and step; [`by_step`] puts them in order.
#[derive(Clone, Debug, Default)]
pub struct Losses(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    values: Mutex<Vec<f64>>,
    added: Condvar,
}

impl Losses {
    pub(crate) fn push(&self, loss: f64) {
        self.lock().push(loss);
        self.0.added.notify_all();
    }

    /// Returns the number of losses so far.
    pub fn count(&self) -> usize {
        self.lock().len()
    }

    /// Returns the losses so far.
    pub fn values(&self) -> Vec<f64> {
        self.lock().clone()
    }

    /// Waits until there are more than `count` losses, or until `deadline`. Returns whether there
    /// are.
    pub fn wait_for_more(&self, count: usize, deadline: Instant) -> bool {
        let timeout = deadline.saturating_duration_since(Instant::now());
        let is_waiting = |values: &mut Vec<f64>| values.len() <= count;
        let waited = self
            .0
            .added
            .wait_timeout_while(self.lock(), timeout, is_waiting);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<f64>> {
        self.0.values.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Puts the losses of each step in order. A run on `devices` devices reports as many losses for each
/// step, and all of them before any of the next step, as its devices wait for each other there. Drops
/// those of a step that is not complete.
pub fn by_step(mut losses: Vec<f64>, devices: usize) -> Vec<f64> {
    losses.truncate(losses.len() - losses.len() % devices);
    for step in losses.chunks_mut(devices) {
        step.sort_by(f64::total_cmp);
    }
    losses
}

/// Returns the index of the first loss in which two runs differ by any bit, or the number of losses
/// of the shorter run if one is longer; `None` if they are identical.
pub fn first_difference(first: &[f64], second: &[f64]) -> Option<usize> {
    let differs = |(first, second): (&f64, &f64)| first.to_bits() != second.to_bits();
    let different = first.iter().zip(second).position(differs);
    different.or((first.len() != second.len()).then(|| first.len().min(second.len())))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn difference_of_one_bit_or_one_loss_is_found() {
        let next = f64::from_bits(1.0_f64.to_bits() + 1);
        let cases: [(&[f64], &[f64], _); 5] = [
            (&[], &[], None),
            (&[1.0, f64::NAN], &[1.0, f64::NAN], None),
            (&[2.0, 1.0, 3.0], &[2.0, next, 4.0], Some(1)),
            (&[2.0], &[2.0, 1.0], Some(1)),
            (&[0.0], &[-0.0], Some(0)),
        ];
        for (first, second, expected) in cases {
            assert_eq!(
                first_difference(first, second),
                expected,
                "{first:?} {second:?}"
            );
        }
    }

    #[test]
    fn losses_of_a_step_have_no_order() {
        let losses = vec![2.0, 1.0, -0.0, 0.0, f64::NAN, 4.0, 9.0];
        let ordered = by_step(losses.clone(), 2);
        let expected = [1.0, 2.0, -0.0, 0.0, 4.0, f64::NAN];
        assert_eq!(first_difference(&ordered, &expected), None, "{ordered:?}");
        assert_eq!(first_difference(&by_step(losses.clone(), 1), &losses), None);
    }

    #[test]
    fn wait_ends_with_the_next_loss_or_at_its_deadline() {
        let losses = Losses::default();
        assert!(!losses.wait_for_more(0, Instant::now()));
        let clone = losses.clone();
        let pushing = std::thread::spawn(move || clone.push(1.5));
        assert!(losses.wait_for_more(0, Instant::now() + Duration::from_secs(60)));
        pushing.join().unwrap();
        assert_eq!((losses.count(), losses.values()), (1, vec![1.5]));
    }
}
