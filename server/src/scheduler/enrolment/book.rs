//! The workers that may join a pool: a pure state machine.
//!
//! A worker is enrolled under a name, which is its own, with the fingerprint of its
//! certificate, whose key it keeps, and with the most that it will offer. To enrol takes a
//! token; afterwards the key is enough. Time comes with each call.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};
use tensord_transport::tls::Fingerprint;

use super::offer::Offer;
use crate::scheduler::access::UnixMillis;

/// Most workers that are enrolled at once, as many as can be joined. A worker without a
/// place for its key enrols anew at each start, so old ones may have to make room.
pub(crate) const MAX_WORKERS: usize = 4096;

/// How long a worker stays enrolled that is not seen, when others need its place.
const STALE: Duration = Duration::from_secs(30 * 86_400);

/// How exactly it is noted when a worker was last seen: each note is written to the disk.
const SEEN_STEP: Duration = Duration::from_secs(86_400);

/// Longest name, in bytes; DNS allows no longer ones for hosts.
const MAX_NAME_BYTES: usize = 253;

/// Every worker of a pool that may join it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Book {
    workers: BTreeMap<String, Enrolled>,
}

/// A worker that may join.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Enrolled {
    certificate: Certificate,
    /// The name of the token that it enrolled with.
    pub(crate) token: String,
    /// When.
    pub(crate) at: UnixMillis,
    /// When it last joined, or a day at most before that.
    pub(crate) seen: UnixMillis,
    /// The most that it may offer.
    pub(crate) offer: Offer,
}

/// A fingerprint as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
struct Certificate(Fingerprint);

/// A worker that wants to join, and has proved to have the key of its certificate.
#[derive(Clone, Debug)]
pub(crate) struct Joining {
    pub(crate) name: String,
    pub(crate) certificate: Fingerprint,
    pub(crate) offer: Offer,
}

/// How a worker that wants to join stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// It may join. Whether it is to be noted that it was seen.
    Enrolled { note: bool },
    /// It may join once it is enrolled.
    New,
    /// It may join once what it offers is enrolled; in words, what goes beyond that.
    Beyond(String),
}

/// Why a worker may not join, whatever token it has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum EnrolError {
    /// The name is no name.
    #[error(
        "the worker's name is {0:?}; it must have 1 to {MAX_NAME_BYTES} letters, digits and - _ ."
    )]
    Name(String),
    /// Another worker has the name.
    #[error(
        "the worker name {0:?} is enrolled with another key; give this worker another --name or the --state with that key, or free the name with `tensord worker remove {0}` on the scheduler's host"
    )]
    Taken(String),
    /// The worker has another name.
    #[error(
        "this worker's key is enrolled under the name {known:?}, and it wants to join as {name:?}; give it that --name, or another --state"
    )]
    Renamed {
        /// Its name.
        known: String,
        /// The name that it registers.
        name: String,
    },
    /// There is no place.
    #[error(
        "{MAX_WORKERS} workers are enrolled, which is the most there may be; remove some with `tensord worker remove`"
    )]
    Full,
}

impl Book {
    /// How `joining` stands at `now`.
    ///
    /// # Errors
    ///
    /// When no token helps.
    pub(crate) fn place(&self, joining: &Joining, now: UnixMillis) -> Result<Place, EnrolError> {
        let name = &joining.name;
        let Some(known) = self.workers.get(name) else {
            return match self.name_of(&joining.certificate) {
                Some(known) => Err(EnrolError::Renamed {
                    known: known.into(),
                    name: name.clone(),
                }),
                None if !is_name(name) => Err(EnrolError::Name(name.chars().take(80).collect())),
                None => Ok(Place::New),
            };
        };
        if known.certificate.0 != joining.certificate {
            return Err(EnrolError::Taken(name.clone()));
        }
        Ok(match joining.offer.beyond(&known.offer) {
            Some(beyond) => Place::Beyond(beyond),
            None => Place::Enrolled {
                note: known.seen.after(SEEN_STEP) <= now,
            },
        })
    }

    /// Enrols `joining`, or what it offers by now, with a token of this name. When there are
    /// too many, one that has not been seen for long and is not `live` makes room.
    ///
    /// # Errors
    ///
    /// When no token helps, or there is no place.
    pub(crate) fn enrol(
        &mut self,
        joining: Joining,
        token: &str,
        live: impl Fn(&str) -> bool,
        now: UnixMillis,
    ) -> Result<(), EnrolError> {
        if self.place(&joining, now)? == Place::New {
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
            .filter(|(name, worker)| worker.seen.after(STALE) <= now && !live(name));
        let oldest = stale.min_by_key(|(_, worker)| worker.seen);
        let name = oldest.map(|(name, _)| name.clone());
        self.workers.remove(&name.ok_or(EnrolError::Full)?);
        Ok(())
    }

    /// Notes that the worker of this name has joined.
    pub(crate) fn note(&mut self, name: &str, now: UnixMillis) {
        if let Some(worker) = self.workers.get_mut(name) {
            worker.seen = now;
        }
    }

    /// Forgets the worker of this name.
    pub(crate) fn remove(&mut self, name: &str) {
        self.workers.remove(name);
    }

    /// Forgets the workers that enrolled with the token of this name.
    pub(crate) fn remove_token(&mut self, token: &str) {
        self.workers.retain(|_, worker| worker.token != token);
    }

    /// The worker of this name, if this is its certificate.
    pub(crate) fn get(&self, name: &str, certificate: &Fingerprint) -> Option<&Enrolled> {
        let worker = self.workers.get(name);
        worker.filter(|worker| worker.certificate.0 == *certificate)
    }

    /// The name that the worker with this certificate is enrolled under.
    pub(crate) fn name_of(&self, certificate: &Fingerprint) -> Option<&str> {
        let mut workers = self.workers.iter();
        let found = workers.find(|(_, worker)| worker.certificate.0 == *certificate);
        found.map(|(name, _)| name.as_str())
    }

    /// Every worker, in the order of names.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &Enrolled)> {
        let workers = self.workers.iter();
        workers.map(|(name, worker)| (name.as_str(), worker))
    }
}

impl Enrolled {
    /// What it shows.
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

/// Whether `text` will do as a name: it is safe to print, and needs no quotes in a shell.
fn is_name(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    (1..=MAX_NAME_BYTES).contains(&text.len()) && text.chars().all(allowed)
}

#[cfg(test)]
mod tests;
