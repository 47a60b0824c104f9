//! Keeps the devices of a training run in step, and stops them after the same step.
//!
//! Burn's data-parallel strategy needs both and provides neither:
//!
//! - The server that collects a step's gradients (`DistributedSyncServer` of burn-backend
//!   0.22.1) assigns a device's messages about the next step to the current one if another
//!   device has sent its last gradient but not yet its sync. Then all devices wait for
//!   ever. A short scheduling delay of one thread is enough to cause this. So a device gets
//!   its next batch only when all devices have finished the current one.
//! - Each device checks the interrupter by itself, and a device that goes on after another
//!   has stopped waits for that one's gradients for ever. So the caller gets an
//!   interrupter of its own: the data loaders check it, agree on the last step, and return
//!   no batch for a later one. Only then do they stop Burn's interrupter, which ends the
//!   epochs as well.
//!
//! This module does not depend on the content of the batches.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::DatasetError;
use burn::tensor::Device;
use burn::train::Interrupter;

/// How long a device waits for the others. A step takes milliseconds; a device that does
/// not come within this time has failed, and the training with it.
const BARRIER_TIMEOUT: Duration = Duration::from_secs(120);

/// State that the data loaders of one training run share.
pub(crate) struct Lockstep {
    /// The number of devices.
    devices: usize,
    /// The caller's interrupter, which requests a stop.
    requested: Interrupter,
    /// Burn's interrupter, which ends the epochs.
    training: Interrupter,
    steps: Mutex<StepProgress>,
    /// Notified when all devices have reached the next step.
    all_arrived: Condvar,
}

/// Progress of the devices. Steps are counted from 1, over all epochs.
#[derive(Default)]
struct StepProgress {
    /// The latest step that any device has begun.
    begun: usize,
    /// The last step to run; set once a stop was requested.
    last: Option<usize>,
    /// The number of devices that wait for the others to begin a step.
    waiting: usize,
    /// How many times all devices have arrived; a waiting device watches it for a change.
    generation: usize,
}

impl Lockstep {
    /// Creates the state for `devices` devices. A stop of `requested` stops `training`
    /// after the same step on all devices.
    pub(crate) fn new(devices: usize, requested: Interrupter, training: Interrupter) -> Arc<Self> {
        Arc::new(Self {
            devices,
            requested,
            training,
            steps: Mutex::default(),
            all_arrived: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, StepProgress> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all devices have called this. Returns `false` if one has not called it
    /// within [`BARRIER_TIMEOUT`].
    fn wait_for_all(&self) -> bool {
        let mut steps = self.lock();
        steps.waiting += 1;
        if steps.waiting == self.devices {
            steps.waiting = 0;
            steps.generation += 1;
            self.all_arrived.notify_all();
            return true;
        }
        let generation = steps.generation;
        let alone = |steps: &mut StepProgress| steps.generation == generation;
        let waited = self
            .all_arrived
            .wait_timeout_while(steps, BARRIER_TIMEOUT, alone);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Returns whether a device may begin `step`. If one device has begun it, all may. Stops
    /// Burn's interrupter before it returns `false`.
    fn may_begin(&self, step: usize) -> bool {
        let mut steps = self.lock();
        if steps.last.is_none() && self.requested.should_stop() {
            steps.last = Some(steps.begun);
        }
        if steps.last.is_some_and(|last| step > last) {
            // A device that requests a later step has run the last one, which needed the
            // gradients of every device. So every device has begun the last step.
            self.training.stop(self.requested.get_message().as_deref());
            return false;
        }
        steps.begun = steps.begun.max(step);
        true
    }
}

/// A device's data loader that waits for the other devices before each batch.
pub(crate) struct LockstepLoader<O> {
    loader: Arc<dyn DataLoader<O>>,
    lockstep: Arc<Lockstep>,
    /// The number of batches that this device has requested.
    steps: AtomicUsize,
}

impl<O: 'static> LockstepLoader<O> {
    /// Wraps `loader` so that `lockstep` decides when each batch is returned.
    pub(crate) fn wrap(
        loader: Arc<dyn DataLoader<O>>,
        lockstep: &Arc<Lockstep>,
    ) -> Arc<dyn DataLoader<O>> {
        Arc::new(Self {
            loader,
            lockstep: lockstep.clone(),
            steps: AtomicUsize::new(0),
        })
    }
}

impl<O: 'static> DataLoader<O> for LockstepLoader<O> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        Box::new(LockstepIterator {
            batches: self.loader.iter(),
            loader: self,
        })
    }

    fn num_items(&self) -> usize {
        self.loader.num_items()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<O>> {
        Self::wrap(self.loader.to_device(device), &self.lockstep)
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<O>> {
        Self::wrap(self.loader.slice(start, end), &self.lockstep)
    }
}

/// Iterator over one epoch of a [`LockstepLoader`].
struct LockstepIterator<'a, O> {
    batches: Box<dyn DataLoaderIterator<O> + 'a>,
    loader: &'a LockstepLoader<O>,
}

impl<O> Iterator for LockstepIterator<'_, O> {
    type Item = Result<O, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.batches.next()?;
        let step = self.loader.steps.fetch_add(1, Ordering::Relaxed) + 1;
        let lockstep = &self.loader.lockstep;
        (lockstep.wait_for_all() && lockstep.may_begin(step)).then_some(batch)
    }
}

impl<O> DataLoaderIterator<O> for LockstepIterator<'_, O> {
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

    struct PassthroughBatcher;

    impl Batcher<usize, Vec<usize>> for PassthroughBatcher {
        fn batch(&self, items: Vec<usize>, _device: &Device) -> Vec<usize> {
            items
        }
    }

    /// Returns the loaders of two devices, for epochs of three steps of two items, and the
    /// interrupters of the caller and of Burn. A step begins when `meeting` devices wait
    /// for it.
    fn loaders(meeting: usize) -> (Vec<Loader>, [Interrupter; 2]) {
        let (requested, training) = (Interrupter::new(), Interrupter::new());
        let loader = DataLoaderBuilder::new(PassthroughBatcher)
            .batch_size(2)
            .set_device(Device::flex())
            .build(InMemDataset::new((0..12).collect()));
        let lockstep = Lockstep::new(meeting, requested.clone(), training.clone());
        let loader = LockstepLoader::wrap(loader, &lockstep);
        let loaders = split_dataloader(loader, &[Device::flex(), Device::flex()]);
        (loaders, [requested, training])
    }

    fn next(epoch: &mut Box<dyn DataLoaderIterator<Vec<usize>> + '_>) -> Option<Vec<usize>> {
        epoch.next().map(Result::unwrap)
    }

    #[test]
    fn without_a_stop_every_batch_is_returned() {
        let (loaders, [_, training]) = loaders(1);
        for _ in 0..2 {
            let items = loaders.iter().flat_map(|loader| loader.iter());
            let items: Vec<usize> = items.flat_map(Result::unwrap).collect();
            assert_eq!(items, (0..12).collect::<Vec<_>>());
        }
        assert!(!training.should_stop());
    }

    #[test]
    fn all_devices_finish_a_step_that_one_has_begun() {
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
                        // The other device has begun at least the step before this one.
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
    fn stop_between_epochs_skips_the_second() {
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
