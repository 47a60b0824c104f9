//! What a link carries, by what it was seen to carry.

use std::time::{Duration, Instant};

/// Shortest time over which a rate is taken: several times what a timer or a
/// scheduler may be off by.
const SPAN: Duration = Duration::from_millis(20);

/// Fewest bytes of which a rate is taken, as fewer fit into buffers on the way.
const LEAST_BYTES: u64 = 4 << 20;

/// Bounds of a bucket. Below, what an exchange costs by itself shows; above,
/// nothing would be left to overlap with.
const SMALLEST_BUCKET: f64 = (256 << 10) as f64;
const LARGEST_BUCKET: f64 = (32 << 20) as f64;

/// What a worker may have on its way to all others where a round trip is short: what 1
/// Gbit/s carry in 4 ms, in which a busy host's writers have their turn.
const FLIGHT_BYTES: usize = 512 << 10;

/// What a connection may have of it at least, that is neither ahead nor behind.
const LEAST_FLIGHT: usize = 64 << 10;

/// A connection that is so many bytes behind the others may have twice as much on its
/// way, and one that is half as many ahead half of it. By the pieces in which bytes are
/// said, that is at once.
const LAG_BYTES: f64 = (128 << 10) as f64;

/// What a connection may have at most that lags behind, and at least that is ahead, of
/// what it would have else.
const FLIGHT_RANGE: [f64; 2] = [0.25, 2.0];

/// What a worker may have on its way to all others before it knows what links carry. All
/// at once they would flood them, and what else goes over them, such as heartbeats, would
/// be lost with the rest.
const FIRST_FLIGHT_BYTES: usize = 1 << 20;

/// What one connection carries whatever the hosts, in bytes a second. More than that may
/// take several, on several cores each.
const CONNECTION_RATE: f64 = 400e6;

/// Bytes of a slice that are worth the messages of a ring in any case.
const LEAST_IN_RING: u64 = 1 << 20;

/// Measures one direction of a link. Time is told to it.
#[derive(Debug, Default)]
pub(super) struct Meter {
    round_trip: Option<Duration>,
    bytes_per_second: Option<f64>,
    confirmed_bytes: u64,
    /// Since when the link has had work without a pause, and what was confirmed
    /// since.
    busy: Option<Busy>,
}

/// The time in which a link has work without a pause.
#[derive(Debug)]
struct Busy {
    /// Since when, or since when the rate was last taken.
    since: Instant,
    /// What was confirmed since.
    bytes: u64,
    /// Nothing was confirmed yet of what was sent first.
    is_new: bool,
}

impl Meter {
    /// A question and its answer took this long.
    pub(super) fn answered(&mut self, after: Duration) {
        self.round_trip = Some(self.round_trip.map_or(after, |before| before.min(after)));
    }

    /// There is something on the way.
    pub(super) fn sent(&mut self, now: Instant) {
        self.busy.get_or_insert(Busy {
            since: now,
            bytes: 0,
            is_new: true,
        });
    }

    /// What is on the way stays there until there is another connection.
    pub(super) fn pause(&mut self) {
        self.busy = None;
    }

    /// `bytes` were confirmed; nothing else is on the way if the link is `idle`. What is
    /// confirmed last says nothing of the rate: it may have waited for a frame to ride on.
    pub(super) fn confirmed(&mut self, bytes: u64, idle: bool, now: Instant) {
        self.confirmed_bytes = self.confirmed_bytes.saturating_add(bytes);
        let Some(busy) = &mut self.busy else {
            return;
        };
        busy.bytes += bytes;
        let span = now.saturating_duration_since(busy.since);
        let is_answer = std::mem::take(&mut busy.is_new);
        if !idle && span >= SPAN && busy.bytes >= LEAST_BYTES {
            let rate = busy.bytes as f64 / span.as_secs_f64();
            let before = self.bytes_per_second.unwrap_or(rate);
            self.bytes_per_second = Some(0.75 * before + 0.25 * rate);
            (busy.since, busy.bytes) = (now, 0);
        }
        if idle {
            self.busy = None;
        }
        if is_answer {
            // A host that was busy as the link was made answered late then.
            self.answered(span);
        }
    }

