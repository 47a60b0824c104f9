//! Pool URLs:
//! `tensord://[TOKEN@]HOST:PORT[?ca=sha256:…|ca-file=…][&transport=auto|tcp|grpc|quic]`.
//!
//! The URL is all that a program must know of a pool. As it may carry a token, it prints
//! without it; only [`PoolUrl::reveal`] returns the full form.

use std::{fmt, path::PathBuf, str::FromStr};

use crate::tls::Trust;

const EXAMPLE: &str = "tensord://TOKEN@gpu-1.example:7461?ca=sha256:<64 hex digits>";

/// A string that must not end up in logs: it prints as `***`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret.
    pub fn new(secret: impl Into<String>) -> Self {
        Self(secret.into())
    }

    /// Returns the secret itself.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// The carriers that op streams may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TransportChoice {
    /// TCP, or else the first that gets through: gRPC, then QUIC.
    #[default]
    Auto,
    /// QUIC only.
    Quic,
    /// gRPC only.
    Grpc,
    /// Frames in TLS over TCP only.
    Tcp,
}

impl fmt::Display for TransportChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Quic => "quic",
            Self::Grpc => "grpc",
            Self::Tcp => "tcp",
        })
    }
}

/// The address of a pool, how to authenticate it, and the token to send to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolUrl {
    /// The token, if the URL has one.
    pub token: Option<Secret>,
    /// Host name or address, without brackets.
    pub host: String,
    /// Port of the scheduler.
    pub port: u16,
    /// What the scheduler's certificate must chain to.
    pub trust: Trust,
    /// The carriers that the op streams may use.
    pub transport: TransportChoice,
}

/// Names the part of a pool URL that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("pool URL: {problem}; a valid URL is {EXAMPLE}")]
pub struct UrlError {
    problem: String,
}

fn wrong<T>(problem: impl Into<String>) -> Result<T, UrlError> {
    let problem = problem.into();
    Err(UrlError { problem })
}

impl FromStr for PoolUrl {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        // Checked first, as the general parser's errors would not name the scheme.
        match text.trim().split_once("://") {
            Some(("tensord", _)) => {}
            Some((scheme, _)) => {
                return wrong(format!("the scheme is {scheme:?}; it must be tensord"));
            }
            None => return wrong("it does not start with tensord://"),
        }
        let url = match ::url::Url::parse(text.trim()) {
            Ok(url) => url,
            Err(e) => return wrong(format!("the host or port is malformed ({e})")),
        };
        let Some(host) = url.host_str().filter(|host| !host.is_empty()) else {
            return wrong("the host is missing");
        };
        let Some(port) = url.port().filter(|&port| port != 0) else {
            return wrong("the port is missing");
        };
        if url.password().is_some() {
            return wrong("the token contains a ':'");
        }
        if !matches!(url.path(), "" | "/") {
            return wrong(format!("a path ({:?}) has no meaning", url.path()));
        }
        if url.fragment().is_some() {
            return wrong("a '#' part has no meaning");
        }
        let (trust, transport) = options(&url)?;
        Ok(Self {
            token: Some(url.username())
                .filter(|t| !t.is_empty())
                .map(Secret::new),
            host: host.trim_matches(['[', ']']).to_owned(),
            port,
            trust,
            transport,
        })
    }
}

fn options(url: &::url::Url) -> Result<(Trust, TransportChoice), UrlError> {
    let mut trust = None;
    let mut transport = None;
    for (key, value) in url.query_pairs() {
        let again = match key.as_ref() {
            "ca" => {
                let pin = value
                    .parse()
                    .or_else(|e: String| wrong(format!("ca: {e}")))?;
                trust.replace(Trust::Pin(pin)).is_some()
            }
            "ca-file" if value.is_empty() => return wrong("ca-file is empty"),
            "ca-file" => trust
                .replace(Trust::CaFile(PathBuf::from(value.as_ref())))
                .is_some(),
            "transport" => {
                let choice = match value.as_ref() {
                    "auto" => TransportChoice::Auto,
                    "quic" => TransportChoice::Quic,
                    "grpc" => TransportChoice::Grpc,
                    "tcp" => TransportChoice::Tcp,
                    other => {
                        return wrong(format!(
                            "transport is {other:?}; it must be auto, quic, grpc or tcp"
                        ));
                    }
                };
                transport.replace(choice).is_some()
            }
            other => {
                return wrong(format!(
                    "unknown option {other:?}; valid options are ca, ca-file and transport"
                ));
            }
        };
        if again {
            return wrong(match key.as_ref() {
                "transport" => "transport is given twice",
                _ => "more than one of ca and ca-file",
            });
        }
    }
    Ok((
        trust.unwrap_or(Trust::System),
        transport.unwrap_or_default(),
    ))
}

