//! The registry of workers that may join a pool: a pure state machine.
//!
//! A worker is enrolled under a unique name, with the fingerprint of its certificate, whose
//! key only the worker has, and with the most that it may offer. Enrolling requires a
//! token; afterwards the key is enough. Time comes with each call.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};
use tensord_transport::tls::Fingerprint;

use super::offer::Offer;
use crate::scheduler::access::UnixMillis;

/// The largest number of enrolled workers, the same as that of joined ones. A worker that
/// cannot store its key enrols anew at each start, so stale entries may be removed to make
/// room.
pub(crate) const MAX_WORKERS: usize = 4096;

/// The time after which an unseen worker may be removed to make room for another.
const STALE_AFTER: Duration = Duration::from_secs(30 * 86_400);

/// The resolution of the last-seen time, which limits the writes to disk.
const SEEN_RESOLUTION: Duration = Duration::from_secs(86_400);

/// The longest worker name, in bytes: the limit of DNS for host names.
const MAX_NAME_BYTES: usize = 253;

/// All enrolled workers of a pool.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct WorkerRegistry {
    workers: BTreeMap<String, Enrolled>,
}

/// An enrolled worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Enrolled {
    certificate: Certificate,
    /// The name of the token with which the worker enrolled.
    pub(crate) token: String,
    /// The time of the worker's latest enrolment.
    pub(crate) at: UnixMillis,
    /// The time of the worker's last join, or up to [`SEEN_RESOLUTION`] before it.
    pub(crate) seen: UnixMillis,
    /// The largest offer that the worker may make.
    pub(crate) offer: Offer,
}

/// A certificate fingerprint, serialised as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
struct Certificate(Fingerprint);

/// A worker that wants to join and has proved that it has the key of its certificate.
#[derive(Clone, Debug)]
pub(crate) struct JoinRequest {
    pub(crate) name: String,
    pub(crate) certificate: Fingerprint,
    pub(crate) offer: Offer,
}

/// The standing of a worker that wants to join.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EnrolmentStatus {
    /// The worker may join. `update_seen` is true if its last-seen time is out of date.
    Enrolled { update_seen: bool },
    /// The worker may join once it is enrolled.
    New,
    /// The worker may join once its larger offer is enrolled. The text names what exceeds the
    /// enrolled offer.
    ExceedsOffer(String),
}

/// The reason why a worker may not join, whatever token it presents.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum EnrolError {
    /// The name breaks the rules for names.
    #[error(
        "the worker's name is {0:?}; it must have 1 to {MAX_NAME_BYTES} letters, digits and - _ ."
    )]
    Name(String),
    /// Another worker is enrolled under the name.
    #[error(
        "the worker name {0:?} is enrolled with another key; give this worker another --name or the --state with that key, or free the name with `tensord worker remove {0}` on the scheduler's host"
    )]
    Taken(String),
    /// The worker is enrolled under another name.
    #[error(
        "this worker's key is enrolled under the name {known:?}, and the worker registered as {name:?}; start it with --name {known}, or with another --state"
    )]
    Renamed {
        /// The name that the worker is enrolled under.
        known: String,
        /// The name that the worker registers.
        name: String,
    },
    /// The registry is full.
    #[error(
        "{MAX_WORKERS} workers are enrolled, which is the limit; remove some with `tensord worker remove`"
    )]
    Full,
}

impl WorkerRegistry {
    /// Returns the standing of `joining` at `now`.
    ///
    /// # Errors
    ///
    /// If the worker may not join, whatever token it presents.
    pub(crate) fn status(
        &self,
        joining: &JoinRequest,
        now: UnixMillis,
    ) -> Result<EnrolmentStatus, EnrolError> {
        let name = &joining.name;
        let Some(known) = self.workers.get(name) else {
            return match self.name_of(&joining.certificate) {
                Some(known) => Err(EnrolError::Renamed {
                    known: known.into(),
                    name: name.clone(),
                }),
                None if !is_name(name) => Err(EnrolError::Name(name.chars().take(80).collect())),
                None => Ok(EnrolmentStatus::New),
            };
        };
        if known.certificate.0 != joining.certificate {
            return Err(EnrolError::Taken(name.clone()));
        }
        Ok(match joining.offer.excess_over(&known.offer) {
            Some(beyond) => EnrolmentStatus::ExceedsOffer(beyond),
            None => EnrolmentStatus::Enrolled {
                update_seen: known.seen.after(SEEN_RESOLUTION) <= now,
            },
        })
    }

