//! A replica: a leased device with the model on it, and the thread that computes batches there.
//!
//! The thread puts the ops of a batch into the op stream and reads its outputs; while the device computes, a further
//! batch follows if it is full. Burn's tensors stay on this thread.

mod forward;

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use burn::tensor::{Device, TensorData};
use futures::{StreamExt as _, future::LocalBoxFuture, stream::FuturesOrdered};
use tensord_client::{Lease, LeaseEvent};
use tokio::sync::{mpsc, watch};
use tracing::{debug, warn};

use self::forward::{Failure, Outputs, caught, load, panic_text, read};
use crate::{
    error::InferError,
    fleet::{Event, Reports},
    job::{
        Answer, Duplicate, Job, Output, batch_inputs, first_not_finite, split_outputs, zero_inputs,
    },
    model::Runner,
    queue::{Next, Waiting, padded},
    served::Served,
    signature::Reading,
};

/// Most batches that a replica computes at a time: the ops of one are sent while the device computes another.
const BATCHES: usize = 2;

/// A request fails after this many replicas were lost while they computed it: it may be the reason.
const MAX_LOSSES: usize = 3;

/// After the outputs of a batch could not be read, the replica waits so long for the end of its lease. If the lease goes
/// on, the model counts as the reason.
const LOSS_DELAY: Duration = Duration::from_millis(50);

/// What happens to a replica.
#[derive(Debug)]
pub(crate) enum ReplicaEvent {
    /// It computes requests from now on.
    Ready,
    /// Its lease waits for devices, or moves: it computes nothing for now.
    Away(String),
    /// It computes requests again.
    Back,
    /// It has ended as it was to.
    Stopped,
    /// It has ended for this reason.
    Lost(String),
}

/// Loads the model onto the lease's first device and computes batches until it is to stop, or the lease ends. Reports
/// what happens, the end last.
pub(crate) fn run(
    served: Arc<Served>,
    lease: Lease,
    events: mpsc::Receiver<LeaseEvent>,
    stop: watch::Receiver<bool>,
    reports: &Reports,
) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build();
    let ended = match runtime {
        Ok(runtime) => {
            let end = || runtime.block_on(load_and_compute(served, &lease, events, stop, reports));
            // Whatever panics here ends the replica, not the server.
            catch_unwind(AssertUnwindSafe(end)).unwrap_or_else(|panic| Err(panic_text(&*panic)))
        }
        Err(error) => Err(format!("cannot start the runtime of a replica: {error}")),
    };
    drop(lease);
    reports.blocking_send(Event::Replica(match ended {
        Ok(()) => ReplicaEvent::Stopped,
        Err(reason) => ReplicaEvent::Lost(reason),
    }));
}

async fn load_and_compute(
    served: Arc<Served>,
    lease: &Lease,
    events: mpsc::Receiver<LeaseEvent>,
    stop: watch::Receiver<bool>,
    reports: &Reports,
) -> Result<(), String> {
    let device = lease
        .devices()
        .first()
        .ok_or("the lease has no device")?
        .clone();
    let runner = load(&served, &device)?;
    // Loading may have chosen others than the default.
    served.integers.set(device.settings().int_dtype.into());
    let mut replica = Replica {
        served,
        device,
        runner,
        batches: VecDeque::new(),
        readings: FuturesOrdered::new(),
        device_free_at: Instant::now(),
        is_away: false,
        is_stalled: false,
    };
    replica.warm_up().await?;
    replica.share_weights(lease)?;
    reports.send(ReplicaEvent::Ready).await;
    replica.compute(lease, events, stop, reports).await
}

impl Drop for Replica {
    /// Whatever ends the replica, a panic included, others compute its requests.
    fn drop(&mut self) {
        self.put_back();
    }
}

