//! Keeps the devices of a training at the same step, and ends it after the same one.
//!
//! Burn's strategy needs both and sees to neither:
//!
//! - The server that gathers a step's gradients (`DistributedSyncServer` of burn-backend 0.22.1)
//!   takes what a device says of the next step for a part of this one, if another device has
//!   handed in its last gradient but not yet said that it is done. From then on all wait for
//!   ever. A thread that is not scheduled for a moment is enough. So a device gets its next batch
//!   when all are done with this one.
//! - Each device looks at the interrupter by itself, and one that goes on where another has
//!   stopped waits for its gradients for ever. So the interrupter that users pull is not Burn's:
//!   the data loaders look at it, agree on the last step, and have no batch for a later one. Only
//!   then is Burn's own pulled, to end the epochs as well.
//!
//! It must not know what the batches hold.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::DatasetError;
use burn::tensor::Device;
use burn::train::Interrupter;

/// How long a device waits for the others. A step takes milliseconds; one that never comes has
/// failed, which has ended the training.
const PATIENCE: Duration = Duration::from_secs(120);

/// What the loaders of one training agree on.
pub(super) struct Pace {
    /// How many devices there are.
    devices: usize,
    /// What users pull.
    requested: Interrupter,
    /// What Burn looks at.
    training: Interrupter,
    steps: Mutex<Steps>,
    /// All devices have come to a step.
    met: Condvar,
}

/// Steps are counted from 1, through all epochs.
#[derive(Default)]
struct Steps {
    /// The latest step that a device has begun.
    begun: usize,
    /// The last one to be taken, once a stop was asked for.
    last: Option<usize>,
    /// Devices that wait for the others before they begin a step.
    waiting: usize,
    /// How often all have met.
    meetings: usize,
}

impl Pace {
    /// A pace for `devices` devices that stops `training` when `requested` says so.
    pub(super) fn new(devices: usize, requested: Interrupter, training: Interrupter) -> Arc<Self> {
        Arc::new(Self {
            devices,
            requested,
            training,
            steps: Mutex::default(),
            met: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Steps> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all devices have come here. `false` if one does not come.
    fn meet(&self) -> bool {
        let mut steps = self.lock();
        steps.waiting += 1;
        if steps.waiting == self.devices {
            steps.waiting = 0;
            steps.meetings += 1;
            self.met.notify_all();
            return true;
        }
        let meetings = steps.meetings;
        let alone = |steps: &mut Steps| steps.meetings == meetings;
        let waited = self.met.wait_timeout_while(steps, PATIENCE, alone);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Whether a device may begin `step`. A step that one device has begun is begun by all.
    fn allows(&self, step: usize) -> bool {
        let mut steps = self.lock();
        if steps.last.is_none() && self.requested.should_stop() {
            steps.last = Some(steps.begun);
        }
        if steps.last.is_some_and(|last| step > last) {
            // Whoever asks for a later step has taken the last one, for which it needed every
            // other device: none of them can still stop before it.
            self.training.stop(self.requested.get_message().as_deref());
            return false;
        }
        steps.begun = steps.begun.max(step);
        true
    }
}

/// A device's data loader that keeps the pace.
pub(super) struct PacedLoader<O> {
    loader: Arc<dyn DataLoader<O>>,
    pace: Arc<Pace>,
    /// Steps this device has begun.
    steps: AtomicUsize,
}

impl<O: 'static> PacedLoader<O> {
    /// `loader`, with an end that `pace` decides.
    pub(super) fn wrap(loader: Arc<dyn DataLoader<O>>, pace: &Arc<Pace>) -> Arc<dyn DataLoader<O>> {
        Arc::new(Self {
            loader,
            pace: pace.clone(),
            steps: AtomicUsize::new(0),
        })
    }
}

impl<O: 'static> DataLoader<O> for PacedLoader<O> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        Box::new(PacedIterator {
            batches: self.loader.iter(),
            loader: self,
        })
    }

    fn num_items(&self) -> usize {
        self.loader.num_items()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<O>> {
        Self::wrap(self.loader.to_device(device), &self.pace)
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<O>> {
        Self::wrap(self.loader.slice(start, end), &self.pace)
    }
}

/// One epoch of a [`PacedLoader`].
struct PacedIterator<'a, O> {
    batches: Box<dyn DataLoaderIterator<O> + 'a>,
    loader: &'a PacedLoader<O>,
}

