//! Tests of the state directory on a real file system.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    time::Duration,
};

use super::*;

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Returns the secrets in a form that can be compared.
fn comparable(secrets: &PoolSecrets) -> (String, Vec<u8>, String, String) {
    (
        secrets.identity.fingerprint().to_string(),
        secrets.signer.public_key(),
        secrets.client_token.reveal().into(),
        secrets.worker_token.reveal().into(),
    )
}

#[test]
fn pool_secrets_survive_restart_and_are_unique() {
    let directory = tempfile::tempdir().unwrap();
    let open = |name: &str| StateDir::open(&directory.path().join(name)).unwrap();
    let first = comparable(&open("a/b").pool_secrets().unwrap());
    let again = comparable(&open("a/b").pool_secrets().unwrap());
    let other = comparable(&open("c").pool_secrets().unwrap());
    assert_eq!(first, again);
    assert_ne!(first.0, other.0);
    assert_ne!(first.1, other.1);
    assert_ne!(first.2, other.2);
    assert_ne!(
        first.2, first.3,
        "programs and workers show different tokens"
    );
}

#[test]
fn created_files_are_private() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("state");
    let state = StateDir::open(&path).unwrap();
    state.pool_secrets().unwrap();
    state.gateway_token().unwrap();
    let _lock = state.lock_scheduler().unwrap();
    assert_eq!(mode(&path), 0o700);
    let mut names = Vec::new();
    for entry in fs::read_dir(&path).unwrap() {
        let entry = entry.unwrap();
        assert_eq!(mode(&entry.path()), 0o600, "{:?}", entry.path());
        names.push(entry.file_name().into_string().unwrap());
    }
    names.sort();
    let expected = [
        "admin-token",
        "client-token",
        "gateway-token",
        "identity.pem",
        "lease-key.pk8",
        "scheduler.lock",
        "state.lock",
        "worker-token",
    ];
    assert_eq!(names, expected, "no temporary file is left behind");
}

#[test]
fn readable_files_are_made_private() {
    let directory = tempfile::tempdir().unwrap();
    let state = StateDir::open(directory.path()).unwrap();
    let token = state.gateway_token().unwrap();
    let path = directory.path().join("gateway-token");
    set_mode(&path, 0o644);
    assert_eq!(state.gateway_token().unwrap(), token);
    assert_eq!(mode(&path), 0o600);
}

#[test]
fn a_directory_that_others_can_write_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    for refused in [0o777, 0o770, 0o702, 0o720] {
        set_mode(path, refused);
        let error = StateDir::open(path).unwrap_err().to_string();
        let shown = path.display();
        let expected = format!(
            "the state directory {shown} can be written by other users (mode {refused:03o}); use a directory of your own, or remove that permission with `chmod go-w {shown}`"
        );
        assert_eq!(error, expected);
        assert_eq!(fs::read_dir(path).unwrap().count(), 0, "nothing is made");
    }
    for accepted in [0o700, 0o750, 0o755] {
        set_mode(path, accepted);
        StateDir::open(path).unwrap();
    }
}

#[test]
fn a_directory_of_another_user_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let user = fs::metadata(path).unwrap().uid();
    // Only root may change a file's owner; the test does nothing for other users.
    if std::os::unix::fs::chown(path, Some(user + 4711), None).is_err() {
        return;
    }
    let error = StateDir::open(path).unwrap_err();
    let StateError::Foreign {
        owner, user: own, ..
    } = error
    else {
        panic!("{error}");
    };
    assert_eq!((owner, own), (user + 4711, user));
    assert_eq!(fs::read_dir(path).unwrap().count(), 0, "no probe is left");
}

#[test]
fn one_scheduler_at_a_time() {
    let directory = tempfile::tempdir().unwrap();
    let state = || StateDir::open(directory.path()).unwrap();
    let lock = state().lock_scheduler().unwrap();
    let error = state().lock_scheduler().unwrap_err();
    assert!(matches!(error, StateError::Locked { .. }), "{error}");
    drop(lock);
    state().lock_scheduler().unwrap();
}

#[test]
fn damaged_file_is_named_and_not_overwritten() {
    for name in [
        "identity.pem",
        "lease-key.pk8",
        "client-token",
        "worker-token",
        "admin-token",
    ] {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDir::open(directory.path()).unwrap();
        state.pool_secrets().unwrap();
        let path = directory.path().join(name);
        fs::write(&path, "x").unwrap();
        let Err(error) = state.pool_secrets() else {
            panic!("a damaged {name} was accepted");
        };
        assert!(
            error.to_string().contains(&format!("{name} is damaged (")),
            "{error}"
        );
        assert_eq!(fs::read(&path).unwrap(), b"x");
    }
}

