//! Ends that do not wait for the device: its op, or a value that it was asked for, takes
//! longer than it may.

use std::{
    pin::pin,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use tensord_proto::v1::{Error, ErrorCode};
use tokio::time::timeout;

use super::{Session, Track};

impl Session {
    /// Whether the client was told that the session has ended. Its device may still be at
    /// its last op.
    pub(crate) fn has_ended(&self) -> bool {
        self.wire(Track::Ops).closing
    }

    /// Whether the session has ended and left its device.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire) && !self.at_hand.has_late_reads()
    }

    /// Ends the session at once if its device is at something for longer than it may, and
    /// says what that is for as long as it goes on.
    pub(crate) fn overdue(self: &Arc<Self>, now: Instant) -> Option<String> {
        let overdue = self.at_hand.look(now)?.to_string();
        self.expel(&overdue);
        Some(overdue)
    }

    /// Ends the session without waiting for what its device is at.
    fn expel(self: &Arc<Self>, reason: &str) {
        if self.end_announced.load(Ordering::Acquire) {
            return;
        }
        let error = Error::new(ErrorCode::Limit, reason);
        self.end(error.clone());
        self.cohort.leave(self.lease_rank, reason);
        self.send_end(error);
    }

    /// Waits for an answer of the device. If it does not come in time, the session ends,
    /// and its device counts as busy until it comes.
    pub(super) async fn in_time<T>(self: &Arc<Self>, answer: impl Future<Output = T>) -> T {
        let mut answer = pin!(answer);
        if let Ok(answer) = timeout(self.device_context.signals.op_timeout, &mut answer).await {
            return answer;
        }
        let late = self.at_hand.late();
        self.expel(&self.at_hand.late_read().to_string());
        self.device_context.signals.wake();
        let answer = answer.await;
        drop(late);
        answer
    }
}
