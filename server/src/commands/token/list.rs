//! A pool's tokens, as a table for people and as JSON for programs.

use std::time::{Duration, SystemTime};

use serde::Serialize;
use tensord_proto::v1::TokenInfo;

use crate::{human, stdout, table};

const HEADER: [&str; 9] = [
    "NAME", "ROLE", "TENANT", "USER", "STANDING", "MADE", "ENDS", "USES", "NOTE",
];

/// Columns of numbers, which are aligned right.
const RIGHT: [usize; 1] = [7];

/// The JSON for a token. Programs depend on the field names.
#[derive(Serialize)]
pub(super) struct Token<'a> {
    name: &'a str,
    role: &'a str,
    tenant: &'a str,
    user: &'a str,
    note: &'a str,
    standing: &'a str,
    created_ms: u64,
    expires_ms: Option<u64>,
    rotates_ms: Option<u64>,
    revoked_ms: Option<u64>,
    uses: Option<u64>,
    used: u64,
}

/// Formats `tokens` as JSON, with a newline at the end.
pub(super) fn json(tokens: &[TokenInfo]) -> String {
    let tokens: Vec<_> = tokens.iter().map(token).collect();
    stdout::json(&serde_json::json!({ "tokens": tokens }))
}

pub(super) fn token(token: &TokenInfo) -> Token<'_> {
    Token {
        name: &token.name,
        role: &token.role,
        tenant: &token.tenant,
        user: &token.user,
        note: &token.note,
        standing: &token.standing,
        created_ms: token.created_ms,
        expires_ms: token.expires_ms,
        rotates_ms: token.rotates_ms,
        revoked_ms: token.revoked_ms,
        uses: token.uses,
        used: token.used,
    }
}

/// Formats `tokens` as a table, with a newline at the end.
pub(super) fn table(tokens: &[TokenInfo]) -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    table_at(tokens, now.unwrap_or_default())
}

fn table_at(tokens: &[TokenInfo], now: Duration) -> String {
    let now_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    table::text(
        HEADER,
        &RIGHT,
        tokens.iter().map(|token| row(token, now_ms)),
    )
}

fn row(token: &TokenInfo, now_ms: u64) -> [String; 9] {
    let ends_ms = token.revoked_ms.or(token.expires_ms);
    let uses = match token.uses {
        Some(uses) => format!("{} of {}", human::count(token.used), human::count(uses)),
        None => "-".into(),
    };
    let standing = match token.rotates_ms {
        Some(until) => format!(
            "rotating for {}",
            human::duration(until.saturating_sub(now_ms))
        ),
        None => token.standing.clone(),
    };
    [
        token.name.clone(),
        token.role.clone(),
        token.tenant.clone(),
        token.user.clone(),
        standing,
        human::relative(token.created_ms, now_ms),
        ends_ms.map_or("-".into(), |at| human::relative(at, now_ms)),
        uses,
        token.note.clone(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_listed_in_columns() {
        let token = |name: &str, role: &str, standing: &str| TokenInfo {
            name: name.into(),
            role: role.into(),
            tenant: "default".into(),
            standing: standing.into(),
            created_ms: 40_000,
            ..TokenInfo::default()
        };
        let tokens = [
            TokenInfo {
                uses: Some(1000),
                used: 3,
                note: "rack 4".into(),
                ..token("worker", "worker", "good")
            },
            TokenInfo {
                expires_ms: Some(100_000 + 86_400_000),
                rotates_ms: Some(160_000),
                user: "ada".into(),
                ..token("ci", "program", "rotating")
            },
            TokenInfo {
                revoked_ms: Some(90_000),
                ..token("old", "program", "revoked")
            },
        ];
        let expected = "\
NAME    ROLE     TENANT   USER  STANDING                MADE           ENDS             USES  NOTE
worker  worker   default        good                    1 min 0 s ago  -          3 of 1,000  rack 4
ci      program  default  ada   rotating for 1 min 0 s  1 min 0 s ago  in 1 d 0 h          -
old     program  default        revoked                 1 min 0 s ago  10 s ago            -
";
        let trimmed = |text: &str| -> Vec<Vec<String>> {
            let words = |line: &str| line.split_whitespace().map(str::to_owned).collect();
            text.lines().map(words).collect()
        };
        let listed = table_at(&tokens, Duration::from_secs(100));
        assert_eq!(trimmed(&listed), trimmed(expected));
        let parsed: serde_json::Value = serde_json::from_str(&json(&tokens)).unwrap();
        assert_eq!(parsed["tokens"][0]["uses"], 1000);
        assert_eq!(parsed["tokens"][1]["standing"], "rotating");
        assert_eq!(parsed["tokens"][2]["revoked_ms"], 90_000);
    }
}
