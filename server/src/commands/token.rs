//! `tensord token`: makes, lists, rotates and revokes the tokens of a running pool.

use tensord_proto::v1::{
    CreateTokenRequest, ListTokensRequest, MadeToken, RevokeTokenRequest, Revoked,
    RotateTokenRequest, TokenInfo, admin_client::AdminClient,
};
use tensord_transport::{PoolUrl, Secret};
use tonic::transport::Channel;

mod list;

use super::admin::{self, error::AdminError, into_reply, with_token};
use crate::{
    config::{TokenAction, TokenConfig},
    failure::Failure,
    human,
    scheduler::millis,
    stdout,
};

/// Makes one call and prints its result.
pub(super) async fn run(config: TokenConfig) -> Result<(), Failure> {
    let url = admin::url(config.admin)?;
    let text = admin::with_deadline(&url, execute(&url, config.action, config.json)).await?;
    stdout::print(&text)
}

/// Carries out the action, and returns the text to print.
async fn execute(url: &PoolUrl, action: TokenAction, json: bool) -> Result<String, AdminError> {
    let mut admin = admin::connect(url).await?;
    let shown = |made: MadeToken| match json {
        true => created_json(url, made),
        false => created_text(url, made),
    };
    match action {
        TokenAction::Create {
            name,
            role,
            tenant,
            user,
            note,
            life,
            uses,
        } => {
            let request = CreateTokenRequest {
                name: name.unwrap_or_default(),
                role,
                tenant,
                user,
                note,
                life_ms: life.map(millis),
                uses,
            };
            let made = admin.create_token(with_token(request, url)?).await;
            Ok(shown(into_reply(url, made)?))
        }
        TokenAction::Rotate { name, grace } => {
            let grace_ms = millis(grace);
            let request = RotateTokenRequest { name, grace_ms };
            let made = admin.rotate_token(with_token(request, url)?).await;
            Ok(shown(into_reply(url, made)?))
        }
        TokenAction::Revoke { name, keep_leases } => {
            let request = RevokeTokenRequest { name, keep_leases };
            let revoked = revoke(&mut admin, url, request.clone()).await?;
            Ok(match json {
                true => revoked_json(&request, revoked),
                false => revoked_text(&request, revoked),
            })
        }
        TokenAction::List => {
            let listed = admin
                .list_tokens(with_token(ListTokensRequest {}, url)?)
                .await;
            let tokens = into_reply(url, listed)?.tokens;
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
    into_reply(url, admin.revoke_token(with_token(request, url)?).await)
}

/// Returns the pool's URL with a new token.
fn url_with(url: &PoolUrl, token: String) -> PoolUrl {
    PoolUrl {
        token: Some(Secret::new(token)),
        ..url.clone()
    }
}

/// Formats a new token as JSON, with the URL that has it.
fn created_json(url: &PoolUrl, made: MadeToken) -> String {
    let info = made.info.unwrap_or_default();
    let url = url_with(url, made.token);
    stdout::json(&serde_json::json!({ "token": list::token(&info), "url": url.reveal() }))
}

/// Formats a new token as a shell comment and an `export` line.
fn created_text(url: &PoolUrl, made: MadeToken) -> String {
    let url = url_with(url, made.token);
    let TokenInfo {
        name,
        role,
        tenant,
        user,
        created_ms,
        expires_ms,
        uses,
        rotates_ms,
        ..
    } = made.info.unwrap_or_default();
    let mut about = vec![format!("{role} token {name} of tenant {tenant}")];
    if !user.is_empty() {
        about.push(format!("user {user}"));
    }
    if let Some(expires_ms) = expires_ms {
        let left = expires_ms.saturating_sub(created_ms);
        about.push(format!("for {}", human::duration(left)));
    }
    if let Some(uses) = uses {
        about.push(human::plural(uses as usize, "enrolment"));
    }
    if rotates_ms.is_some() {
        about.push("the old token stays valid for the grace period".into());
    }
    format!(
        "# {}; it is not shown again\nexport TENSORD_URL='{}'\n",
        about.join(", "),
        url.reveal()
    )
}

fn revoked_json(request: &RevokeTokenRequest, revoked: Revoked) -> String {
    stdout::json(&serde_json::json!({
        "revoked": request.name,
        "clients_disconnected": revoked.clients,
        "workers_disconnected": revoked.workers,
    }))
}

fn revoked_text(request: &RevokeTokenRequest, revoked: Revoked) -> String {
    let name = &request.name;
    if request.keep_leases {
        return format!(
            "{name} is revoked; the leases and streams opened with it continue until they end by themselves\n"
        );
    }
    let clients = human::plural(revoked.clients as usize, "client");
    let workers = human::plural(revoked.workers as usize, "worker");
    format!("{name} is revoked; {clients} and {workers} were disconnected\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn created_token_is_printed_as_shell_lines_with_lifetime() {
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
            created_text(&url, made),
            "# worker token ci of tenant red, for 1 d 0 h, 5 enrolments; it is not shown again\n\
             export TENSORD_URL='tensord://fresh@h:1'\n"
        );
    }

    #[test]
    fn revocation_reports_what_it_ended() {
        let request = |keep_leases| RevokeTokenRequest {
            name: "ci".into(),
            keep_leases,
        };
        let revoked = Revoked {
            clients: 1,
            workers: 0,
        };
        assert_eq!(
            revoked_text(&request(false), revoked),
            "ci is revoked; 1 client and 0 workers were disconnected\n"
        );
        let kept = revoked_text(&request(true), Revoked::default());
        assert!(kept.contains("continue until"), "{kept}");
    }
}
