//! A delay line: items leave it in order, a fixed time after they entered.

use std::{
    sync::mpsc::{SyncSender, sync_channel},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Capacity of a delay line in items. With chunks of 64 KiB that is 256 MiB: more than a
/// second of loopback traffic. A full line blocks its reader.
const CAPACITY: usize = 4096;

/// The sending end of a delay line. Items in the line when it drops are still delivered.
pub(super) struct Line<T> {
    delay: Duration,
    things: SyncSender<(Instant, T)>,
}

/// Starts a line that passes each item to `out` `delay` after its entry, until `out`
/// returns false.
pub(super) fn line<T: Send + 'static>(
    delay: Duration,
    mut out: impl FnMut(T) -> bool + Send + 'static,
) -> (Line<T>, JoinHandle<()>) {
    let (things, late) = sync_channel::<(Instant, T)>(CAPACITY);
    let sending = thread::spawn(move || {
        for (due, thing) in late {
            let wait = due.saturating_duration_since(Instant::now());
            if !wait.is_zero() {
                thread::sleep(wait);
            }
            if !out(thing) {
                return;
            }
        }
    });
    (Line { delay, things }, sending)
}

impl<T> Line<T> {
    /// Enters `thing` with the entry time `when`, which may be in the future. Returns
    /// `false` if the receiver has ended.
    pub(super) fn push(&self, thing: T, when: Instant) -> bool {
        self.things.send((when + self.delay, thing)).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn things_come_out_late_and_in_order() {
        let (taken, takes) = channel();
        let delay = Duration::from_millis(20);
        let (line, sending) = line(delay, move |thing: u32| {
            taken.send((thing, Instant::now())).is_ok()
        });
        let begun = Instant::now();
        (0..100).for_each(|thing| assert!(line.push(thing, begun)));
        drop(line);
        sending.join().unwrap();
        let taken: Vec<_> = takes.iter().collect();
        assert_eq!(taken.len(), 100);
        for (at, (thing, when)) in taken.into_iter().enumerate() {
            assert_eq!(thing as usize, at);
            assert!(when - begun >= delay, "{thing} came out early");
        }
    }
}
