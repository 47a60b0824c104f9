//! A lease on several workers, driven by events whose commands a test does not list.

use super::durable::*;
use super::*;

/// A lease with one device of each of the first workers, which have its snapshots and so do their keepers; the others
/// are free.
pub(super) struct Scene {
    pub(super) engine: Engine,
    now: u64,
    workers: u64,
}

impl Scene {
    pub(super) fn new(workers: u64, devices: u32) -> Self {
        let mut scene = Self {
            engine: Engine::new(Options::default(), TERM, at(0)),
            now: 0,
            workers,
        };
        for worker in 1..=workers {
            scene.send(join(worker, &[exact(16)]));
        }
        scene.send(attach(1));
        scene.send(request_durable_of(devices, 1, 1));
        scene.send(restorable(1, 10, true));
        scene.settle();
        assert_eq!(scene.places(), (1..=u64::from(devices)).collect::<Vec<_>>());
        scene
    }

    pub(super) fn send(&mut self, event: Event) {
        let event = with_assignments(&self.engine, event);
        self.engine.handle(event, at(self.now));
    }

    /// Has all workers release what they end, and send and report snapshots.
    pub(super) fn settle(&mut self) {
        for _ in 0..4 {
            for id in 1..=self.workers {
                self.send(released(id, 10));
            }
            let lease = self.engine.leases().get(LeaseId(10)).unwrap();
            let keepers = lease.keepers.iter();
            let kept = keepers.map(|(source, keeper)| {
                let (source, part) = (source.0, keeper.part);
                let kept = [(10, part, keeper.worker.0), (10, part, source)];
                kept_parts(source, &kept)
            });
            for kept in kept.collect::<Vec<_>>() {
                self.send(kept);
            }
        }
    }

    /// Sends these reports each second for 10 s, and lets the workers settle.
    pub(super) fn report(&mut self, reports: &[fn() -> Event]) {
        for _ in 0..=10 {
            self.now += 1_000;
            reports.iter().for_each(|report| self.send(report()));
        }
        self.settle();
    }

    /// Lets time pass.
    pub(super) fn wait(&mut self, millis: u64) {
        let until = self.now + millis;
        while let Some(next) = self.engine.next_deadline().filter(|it| *it <= at(until)) {
            self.now = self.now.max(next.as_millis());
            self.send(Event::Tick);
        }
        self.now = until;
        self.settle();
    }

    /// Asserts that the lease runs, and not at this worker.
    pub(super) fn check_left(&self, worker: u64) {
        let places = self.places();
        assert!(
            !places.is_empty() && !places.contains(&worker),
            "{places:?}"
        );
    }

    /// Returns the workers at which the lease is; none if it waits.
    pub(super) fn places(&self) -> Vec<u64> {
        let lease = self.engine.leases().get(LeaseId(10)).unwrap();
        lease.workers().into_iter().map(|it| it.0).collect()
    }
}
