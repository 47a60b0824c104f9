use super::*;

const NOW: UnixMillis = UnixMillis(1_000_000);

fn hash(token: &str) -> blake3::Hash {
    blake3::hash(token.as_bytes())
}

fn new(name: &str, role: Role) -> NewToken {
    NewToken {
        name: name.into(),
        role,
        tenant: DEFAULT_TENANT.into(),
        user: String::new(),
        note: String::new(),
        life: None,
        uses: None,
    }
}

fn with(name: &str, role: Role, token: &str) -> Tokens {
    let mut tokens = Tokens::default();
    tokens.create(new(name, role), hash(token), NOW).unwrap();
    tokens
}

fn state_at(tokens: &Tokens, token: &str, at: u64) -> Option<TokenState> {
    let found = tokens.find(hash(token), UnixMillis(at));
    found.map(|(_, state_at)| state_at)
}

#[test]
fn token_is_found_only_by_its_whole_string() {
    let tokens = with("a", Role::Client, "token-of-a");
    assert_eq!(state_at(&tokens, "token-of-a", 0), Some(TokenState::Valid));
    for other in ["", "token-of-", "token-of-a ", "token-of-b"] {
        assert_eq!(state_at(&tokens, other, 0), None, "{other:?}");
    }
}

#[test]
fn string_shared_by_two_tokens_is_invalid() {
    let mut tokens = with("a", Role::Client, "same");
    tokens
        .create(new("b", Role::Worker), hash("same"), NOW)
        .unwrap();
    assert_eq!(state_at(&tokens, "same", 0), None);
}

#[test]
fn token_expires_to_the_millisecond() {
    let mut tokens = Tokens::default();
    let short = NewToken {
        life: Some(Duration::from_secs(1)),
        ..new("short", Role::Client)
    };
    tokens.create(short, hash("s"), NOW).unwrap();
    assert_eq!(state_at(&tokens, "s", 1_000_999), Some(TokenState::Valid));
    assert_eq!(
        state_at(&tokens, "s", 1_001_000),
        Some(TokenState::Closing(InvalidReason::Expired))
    );
}

#[test]
fn old_and_new_string_are_valid_during_rotation() {
    let mut tokens = with("a", Role::Client, "1");
    let grace = Duration::from_secs(10);
    tokens.rotate("a", hash("2"), grace, NOW).unwrap();
    let all = |tokens: &Tokens, at| ["1", "2", "3"].map(|token| state_at(tokens, token, at));
    let (good, gone) = (
        Some(TokenState::Valid),
        Some(TokenState::Closing(InvalidReason::Rotated)),
    );
    assert_eq!(all(&tokens, 1_009_999), [good, good, None]);
    assert_eq!(all(&tokens, 1_010_000), [gone, good, None]);
    // Rotates again within the grace period of the first rotation.
    tokens
        .rotate("a", hash("3"), grace, UnixMillis(1_005_000))
        .unwrap();
    assert_eq!(all(&tokens, 1_005_000), [gone, good, good]);
    assert_eq!(all(&tokens, 1_015_000), [gone, gone, good]);
    for n in 4..40 {
        let hash = hash(&n.to_string());
        tokens.rotate("a", hash, grace, NOW).unwrap();
    }
    assert_eq!(tokens.get("a").unwrap().secrets.len(), MAX_SECRETS);
}

#[test]
fn revoked_names_and_strings_stay_revoked() {
    let mut tokens = with("a", Role::Client, "1");
    tokens.revoke("a", true, NOW).unwrap();
    assert_eq!(
        state_at(&tokens, "1", 0),
        Some(TokenState::Closing(InvalidReason::Revoked))
    );
    tokens.revoke("a", false, NOW).unwrap();
    tokens.revoke("a", true, NOW).unwrap();
    let ended = Some(TokenState::Ended(InvalidReason::Revoked));
    assert_eq!(state_at(&tokens, "1", 0), ended);
    let changed = tokens.adopt(new("a", Role::Client), hash("2"), NOW);
    assert_eq!(
        changed,
        Ok(false),
        "a file does not restore a revoked token"
    );
    assert_eq!(state_at(&tokens, "2", 0), None);
    let taken = tokens.create(new("a", Role::Client), hash("3"), NOW);
    assert_eq!(taken.unwrap_err(), TokenError::Taken("a".into()));
    let ended = tokens.rotate("a", hash("3"), Duration::ZERO, NOW);
    assert!(matches!(ended, Err(TokenError::Ended { .. })));
    let unknown = tokens.revoke("b", false, NOW).unwrap_err();
    assert_eq!(unknown, TokenError::Unknown("b".into()));
}

#[test]
fn token_changed_in_the_file_replaces_the_old_one() {
    let mut tokens = with("a", Role::Client, "1");
    assert_eq!(
        tokens.adopt(new("a", Role::Client), hash("1"), NOW),
        Ok(false)
    );
    assert_eq!(
        tokens.adopt(new("a", Role::Client), hash("2"), NOW),
        Ok(true)
    );
    assert_eq!(state_at(&tokens, "1", 0), None);
    assert_eq!(state_at(&tokens, "2", 0), Some(TokenState::Valid));
}

