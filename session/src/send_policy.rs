//! When a session sends what was recorded, and when it wakes its driver.
//!
//! [`SendPolicy`] is a state machine without I/O, locks or a clock. The session passes every
//! [`Event`] to it and wakes the driver if the policy returns `true`. The driver calls
//! [`SendPolicy::next`] whenever it is free and carries out the [`Action`]. Time comes in as
//! a [`Look`]: the pump, which has the timers, knows how long the driver has waited.
//!
//! A frame costs both ends more than an op, and to wake the driver costs the program more
//! than to record an op. Therefore:
//!
//! - An *urgent* item, for which a thread or another rank waits, is sent at once, and so are
//!   all items before it.
//! - [`EAGER_OPS`] items are sent at once, too.
//! - Fewer items wait for more: for `BATCH_DELAY` at first, and for up to
//!   `MAX_BATCH_DELAY` if small batches repeat, as the worker is then still busy.
//! - While few items wait, and while the driver does not wait at all, further items do not
//!   wake the driver.
//!
//! All this is about the track for ops. The driver of the other track sends whatever it has.

use std::time::Duration;

use burn_ir::OperationIr;
use tensord_channel::Look;
use tensord_proto::collective_op::CollectiveOp;

/// Number of recorded items from which they are sent without delay. Fewer wait for more.
pub const EAGER_OPS: usize = 512;

/// How long a few items wait for more: the resolution of the timer. The program does not
/// wait for them, as a read or the end of a series of all-reduces would have sent them.
const BATCH_DELAY: Duration = Duration::from_millis(1);

/// Limit for the delay, which starts at [`BATCH_DELAY`] and doubles with each small batch that
/// was sent since the last urgent item.
const MAX_BATCH_DELAY: Duration = Duration::from_millis(4);

/// What happened to a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// An item was recorded.
    Recorded {
        /// Whether the item must not wait for more.
        urgent: bool,
        /// Number of recorded items that are not encoded, with this one.
        items: usize,
    },
    /// A thread waits until the session has room for more items.
    RoomNeeded,
    /// A frame was received.
    Received {
        /// Whether the frame lets frames be sent that could not be sent before, or an
        /// acknowledgement is due.
        due: bool,
    },
}

/// What a session has to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pending {
    /// Whether there are frames that the worker's credit covers.
    pub frames: bool,
    /// Number of recorded items that are not encoded.
    pub items: usize,
    /// Whether the outbox has no room for more frames.
    pub is_outbox_full: bool,
    /// Whether there is an acknowledgement to send.
    pub ack: Ack,
    /// Whether the session has ended: only what is recorded already is sent.
    pub has_ended: bool,
}

/// Whether there is an acknowledgement to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ack {
    /// The worker knows what was received.
    Nothing,
    /// The worker does not know yet what was received; the next frame will carry the
    /// acknowledgement.
    Pending,
    /// An acknowledgement must be sent, with a frame or alone.
    Due,
}

/// What the driver is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Send the frames that the credit covers.
    Send,
    /// Encode the recorded items into frames, and call [`SendPolicy::next`] again.
    Encode,
    /// Wait for more items for this long.
    Gather(Duration),
    /// Send the acknowledgement that is due.
    Acknowledge,
    /// Wait.
    Wait,
    /// End: the session has ended, and everything was sent.
    Finish,
}

/// Decides when a session sends. See the [module](self).
#[derive(Debug, Default)]
pub struct SendPolicy {
    /// Whether one of the recorded items is urgent.
    urgent: bool,
    /// How often a few items were sent because no more came in time, since the last urgent
    /// item.
    small_batches: u32,
    driver: DriverWait,
}

/// What the driver waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum DriverWait {
    /// The driver does not wait: it will call [`SendPolicy::next`] by itself, or it was woken.
    #[default]
    No,
    /// A frame to send. After `ack_delay` of the channel's timing the driver looks for
    /// acknowledgements by itself.
    ForFrames,
    /// A frame or an acknowledgement to send.
    ForFramesOrAcks,
    /// More items than the few that are recorded. The driver looks again after a moment.
    ForItems,
}

impl SendPolicy {
    /// Takes note of `event`. Returns whether the caller must wake the driver.
    #[inline]
    #[must_use]
    pub fn on(&mut self, event: Event) -> bool {
        let is_wanted = match event {
            Event::Recorded { urgent, items } => {
                self.urgent |= urgent;
                self.driver != DriverWait::ForItems || !self.may_gather(items)
            }
            Event::RoomNeeded => true,
            Event::Received { due } => due || self.driver == DriverWait::ForFramesOrAcks,
        };
        is_wanted && std::mem::take(&mut self.driver) != DriverWait::No
    }

    /// Takes note that the driver waits without a connection, and is to be woken for whatever is recorded.
    pub(super) fn wait_for_use(&mut self) {
        self.driver = DriverWait::ForFrames;
    }