struct Replica {
    served: Arc<Served>,
    device: Device,
    runner: Runner,
    /// What the device computes, in order.
    batches: VecDeque<Batch>,
    /// The outputs of `batches`, in the same order.
    readings: FuturesOrdered<LocalBoxFuture<'static, Outputs>>,
    /// When the outputs of the last batch had arrived.
    device_free_at: Instant,
    is_away: bool,
    /// Whether the first batch takes very long, so that there is nothing new until it has ended.
    is_stalled: bool,
}

/// A batch that the device computes.
struct Batch {
    requests: Vec<Waiting<Job>>,
    /// With the rows that fill it up; `None` if the model has no batches.
    padded_rows: Option<usize>,
    since: Instant,
    /// How long it may take before another replica computes its requests, too.
    patience: Duration,
}

impl Batch {
    /// Returns whether other replicas compute all of its requests.
    fn is_for_others(&self) -> bool {
        let mut requests = self.requests.iter();
        requests.all(|it| it.request.duplicate == Duplicate::Original)
    }
}

impl Replica {
    /// Computes a batch of zeros of each size that there will be.
    async fn warm_up(&mut self) -> Result<(), String> {
        let most = self.served.model.most_rows();
        let sizes = (0..)
            .map(|power| 1_usize << power)
            .take_while(|size| *size < most);
        let mut took = Duration::ZERO;
        for size in sizes.chain([most, most]) {
            let started = Instant::now();
            let inputs = zero_inputs(&self.served.model.inputs, size);
            let failed =
                |reason: Failure| format!("the model fails for {size} rows of zeros: {reason}");
            let readings = self.forward(|| inputs).map_err(failed)?;
            let outputs = read(readings).await.map_err(failed)?;
            let rows = self.served.model.has_batches.then_some(size);
            split_outputs(&self.served.model.outputs, outputs, &[size], rows)?;
            took = started.elapsed();
            debug!(model = self.served.model.name, size, ?took, "warmed up");
        }
        // The second time of the largest size, for which nothing had to be compiled.
        self.served.warmed_up(took);
        Ok(())
    }

    /// Has the worker keep the weights for other replicas on its host, if there may be any.
    fn share_weights(&self, lease: &Lease) -> Result<(), String> {
        self.served.metrics.loaded(lease.traffic().tensor_bytes_up);
        if *self.served.model.replicas.end() == 1 {
            return Ok(());
        }
        let shared = lease.share_uploads();
        shared.map_err(|error| format!("cannot share the weights with other replicas: {error}"))
    }

    /// Computes batches until the replica is to stop; an error if the lease has ended.
    async fn compute(
        &mut self,
        lease: &Lease,
        mut events: mpsc::Receiver<LeaseEvent>,
        mut stop: watch::Receiver<bool>,
        reports: &Reports,
    ) -> Result<(), String> {
        let served = self.served.clone();
        let mut lease_end = pin!(lease.ended_async());
        let (mut has_events, mut is_stopping) = (true, false);
        loop {
            is_stopping |= *stop.borrow();
            if is_stopping && self.batches.iter().all(Batch::is_for_others) {
                return Ok(());
            }
            let mut changed = pin!(served.changed.notified());
            changed.as_mut().enable();
            let is_busy = self.batches.len() >= BATCHES || self.is_stalled;
            let can_take = !is_busy && !self.is_away && !is_stopping;
            let take_at = match can_take.then(|| served.take(self.batches.is_empty())) {
                Some(Next::Batch(requests)) => {
                    self.start(requests);
                    continue;
                }
                Some(Next::At(at)) => Some(at),
                Some(Next::Nothing) | None => None,
            };
            let has_others = self.served.ready() > usize::from(!is_stopping);
            let stalls_at = self.stalls_at().filter(|_| has_others);
            tokio::select! {
                reason = &mut lease_end => return Err(reason),
                Some(outputs) = self.readings.next(), if !self.readings.is_empty() => {
                    if matches!(outputs, Err(Failure::Device(_))) {
                        self.await_loss(&mut lease_end, &mut events, reports).await?;
                    }
                    self.finish(outputs);
                }
                event = events.recv(), if has_events => match event {
                    Some(event) => self.on_event(event, reports).await,
                    None => has_events = false,
                },
                () = sleep_until(take_at) => {}
                () = sleep_until(stalls_at) => self.hand_over(),
                () = changed => {}
                // A fleet that is gone needs no replica.
                stopped = stop.changed(), if !is_stopping => is_stopping |= stopped.is_err(),
            }
        }
    }

