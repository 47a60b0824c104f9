//! Measures the round trip and the rate of links, and derives how much to send at
//! once.

use std::time::{Duration, Instant};

/// Shortest time over which a rate is measured: several times the error of a timer
/// or a scheduler.
const MIN_RATE_SPAN: Duration = Duration::from_millis(20);

/// Fewest bytes over which a rate is measured, as fewer fit into buffers on the path.
const MIN_RATE_BYTES: u64 = 4 << 20;

/// Bounds of a bucket, the all-reduces that are started together. In smaller ones the fixed
/// cost of an exchange shows; larger ones would leave nothing to overlap with.
const MIN_BUCKET_BYTES: f64 = (256 << 10) as f64;
const MAX_BUCKET_BYTES: f64 = (32 << 20) as f64;

/// Bytes that a worker may have in flight to all others together where the round trip
/// is short: what 1 Gbit/s carries in 4 ms, within which the writers of a busy host get
/// to run.
const MAX_FLIGHT_BYTES: usize = 512 << 10;

/// Minimum in-flight limit of a connection that is neither ahead nor behind, however many
/// connections share the bound.
const MIN_FLIGHT_BYTES: usize = 64 << 10;

/// A connection that is so many bytes behind the others may have twice as much in
/// flight, and one that is half as many bytes ahead may have half as much. A single
/// piece exceeds this, so the limit changes at once.
const LAG_BYTES: f64 = (128 << 10) as f64;

/// Factors on a connection's bytes in flight: the least if it is ahead, the most if it
/// is behind.
const FLIGHT_RANGE: [f64; 2] = [0.25, 2.0];

/// Bytes that a worker may have in flight to all others together before the links were
/// measured. Without this bound, new connections would flood the links together, and
/// other traffic such as heartbeats would be lost too.
const INITIAL_FLIGHT_BYTES: usize = 1 << 20;

/// Bytes per second that one connection carries on any hosts. A faster link may need
/// several connections, on several cores each.
const CONNECTION_RATE: f64 = 400e6;

/// The smallest slice, in bytes, that ever goes round a ring: smaller ones are not
/// worth its messages.
const MIN_RING_SLICE_BYTES: u64 = 1 << 20;

/// Measures one direction of a link. Callers pass the time in.
#[derive(Debug, Default)]
pub(super) struct Meter {
    round_trip: Option<Duration>,
    bytes_per_second: Option<f64>,
    confirmed_bytes: u64,
    /// Set while bytes are in flight.
    busy: Option<BusyPeriod>,
}

/// A period in which a link has bytes in flight without a pause.
#[derive(Debug)]
struct BusyPeriod {
    /// When the period began, or when the rate was last measured in it.
    since: Instant,
    /// Bytes confirmed since then.
    bytes: u64,
    /// No byte of the period has been confirmed yet.
    is_new: bool,
}

impl Meter {
    /// Records a round trip.
    pub(super) fn record_round_trip(&mut self, after: Duration) {
        self.round_trip = Some(self.round_trip.map_or(after, |before| before.min(after)));
    }

    /// Records that bytes are in flight.
    pub(super) fn sent(&mut self, now: Instant) {
        self.busy.get_or_insert(BusyPeriod {
            since: now,
            bytes: 0,
            is_new: true,
        });
    }

    /// Records that the connection was lost: nothing is confirmed until the next one.
    pub(super) fn pause(&mut self) {
        self.busy = None;
    }

    /// Records that `bytes` were confirmed. If the link is now `idle`, no bytes are in
    /// flight any more. The last confirmation of a period is not used for the rate, as it
    /// may have been delayed until there was a frame to carry it.
    pub(super) fn confirmed(&mut self, bytes: u64, idle: bool, now: Instant) {
        self.confirmed_bytes = self.confirmed_bytes.saturating_add(bytes);
        let Some(busy) = &mut self.busy else {
            return;
        };
        busy.bytes += bytes;
        let span = now.saturating_duration_since(busy.since);
        let is_first = std::mem::take(&mut busy.is_new);
        if !idle && span >= MIN_RATE_SPAN && busy.bytes >= MIN_RATE_BYTES {
            let rate = busy.bytes as f64 / span.as_secs_f64();
            let before = self.bytes_per_second.unwrap_or(rate);
            self.bytes_per_second = Some(0.75 * before + 0.25 * rate);
            (busy.since, busy.bytes) = (now, 0);
        }
        if idle {
            self.busy = None;
        }
        if is_first {
            // If the host was busy when the link was made, the round trip measured
            // then was too long.
            self.record_round_trip(span);
        }
    }

