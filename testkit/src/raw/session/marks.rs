//! A session's marks, and how it is restored after the process of its lease has died.

use std::time::Duration;

use tensord_proto::v1::{Mark, Marked, Open, RestorePoint, frame::Body};
use tokio::time::timeout;

use super::{
    super::{ANSWER_DEADLINE, SessionError, Target},
    RawSession, dial_tcp, greet,
};

impl RawSession {
    /// Keeps all frames from now on, also acknowledged ones, so that [`restore`](Self::restore)
    /// can send them again.
    pub fn begin_journal(&mut self) {
        self.duplex.outbox_mut().begin_journal();
    }

    /// Queues a mark and returns its position. The op codec begins anew after it.
    pub fn mark(&mut self, mark: u64, committed: u64) -> RestorePoint {
        self.push(Body::Mark(Mark { mark, committed }));
        self.encoder.restart();
        let (frames, bytes) = self.duplex.outbox().end();
        RestorePoint {
            mark,
            frames,
            bytes,
            ..RestorePoint::default()
        }
    }

    /// Returns the worker's next reply to a mark. Drops other replies that arrive first.
    ///
    /// # Errors
    ///
    /// If the session is over.
    ///
    /// # Panics
    ///
    /// If no reply arrives.
    pub async fn marked(&mut self) -> Result<Marked, SessionError> {
        loop {
            if let Body::Marked(marked) = self.next().await? {
                return Ok(marked);
            }
        }
    }

    /// Goes on in the process that follows the one that has died: resumes with the restore
    /// points of `open`, and sends the frames after the one that the worker chooses again. Tries
    /// again until the worker has noticed that the process has died.
    ///
    /// # Errors
    ///
    /// The worker's refusal; or if the worker chooses a mark that `open` does not name, or frames
    /// after it are not kept.
    ///
    /// # Panics
    ///
    /// If the worker does not reply.
    pub async fn restore(&mut self, target: &Target, open: Open) -> Result<(), SessionError> {
        let open = Open {
            resume: true,
            received: self.duplex.inbox().received(),
            ..open
        };
        let protocol = |e: &dyn std::fmt::Display| SessionError::Protocol(e.to_string());
        let greeted = timeout(ANSWER_DEADLINE, async {
            loop {
                let greeted = async {
                    let mut link = dial_tcp(target).await?;
                    let opened = greet(&mut link, Body::Open(open.clone())).await?;
                    Ok((link, opened))
                };
                match greeted.await {
                    Err(SessionError::Lost(_)) => {
                        tokio::time::sleep(Duration::from_millis(10)).await
                    }
                    greeted => return greeted,
                }
            }
        });
        let (link, opened) = greeted.await.expect("the worker answers")?;
        let point = open.restore.iter().find(|point| point.mark == opened.mark);
        let point = point.ok_or_else(|| protocol(&"the worker has restored another mark"))?;
        let restored = self.duplex.restore(point.frames, opened.credit_bytes);
        restored.map_err(|e| protocol(&e))?;
        (self.link, self.opened) = (link, opened);
        Ok(())
    }
}
