//! Random leases that share a device, in virtual time, against the bounds of fairness.

use super::*;

/// A lease of the simulation.
#[derive(Debug, Clone)]
struct Program {
    weight: u32,
    /// When it has work for the first time, and from then on.
    begins: Duration,
    /// It has no work from the first time to the second one.
    idle: Option<(Duration, Duration)>,
    /// How much later it returns each turn than it is to, in turn.
    overruns: Vec<Duration>,
    /// How long after a return it requests the next turn.
    gap: Duration,
}

impl Program {
    /// Returns from when on the program has work, at a time or later.
    fn has_work_at(&self, time: Duration) -> Duration {
        match self.idle {
            Some((from, to)) if time >= from => time.max(to),
            _ => time,
        }
    }

    /// Returns by how much the lease can be ahead of another one, in virtual time.
    fn lead_ns(&self, programs: &[Self]) -> u128 {
        let longest = |program: &Self| program.overruns.iter().max().copied();
        let overrun = longest(self).unwrap_or_default();
        // Another lease is not known to wait during its gap.
        let gap = programs.iter().map(|program| program.gap).max();
        virtual_ns_of(MIN_TURN + overrun + gap.unwrap_or_default(), self.weight)
    }
}

/// A device and the programs that use it.
struct Simulation<'a> {
    programs: &'a [Program],
    turns: Turns,
    start: Instant,
    now: Duration,
    holder: Option<(usize, Duration)>,
    /// When programs request or return a turn.
    requests: BTreeMap<usize, Duration>,
    returns: BTreeMap<usize, Duration>,
    /// The time that each has had the device, without the turn that it has.
    had: Vec<Duration>,
    turn_counts: Vec<usize>,
}

impl<'a> Simulation<'a> {
    fn new(programs: &'a [Program]) -> Self {
        let begin = |(index, program): (usize, &Program)| (index, program.begins);
        Self {
            programs,
            turns: Turns::new(TIMEOUT),
            start: Instant::now(),
            now: Duration::ZERO,
            holder: None,
            requests: programs.iter().enumerate().map(begin).collect(),
            returns: BTreeMap::new(),
            had: vec![Duration::ZERO; programs.len()],
            turn_counts: vec![0; programs.len()],
        }
    }

    /// Goes on to the next event. Returns false if there is none until `end`.
    fn step(&mut self, end: Duration) -> bool {
        let deadline = self.turns.next_deadline();
        let deadline = deadline.map(|at| at.duration_since(self.start));
        let events = self.requests.values().chain(self.returns.values());
        let next = events.copied().chain(deadline).min();
        let Some(next) = next.filter(|next| *next <= end) else {
            self.now = end;
            return false;
        };
        self.now = next;
        let now = self.start + next;
        let due = |(index, at): (&usize, &Duration)| (*at <= next).then_some(*index);
        let actions = if let Some(index) = self.returns.iter().find_map(due) {
            self.returns.remove(&index);
            let (_, since) = self.holder.take().expect("it has the turn");
            self.had[index] += next - since;
            let program = &self.programs[index];
            let again = program.has_work_at(next + program.gap);
            self.requests.insert(index, again);
            self.turns.returned(now, LeaseId(index as u64), 0)
        } else if let Some(index) = self.requests.iter().find_map(due) {
            self.requests.remove(&index);
            let weight = self.programs[index].weight;
            self.turns.request(now, LeaseId(index as u64), 0, weight)
        } else {
            self.turns.tick(now)
        };
        actions.iter().for_each(|action| self.apply(*action));
        true
    }

    fn apply(&mut self, action: TurnAction) {
        let index = action.lease().0 as usize;
        match action {
            Grant(..) => {
                assert_eq!(self.holder, None);
                self.holder = Some((index, self.now));
            }
            // It returns the turn when it has no work, if that comes before the turn is revoked.
            Want(..) => {
                let idle = self.programs[index].idle;
                let idle = idle.filter(|(_, to)| self.now < *to);
                if let Some((from, _)) = idle {
                    self.returns.insert(index, from.max(self.now));
                }
            }
            Revoke(..) => {
                let overruns = &self.programs[index].overruns;
                let overrun = overruns[self.turn_counts[index] % overruns.len()];
                self.turn_counts[index] += 1;
                let at = self.returns.get(&index).copied();
                let late = self.now + overrun;
                self.returns.insert(index, at.unwrap_or(late).min(late));
            }
            Kill(..) => panic!("every turn is returned"),
        }
    }

    fn had(&self, index: usize) -> Duration {
        let turn = self.holder.filter(|(holder, _)| *holder == index);
        let turn = turn.map_or(Duration::ZERO, |(_, since)| self.now - since);
        self.had[index] + turn
    }

    fn virtual_had_ns(&self, index: usize) -> u128 {
        virtual_ns_of(self.had(index), self.programs[index].weight)
    }

