//! Who may use a server: clients that send one of its tokens.

use http::{HeaderMap, header::AUTHORIZATION};
use tensord_client::Secret;

use crate::error::InferError;

/// The tokens of a server, as hashes. The time of comparing hashes reveals nothing about a token.
#[derive(Debug, Clone)]
pub(crate) enum Access {
    /// Clients that send one of these tokens.
    Tokens(Vec<blake3::Hash>),
    /// Every process of this host.
    ThisHost,
}

impl Access {
    pub(crate) fn new(tokens: &[Secret]) -> Self {
        let hashes = tokens.iter().map(|it| blake3::hash(it.reveal().as_bytes()));
        Self::Tokens(hashes.collect())
    }

    /// Checks the token of a request.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<(), InferError> {
        let Self::Tokens(tokens) = self else {
            return Ok(());
        };
        let token = headers.get(AUTHORIZATION).and_then(|it| it.to_str().ok());
        let token = token.and_then(|it| {
            let (scheme, token) = it.split_once(' ')?;
            scheme
                .eq_ignore_ascii_case("bearer")
                .then_some(token.trim())
        });
        let hash = token.map(|it| blake3::hash(it.as_bytes()));
        match hash.is_some_and(|hash| tokens.contains(&hash)) {
            true => Ok(()),
            false => Err(InferError::Unauthorized),
        }
    }
}

/// Returns a token that nobody can guess: 32 random bytes.
pub(crate) fn random_token() -> Secret {
    let bytes: [u8; 32] = rand::random();
    Secret::new(
        bytes
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>(),
    )
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[track_caller]
    fn check(header: Option<&'static str>, expected: bool) {
        let access = Access::new(&[Secret::new("one"), Secret::new("two")]);
        let mut headers = HeaderMap::new();
        if let Some(header) = header {
            headers.insert(AUTHORIZATION, HeaderValue::from_static(header));
        }
        assert_eq!(access.check(&headers).is_ok(), expected, "{header:?}");
    }

    #[test]
    fn only_tokens_of_the_server_are_accepted() {
        check(Some("Bearer one"), true);
        check(Some("bearer two"), true);
        check(Some("Bearer three"), false);
        check(Some("Bearer "), false);
        check(Some("Basic one"), false);
        check(Some("one"), false);
        check(None, false);
    }

    #[test]
    fn random_tokens_differ() {
        assert_eq!(random_token().reveal().len(), 64);
        assert_ne!(random_token(), random_token());
    }
}
