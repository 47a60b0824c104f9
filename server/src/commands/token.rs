//! `tensord token`: makes, lists, rotates and revokes the tokens of a running pool.

use std::time::Duration;

use tensord_proto::v1::{
    CreateTokenRequest, ListTokensRequest, MadeToken, RevokeTokenRequest, Revoked,
    RotateTokenRequest, TokenInfo, admin_client::AdminClient,
};
use tensord_transport::{PoolUrl, Secret, control, dial::DialError};
use tokio::time::timeout;
use tonic::{
    Request, Response, Status,
    metadata::{MetadataValue, errors::InvalidMetadataValue},
    transport::Channel,
};

mod list;

use crate::{
    config::{AdminUrl, TokenAction, TokenConfig},
    failure::Failure,
    human, refusal,
    state::StateDir,
    stdout,
};

/// How long the scheduler may take to answer: it writes to its disk first.
const DEADLINE: Duration = Duration::from_secs(10);

/// Why tokens were not changed or listed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AdminError {
    /// There is no URL, and no scheduler has run on this host's state.
    #[error(
        "no scheduler has run on {0}; run this on the scheduler's host, name its state directory with --state, or give a URL with an admin token in TENSORD_URL or with --url"
    )]
    NoScheduler(String),
    /// The scheduler cannot be reached.
    #[error("cannot reach the pool: {0}")]
    Dial(#[from] DialError),
    /// It refused.
    #[error("the scheduler at {address} refused: {reason}")]
    Refused {
        /// Where it is.
        address: String,
        /// What it said.
        reason: String,
    },
    /// It did not answer in time.
    #[error(
        "the scheduler at {address} did not answer within {DEADLINE:?}, so it may have done it or not; `tensord token list` shows"
    )]
    Silent {
        /// Where it is.
        address: String,
    },
    /// The token cannot be sent.
    #[error("the pool URL's token has characters that no token has; copy the URL again")]
    Token(#[from] InvalidMetadataValue),
}

/// Asks once and prints the answer.
pub(super) async fn run(config: TokenConfig) -> Result<(), Failure> {
    let url = match config.admin {
        AdminUrl::Given(url) => url,
        AdminUrl::Kept(state) => {
            let url = StateDir::admin_url(&state.path)?;
            url.ok_or(AdminError::NoScheduler(state.shown))?
        }
    };
    let text = match timeout(DEADLINE, carry_out(&url, config.action)).await {
        Ok(text) => text?,
        Err(_) => {
            let address = url.authority();
            return Err(AdminError::Silent { address }.into());
        }
    };
    stdout::print(&text)
}

/// Does what was asked for, and returns what to print.
async fn carry_out(url: &PoolUrl, action: TokenAction) -> Result<String, AdminError> {
    let channel = control::connect(&url.host, url.port, &url.trust).await?;
    let mut admin = AdminClient::new(channel);
    match action {
        TokenAction::Create {
            name,
            role,
            tenant,
            life,
            uses,
        } => {
            let request = CreateTokenRequest {
                name: name.unwrap_or_default(),
                role,
                tenant,
                life_ms: life.map(millis),
                uses,
            };
            let made = admin.create_token(with_token(request, url)?).await;
            Ok(made_text(url, answer(url, made)?))
        }
        TokenAction::Rotate { name, grace } => {
            let grace_ms = millis(grace);
            let request = RotateTokenRequest { name, grace_ms };
            let made = admin.rotate_token(with_token(request, url)?).await;
            Ok(made_text(url, answer(url, made)?))
        }
        TokenAction::Revoke { name, keep_leases } => {
            let request = RevokeTokenRequest { name, keep_leases };
            let revoked = revoke(&mut admin, url, request.clone()).await?;
            Ok(revoked_text(&request, revoked))
        }
        TokenAction::List { json } => {
            let listed = admin
                .list_tokens(with_token(ListTokensRequest {}, url)?)
                .await;
            let tokens = answer(url, listed)?.tokens;
            Ok(match json {
                true => list::json(&tokens),
                false => list::table(&tokens),
            })
        }
    }
}