    /// The shortest round trip.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        self.round_trip
    }

    /// Bytes that fill the link for a round trip, once both are known: with fewer
    /// begun together the link would fall idle between buckets, and more would
    /// only begin later.
    pub(super) fn bucket_bytes(&self) -> Option<usize> {
        let bytes = self.bytes_per_second? * self.round_trip?.as_secs_f64();
        Some(bytes.clamp(SMALLEST_BUCKET, LARGEST_BUCKET) as usize)
    }
}

impl Meter {
    /// Bytes of which none were confirmed that a new link may have at most, if it has a
    /// bound, beside so many `links` that begin with it.
    pub(super) fn first_flight_bytes(&self, links: usize) -> Option<usize> {
        let is_new = self.confirmed_bytes < LEAST_BYTES;
        is_new.then_some(LEAST_FLIGHT.max(FIRST_FLIGHT_BYTES / links.max(1)))
    }

    /// Bytes to which a connection's flight is to be bounded, if it is, which has so
    /// many `links` beside it: where all of them carry no more in a round trip, by far.
    /// Elsewhere the system knows better.
    ///
    /// What is more would stand in a queue before the slowest place of the way, in
    /// which who has most gets most, and what overflows is lost. Connections of an
    /// exchange should get the same, as it is over when the last is. So one that is
    /// `lead_bytes` ahead gets less of such queues, wherever they are, and one that lags
    /// behind gets more.
    pub(super) fn flight_bytes(&self, links: usize, lead_bytes: i64) -> Option<usize> {
        let carried = self.bytes_per_second? * self.round_trip?.as_secs_f64() * links as f64;
        let is_near = carried <= FLIGHT_BYTES as f64;
        let share = LEAST_FLIGHT.max(FLIGHT_BYTES / links.max(1));
        let [least, most] = FLIGHT_RANGE;
        let weight = (1.0 - lead_bytes as f64 / LAG_BYTES).clamp(least, most);
        is_near.then_some((share as f64 * weight) as usize)
    }
}

/// Measures what a worker sends over all links of a lease together.
#[derive(Debug, Default)]
pub(crate) struct Egress {
    meter: Meter,
    /// Links with something on the way.
    busy: usize,
}

impl Egress {
    /// There is something on the way over a link that had nothing.
    pub(super) fn sent(&mut self, now: Instant) {
        self.busy += 1;
        self.meter.sent(now);
    }

    /// A link with something on the way was lost: it takes no part until it is heard of.
    pub(super) fn pause(&mut self) {
        self.busy = self.busy.saturating_sub(1);
        self.meter.pause();
    }

    /// `bytes` were confirmed on a link; it has nothing on the way now if that `ends`.
    pub(super) fn confirmed(&mut self, bytes: u64, ends: bool, now: Instant) {
        self.busy = self.busy.saturating_sub(usize::from(ends));
        self.meter.confirmed(bytes, self.busy == 0, now);
    }

