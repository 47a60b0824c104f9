//! Which workers may join: those that enrolled, by proof of their keys.
//!
//! [`book`] decides; this writes down what changes, and checks tokens where they are
//! needed. A worker proves its key in the TLS handshake, so that nothing it sends can be
//! used by others, and its certificate is the one that leases pin.

mod book;
mod offer;

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tensord_proto::v1::{Error, ErrorCode};
use tensord_transport::tls::Fingerprint;
use tracing::warn;

use self::book::{EnrolError, Place};
pub(crate) use self::{
    book::{Book, Joining},
    offer::Offer,
};
use super::access::{Access, ChangeError, Pass, UnixMillis};
use crate::state::{Ledger, StateDir, StateError};

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Enrolment {
    book: Ledger<Book>,
    /// The names of the workers that are in the pool.
    live: Mutex<HashSet<String>>,
}

/// A worker that may join.
#[derive(Clone, Debug)]
pub(crate) struct Admitted {
    /// The name of the token that it enrolled with.
    pub(super) token: Arc<str>,
    pub(super) certificate: Fingerprint,
    /// It was enrolled, or what it offers was, just now.
    pub(super) is_new: bool,
}

/// Why nothing was written down.
#[derive(Debug, thiserror::Error)]
enum WriteError {
    #[error(transparent)]
    Enrol(#[from] EnrolError),
    #[error("{0}")]
    Token(Error),
    #[error(transparent)]
    State(#[from] StateError),
}

impl From<WriteError> for Error {
    fn from(error: WriteError) -> Self {
        match error {
            WriteError::Enrol(error) => refused(&error),
            WriteError::Token(error) => error,
            WriteError::State(error) => Error::new(ErrorCode::Internal, error.to_string()),
        }
    }
}

fn refused(error: &EnrolError) -> Error {
    let code = match error {
        EnrolError::Full => ErrorCode::Limit,
        _ => ErrorCode::Enrolment,
    };
    Error::new(code, error.to_string())
}

impl Enrolment {
    /// The workers that `state` knows.
    pub(crate) fn open(state: &StateDir) -> Result<Self, StateError> {
        Ok(Self {
            book: state.ledger("workers.json")?,
            live: Mutex::default(),
        })
    }

    /// The workers that are enrolled now.
    pub(super) fn book(&self) -> Arc<Book> {
        self.book.read()
    }

    /// Whether a worker with this certificate is enrolled.
    pub(super) fn knows(&self, certificate: &Fingerprint) -> bool {
        self.book.read().name_of(certificate).is_some()
    }

    /// Lets a worker join, and enrols it first if `pass`, which is what came of the token
    /// it showed, is good for that. Blocks for as long as the disk takes.
    ///
    /// # Errors
    ///
    /// One line that names what is wrong; nothing has changed then.
    pub(super) fn admit(
        &self,
        joining: Joining,
        pass: Result<Pass, Error>,
        access: &Access,
    ) -> Result<Admitted, Error> {
        let (now, certificate) = (UnixMillis::now(), joining.certificate);
        let place = self.book.read().place(&joining, now);
        let name = joining.name.clone();
        let is_new = match place.map_err(|e| refused(&e))? {
            Place::Enrolled { note } => {
                if note {
                    self.note(&name, now);
                }
                false
            }
            Place::New => {
                self.enrol(joining, pass?, access, now)?;
                true
            }
            Place::Beyond(beyond) => {
                let enrolled = pass.and_then(|pass| self.enrol(joining, pass, access, now));
                enrolled.map_err(|e| beyond_error(&name, &beyond, &e))?;
                true
            }
        };
        let book = self.book.read();
        let enrolled = book.get(&name, &certificate);
        let removed = || Error::new(ErrorCode::Enrolment, removed_words(&name));
        Ok(Admitted {
            token: enrolled.ok_or_else(removed)?.token.as_str().into(),
            certificate,
            is_new,
        })
    }

    /// Enrols a worker. A use of the token counts only if that is a new one.
    fn enrol(
        &self,
        joining: Joining,
        pass: Pass,
        access: &Access,
        now: UnixMillis,
    ) -> Result<(), Error> {
        let enrolled = self.book.change(|book| {
            let is_new = book.place(&joining, now)? == Place::New;
            book.enrol(joining, &pass.token, |name| self.is_live(name), now)?;
            // Within the change: a token that is revoked meanwhile finds the worker here.
            let used = match is_new {
                true => access.use_up(&pass),
                false => access.may_open(&pass),
            };
            used.map_err(WriteError::Token)
        });
        Ok(enrolled?)
    }

    fn note(&self, name: &str, now: UnixMillis) {
        let noted = self.book.change(|book| {
            book.note(name, now);
            Ok::<_, StateError>(())
        });
        // The worker may join all the same: it is only taken for one unseen for long.
        if let Err(e) = noted {
            warn!("cannot note that worker {name} was seen: {e}");
        }
    }

    /// Forgets a worker. Blocks for as long as the disk takes.
    ///
    /// # Errors
    ///
    /// When there is none of this name, or that cannot be written down.
    pub(super) fn remove(&self, name: &str) -> Result<(), Error> {
        if !self.book.read().iter().any(|(known, _)| known == name) {
            let name: String = name.chars().take(80).collect();
            let words =
                format!("there is no worker {name:?}; `tensord worker list` shows those there are");
            return Err(Error::new(ErrorCode::Protocol, words));
        }
        let removed = self.book.change(|book| {
            book.remove(name);
            Ok::<_, WriteError>(())
        });
        Ok(removed?)
    }

    /// Forgets the workers that enrolled with a token which was revoked. Blocks for as long
    /// as the disk takes.
    ///
    /// # Errors
    ///
    /// When that cannot be written down.
    pub(super) fn revoke(&self, token: &str) -> Result<(), ChangeError> {
        // Even if there are none yet: one that is being enrolled is there once this is next.
        self.book.change(|book| {
            book.remove_token(token);
            Ok::<_, ChangeError>(())
        })
    }

    /// A worker is in the pool, or is gone from it.
    pub(super) fn set_live(&self, name: &str, is_live: bool) {
        let mut live = self.live();
        match is_live {
            true => live.insert(name.into()),
            false => live.remove(name),
        };
    }

    /// Whether a worker of this name is in the pool.
    pub(super) fn is_live(&self, name: &str) -> bool {
        self.live().contains(name)
    }

    fn live(&self) -> MutexGuard<'_, HashSet<String>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The error that a removed worker's stream ends with.
pub(super) fn removed_words(name: &str) -> String {
    format!(
        "worker {name:?} was removed from the pool; it can enrol again with the URL of the `workers:` line that the scheduler prints"
    )
}

fn beyond_error(name: &str, beyond: &str, token: &Error) -> Error {
    let words = format!(
        "worker {name:?} may not join: {beyond}, and the token it shows cannot enrol more: {}",
        token.message
    );
    Error::new(ErrorCode::Enrolment, words)
}
