//! Tests that layers of settings become a configuration or an error of one line.

use std::fs;

use tensord_transport::Secret;

use super::*;
use crate::{
    cli::{self, Parsed},
    config::{AdminUrl, TokenAction, TokenConfig},
};

const URL: &str = "tensord://0123456789abcdef@h:1";

/// Resolves a command line and a configuration file, in an environment with a home
/// directory, a host name and a pool URL.
fn resolved(line: &str, file: &str) -> Result<Config, ConfigError> {
    let environment = Environment {
        url: Some(Secret::new(URL)),
        home: Some("/home/ada".into()),
        host_name: Some("gpu-1".into()),
        ..Environment::default()
    };
    resolved_in(&environment, line, file)
}

fn resolved_in(environment: &Environment, line: &str, file: &str) -> Result<Config, ConfigError> {
    let args = line.split_whitespace().map(Into::into);
    let Parsed::Run(cli) = cli::parse(args)? else {
        panic!("{line:?} returned a text, not a command");
    };
    let file = toml::from_str(file).expect("the test's file is right");
    resolve(*cli, file, environment)
}

fn up(line: &str, file: &str) -> UpConfig {
    match resolved(line, file) {
        Ok(Config::Up(config)) => config,
        other => panic!("{line:?} came to {other:?}"),
    }
}

#[test]
fn unset_settings_have_defaults() {
    let config = up("tensord up", "");
    assert_eq!(config.scheduler.listen, "127.0.0.1:7461".parse().unwrap());
    assert_eq!(config.scheduler.advertise, None);
    assert_eq!(
        config.scheduler.state.path,
        Path::new("/home/ada/.local/state/tensord")
    );
    assert_eq!(
        config.scheduler.state.display_path,
        "~/.local/state/tensord"
    );
    assert_eq!(config.node.name, "gpu-1");
    assert_eq!(config.node.listen, "127.0.0.1:0".parse().unwrap());
    assert_eq!(config.node.devices.len(), 1);
    assert_eq!(config.node.memory_bytes, None);
    assert_eq!(config.drain, Duration::from_secs(10));
    let audit = &config.scheduler.audit;
    assert_eq!(audit.directory, config.scheduler.state.path);
    assert_eq!((audit.file_bytes, audit.files), (16 << 20, 4));
    let life = config.scheduler.lease_token_life;
    assert_eq!(life, Duration::from_secs(600));
    assert_eq!(config.scheduler.half_life, Duration::from_secs(86_400));
    assert_eq!(config.scheduler.reserve_after, Duration::from_secs(600));
    assert_eq!(config.scheduler.idle_timeout, Duration::from_secs(600));
}

#[test]
fn flags_override_the_file_which_overrides_defaults() {
    let file = "
        state = \"/s\"
        drain-seconds = 3
        [up]
        listen = \"0.0.0.0:1\"
        advertise = \"pool.example\"
        devices = \"flex*2\"
        audit-log-size = \"1MiB\"
        audit-log-files = 9
        lease-token-seconds = 60
        half-life = \"12h\"
        reserve-after = \"1h\"
        idle-timeout = \"5m\"
        [scheduler]
        listen = \"0.0.0.0:9\"
    ";
    let config = up("tensord up", file);
    assert_eq!(config.scheduler.listen, "0.0.0.0:1".parse().unwrap());
    assert_eq!(config.scheduler.state.display_path, "/s");
    assert_eq!(config.node.listen, "0.0.0.0:0".parse().unwrap());
    assert_eq!(config.node.advertise.as_deref(), Some("pool.example"));
    assert_eq!(config.node.devices.len(), 2);
    assert_eq!(config.drain, Duration::from_secs(3));

    let audit = &config.scheduler.audit;
    assert_eq!((audit.file_bytes, audit.files), (1 << 20, 9));
    let life = config.scheduler.lease_token_life;
    assert_eq!(life, Duration::from_secs(60));
    assert_eq!(config.scheduler.half_life, Duration::from_secs(12 * 3600));
    assert_eq!(config.scheduler.reserve_after, Duration::from_secs(3600));
    assert_eq!(config.scheduler.idle_timeout, Duration::from_secs(300));

    let line = "tensord up --audit-log-size 0 --lease-token-seconds 5 --half-life 0s --reserve-after 0s --idle-timeout 0s --listen 0.0.0.0:2 --devices flex*3 --state /t --drain-seconds 4";
    let config = up(line, file);
    assert_eq!(config.scheduler.listen, "0.0.0.0:2".parse().unwrap());
    assert_eq!(config.scheduler.advertise.as_deref(), Some("pool.example"));
    assert_eq!(config.scheduler.state.display_path, "/t");
    let audit = &config.scheduler.audit;
    assert_eq!((audit.file_bytes, audit.files), (0, 9));
    let life = config.scheduler.lease_token_life;
    assert_eq!(life, Duration::from_secs(5));
    assert_eq!(config.scheduler.half_life, Duration::ZERO);
    assert_eq!(config.scheduler.reserve_after, Duration::ZERO);
    assert_eq!(config.scheduler.idle_timeout, Duration::ZERO);
    assert_eq!(config.node.devices.len(), 3);
    assert_eq!(config.drain, Duration::from_secs(4));
}