#[test]
fn a_note_and_a_user_can_be_printed() {
    let mut tokens = Tokens::default();
    let mut create = |user: &str, note: &str| {
        let new = NewToken {
            user: user.into(),
            note: note.into(),
            ..new("", Role::Client)
        };
        tokens.create(new, hash(note), NOW).map(drop)
    };
    create("ada", "rack 4, until summer – größer").unwrap();
    let long = "x".repeat(201);
    for note in ["two\nlines", "\u{202e}backwards", "\x1b[31mred", &long] {
        let chars = note.chars().count();
        assert_eq!(create("ada", note), Err(TokenError::Note { chars }));
    }
    assert!(matches!(
        create("ada@example.org", ""),
        Err(TokenError::Text { .. })
    ));
}

#[test]
fn uses_are_counted_for_worker_tokens_only() {
    let mut tokens = Tokens::default();
    let twice = |name: &str, role| NewToken {
        uses: Some(2),
        ..new(name, role)
    };
    let refused = tokens.create(twice("p", Role::Client), hash("p"), NOW);
    assert_eq!(refused.unwrap_err(), TokenError::Uses(Role::Client));
    tokens
        .create(twice("w", Role::Worker), hash("w"), NOW)
        .unwrap();
    tokens.count_use("w", NOW).unwrap();
    tokens.count_use("w", NOW).unwrap();
    let used_up = tokens.count_use("w", NOW).unwrap_err().to_string();
    assert!(
        used_up.contains("has reached its limit of uses"),
        "{used_up}"
    );
    assert_eq!(
        state_at(&tokens, "w", 0),
        Some(TokenState::Closing(InvalidReason::UsedUp))
    );
}

#[test]
fn last_admin_token_cannot_be_revoked() {
    let mut tokens = with("admin", Role::Admin, "1");
    let last = tokens.revoke("admin", false, NOW).unwrap_err();
    assert_eq!(last, TokenError::LastAdmin("admin".into()));
    tokens
        .create(new("other", Role::Admin), hash("2"), NOW)
        .unwrap();
    tokens.revoke("admin", false, NOW).unwrap();
    assert!(tokens.revoke("other", false, NOW).is_err());
}

#[test]
fn token_count_and_names_are_limited() {
    let mut tokens = Tokens::default();
    for n in 0..MAX_TOKENS {
        let name = n.to_string();
        tokens
            .create(new(&name, Role::Client), hash(&name), NOW)
            .unwrap();
    }
    let one_more = |tokens: &mut Tokens| {
        let added = tokens.create(new("more", Role::Client), hash("more"), NOW);
        added.map(|_| ()).map_err(|e| e.to_string())
    };
    assert!(one_more(&mut tokens).unwrap_err().contains("revoke some"));
    tokens.revoke("7", false, NOW).unwrap();
    one_more(&mut tokens).unwrap();
    assert_eq!(
        state_at(&tokens, "7", 0),
        None,
        "the oldest revoked token is removed"
    );
    for name in ["a b", "a\n", &"x".repeat(65)] {
        let mut empty = Tokens::default();
        let refused = empty.create(new(name, Role::Client), hash("1"), NOW);
        assert!(matches!(refused, Err(TokenError::Text { .. })), "{name:?}");
    }
}

#[test]
fn a_token_without_a_name_gets_one() {
    let mut tokens = Tokens::default();
    let mut add = |n: u32| {
        let added = tokens.create(new("", Role::Worker), hash(&n.to_string()), NOW);
        added.unwrap().name.clone()
    };
    assert_eq!([add(1), add(2)], ["worker-1", "worker-2"]);
}

#[test]
fn token_registry_survives_serialization() {
    let mut tokens = with("a", Role::Client, "1");
    tokens
        .rotate("a", hash("2"), Duration::from_secs(1), NOW)
        .unwrap();
    let text = serde_json::to_string(&tokens).unwrap();
    assert!(
        text.contains("\"program\"") && !text.contains("\"1\""),
        "{text}"
    );
    let read: Tokens = serde_json::from_str(&text).unwrap();
    assert_eq!(serde_json::to_string(&read).unwrap(), text);
    assert_eq!(state_at(&read, "2", 0), Some(TokenState::Valid));
}

#[test]
fn revoked_token_of_the_first_start_stays_when_the_registry_is_full() {
    let mut tokens = with("program", Role::Client, "first");
    tokens.revoke("program", false, NOW).unwrap();
    for n in 1..MAX_TOKENS {
        let name = format!("t{n}");
        tokens
            .create(new(&name, Role::Client), hash(&name), NOW)
            .unwrap();
    }
    let one_more = |tokens: &mut Tokens| {
        let created = tokens.create(new("more", Role::Client), hash("more"), NOW);
        created.map(|_| ())
    };
    assert_eq!(one_more(&mut tokens), Err(TokenError::Full));
    tokens.revoke("t7", false, UnixMillis(NOW.0 + 1)).unwrap();
    assert_eq!(one_more(&mut tokens), Ok(()));
    // As at the next start, which finds the string in its file.
    let adopted = tokens.adopt(new("program", Role::Client), hash("first"), NOW);
    assert_eq!(adopted, Ok(false));
    let ended = Some(TokenState::Ended(InvalidReason::Revoked));
    assert_eq!(state_at(&tokens, "first", 0), ended);
}