impl PoolUrl {
    /// Returns `HOST:PORT`, with brackets around an IPv6 address.
    pub fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// Returns the full URL, including the token. Only for the user's own terminal and
    /// files.
    pub fn reveal(&self) -> String {
        self.format(self.token.as_ref().map(Secret::reveal))
    }

    fn format(&self, token: Option<&str>) -> String {
        let mut text = String::from("tensord://");
        if let Some(token) = token {
            text.push_str(token);
            text.push('@');
        }
        text.push_str(&self.authority());
        let mut options = Vec::new();
        match &self.trust {
            Trust::Pin(pin) => options.push(format!("ca={pin}")),
            Trust::CaFile(path) => options.push(format!("ca-file={}", path.display())),
            Trust::System => {}
        }
        if self.transport != TransportChoice::Auto {
            options.push(format!("transport={}", self.transport));
        }
        if !options.is_empty() {
            text.push('?');
            text.push_str(&options.join("&"));
        }
        text
    }
}

impl fmt::Display for PoolUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.format(self.token.as_ref().map(|_| "***")))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PIN: &str = "sha256:00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

    fn problem(text: &str) -> String {
        text.parse::<PoolUrl>().unwrap_err().problem
    }

    #[test]
    fn a_full_url_is_understood_and_printed_again() {
        let text = format!("tensord://secret@gpu-1.example:7461?ca={PIN}&transport=grpc");
        let url: PoolUrl = text.parse().unwrap();
        assert_eq!(url.token.as_ref().unwrap().reveal(), "secret");
        assert_eq!((url.host.as_str(), url.port), ("gpu-1.example", 7461));
        assert_eq!(url.trust, Trust::Pin(PIN.parse().unwrap()));
        assert_eq!(url.transport, TransportChoice::Grpc);
        assert_eq!(url.reveal(), text);
    }

    #[test]
    fn omitted_options_have_defaults() {
        let url: PoolUrl = "tensord://[::1]:1".parse().unwrap();
        assert_eq!(url.token, None);
        assert_eq!(url.authority(), "[::1]:1");
        assert_eq!(
            (url.trust, url.transport),
            (Trust::System, TransportChoice::Auto)
        );
        let url: PoolUrl = "tensord://h:1?ca-file=/etc/tensord/ca.pem".parse().unwrap();
        assert_eq!(url.trust, Trust::CaFile("/etc/tensord/ca.pem".into()));
    }

    #[test]
    fn the_token_never_prints() {
        let url: PoolUrl = "tensord://secret@h:1".parse().unwrap();
        assert_eq!(url.to_string(), "tensord://***@h:1");
        assert!(!format!("{url:?}").contains("secret"));
    }

    #[test]
    fn error_names_the_part_and_shows_an_example() {
        let cases = [
            ("gpu-1:7461", "does not start with tensord://"),
            ("http://h:1", "\"http\"; it must be tensord"),
            ("tensord://:7461", "host"),
            ("tensord://h", "the port is missing"),
            ("tensord://h:0", "the port is missing"),
            ("tensord://h:99999", "port"),
            ("tensord://a:b@h:1", "token contains a ':'"),
            ("tensord://h:1/x", "path (\"/x\")"),
            ("tensord://h:1?ca=md5:00", "does not start with sha256:"),
            ("tensord://h:1?ca=sha256:xyz", "not 64 hex digits"),
            (
                "tensord://h:1?transport=udp",
                "\"udp\"; it must be auto, quic, grpc or tcp",
            ),
            ("tensord://h:1?speed=9", "unknown option \"speed\""),
            ("tensord://h:1?transport=quic&transport=grpc", "given twice"),
            ("tensord://h:1?ca-file=", "ca-file is empty"),
        ];
        for (text, expected) in cases {
            assert!(
                problem(text).contains(expected),
                "{text}: {}",
                problem(text)
            );
            let shown = text.parse::<PoolUrl>().unwrap_err().to_string();
            assert!(shown.contains("a valid URL is tensord://"), "{shown}");
        }
    }

    proptest! {
        #[test]
        fn parsing_never_panics(text in "(tensord://)?[ -~]{0,60}") {
            let _ = text.parse::<PoolUrl>();
        }
    }
}
