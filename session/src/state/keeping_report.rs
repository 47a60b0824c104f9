//! What a session logs if its snapshots are not kept.
//!
//! A program goes on without snapshots, so the log is the only sign of that. It has a warning when snapshots begin to
//! fail, with the age of the last one that was kept, at most every ten minutes; and a line when one is kept again.

use std::time::Duration;

use web_time::Instant;

/// A mark that is not committed for this long is reported.
pub(crate) const OVERDUE_AFTER: Duration = Duration::from_secs(30);

/// A failure that was reported is reported again after this time at the earliest.
pub(crate) const REPORT_INTERVAL: Duration = Duration::from_secs(600);

/// What has happened, and what was reported of it.
#[derive(Debug, Default)]
pub(super) struct KeepingReport {
    /// Why the worker has not kept the last snapshot.
    refusal: Option<String>,
    /// Whether the journal has lapsed since the last commit.
    has_lapsed: bool,
    /// When a failure and a lapse were reported last.
    failure_at: Option<Instant>,
    lapse_at: Option<Instant>,
    /// Whether one of them was reported since the last commit.
    is_reported: bool,
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
        (self.refusal, self.has_lapsed) = (None, false);
        let was_reported = std::mem::take(&mut self.is_reported);
        was_reported.then_some("snapshots of the session are kept again")
    }

    /// Returns what is to be logged as a warning, if there is something new. No mark was committed for `waited`, and
    /// the last one that was committed is `age` old.
    pub(super) fn warning(
        &mut self,
        now: Instant,
        waited: Duration,
        age: Option<Duration>,
    ) -> Option<String> {
        let is_due = |at: Option<Instant>| at.is_none_or(|at| now >= at + REPORT_INTERVAL);
        if self.has_lapsed && is_due(self.lapse_at) {
            (self.lapse_at, self.is_reported) = (Some(now), true);
            let text = "the session has sent more since its last snapshot than the client keeps, so it ends if its \
                        process or worker is lost before the next snapshot is kept";
            return Some(text.into());
        }
        let is_failing = self.refusal.is_some() || waited >= OVERDUE_AFTER;
        if !is_failing || !is_due(self.failure_at) {
            return None;
        }
        (self.failure_at, self.is_reported) = (Some(now), true);
        let failure = match &self.refusal {
            Some(reason) => format!("the worker has not kept a snapshot: {reason}"),
            None => format!("no snapshot was kept for {} s", waited.as_secs()),
        };
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
    fn failure_and_its_end_are_reported_once_in_a_while() {
        let now = Instant::now();
        let mut report = KeepingReport::default();
        let (soon, age) = (Duration::from_secs(3), Some(Duration::from_secs(31)));
        assert_eq!(
            (report.warning(now, soon, age), report.kept()),
            (None, None)
        );
        report.refused("no room".into());
        let expected = "the worker has not kept a snapshot: no room; if its process or worker is lost, the session \
                        goes on from the last snapshot, which is 31 s old";
        assert_eq!(report.warning(now, soon, age).as_deref(), Some(expected));
        report.refused("no room".into());
        assert_eq!(report.warning(now, soon, age), None, "it is known");
        report.lapsed();
        let expected = "the session has sent more since its last snapshot than the client keeps, so it ends if its \
                        process or worker is lost before the next snapshot is kept";
        assert_eq!(report.warning(now, soon, None).as_deref(), Some(expected));
        assert_eq!(report.warning(now, OVERDUE_AFTER, None), None);
        assert_eq!(
            report.kept(),
            Some("snapshots of the session are kept again")
        );
        assert_eq!(
            (report.warning(now, soon, age), report.kept()),
            (None, None)
        );
        // The same again.
        report.lapsed();
        let later = now + REPORT_INTERVAL - Duration::from_millis(1);
        assert_eq!(
            (report.warning(later, soon, None), report.kept()),
            (None, None)
        );
        let later = now + REPORT_INTERVAL;
        let expected =
            "no snapshot was kept for 30 s; the session is lost with its process or worker";
        let overdue = report.warning(later, OVERDUE_AFTER, None);
        assert_eq!(overdue.as_deref(), Some(expected));
    }

    #[test]
    fn what_was_not_reported_needs_no_end() {
        let mut report = KeepingReport::default();
        report.refused("other snapshots are being copied".into());
        assert_eq!(report.kept(), None);
        assert_eq!(report.warning(Instant::now(), Duration::ZERO, None), None);
    }
}