impl<O> Iterator for PacedIterator<'_, O> {
    type Item = Result<O, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.batches.next()?;
        let step = self.loader.steps.fetch_add(1, Ordering::Relaxed) + 1;
        let pace = &self.loader.pace;
        (pace.meet() && pace.allows(step)).then_some(batch)
    }
}

impl<O> DataLoaderIterator<O> for PacedIterator<'_, O> {
    fn progress(&self) -> Progress {
        self.batches.progress()
    }
}

#[cfg(test)]
mod tests {
    use burn::data::dataloader::split::split_dataloader;
    use burn::data::dataloader::{DataLoaderBuilder, batcher::Batcher};
    use burn::data::dataset::InMemDataset;

    use super::*;

    type Loader = Arc<dyn DataLoader<Vec<usize>>>;

    struct Plain;

    impl Batcher<usize, Vec<usize>> for Plain {
        fn batch(&self, items: Vec<usize>, _device: &Device) -> Vec<usize> {
            items
        }
    }

    /// The loaders of two devices, for epochs of three steps of two items, and the interrupters
    /// of users and of Burn. Steps begin when `meeting` devices have come.
    fn loaders(meeting: usize) -> (Vec<Loader>, [Interrupter; 2]) {
        let (requested, training) = (Interrupter::new(), Interrupter::new());
        let loader = DataLoaderBuilder::new(Plain)
            .batch_size(2)
            .set_device(Device::flex())
            .build(InMemDataset::new((0..12).collect()));
        let pace = Pace::new(meeting, requested.clone(), training.clone());
        let loader = PacedLoader::wrap(loader, &pace);
        let loaders = split_dataloader(loader, &[Device::flex(), Device::flex()]);
        (loaders, [requested, training])
    }

    fn next(epoch: &mut Box<dyn DataLoaderIterator<Vec<usize>> + '_>) -> Option<Vec<usize>> {
        epoch.next().map(Result::unwrap)
    }

    #[test]
    fn without_a_stop_nothing_is_left_out() {
        let (loaders, [_, training]) = loaders(1);
        for _ in 0..2 {
            let items = loaders.iter().flat_map(|loader| loader.iter());
            let items: Vec<usize> = items.flat_map(Result::unwrap).collect();
            assert_eq!(items, (0..12).collect::<Vec<_>>());
        }
        assert!(!training.should_stop());
    }

    #[test]
    fn a_step_that_one_device_has_begun_is_the_last_of_all() {
        let (loaders, [requested, training]) = loaders(1);
        let [mut ahead, mut behind] = [loaders[0].iter(), loaders[1].iter()];
        assert_eq!(next(&mut ahead), Some(vec![0, 1]));
        assert_eq!(next(&mut behind), Some(vec![6, 7]));
        assert_eq!(next(&mut ahead), Some(vec![2, 3]));
        requested.stop(Some("enough"));
        assert_eq!(next(&mut behind), Some(vec![8, 9]));
        assert!(!training.should_stop(), "before all have taken the step");
        assert_eq!(next(&mut ahead), None);
        assert_eq!(next(&mut behind), None);
        assert!(training.should_stop());
        assert_eq!(training.get_message().as_deref(), Some("enough"));
    }

    #[test]
    fn a_device_waits_for_the_others_before_each_step() {
        let (loaders, [requested, training]) = loaders(2);
        let taken = [AtomicUsize::new(0), AtomicUsize::new(0)];
        std::thread::scope(|scope| {
            for (mine, loader) in loaders.iter().enumerate() {
                let (taken, requested) = (&taken, &requested);
                scope.spawn(move || {
                    for _ in (0..2).flat_map(|_| loader.iter()) {
                        // Whoever is behind has at least the step before this one.
                        let own = taken[mine].fetch_add(1, Ordering::SeqCst) + 1;
                        let other = taken[1 - mine].load(Ordering::SeqCst);
                        assert!(other + 1 >= own, "{own} steps, the other {other}");
                        if own == 4 && mine == 1 {
                            requested.stop(None);
                        }
                    }
                });
            }
        });
        let taken = taken.map(AtomicUsize::into_inner);
        assert_eq!(taken[0], taken[1]);
        assert!((4..=5).contains(&taken[0]), "{taken:?}");
        assert!(training.should_stop());
    }

    #[test]
    fn a_stop_between_two_epochs_leaves_the_second_without_a_step() {
        let (loaders, [requested, training]) = loaders(1);
        for loader in &loaders {
            assert_eq!(loader.iter().count(), 3);
        }
        requested.stop(None);
        for loader in &loaders {
            assert_eq!(loader.iter().count(), 0);
        }
        assert!(training.should_stop());
    }
}