    /// Returns when the first batch takes very long, if it was not found to do so before.
    fn stalls_at(&self) -> Option<Instant> {
        let first = self.batches.front().filter(|_| !self.is_stalled)?;
        Some(first.since.max(self.device_free_at) + first.patience)
    }

    /// Has other replicas compute the requests as well, as the first batch takes very long: the worker may have died, of
    /// which the pool knows only after a while. That happens once to a request, so that devices that are slow for a while
    /// do not cause more than twice the work.
    fn hand_over(&mut self) {
        self.is_stalled = true;
        let mut handed_over = Vec::new();
        for waiting in self.batches.iter_mut().flat_map(|it| &mut it.requests) {
            let job = &mut waiting.request;
            if job.duplicate != Duplicate::No || job.answer.is_closed() {
                continue;
            }
            job.duplicate = Duplicate::Original;
            let mut copy = waiting.clone();
            copy.request.duplicate = Duplicate::Copy;
            handed_over.push(copy);
        }
        if handed_over.is_empty() {
            return;
        }
        let model = &self.served.model;
        warn!(
            model = model.name,
            version = model.version,
            requests = handed_over.len(),
            "a batch takes very long, so other replicas compute the requests, too"
        );
        self.served.metrics.handed_over(handed_over.len());
        self.served.put_back(handed_over);
    }

    /// Waits for [`LOSS_DELAY`] for an event by which the lease has ended, which is an error, or has no devices for now.
    /// Without one, the model counts as the reason for a failure.
    async fn await_loss(
        &mut self,
        mut lease_end: impl Future<Output = String> + Unpin,
        events: &mut mpsc::Receiver<LeaseEvent>,
        reports: &Reports,
    ) -> Result<(), String> {
        let mut until = pin!(tokio::time::sleep(LOSS_DELAY));
        while !self.is_away {
            tokio::select! {
                biased;
                reason = &mut lease_end => return Err(reason),
                Some(event) = events.recv() => self.on_event(event, reports).await,
                () = &mut until => break,
            }
        }
        Ok(())
    }

