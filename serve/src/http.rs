//! The protocol over HTTP: the routes, what is JSON and what is bytes, and the form of errors.

use std::{net::SocketAddr, sync::Arc, time::Instant};

use axum::{
    Json, Router,
    body::Body,
    extract::{Extension, Path, Request, State},
    middleware::{self, Next},
    response::{Html, IntoResponse, Response},
    routing::{get, post},
};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use tower_http::{
    CompressionLevel, compression::CompressionLayer, decompression::RequestDecompressionLayer,
};

use crate::{
    api::{Api, Via},
    error::InferError,
    limits::BodyPermit,
    metrics,
    offload::offload,
    protocol::{ErrorBody, InferRequest, ModelMetadata, ServerMetadata, json, shown},
};

/// The header with the number of bytes of JSON that come before the bytes of tensors.
const JSON_LENGTH: &str = "inference-header-content-length";

/// The address of a client, as an extension of its requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer(pub(crate) SocketAddr);

/// A page that a server has beside its models.
#[derive(Debug, Clone)]
pub(crate) struct Page {
    pub(crate) path: String,
    pub(crate) html: &'static str,
}

/// Returns the routes of HTTP.
pub(crate) fn routes(api: Arc<Api>, pages: &[Page]) -> Router {
    let model = Router::new()
        .route("/", get(model_metadata))
        .route("/ready", get(model_ready))
        .route("/infer", post(infer));
    let with_token = Router::new()
        .route("/v2", get(server_metadata))
        .route("/v2/", get(server_metadata))
        .nest("/v2/models/{model}", model.clone())
        .nest("/v2/models/{model}/versions/{version}", model)
        .route("/metrics", get(metrics_page))
        .route_layer(middleware::from_fn_with_state(api.clone(), check_token));
    let mut open = Router::new()
        .route("/v2/health/live", get(|| async { StatusCode::OK }))
        .route("/v2/health/ready", get(ready));
    for page in pages {
        let html = page.html;
        open = open.route(&page.path, get(move || async move { Html(html) }));
    }
    let compression = CompressionLayer::new().quality(CompressionLevel::Fastest);
    with_token
        .merge(open)
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(RequestDecompressionLayer::new())
        .layer(compression)
        .with_state(api)
}

async fn check_token(State(api): State<Arc<Api>>, request: Request, next: Next) -> Response {
    match api.access.check(request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

async fn no_route(request: Request) -> Response {
    let path = request.uri().path();
    InferError::NotFound(format!(
        "there is no `{path}`; models are at /v2/models/<name>"
    ))
    .into_response()
}

async fn no_method(request: Request) -> Response {
    let (method, path) = (request.method(), request.uri().path());
    let text = format!(
        "`{path}` does not take {method}: inferences are requested with POST, and all else with GET"
    );
    (StatusCode::METHOD_NOT_ALLOWED, Json(ErrorBody::new(&text))).into_response()
}

async fn ready(State(api): State<Arc<Api>>) -> StatusCode {
    status_of(api.is_ready())
}

async fn server_metadata(State(api): State<Arc<Api>>) -> Json<ServerMetadata> {
    Json(api.server_metadata())
}

async fn metrics_page(State(api): State<Arc<Api>>) -> impl IntoResponse {
    (
        [(header::CONTENT_TYPE, metrics::CONTENT_TYPE)],
        api.metrics.page(),
    )
}

/// The model that a path names.
#[derive(Debug, serde::Deserialize)]
struct Named {
    model: String,
    #[serde(default)]
    version: String,
}

async fn model_metadata(
    State(api): State<Arc<Api>>,
    Path(named): Path<Named>,
) -> Result<Json<ModelMetadata>, InferError> {
    api.model_metadata(&named.model, &named.version).map(Json)
}

async fn model_ready(
    State(api): State<Arc<Api>>,
    Path(named): Path<Named>,
) -> Result<StatusCode, InferError> {
    api.is_model_ready(&named.model, &named.version)
        .map(status_of)
}

fn status_of(is_ready: bool) -> StatusCode {
    match is_ready {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    }
}

async fn infer(
    State(api): State<Arc<Api>>,
    Path(named): Path<Named>,
    peer: Option<Extension<Peer>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, InferError> {
    let answered = answer(&api, &named, peer, &headers, body).await;
    if let Err(error) = &answered {
        api.pace(error).await;
    }
    answered
}

/// Reads a request and computes the answer to it.
async fn answer(
    api: &Api,
    named: &Named,
    peer: Option<Extension<Peer>>,
    headers: &HeaderMap,
    body: Body,
) -> Result<Response, InferError> {
    let arrived = Instant::now();
    let via = Via {
        protocol: "http",
        peer: peer.map(|Extension(Peer(address))| address),
    };
    let served = api.find(&named.model, &named.version)?;
    let refused = |error: InferError| {
        Api::refused(served, "", &error, arrived, via);
        error
    };
    // Before the body is read: a server that has too much to do must not spend its time on that.
    served.admit().map_err(refused)?;
    let (request, permit) = read(api, headers, body).await.map_err(refused)?;
    // From its last byte on, so that a slow sender does not take the time of the model.
    let permits = vec![Arc::new(permit)];
    let computing = api.infer(served, request, permits, Instant::now(), via);
    let (response, permit) = computing.await?;
    let bytes = response.output_bytes();
    // The permit is held until the work has ended, also if the client does not wait for it.
    let encode = move || Ok((json::encode(&response), permit));
    let (encoded, mut permit) = offload(bytes, encode).await?;
    // JSON may be longer than the outputs. The request counts as answered already.
    api.budget.take(encoded.body.len(), &mut permit)?;
    let body = Arc::new(permit).keep_until_sent(encoded.body.into());
    let content_type = match encoded.header_len {
        Some(_) => "application/octet-stream",
        None => "application/json",
    };
    let mut response = ([(header::CONTENT_TYPE, content_type)], body).into_response();
    if let Some(length) = encoded.header_len {
        response
            .headers_mut()
            .insert(JSON_LENGTH, HeaderValue::from(length));
    }
    Ok(response)
}

/// Reads and decodes the body of a request.
async fn read(
    api: &Api,
    headers: &HeaderMap,
    body: Body,
) -> Result<(InferRequest, BodyPermit), InferError> {
    let json_length = match headers.get(JSON_LENGTH) {
        None => None,
        Some(value) => {
            let length = value
                .to_str()
                .ok()
                .and_then(|it| it.trim().parse::<usize>().ok());
            Some(length.ok_or_else(|| {
                InferError::Invalid(format!(
                    "the header Inference-Header-Content-Length is `{}`; it must be the number of bytes of JSON",
                    shown(&String::from_utf8_lossy(value.as_bytes()))
                ))
            })?)
        }
    };
    let (body, permit) = api.budget.read(body).await?;
    // Binary parts are not copied.
    let bytes = json_length.unwrap_or(body.len());
    // The permit is held until the work has ended, also if the client does not wait for it.
    let decode = move || Ok((json::decode(body, json_length)?, permit));
    let (request, mut permit) = offload(bytes, decode).await?;
    // The parts have the other bytes of the body; what the inputs have beyond these was made of its JSON.
    api.budget
        .take(bytes + request.input_bytes(), &mut permit)?;
    Ok((request, permit))
}

impl IntoResponse for InferError {
    fn into_response(self) -> Response {
        let mut response =
            (self.http_status(), Json(ErrorBody::new(&self.to_string()))).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after_secs() {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self == Self::Unauthorized {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
