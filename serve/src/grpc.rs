//! The protocol over gRPC.

use std::{
    io::Read,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    middleware::{self, Next},
    response::Response,
};
use bytes::Bytes;
use flate2::read::{GzDecoder, ZlibDecoder};
use http::HeaderValue;
use tonic::{Code, Status, codec::CompressionEncoding, metadata::MetadataMap};

use crate::{
    api::{Api, Via},
    error::InferError,
    http::Peer,
    limits::{BodyBudget, BodyPermit, too_large},
    offload::offload,
    protocol::{
        grpc,
        messages::{
            ModelInferRequest, ModelInferResponse, ModelMetadataRequest, ModelMetadataResponse,
            ModelReadyRequest, ModelReadyResponse, ServerLiveRequest, ServerLiveResponse,
            ServerMetadataRequest, ServerMetadataResponse, ServerReadyRequest, ServerReadyResponse,
            grpc_inference_service_server::{GrpcInferenceService, GrpcInferenceServiceServer},
        },
        shown,
    },
};

/// The bytes before a message: whether it is compressed, and its length.
const FRAME_HEAD: usize = 5;

/// How many bytes are decompressed at a time.
const PIECE: usize = 64 << 10;

/// The calls for which no token is needed: whether the server lives and is ready.
const OPEN: [&str; 2] = [
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
];

/// The call that has tensors.
const INFER: &str = "/inference.GRPCInferenceService/ModelInfer";

/// Returns the routes of gRPC.
pub(crate) fn routes(api: Arc<Api>) -> Router {
    // Bodies were read within the limits of the server, and are not compressed any more.
    let mut service = GrpcInferenceServiceServer::new(Service { api: api.clone() })
        .max_decoding_message_size(usize::MAX)
        .max_encoding_message_size(usize::MAX);
    for compression in [CompressionEncoding::Gzip, CompressionEncoding::Deflate] {
        service = service.send_compressed(compression);
    }
    Router::new()
        .route_service("/inference.GRPCInferenceService/{call}", service)
        .layer(middleware::from_fn_with_state(api, check_and_read))
}

/// Checks the token of a call, and reads its body within the limits of the server. The answer counts until it is sent.
async fn check_and_read(State(api): State<Arc<Api>>, request: Request, next: Next) -> Response {
    let request = match checked(&api, request).await {
        Ok(request) => request,
        Err(error) => {
            api.pace(&error).await;
            return Status::from(error).into_http();
        }
    };
    let mut response = next.run(request).await;
    match response.extensions_mut().remove::<Arc<BodyPermit>>() {
        Some(permit) => response.map(|body| permit.keep_until_sent(body)),
        None => response,
    }
}

async fn checked(api: &Api, request: Request) -> Result<Request, InferError> {
    let path = request.uri().path();
    if !OPEN.contains(&path) {
        api.access.check(request.headers())?;
    }
    let is_inference = path == INFER;
    let (mut head, body) = request.into_parts();
    if !is_inference {
        let body = api.budget.read_small(body).await?;
        return Ok(Request::from_parts(head, Body::from(body)));
    }
    let (body, mut permit) = api.budget.read(body).await?;
    let encoding = head.headers.remove("grpc-encoding");
    let is_compressed = body.first() != Some(&0);
    let bytes = if is_compressed {
        usize::MAX
    } else {
        body.len()
    };
    let budget = api.budget.clone();
    let read = move || {
        let body = decompressed(body, encoding.as_ref(), &budget, &mut permit)?;
        grpc::check_parts(message_of(&body)?)?;
        Ok((body, permit))
    };
    let (body, permit) = offload(bytes, read).await?;
    // The permit is returned with the request.
    head.extensions.insert(Arc::new(permit));
    Ok(Request::from_parts(head, Body::from(body)))
}

/// Returns the message of a call: its body without the five bytes before it.
fn message_of(body: &[u8]) -> Result<&[u8], InferError> {
    let malformed =
        || InferError::Invalid("the body of the call is not one message of gRPC".into());
    let (head, message) = body.split_at_checked(FRAME_HEAD).ok_or_else(malformed)?;
    let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
    match usize::try_from(length) == Ok(message.len()) {
        true => Ok(message),
        false => Err(malformed()),
    }
}

