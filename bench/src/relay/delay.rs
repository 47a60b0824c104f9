//! A line of things that come out later than they went in, in order.

use std::{
    sync::mpsc::{SyncSender, sync_channel},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Things on a line at once. With chunks of 64 KiB that is 256 MiB: more than a
/// second of loopback holds. A fuller line stops its reader.
const CAPACITY: usize = 4096;

/// The near end of a line. What is on the line when it drops still comes out.
pub(super) struct Line<T> {
    delay: Duration,
    things: SyncSender<(Instant, T)>,
}

/// A line that hands each thing to `out` `delay` after it came, until `out` says
/// no.
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
    /// Puts `thing` on the line, which came, or comes, at `when`; `false` when
    /// nobody takes it any more.
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
