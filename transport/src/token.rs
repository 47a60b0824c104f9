//! Lease tokens: signed by the scheduler, checked by workers on their own.
//!
//! A token is the encoded claims followed by a 64-byte Ed25519 signature. The data path
//! does not involve the scheduler: a worker has the scheduler's public key from
//! registration. This module does not know which signed tokens are still valid: workers
//! decide that by the grants' numbers and the end in the claims.

use prost::Message;
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use tensord_proto::v1::LeaseClaims;

const SIGNATURE_BYTES: usize = 64;

/// Signed along with the claims, so that a signature for anything else made
/// with the same key is not a lease token.
const CONTEXT: &[u8] = b"tensord lease v1\0";

/// Why a lease token was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// The token is too short, or does not decode to claims.
    #[error("the lease token is malformed")]
    Malformed,
    /// The token was signed by another key, or changed.
    #[error("the lease token was not signed by this pool's scheduler")]
    Signature,
}

/// The scheduler's signing key.
pub struct LeaseSigner(Ed25519KeyPair);

impl LeaseSigner {
    /// Generates a key, as PKCS#8 to keep in a file.
    ///
    /// # Errors
    ///
    /// When the system gives no randomness.
    pub fn generate() -> Result<Vec<u8>, ring::error::Unspecified> {
        let document = Ed25519KeyPair::generate_pkcs8(&ring::rand::SystemRandom::new())?;
        Ok(document.as_ref().to_vec())
    }

    /// Reads a key made by [`generate`](Self::generate).
    ///
    /// # Errors
    ///
    /// When `pkcs8` is not such a key.
    pub fn from_pkcs8(pkcs8: &[u8]) -> Result<Self, ring::error::KeyRejected> {
        Ed25519KeyPair::from_pkcs8(pkcs8).map(Self)
    }

    /// Returns the public key with which workers check tokens.
    pub fn public_key(&self) -> Vec<u8> {
        self.0.public_key().as_ref().to_vec()
    }

    /// Returns a signed token with `claims`.
    pub fn sign(&self, claims: &LeaseClaims) -> Vec<u8> {
        let mut token = claims.encode_to_vec();
        let signature = self.0.sign(&[CONTEXT, &token].concat());
        token.extend_from_slice(signature.as_ref());
        token
    }
}

/// Returns the claims of `token` if the scheduler with `public_key` signed it.
///
/// # Errors
///
/// See [`TokenError`].
pub fn verify(token: &[u8], public_key: &[u8]) -> Result<LeaseClaims, TokenError> {
    let split = token
        .len()
        .checked_sub(SIGNATURE_BYTES)
        .ok_or(TokenError::Malformed)?;
    let (claims, signature) = token.split_at(split);
    UnparsedPublicKey::new(&ED25519, public_key)
        .verify(&[CONTEXT, claims].concat(), signature)
        .map_err(|_| TokenError::Signature)?;
    LeaseClaims::decode(claims).map_err(|_| TokenError::Malformed)
}

#[cfg(test)]
mod tests {
    use tensord_proto::v1::LeaseShare;

    use super::*;

    #[test]
    fn only_the_signers_unchanged_token_is_accepted() {
        let signer = || LeaseSigner::from_pkcs8(&LeaseSigner::generate().unwrap()).unwrap();
        let (ours, theirs) = (signer(), signer());
        let share = LeaseShare {
            worker_id: 7,
            device_index: 1,
            ..LeaseShare::default()
        };
        let claims = LeaseClaims {
            lease_id: 1,
            client_id: 2,
            shares: vec![share],
            tenant: "a".into(),
            ..LeaseClaims::default()
        };
        let token = ours.sign(&claims);
        assert_eq!(verify(&token, &ours.public_key()), Ok(claims.clone()));
        assert_eq!(
            verify(&token, &theirs.public_key()),
            Err(TokenError::Signature)
        );
        for at in 0..token.len() {
            let mut changed = token.clone();
            changed[at] ^= 1;
            assert_eq!(
                verify(&changed, &ours.public_key()),
                Err(TokenError::Signature)
            );
        }
        assert_eq!(
            verify(&token[..63], &ours.public_key()),
            Err(TokenError::Malformed)
        );
    }
}