#[test]
fn the_url_comes_from_a_named_file_then_the_environment_then_the_configured_file() {
    let directory = tempfile::tempdir().unwrap();
    let [named, configured] = ["named", "configured"].map(|host| {
        let path = directory.path().join(host);
        fs::write(&path, format!("tensord://0123456789abcdef@{host}:1\n")).unwrap();
        path
    });
    let file = format!("url-file = {configured:?}");
    let status = format!("tensord status --url-file {}", named.display());
    let host = |environment: &Environment, line: &str| match resolved_in(environment, line, &file) {
        Ok(Config::Status(config)) => config.url.host,
        other => panic!("{line:?} came to {other:?}"),
    };
    let nothing = Environment::default();
    let url = Environment {
        url: Some(Secret::new(URL)),
        ..Environment::default()
    };
    assert_eq!(host(&url, &status), "named");
    assert_eq!(host(&url, "tensord status"), "h");
    assert_eq!(host(&nothing, "tensord status"), "configured");
}

#[test]
fn invalid_setting_error_is_one_line_that_names_it() {
    let anywhere = "tensord gateway --listen 0.0.0.0:1";
    let cases = [
        (
            anywhere,
            "--listen: other hosts can reach 0.0.0.0:1, and stock Burn programs connect over ws://, which is not encrypted; listen on 127.0.0.1, or accept plaintext with --allow-plaintext",
        ),
        (
            "tensord gateway --devices 0",
            "--devices: a lease needs at least 1 device",
        ),
        (
            "tensord gateway --share 0.25 --devices 2",
            "--share: 0.25 with --devices 2; a share is a part of one device, so leave --devices out, or --share",
        ),
        (
            "tensord status --url-file /nowhere",
            "--url-file: cannot read /nowhere: No such file or directory (os error 2)",
        ),
    ];
    for (line, expected) in cases {
        assert_eq!(resolved(line, "").unwrap_err().to_string(), expected);
    }
    assert!(resolved(&format!("{anywhere} --allow-plaintext"), "").is_ok());
}

#[cfg(feature = "demo")]
#[test]
fn chaos_needs_a_pool_of_its_own() {
    let cases = [
        (
            format!("tensord demo --chaos --url {URL}"),
            "--chaos kills workers, so it needs a pool of its own; leave out --url",
        ),
        (
            "tensord demo --chaos --kind auto".into(),
            "--kind auto: the demo needs a kind, such as flex or cuda",
        ),
    ];
    for (line, expected) in cases {
        let error = resolved(&line, "").unwrap_err().to_string();
        assert_eq!(error, expected);
    }
    assert!(resolved("tensord demo --chaos --kind flex --devices 2", "").is_ok());
}

