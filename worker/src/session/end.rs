//! Ends a session without waiting for its device, when an op or a read exceeds the op
//! timeout.

use std::{
    pin::pin,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use tensord_proto::v1::{Error, ErrorCode};
use tokio::time::timeout;

use super::{Session, Track};

impl Session {
    /// Returns whether `Closed` is queued for the client. The device may still be
    /// executing the session's last op.
    pub(crate) fn has_ended(&self) -> bool {
        self.wire(Track::Ops).closing
    }

    /// Returns whether the session has ended and the device executes nothing for it.
    pub(crate) fn is_torn_down(&self) -> bool {
        self.torn_down.load(Ordering::Acquire) && !self.op_progress.has_late_reads()
    }

    /// Ends the session at once if an op or a read exceeds the op timeout. Returns a
    /// description of the op or read for as long as it has not returned.
    pub(crate) fn overdue(self: &Arc<Self>, now: Instant) -> Option<String> {
        let overdue = self.op_progress.check(now)?.to_string();
        self.end_overdue(&overdue);
        Some(overdue)
    }

    /// Ends the session without waiting for the op or read in progress.
    fn end_overdue(self: &Arc<Self>, reason: &str) {
        if self.end_announced.load(Ordering::Acquire) {
            return;
        }
        let error = Error::new(ErrorCode::Limit, reason);
        self.end(error.clone());
        self.cohort.leave(self.lease_rank, reason);
        self.send_end(error);
    }

    /// Waits until the device has read a value. If that exceeds the op timeout, the
    /// session ends, and its device counts as busy until the value has been read.
    pub(super) async fn with_op_timeout<T>(self: &Arc<Self>, answer: impl Future<Output = T>) -> T {
        let mut answer = pin!(answer);
        if let Ok(answer) = timeout(self.device_context.signals.op_timeout, &mut answer).await {
            return answer;
        }
        let late = self.op_progress.begin_late_read();
        self.end_overdue(&self.op_progress.overdue_read().to_string());
        self.device_context.signals.wake();
        let answer = answer.await;
        drop(late);
        answer
    }
}
