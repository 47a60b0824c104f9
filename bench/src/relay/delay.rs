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
pub(super) struct DelayLine<T> {
    delay: Duration,
    items: SyncSender<(Instant, T)>,
}

/// Starts a line that passes each item to `out` `delay` after its entry, until `out`
/// returns false.
pub(super) fn start_delay_line<T: Send + 'static>(
    delay: Duration,
    mut out: impl FnMut(T) -> bool + Send + 'static,
) -> (DelayLine<T>, JoinHandle<()>) {
    let (items, late) = sync_channel::<(Instant, T)>(CAPACITY);
    let sending = thread::spawn(move || {
        for (due, item) in late {
            let wait = due.saturating_duration_since(Instant::now());
            if !wait.is_zero() {
                thread::sleep(wait);
            }
            if !out(item) {
                return;
            }
        }
    });
    (DelayLine { delay, items }, sending)
}

impl<T> DelayLine<T> {
    /// Enters `item` with the entry time `when`, which may be in the future. Returns
    /// `false` if the receiver has ended.
    pub(super) fn push(&self, item: T, when: Instant) -> bool {
        self.items.send((when + self.delay, item)).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn delayed_items_keep_their_order() {
        let (taken, takes) = channel();
        let delay = Duration::from_millis(20);
        let (line, sending) = start_delay_line(delay, move |item: u32| {
            taken.send((item, Instant::now())).is_ok()
        });
        let begun = Instant::now();
        (0..100).for_each(|item| assert!(line.push(item, begun)));
        drop(line);
        sending.join().unwrap();
        let taken: Vec<_> = takes.iter().collect();
        assert_eq!(taken.len(), 100);
        for (at, (item, when)) in taken.into_iter().enumerate() {
            assert_eq!(item as usize, at);
            assert!(when - begun >= delay, "{item} came out early");
        }
    }
}
