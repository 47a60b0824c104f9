//! A request for a lease, while it is in the pool's queue.

use std::{
    future::pending,
    sync::Arc,
    time::{Duration, Instant},
};

use tensord_proto::{
    ids::{LeaseId, RequestId},
    v1,
};
use tokio::sync::{oneshot, watch};

use crate::{
    control::{
        LeaseCall, RequestOutcome, RequestReplies, handle::ControlHandle, lease_watch::LeaseWatch,
    },
    error::LeaseError,
    lease::{LeaseEvents, LeaseRequest},
};

/// A request that the pool may still grant. Dropping it cancels the request, or releases
/// the lease if it was granted meanwhile.
struct QueuedRequest {
    id: RequestId,
    control: Arc<ControlHandle>,
    position: watch::Receiver<u32>,
    outcome: oneshot::Receiver<RequestOutcome>,
    is_over: bool,
}

impl Drop for QueuedRequest {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        // No outcome is sent after this.
        self.outcome.close();
        if let Ok(RequestOutcome::Granted(granted, _)) = self.outcome.try_recv() {
            self.control.release(LeaseId(granted.lease_id));
        } else {
            self.control.cancel(self.id);
        }
    }
}

fn in_millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Returns the message of a request.
///
/// # Errors
///
/// When the request is for a share that no device has.
fn message(id: RequestId, request: &LeaseRequest) -> Result<v1::LeaseRequest, LeaseError> {
    Ok(v1::LeaseRequest {
        request_id: id.0,
        devices: request.devices,
        kind: request.kind.clone(),
        memory_bytes: request.memory_bytes,
        durability: v1::Durability::from(request.durability).into(),
        recover_within_ms: request.recover_within.map(in_millis),
        priority: request.priority,
        max_duration_ms: request.max_duration.map(in_millis),
        spot: request.spot,
        may_end: request.may_end,
        share_permille: request.share_permille()?,
    })
}

/// Sends `request` to the pool and waits until it is granted. Sends `events` what it waits for.
///
/// # Errors
///
/// When the request is for a share that no device has, the pool refuses, the request's timeout passes, or the
/// client is shut down.
pub(super) async fn wait_for_grant(
    control: &Arc<ControlHandle>,
    request: LeaseRequest,
    events: &LeaseEvents,
) -> Result<(v1::Granted, LeaseWatch), LeaseError> {
    let begun = Instant::now();
    let (position, positions) = watch::channel(0);
    let (outcome, outcomes) = oneshot::channel();
    let id = control.new_request();
    let lease_call = LeaseCall {
        request: message(id, &request)?,
        replies: RequestReplies {
            position,
            outcome,
            events: events.clone(),
        },
    };
    control.request(lease_call).await?;
    let mut queued = QueuedRequest {
        id,
        control: control.clone(),
        position: positions,
        outcome: outcomes,
        is_over: false,
    };
    let (mut on_queued, mut known_position) = (request.on_queued, 0);
    // Without a timeout, the request waits until the pool grants or refuses it.
    let timeout = request.timeout;
    let expired = async {
        match timeout {
            // The timer of the client's runtime, so that any executor can run this.
            Some(limit) => drop(control.timeout(limit, pending::<()>()).await),
            None => pending().await,
        }
    };
    tokio::pin!(expired);
    loop {
        tokio::select! {
            biased;
            Ok(()) = queued.position.changed() => {
                let position = *queued.position.borrow_and_update();
                if let Some(on_queued) = &mut on_queued
                    && position != known_position
                {
                    on_queued(position);
                }
                known_position = position;
            }
            outcome = &mut queued.outcome => {
                queued.is_over = true;
                return match outcome {
                    Ok(RequestOutcome::Granted(granted, watch)) => Ok((granted, watch)),
                    Ok(RequestOutcome::Refused(error)) => Err(LeaseError::refused(error)),
                    Err(_) => Err(LeaseError::Closed),
                };
            }
            () = &mut expired => {
                let waited: Duration = begun.elapsed();
                let position = *queued.position.borrow();
                return Err(LeaseError::TimedOut { waited, position });
            }
        }
    }
}