    /// Returns what the driver is to do next.
    #[inline]
    pub fn next(&mut self, look: Look, pending: Pending) -> Action {
        self.driver = DriverWait::No;
        if pending.frames {
            return Action::Send;
        }
        let gathers = look.patient && self.may_gather(pending.items);
        if pending.items > 0 && !gathers && !pending.is_outbox_full {
            self.count_batch(pending.items);
            return Action::Encode;
        }
        if pending.has_ended {
            return Action::Finish;
        }
        if gathers {
            self.driver = DriverWait::ForItems;
            return Action::Gather(self.batch_delay());
        }
        self.driver = match pending.ack {
            Ack::Due => return Action::Acknowledge,
            Ack::Nothing if look.rested => DriverWait::ForFramesOrAcks,
            Ack::Nothing | Ack::Pending => DriverWait::ForFrames,
        };
        Action::Wait
    }

    /// Returns whether the driver waits for acknowledgements to send as well as for frames.
    #[inline]
    pub fn waits_for_acks(&self) -> bool {
        self.driver == DriverWait::ForFramesOrAcks
    }

    /// Returns whether the recorded items, `items` in number, may wait for more.
    #[inline]
    fn may_gather(&self, items: usize) -> bool {
        !self.urgent && (1..EAGER_OPS).contains(&items)
    }

    /// Returns how long a few items wait for more.
    fn batch_delay(&self) -> Duration {
        MAX_BATCH_DELAY.min(BATCH_DELAY * (1 << self.small_batches.min(8)))
    }

    /// Takes note that all recorded items, `items` in number, are encoded.
    fn count_batch(&mut self, items: usize) {
        if std::mem::take(&mut self.urgent) {
            self.small_batches = 0;
        } else if items < EAGER_OPS {
            self.small_batches = self.small_batches.saturating_add(1);
        }
    }
}