    /// Returns the shortest round trip measured.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        self.round_trip
    }

    /// Returns the bytes that fill the link for one round trip, once its rate and round
    /// trip are known. With smaller buckets the link would fall idle between them; larger
    /// ones would only start later.
    pub(super) fn bucket_bytes(&self) -> Option<usize> {
        let bytes = self.bytes_per_second? * self.round_trip?.as_secs_f64();
        Some(bytes.clamp(MIN_BUCKET_BYTES, MAX_BUCKET_BYTES) as usize)
    }
}

impl Meter {
    /// Returns how many unconfirmed bytes a new link may have in flight, where `links` new
    /// links share the bound; `None` once enough bytes were confirmed.
    pub(super) fn initial_flight_bytes(&self, links: usize) -> Option<usize> {
        let is_new = self.confirmed_bytes < MIN_RATE_BYTES;
        is_new.then_some(MIN_FLIGHT_BYTES.max(INITIAL_FLIGHT_BYTES / links.max(1)))
    }

    /// Returns the in-flight limit in bytes for one of `links` connections, or `None` to
    /// leave it to the kernel. There is a limit where all connections together carry at
    /// most [`MAX_FLIGHT_BYTES`] in a round trip.
    ///
    /// More bytes would stand in a queue before the bottleneck of the path, where the
    /// connection with the most bytes gets the most bandwidth, and overflow is lost. But
    /// the connections of an exchange should get the same, as the exchange ends with the
    /// last of them. So a connection that is `lead_bytes` ahead gets less of such queues,
    /// and one that is behind gets more.
    pub(super) fn flight_bytes(&self, links: usize, lead_bytes: i64) -> Option<usize> {
        let carried = self.bytes_per_second? * self.round_trip?.as_secs_f64() * links as f64;
        let is_near = carried <= MAX_FLIGHT_BYTES as f64;
        let share = MIN_FLIGHT_BYTES.max(MAX_FLIGHT_BYTES / links.max(1));
        let [least, most] = FLIGHT_RANGE;
        let weight = (1.0 - lead_bytes as f64 / LAG_BYTES).clamp(least, most);
        is_near.then_some((share as f64 * weight) as usize)
    }
}

/// Measures what a worker sends over all links of a lease together.
#[derive(Debug, Default)]
pub(crate) struct Egress {
    meter: Meter,
    /// Number of links with bytes in flight.
    busy: usize,
}

impl Egress {
    /// Records that bytes are in flight on a link that had none.
    pub(super) fn sent(&mut self, now: Instant) {
        self.busy += 1;
        self.meter.sent(now);
    }

    /// Records that a link with bytes in flight was lost. It does not count until it is
    /// back.
    pub(super) fn pause(&mut self) {
        self.busy = self.busy.saturating_sub(1);
        self.meter.pause();
    }

    /// Records that `bytes` were confirmed on a link. If this `ends` the link's busy
    /// period, it has no bytes in flight any more.
    pub(super) fn confirmed(&mut self, bytes: u64, ends: bool, now: Instant) {
        self.busy = self.busy.saturating_sub(usize::from(ends));
        self.meter.confirmed(bytes, self.busy == 0, now);
    }

