//! Parts of the client for benchmarks and for the simulation, and settings for tests.

use tensord_session::send_policy::{Ack, Action, Event, Pending, SendPolicy};
use tensord_transport::{channel::Look, faults::FaultSwitch};

pub use crate::session::simulated::{PendingSync, PendingValue, SimulatedEnd, SimulatedSession};

/// Settings for tests.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Puts the links to workers under the control of a switch.
    pub faults: Option<FaultSwitch>,
}

/// Passes `ops` recorded ops through the send policy of a session whose driver encodes and
/// sends as soon as the policy decides to, and looks again when it is woken. The last op
/// ends a series of all-reduces, and therefore goes at once. Returns the number of frames.
pub fn frames_of(ops: usize) -> usize {
    let mut policy = SendPolicy::default();
    let mut items = 0;
    let mut frames = drive(&mut policy, &mut items);
    for op in 1..=ops {
        items += 1;
        let urgent = op == ops;
        if policy.on(Event::Recorded { urgent, items }) {
            frames += drive(&mut policy, &mut items);
        }
    }
    frames
}

/// Does what a driver does from when it is woken until it waits again: it encodes `items` if
/// the policy decides so, which leaves none. Returns the number of frames.
fn drive(policy: &mut SendPolicy, items: &mut usize) -> usize {
    let look = Look {
        patient: true,
        rested: false,
    };
    let mut frames = 0;
    loop {
        let pending = Pending {
            frames: false,
            items: *items,
            is_outbox_full: false,
            ack: Ack::Nothing,
            has_ended: false,
        };
        if policy.next(look, pending) != Action::Encode {
            return frames;
        }
        (*items, frames) = (0, frames + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ops_go_in_full_frames_and_the_urgent_one_at_once() {
        assert_eq!(frames_of(1), 1);
        assert_eq!(frames_of(5 * 512 + 1), 6);
    }
}