    /// Checks that, since each of two leases had been given `before`, neither has got further ahead
    /// of the other than `bound_ns`.
    fn check(
        &self,
        before: &[u128],
        bound_ns: impl Fn(usize, usize) -> u128,
    ) -> Result<(), TestCaseError> {
        for i in 0..before.len() {
            for j in 0..before.len() {
                let since = |index| self.virtual_had_ns(index) - before[index];
                let (ahead, behind) = (since(i), since(j));
                // Times are rounded down to nanoseconds with each turn.
                let bound = bound_ns(i, j) + self.had.len() as u128 * 100_000;
                prop_assert!(
                    ahead <= behind + bound,
                    "{i} is {} ns ahead of {j}, the bound is {bound} ns: {:?}",
                    ahead - behind,
                    self.programs
                );
            }
        }
        Ok(())
    }
}

fn program() -> impl Strategy<Value = Program> {
    let overruns = prop::collection::vec((0..20_000_u64).prop_map(Duration::from_micros), 1..5);
    let gap = (0..1000_u64).prop_map(Duration::from_micros);
    (10..=400_u32, overruns, gap).prop_map(|(weight, overruns, gap)| Program {
        weight,
        begins: Duration::ZERO,
        idle: None,
        overruns,
        gap,
    })
}

fn programs() -> impl Strategy<Value = Vec<Program>> {
    prop::collection::vec(program(), 2..6)
}

/// How long a simulation is.
const END: Duration = Duration::from_secs(5);

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Between any two leases that always have work, the times divided by the weights differ by no
    /// more than the shortest turn and the longest delay, divided by the weight of the one ahead.
    #[test]
    fn leases_with_work_have_times_by_weight(programs in programs()) {
        let mut simulation = Simulation::new(&programs);
        let before = vec![0; programs.len()];
        while simulation.step(END) {
            simulation.check(&before, |ahead, _| programs[ahead].lead_ns(&programs))?;
        }
        // The device was never idle.
        let had: Duration = (0..programs.len()).map(|index| simulation.had(index)).sum();
        prop_assert_eq!(had, END);
    }

    /// So it is with leases that come at any time, from when the last one has come on: then, and
    /// while they came, one could be ahead, and each may have got the credit.
    #[test]
    fn leases_that_come_later_have_times_by_weight(
        mut programs in programs(),
        begins in prop::collection::vec(0..2000_u64, 6),
    ) {
        for (program, begins) in programs.iter_mut().zip(&begins) {
            program.begins = ms(*begins);
        }
        let last = programs.iter().map(|program| program.begins).max().unwrap();
        let lightest = programs.iter().map(|program| program.weight).min().unwrap();
        let mut simulation = Simulation::new(&programs);
        while simulation.step(last) {}
        let before: Vec<_> = (0..programs.len()).map(|it| simulation.virtual_had_ns(it)).collect();
        let credit = virtual_ns_of(CREDIT, lightest);
        while simulation.step(END) {
            simulation.check(&before, |ahead, behind| {
                let leads = [ahead, behind].map(|index| programs[index].lead_ns(&programs));
                2 * (leads[0] + leads[1]) + 3 * credit
            })?;
        }
    }

    /// A lease that had no work for a while gets its share from when it is back on, but for what it
    /// and another lease could be ahead.
    #[test]
    fn a_lease_that_comes_back_gets_its_share(
        mut programs in programs(),
        from in 0..1000_u64,
        length in 1..2000_u64,
    ) {
        let back = ms(from + length);
        programs[0].idle = Some((ms(from), back));
        let mut simulation = Simulation::new(&programs);
        while simulation.step(back) {}
        let before = simulation.had(0);
        let weights: u32 = programs.iter().map(|program| program.weight).sum();
        let leads = programs.iter().map(|program| program.lead_ns(&programs));
        let most_behind = time_of(2 * leads.max().unwrap(), programs[0].weight);
        while simulation.step(END) {
            let share = (simulation.now - back) * programs[0].weight / weights;
            let had = simulation.had(0) - before;
            prop_assert!(had + most_behind >= share, "{had:?} of {share:?}: {programs:?}");
        }
    }

    /// A lease gets the whole device while no other one has work, and nobody demands it back.
    #[test]
    fn a_lease_alone_has_everything(weight in 1..=1000_u32, waits in prop::collection::vec(0..1_000_000_u64, 1..50)) {
        let (mut turns, mut now) = (Turns::new(TIMEOUT), Instant::now());
        turns.request(now, B, 0, 1000);
        turns.returned(now, B, 0);
        prop_assert_eq!(turns.request(now, A, 0, weight), [Grant(A, 0)]);
        for wait in waits {
            now += Duration::from_micros(wait);
            prop_assert_eq!(turns.next_deadline(), None);
            prop_assert_eq!(turns.tick(now), []);
            prop_assert_eq!(turns.request(now, A, 0, weight), []);
        }
    }
}