#[test]
fn unusable_environment_error_is_one_line() {
    let error = |environment: Environment, line: &str| {
        resolved_in(&environment, line, "").unwrap_err().to_string()
    };
    let url = |text: &str| Environment {
        url: Some(Secret::new(text)),
        ..Environment::default()
    };
    assert_eq!(error(Environment::default(), "tensord status"), NO_URL);
    assert_eq!(error(Environment::default(), "tensord scheduler"), NO_STATE);
    assert_eq!(error(url(URL), "tensord worker"), NO_NAME);
    assert_eq!(
        error(url("tensord://h:1"), "tensord status"),
        "TENSORD_URL: the URL has no token; copy the whole line that `tensord up` or `tensord scheduler` prints"
    );
    let malformed = error(url("tensord://secret@h"), "tensord status");
    assert!(
        malformed.starts_with("TENSORD_URL: pool URL: the port is missing;"),
        "{malformed}"
    );
    assert!(!malformed.contains("secret"), "{malformed}");
    let short = Environment {
        gateway_token: Some(Secret::new("short")),
        ..url(URL)
    };
    let refused = error(short, "tensord gateway");
    assert!(refused.starts_with("TENSORD_GATEWAY_TOKEN: "), "{refused}");
}

#[test]
fn admin_url_defaults_to_this_hosts_scheduler() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("url");
    fs::write(&path, "tensord://0123456789abcdef@configured:1\n").unwrap();
    let with_url_file = format!("url-file = {path:?}");
    let admin_in = |line: &str, url: Option<&str>, file: &str| {
        let environment = Environment {
            url: url.map(Secret::new),
            home: Some("/home/ada".into()),
            ..Environment::default()
        };
        match resolved_in(&environment, line, file) {
            Ok(Config::Token(config)) => match config.admin {
                AdminUrl::Given(url) => url.reveal(),
                AdminUrl::FromState(state) => state.display_path,
            },
            other => panic!("{line:?} came to {other:?}"),
        }
    };
    let admin = |line: &str, url| admin_in(line, url, "");
    let other = "tensord://fedcba9876543210@h:2";
    let list = |more: &str| format!("tensord token list {more}");
    assert_eq!(admin(&list(""), None), "~/.local/state/tensord");
    assert_eq!(admin(&list(""), Some(URL)), URL);
    assert_eq!(admin(&list("--state /s"), Some(URL)), "/s");
    assert_eq!(admin_in(&list("--state /s"), None, &with_url_file), "/s");
    let configured = admin_in(&list(""), None, &with_url_file);
    assert!(configured.ends_with("@configured:1"), "{configured}");
    assert_eq!(admin(&list(&format!("--url {other}")), Some(URL)), other);
    let error = resolved("tensord token list --url tensord://h:1", "").unwrap_err();
    assert!(error.to_string().starts_with("--url: the URL has no token"));
}

#[test]
fn token_lifetime_is_optional() {
    let create = |more: &str| match resolved(&format!("tensord token create {more}"), "") {
        Ok(Config::Token(TokenConfig {
            action:
                TokenAction::Create {
                    name,
                    role,
                    tenant,
                    life,
                    uses,
                    ..
                },
            ..
        })) => Ok((name, role, tenant, life, uses)),
        Ok(other) => panic!("{other:?}"),
        Err(error) => Err(error.to_string()),
    };
    let plain = (None, "program".into(), "default".into(), None, None);
    assert_eq!(create(""), Ok(plain));
    let day = Some(Duration::from_secs(86_400));
    let tight = (
        Some("x".into()),
        "worker".into(),
        "red".into(),
        day,
        Some(5),
    );
    let line = "--role worker --name x --tenant red --expires 1d --uses 5";
    assert_eq!(create(line), Ok(tight));
    for wrong in [
        "--expires 1w",
        "--expires d",
        "--expires 99999999999d",
        "--role root",
    ] {
        let error = create(wrong).unwrap_err();
        assert!(error.starts_with("invalid value"), "{error}");
    }
    let rotate = resolved("tensord token rotate ci", "").unwrap();
    let Config::Token(TokenConfig {
        action: TokenAction::Rotate { name, grace },
        ..
    }) = rotate
    else {
        panic!("{rotate:?}");
    };
    assert_eq!((name.as_str(), grace), ("ci", Duration::from_secs(3600)));
}