/// Returns whether `op` must not wait for more: other ranks wait for the all-reduces that end
/// with a [`CollectiveOp::Sync`].
#[inline]
pub(super) fn is_urgent(op: &OperationIr) -> bool {
    CollectiveOp::is_sync(op)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: Pending = Pending {
        frames: false,
        items: 0,
        is_outbox_full: false,
        ack: Ack::Nothing,
        has_ended: false,
    };
    const FIRST: Look = Look {
        patient: true,
        rested: false,
    };
    const RESTED: Look = Look {
        patient: true,
        rested: true,
    };
    const PATIENCE_OVER: Look = Look {
        patient: false,
        rested: false,
    };

    fn items(items: usize) -> Pending {
        Pending { items, ..EMPTY }
    }

    fn ack(ack: Ack) -> Pending {
        Pending { ack, ..EMPTY }
    }

    fn recorded(items: usize) -> Event {
        let urgent = false;
        Event::Recorded { urgent, items }
    }

    fn recorded_urgent(items: usize) -> Event {
        let urgent = true;
        Event::Recorded { urgent, items }
    }

    fn gather(ms: u64) -> Action {
        Action::Gather(Duration::from_millis(ms))
    }

    #[test]
    fn driver_does_what_is_pending() {
        let ended = |pending| Pending {
            has_ended: true,
            ..pending
        };
        let full = |items| Pending {
            items,
            is_outbox_full: true,
            ..EMPTY
        };
        let frames = Pending {
            frames: true,
            ack: Ack::Due,
            ..items(EAGER_OPS)
        };
        for (look, pending, action) in [
            (FIRST, EMPTY, Action::Wait),
            (RESTED, EMPTY, Action::Wait),
            (FIRST, frames, Action::Send),
            (FIRST, ended(frames), Action::Send),
            (FIRST, items(1), gather(1)),
            (RESTED, items(EAGER_OPS - 1), gather(1)),
            (FIRST, items(EAGER_OPS), Action::Encode),
            (PATIENCE_OVER, items(1), Action::Encode),
            (PATIENCE_OVER, full(1), Action::Wait),
            (FIRST, full(1), gather(1)),
            (FIRST, full(EAGER_OPS), Action::Wait),
            (FIRST, ack(Ack::Pending), Action::Wait),
            (FIRST, ack(Ack::Due), Action::Acknowledge),
            (FIRST, ended(EMPTY), Action::Finish),
            (FIRST, ended(ack(Ack::Due)), Action::Finish),
            (FIRST, ended(items(EAGER_OPS)), Action::Encode),
            (FIRST, ended(full(EAGER_OPS)), Action::Finish),
        ] {
            let next = SendPolicy::default().next(look, pending);
            assert_eq!(next, action, "{look:?} {pending:?}");
        }
    }

    #[test]
    fn driver_is_woken_only_for_what_it_waits_for() {
        let due = Event::Received { due: true };
        let not_due = Event::Received { due: false };
        let few = recorded(2);
        let many = recorded(EAGER_OPS);
        let urgent = recorded_urgent(2);
        // The driver waits after the look at what is pending, if there is one.
        for (waits, wakes, does_not_wake) in [
            (None, vec![], vec![few, many, urgent, due, not_due]),
            (
                Some((FIRST, EMPTY)),
                vec![few, many, urgent, due],
                vec![not_due],
            ),
            (
                Some((RESTED, EMPTY)),
                vec![few, many, urgent, due, not_due],
                vec![],
            ),
            // The acknowledgement will be sent after its delay, without the driver woken.
            (
                Some((RESTED, ack(Ack::Pending))),
                vec![few, many, urgent, due],
                vec![not_due],
            ),
            (
                Some((FIRST, items(1))),
                vec![many, urgent, due, Event::RoomNeeded],
                vec![few, not_due],
            ),
            // After these the driver goes on by itself.
            (
                Some((FIRST, items(EAGER_OPS))),
                vec![],
                vec![few, urgent, due, Event::RoomNeeded],
            ),
            (
                Some((RESTED, ack(Ack::Due))),
                vec![],
                vec![few, urgent, due, not_due],
            ),
        ] {
            let events = wakes.iter().map(|event| (event, true));
            for (event, wakes) in events.chain(does_not_wake.iter().map(|event| (event, false))) {
                let mut policy = SendPolicy::default();
                if let Some((look, pending)) = waits {
                    policy.next(look, pending);
                }
                assert_eq!(policy.on(*event), wakes, "{waits:?} {event:?}");
                let again = policy.on(Event::RoomNeeded);
                let still_waits = !wakes && policy_waits(waits);
                assert_eq!(again, still_waits, "{waits:?} {event:?} again");
            }
        }
    }

    /// Returns whether the driver waits after a look at what is pending.
    fn policy_waits(look: Option<(Look, Pending)>) -> bool {
        look.is_some_and(|(look, pending)| {
            let action = SendPolicy::default().next(look, pending);
            matches!(action, Action::Wait | Action::Gather(_))
        })
    }

    #[test]
    fn delay_doubles_with_each_small_batch_until_an_urgent_item() {
        let mut policy = SendPolicy::default();
        for ms in [1, 2, 4, 4] {
            assert_eq!(policy.next(FIRST, items(3)), gather(ms));
            assert_eq!(policy.next(PATIENCE_OVER, items(3)), Action::Encode);
        }
        // A large batch changes nothing.
        assert_eq!(policy.next(FIRST, items(EAGER_OPS)), Action::Encode);
        assert_eq!(policy.next(FIRST, items(1)), gather(4));
        assert!(policy.on(recorded_urgent(2)));
        assert_eq!(policy.next(FIRST, items(2)), Action::Encode);
        assert_eq!(policy.next(FIRST, items(1)), gather(1));
    }

    #[test]
    fn delay_stays_bounded_however_long_the_program_runs() {
        let mut policy = SendPolicy {
            small_batches: u32::MAX,
            ..SendPolicy::default()
        };
        assert_eq!(policy.next(PATIENCE_OVER, items(1)), Action::Encode);
        assert_eq!(policy.next(FIRST, items(1)), gather(4));
    }

    #[test]
    fn end_of_a_series_of_all_reduces_is_urgent() {
        assert!(is_urgent(&CollectiveOp::Sync.into()));
    }

    /// A session whose worker takes all frames at once, and its driver.
    #[derive(Default)]
    struct Model {
        policy: SendPolicy,
        items: usize,
        has_urgent: bool,
        /// What the driver does since its last look, or `None` if it was woken since.
        waits: Option<Action>,
    }

    impl Model {
        fn event(&mut self, event: Event) {
            if let Event::Recorded { urgent, .. } = event {
                self.has_urgent |= urgent;
            }
            if self.policy.on(event) {
                assert!(self.waits.take().is_some(), "a driver that does not wait");
            }
        }

        fn look(&mut self, look: Look) {
            loop {
                match self.policy.next(look, items(self.items)) {
                    Action::Encode => (self.items, self.has_urgent) = (0, false),
                    action => {
                        self.waits = Some(action);
                        return;
                    }
                }
            }
        }

        /// Takes the step with this number.
        fn step(&mut self, step: usize) {
            match step {
                0..3 => {
                    self.items += [1, 1, EAGER_OPS][step];
                    let urgent = step == 1;
                    let items = self.items;
                    self.event(Event::Recorded { urgent, items });
                }
                3 | 4 => self.event(Event::Received { due: step == 3 }),
                5 => self.look(FIRST),
                6 => self.look(PATIENCE_OVER),
                _ => self.look(RESTED),
            }
            // A driver that waits has nothing to send, or only a few items and a timer.
            match self.waits {
                Some(Action::Gather(delay)) => {
                    assert!(self.items < EAGER_OPS && !self.has_urgent);
                    assert!(delay <= MAX_BATCH_DELAY);
                }
                Some(_) => assert_eq!(self.items, 0),
                None => {}
            }
        }
    }

    #[test]
    fn no_sequence_of_events_leaves_items_with_a_driver_that_waits() {
        const STEPS: usize = 8;
        const LENGTH: u32 = 6;
        for sequence in 0..STEPS.pow(LENGTH) {
            let mut model = Model::default();
            (0..LENGTH).for_each(|n| model.step(sequence / STEPS.pow(n) % STEPS));
        }
    }
}
