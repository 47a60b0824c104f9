//! `Debug` of messages that have secrets, without them. `build.rs` leaves out the derived one.

use std::fmt;

use crate::{ids::SessionId, v1::Open};

impl fmt::Debug for Open {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Open")
            .field("session_id", &SessionId(self.session_id))
            .field("device_index", &self.device_index)
            .field("resume", &self.resume)
            .field("received", &self.received)
            .field("bulk", &self.bulk)
            .field("cohort", &self.cohort)
            .field("epoch", &self.epoch)
            .field("restore", &self.restore)
            .field("lease_token", &self.lease_token.len())
            .field("snapshot_key", &"***")
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_of_snapshots_is_not_shown() {
        let open = Open {
            snapshot_key: vec![0xab; 32].into(),
            ..Open::default()
        };
        let shown = format!("{open:?}");
        assert!(shown.contains("snapshot_key: \"***\""), "{shown}");
        assert!(
            !shown.contains("171") && !shown.contains("\\xab"),
            "{shown}"
        );
    }
}
