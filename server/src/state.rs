//! Data that must outlive a process: the pool's identity, its lease key, its tokens.
//!
//! A state directory belongs to one user. A secret is created when it is first
//! needed and read from then on, so that a pool keeps its URLs over restarts.
//! The pool's current workers, clients and most leases are not kept: they announce
//! themselves to a scheduler that restarted (see `tensord_scheduler`).
//!
//! | file | what |
//! | --- | --- |
//! | `identity.pem` | the certificate chain and key of the pool's server |
//! | `lease-key.pk8` | the key that signs leases |
//! | `grant-term` | the term in the grant numbers of the latest scheduler |
//! | `client-token`, `worker-token`, `admin-token` | the tokens of the first start |
//! | `tokens.json` | every token's hash, role, tenant and limits |
//! | `tenants.redb` | the tenants, with their guarantees, limits and weights (`crate::scheduler`) |
//! | `leases.redb` | durable leases, and who has their snapshots (`crate::scheduler`) |
//! | `usage.redb` | what leases have used, by tenant and user (`crate::scheduler`) |
//! | `workers.json` | the workers that may join, and the devices they may offer |
//! | `worker-NAME.pem` | the certificate and key of a worker on this host |
//! | `pool-url` | the pool's URL, without a token |
//! | `gateway-token` | the token that stock Burn programs send to a gateway |
//! | `audit.jsonl`, `audit.1.jsonl`, … | the audit log (`crate::audit`) |
//! | `scheduler.lock` | locked while a scheduler runs on this state |
//! | `state.lock` | locked while another file is created or replaced |

pub(crate) mod database;
mod files;
mod persisted;
mod write_through;

use std::{
    fs::{File, TryLockError},
    io,
    path::{Path, PathBuf},
    time::SystemTime,
};

use rand::{TryRng, rngs::SysRng};
use tensord_transport::{
    Identity, PoolUrl, Secret,
    identity::{IdentityError, IdentityPem},
    token::LeaseSigner,
};

pub(crate) use persisted::Persisted;
pub(crate) use write_through::WriteThrough;

/// The rule that [`is_token`] checks, as text for error messages.
pub(crate) const TOKEN_RULE: &str = "16 to 128 letters, digits and - . _ ~";

/// Random bytes in a token made here: 256 bits, as hard to guess as a key.
const TOKEN_BYTES: usize = 32;

/// Longest worker name, in bytes, that becomes part of a file name as it stands.
const MAX_STEM_BYTES: usize = 200;

/// Returns whether `text` can be a token: safe in a URL and in a header, and too
/// long to guess.
pub(crate) fn is_token(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-._~".contains(c);
    (16..=128).contains(&text.len()) && text.chars().all(allowed)
}

