//! Parts of the client for benchmarks, and settings for tests.

use tensord_transport::channel::Look;

pub use crate::pool::Options;
use crate::session::send_policy::{Ack, Action, Event, Pending, SendPolicy};

/// Passes `ops` recorded ops through the send policy of a session, whose driver encodes and
/// sends as soon as the policy says so and looks again when it is woken. Returns the number
/// of frames.
pub fn frames_of(ops: usize) -> usize {
    let (mut policy, mut items, mut frames) = (SendPolicy::default(), 0, 0);
    for op in 1..=ops {
        items += 1;
        // The last op ends a series of all-reduces.
        let urgent = op == ops;
        if !policy.on(Event::Recorded { urgent, items }) && op > 1 {
            continue;
        }
        loop {
            let pending = Pending {
                frames: false,
                items,
                is_outbox_full: false,
                ack: Ack::Nothing,
                has_ended: false,
            };
            let look = Look {
                patient: true,
                rested: false,
            };
            if policy.next(look, pending) != Action::Encode {
                break;
            }
            (items, frames) = (0, frames + 1);
        }
    }
    frames
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
