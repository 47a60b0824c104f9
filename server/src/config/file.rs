//! The configuration file: TOML, with shared settings at the top and a table
//! for each command.
//!
//! ```toml
//! log = "info"
//! url-file = "/etc/tensord/url"
//! drain-seconds = 30
//!
//! [worker]
//! devices = "flex*2"
//! ```

use std::{fs, path::Path, path::PathBuf};

use serde::{Deserialize, de::DeserializeOwned};

use super::{
    ConfigError,
    settings::{GatewaySettings, SchedulerSettings, UpSettings, WorkerSettings},
    values::Filter,
};

/// The settings of a configuration file.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct File {
    pub(super) log: Option<Filter>,
    pub(super) state: Option<PathBuf>,
    pub(super) url_file: Option<PathBuf>,
    pub(super) drain_seconds: Option<u64>,
    pub(super) up: UpSettings,
    pub(super) scheduler: SchedulerSettings,
    pub(super) worker: WorkerSettings,
    pub(super) gateway: GatewaySettings,
}

impl File {
    /// Reads the file at `path`; returns no settings without a path.
    pub(crate) fn read(path: Option<&Path>) -> Result<Self, ConfigError> {
        let Some(path) = path else {
            return Ok(Self::default());
        };
        let text = fs::read_to_string(path).map_err(|source| ConfigError::FileUnreadable {
            path: path.into(),
            source,
        })?;
        parse(path, &text)
    }
}

/// Parses the text of the TOML file at `path`.
///
/// # Errors
///
/// [`ConfigError::File`], with the line and its key.
pub(super) fn parse<T: DeserializeOwned>(path: &Path, text: &str) -> Result<T, ConfigError> {
    toml::from_str(text).map_err(|e| {
        let start = e.span().map_or(0, |span| span.start);
        let (line, problem) = locate(text, start, e.message());
        ConfigError::File {
            path: path.into(),
            line,
            problem,
        }
    })
}

/// Returns the line number of byte `at`, from 1, and the problem with the name of the key
/// on that line.
fn locate(text: &str, at: usize, problem: &str) -> (usize, String) {
    let before = text.get(..at).unwrap_or(text);
    let line = before.matches('\n').count();
    let shown = text.lines().nth(line).unwrap_or_default();
    let problem = problem.replace('\n', ", ");
    match shown.split_once('=') {
        // The parser's message for an unknown key already names it.
        Some((key, _)) if !problem.contains(&format!("`{}`", key.trim())) => {
            (line + 1, format!("{}: {problem}", key.trim()))
        }
        _ => (line + 1, problem),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        parse::<File>(Path::new("t.toml"), text)
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn file_with_every_setting_is_parsed() {
        let text = "
            log = \"debug\"
            state = \"/s\"
            url-file = \"/u\"
            drain-seconds = 3
            [up]
            listen = \"127.0.0.1:1\"
            devices = \"flex*2\"
            [scheduler]
            advertise = \"pool.example\"
            [worker]
            memory = \"16GiB\"
            [gateway]
            devices = 2
            share = 1
            allow-plaintext = true
        ";
        let file: File = parse(Path::new("t.toml"), text).unwrap();
        assert_eq!(file.drain_seconds, Some(3));
        assert_eq!(file.up.devices, Some("flex*2".parse().unwrap()));
        assert_eq!(file.gateway.devices, Some(2));
        assert_eq!(file.gateway.share.map(|share| share.part), Some(1.0));
        assert!(file.gateway.allow_plaintext);
    }

    #[test]
    fn an_error_names_file_line_and_key() {
        let cases = [
            (
                "log = \"info\"\nlisen = \"1\"",
                "t.toml:2: unknown field `lisen`, expected one of `log`, `state`, `url-file`, `drain-seconds`, `up`, `scheduler`, `worker`, `gateway`",
            ),
            (
                "[scheduler]\nlisten = \"everywhere\"",
                "t.toml:2: listen: \"everywhere\" is not IP:PORT, such as 0.0.0.0:7461",
            ),
            (
                "drain-seconds = \"soon\"",
                "t.toml:1: drain-seconds: invalid type: string \"soon\", expected u64",
            ),
            (
                "[demo]\nx = 1",
                "t.toml:1: unknown field `demo`, expected one of `log`, `state`, `url-file`, `drain-seconds`, `up`, `scheduler`, `worker`, `gateway`",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(error(text), expected);
        }
        assert!(error("listen = = 1").starts_with("t.toml:1: listen: "));
    }

    #[test]
    fn a_secret_in_the_file_is_refused_and_not_repeated() {
        let error = error("url = \"tensord://secret@h:1\"");
        assert!(error.contains("unknown field `url`"), "{error}");
        assert!(!error.contains("secret"), "{error}");
    }
}
