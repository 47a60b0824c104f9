//! What a server answers, whichever protocol a request comes by: its models and their metadata.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use tracing::{info, warn};

use crate::{
    access::Access,
    error::InferError,
    limits::{BodyBudget, BodyPermit},
    metrics::Metrics,
    pace::RefusalPace,
    protocol::{InferRequest, InferResponse, ModelMetadata, ServerMetadata, TensorMetadata, shown},
    served::{Served, list},
    signature::TensorSpec,
};

/// The name that a server gives itself.
const NAME: &str = "tensord-serve";

/// What computes the models, for their metadata. Other servers have names like `onnx_onnxruntime` here.
const PLATFORM: &str = "burn";

/// The extensions of the protocol that the server has, beyond its core.
const EXTENSIONS: [&str; 1] = ["binary_tensor_data"];

/// A server, for its protocols.
#[derive(Debug)]
pub(crate) struct Api {
    /// The versions of each model, the lowest first.
    models: BTreeMap<String, Vec<Arc<Served>>>,
    pub(crate) access: Access,
    pub(crate) budget: BodyBudget,
    pub(crate) metrics: Arc<Metrics>,
    pace: RefusalPace,
    /// Whether the server ends.
    ends: AtomicBool,
}

/// The way by which a request came.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Via {
    /// `http` or `grpc`.
    pub(crate) protocol: &'static str,
    pub(crate) peer: Option<SocketAddr>,
}

impl Api {
    /// The versions of a model in `models` are those with its name.
    pub(crate) fn new(
        models: &[Arc<Served>],
        access: Access,
        budget: BodyBudget,
        metrics: Arc<Metrics>,
    ) -> Self {
        let mut by_name = BTreeMap::<_, Vec<Arc<Served>>>::new();
        for served in models {
            let versions = by_name.entry(served.model.name.clone()).or_default();
            versions.push(served.clone());
        }
        let versions = by_name.values_mut();
        versions.for_each(|it| it.sort_by_key(|served| version_key(&served.model.version)));
        Self {
            models: by_name,
            access,
            budget,
            metrics,
            pace: RefusalPace::default(),
            ends: AtomicBool::new(false),
        }
    }

    /// From now on, the server is not ready.
    pub(crate) fn end(&self) {
        self.ends.store(true, Ordering::Relaxed);
    }

    /// Returns whether all models answer requests.
    pub(crate) fn is_ready(&self) -> bool {
        let mut all = self.models.values().flatten();
        !self.ends.load(Ordering::Relaxed) && all.all(|it| it.is_ready())
    }

    /// Returns whether a model answers requests.
    pub(crate) fn is_model_ready(&self, name: &str, version: &str) -> Result<bool, InferError> {
        let served = self.find(name, version)?;
        Ok(!self.ends.load(Ordering::Relaxed) && served.is_ready())
    }

    /// Returns a version of a model: the highest, if `version` is empty.
    ///
    /// # Errors
    ///
    /// If there is none, with what there is.
    pub(crate) fn find(&self, name: &str, version: &str) -> Result<&Arc<Served>, InferError> {
        let Some(versions) = self.models.get(name) else {
            return Err(InferError::NotFound(format!(
                "there is no model `{}`; there are {}",
                shown(name),
                list(self.models.keys().map(String::as_str))
            )));
        };
        let found = match version {
            "" => versions.last(),
            _ => versions.iter().find(|it| it.model.version == version),
        };
        found.ok_or_else(|| {
            let all = versions.iter().map(|it| it.model.version.as_str());
            InferError::NotFound(format!(
                "model `{name}` has no version `{}`; there are {}",
                shown(version),
                list(all)
            ))
        })
    }

    /// Waits before a request is refused because there is too much to do, if very many are.
    pub(crate) async fn pace(&self, error: &InferError) {
        if matches!(error, InferError::Overloaded { .. }) {
            self.pace.wait().await;
        }
    }

    /// Computes the answer to a request that arrived at a time, and logs it. `permits` are for the bytes of the request.
    /// Returns the permit for the outputs of the answer with it.
    pub(crate) async fn infer(
        &self,
        served: &Served,
        request: InferRequest,
        permits: Vec<Arc<BodyPermit>>,
        arrived: Instant,
        via: Via,
    ) -> Result<(InferResponse, BodyPermit), InferError> {
        let id = request.id.clone();
        let answered = served.infer(request, permits, arrived).await;
        let answered = answered.and_then(|(response, computed)| {
            let mut permit = BodyPermit::default();
            self.budget.take(response.output_bytes(), &mut permit)?;
            Ok((response, permit, computed))
        });
        let took = arrived.elapsed();
        let (model, version) = (&served.model.name, &served.model.version);
        let Via { protocol, peer } = via;
        match answered {
            Ok((response, permit, computed)) => {
                served.metrics.request(protocol, "ok", Some(computed.took));
                info!(
                    target: "tensord_serve::access",
                    protocol, ?peer, model, version, id,
                    rows = computed.rows, batch_rows = computed.batch_rows, ?took, "answered"
                );
                Ok((response, permit))
            }
            Err(error) => {
                Self::refused(served, &id, &error, arrived, via);
                Err(error)
            }
        }
    }

    /// Counts and logs a request that gets no answer.
    pub(crate) fn refused(
        served: &Served,
        id: &str,
        error: &InferError,
        arrived: Instant,
        via: Via,
    ) {
        let Via { protocol, peer } = via;
        let (model, version) = (&served.model.name, &served.model.version);
        let took = arrived.elapsed();
        served.metrics.request(protocol, error.name(), None);
        match error {
            InferError::ModelFailed(_) | InferError::Unavailable(_) => warn!(
                target: "tensord_serve::access",
                protocol, ?peer, model, version, id, ?took, "not answered: {error}"
            ),
            _ => info!(
                target: "tensord_serve::access",
                protocol, ?peer, model, version, id, ?took, "not answered: {error}"
            ),
        }
    }

    pub(crate) fn server_metadata(&self) -> ServerMetadata {
        ServerMetadata {
            name: NAME.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            extensions: EXTENSIONS.map(String::from).into(),
        }
    }

    pub(crate) fn model_metadata(
        &self,
        name: &str,
        version: &str,
    ) -> Result<ModelMetadata, InferError> {
        let served = self.find(name, version)?;
        let versions = self.models.get(name).into_iter().flatten();
        Ok(ModelMetadata {
            name: name.into(),
            versions: versions.map(|it| it.model.version.clone()).collect(),
            platform: PLATFORM.into(),
            inputs: served.model.inputs.iter().map(metadata_of).collect(),
            outputs: served.model.outputs.iter().map(metadata_of).collect(),
        })
    }
}

fn metadata_of(spec: &TensorSpec) -> TensorMetadata {
    TensorMetadata {
        name: spec.name.clone(),
        datatype: spec.datatype.name().into(),
        shape: spec.shape.clone(),
    }
}

/// Returns what versions are sorted by: numbers by their values, before other texts.
fn version_key(version: &str) -> (bool, u64, String) {
    let number = version.parse();
    (number.is_err(), number.unwrap_or_default(), version.into())
}