/// Why the state directory could not be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StateError {
    /// A file operation failed.
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        /// The operation.
        what: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Other users could replace files in the directory.
    #[error("the state directory {} can be written by other users (mode {mode:03o}); use a directory of your own, or remove that permission with `chmod go-w {}`", path.display(), path.display())]
    Exposed {
        /// The directory.
        path: PathBuf,
        /// The directory's permission bits.
        mode: u32,
    },
    /// The directory belongs to another user, who could replace its files.
    #[error("the state directory {} belongs to user {owner}, and this process runs as user {user}; use a directory of your own, or change the owner of this one with `chown {user} {}`", path.display(), path.display())]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// The id of the user that owns the directory.
        owner: u32,
        /// The id of the user that this process runs as.
        user: u32,
    },
    /// A file's content is not valid.
    #[error("{} is damaged ({reason}); restore it, or delete it to have a new one created, which invalidates every URL printed so far", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with the content.
        reason: String,
    },
    /// The records of leases, of tenants or of usage cannot be opened.
    #[error("cannot open {}: {reason}", path.display())]
    Records {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The file of tenants is damaged.
    #[error("{} is damaged ({reason}); restore it, or delete it: tenants with valid tokens are then added again, without guarantees, limits and weights", path.display())]
    DamagedTenants {
        /// The file.
        path: PathBuf,
        /// What is wrong with the content.
        reason: String,
    },
    /// The records of tenants cannot be written.
    #[error("cannot write {}: {reason}; free some space or correct the permissions, and repeat the command", path.display())]
    Unwritten {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// Another scheduler runs on this state, and both would lease out the same devices.
    #[error("another scheduler uses the state directory {}; stop it, or give this scheduler another directory with --state", path.display())]
    Locked {
        /// The directory.
        path: PathBuf,
    },
    /// The system provides no randomness, or a key cannot be generated.
    #[error("cannot generate a key: {0}")]
    Key(String),
}

/// A directory of secrets.
#[derive(Debug)]
pub(crate) struct StateDir {
    path: PathBuf,
}

/// The secrets with which a scheduler remains the same pool after a restart.
pub(crate) struct PoolSecrets {
    /// The server's TLS certificate and key.
    pub(crate) identity: Identity,
    /// The key that signs leases.
    pub(crate) signer: LeaseSigner,
    /// The token that programs send.
    pub(crate) client_token: Secret,
    /// The token that workers enrol with.
    pub(crate) worker_token: Secret,
    /// The token that administrators send.
    pub(crate) admin_token: Secret,
}

/// Lock that keeps every other scheduler off the state; released when dropped.
#[derive(Debug)]
pub(crate) struct SchedulerLock {
    _file: File,
}

impl StateDir {
    /// Opens the directory at `path`, and creates it if it is missing.
    pub(crate) fn open(path: &Path) -> Result<Self, StateError> {
        files::private_directory(path)?;
        Ok(Self { path: path.into() })
    }

    /// Locks this state for one scheduler.
    ///
    /// # Errors
    ///
    /// [`StateError::Locked`] if another scheduler holds the lock, or [`StateError::Io`].
    pub(crate) fn lock_scheduler(&self) -> Result<SchedulerLock, StateError> {
        let path = self.path.join("scheduler.lock");
        let file = files::open_lock_file(&path)?;
        match file.try_lock() {
            Ok(()) => Ok(SchedulerLock { _file: file }),
            Err(TryLockError::WouldBlock) => Err(StateError::Locked {
                path: self.path.clone(),
            }),
            Err(TryLockError::Error(source)) => Err(StateError::Io {
                what: "lock",
                path,
                source,
            }),
        }
    }

    /// Returns the pool's secrets, and creates those that are missing.
    pub(crate) fn pool_secrets(&self) -> Result<PoolSecrets, StateError> {
        let (path, pem) = self.read_or_create("identity.pem", || {
            let pem = IdentityPem::new_pool().map_err(|e| StateError::Key(e.to_string()))?;
            Ok((pem.chain + &pem.key).into_bytes())
        })?;
        let identity = identity(&pem).map_err(|reason| StateError::Damaged { path, reason })?;
        let (path, key) = self.read_or_create("lease-key.pk8", || {
            LeaseSigner::generate().map_err(|e| StateError::Key(e.to_string()))
        })?;
        let signer = LeaseSigner::from_pkcs8(&key).map_err(|e| {
            let reason = format!("it is not a signing key: {e}");
            StateError::Damaged { path, reason }
        })?;
        Ok(PoolSecrets {
            identity,
            signer,
            client_token: self.token("client-token")?,
            worker_token: self.token("worker-token")?,
            admin_token: self.token("admin-token")?,
        })
    }

    /// Chooses the term of a scheduler that starts at `now`, and writes the term to disk
    /// before it returns. The term is higher than that of every earlier scheduler on this
    /// state. As it is at least the time in seconds since 1970, this holds even if the file
    /// was lost or replaced by an old copy.
    pub(crate) fn raise_grant_term(&self, now: SystemTime) -> Result<u64, StateError> {
        let path = self.path.join("grant-term");
        let damaged = |reason: &str| StateError::Damaged {
            path: path.clone(),
            reason: reason.into(),
        };
        let last = match files::read_private(&path)? {
            None => 0,
            Some(content) => {
                let text = String::from_utf8_lossy(&content);
                let number = text.trim().parse::<u64>();
                number.map_err(|_| damaged("it is not a number"))?
            }
        };
        let next = last.checked_add(1);
        let next = next.ok_or_else(|| damaged("its number is already the highest possible"))?;
        // A clock that shows a time before 1970 is ignored.
        let seconds = now.duration_since(SystemTime::UNIX_EPOCH);
        let term = next.max(seconds.map_or(0, |seconds| seconds.as_secs()));
        files::replace_private(&path, format!("{term}\n").as_bytes())?;
        Ok(term)
    }

    /// Returns the certificate and key of this host's worker `name`; creates them if
    /// missing.
    pub(crate) fn worker_identity(&self, name: &str) -> Result<Identity, StateError> {
        let stem = match name.len() {
            ..=MAX_STEM_BYTES => name.to_owned(),
            _ => blake3::hash(name.as_bytes()).to_hex().to_string(),
        };
        let (path, pem) = self.read_or_create(&format!("worker-{stem}.pem"), || {
            let pem = IdentityPem::self_signed().map_err(|e| StateError::Key(e.to_string()))?;
            Ok((pem.chain + &pem.key).into_bytes())
        })?;
        identity(&pem).map_err(|reason| StateError::Damaged { path, reason })
    }

    /// Opens the value stored in the file `name`; its first change creates the file.
    pub(crate) fn persisted<T>(&self, name: &str) -> Result<Persisted<T>, StateError>
    where
        T: Clone + Default + serde::Serialize + serde::de::DeserializeOwned,
    {
        Persisted::open(&self.path.join(name))
    }

    /// Returns the path of the directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the file `name` to read and write, and creates it if it is missing.
    pub(crate) fn private_file(&self, name: &str) -> Result<File, StateError> {
        files::open_private(&self.path.join(name))
    }

    /// Replaces the content of the file `name` with `token`.
    pub(crate) fn replace_token(&self, name: &str, token: &Secret) -> Result<(), StateError> {
        files::replace_private(&self.path.join(name), token.reveal().as_bytes())
    }

    /// Writes the pool's URL, without its token, for commands on this host.
    pub(crate) fn set_pool_url(&self, url: &PoolUrl) -> Result<(), StateError> {
        let bare = PoolUrl {
            token: None,
            ..url.clone()
        };
        files::replace_private(&self.path.join("pool-url"), bare.reveal().as_bytes())
    }

    /// Returns the URL with the admin token if a scheduler has run on the state at `path`;
    /// it need not be running now. Creates nothing there. The directory may belong to
    /// another user: root administers a scheduler that runs as its own user.
    pub(crate) fn admin_url(path: &Path) -> Result<Option<PoolUrl>, StateError> {
        let (url_path, token_path) = (path.join("pool-url"), path.join("admin-token"));
        let url = files::read_private(&url_path)?;
        let (Some(url), Some(token)) = (url, files::read_private(&token_path)?) else {
            return Ok(None);
        };
        let url = String::from_utf8_lossy(&url).parse::<PoolUrl>();
        let url = url.map_err(|e| StateError::Damaged {
            path: url_path,
            reason: e.to_string(),
        })?;
        let token = Some(as_token(token_path, &token)?);
        Ok(Some(PoolUrl { token, ..url }))
    }

    /// Returns the gateway's token, and creates it if it is missing.
    pub(crate) fn gateway_token(&self) -> Result<Secret, StateError> {
        self.token("gateway-token")
    }

    pub(crate) fn token(&self, name: &str) -> Result<Secret, StateError> {
        let (path, bytes) = self.read_or_create(name, || Ok(new_token()?.into_bytes()))?;
        as_token(path, &bytes)
    }

    /// Returns the path and content of a file, which `make` provides if it is missing.
    fn read_or_create(
        &self,
        name: &str,
        make: impl FnOnce() -> Result<Vec<u8>, StateError>,
    ) -> Result<(PathBuf, Vec<u8>), StateError> {
        let path = self.path.join(name);
        let content = match files::read_private(&path)? {
            Some(content) => content,
            None => files::create_private(&path, &make()?)?,
        };
        Ok((path, content))
    }
}

/// Parses the content of the token file at `path`.
fn as_token(path: PathBuf, bytes: &[u8]) -> Result<Secret, StateError> {
    let text = String::from_utf8_lossy(bytes);
    match text.trim() {
        token if is_token(token) => Ok(Secret::new(token)),
        _ => Err(StateError::Damaged {
            path,
            reason: format!("a token must have {TOKEN_RULE}"),
        }),
    }
}

fn identity(pem: &[u8]) -> Result<Identity, String> {
    let text = std::str::from_utf8(pem).map_err(|_| "it is not PEM text")?;
    // Certificate and key are in one file, so that no crash can leave one without the other.
    let pem = IdentityPem {
        chain: text.into(),
        key: text.into(),
    };
    Identity::from_pem(&pem).map_err(|e: IdentityError| e.to_string())
}

/// Returns a new random token.
pub(crate) fn new_token() -> Result<String, StateError> {
    let mut bytes = [0; TOKEN_BYTES];
    SysRng
        .try_fill_bytes(&mut bytes)
        .map_err(|e| StateError::Key(e.to_string()))?;
    Ok(crate::human::hex(&bytes))
}

#[cfg(test)]
mod tests;
