//! Which versions are compatible.
//!
//! Two numbers matter. The *protocol* version covers the messages: each side states a
//! range, and the highest common version is used. The *IR* version covers the ops
//! themselves. Their encoding is Burn's own and changes with every release, so both ends
//! must have the same IR version.

use crate::{
    text::{NAME_CHARS, sanitize},
    v1::{Error, ErrorCode, Hello},
};

/// The lowest protocol version that this build supports.
pub const PROTOCOL_MIN: u32 = 8;
/// The highest protocol version that this build supports.
pub const PROTOCOL_MAX: u32 = 8;
/// The IR version of this build.
pub const IR_VERSION: &str = "burn-ir 0.22.1";

/// Returns the hello of this build.
pub fn hello() -> Hello {
    Hello {
        protocol_min: PROTOCOL_MIN,
        protocol_max: PROTOCOL_MAX,
        ir_version: IR_VERSION.into(),
        software: concat!("tensord ", env!("CARGO_PKG_VERSION")).into(),
    }
}

/// Returns the protocol version to use with a peer whose hello is `theirs`, where `ours`
/// is this side's hello.
///
/// # Errors
///
/// [`ErrorCode::Version`], naming both sides' versions and the side to update.
pub fn negotiate(ours: &Hello, theirs: &Hello) -> Result<u32, Error> {
    let refuse = |what: &str, update: &str| {
        Err(Error {
            code: ErrorCode::Version.into(),
            message: format!(
                "{what}: this side is {} (protocol {} to {}, {}), the other is {} (protocol {} to {}, {}); update {update}",
                ours.software,
                ours.protocol_min,
                ours.protocol_max,
                ours.ir_version,
                sanitize(&theirs.software, NAME_CHARS),
                theirs.protocol_min,
                theirs.protocol_max,
                sanitize(&theirs.ir_version, NAME_CHARS),
            ),
        })
    };
    let side = |ours_older: bool| {
        if ours_older {
            "this side"
        } else {
            "the other side"
        }
    };
    let protocol = ours.protocol_max.min(theirs.protocol_max);
    if protocol < ours.protocol_min.max(theirs.protocol_min) {
        let update = side(ours.protocol_max < theirs.protocol_min);
        return refuse("no common protocol version", update);
    }
    if ours.ir_version != theirs.ir_version {
        let older = numbers(&ours.ir_version) < numbers(&theirs.ir_version);
        return refuse("the tensor ops are of different Burn releases", side(older));
    }
    Ok(protocol)
}

/// Returns the numbers in a version string, for comparing which is older.
fn numbers(version: &str) -> Vec<u64> {
    version
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|part| part.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(min: u32, max: u32, ir: &str) -> Hello {
        Hello {
            protocol_min: min,
            protocol_max: max,
            ir_version: ir.into(),
            software: "tensord 9.9.9".into(),
        }
    }

    fn refusal(theirs: &Hello) -> String {
        let ours = peer(2, 3, "burn-ir 0.22.1");
        let error = negotiate(&ours, theirs).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Version);
        error.message
    }

    #[test]
    fn peer_version_text_is_escaped_in_refusals() {
        let theirs = Hello {
            software: "x\nINFO all is well".repeat(100_000),
            ..peer(90, 99, "burn-ir 0\r\n")
        };
        let refusal = refusal(&theirs);
        assert!(refusal.contains("x\\nINFO all is well"), "{refusal}");
        assert!(
            !refusal.contains(['\n', '\r']) && refusal.len() < 1000,
            "{refusal}"
        );
    }

    #[test]
    fn the_highest_common_version_is_used() {
        let ours = peer(2, 5, IR_VERSION);
        assert_eq!(negotiate(&ours, &peer(1, 4, IR_VERSION)), Ok(4));
        assert_eq!(negotiate(&ours, &peer(5, 9, IR_VERSION)), Ok(5));
    }

    #[test]
    fn a_refusal_names_both_versions_and_the_side_to_update() {
        let newer = refusal(&peer(4, 6, "burn-ir 0.22.1"));
        assert!(
            newer.contains("protocol 2 to 3") && newer.contains("protocol 4 to 6"),
            "{newer}"
        );
        assert!(newer.ends_with("update this side"), "{newer}");
        assert!(refusal(&peer(1, 1, "burn-ir 0.22.1")).ends_with("update the other side"));
        let ir = refusal(&peer(2, 3, "burn-ir 0.23.0"));
        assert!(
            ir.contains("burn-ir 0.22.1") && ir.contains("burn-ir 0.23.0"),
            "{ir}"
        );
        assert!(ir.ends_with("update this side"), "{ir}");
    }
}
