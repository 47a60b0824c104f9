//! Numbers of grants, which show the later of two grants of a device.
//!
//! A scheduler numbers its grants by its *term*, which it raises and stores at every
//! start, and a count. So a grant has a higher number than every earlier grant of the
//! same device, also across restarts. A worker needs only one number for each device to
//! recognise outdated lease tokens.

use std::fmt;

use crate::v1;

/// The number of a grant of a device. [`ZERO`](Self::ZERO) means no grant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrantNumber {
    /// Term of the scheduler that made the grant, from 1.
    pub term: u64,
    /// Position among the grants of that term, from 1.
    pub count: u64,
}

impl GrantNumber {
    /// Lower than every grant.
    pub const ZERO: Self = Self { term: 0, count: 0 };

    /// Returns the next number, or `None` after the highest number.
    pub fn next(self) -> Option<Self> {
        let Self { term, count } = self;
        match count.checked_add(1) {
            Some(count) => Some(Self { term, count }),
            None => term.checked_add(1).map(|term| Self { term, count: 0 }),
        }
    }

    /// Returns the previous number, or [`ZERO`](Self::ZERO) before the lowest number.
    pub fn previous(self) -> Self {
        let Self { term, count } = self;
        match (count.checked_sub(1), term.checked_sub(1)) {
            (Some(count), _) => Self { term, count },
            (None, Some(term)) => Self {
                term,
                count: u64::MAX,
            },
            (None, None) => Self::ZERO,
        }
    }
}

impl fmt::Display for GrantNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.term, self.count)
    }
}

impl From<v1::GrantNumber> for GrantNumber {
    fn from(number: v1::GrantNumber) -> Self {
        Self {
            term: number.term,
            count: number.count,
        }
    }
}

impl From<GrantNumber> for v1::GrantNumber {
    fn from(number: GrantNumber) -> Self {
        Self {
            term: number.term,
            count: number.count,
        }
    }
}

/// Returns the number in a message; [`GrantNumber::ZERO`] if it is missing.
pub fn number(grant: Option<v1::GrantNumber>) -> GrantNumber {
    grant.map_or(GrantNumber::ZERO, Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(term: u64, count: u64) -> GrantNumber {
        GrantNumber { term, count }
    }

    #[test]
    fn a_later_term_is_higher_than_any_count() {
        let rising = [
            GrantNumber::ZERO,
            grant(1, 1),
            grant(1, u64::MAX),
            grant(2, 0),
            grant(2, 1),
            grant(u64::MAX, u64::MAX),
        ];
        assert!(rising.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn next_and_previous_are_inverse() {
        for (low, high) in [
            (grant(1, 1), grant(1, 2)),
            (grant(1, u64::MAX), grant(2, 0)),
            (GrantNumber::ZERO, grant(0, 1)),
        ] {
            assert_eq!(low.next(), Some(high));
            assert_eq!(high.previous(), low);
        }
        assert_eq!(grant(u64::MAX, u64::MAX).next(), None);
        assert_eq!(GrantNumber::ZERO.previous(), GrantNumber::ZERO);
    }

    #[test]
    fn missing_number_is_zero() {
        assert_eq!(number(None), GrantNumber::ZERO);
        assert_eq!(number(Some(grant(3, 4).into())), grant(3, 4));
    }
}
