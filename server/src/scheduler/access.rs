//! Access control: which calls a token permits.
//!
//! A call presents a token, and the pool's [`Tokens`] decide its tenant, its role and how
//! long it is valid. Only hashes of tokens are kept, and each is compared in constant time.

mod role;
mod time;
mod tokens;

use std::sync::{Arc, Mutex, PoisonError};

use tensord_proto::v1::{Error, ErrorCode};
use tensord_transport::Secret;
use tonic::metadata::MetadataMap;
use tracing::error;

use self::tokens::InvalidReason;
pub(super) use self::tokens::is_name;
pub(crate) use self::{
    role::Role,
    time::{UnixMillis, millis},
    tokens::{DEFAULT_TENANT, NewToken, Token, TokenError, TokenState, Tokens},
};
use super::tenants::TenantError;
use crate::state::{self, Persisted, PoolSecrets, StateDir, StateError};

/// The tokens of the first start: name, role, and the file in the state directory that
/// contains the token.
const INITIAL_TOKENS: [(&str, Role, &str); 3] = [
    ("program", Role::Client, "client-token"),
    ("worker", Role::Worker, "worker-token"),
    ("admin", Role::Admin, "admin-token"),
];

/// The number of workers that may enrol with the token of the first start: more than a
/// small cluster has, and few enough that nobody can fill the disk with enrolments.
const INITIAL_WORKER_USES: u64 = 1000;

/// The pool's registry of tokens, and the checks of calls against it.
#[derive(Debug)]
pub(crate) struct Access {
    state: StateDir,
    tokens: Persisted<Tokens>,
    /// Locked while a token is rotated, of which the string may be in a file, too.
    rotating: Mutex<()>,
}

/// The rights of an admitted call, for as long as the call lasts.
#[derive(Clone, Debug)]
pub(crate) struct AuthContext {
    /// The name of the call's token.
    pub(super) token: Arc<str>,
    /// The token's tenant.
    pub(super) tenant: Arc<str>,
    /// The token's user; may be empty.
    pub(super) user: Arc<str>,
    /// The token's role.
    pub(super) role: Role,
    hash: blake3::Hash,
}

#[cfg(test)]
impl AuthContext {
    /// Creates the context of a program that presented this token, which is also its name.
    pub(super) fn of_program(token: &str) -> Self {
        Self {
            token: token.into(),
            tenant: DEFAULT_TENANT.into(),
            user: "".into(),
            role: Role::Client,
            hash: blake3::hash(token.as_bytes()),
        }
    }
}

