//! The way from the replicas that compute a request to the client that waits for it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use crate::{error::InferError, job::Answer};

type Sender = oneshot::Sender<Result<Answer, InferError>>;
type Receiver = oneshot::Receiver<Result<Answer, InferError>>;

/// Sends the answer to a request, which several replicas may compute: the first answer counts. If all clones are dropped
/// without one, the receiver gets an error.
#[derive(Debug, Clone)]
pub(crate) struct AnswerSender(Arc<Mutex<Option<Sender>>>);

impl AnswerSender {
    pub(crate) fn new() -> (Self, Receiver) {
        let (sender, receiver) = oneshot::channel();
        (Self(Arc::new(Mutex::new(Some(sender)))), receiver)
    }

    /// Sends the answer, unless there was one, or nobody waits for it any more.
    pub(crate) fn send(&self, answer: Result<Answer, InferError>) {
        if let Some(sender) = self.sender().take() {
            // Nobody may wait for it any more.
            let _ = sender.send(answer);
        }
    }

    /// Returns whether there was an answer, or nobody waits for it any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.sender()
            .as_ref()
            .is_none_or(oneshot::Sender::is_closed)
    }

    fn sender(&self) -> MutexGuard<'_, Option<Sender>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(batch_rows: usize) -> Answer {
        Answer {
            outputs: Vec::new(),
            batch_rows,
        }
    }

    #[test]
    fn the_first_answer_counts() {
        let (first, mut receiver) = AnswerSender::new();
        let second = first.clone();
        assert!(!first.is_closed());
        second.send(Ok(answer(2)));
        assert!(first.is_closed());
        first.send(Ok(answer(1)));
        assert_eq!(receiver.try_recv().unwrap(), Ok(answer(2)));
    }

    #[test]
    fn a_request_has_no_answer_once_all_senders_are_gone() {
        let (first, mut receiver) = AnswerSender::new();
        let second = first.clone();
        drop(first);
        assert_eq!(
            receiver.try_recv(),
            Err(oneshot::error::TryRecvError::Empty)
        );
        drop(second);
        assert_eq!(
            receiver.try_recv(),
            Err(oneshot::error::TryRecvError::Closed)
        );
    }

    #[test]
    fn nobody_waits_for_a_request_that_was_given_up() {
        let (sender, receiver) = AnswerSender::new();
        drop(receiver);
        assert!(sender.is_closed());
    }
}
