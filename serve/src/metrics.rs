//! What is counted and measured, and the page of it in the text format of OpenMetrics, which Prometheus reads.

use std::{sync::Arc, time::Duration};

use prometheus_client::{
    encoding::{EncodeLabelSet, text},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};

/// The content type of the page.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModelLabels {
    model: String,
    version: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    model: String,
    version: String,
    /// `http` or `grpc`.
    protocol: &'static str,
    /// `ok`, or why there is no answer.
    result: &'static str,
}

/// The metrics of a server.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    request_seconds: Family<ModelLabels, Histogram>,
    batch_seconds: Family<ModelLabels, Histogram>,
    batch_rows: Family<ModelLabels, Histogram>,
    queue_rows: Family<ModelLabels, Gauge>,
    replicas: Family<ModelLabels, Gauge>,
    load_bytes: Family<ModelLabels, Counter>,
    handed_over: Family<ModelLabels, Counter>,
}

/// The metrics of a model.
#[derive(Debug, Clone)]
pub(crate) struct ModelMetrics {
    metrics: Arc<Metrics>,
    labels: ModelLabels,
    batch_seconds: Histogram,
    batch_rows: Histogram,
    queue_rows: Gauge,
    replicas: Gauge,
    load_bytes: Counter,
    handed_over: Counter,
    request_seconds: Histogram,
}

/// From 0.5 ms to 16 s.
fn times() -> Histogram {
    Histogram::new(exponential_buckets(0.0005, 2.0, 16))
}

/// From 1 to 1024.
fn sizes() -> Histogram {
    Histogram::new(exponential_buckets(1.0, 2.0, 11))
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::with_prefix("tensord_serve");
        let metrics = Self {
            requests: Family::default(),
            request_seconds: Family::new_with_constructor(times as fn() -> Histogram),
            batch_seconds: Family::new_with_constructor(times as fn() -> Histogram),
            batch_rows: Family::new_with_constructor(sizes as fn() -> Histogram),
            queue_rows: Family::default(),
            replicas: Family::default(),
            load_bytes: Family::default(),
            handed_over: Family::default(),
            registry: Registry::default(),
        };
        registry.register(
            "requests",
            "Requests for inferences",
            metrics.requests.clone(),
        );
        registry.register_with_unit(
            "request_duration",
            "Time from a request that is complete to its answer",
            Unit::Seconds,
            metrics.request_seconds.clone(),
        );
        registry.register_with_unit(
            "batch_duration",
            "Time that a replica takes for a batch, with the upload of its inputs",
            Unit::Seconds,
            metrics.batch_seconds.clone(),
        );
        registry.register(
            "batch_rows",
            "Rows that are computed together, without those that fill up the batch",
            metrics.batch_rows.clone(),
        );
        registry.register("queue_rows", "Rows that wait", metrics.queue_rows.clone());
        registry.register(
            "replicas",
            "Replicas that compute",
            metrics.replicas.clone(),
        );
        registry.register_with_unit(
            "load",
            "Bytes of tensors that were sent to load replicas",
            Unit::Bytes,
            metrics.load_bytes.clone(),
        );
        registry.register(
            "handed_over",
            "Requests that another replica computes, as the first took very long",
            metrics.handed_over.clone(),
        );
        Self {
            registry,
            ..metrics
        }
    }

    /// Returns the metrics of a model.
    pub(crate) fn of_model(self: &Arc<Self>, model: &str, version: &str) -> ModelMetrics {
        let labels = ModelLabels {
            model: model.into(),
            version: version.into(),
        };
        ModelMetrics {
            batch_seconds: self.batch_seconds.get_or_create(&labels).clone(),
            batch_rows: self.batch_rows.get_or_create(&labels).clone(),
            queue_rows: self.queue_rows.get_or_create(&labels).clone(),
            replicas: self.replicas.get_or_create(&labels).clone(),
            load_bytes: self.load_bytes.get_or_create(&labels).clone(),
            handed_over: self.handed_over.get_or_create(&labels).clone(),
            request_seconds: self.request_seconds.get_or_create(&labels).clone(),
            metrics: self.clone(),
            labels,
        }
    }

    /// Returns the page.
    pub(crate) fn page(&self) -> String {
        let mut page = String::new();
        // Writing to a string does not fail.
        let _ = text::encode(&mut page, &self.registry);
        page
    }
}

impl ModelMetrics {
    /// Counts a request with its result, and for how long it took if it was answered.
    pub(crate) fn request(
        &self,
        protocol: &'static str,
        result: &'static str,
        took: Option<Duration>,
    ) {
        let labels = RequestLabels {
            model: self.labels.model.clone(),
            version: self.labels.version.clone(),
            protocol,
            result,
        };
        self.metrics.requests.get_or_create(&labels).inc();
        if let Some(took) = took {
            self.request_seconds.observe(took.as_secs_f64());
        }
    }

    pub(crate) fn batches(&self, rows: usize) {
        self.batch_rows.observe(rows as f64);
    }

    pub(crate) fn computed(&self, took: Duration) {
        self.batch_seconds.observe(took.as_secs_f64());
    }

    pub(crate) fn queue_rows(&self, rows: usize) {
        self.queue_rows.set(i64::try_from(rows).unwrap_or(i64::MAX));
    }

    /// Counts the bytes of tensors that were sent to load a replica.
    pub(crate) fn loaded(&self, bytes: u64) {
        self.load_bytes.inc_by(bytes);
    }

    /// Counts requests that another replica computes.
    pub(crate) fn handed_over(&self, requests: usize) {
        self.handed_over.inc_by(requests as u64);
    }

    pub(crate) fn replicas(&self, replicas: usize) {
        self.replicas
            .set(i64::try_from(replicas).unwrap_or(i64::MAX));
    }
}
