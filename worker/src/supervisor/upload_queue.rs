//! Uploads that the process of a lease has sent to be kept. The worker verifies them, which takes a while
//! for many bytes, and reads the process's other messages meanwhile: other leases may wait for a turn that
//! one of these returns.

use std::{collections::VecDeque, future::Future, pin::Pin};

use tokio::task::spawn_blocking;
use tracing::debug;

use super::{
    Supervisor,
    kept_uploads::{Added, KeptSegment},
    lease_queues::QueuedTask,
};
use crate::{
    blobs::shared::{Segment, SegmentError},
    locks::lock,
    memory_file::MemoryFile,
    process_message::KeptUploads,
};

/// Most segments of a process that wait. Further ones are not kept.
const MAX_WAITING: usize = 16;

/// The keeping of a segment. An error is the rule that the process broke.
type Keeping<'a> = Pin<Box<dyn Future<Output = Result<(), String>> + Send + 'a>>;

/// The segments of a process, which are kept one after the other.
pub(super) struct UploadQueue<'a> {
    supervisor: &'a Supervisor,
    tenant: String,
    waiting: VecDeque<(KeptUploads, MemoryFile)>,
    /// The number of the segment that is being kept.
    current: Option<(u64, Keeping<'a>)>,
}

impl<'a> UploadQueue<'a> {
    /// Creates the queue of a process of `tenant`.
    pub(super) fn new(supervisor: &'a Supervisor, tenant: String) -> Self {
        Self {
            supervisor,
            tenant,
            waiting: VecDeque::new(),
            current: None,
        }
    }

    /// Adds a segment. Drops it and returns `false` if too many wait: a kept upload only saves a later one.
    pub(super) fn push(&mut self, uploads: KeptUploads, file: MemoryFile) -> bool {
        let has_room = self.waiting.len() < MAX_WAITING;
        if has_room {
            self.waiting.push_back((uploads, file));
        }
        has_room
    }

    /// Returns the number of the next segment when it is kept, or there is no room for it. Never completes
    /// if there is none. May be dropped and called again. An error is the rule that the process broke.
    pub(super) async fn kept(&mut self) -> Result<u64, String> {
        match self.start_next() {
            Some((number, current)) => {
                let number = *number;
                let kept = current.await;
                self.current = None;
                kept.map(|()| number)
            }
            None => std::future::pending().await,
        }
    }

    /// Completes when all segments are kept. An error is the rule that the process broke.
    pub(super) async fn all_kept(&mut self) -> Result<(), String> {
        while self.start_next().is_some() {
            self.kept().await?;
        }
        Ok(())
    }

    /// Starts with the next segment, unless one is in progress.
    fn start_next(&mut self) -> Option<&mut (u64, Keeping<'a>)> {
        if self.current.is_none() {
            let (uploads, file) = self.waiting.pop_front()?;
            let (tenant, number) = (self.tenant.clone(), uploads.number);
            let keeping = self.supervisor.keep_uploads(tenant, uploads, file);
            self.current = Some((number, Box::pin(keeping)));
        }
        self.current.as_mut()
    }
}

impl Supervisor {
    /// Keeps the uploads of a session of `tenant`, and passes them on to the tenant's
    /// processes. An error is the rule that the sending process broke.
    async fn keep_uploads(
        &self,
        tenant: String,
        uploads: KeptUploads,
        file: MemoryFile,
    ) -> Result<(), String> {
        let max_bytes = lock(&self.kept_uploads).capacity_bytes();
        let verifying =
            spawn_blocking(move || Segment::verify(file, uploads.sizes_bytes, max_bytes));
        let (segment, hashes) = match verifying.await.map_err(|e| e.to_string())? {
            Ok(verified) => verified,
            Err(SegmentError::Violation) => return Err(SegmentError::Violation.to_string()),
            Err(e) => {
                debug!("uploads are not kept: {e}");
                return Ok(());
            }
        };
        let kept = KeptSegment { segment, hashes };
        let added = lock(&self.kept_uploads).add(&tenant, kept.clone());
        match added {
            Added::Refused => return Ok(()),
            Added::Kept => {}
            Added::Merge(pair) => {
                let [one, other] = *pair;
                let merging = spawn_blocking(move || one.merge(other));
                if let Ok(Ok(merged)) = merging.await {
                    lock(&self.kept_uploads).add(&tenant, merged);
                }
            }
        }
        for lease in lock(&self.leases).values() {
            if lease.tenant == tenant {
                lease.queue(QueuedTask::of_uploads(kept.clone()));
            }
        }
        Ok(())
    }
}
