//! Who may call what: one token for programs, another for workers.
//!
//! Only hashes of the tokens are kept, and `blake3::Hash` compares them in
//! constant time, so answers tell nothing about how close a guess was.

use tensord_proto::v1::{Error, ErrorCode};
use tensord_transport::Secret;
use tonic::metadata::MetadataMap;

/// What a token lets its holder be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// A program that leases devices.
    Client,
    /// A worker that offers some.
    Worker,
}

impl Role {
    /// The line of the scheduler's output that has the role's token.
    fn line(self) -> &'static str {
        match self {
            Self::Client => "programs:",
            Self::Worker => "workers:",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Worker => "worker",
        }
    }
}

/// The tokens of a pool.
#[derive(Clone, Debug)]
pub(super) struct Access {
    client: blake3::Hash,
    worker: blake3::Hash,
}

impl Access {
    pub(super) fn new(client: &Secret, worker: &Secret) -> Self {
        let hash = |token: &Secret| blake3::hash(token.reveal().as_bytes());
        Self {
            client: hash(client),
            worker: hash(worker),
        }
    }

    /// Lets a call pass that shows the token of `role`.
    ///
    /// # Errors
    ///
    /// [`ErrorCode::Token`], saying whether the token is missing, another
    /// role's, or of no role here.
    pub(super) fn check(&self, role: Role, metadata: &MetadataMap) -> Result<(), Error> {
        let Some(token) = bearer(metadata) else {
            return refuse(format!(
                "there is no token in the call; use the URL of the `{}` line that the scheduler prints",
                role.line()
            ));
        };
        let hash = blake3::hash(token);
        match self.role_of(hash) {
            Some(found) if found == role => Ok(()),
            Some(other) => refuse(format!(
                "this is the {} token, and a {} needs its own; use the URL of the `{}` line that the scheduler prints",
                other.name(),
                role.name(),
                role.line()
            )),
            None => refuse(format!(
                "the token is not one of this pool; use the URL of the `{}` line that the scheduler prints",
                role.line()
            )),
        }
    }

    fn role_of(&self, hash: blake3::Hash) -> Option<Role> {
        // Both are compared, whichever fits.
        let (client, worker) = (self.client == hash, self.worker == hash);
        match (client, worker) {
            (true, false) => Some(Role::Client),
            (false, true) => Some(Role::Worker),
            // The same token for both is the operator's mistake; neither is served.
            (true, true) | (false, false) => None,
        }
    }
}

fn refuse(message: String) -> Result<(), Error> {
    Err(Error::new(ErrorCode::Token, message))
}

/// The token of an `authorization: Bearer …` entry.
fn bearer(metadata: &MetadataMap) -> Option<&[u8]> {
    let value = metadata.get("authorization")?.as_encoded_bytes();
    let (scheme, token) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then_some(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(authorization: Option<&'static str>) -> MetadataMap {
        let mut metadata = MetadataMap::new();
        if let Some(value) = authorization {
            metadata.insert("authorization", value.parse().unwrap());
        }
        metadata
    }

    #[test]
    fn each_role_has_its_own_token() {
        let access = Access::new(&Secret::new("client-token"), &Secret::new("worker-token"));
        let client = call(Some("Bearer client-token"));
        let worker = call(Some("bearer worker-token"));
        assert_eq!(access.check(Role::Client, &client), Ok(()));
        assert_eq!(access.check(Role::Worker, &worker), Ok(()));
        let error = access.check(Role::Worker, &client).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Token);
        assert_eq!(
            error.message,
            "this is the client token, and a worker needs its own; use the URL of the `workers:` line that the scheduler prints"
        );
        let error = access.check(Role::Client, &worker).unwrap_err();
        assert!(
            error
                .message
                .starts_with("this is the worker token, and a client needs its own")
        );
    }

    #[test]
    fn nothing_else_passes() {
        let access = Access::new(&Secret::new("client-token"), &Secret::new("worker-token"));
        let cases = [
            (None, "there is no token"),
            (Some("client-token"), "there is no token"),
            (Some("Basic client-token"), "there is no token"),
            (Some("Bearer"), "there is no token"),
            (Some("Bearer "), "not one of this pool"),
            (Some("Bearer client-token "), "not one of this pool"),
            (Some("Bearer client-toke"), "not one of this pool"),
        ];
        for (authorization, expected) in cases {
            let error = access
                .check(Role::Client, &call(authorization))
                .unwrap_err();
            assert!(
                error.message.contains(expected),
                "{authorization:?}: {error}"
            );
        }
    }

    #[test]
    fn one_token_for_both_roles_serves_neither() {
        let access = Access::new(&Secret::new("same"), &Secret::new("same"));
        let same = call(Some("Bearer same"));
        assert!(access.check(Role::Client, &same).is_err());
        assert!(access.check(Role::Worker, &same).is_err());
    }
}