async fn revoke(
    admin: &mut AdminClient<Channel>,
    url: &PoolUrl,
    request: RevokeTokenRequest,
) -> Result<Revoked, AdminError> {
    answer(url, admin.revoke_token(with_token(request, url)?).await)
}

fn with_token<T>(message: T, url: &PoolUrl) -> Result<Request<T>, AdminError> {
    let mut request = Request::new(message);
    let token = url.token.as_ref().map_or("", Secret::reveal);
    let mut value: MetadataValue<_> = format!("Bearer {token}").parse()?;
    value.set_sensitive(true);
    request.metadata_mut().insert("authorization", value);
    Ok(request)
}

fn answer<T>(url: &PoolUrl, answer: Result<Response<T>, Status>) -> Result<T, AdminError> {
    answer.map(Response::into_inner).map_err(|status| {
        let reason = match refusal::error(&status) {
            Some(error) => error.message,
            None => format!("{} ({})", status.message(), status.code()),
        };
        let address = url.authority();
        AdminError::Refused { address, reason }
    })
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A token that was made: a comment and a line, both of which a shell takes.
fn made_text(url: &PoolUrl, made: MadeToken) -> String {
    let url = PoolUrl {
        token: Some(Secret::new(made.token)),
        ..url.clone()
    };
    let TokenInfo {
        name,
        role,
        tenant,
        created_ms,
        expires_ms,
        uses,
        rotates_ms,
        ..
    } = made.info.unwrap_or_default();
    let mut about = vec![format!("{role} token {name} of tenant {tenant}")];
    if let Some(expires_ms) = expires_ms {
        let left = expires_ms.saturating_sub(created_ms);
        about.push(format!("for {}", human::duration(left)));
    }
    if let Some(uses) = uses {
        about.push(human::plural(uses as usize, "enrolment"));
    }
    if rotates_ms.is_some() {
        about.push("its predecessor stays good for a while".into());
    }
    format!(
        "# {}; it is not shown again\nexport TENSORD_URL='{}'\n",
        about.join(", "),
        url.reveal()
    )
}

fn revoked_text(asked: &RevokeTokenRequest, revoked: Revoked) -> String {
    let name = &asked.name;
    if asked.keep_leases {
        return format!("{name} is revoked; what it opened goes on until it ends by itself\n");
    }
    let clients = human::plural(revoked.clients as usize, "client");
    let workers = human::plural(revoked.workers as usize, "worker");
    format!("{name} is revoked; {clients} and {workers} were cut off\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_made_can_be_pasted_and_says_for_how_long() {
        let url: PoolUrl = "tensord://admin@h:1".parse().unwrap();
        let info = TokenInfo {
            name: "ci".into(),
            role: "worker".into(),
            tenant: "red".into(),
            created_ms: 1,
            expires_ms: Some(86_400_001),
            uses: Some(5),
            ..TokenInfo::default()
        };
        let made = MadeToken {
            info: Some(info),
            token: "fresh".into(),
        };
        assert_eq!(
            made_text(&url, made),
            "# worker token ci of tenant red, for 1 d 0 h, 5 enrolments; it is not shown again\n\
             export TENSORD_URL='tensord://fresh@h:1'\n"
        );
    }

    #[test]
    fn a_revocation_says_what_it_ended() {
        let asked = |keep_leases| RevokeTokenRequest {
            name: "ci".into(),
            keep_leases,
        };
        let revoked = Revoked {
            clients: 1,
            workers: 0,
        };
        assert_eq!(
            revoked_text(&asked(false), revoked),
            "ci is revoked; 1 client and 0 workers were cut off\n"
        );
        let kept = revoked_text(&asked(true), Revoked::default());
        assert!(kept.contains("goes on"), "{kept}");
    }
}