    /// Returns the smallest slice, in bytes, for which a ring pays, given the round trip.
    /// `None` if the rate is not known yet, or is more than one connection is sure to
    /// carry. Sending a slice must take two round trips, so that the next one arrives
    /// meanwhile.
    pub(super) fn ring_bytes(&self, round_trip: Duration) -> Option<u64> {
        let rate = self.meter.bytes_per_second?;
        let carried = rate * round_trip.as_secs_f64();
        (rate <= CONNECTION_RATE).then(|| MIN_RING_SLICE_BYTES.max(2 * carried as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_is_the_bandwidth_delay_product() {
        let (mut meter, start) = (Meter::default(), Instant::now());
        meter.record_round_trip(Duration::from_millis(30));
        meter.record_round_trip(Duration::from_millis(20));
        meter.record_round_trip(Duration::from_millis(90));
        assert_eq!(meter.bucket_bytes(), None);
        meter.sent(start);
        // 10 MB in 100 ms, confirmed in two parts.
        meter.confirmed(3_000_000, false, start + Duration::from_millis(30));
        assert_eq!(meter.bucket_bytes(), None, "too few bytes for a rate");
        meter.confirmed(7_000_000, false, start + Duration::from_millis(100));
        meter.confirmed(1, true, start + Duration::from_millis(200));
        assert_eq!(meter.bucket_bytes(), Some(2_000_000));
        // The pause before these bytes does not count, but their round trip does.
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
    fn new_link_starts_with_a_small_bucket() {
        let mut meter = Meter::default();
        assert_eq!(meter.initial_flight_bytes(1), Some(1 << 20));
        assert_eq!(meter.initial_flight_bytes(4), Some(256 << 10));
        assert_eq!(meter.initial_flight_bytes(63), Some(64 << 10));
        meter.confirmed(MIN_RATE_BYTES - 1, true, Instant::now());
        assert_eq!(meter.initial_flight_bytes(4), Some(256 << 10));
        meter.confirmed(1, true, Instant::now());
        assert_eq!(meter.initial_flight_bytes(4), None);
    }

    #[test]
    fn bucket_size_is_bounded() {
        let (mut meter, start) = (Meter::default(), Instant::now());
        meter.record_round_trip(Duration::from_micros(10));
        meter.sent(start);
        meter.confirmed(100_000_000, false, start + Duration::from_secs(1));
        assert_eq!(meter.bucket_bytes(), Some(256 << 10));
        meter.round_trip = Some(Duration::from_secs(2));
        assert_eq!(meter.bucket_bytes(), Some(32 << 20));
    }

    #[test]
    fn ring_is_used_for_large_slices_on_a_shared_bottleneck() {
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
        // The pause does not count. The higher rate is more than one connection
        // is sure to carry.
        for _ in 0..8 {
            egress.sent(at(5000));
            egress.confirmed(50_000_000, false, at(5100));
            egress.confirmed(1, true, at(5100));
        }
        assert_eq!(egress.ring_bytes(rtt), None);
    }

    #[test]
    fn bytes_in_flight_are_bounded_on_slow_links() {
        let (mut meter, start) = (Meter::default(), Instant::now());
        meter.record_round_trip(Duration::from_millis(10));
        assert_eq!(meter.flight_bytes(1, 0), None);
        meter.sent(start);
        meter.confirmed(100_000_000, false, start + Duration::from_secs(1));
        assert_eq!(
            meter.flight_bytes(1, 0),
            None,
            "1 MB is carried in a round trip"
        );
        meter.round_trip = Some(Duration::from_millis(1));
        assert_eq!(meter.flight_bytes(1, 0), Some(512 << 10));
        assert_eq!(meter.flight_bytes(4, 0), Some(128 << 10));
        assert_eq!(
            meter.flight_bytes(6, 0),
            None,
            "600 kB are carried by all together"
        );
        meter.round_trip = Some(Duration::from_micros(10));
        assert_eq!(meter.flight_bytes(63, 0), Some(64 << 10));
        // A connection that is ahead gets less, and one that is behind gets more.
        let weighted = |lead: i64| meter.flight_bytes(4, lead << 10).unwrap() >> 10;
        assert_eq!(
            [-9999, -384, -128, 0, 64, 96, 9999].map(weighted),
            [256, 256, 256, 128, 64, 32, 32]
        );
    }
}
