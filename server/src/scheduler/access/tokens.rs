//! The pool's tokens: their roles, tenants and lifetimes.
//!
//! Pure data: time and the hashes of new tokens come as arguments, and the caller that
//! changes a registry persists it ([`Persisted`](crate::state::Persisted)). Only the BLAKE3
//! hashes of tokens are kept, not the tokens. A lookup compares a hash with all hashes,
//! each in constant time, so its duration does not reveal how close a guess was.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};
use tensord_proto::text::sanitize;

use super::{initial_file, role::Role, time::UnixMillis};

/// The largest number of tokens of a pool, including revoked ones. A lookup compares with
/// all of them, which takes about 30 µs for this many.
const MAX_TOKENS: usize = 1000;

/// The largest number of secret hashes kept for one token, including those replaced by
/// rotation.
const MAX_SECRETS: usize = 8;

/// The largest number of characters of a token's note.
const MAX_NOTE_CHARS: usize = 200;

/// The tenant of tokens that name no tenant.
pub(crate) const DEFAULT_TENANT: &str = "default";

/// All tokens of a pool.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Tokens {
    tokens: Vec<Token>,
}

/// A token. During a rotation, two secret strings are valid for it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Token {
    /// The token's name, unique in the pool.
    pub(crate) name: String,
    /// The token's role.
    pub(crate) role: Role,
    /// The token's tenant.
    pub(crate) tenant: String,
    /// The person or program that has the token; may be empty.
    #[serde(default)]
    pub(crate) user: String,
    /// What the token is for; may be empty.
    #[serde(default)]
    pub(crate) note: String,
    /// The time of the token's creation.
    pub(crate) created: UnixMillis,
    /// The time at which the token expires, if it does.
    pub(crate) expires: Option<UnixMillis>,
    /// The number of workers that may enrol with it, if limited.
    pub(crate) uses: Option<u64>,
    /// The number of workers that have enrolled with the token.
    pub(crate) used: u64,
    /// The revocation, if the token was revoked.
    pub(crate) revoked: Option<Revoked>,
    /// The hashes of the token's secret strings, newest last.
    secrets: Vec<SecretHash>,
}

/// The revocation of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Revoked {
    /// The time of the revocation.
    pub(crate) at: UnixMillis,
    /// Whether everything that the token has opened goes on.
    pub(crate) keep_leases: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct SecretHash {
    /// The BLAKE3 hash as 64 hex digits.
    hash: String,
    /// The time from which only its successor is valid; `None` while it has no successor.
    until: Option<UnixMillis>,
}

impl SecretHash {
    fn is(&self, hash: blake3::Hash) -> bool {
        // A hash that does not parse comes from a damaged file and matches no token.
        blake3::Hash::from_hex(&self.hash).is_ok_and(|own| own == hash)
    }
}

/// The parameters of a new token.
#[derive(Clone, Debug)]
pub(crate) struct NewToken {
    /// The token's name; empty to generate a free one.
    pub(crate) name: String,
    /// The token's role.
    pub(crate) role: Role,
    /// The token's tenant.
    pub(crate) tenant: String,
    /// The person or program that gets the token; may be empty.
    pub(crate) user: String,
    /// What the token is for; may be empty.
    pub(crate) note: String,
    /// The token's lifetime, if limited.
    pub(crate) life: Option<Duration>,
    /// The number of workers that may enrol with it, if limited.
    pub(crate) uses: Option<u64>,
}

/// The validity of a token at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenState {
    /// Valid for everything.
    Valid,
    /// The token opens nothing new, but what it has opened goes on.
    Closing(InvalidReason),
    /// Valid for nothing.
    Ended(InvalidReason),
}

/// The reason why a token is not fully valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InvalidReason {
    Revoked,
    Expired,
    Rotated,
    UsedUp,
}

impl InvalidReason {
    /// Returns the word that a list of tokens shows for this reason.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Revoked => "revoked",
            Self::Expired => "expired",
            Self::Rotated => "rotated",
            Self::UsedUp => "used up",
        }
    }

    /// Returns the text that completes "the token … ".
    pub(crate) fn description(self) -> &'static str {
        match self {
            Self::Revoked => "was revoked",
            Self::Expired => "has expired",
            Self::Rotated => "was replaced by a newer one",
            Self::UsedUp => "has reached its limit of uses",
        }
    }
}

/// The reason why tokens were not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TokenError {
    #[error("{what} is {text:?}; it must have 1 to 64 letters, digits and - _ .")]
    Text { what: &'static str, text: String },
    #[error(
        "the note has {chars} characters; it may have at most {MAX_NOTE_CHARS}, and no line breaks or other control characters"
    )]
    Note { chars: usize },
    #[error("the name {0:?} belongs to an earlier token; choose another name")]
    Taken(String),
    #[error("there is no token {0:?}; `tensord token list` shows all tokens")]
    Unknown(String),
    #[error("the token {name:?} {}; create another one with `tensord token create`", reason.description())]
    Ended { name: String, reason: InvalidReason },
    #[error("--uses limits enrolments, and a {0} token cannot enrol workers; omit --uses")]
    Uses(Role),
    #[error("{0:?} is the last admin token; create another one before you revoke it")]
    LastAdmin(String),
    #[error("the pool has {MAX_TOKENS} tokens, which is the limit; revoke some")]
    Full,
}

