//! A model that is being served: its queue, what its replicas do, and the answer to a request.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::sync::Notify;

use crate::{
    answering::AnswerSender,
    error::InferError,
    integers::DeviceIntegers,
    job::{Answer, Duplicate, Input, Job},
    limits::{BodyPermit, LONGEST},
    metrics::ModelMetrics,
    model::{Batching, Model},
    protocol::{InferRequest, InferResponse, InputTensor, OutputTensor, shown},
    queue::{BatchQueue, Full, Next, RowShapes, Waiting},
    signature::TensorSpec,
};

/// Shortest time after which a client that was refused tries again.
const LEAST_RETRY: Duration = Duration::from_millis(100);

/// A model that is being served.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) model: Model,
    queue: Mutex<BatchQueue<Job>>,
    /// Notified when there may be something to compute.
    pub(crate) changed: Notify,
    /// Notified when a request arrives and no replica computes.
    pub(crate) wants_replica: Notify,
    /// How many replicas compute.
    ready: AtomicUsize,
    /// For how long replicas have computed, summed over all.
    busy_nanos: AtomicU64,
    pub(crate) integers: DeviceIntegers,
    /// Why there are no replicas, if there are none and the pool does not give any.
    outage: Mutex<Option<String>>,
    pub(crate) metrics: ModelMetrics,
}

/// What happened to a request that was answered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Computed {
    /// The rows of the request.
    pub(crate) rows: usize,
    /// The rows that were computed together.
    pub(crate) batch_rows: usize,
    /// From when it was complete to its answer.
    pub(crate) took: Duration,
}

impl Served {
    pub(crate) fn new(model: Model, metrics: ModelMetrics) -> Self {
        let batching = Batching {
            max_size: model.most_rows(),
            ..model.batching.clone()
        };
        Self {
            queue: Mutex::new(BatchQueue::new(batching)),
            model,
            changed: Notify::new(),
            wants_replica: Notify::new(),
            ready: AtomicUsize::new(0),
            busy_nanos: AtomicU64::new(0),
            integers: DeviceIntegers::default(),
            outage: Mutex::new(None),
            metrics,
        }
    }

    /// Returns whether the model answers requests: a replica computes, or none is needed while there are no requests.
    pub(crate) fn is_ready(&self) -> bool {
        let is_on_demand = *self.model.replicas.start() == 0 && self.outage().is_none();
        self.ready() > 0 || is_on_demand
    }

    /// Sets how many replicas compute.
    pub(crate) fn set_ready(&self, replicas: usize) {
        let before = self.ready.swap(replicas, Ordering::Relaxed);
        self.queue().set_replicas(replicas);
        if replicas > before {
            // Another one may compute now what takes very long.
            self.changed.notify_waiters();
        }
        self.metrics.replicas(replicas);
        if replicas > 0 {
            self.set_outage(None);
        }
    }

    /// Sets why there are no replicas. If none computes, all requests that wait get it as their error.
    pub(crate) fn set_outage(&self, outage: Option<String>) {
        // Under the same lock as requests are added, so that none is overlooked.
        let mut queue = self.queue();
        let is_outage = outage.is_some();
        *self.outage.lock().unwrap_or_else(PoisonError::into_inner) = outage;
        if is_outage && self.ready() == 0 {
            queue.clear();
        }
    }