    /// Enrols the worker `joining`, or updates its offer if the worker is enrolled already, and
    /// records that the token named `token` allowed it. If the registry is full, first removes
    /// the worker that has been unseen for longest among those for which `live` is false,
    /// provided that it was last seen more than [`STALE_AFTER`] ago.
    ///
    /// # Errors
    ///
    /// If no token could let the worker join, for example because another key has its name,
    /// or if the registry is full and no worker can be removed.
    pub(crate) fn enrol(
        &mut self,
        joining: JoinRequest,
        token: &str,
        live: impl Fn(&str) -> bool,
        now: UnixMillis,
    ) -> Result<(), EnrolError> {
        if self.status(&joining, now)? == EnrolmentStatus::New {
            self.make_room(live, now)?;
        }
        let enrolled = Enrolled {
            certificate: Certificate(joining.certificate),
            token: token.into(),
            at: now,
            seen: now,
            offer: joining.offer,
        };
        self.workers.insert(joining.name, enrolled);
        Ok(())
    }

    fn make_room(
        &mut self,
        live: impl Fn(&str) -> bool,
        now: UnixMillis,
    ) -> Result<(), EnrolError> {
        if self.workers.len() < MAX_WORKERS {
            return Ok(());
        }
        let stale = self
            .workers
            .iter()
            .filter(|(name, worker)| worker.seen.after(STALE_AFTER) <= now && !live(name));
        let oldest = stale.min_by_key(|(_, worker)| worker.seen);
        let name = oldest.map(|(name, _)| name.clone());
        self.workers.remove(&name.ok_or(EnrolError::Full)?);
        Ok(())
    }

    /// Records `now` as the last-seen time of the worker of this name.
    pub(crate) fn record_seen(&mut self, name: &str, now: UnixMillis) {
        if let Some(worker) = self.workers.get_mut(name) {
            worker.seen = now;
        }
    }

    /// Removes the worker of this name.
    pub(crate) fn remove(&mut self, name: &str) {
        self.workers.remove(name);
    }

    /// Removes all workers that enrolled with the token of this name.
    pub(crate) fn remove_token(&mut self, token: &str) {
        self.workers.retain(|_, worker| worker.token != token);
    }

    /// Returns the worker of this name if it has this certificate.
    pub(crate) fn get(&self, name: &str, certificate: &Fingerprint) -> Option<&Enrolled> {
        let worker = self.workers.get(name);
        worker.filter(|worker| worker.certificate.0 == *certificate)
    }

    /// Returns the name under which the worker with this certificate is enrolled.
    pub(crate) fn name_of(&self, certificate: &Fingerprint) -> Option<&str> {
        let mut workers = self.workers.iter();
        let found = workers.find(|(_, worker)| worker.certificate.0 == *certificate);
        found.map(|(name, _)| name.as_str())
    }

    /// Returns all workers, in the order of names.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &Enrolled)> {
        let workers = self.workers.iter();
        workers.map(|(name, worker)| (name.as_str(), worker))
    }
}

impl Enrolled {
    /// Returns the fingerprint of the worker's certificate.
    pub(crate) fn certificate(&self) -> Fingerprint {
        self.certificate.0
    }
}

impl From<Certificate> for String {
    fn from(Certificate(fingerprint): Certificate) -> Self {
        fingerprint.to_string()
    }
}

impl TryFrom<String> for Certificate {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse().map(Self)
    }
}

/// Returns whether `text` is a valid name: safe to print, and without need for quotes in a
/// shell.
fn is_name(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    (1..=MAX_NAME_BYTES).contains(&text.len()) && text.chars().all(allowed)
}

#[cfg(test)]
mod tests;
