//! Tests of what the sessions of a lease keep while some of them are restored.

use std::sync::Arc;

use burn_backend::{BoolStore, DType, DeviceSettings};
use bytes::Bytes;
use tensord_channel::Look;
use tensord_proto::{codec::DeviceProfile, ids::SessionId, v1::Seed};

use super::*;
use crate::{Cohort, FrameEncoder, GoesOn, JournalBudget};

struct Session(State, FrameEncoder);

impl Session {
    fn new(cohort: &Arc<Cohort>, lease_rank: u32, now: Instant) -> Self {
        let member = CohortMember {
            cohort: cohort.clone(),
            lease_rank,
        };
        let (id, budget) = (SessionId(lease_rank.into()), JournalBudget::default());
        let state = State::new(id, now, GoesOn::WithAnyAnswers, &member, &budget);
        Self(state, FrameEncoder::default())
    }

    /// Opens the session in the process of this epoch, from `mark`.
    fn open(&mut self, epoch: u64, mark: u64) {
        let points = self.0.opening_points();
        let point = points.iter().find(|point| point.mark == mark);
        let opened = Opened {
            durable: true,
            epoch,
            mark,
            received: point.map_or(0, |point| point.frames),
            credit_bytes: u64::MAX,
            ..Opened::default()
        };
        assert!(self.0.accepts_restore(&opened));
        let store = BoolStore::Native;
        let profile = DeviceProfile {
            settings: DeviceSettings::with_dtypes(DType::F32, DType::I32, DType::Bool(store)),
            dtypes: Vec::new(),
        };
        self.0.attach(Track::Ops, &opened, profile).unwrap();
    }

    fn encode(&mut self, now: Instant) {
        self.0.record_due_mark(now);
        self.0.take_recorded(|items| self.1.take(items));
        for body in self.1.encode() {
            self.0.push(body);
        }
        let look = Look {
            patient: false,
            rested: false,
        };
        self.0.next(Track::Ops, look);
    }
}

/// Returns the sessions of a lease that have committed cut 1.
fn sessions_with_a_cut() -> [Session; 2] {
    let (now, cohort) = (Instant::now(), Cohort::new(1, 2));
    let mut sessions = [0, 1].map(|rank| Session::new(&cohort, rank, now));
    sessions.iter_mut().for_each(|session| session.open(0, 0));
    sessions.iter_mut().for_each(|session| session.encode(now));
    for Session(state, _) in &mut sessions {
        state.on_marked(Marked {
            mark: 1,
            ..Marked::default()
        });
        state.try_commit();
    }
    sessions
}

#[test]
fn restored_session_keeps_what_the_others_go_on_from() {
    let [mut first, mut second] = sessions_with_a_cut();
    let (first, second) = (&mut first, &mut second);
    let marks = |session: &Session| -> Vec<_> {
        let points = session.0.restore_points();
        points.iter().map(|point| point.mark).collect()
    };
    assert_eq!((marks(first), marks(second)), (vec![1], vec![1]));

    // The process is lost. The program uploads more than a journal may have, and the first session goes on.
    first.open(1, 1);
    let upload = vec![0; MAX_JOURNAL_BYTES + 1];
    first.0.upload(None, Bytes::from(upload));
    first.0.push(Body::Seed(Seed { seed: 1 }));
    assert_eq!(marks(second), [1]);
    second.open(1, 1);
    assert_eq!(marks(first), [1]);
    // All sessions are there.
    first.0.push(Body::Seed(Seed { seed: 2 }));
    assert!(marks(first).is_empty() && marks(second).is_empty());
}

#[test]
fn session_does_not_keep_everything_while_others_are_restored() {
    let [mut first, _second] = sessions_with_a_cut();
    first.open(1, 1);
    let upload = Bytes::from(vec![0; MAX_JOURNAL_BYTES]);
    for _ in 0..=MAX_RESTORING_BYTES / MAX_JOURNAL_BYTES {
        first.0.upload(None, upload.clone());
        first.0.push(Body::Seed(Seed { seed: 1 }));
    }
    assert!(first.0.restore_points().is_empty());
    assert_eq!(first.0.kept_bytes(), 0);
}
