//! A worker's address, from its registration and the source of its call.

use std::net::{IpAddr, SocketAddr};

/// Returns the address at which clients reach a worker that registers the address `given`
/// and calls from `peer`. If the worker listens on every address and so names none, the
/// host is that of `peer`.
///
/// # Errors
///
/// Returns a message that names what is wrong with `given`.
pub(super) fn reachable_address(given: &str, peer: IpAddr) -> Result<String, String> {
    let wrong = |rule: &str| Err(format!("the worker's address {given:?} {rule}"));
    if let Ok(address) = given.parse::<SocketAddr>() {
        return match (address.ip().is_unspecified(), address.port()) {
            (_, 0) => wrong("has no valid port"),
            (true, port) => Ok(SocketAddr::new(peer.to_canonical(), port).to_string()),
            (false, _) => Ok(given.into()),
        };
    }
    let Some((host, port)) = given.rsplit_once(':') else {
        return wrong("is not HOST:PORT");
    };
    let Some(port) = port.parse().ok().filter(|&port: &u16| port != 0) else {
        return wrong("has no valid port");
    };
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    match host {
        "" => Ok(SocketAddr::new(peer.to_canonical(), port).to_string()),
        host if host.len() <= 253 && host.chars().all(allowed) => Ok(given.into()),
        _ => wrong("has no valid host"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unspecified_host_is_replaced_by_the_callers() {
        let cases = [
            ("0.0.0.0:7462", "10.0.0.5", "10.0.0.5:7462"),
            ("[::]:7462", "10.0.0.5", "10.0.0.5:7462"),
            (":7462", "10.0.0.5", "10.0.0.5:7462"),
            ("0.0.0.0:7462", "::ffff:10.0.0.5", "10.0.0.5:7462"),
            ("0.0.0.0:7462", "fd00::5", "[fd00::5]:7462"),
            ("10.9.9.9:7462", "10.0.0.5", "10.9.9.9:7462"),
            ("gpu-1.example:7462", "10.0.0.5", "gpu-1.example:7462"),
            ("[fd00::9]:7462", "10.0.0.5", "[fd00::9]:7462"),
        ];
        for (given, peer, expected) in cases {
            assert_eq!(
                reachable_address(given, peer.parse().unwrap()).as_deref(),
                Ok(expected),
                "{given}"
            );
        }
    }

    #[test]
    fn undialable_addresses_are_refused() {
        let peer = "10.0.0.5".parse().unwrap();
        for given in [
            "",
            "gpu-1",
            "gpu-1:",
            "gpu-1:0",
            "0.0.0.0:0",
            "gpu-1:99999",
            "a b:1",
            "\u{1b}:1",
        ] {
            let error = reachable_address(given, peer).unwrap_err();
            assert!(
                error.starts_with(&format!("the worker's address {given:?} ")),
                "{error}"
            );
        }
    }
}
