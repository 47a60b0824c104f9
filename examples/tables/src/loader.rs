//! Makes batches on a thread of its own, while the pool computes on earlier ones.

use std::{
    iter,
    sync::mpsc::{self, Receiver, TryRecvError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow};

/// Batches that may be ready at a time.
pub(crate) const READY: usize = 16;

/// What the loading took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Times {
    /// Time in which batches were made.
    pub(crate) making: Duration,
    /// Time in which the training waited for a batch that was not ready.
    pub(crate) waiting: Duration,
}

/// An iterator over the batches of another one.
pub(crate) struct Loader<T> {
    source: Source<T>,
    waiting: Duration,
}

enum Source<T> {
    /// The thread returns the time in which it made batches.
    Thread(Receiver<T>, JoinHandle<Duration>),
    /// Batches are made when they are wanted.
    Inline(Box<dyn Iterator<Item = T>>),
}

impl<T: Send + 'static> Loader<T> {
    /// Makes the batches on a thread, a few ahead.
    pub(crate) fn ahead(batches: impl Iterator<Item = T> + Send + 'static) -> Result<Self> {
        let (sender, receiver) = mpsc::sync_channel(READY);
        let thread = thread::Builder::new()
            .name("loader".into())
            .spawn(move || {
                let (mut batches, mut making) = (batches, Duration::ZERO);
                while let Some(batch) = timed(&mut making, || batches.next()) {
                    // An error means that the training has ended early.
                    if sender.send(batch).is_err() {
                        break;
                    }
                }
                making
            })?;
        Ok(Self {
            source: Source::Thread(receiver, thread),
            waiting: Duration::ZERO,
        })
    }

    /// Makes each batch when it is wanted, to compare.
    pub(crate) fn inline(batches: impl Iterator<Item = T> + 'static) -> Self {
        Self {
            source: Source::Inline(Box::new(batches)),
            waiting: Duration::ZERO,
        }
    }

    /// Ends the loading.
    pub(crate) fn finish(self) -> Result<Times> {
        let waiting = self.waiting;
        let making = match self.source {
            Source::Inline(_) => waiting,
            Source::Thread(receiver, thread) => {
                // The thread sends nothing more then.
                drop(receiver);
                thread
                    .join()
                    .map_err(|_| anyhow!("the thread that makes batches panicked"))?
            }
        };
        Ok(Times { making, waiting })
    }
}

impl<T> Iterator for Loader<T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        let Self { source, waiting } = self;
        match source {
            // A batch that is ready costs no waiting.
            Source::Thread(batches, _) => match batches.try_recv() {
                Ok(batch) => Some(batch),
                // An error means that there are no more: the thread has ended.
                Err(TryRecvError::Disconnected) => None,
                Err(TryRecvError::Empty) => timed(waiting, || batches.recv().ok()),
            },
            Source::Inline(batches) => timed(waiting, || batches.next()),
        }
    }
}

/// Runs `work` and adds the time that it takes to `total`.
fn timed<T>(total: &mut Duration, work: impl FnOnce() -> T) -> T {
    let begin = Instant::now();
    let result = work();
    *total += begin.elapsed();
    result
}

/// The batches of `rows` rows, in order, as the rows' numbers.
pub(crate) fn in_order(rows: usize, batch: usize) -> impl Iterator<Item = Vec<usize>> + Send {
    let begins = (0..rows).step_by(batch);
    begins.map(move |begin| (begin..rows.min(begin + batch)).collect())
}

/// The batches of `epochs` passes over `rows` rows, each in another order by `shuffle`.
pub(crate) fn shuffled(
    rows: usize,
    batch: usize,
    epochs: usize,
    mut shuffle: impl FnMut(&mut [usize]) + Send,
) -> impl Iterator<Item = Vec<usize>> + Send {
    let mut order: Vec<usize> = (0..rows).collect();
    iter::repeat_n((), epochs).flat_map(move |()| {
        shuffle(&mut order);
        let batches: Vec<Vec<usize>> = order.chunks(batch).map(<[usize]>::to_vec).collect();
        batches
    })
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    #[test]
    fn batches_arrive_in_order_with_and_without_a_thread() {
        for loader in [Loader::ahead(0..100).unwrap(), Loader::inline(0..100)] {
            assert!(loader.eq(0..100));
        }
    }

    #[test]
    fn only_a_few_batches_are_made_ahead_and_none_after_the_end() {
        let made = Arc::new(AtomicUsize::new(0));
        let count = made.clone();
        let mut loader = Loader::ahead((0..1000).inspect(move |_| {
            count.fetch_add(1, Ordering::SeqCst);
        }))
        .unwrap();
        assert_eq!(loader.next(), Some(0));
        // The thread ends here, although it has not sent all batches.
        loader.finish().unwrap();
        // The one that was taken, those that were ready, and one that was about to be sent.
        assert!((1..=READY + 2).contains(&made.load(Ordering::SeqCst)));
    }

    #[test]
    fn a_panic_of_the_loading_is_an_error() {
        let broken = iter::once(()).map(|()| -> u8 { panic!("a broken batch") });
        let mut loader = Loader::ahead(broken).unwrap();
        assert_eq!(loader.next(), None);
        assert!(loader.finish().is_err());
    }

    #[test]
    fn each_pass_has_every_row_once() {
        let batches: Vec<_> = shuffled(10, 4, 2, |order| order.rotate_left(3)).collect();
        assert_eq!(
            batches.iter().map(Vec::len).collect::<Vec<_>>(),
            [4, 4, 2, 4, 4, 2]
        );
        assert_eq!(batches[0], [3, 4, 5, 6]);
        assert_eq!(batches[3], [6, 7, 8, 9]);
        for pass in batches.chunks(3) {
            let mut rows = pass.concat();
            rows.sort_unstable();
            assert!(rows.into_iter().eq(0..10));
        }
        let batches: Vec<_> = in_order(5, 2).collect();
        assert_eq!(batches, [vec![0, 1], vec![2, 3], vec![4]]);
    }
}