/// The reason why tokens were not changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChangeError {
    #[error(transparent)]
    Token(#[from] TokenError),
    #[error(transparent)]
    Tenant(#[from] TenantError),
    #[error(transparent)]
    State(#[from] StateError),
    #[error("the tokens {tokens} are revoked, but the tenants are as before: {source}")]
    OnlyRevoked { tokens: String, source: StateError },
    #[error("the scheduler is shutting down")]
    Stopping,
}

/// Returns the file that contains the token of this name, if it is one of the first start.
fn initial_file(name: &str) -> Option<&'static str> {
    let initial = INITIAL_TOKENS.iter().find(|(initial, ..)| *initial == name);
    initial.map(|(_, _, file)| *file)
}

impl Access {
    /// Opens the registry of tokens in `state`, and adds the tokens of the first start to
    /// it.
    pub(crate) fn open(state: StateDir, secrets: &PoolSecrets) -> Result<Self, StateError> {
        let tokens = state.persisted("tokens.json")?;
        let access = Self {
            state,
            tokens,
            rotating: Mutex::default(),
        };
        let now = UnixMillis::now();
        let adopt = |tokens: &mut Tokens| {
            let strings = [
                &secrets.client_token,
                &secrets.worker_token,
                &secrets.admin_token,
            ];
            let mut changed = false;
            for ((name, role, _), string) in INITIAL_TOKENS.into_iter().zip(strings) {
                let new = NewToken {
                    name: name.into(),
                    role,
                    tenant: DEFAULT_TENANT.into(),
                    user: String::new(),
                    note: String::new(),
                    life: None,
                    uses: (role == Role::Worker).then_some(INITIAL_WORKER_USES),
                };
                changed |= tokens.adopt(new, hash(string), now)?;
            }
            Ok::<_, TokenError>(changed)
        };
        // A dry run on a copy, so that nothing is written if nothing changes. It fails only if
        // the registry has no room for a missing token; no token is adopted then.
        if adopt(&mut Tokens::clone(&access.tokens.read())).is_ok_and(|changed| changed) {
            let written = access.tokens.change(|tokens| Ok(adopt(tokens)?));
            if let Err(ChangeError::State(e)) = written {
                return Err(e);
            }
        }
        Ok(access)
    }

    /// Admits a call that presents a token of one of `roles`. Error messages refer to the
    /// first role.
    ///
    /// # Errors
    ///
    /// [`ErrorCode::Token`] if the token is missing, of another role, unknown, or has
    /// ended; the message states which.
    pub(super) fn check(
        &self,
        roles: &[Role],
        metadata: &MetadataMap,
    ) -> Result<AuthContext, Error> {
        let wanted = roles[0];
        let source = wanted.source();
        let Some(token) = bearer(metadata) else {
            return refuse(format!("the call has no token; use the URL {source}"));
        };
        let hash = blake3::hash(token);
        let tokens = self.tokens.read();
        let Some((token, state_at)) = tokens.find(hash, UnixMillis::now()) else {
            return refuse(format!(
                "this pool does not know the token; use the URL {source}"
            ));
        };
        if !roles.contains(&token.role) {
            return refuse(format!(
                "the {} token was sent, but {} needs a different token; use the URL {source}",
                token.role.name(),
                wanted.holder(),
            ));
        }
        if let TokenState::Ended(reason) = state_at {
            return refuse(ended(&token.name, reason));
        }
        Ok(AuthContext {
            token: token.name.as_str().into(),
            tenant: token.tenant.as_str().into(),
            user: token.user.as_str().into(),
            role: token.role,
            hash,
        })
    }

    /// Checks that `auth` may open something new at this moment.
    ///
    /// # Errors
    ///
    /// [`ErrorCode::Token`] if its token is not [`TokenState::Valid`] any more; the message
    /// states why.
    pub(super) fn check_may_open(&self, auth: &AuthContext) -> Result<(), Error> {
        self.check_may_attach(auth, false)
    }

    /// Checks that a client may attach with `auth` at this moment. One that comes back to leases may as long as the
    /// token keeps these, even if it opens nothing new.
    ///
    /// # Errors
    ///
    /// As [`check_may_open`](Self::check_may_open).
    pub(super) fn check_may_attach(
        &self,
        auth: &AuthContext,
        has_leases: bool,
    ) -> Result<(), Error> {
        let tokens = self.tokens.read();
        match tokens.find(auth.hash, UnixMillis::now()) {
            Some((_, TokenState::Valid)) => Ok(()),
            Some((_, TokenState::Closing(_))) if has_leases => Ok(()),
            Some((token, TokenState::Closing(reason) | TokenState::Ended(reason))) => {
                refuse(ended(&token.name, reason))
            }
            None => refuse(ended(&auth.token, InvalidReason::Rotated)),
        }
    }

    /// Counts an enrolment with the token of `auth`. Blocks until the count is on disk.
    ///
    /// # Errors
    ///
    /// Those of [`check_may_open`](Self::check_may_open), and if the count cannot be written.
    pub(super) fn count_use(&self, auth: &AuthContext) -> Result<(), Error> {
        self.check_may_open(auth)?;
        let used = self.tokens.change(|tokens| {
            let used = tokens.count_use(&auth.token, UnixMillis::now());
            Ok::<_, ChangeError>(used?)
        });
        used.map_err(|e| {
            let code = match e {
                ChangeError::Token(_) | ChangeError::Tenant(_) => ErrorCode::Token,
                ChangeError::State(_) | ChangeError::OnlyRevoked { .. } => ErrorCode::Internal,
                ChangeError::Stopping => ErrorCode::Draining,
            };
            Error::new(code, e.to_string())
        })
    }

    /// Returns the pool's current tokens.
    pub(crate) fn tokens(&self) -> Arc<Tokens> {
        self.tokens.read()
    }

    /// Returns the token of `role` in `secrets`, or `None` if it is not
    /// [`TokenState::Valid`] any more.
    pub(crate) fn url_token(&self, role: Role, secrets: &PoolSecrets) -> Option<Secret> {
        let string = match role {
            Role::Admin => &secrets.admin_token,
            Role::Client => &secrets.client_token,
            Role::Worker => &secrets.worker_token,
        };
        let tokens = self.tokens.read();
        match tokens.find(hash(string), UnixMillis::now()) {
            Some((_, TokenState::Valid)) => Some(string.clone()),
            _ => None,
        }
    }

    /// Creates a token and returns it with its secret string. Blocks until it is on disk.
    ///
    /// # Errors
    ///
    /// If the token breaks a rule, or cannot be written.
    pub(super) fn create(&self, new: NewToken) -> Result<(Token, Secret), ChangeError> {
        let string = Secret::new(state::new_token()?);
        let token = self.tokens.change(|tokens| {
            let created = tokens.create(new, hash(&string), UnixMillis::now())?;
            Ok::<_, ChangeError>(created.clone())
        })?;
        Ok((token, string))
    }

    /// Creates a successor of a token and returns it with its secret string; the
    /// predecessor stays valid for `grace`. Blocks until the change is on disk.
    ///
    /// # Errors
    ///
    /// Those of [`create`](Self::create).
    pub(super) fn rotate(
        &self,
        name: &str,
        grace: std::time::Duration,
    ) -> Result<(Token, Secret), ChangeError> {
        let string = Secret::new(state::new_token()?);
        let file = initial_file(name);
        // Held until the file has the valid string again.
        let _rotating = self.rotating.lock().unwrap_or_else(PoisonError::into_inner);
        let mut before = None;
        let rotated = self.tokens.change(|tokens| {
            let rotated = tokens.rotate(name, hash(&string), grace, UnixMillis::now())?;
            // The file is written before the registry: if the process ends in between, the
            // next start adopts the unknown token of the file.
            if let Some(file) = file {
                before = self.state.token(file).ok();
                self.state.replace_token(file, &string)?;
            }
            Ok::<_, ChangeError>(rotated.clone())
        });
        if rotated.is_err()
            && let (Some(file), Some(before)) = (file, &before)
            && let Err(e) = self.state.replace_token(file, before)
        {
            error!(
                "cannot restore the token in {file}, which is valid, after a failed rotation: {e}"
            );
        }
        Ok((rotated?, string))
    }

    /// Revokes a token. With `keep_leases`, everything that it has opened goes on. Blocks
    /// until the change is on disk.
    ///
    /// # Errors
    ///
    /// Those of [`create`](Self::create).
    pub(super) fn revoke(&self, name: &str, keep_leases: bool) -> Result<Token, ChangeError> {
        self.tokens.change(|tokens| {
            let revoked = tokens.revoke(name, keep_leases, UnixMillis::now())?;
            Ok(revoked.clone())
        })
    }

    /// Revokes several tokens, as [`revoke`](Self::revoke) does without `keep_leases`: all, or none.
    ///
    /// # Errors
    ///
    /// Those of [`create`](Self::create).
    pub(super) fn revoke_all(&self, names: &[String]) -> Result<Vec<Token>, ChangeError> {
        self.tokens.change(|tokens| {
            let now = UnixMillis::now();
            let revoked = names.iter().map(|name| {
                let revoked = tokens.revoke(name, false, now)?;
                Ok(revoked.clone())
            });
            revoked.collect()
        })
    }
}

fn hash(token: &Secret) -> blake3::Hash {
    blake3::hash(token.reveal().as_bytes())
}

fn ended(name: &str, reason: InvalidReason) -> String {
    format!(
        "the token {name:?} {}; get a new one from the pool's administrator",
        reason.description()
    )
}

fn refuse<T>(message: String) -> Result<T, Error> {
    Err(Error::new(ErrorCode::Token, message))
}

/// Returns the token of an `authorization: Bearer …` entry.
fn bearer(metadata: &MetadataMap) -> Option<&[u8]> {
    let value = metadata.get("authorization")?.as_encoded_bytes();
    let (scheme, token) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then_some(token)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    struct Pool {
        directory: tempfile::TempDir,
        access: Access,
        secrets: PoolSecrets,
    }

    fn pool() -> Pool {
        open_pool(tempfile::tempdir().unwrap())
    }

    fn open_pool(directory: tempfile::TempDir) -> Pool {
        let state = StateDir::open(directory.path()).unwrap();
        let secrets = state.pool_secrets().unwrap();
        let access = Access::open(state, &secrets).unwrap();
        Pool {
            directory,
            access,
            secrets,
        }
    }

    fn call(authorization: Option<&str>) -> MetadataMap {
        let mut metadata = MetadataMap::new();
        if let Some(value) = authorization {
            metadata.insert("authorization", value.parse().unwrap());
        }
        metadata
    }

    fn with_bearer(token: &Secret) -> MetadataMap {
        call(Some(&format!("bearer {}", token.reveal())))
    }

    fn error(access: &Access, roles: &[Role], token: &Secret) -> String {
        let error = access.check(roles, &with_bearer(token)).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Token);
        error.message
    }

    #[test]
    fn each_role_has_its_own_token() {
        let Pool {
            access, secrets, ..
        } = pool();
        let strings = [
            (Role::Client, &secrets.client_token),
            (Role::Worker, &secrets.worker_token),
            (Role::Admin, &secrets.admin_token),
        ];
        for (role, string) in strings {
            for (other, shown) in strings {
                let passed = access.check(&[role], &with_bearer(shown));
                assert_eq!(passed.is_ok(), role == other, "{role} with that of {other}");
            }
            assert_eq!(access.url_token(role, &secrets).as_ref(), Some(string));
        }
        let auth = access.check(
            &[Role::Client, Role::Admin],
            &with_bearer(&secrets.admin_token),
        );
        let auth = auth.unwrap();
        assert_eq!((&*auth.token, &*auth.tenant), ("admin", DEFAULT_TENANT));
        assert_eq!(auth.role, Role::Admin);
        assert_eq!(
            error(&access, &[Role::Worker], &secrets.client_token),
            "the program token was sent, but a worker needs a different token; use the URL of the `workers:` line that the scheduler prints"
        );
    }

    #[test]
    fn other_tokens_are_rejected() {
        let Pool {
            access, secrets, ..
        } = pool();
        let token = secrets.client_token.reveal();
        let missing = [None, Some(token.to_owned()), Some(format!("Basic {token}"))];
        let missing = missing.into_iter().chain([Some("Bearer".into())]);
        let missing = missing.map(|call| (call, "the call has no token"));
        let wrong = ["".into(), format!("{token} "), token[1..].to_owned()];
        let wrong = wrong.map(|token| {
            (
                Some(format!("Bearer {token}")),
                "this pool does not know the token",
            )
        });
        for (authorization, expected) in missing.chain(wrong) {
            let refused = access.check(&[Role::Client], &call(authorization.as_deref()));
            let error = refused.unwrap_err();
            assert!(
                error.message.contains(expected),
                "{authorization:?}: {error}"
            );
        }
    }

    #[test]
    fn tokens_are_the_same_after_a_restart_and_nobody_can_read_them() {
        let pool = pool();
        let new = NewToken {
            name: "ci".into(),
            role: Role::Client,
            tenant: "red".into(),
            user: "ada".into(),
            note: String::new(),
            life: None,
            uses: None,
        };
        let (_, string) = pool.access.create(new).unwrap();
        pool.access.revoke("program", false).unwrap();
        let (_, successor) = pool.access.rotate("worker", Duration::ZERO).unwrap();
        let path = pool.directory.path().join("tokens.json");
        let kept = std::fs::read_to_string(path).unwrap();
        let first = pool.secrets.client_token.clone();
        for secret in [&string, &successor, &first, &pool.secrets.admin_token] {
            assert!(!kept.contains(secret.reveal()));
        }
        let again = open_pool(pool.directory);
        let auth = again.access.check(&[Role::Client], &with_bearer(&string));
        assert_eq!(&*auth.unwrap().tenant, "red");
        assert!(error(&again.access, &[Role::Client], &first).contains("was revoked"));
        assert_eq!(again.access.url_token(Role::Client, &again.secrets), None);
        let url = again.access.url_token(Role::Worker, &again.secrets);
        assert_eq!(url, Some(successor), "the printed URL has the new token");
    }

    #[test]
    fn closing_tokens_authenticate_but_open_nothing() {
        let pool = pool();
        let show = |token: &Secret| pool.access.check(&[Role::Client], &with_bearer(token));
        let auth = show(&pool.secrets.client_token).unwrap();
        pool.access.check_may_open(&auth).unwrap();
        pool.access.rotate("program", Duration::ZERO).unwrap();
        let replaced = pool.access.check_may_open(&auth).unwrap_err();
        assert!(replaced.message.contains("by a newer one"), "{replaced}");
        let auth = show(&pool.secrets.client_token).unwrap();
        pool.access.revoke("program", true).unwrap();
        let revoked = pool.access.check_may_open(&auth).unwrap_err();
        assert!(revoked.message.contains("was revoked"), "{revoked}");
        show(&pool.secrets.client_token).unwrap();
        pool.access.revoke("program", false).unwrap();
        show(&pool.secrets.client_token).unwrap_err();
    }
}
