//! What a server takes from its clients at most, and the reading of bodies within that.

use std::{
    pin::Pin,
    sync::Arc,
    task::{self, Poll},
    time::Duration,
};

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::InferError;

/// The unit in which the bytes of all bodies are counted.
const UNIT: usize = 1024;

/// The longest time that may be set; longer ones count as this. Times that are added to others must not overflow.
pub(crate) const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// Most bytes of a body that is no inference.
const SMALL_BYTES: usize = 4096;

/// What a server takes from its clients at most.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Most connections at a time; further ones are closed.
    pub connections: usize,
    /// Most bytes of the body of a request, also once it is decompressed.
    pub body_bytes: usize,
    /// Most bytes of all bodies that the server has in memory at a time, of requests and of answers that clients have not
    /// taken, as they are without compression. Elements in JSON count as its text, and once they are decoded also as their values.
    pub all_body_bytes: usize,
    /// In which time the body of a request must arrive, and its answer be taken.
    pub body_timeout: Duration,
    /// In which time a connection must have finished its TLS handshake and sent its first request, and a request its headers.
    pub header_timeout: Duration,
}

impl Default for Limits {
    /// 1,024 connections; bodies of 64 MiB, and of 1 GiB in all; 30 s for a body, and 10 s for headers.
    fn default() -> Self {
        Self {
            connections: 1024,
            body_bytes: 64 << 20,
            all_body_bytes: 1 << 30,
            body_timeout: Duration::from_secs(30),
            header_timeout: Duration::from_secs(10),
        }
    }
}

impl Limits {
    /// Returns the limits with values that can be counted with.
    pub(crate) fn clamped(self) -> Self {
        Self {
            connections: self.connections.min(Semaphore::MAX_PERMITS),
            body_timeout: self.body_timeout.min(LONGEST),
            header_timeout: self.header_timeout.min(LONGEST),
            ..self
        }
    }
}

/// The bytes of bodies that the server may still take into memory.
#[derive(Debug, Clone)]
pub(crate) struct BodyBudget {
    limits: Limits,
    left: Arc<Semaphore>,
}

/// A part of the budget, which is returned when it is dropped.
#[derive(Debug, Default)]
pub(crate) struct BodyPermit(Option<OwnedSemaphorePermit>);

impl BodyPermit {
    /// Returns the permit when all bytes of a body have been sent, or dropped.
    pub(crate) fn keep_until_sent(self: Arc<Self>, body: Body) -> Body {
        Body::new(ChargedBody { body, permit: self })
    }
}

/// A body whose bytes have the permit for them.
struct ChargedBody {
    body: Body,
    permit: Arc<BodyPermit>,
}