/// Returns the body of a call without its compression, which counts as what it takes then.
fn decompressed(
    body: Bytes,
    encoding: Option<&HeaderValue>,
    budget: &BodyBudget,
    permit: &mut BodyPermit,
) -> Result<Bytes, InferError> {
    let message = message_of(&body)?;
    if body[0] == 0 {
        return Ok(body);
    }
    let mut reader: Box<dyn Read> = match encoding.map(HeaderValue::as_bytes) {
        Some(b"gzip") => Box::new(GzDecoder::new(message)),
        // As in HTTP, this is deflate with zlib's head.
        Some(b"deflate") => Box::new(ZlibDecoder::new(message)),
        other => {
            let other = other.map(String::from_utf8_lossy).unwrap_or_default();
            return Err(InferError::Invalid(format!(
                "the call is compressed as `{}`; `gzip` and `deflate` are understood",
                shown(&other)
            )));
        }
    };
    let (mut plain, mut piece) = (vec![0; FRAME_HEAD], vec![0; PIECE]);
    loop {
        let read = reader.read(&mut piece).map_err(|error| {
            InferError::Invalid(format!("the call cannot be decompressed: {error}"))
        })?;
        if read == 0 {
            break;
        }
        if plain.len() + read > budget.body_bytes() {
            return Err(too_large(budget.body_bytes()));
        }
        budget.take(body.len() + plain.len() + read, permit)?;
        plain.extend_from_slice(&piece[..read]);
    }
    let length =
        u32::try_from(plain.len() - FRAME_HEAD).map_err(|_| too_large(budget.body_bytes()))?;
    plain[1..FRAME_HEAD].copy_from_slice(&length.to_be_bytes());
    Ok(plain.into())
}

struct Service {
    api: Arc<Api>,
}

type Answer<T> = Result<tonic::Response<T>, Status>;

#[tonic::async_trait]
impl GrpcInferenceService for Service {
    async fn server_live(
        &self,
        _: tonic::Request<ServerLiveRequest>,
    ) -> Answer<ServerLiveResponse> {
        Ok(ServerLiveResponse { live: true }.into())
    }

    async fn server_ready(
        &self,
        _: tonic::Request<ServerReadyRequest>,
    ) -> Answer<ServerReadyResponse> {
        let ready = self.api.is_ready();
        Ok(ServerReadyResponse { ready }.into())
    }

    async fn model_ready(
        &self,
        request: tonic::Request<ModelReadyRequest>,
    ) -> Answer<ModelReadyResponse> {
        let ModelReadyRequest { name, version } = request.into_inner();
        let ready = self.api.is_model_ready(&name, &version)?;
        Ok(ModelReadyResponse { ready }.into())
    }

    async fn server_metadata(
        &self,
        _: tonic::Request<ServerMetadataRequest>,
    ) -> Answer<ServerMetadataResponse> {
        let metadata = ServerMetadataResponse::from(self.api.server_metadata());
        Ok(metadata.into())
    }

    async fn model_metadata(
        &self,
        request: tonic::Request<ModelMetadataRequest>,
    ) -> Answer<ModelMetadataResponse> {
        let ModelMetadataRequest { name, version } = request.into_inner();
        let metadata = self.api.model_metadata(&name, &version)?;
        Ok(ModelMetadataResponse::from(metadata).into())
    }

    async fn model_infer(
        &self,
        request: tonic::Request<ModelInferRequest>,
    ) -> Answer<ModelInferResponse> {
        match self.infer(request).await {
            Ok(answer) => Ok(answer),
            Err(error) => {
                self.api.pace(&error).await;
                Err(error.into())
            }
        }
    }
}

impl Service {
    /// Computes the answer to a request.
    async fn infer(
        &self,
        request: tonic::Request<ModelInferRequest>,
    ) -> Result<tonic::Response<ModelInferResponse>, InferError> {
        let arrived = Instant::now();
        let via = Via {
            protocol: "grpc",
            peer: request.extensions().get::<Peer>().map(|it| it.0),
        };
        let timeout = timeout_of(request.metadata());
        let (_, extensions, message) = request.into_parts();
        let served = self.api.find(&message.model_name, &message.model_version)?;
        let refused = |error: InferError| {
            Api::refused(served, "", &error, arrived, via);
            error
        };
        served.admit().map_err(refused)?;
        let has_numbers = message.raw_input_contents.is_empty();
        let mut request = grpc::decode(message).map_err(refused)?;
        request.timeout = request.timeout.into_iter().chain(timeout).min();
        let mut elements = BodyPermit::default();
        if has_numbers {
            let taken = self.api.budget.take(request.input_bytes(), &mut elements);
            taken.map_err(refused)?;
        }
        let message = extensions.get::<Arc<BodyPermit>>().cloned();
        drop(extensions);
        let permits = message.into_iter().chain([Arc::new(elements)]).collect();
        let computing = self.api.infer(served, request, permits, arrived, via);
        let (response, permit) = computing.await?;
        let mut answer = tonic::Response::new(grpc::encode(response));
        answer.extensions_mut().insert(Arc::new(permit));
        Ok(answer)
    }
}