    /// Bytes of a slice from which on slices better travel one after the other, if they
    /// do, where a round trip takes so long: each is to be under way for longer than what
    /// it takes the next to come.
    pub(super) fn ring_bytes(&self, round_trip: Duration) -> Option<u64> {
        let rate = self.meter.bytes_per_second?;
        let carried = rate * round_trip.as_secs_f64();
        (rate <= CONNECTION_RATE).then(|| LEAST_IN_RING.max(2 * carried as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_is_what_fills_the_link_for_a_round_trip() {
        let (mut meter, start) = (Meter::default(), Instant::now());
        meter.answered(Duration::from_millis(30));
        meter.answered(Duration::from_millis(20));
        meter.answered(Duration::from_millis(90));
        assert_eq!(meter.bucket_bytes(), None);
        meter.sent(start);
        // 10 MB in 100 ms, told of in two parts.
        meter.confirmed(3_000_000, false, start + Duration::from_millis(30));
        assert_eq!(meter.bucket_bytes(), None, "too few bytes to tell");
        meter.confirmed(7_000_000, false, start + Duration::from_millis(100));
        meter.confirmed(1, true, start + Duration::from_millis(200));
        assert_eq!(meter.bucket_bytes(), Some(2_000_000));
        // What is confirmed after a pause says nothing of the pause, but of the way.
        let later = start + Duration::from_secs(9);
        meter.sent(later);
        meter.confirmed(10_000_000, false, later + Duration::from_millis(100));
        meter.confirmed(1, true, later + Duration::from_millis(100));
        assert_eq!(meter.bucket_bytes(), Some(2_000_000));
        meter.sent(later);
        meter.confirmed(100, false, later + Duration::from_millis(10));
        meter.confirmed(100, true, later + Duration::from_millis(11));
        assert_eq!(meter.bucket_bytes(), Some(1_000_000));
    }

    #[test]
    fn a_new_link_begins_gently() {
        let mut meter = Meter::default();
        assert_eq!(meter.first_flight_bytes(1), Some(1 << 20));
        assert_eq!(meter.first_flight_bytes(4), Some(256 << 10));
        assert_eq!(meter.first_flight_bytes(63), Some(64 << 10));
        meter.confirmed(LEAST_BYTES - 1, true, Instant::now());
        assert_eq!(meter.first_flight_bytes(4), Some(256 << 10));
        meter.confirmed(1, true, Instant::now());
        assert_eq!(meter.first_flight_bytes(4), None);
    }

    #[test]
    fn a_bucket_has_bounds() {
        let (mut meter, start) = (Meter::default(), Instant::now());
        meter.answered(Duration::from_micros(10));
        meter.sent(start);
        meter.confirmed(100_000_000, false, start + Duration::from_secs(1));
        assert_eq!(meter.bucket_bytes(), Some(256 << 10));
        meter.round_trip = Some(Duration::from_secs(2));
        assert_eq!(meter.bucket_bytes(), Some(32 << 20));
    }

    #[test]
    fn large_slices_go_round_a_ring_where_one_link_carries_as_much_as_all() {
        let (mut egress, start) = (Egress::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let rtt = Duration::from_millis(1);
        assert_eq!(egress.ring_bytes(rtt), None, "nothing is known");
        // Two links, 20 MB in 100 ms.
        egress.sent(at(0));
        egress.sent(at(0));
        egress.confirmed(2_000_000, true, at(50));
        egress.confirmed(18_000_000, false, at(100));
        egress.confirmed(1, true, at(120));
        assert_eq!(egress.ring_bytes(rtt), Some(1 << 20));
        assert_eq!(egress.ring_bytes(20 * rtt), Some(8_000_000));
        // A pause says nothing, and much in little time that there are several links.
        for _ in 0..8 {
            egress.sent(at(5000));
            egress.confirmed(50_000_000, false, at(5100));
            egress.confirmed(1, true, at(5100));
        }
        assert_eq!(egress.ring_bytes(rtt), None);
    }

    #[test]
    fn what_is_on_the_way_is_bounded_where_little_is_carried() {
        let (mut meter, start) = (Meter::default(), Instant::now());
        meter.answered(Duration::from_millis(10));
        assert_eq!(meter.flight_bytes(1, 0), None);
        meter.sent(start);
        meter.confirmed(100_000_000, false, start + Duration::from_secs(1));
        assert_eq!(
            meter.flight_bytes(1, 0),
            None,
            "1 MB are carried in a round trip"
        );
        meter.round_trip = Some(Duration::from_millis(1));
        assert_eq!(meter.flight_bytes(1, 0), Some(512 << 10));
        assert_eq!(meter.flight_bytes(4, 0), Some(128 << 10));
        assert_eq!(
            meter.flight_bytes(6, 0),
            None,
            "600 kB are, by all together"
        );
        meter.round_trip = Some(Duration::from_micros(10));
        assert_eq!(meter.flight_bytes(63, 0), Some(64 << 10));
        // Who is ahead gets less, and who is behind gets more.
        let weighted = |lead: i64| meter.flight_bytes(4, lead << 10).unwrap() >> 10;
        assert_eq!(
            [-9999, -384, -128, 0, 64, 96, 9999].map(weighted),
            [256, 256, 256, 128, 64, 32, 32]
        );
    }
}
