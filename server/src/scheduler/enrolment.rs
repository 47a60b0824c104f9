//! Enrolment: which workers may join the pool, proved by their keys.
//!
//! [`registry`] makes the decisions; this module persists changes and checks tokens where
//! needed. A worker proves its key in the TLS handshake, so nothing that it sends can be
//! replayed by others, and its certificate is the one that leases pin.

mod offer;
mod registry;

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tensord_proto::v1::{Error, ErrorCode};
use tensord_transport::tls::Fingerprint;
use tracing::warn;

use self::registry::{EnrolError, Enrolled, EnrolmentStatus};
pub(crate) use self::{
    offer::Offer,
    registry::{JoinRequest, WorkerRegistry},
};
use super::access::{Access, AuthContext, ChangeError, TokenState, UnixMillis};
use crate::state::{Persisted, StateDir, StateError};

/// The pool's enrolled workers. See the module's documentation.
#[derive(Debug)]
pub(crate) struct Enrolment {
    registry: Persisted<WorkerRegistry>,
    /// The names of the workers that are currently in the pool.
    live: Mutex<HashSet<String>>,
    /// When workers were last seen, until a change of the registry includes it.
    unsaved_seen: Mutex<HashMap<String, UnixMillis>>,
}

/// A worker that has been admitted.
#[derive(Clone, Debug)]
pub(crate) struct Admitted {
    /// The name of the token with which the worker enrolled.
    pub(super) token: Arc<str>,
    pub(super) certificate: Fingerprint,
    /// Whether this call enrolled the worker or its larger offer.
    pub(super) is_new: bool,
}

/// The reason why a change was not made.
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
    /// Opens the registry of enrolled workers in `state`. Removes those whose token is revoked: they are there if the
    /// process ended after it had revoked the token in `access`, before it came to the workers.
    pub(crate) fn open(state: &StateDir, access: &Access) -> Result<Self, StateError> {
        let registry: Persisted<WorkerRegistry> = state.persisted("workers.json")?;
        let (tokens, now) = (access.tokens(), UnixMillis::now());
        for token in tokens.iter() {
            let is_revoked = matches!(token.state_at(now), TokenState::Ended(_));
            let is_its = |(_, worker): (&str, &Enrolled)| worker.token == token.name;
            if is_revoked && registry.read().iter().any(is_its) {
                registry.change(|registry| {
                    registry.remove_token(&token.name);
                    Ok::<_, StateError>(())
                })?;
            }
        }
        Ok(Self {
            registry,
            live: Mutex::default(),
            unsaved_seen: Mutex::default(),
        })
    }

    /// Returns the currently enrolled workers.
    pub(super) fn registry(&self) -> Arc<WorkerRegistry> {
        self.registry.read()
    }

    /// Returns whether a worker with this certificate is enrolled.
    pub(super) fn is_enrolled(&self, certificate: &Fingerprint) -> bool {
        self.registry.read().name_of(certificate).is_some()
    }

    /// Admits a worker, and enrols it first if necessary. `auth` is the result of checking
    /// the worker's token, which only an enrolment needs. Blocks until changes are on disk.
    ///
    /// # Errors
    ///
    /// A one-line message that names what is wrong. Nothing has changed then.
    pub(super) fn admit(
        &self,
        joining: JoinRequest,
        auth: Result<AuthContext, Error>,
        access: &Access,
    ) -> Result<Admitted, Error> {
        let (now, certificate) = (UnixMillis::now(), joining.certificate);
        let status = self.registry.read().status(&joining, now);
        let name = joining.name.clone();
        let is_new = match status.map_err(|e| refused(&e))? {
            EnrolmentStatus::Enrolled { update_seen } => {
                if update_seen {
                    self.record_seen(&name, now);
                }
                false
            }
            EnrolmentStatus::New => {
                self.enrol(joining, auth?, access, now)?;
                true
            }
            EnrolmentStatus::ExceedsOffer(beyond) => {
                let enrolled = auth.and_then(|auth| self.enrol(joining, auth, access, now));
                enrolled.map_err(|e| exceeds_offer_error(&name, &beyond, &e))?;
                true
            }
        };
        let registry = self.registry.read();
        let enrolled = registry.get(&name, &certificate);
        let removed = || Error::new(ErrorCode::Enrolment, removed_message(&name));
        Ok(Admitted {
            token: enrolled.ok_or_else(removed)?.token.as_str().into(),
            certificate,
            is_new,
        })
    }

    /// Enrols a worker or a larger offer of an enrolled one. Only a new worker counts as a
    /// use of the token.
    fn enrol(
        &self,
        joining: JoinRequest,
        auth: AuthContext,
        access: &Access,
        now: UnixMillis,
    ) -> Result<(), Error> {
        let enrolled = self.registry.change(|registry| {
            let is_new = registry.status(&joining, now)? == EnrolmentStatus::New;
            registry.enrol(joining, &auth.token, |name| self.is_live(name), now)?;
            // Checked within the change: if the token is revoked meanwhile, the revocation
            // runs after this change and removes the worker.
            let used = match is_new {
                true => access.count_use(&auth),
                false => access.check_may_open(&auth),
            };
            used.map_err(WriteError::Token)
        });
        Ok(enrolled?)
    }

    /// Records when a worker was seen.
    fn record_seen(&self, name: &str, now: UnixMillis) {
        lock(&self.unsaved_seen).insert(name.into(), now);
        // The worker may join anyway; only its last-seen time is older than it should be.
        if let Err(e) = self.save_seen() {
            warn!("cannot save when worker {name} was last seen: {e}");
        }
    }

    /// Writes when workers were seen, as far as that is not written. Returns whether anything had to be written:
    /// workers that come at the same time, as after a restart of the scheduler, share a write.
    fn save_seen(&self) -> Result<bool, StateError> {
        let mut taken = HashMap::new();
        let saved = self.registry.change(|registry| {
            taken = std::mem::take(&mut *lock(&self.unsaved_seen));
            for (name, seen) in &taken {
                registry.record_seen(name, *seen);
            }
            (!taken.is_empty()).then_some(()).ok_or(None)
        });
        match saved {
            Ok(()) => Ok(true),
            Err(None) => Ok(false),
            Err(Some(e)) => {
                // The next worker that is seen writes these, too, unless they were seen again.
                let mut unsaved = lock(&self.unsaved_seen);
                for (name, seen) in taken {
                    unsaved.entry(name).or_insert(seen);
                }
                Err(e)
            }
        }
    }

    /// Removes a worker from the enrolled ones. Blocks until the change is on disk.
    ///
    /// # Errors
    ///
    /// If no worker has this name, or the change cannot be written.
    pub(super) fn remove(&self, name: &str) -> Result<(), Error> {
        if !self.registry.read().iter().any(|(known, _)| known == name) {
            let name: String = name.chars().take(80).collect();
            let words =
                format!("there is no worker {name:?}; `tensord worker list` shows all workers");
            return Err(Error::new(ErrorCode::Protocol, words));
        }
        let removed = self.registry.change(|registry| {
            registry.remove(name);
            Ok::<_, WriteError>(())
        });
        Ok(removed?)
    }

    /// Removes all workers that enrolled with a token which was revoked. Blocks until the
    /// change is on disk.
    ///
    /// # Errors
    ///
    /// If the change cannot be written.
    pub(super) fn revoke(&self, token: &str) -> Result<(), ChangeError> {
        // Runs even if no such worker is known: changes are serialised, so a worker that is
        // being enrolled at this moment is in the registry by the time this change runs.
        self.registry.change(|registry| {
            registry.remove_token(token);
            Ok::<_, ChangeError>(())
        })
    }

    /// Records that a worker is in the pool, or has left it.
    pub(super) fn set_live(&self, name: &str, is_live: bool) {
        let mut live = self.live();
        match is_live {
            true => live.insert(name.into()),
            false => live.remove(name),
        };
    }

    /// Returns whether a worker of this name is in the pool.
    pub(super) fn is_live(&self, name: &str) -> bool {
        self.live().contains(name)
    }

    fn live(&self) -> MutexGuard<'_, HashSet<String>> {
        lock(&self.live)
    }
}

