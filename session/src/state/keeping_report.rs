//! What the log tells of snapshots that are not kept.
//!
//! A program goes on without snapshots, so its user hears of it by the log alone: once when they begin to fail,
//! with the age of the last one that was kept, and once when one is kept again.

use std::time::Duration;

/// A mark that is not committed for this long is reported.
const OVERDUE_AFTER: Duration = Duration::from_secs(30);

/// What has happened, and what was reported of it.
#[derive(Debug, Default)]
pub(super) struct KeepingReport {
    /// Why the worker has not kept the last snapshot.
    refusal: Option<String>,
    /// Whether the journal has lapsed.
    has_lapsed: bool,
    is_failure_reported: bool,
    is_lapse_reported: bool,
}

impl KeepingReport {
    /// The worker has not kept a snapshot.
    pub(super) fn refused(&mut self, reason: String) {
        self.refusal = Some(reason);
    }

    /// The journal had more bytes than its limit.
    pub(super) fn lapsed(&mut self) {
        self.has_lapsed = true;
    }

    /// A mark was committed. Returns what is to be logged.
    pub(super) fn kept(&mut self) -> Option<&'static str> {
        let before = std::mem::take(self);
        let was_reported = before.is_failure_reported || before.is_lapse_reported;
        was_reported.then_some("snapshots of the session are kept again")
    }

    /// Returns what is to be logged as a warning, if there is something new. No mark was committed for `waited`, and
    /// the last one that was committed is `age` old.
    pub(super) fn warning(&mut self, waited: Duration, age: Option<Duration>) -> Option<String> {
        if self.has_lapsed && !self.is_lapse_reported {
            self.is_lapse_reported = true;
            let text = "a session has sent more between two snapshots than is kept to send again; until the next \
                        snapshot is kept, it is lost with its process or worker";
            return Some(text.into());
        }
        let failure = match &self.refusal {
            Some(reason) => format!("the worker has not kept a snapshot: {reason}"),
            None if waited >= OVERDUE_AFTER => {
                format!("no snapshot was kept for {} s", waited.as_secs())
            }
            None => return None,
        };
        if self.is_failure_reported {
            return None;
        }
        self.is_failure_reported = true;
        let outcome = match age {
            Some(age) => format!(
                "if its process or worker is lost, the session goes on from the last snapshot, which is {} s old",
                age.as_secs()
            ),
            None => "the session is lost with its process or worker".to_owned(),
        };
        Some(format!("{failure}; {outcome}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_is_reported_once_and_so_is_its_end() {
        let mut report = KeepingReport::default();
        let (soon, age) = (Duration::from_secs(3), Some(Duration::from_secs(31)));
        assert_eq!((report.warning(soon, age), report.kept()), (None, None));
        report.refused("no room".into());
        let expected = "the worker has not kept a snapshot: no room; if its process or worker is lost, the session \
                        goes on from the last snapshot, which is 31 s old";
        assert_eq!(report.warning(soon, age).as_deref(), Some(expected));
        report.refused("no room".into());
        assert_eq!(report.warning(soon, age), None, "it is known");
        report.lapsed();
        let expected = "a session has sent more between two snapshots than is kept to send again; until the next \
                        snapshot is kept, it is lost with its process or worker";
        assert_eq!(report.warning(soon, None).as_deref(), Some(expected));
        assert_eq!(report.warning(OVERDUE_AFTER, None), None);
        assert_eq!(
            report.kept(),
            Some("snapshots of the session are kept again")
        );
        assert_eq!((report.warning(soon, age), report.kept()), (None, None));
        let expected =
            "no snapshot was kept for 30 s; the session is lost with its process or worker";
        let overdue = report.warning(OVERDUE_AFTER, None);
        assert_eq!(overdue.as_deref(), Some(expected));
    }

    #[test]
    fn what_was_not_reported_needs_no_end() {
        let mut report = KeepingReport::default();
        report.refused("other snapshots are being copied".into());
        assert_eq!(report.kept(), None);
        assert_eq!(report.warning(Duration::ZERO, None), None);
    }
}