#[test]
fn term_rises_at_each_start() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("grant-term");
    let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    let raise = |seconds| {
        let state = StateDir::open(directory.path()).unwrap();
        state.raise_grant_term(at(seconds)).unwrap()
    };
    assert_eq!(raise(1_000), 1_000);
    assert_eq!(raise(1_000), 1_001, "twice within a second");
    assert_eq!(raise(10), 1_002, "after the clock went back");
    assert_eq!(raise(2_000), 2_000);
    assert_eq!(mode(&path), 0o600);
    fs::remove_file(&path).unwrap();
    assert_eq!(raise(2_100), 2_100, "after the file was lost");
    for wrong in ["", "x", "-1", "18446744073709551615"] {
        fs::write(&path, wrong).unwrap();
        let state = StateDir::open(directory.path()).unwrap();
        let error = state.raise_grant_term(at(1)).unwrap_err().to_string();
        assert!(error.contains("grant-term is damaged ("), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), wrong);
    }
}

#[test]
fn operators_own_token_is_used() {
    let directory = tempfile::tempdir().unwrap();
    let state = StateDir::open(directory.path()).unwrap();
    fs::write(
        directory.path().join("client-token"),
        "chosen-by_the.operator~1\n",
    )
    .unwrap();
    let secrets = state.pool_secrets().unwrap();
    assert_eq!(secrets.client_token.reveal(), "chosen-by_the.operator~1");
}

#[test]
fn tokens_are_long_and_safe_in_a_url() {
    assert!(is_token(&new_token().unwrap()));
    for wrong in ["", "short", "0123456789abcde@", "0123456789abcdé0"] {
        assert!(!is_token(wrong), "{wrong}");
    }
    assert!(!is_token(&"x".repeat(129)));
}

#[test]
fn change_is_persisted_or_rolled_back() {
    let directory = tempfile::tempdir().unwrap();
    let state = StateDir::open(directory.path()).unwrap();
    let open = || state.persisted::<Vec<u32>>("numbers.json").unwrap();
    let persisted = open();
    assert!(persisted.read().is_empty());
    assert!(!directory.path().join("numbers.json").exists());
    let length = persisted.change(|numbers| {
        numbers.push(7);
        Ok::<_, StateError>(numbers.len())
    });
    assert_eq!(length.unwrap(), 1);
    assert_eq!((*open().read()).clone(), [7]);
    assert_eq!(mode(&directory.path().join("numbers.json")), 0o600);
    let refused = persisted.change(|numbers| {
        numbers.push(8);
        Err::<(), _>(StateError::Key("no".into()))
    });
    assert!(refused.is_err());
    assert_eq!((*persisted.read()).clone(), [7]);
    fs::write(directory.path().join("numbers.json"), "[7").unwrap();
    let damaged = state.persisted::<Vec<u32>>("numbers.json").unwrap_err();
    assert!(damaged.to_string().contains("is damaged"), "{damaged}");
}

#[test]
fn administrators_of_this_host_need_no_url() {
    let directory = tempfile::tempdir().unwrap();
    let state = StateDir::open(directory.path()).unwrap();
    let token = state.pool_secrets().unwrap().admin_token;
    let admin_url = || StateDir::admin_url(directory.path()).unwrap();
    assert_eq!(admin_url(), None, "no scheduler has run yet");
    let url: PoolUrl = "tensord://program@h:1".parse().unwrap();
    state.set_pool_url(&url).unwrap();
    let expected = PoolUrl {
        token: Some(token),
        ..url
    };
    assert_eq!(admin_url(), Some(expected));
    let kept = fs::read_to_string(directory.path().join("pool-url")).unwrap();
    assert!(!kept.contains("program"), "{kept}");
}

#[test]
fn a_worker_keeps_its_key_under_its_name() {
    let directory = tempfile::tempdir().unwrap();
    let own = |name: &str| {
        let state = StateDir::open(directory.path()).unwrap();
        state.worker_identity(name).unwrap().fingerprint()
    };
    let long = "n".repeat(253);
    let names = ["gpu-1", "gpu-2", ".", "..", long.as_str()];
    let first: Vec<_> = names.iter().map(|name| own(name)).collect();
    let again: Vec<_> = names.iter().map(|name| own(name)).collect();
    assert_eq!(first, again);
    for (at, one) in first.iter().enumerate() {
        assert!(!first[..at].contains(one), "{} is another's", names[at]);
    }
    let key = directory.path().join("worker-gpu-1.pem");
    assert_eq!(mode(&key), 0o600);
    std::fs::write(&key, "-----BEGIN").unwrap();
    let state = StateDir::open(directory.path()).unwrap();
    let damaged = state.worker_identity("gpu-1").unwrap_err();
    assert!(matches!(damaged, StateError::Damaged { .. }), "{damaged}");
}