impl Token {
    /// Returns the validity of the token at `now`.
    pub(crate) fn state_at(&self, now: UnixMillis) -> TokenState {
        let is_over = |at: UnixMillis| at <= now;
        match self.revoked {
            Some(Revoked {
                keep_leases: true, ..
            }) => TokenState::Closing(InvalidReason::Revoked),
            Some(_) => TokenState::Ended(InvalidReason::Revoked),
            None if self.expires.is_some_and(is_over) => {
                TokenState::Closing(InvalidReason::Expired)
            }
            None if self.uses.is_some_and(|uses| self.used >= uses) => {
                TokenState::Closing(InvalidReason::UsedUp)
            }
            None => TokenState::Valid,
        }
    }

    /// Returns the time until which an earlier secret string stays valid, or `None` if only
    /// the current one is valid at `now`.
    pub(crate) fn rotating_until(&self, now: UnixMillis) -> Option<UnixMillis> {
        let untils = self.secrets.iter().filter_map(|secret| secret.until);
        untils.filter(|until| *until > now).max()
    }
}

impl Tokens {
    /// Returns all tokens, in the order of creation.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Token> {
        self.tokens.iter()
    }

    /// Returns the token of this name.
    pub(crate) fn get(&self, name: &str) -> Option<&Token> {
        self.tokens.iter().find(|token| token.name == name)
    }

    /// Returns the names of the tokens of each tenant that are valid at `now`.
    pub(crate) fn valid_by_tenant(&self, now: UnixMillis) -> BTreeMap<String, Vec<String>> {
        let mut valid = BTreeMap::<String, Vec<String>>::new();
        for token in self
            .iter()
            .filter(|it| it.state_at(now) == TokenState::Valid)
        {
            let of_tenant = valid.entry(token.tenant.clone()).or_default();
            of_tenant.push(token.name.clone());
        }
        valid
    }

    fn get_mut(&mut self, name: &str) -> Result<&mut Token, TokenError> {
        let found = self.tokens.iter_mut().find(|token| token.name == name);
        found.ok_or_else(|| TokenError::Unknown(name.into()))
    }

    /// Returns the token with this `hash` and its validity at `now`. Returns `None` if no
    /// token has the hash, or if two share it, because the holder's role would be ambiguous.
    pub(crate) fn find(&self, hash: blake3::Hash, now: UnixMillis) -> Option<(&Token, TokenState)> {
        let mut found = None;
        let mut count = 0;
        // Compares all hashes, even after a match.
        for token in &self.tokens {
            for secret in &token.secrets {
                if secret.is(hash) {
                    found = Some((token, secret));
                    count += 1;
                }
            }
        }
        let (token, secret) = found.filter(|_| count == 1)?;
        let state_at = match token.state_at(now) {
            TokenState::Valid if secret.until.is_some_and(|until| until <= now) => {
                TokenState::Closing(InvalidReason::Rotated)
            }
            state_at => state_at,
        };
        Some((token, state_at))
    }

    /// Adds a token whose secret string has this `hash`.
    ///
    /// # Errors
    ///
    /// If the token breaks a rule; the error names the rule.
    pub(crate) fn create(
        &mut self,
        new: NewToken,
        hash: blake3::Hash,
        now: UnixMillis,
    ) -> Result<&Token, TokenError> {
        let NewToken {
            name,
            role,
            tenant,
            user,
            note,
            life,
            uses,
        } = new;
        let name = match name.is_empty() {
            true => self.free_name(role),
            false => name,
        };
        for (what, text) in [("the token's name", &name), ("the tenant", &tenant)] {
            if !is_name(text) {
                let text = text.chars().take(80).collect();
                return Err(TokenError::Text { what, text });
            }
        }
        if !user.is_empty() && !is_name(&user) {
            let text = user.chars().take(80).collect();
            return Err(TokenError::Text {
                what: "the user",
                text,
            });
        }
        // What `sanitize` leaves as it is can be printed.
        if sanitize(&note, MAX_NOTE_CHARS).to_string() != note {
            let chars = note.chars().count();
            return Err(TokenError::Note { chars });
        }
        if uses.is_some() && role != Role::Worker {
            return Err(TokenError::Uses(role));
        }
        if self.get(&name).is_some() {
            return Err(TokenError::Taken(name));
        }
        self.make_room()?;
        self.tokens.push(Token {
            name,
            role,
            tenant,
            user,
            note,
            created: now,
            expires: life.map(|life| now.after(life)),
            uses,
            used: 0,
            revoked: None,
            secrets: vec![SecretHash::new(hash)],
        });
        Ok(self.tokens.last().expect("the token was just added"))
    }

    /// Generates a name for a token from its role and a number.
    fn free_name(&self, role: Role) -> String {
        let mut names = (1..).map(|n: u64| format!("{role}-{n}"));
        let free = names.find(|name| self.get(name).is_none());
        free.expect("there are fewer tokens than numbers")
    }

    /// If the registry is full, removes the token that was revoked first; fails if no token
    /// is revoked but those of the first start. The strings of these stay in their files, from
    /// which the next start would create them again.
    fn make_room(&mut self) -> Result<(), TokenError> {
        if self.tokens.len() < MAX_TOKENS {
            return Ok(());
        }
        let revoked = self.tokens.iter().enumerate();
        let revoked = revoked.filter(|(_, token)| initial_file(&token.name).is_none());
        let revoked = revoked.filter_map(|(at, token)| Some((token.revoked?.at, at)));
        let (_, at) = revoked.min().ok_or(TokenError::Full)?;
        self.tokens.remove(at);
        Ok(())
    }

    /// Adopts a token string that is stored in a file of the state directory, with this
    /// `hash`: creates the token `new`, or, if a token of this name exists, replaces all its
    /// strings. Returns `false` if that token is revoked or has the string already.
    ///
    /// # Errors
    ///
    /// Those of [`create`](Self::create).
    pub(crate) fn adopt(
        &mut self,
        new: NewToken,
        hash: blake3::Hash,
        now: UnixMillis,
    ) -> Result<bool, TokenError> {
        let Ok(token) = self.get_mut(&new.name) else {
            return self.create(new, hash, now).map(|_| true);
        };
        if token.revoked.is_some() || token.secrets.iter().any(|secret| secret.is(hash)) {
            return Ok(false);
        }
        token.secrets = vec![SecretHash::new(hash)];
        Ok(true)
    }

    /// Makes the string with this `hash` the token's current one; the previous one stays
    /// valid for `grace`.
    ///
    /// # Errors
    ///
    /// If there is no such token, or it is not [`TokenState::Valid`].
    pub(crate) fn rotate(
        &mut self,
        name: &str,
        hash: blake3::Hash,
        grace: Duration,
        now: UnixMillis,
    ) -> Result<&Token, TokenError> {
        let token = self.get_mut(name)?;
        if let TokenState::Closing(reason) | TokenState::Ended(reason) = token.state_at(now) {
            let name = name.into();
            return Err(TokenError::Ended { name, reason });
        }
        // At most two strings are valid: those that were replaced by earlier rotations end now.
        for secret in &mut token.secrets {
            secret.until = Some(match secret.until {
                None => now.after(grace),
                Some(until) => until.min(now),
            });
        }
        let surplus = (token.secrets.len() + 1).saturating_sub(MAX_SECRETS);
        token.secrets.drain(..surplus);
        token.secrets.push(SecretHash::new(hash));
        Ok(token)
    }

    /// Revokes a token. A token that was revoked with `keep_leases` can be revoked again
    /// without it.
    ///
    /// # Errors
    ///
    /// If there is no such token, or it is the last valid admin token.
    pub(crate) fn revoke(
        &mut self,
        name: &str,
        keep_leases: bool,
        now: UnixMillis,
    ) -> Result<&Token, TokenError> {
        let is_good =
            |token: &Token| token.role == Role::Admin && token.state_at(now) == TokenState::Valid;
        let others = self.iter().filter(|token| token.name != name);
        let is_last = !others.into_iter().any(is_good);
        let token = self.get_mut(name)?;
        if token.role == Role::Admin && is_last {
            return Err(TokenError::LastAdmin(name.into()));
        }
        let keep_leases = keep_leases && token.revoked.is_none_or(|revoked| revoked.keep_leases);
        token.revoked = Some(Revoked {
            at: now,
            keep_leases,
        });
        Ok(token)
    }

    /// Counts one enrolment with a token.
    ///
    /// # Errors
    ///
    /// If the token is not valid for an enrolment at `now`.
    pub(crate) fn count_use(&mut self, name: &str, now: UnixMillis) -> Result<(), TokenError> {
        let token = self.get_mut(name)?;
        if let TokenState::Closing(reason) | TokenState::Ended(reason) = token.state_at(now) {
            let name = name.into();
            return Err(TokenError::Ended { name, reason });
        }
        token.used += 1;
        Ok(())
    }
}

/// Returns whether `text` is a valid name: safe to print, and without need for quotes.
pub(in crate::scheduler) fn is_name(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    (1..=64).contains(&text.len()) && text.chars().all(allowed)
}

impl SecretHash {
    fn new(hash: blake3::Hash) -> Self {
        Self {
            hash: hash.to_hex().to_string(),
            until: None,
        }
    }
}

#[cfg(test)]
mod tests;
