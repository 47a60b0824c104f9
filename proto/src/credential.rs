//! The credential that binds a client's id to the client: a secret that the client
//! generates.
//!
//! A client shows its credential to the scheduler alone, over TLS, each time it attaches.
//! Its id is a part of the credential's hash, so nobody can attach with another client's
//! id without the credential, whatever state the scheduler has. The whole hash is in the
//! signed claims of each lease. It proves the owner of the lease to a scheduler that has
//! restarted.

use std::fmt;

use bytes::Bytes;

use crate::{ids::ClientId, v1::ClientHello};

/// Separates these hashes from hashes made for other purposes.
const CONTEXT: &str = "tensord 2026 client credential";

/// A client's secret. It prints as `***`.
#[derive(Clone)]
pub struct ClientCredential([u8; Self::BYTES]);

impl ClientCredential {
    /// Length of a credential in bytes.
    pub const BYTES: usize = 32;

    /// Creates a credential from `bytes`, which must be random and used by one client
    /// alone.
    pub fn new(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// Reads the credential in a hello; `None` if it has another length.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// Returns the secret itself, to be shown to the scheduler.
    pub fn reveal(&self) -> Bytes {
        Bytes::copy_from_slice(&self.0)
    }

    /// Returns the hash, which others may know.
    pub fn hash(&self) -> CredentialHash {
        CredentialHash(blake3::Hash::from_bytes(blake3::derive_key(
            CONTEXT, &self.0,
        )))
    }
}

impl fmt::Debug for ClientCredential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// The hash of a credential. Hashes are compared in constant time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CredentialHash(blake3::Hash);

impl CredentialHash {
    /// Reads the hash in a message; `None` if it has another length.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes = <[u8; 32]>::try_from(bytes).ok()?;
        Some(Self(blake3::Hash::from_bytes(bytes)))
    }

    /// Returns the hash in the form for a message.
    pub fn to_bytes(self) -> Bytes {
        Bytes::copy_from_slice(self.0.as_bytes())
    }

    /// Returns the id of the client with this credential: the hash's first eight bytes.
    pub fn client_id(self) -> ClientId {
        let (first, _) = self.0.as_bytes().split_first_chunk().expect("32 bytes");
        ClientId(u64::from_le_bytes(*first))
    }
}

impl fmt::Debug for ClientHello {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientHello")
            .field("hello", &self.hello)
            .field("client_id", &ClientId(self.client_id))
            .field("lease_tokens", &self.lease_tokens.len())
            .field("credential", &"***")
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_hides_the_credential() {
        let credential = ClientCredential::new([0xab; 32]);
        let hello = ClientHello {
            client_id: 7,
            credential: credential.reveal(),
            ..ClientHello::default()
        };
        for text in [
            format!("{credential:?}"),
            format!("{hello:?}"),
            format!("{hello:#?}"),
        ] {
            assert!(text.contains("***"), "{text}");
            assert!(!text.contains("171") && !text.contains("xab"), "{text}");
        }
    }

    #[test]
    fn different_credentials_have_different_ids() {
        let hash = |byte: u8| ClientCredential::new([byte; 32]).hash();
        assert_eq!(hash(1), hash(1));
        assert_ne!(hash(1), hash(2));
        assert_eq!(hash(1).client_id(), hash(1).client_id());
        assert_ne!(hash(1).client_id(), hash(2).client_id());
        assert_eq!(
            CredentialHash::from_bytes(&hash(1).to_bytes()),
            Some(hash(1))
        );
    }

    #[test]
    fn credential_of_wrong_length_is_rejected() {
        for length in [0, 31, 33] {
            assert!(ClientCredential::from_bytes(&vec![0; length]).is_none());
            assert!(CredentialHash::from_bytes(&vec![0; length]).is_none());
        }
        assert!(ClientCredential::from_bytes(&[0; 32]).is_some());
    }
}