/// Returns the time for which the client waits: the header `grpc-timeout`, a number of up to eight digits and its unit.
fn timeout_of(metadata: &MetadataMap) -> Option<Duration> {
    let text = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let number: u64 = digits.parse().ok().filter(|_| digits.len() <= 8)?;
    match unit {
        "H" => Some(Duration::from_secs(number * 3600)),
        "M" => Some(Duration::from_secs(number * 60)),
        "S" => Some(Duration::from_secs(number)),
        "m" => Some(Duration::from_millis(number)),
        "u" => Some(Duration::from_micros(number)),
        "n" => Some(Duration::from_nanos(number)),
        _ => None,
    }
}

impl From<InferError> for Status {
    fn from(error: InferError) -> Self {
        let code: Code = error.grpc_code();
        let mut status = Self::new(code, error.to_string());
        if let Some(seconds) = error.retry_after_secs() {
            status.metadata_mut().insert("retry-after", seconds.into());
        }
        status
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(is_compressed: bool, message: &[u8]) -> Bytes {
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        [&[u8::from(is_compressed)], &length[..], message]
            .concat()
            .into()
    }

    #[test]
    fn compressed_calls_count_as_what_they_take() {
        use std::io::Write as _;
        let budget = |body_bytes, all_body_bytes| {
            BodyBudget::new(&crate::Limits {
                body_bytes,
                all_body_bytes,
                ..crate::Limits::default()
            })
        };
        let gzip = |bytes: usize| {
            let mut encoder =
                flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(&vec![7; bytes]).unwrap();
            call(true, &encoder.finish().unwrap())
        };
        let check_with = |budget: &BodyBudget, body: Bytes, encoding: Option<&'static str>| {
            let encoding = encoding.map(HeaderValue::from_static);
            decompressed(body, encoding.as_ref(), budget, &mut BodyPermit::default())
        };
        let large = budget(100_000, 1 << 30);
        let check = |body, encoding| check_with(&large, body, encoding);
        assert_eq!(check(gzip(1000), Some("gzip")), Ok(call(false, &[7; 1000])));
        assert_eq!(
            check(call(false, b"plain"), None),
            Ok(call(false, b"plain"))
        );
        assert_eq!(check(gzip(200_000), Some("gzip")), Err(too_large(100_000)));
        let small = budget(100_000, 64_000);
        assert!(matches!(
            check_with(&small, gzip(80_000), Some("gzip")),
            Err(InferError::Overloaded { .. })
        ));
        for (body, encoding) in [
            (gzip(10), None),
            (gzip(10), Some("zstd")),
            (call(true, b"no"), Some("gzip")),
        ] {
            assert!(matches!(check(body, encoding), Err(InferError::Invalid(_))));
        }
        let cut = gzip(1000).slice(..20);
        assert!(matches!(
            check(cut, Some("gzip")),
            Err(InferError::Invalid(_))
        ));
    }

    #[track_caller]
    fn check(header: &'static str, expected: Option<Duration>) {
        let mut metadata = MetadataMap::new();
        metadata.insert(
            "grpc-timeout",
            tonic::metadata::MetadataValue::from_static(header),
        );
        assert_eq!(timeout_of(&metadata), expected, "{header}");
    }

    #[test]
    fn timeouts_have_units() {
        check("2S", Some(Duration::from_secs(2)));
        check("1500m", Some(Duration::from_millis(1500)));
        check("7u", Some(Duration::from_micros(7)));
        check("1H", Some(Duration::from_secs(3600)));
        check("123456789S", None);
        check("5", None);
        check("S", None);
        check("-1S", None);
    }
}
