//! The fingerprint that identifies a certificate in URLs and leases.

use std::{fmt, str::FromStr};

/// SHA-256 of a certificate in DER form. Prints as `sha256:…`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 32]);

impl Fingerprint {
    /// Returns the fingerprint of `certificate`, which is in DER form.
    pub fn of(certificate: &[u8]) -> Self {
        let digest = ring::digest::digest(&ring::digest::SHA256, certificate);
        Self(digest.as_ref().try_into().expect("SHA-256 has 32 bytes"))
    }

    /// Returns the first 8 hex digits: enough to distinguish a few certificates, and too
    /// few to trust one by.
    pub fn short(&self) -> String {
        self.0[..4]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("sha256:")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Fingerprint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some(digits) = text.strip_prefix("sha256:") else {
            return Err(format!("{text:?} does not start with sha256:"));
        };
        let bytes: Option<Vec<u8>> = (digits.is_ascii() && digits.len() == 64)
            .then(|| {
                let byte = |i: usize| u8::from_str_radix(&digits[i..i + 2], 16).ok();
                (0..64).step_by(2).map(byte).collect()
            })
            .flatten();
        match bytes.and_then(|bytes| bytes.try_into().ok()) {
            Some(bytes) => Ok(Self(bytes)),
            None => Err(format!("{digits:?} is not 64 hex digits")),
        }
    }
}
