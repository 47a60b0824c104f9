//! Messages about tokens.

use tensord_proto::v1::{MadeToken, TokenInfo};
use tensord_transport::Secret;

use crate::scheduler::access::{Token, TokenState, UnixMillis};

/// Returns the reply with a new token and its secret string.
pub(super) fn made_token((token, string): &(Token, Secret)) -> MadeToken {
    MadeToken {
        info: Some(info_of(token, UnixMillis::now())),
        token: string.reveal().into(),
    }
}

/// Returns what administrators see of a token.
pub(super) fn info_of(token: &Token, now: UnixMillis) -> TokenInfo {
    let rotates = token.rotating_until(now);
    let standing = match token.state_at(now) {
        TokenState::Valid if rotates.is_some() => "rotating",
        TokenState::Valid => "good",
        TokenState::Closing(reason) | TokenState::Ended(reason) => reason.name(),
    };
    TokenInfo {
        name: token.name.clone(),
        role: token.role.to_string(),
        tenant: token.tenant.clone(),
        user: token.user.clone(),
        note: token.note.clone(),
        created_ms: token.created.0,
        expires_ms: token.expires.map(|at| at.0),
        uses: token.uses,
        used: token.used,
        standing: standing.into(),
        rotates_ms: rotates.map(|at| at.0),
        revoked_ms: token.revoked.map(|revoked| revoked.at.0),
    }
}