impl http_body::Body for ChargedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut task::Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        let charged = |bytes| {
            let _permit = self.permit.clone();
            Bytes::from_owner(Charged { bytes, _permit })
        };
        polled.map(|frame| frame.map(|frame| frame.map(|frame| frame.map_data(charged))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Bytes with the permit for them.
struct Charged {
    bytes: Bytes,
    _permit: Arc<BodyPermit>,
}

impl AsRef<[u8]> for Charged {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl BodyBudget {
    pub(crate) fn new(limits: &Limits) -> Self {
        let units = (limits.all_body_bytes / UNIT).min(Semaphore::MAX_PERMITS);
        Self {
            limits: limits.clone(),
            left: Arc::new(Semaphore::new(units)),
        }
    }

    /// Reads a body, which must arrive in time and stay within the limits. Keep the permit as long as its bytes.
    ///
    /// # Errors
    ///
    /// If it does not, or the connection is lost.
    pub(crate) async fn read(&self, body: Body) -> Result<(Bytes, BodyPermit), InferError> {
        let mut permit = BodyPermit::default();
        let read = self.read_all(body, self.limits.body_bytes, |so_far| {
            self.take(so_far, &mut permit)
        });
        let body = self.in_time(read).await?;
        Ok((body, permit))
    }

    /// Reads a body that hardly has bytes, and does not count.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub(crate) async fn read_small(&self, body: Body) -> Result<Bytes, InferError> {
        self.in_time(self.read_all(body, SMALL_BYTES, |_| Ok(())))
            .await
    }

    async fn in_time(
        &self,
        read: impl Future<Output = Result<Bytes, InferError>>,
    ) -> Result<Bytes, InferError> {
        let timeout = self.limits.body_timeout;
        let body = tokio::time::timeout(timeout, read).await;
        body.unwrap_or_else(|_| {
            Err(InferError::SlowBody(format!(
                "the body of the request did not arrive within {timeout:?}"
            )))
        })
    }

    /// Reads a body of up to so many bytes. Before more are kept, `take` is called with how many there would be.
    async fn read_all(
        &self,
        mut body: Body,
        most_bytes: usize,
        mut take: impl FnMut(usize) -> Result<(), InferError>,
    ) -> Result<Bytes, InferError> {
        let (mut first, mut all) = (Bytes::new(), BytesMut::new());
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| {
                InferError::Invalid(format!("the body of the request cannot be read: {error}"))
            })?;
            let Ok(data) = frame.into_data() else {
                continue;
            };
            let so_far = first.len() + all.len();
            if data.len() > most_bytes.saturating_sub(so_far) {
                return Err(too_large(most_bytes));
            }
            take(so_far + data.len())?;
            // A body that comes at once is not copied.
            if so_far == 0 {
                first = data;
                continue;
            }
            if all.is_empty() {
                all.extend_from_slice(&std::mem::take(&mut first));
            }
            all.extend_from_slice(&data);
        }
        Ok(if all.is_empty() { first } else { all.freeze() })
    }

    /// Grows a permit to so many bytes, if it is for fewer.
    pub(crate) fn take(&self, bytes: usize, permit: &mut BodyPermit) -> Result<(), InferError> {
        let held = permit
            .0
            .as_ref()
            .map_or(0, OwnedSemaphorePermit::num_permits);
        let more = bytes.div_ceil(UNIT).saturating_sub(held);
        let units = u32::try_from(more).unwrap_or(u32::MAX);
        match self.left.clone().try_acquire_many_owned(units) {
            Ok(more) => {
                match &mut permit.0 {
                    Some(permit) => permit.merge(more),
                    None => permit.0 = Some(more),
                }
                Ok(())
            }
            Err(_) => Err(InferError::Overloaded {
                reason: format!(
                    "the bodies of all requests and answers would have more than {} bytes",
                    self.limits.all_body_bytes
                ),
                retry_after: Duration::from_secs(1),
            }),
        }
    }

    /// Returns the most bytes of a body.
    pub(crate) fn body_bytes(&self) -> usize {
        self.limits.body_bytes
    }
}

/// Returns the error for a body that has more bytes than it may have.
pub(crate) fn too_large(most_bytes: usize) -> InferError {
    InferError::TooLarge(format!(
        "the body of the request has more than the {most_bytes} bytes that the server takes"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(body_bytes: usize, all_body_bytes: usize) -> BodyBudget {
        BodyBudget::new(&Limits {
            body_bytes,
            all_body_bytes,
            ..Limits::default()
        })
    }

    /// A body in pieces of so many bytes.
    fn body(pieces: usize, bytes: usize) -> Body {
        let pieces = (0..pieces).map(move |_| Ok::<_, std::io::Error>(vec![7; bytes]));
        Body::from_stream(futures::stream::iter(pieces))
    }

    #[tokio::test]
    async fn small_pieces_count_by_their_bytes() {
        let budget = budget(1 << 20, 4096);
        let (bytes, permit) = budget.read(body(4000, 1)).await.unwrap();
        assert_eq!(bytes, vec![7; 4000]);
        let error = budget.read(body(1, 1)).await.unwrap_err();
        assert!(matches!(error, InferError::Overloaded { .. }), "{error}");
        drop(permit);
        assert!(budget.read(body(4, 1024)).await.is_ok());
        assert!(budget.read(body(5, 1024)).await.is_err());
        // What failed holds nothing.
        assert!(budget.read(body(1, 4096)).await.is_ok());
    }

    #[tokio::test]
    async fn permit_is_kept_as_long_as_the_bytes_of_an_answer() {
        let budget = budget(1 << 20, 4096);
        let mut permit = BodyPermit::default();
        budget.take(4096, &mut permit).unwrap();
        let mut body = Arc::new(permit).keep_until_sent(body(2, 2048));
        let mut frames = Vec::new();
        while let Some(frame) = body.frame().await {
            frames.push(frame.unwrap().into_data().unwrap());
        }
        drop(body);
        assert_eq!(frames.concat(), vec![7; 4096]);
        frames.pop();
        let mut other = BodyPermit::default();
        assert!(budget.take(1, &mut other).is_err());
        frames.pop();
        assert!(budget.take(4096, &mut other).is_ok());
    }

    #[tokio::test]
    async fn large_bodies_are_refused() {
        let budget = budget(100, 1 << 20);
        assert!(budget.read(body(10, 10)).await.is_ok());
        let error = budget.read(body(11, 10)).await.unwrap_err();
        assert_eq!(error, too_large(100));
        assert_eq!(
            budget
                .read_small(body(1, SMALL_BYTES + 1))
                .await
                .unwrap_err(),
            too_large(SMALL_BYTES)
        );
    }
}