    fn outage(&self) -> Option<String> {
        let outage = self.outage.lock();
        outage.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns how long the first request has waited.
    pub(crate) fn oldest_wait(&self) -> Duration {
        let mut queue = self.queue();
        let now = Instant::now();
        queue.remove_dead(now, is_given_up);
        queue.oldest_wait(now)
    }

    /// Returns for how long replicas have computed, summed over all.
    pub(crate) fn busy(&self) -> Duration {
        Duration::from_nanos(self.busy_nanos.load(Ordering::Relaxed))
    }

    /// Takes the next batch for a replica, which is idle or computes a batch already.
    pub(crate) fn take(&self, is_idle: bool) -> Next<Job> {
        let mut queue = self.queue();
        let now = Instant::now();
        queue.remove_dead(now, is_given_up);
        let next = queue.take(now, is_idle);
        self.metrics.queue_rows(queue.rows());
        next
    }

    /// Returns how long a batch may take before another replica computes its requests, too.
    pub(crate) fn patience(&self) -> Duration {
        self.queue().patience()
    }

    /// Returns how many replicas compute.
    pub(crate) fn ready(&self) -> usize {
        self.ready.load(Ordering::Relaxed)
    }

    /// Records how long the largest batch took before there were requests.
    pub(crate) fn warmed_up(&self, took: Duration) {
        self.queue().full_took(took);
    }

    /// Puts requests back that were taken.
    pub(crate) fn put_back(&self, requests: Vec<Waiting<Job>>) {
        if requests.is_empty() {
            return;
        }
        self.queue().put_back(requests);
        self.changed.notify_waiters();
    }

    /// Records that a replica has computed a batch. `took` is the time of the device since the batch before had ended,
    /// `in_all` the time since this one was sent.
    pub(crate) fn computed(&self, padded_rows: usize, took: Duration, in_all: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.busy_nanos.fetch_add(nanos, Ordering::Relaxed);
        self.queue().computed(Instant::now(), padded_rows, took);
        self.metrics.computed(in_all);
    }

    /// Checks whether a request that arrives now could be answered, before it is read.
    pub(crate) fn admit(&self) -> Result<(), InferError> {
        self.check_outage()?;
        let mut queue = self.queue();
        let now = Instant::now();
        self.check_room(&mut queue, now, 1, now + self.model.deadline)
    }

    /// Computes the answer to a request that arrived at a time. The permits for its bytes are returned with these.
    pub(crate) async fn infer(
        &self,
        request: InferRequest,
        permits: Vec<Arc<BodyPermit>>,
        arrived: Instant,
    ) -> Result<(InferResponse, Computed), InferError> {
        let started = Instant::now();
        self.check_outputs(&request)?;
        let inputs = self.inputs_in_order(request.inputs)?;
        let (rows, row_shapes) = self.rows(&inputs)?;
        let inputs = inputs.into_iter().map(|it| Input {
            shape: it.shape,
            bytes: it.bytes,
        });
        let timeout = request.timeout.unwrap_or(self.model.deadline);
        let deadline = arrived + timeout.min(LONGEST);
        let (answer, answered) = AnswerSender::new();
        let waiting = Waiting {
            request: Job {
                inputs: inputs.collect(),
                answer,
                permits,
                losses: 0,
                duplicate: Duplicate::No,
            },
            rows,
            row_shapes,
            since: started,
            deadline,
            is_alone: false,
        };
        self.push(waiting)?;
        let answer = match tokio::time::timeout_at(deadline.into(), answered).await {
            Ok(Ok(answer)) => answer?,
            Ok(Err(_)) | Err(_) => return Err(self.unanswered(timeout)),
        };
        let computed = Computed {
            rows,
            batch_rows: answer.batch_rows,
            took: started.elapsed(),
        };
        let response = InferResponse {
            model: self.model.name.clone(),
            version: self.model.version.clone(),
            id: request.id,
            outputs: self.outputs(answer, &request.outputs, request.is_binary_default),
        };
        Ok((response, computed))
    }

    fn push(&self, waiting: Waiting<Job>) -> Result<(), InferError> {
        let mut queue = self.queue();
        self.check_outage()?;
        self.check_room(&mut queue, Instant::now(), waiting.rows, waiting.deadline)?;
        queue.push(waiting);
        self.metrics.queue_rows(queue.rows());
        drop(queue);
        self.changed.notify_waiters();
        if self.ready() == 0 {
            self.wants_replica.notify_one();
        }
        Ok(())
    }

    /// Returns an error if no replica computes, and there will be none soon.
    fn check_outage(&self) -> Result<(), InferError> {
        if self.ready() > 0 {
            return Ok(());
        }
        match self.outage() {
            Some(reason) => Err(InferError::Unavailable(format!(
                "model `{}` has no device at present: {reason}",
                self.model.name
            ))),
            None => Ok(()),
        }
    }

    fn check_room(
        &self,
        queue: &mut BatchQueue<Job>,
        now: Instant,
        rows: usize,
        deadline: Instant,
    ) -> Result<(), InferError> {
        let full = match queue.has_room(now, rows, deadline) {
            Ok(()) => return Ok(()),
            Err(_) => {
                queue.remove_dead(now, is_given_up);
                queue.has_room(now, rows, deadline).err()
            }
        };
        let Some(Full {
            is_full,
            retry_after,
        }) = full
        else {
            return Ok(());
        };
        let name = &self.model.name;
        let reason = match is_full {
            true => format!(
                "{} rows wait for model `{name}`, and at most {} may",
                queue.rows(),
                self.model.batching.max_queue
            ),
            false => format!(
                "{} rows wait for model `{name}`, so the request would not be answered by its deadline",
                queue.rows()
            ),
        };
        Err(InferError::Overloaded {
            reason,
            retry_after: retry_after.max(LEAST_RETRY),
        })
    }

    /// Returns the error for a request that has got no answer.
    fn unanswered(&self, timeout: Duration) -> InferError {
        let deadline = || {
            InferError::DeadlineExceeded(format!(
                "model `{}` did not answer within {timeout:?}",
                self.model.name
            ))
        };
        self.check_outage().err().unwrap_or_else(deadline)
    }

    /// Checks that the model has the outputs that a request names.
    fn check_outputs(&self, request: &InferRequest) -> Result<(), InferError> {
        let specs = &self.model.outputs;
        let mut names = request.outputs.iter().map(|it| &it.name);
        match names.find(|name| specs.iter().all(|spec| spec.name != **name)) {
            Some(name) => Err(InferError::Invalid(format!(
                "model `{}` has no output `{}`; it has {}",
                self.model.name,
                shown(name),
                list(specs.iter().map(|it| it.name.as_str()))
            ))),
            None => Ok(()),
        }
    }

    /// Returns the inputs in the order in which the model declares them.
    fn inputs_in_order(
        &self,
        mut inputs: Vec<InputTensor>,
    ) -> Result<Vec<InputTensor>, InferError> {
        let specs = &self.model.inputs;
        let names = || list(specs.iter().map(|it| it.name.as_str()));
        let mut ordered = Vec::with_capacity(specs.len());
        for spec in specs {
            let Some(place) = inputs.iter().position(|it| it.name == spec.name) else {
                return Err(InferError::Invalid(format!(
                    "the request lacks input `{}`; model `{}` takes {}",
                    spec.name,
                    self.model.name,
                    names()
                )));
            };
            let input = inputs.swap_remove(place);
            check_input(spec, &input)?;
            self.integers.check(&input)?;
            ordered.push(input);
        }
        match inputs.first() {
            Some(input) => Err(InferError::Invalid(format!(
                "model `{}` has no input `{}`; it takes {}",
                self.model.name,
                shown(&input.name),
                names()
            ))),
            None => Ok(ordered),
        }
    }

    /// Returns the number of rows of a request, and the shapes without them.
    fn rows(&self, inputs: &[InputTensor]) -> Result<(usize, RowShapes), InferError> {
        if !self.model.has_batches {
            let shapes = inputs.iter().map(|it| it.shape.clone());
            return Ok((1, shapes.collect()));
        }
        let rows = |input: &InputTensor| input.shape.first().copied().unwrap_or_default();
        let first = inputs.first().map_or(0, rows);
        if let Some(other) = inputs.iter().find(|it| rows(it) != first) {
            return Err(InferError::Invalid(format!(
                "input `{}` has {} rows, and input `{}` has {first}: all inputs must have as many",
                other.name,
                rows(other),
                inputs[0].name
            )));
        }
        let most = self.model.batching.max_size;
        if first == 0 || first > most {
            return Err(InferError::Invalid(format!(
                "the request has {first} rows, and model `{}` takes 1 to {most}",
                self.model.name
            )));
        }
        let shapes = inputs.iter().map(|it| it.shape[1..].to_vec());
        Ok((first, shapes.collect()))
    }

    /// Returns the outputs that a request names, or all.
    fn outputs(
        &self,
        answer: Answer,
        requested: &[crate::protocol::RequestedOutput],
        is_binary_default: bool,
    ) -> Vec<OutputTensor> {
        let specs = &self.model.outputs;
        let tensor = |index: usize, is_binary: Option<bool>| OutputTensor {
            name: specs[index].name.clone(),
            datatype: specs[index].datatype,
            shape: answer.outputs[index].shape.clone(),
            bytes: answer.outputs[index].bytes.clone(),
            is_binary: is_binary.unwrap_or(is_binary_default),
        };
        if requested.is_empty() {
            return (0..answer.outputs.len())
                .map(|index| tensor(index, None))
                .collect();
        }
        let named = requested.iter().filter_map(|it| {
            let index = specs.iter().position(|spec| spec.name == it.name)?;
            Some(tensor(index, it.is_binary))
        });
        named.collect()
    }

    fn queue(&self) -> std::sync::MutexGuard<'_, BatchQueue<Job>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_given_up(job: &Job) -> bool {
    job.answer.is_closed()
}

/// Checks the type and shape of an input.
fn check_input(spec: &TensorSpec, input: &InputTensor) -> Result<(), InferError> {
    if input.datatype != spec.datatype {
        return Err(InferError::Invalid(format!(
            "input `{}` has type {}; it must be {}",
            spec.name, input.datatype, spec.datatype
        )));
    }
    let row_dims = usize::from(spec.has_batch());
    if input.shape.iter().skip(row_dims).any(|size| *size == 0) {
        return Err(InferError::Invalid(format!(
            "input `{}` has shape {:?}; only tensors with elements are computed",
            spec.name, input.shape
        )));
    }
    if !spec.accepts(&input.shape) {
        return Err(InferError::Invalid(format!(
            "input `{}` has shape {:?}; it must be {:?}, where -1 is any size",
            spec.name, input.shape, spec.shape
        )));
    }
    Ok(())
}

/// Returns names as a list for a person.
pub(crate) fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<_> = names.map(|name| format!("`{name}`")).collect();
    names.join(", ")
}