    /// Puts a batch into the op stream.
    fn start(&mut self, requests: Vec<Waiting<Job>>) {
        let rows: usize = requests.iter().map(|it| it.rows).sum();
        let model = &self.served.model;
        let padded_rows = model
            .has_batches
            .then(|| padded(rows, model.batching.max_size));
        self.served.metrics.batches(rows);
        let since = Instant::now();
        let inputs = || batch_inputs(&model.inputs, &requests, padded_rows);
        let outputs: LocalBoxFuture<'static, Outputs> = match self.forward(inputs) {
            Ok(readings) => Box::pin(read(readings)),
            Err(failure) => Box::pin(std::future::ready(Err(failure))),
        };
        self.batches.push_back(Batch {
            requests,
            padded_rows,
            since,
            patience: self.served.patience(),
        });
        self.readings.push_back(outputs);
    }

    /// Runs the model's function.
    fn forward(&self, inputs: impl FnOnce() -> Vec<TensorData>) -> Result<Vec<Reading>, Failure> {
        caught(|| (self.runner)(inputs(), &self.device))
    }

    /// Answers the requests of the first batch.
    fn finish(&mut self, outputs: Outputs) {
        // There is none if the lease has lost its devices, as others compute the requests then.
        let Some(batch) = self.batches.pop_front() else {
            return;
        };
        let now = Instant::now();
        let took = now.saturating_duration_since(batch.since.max(self.device_free_at));
        self.device_free_at = now;
        self.is_stalled = false;
        let rows: Vec<_> = batch.requests.iter().map(|it| it.rows).collect();
        let specs = &self.served.model.outputs;
        let split = outputs.and_then(|outputs| {
            let split = caught(|| split_outputs(specs, outputs, &rows, batch.padded_rows));
            split?.map_err(Failure::Model)
        });
        match split {
            Ok(split) => {
                let padded_rows = batch.padded_rows.unwrap_or(1);
                let in_all = now.saturating_duration_since(batch.since);
                self.served.computed(padded_rows, took, in_all);
                self.answer(batch.requests, split, rows.iter().sum());
            }
            Err(failure) => self.fail(batch.requests, &failure.to_string()),
        }
    }

    /// Sends each request its outputs.
    fn answer(&self, requests: Vec<Waiting<Job>>, split: Vec<Vec<Output>>, batch_rows: usize) {
        let model = &self.served.model;
        for (waiting, outputs) in requests.into_iter().zip(split) {
            let Job {
                answer: sender,
                inputs,
                permits,
                ..
            } = waiting.request;
            // Before the answer, whose bytes count, too.
            drop((inputs, permits));
            let not_finite = match model.checks_finite {
                true => first_not_finite(&model.outputs, &outputs),
                false => None,
            };
            let answer = match not_finite {
                None => Ok(Answer {
                    outputs,
                    batch_rows,
                }),
                Some(name) => Err(InferError::ModelFailed(format!(
                    "the model returned a NaN or an infinity in output `{name}`"
                ))),
            };
            sender.send(answer);
        }
    }

    /// Sends a single request its error. Of several, one may be the reason, so each is computed alone.
    fn fail(&self, mut requests: Vec<Waiting<Job>>, reason: &str) {
        let model = &self.served.model;
        // Other replicas compute these, too, and may succeed.
        requests.retain(|it| it.request.duplicate != Duplicate::Original);
        if requests.is_empty() {
            return;
        }
        if requests.len() == 1
            && let Some(waiting) = requests.pop()
        {
            warn!(
                model = model.name,
                version = model.version,
                "a request failed: {reason}"
            );
            let failed = InferError::ModelFailed(reason.into());
            waiting.request.answer.send(Err(failed));
            return;
        }
        warn!(
            model = model.name,
            version = model.version,
            requests = requests.len(),
            "a batch failed, so its requests are computed one by one: {reason}"
        );
        requests.iter_mut().for_each(|it| it.is_alone = true);
        self.served.put_back(requests);
    }

    async fn on_event(&mut self, event: LeaseEvent, reports: &Reports) {
        match event {
            LeaseEvent::Waiting { .. } | LeaseEvent::Suspended | LeaseEvent::Moving { .. } => {
                self.put_back();
                if !std::mem::replace(&mut self.is_away, true) {
                    reports.send(ReplicaEvent::Away(event.to_string())).await;
                }
            }
            LeaseEvent::Running { .. } => {
                let was_away = std::mem::replace(&mut self.is_away, false);
                if was_away {
                    reports.send(ReplicaEvent::Back).await;
                }
            }
            // An idle lease goes on with the next batch.
            _ => {}
        }
    }

    /// Gives the requests that the device computes to other replicas.
    fn put_back(&mut self) {
        self.readings = FuturesOrdered::new();
        self.is_stalled = false;
        let mut put_back = Vec::new();
        for mut waiting in self.batches.drain(..).flat_map(|it| it.requests) {
            if waiting.request.duplicate == Duplicate::Original {
                // Another one computes it already.
                continue;
            }
            waiting.request.losses += 1;
            if waiting.request.losses < MAX_LOSSES {
                put_back.push(waiting);
                continue;
            }
            let lost = InferError::Unavailable(format!(
                "{MAX_LOSSES} replicas were lost while they computed the request"
            ));
            waiting.request.answer.send(Err(lost));
        }
        self.served.put_back(put_back);
    }
}

/// Waits until a time; for ever without one.
async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