/// Locks a mutex, also after a panic: no holder leaves the value half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the message of the error that ends a removed worker's stream.
pub(super) fn removed_message(name: &str) -> String {
    format!(
        "worker {name:?} was removed from the pool; it can enrol again with the URL of the `workers:` line that the scheduler prints"
    )
}

fn exceeds_offer_error(name: &str, beyond: &str, token: &Error) -> Error {
    let words = format!(
        "worker {name:?} may not join: {beyond}, and its token cannot enrol more devices: {}",
        token.message
    );
    Error::new(ErrorCode::Enrolment, words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_that_are_seen_at_the_same_time_share_a_write() {
        let directory = tempfile::tempdir().unwrap();
        let state = || StateDir::open(directory.path()).unwrap();
        let access = Access::open(state(), &state().pool_secrets().unwrap()).unwrap();
        let open = || Enrolment::open(&state(), &access).unwrap();
        let enrolment = open();
        let names = ["a", "b", "c"];
        let enrolled = enrolment.registry.change(|registry| {
            for (name, key) in names.into_iter().zip(1..) {
                let joining = JoinRequest {
                    name: name.into(),
                    certificate: Fingerprint([key; 32]),
                    offer: Offer::of(&[]).unwrap(),
                };
                registry.enrol(joining, "worker", |_| false, UnixMillis(1))?;
            }
            Ok::<_, WriteError>(())
        });
        enrolled.unwrap();
        for name in names {
            lock(&enrolment.unsaved_seen).insert(name.into(), UnixMillis(7));
        }
        assert_eq!(enrolment.save_seen().ok(), Some(true));
        assert_eq!(enrolment.save_seen().ok(), Some(false), "all is written");
        let seen = open()
            .registry()
            .iter()
            .map(|(_, it)| it.seen)
            .collect::<Vec<_>>();
        assert_eq!(seen, [UnixMillis(7); 3]);
    }
}
