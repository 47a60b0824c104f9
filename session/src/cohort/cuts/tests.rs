use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const BOTH: [u32; 2] = [0, 1];

fn interval(_: MarkCost) -> Duration {
    Duration::from_secs(2)
}

/// Returns the cuts of two sessions, in a process of epoch 0.
fn two(now: Instant) -> Cuts {
    let mut cuts = Cuts::new(2);
    cuts.opened(0, 0);
    assert!(!cuts.begin_if_due(now, interval), "rank 1 is not open");
    cuts.opened(1, 0);
    cuts
}

/// Begins a cut at which both sessions are at once, and has them place their marks. Returns its number.
fn place_both(cuts: &mut Cuts, now: Instant) -> u64 {
    assert!(cuts.begin_if_due(now, interval));
    let number = cuts.place_mark(0, now).unwrap();
    assert_eq!(cuts.place_mark(1, now), Some(number));
    number
}

/// Commits a cut at which both sessions are at once.
fn commit(cuts: &mut Cuts, now: Instant) -> u64 {
    let number = place_both(cuts, now);
    answer(cuts, 0, number);
    assert_ne!(cuts.committed(), Some(number));
    answer(cuts, 1, number);
    assert_eq!(cuts.committed(), Some(number));
    number
}

#[test]
fn cut_is_committed_when_all_sessions_are_ready() {
    let now = Instant::now();
    let mut cuts = two(now);
    assert_eq!(commit(&mut cuts, now), 1);
    assert!(!cuts.begin_if_due(now + Duration::from_secs(1), interval));
    assert_eq!(commit(&mut cuts, now + Duration::from_secs(2)), 2);
}

#[test]
fn cut_that_sessions_do_not_reach_is_reported() {
    let now = Instant::now();
    let mut cuts = two(now);
    commit(&mut cuts, now);
    let began = now + Duration::from_secs(2);
    assert!(cuts.begin_if_due(began, interval));
    // One session places a mark late, and the cut is dropped for another one.
    let placed = began + Duration::from_secs(5);
    let number = cuts.place_mark(0, placed).unwrap();
    answer(&mut cuts, 0, number);
    assert!(cuts.begin_if_due(placed + CUT_TIMEOUT, interval));
    let overdue = began + OVERDUE_AFTER;
    assert_eq!(cuts.take_overdue(overdue - Duration::from_millis(1)), None);
    assert_eq!(cuts.take_overdue(overdue), Some(began));
    assert_eq!(cuts.take_overdue(overdue), None, "it was reported");
    let later = overdue + REPORT_INTERVAL;
    assert_eq!(cuts.take_overdue(later), Some(began));
    // Both go on in another process; the time until then does not count.
    cuts.opened(0, 1);
    cuts.opened(1, 1);
    let again = later + REPORT_INTERVAL;
    assert!(!cuts.begin_if_due(again, interval));
    assert_eq!(cuts.take_overdue(again), None);
    assert_eq!(cuts.take_overdue(again + OVERDUE_AFTER), Some(again));
    let number = cuts.place_mark(0, again).unwrap();
    assert_eq!(cuts.place_mark(1, again), Some(number));
    answer(&mut cuts, 0, number);
    answer(&mut cuts, 1, number);
    assert_eq!(cuts.take_overdue(again + REPORT_INTERVAL), None);
}

#[test]
fn requested_cut_begins_at_once_and_again_if_it_is_dropped() {
    let now = Instant::now();
    let mut cuts = two(now);
    cuts.request();
    assert!(!cuts.awaits_requested(), "there is nothing to go on from");
    commit(&mut cuts, now);
    assert!(!cuts.begin_if_due(now, interval));
    cuts.request();
    let requested = place_both(&mut cuts, now);
    answer(&mut cuts, 0, requested);
    assert!(cuts.awaits_requested());
    answer(&mut cuts, 1, requested);
    assert!(!cuts.awaits_requested());
    assert!(
        !cuts.begin_if_due(now, interval),
        "the next one at its time"
    );

    // One session does not come to place its mark.
    cuts.request();
    assert!(cuts.begin_if_due(now, interval));
    let dropped = cuts.place_mark(0, now).unwrap();
    let late = now + CUT_TIMEOUT;
    cuts.answered(0, dropped, MarkCost::default(), true);
    assert!(cuts.begin_if_due(late, |_| Duration::MAX / 4));
    let number = cuts.place_mark(0, late).unwrap();
    assert_eq!(cuts.place_mark(1, late), Some(number));
    // The worker refuses a snapshot.
    cuts.answered(0, number, MarkCost::default(), false);
    assert!(!cuts.awaits_requested());
}

/// Records the worker's reply to a mark, and that all requests before it are answered.
fn answer(cuts: &mut Cuts, rank: u32, number: u64) {
    cuts.answered(rank, number, MarkCost::default(), true);
    cuts.ready(rank, number);
}

#[test]
fn marks_are_placed_when_the_sessions_are_level() {
    let now = Instant::now();
    let mut cuts = two(now);
    cuts.all_reduce(0, &BOTH);
    cuts.all_reduce(0, &BOTH);
    cuts.all_reduce(1, &BOTH);
    assert!(cuts.begin_if_due(now, interval));
    assert_eq!(cuts.place_mark(0, now), None, "it would wait for rank 1");
    assert_eq!(cuts.place_mark(1, now), None);
    // However long that takes: no mark is placed.
    let later = now + 10 * CUT_TIMEOUT;
    cuts.all_reduce(1, &BOTH);
    assert!(cuts.is_at_mark(0) && cuts.is_at_mark(1));
    assert_eq!(cuts.place_mark(1, later), Some(1));
    assert_eq!(cuts.place_mark(1, later), None, "it has placed its mark");
    cuts.all_reduce(1, &BOTH);
    assert_eq!(
        cuts.place_mark(0, later),
        Some(1),
        "rank 1 goes on meanwhile"
    );
    cuts.all_reduce(0, &BOTH);
    answer(&mut cuts, 0, 1);
    answer(&mut cuts, 1, 1);
    assert_eq!(cuts.committed(), Some(1));
}

#[test]
fn cut_to_which_a_session_does_not_come_is_dropped() {
    let now = Instant::now();
    let mut cuts = two(now);
    assert!(cuts.begin_if_due(now, interval));
    assert_eq!(cuts.place_mark(1, now), Some(1));
    assert_eq!(cuts.place_mark(0, now + CUT_TIMEOUT), None);
    let later = now + CUT_TIMEOUT;
    assert!(!cuts.begin_if_due(later, interval), "mark 1 is unanswered");
    answer(&mut cuts, 1, 1);
    assert!(cuts.begin_if_due(later, interval));
    assert_eq!(cuts.place_mark(0, later), Some(2));
}

#[test]
fn cost_of_a_mark_is_that_of_the_process() {
    let now = Instant::now();
    let mut cuts = two(now);
    let by_cost = |cost: MarkCost| cost.copying.max(Duration::from_secs(2));
    let number = place_both(&mut cuts, now);
    let slow = MarkCost {
        copying: Duration::from_secs(100),
        ..MarkCost::default()
    };
    for rank in BOTH {
        cuts.answered(rank, number, slow, true);
        cuts.ready(rank, number);
    }
    let soon = now + Duration::from_secs(2);
    assert!(!cuts.begin_if_due(soon, by_cost));
    cuts.opened(0, 1);
    cuts.opened(1, 1);
    assert!(cuts.begin_if_due(soon, by_cost));
}

#[test]
fn interval_follows_the_slowest_mark() {
    let now = Instant::now();
    let mut cuts = two(now);
    assert_eq!(place_both(&mut cuts, now), 1);
    let cost = |copying_s, sending_s| MarkCost {
        copying: Duration::from_secs(copying_s),
        sending: Duration::from_secs(sending_s),
    };
    cuts.answered(0, 1, cost(3, 4), true);
    cuts.answered(1, 1, cost(1, 9), true);
    cuts.ready(0, 1);
    cuts.ready(1, 1);
    assert_eq!(cuts.committed(), Some(1));
    let before = now + Duration::from_millis(2999);
    assert!(!cuts.begin_if_due(before, |cost| cost.copying));
    let at = now + Duration::from_secs(3);
    assert!(cuts.begin_if_due(at, |highest| {
        assert_eq!(highest, cost(3, 9));
        highest.copying
    }));
}

#[test]
fn both_parts_of_a_transfer_are_on_the_same_side() {
    let now = Instant::now();
    let mut cuts = two(now);
    cuts.transfer([1; 16]);
    assert!(cuts.begin_if_due(now, interval));
    assert_eq!(
        (cuts.place_mark(0, now), cuts.place_mark(1, now)),
        (None, None)
    );
    cuts.transfer([1; 16]);
    assert_eq!(cuts.place_mark(0, now), Some(1));
    // Rank 0 offers another one after its mark, which rank 1 takes after its own.
    cuts.transfer([2; 16]);
    assert_eq!(cuts.place_mark(1, now), Some(1));
    cuts.transfer([2; 16]);
    assert!(cuts.transfers.is_empty());
    answer(&mut cuts, 0, 1);
    answer(&mut cuts, 1, 1);
    assert_eq!(cuts.committed(), Some(1));
}

#[test]
fn nothing_is_committed_while_a_session_may_be_in_another_process() {
    let now = Instant::now();
    let mut cuts = two(now);
    assert_eq!(commit(&mut cuts, now), 1);
    let later = now + interval(MarkCost::default());
    assert_eq!(place_both(&mut cuts, later), 2);
    cuts.ready(1, 2);
    // The process dies. Rank 1 asks the next one to go on from cut 1, and then rank 0 receives what
    // the old process had sent.
    cuts.opening(1);
    cuts.ready(0, 2);
    assert_eq!(cuts.committed(), Some(1));
    cuts.opened(1, 1);
    assert_eq!(cuts.committed(), Some(1), "rank 0 is not there yet");
    cuts.opening(0);
    cuts.opened(0, 1);
    assert_eq!(
        cuts.committed(),
        Some(1),
        "the new process has not answered cut 2"
    );
    cuts.ready(0, 2);
    cuts.ready(1, 2);
    assert_eq!(cuts.committed(), Some(2));
}

#[test]
fn no_cut_begins_before_a_new_process_has_replied_to_marks_of_the_journal() {
    let now = Instant::now();
    let mut cuts = two(now);
    assert_eq!(commit(&mut cuts, now), 1);
    let later = now + interval(MarkCost::default());
    assert!(cuts.begin_if_due(later, interval));
    assert_eq!(cuts.place_mark(0, later), Some(2));
    assert!(cuts.has_one_mark());
    answer(&mut cuts, 0, 2);
    // Rank 1 does not come to its mark in time, and then the process dies.
    let later = later + CUT_TIMEOUT;
    let open = |cuts: &mut Cuts, rank| {
        cuts.opening(rank);
        cuts.opened(rank, 1);
    };
    (0..2).for_each(|rank| open(&mut cuts, rank));
    assert!(!cuts.begin_if_due(later, interval), "rank 0 has a mark");
    answer(&mut cuts, 0, 2);
    assert!(cuts.begin_if_due(later, interval));
}

#[test]
fn cut_is_committed_when_the_last_session_is_connected_again() {
    let now = Instant::now();
    let mut cuts = two(now);
    assert_eq!(place_both(&mut cuts, now), 1);
    cuts.opening(0);
    cuts.ready(0, 1);
    cuts.ready(1, 1);
    assert_eq!(cuts.committed(), None);
    cuts.opened(0, 0);
    assert_eq!(cuts.committed(), Some(1));
}

#[test]
fn refused_mark_drops_the_cut_and_a_lapsed_journal_also_the_committed_one() {
    let now = Instant::now();
    let mut cuts = two(now);
    assert_eq!(commit(&mut cuts, now), 1);
    let later = now + interval(MarkCost::default());
    assert!(cuts.begin_if_due(later, interval));
    cuts.answered(0, 1, MarkCost::default(), false);
    assert_eq!(cuts.place_mark(0, later), Some(2), "cut 1 is over");
    cuts.answered(0, 2, MarkCost::default(), false);
    assert_eq!(
        (cuts.place_mark(1, later), cuts.committed()),
        (None, Some(1))
    );
    cuts.lapsed();
    assert_eq!(cuts.committed(), None);
}

/// What a session has recorded.
#[derive(Debug, Clone, PartialEq)]
enum Recorded {
    AllReduce(usize),
    Transfer(u64),
    Mark(u64),
}

/// What happens next in a random run.
#[derive(Debug, Clone)]
enum Action {
    AllReduce(u32, usize),
    /// A session offers to another one, which takes later.
    Offer(u32, u32),
    /// The pending part of a transfer with this index is recorded.
    Take(usize),
    /// A session encodes what it has recorded.
    Encode(u32),
    Ready(u32),
    /// The process dies.
    Die,
    Open(u32),
    Pass(u64),
}

const RANKS: u32 = 3;

const GROUPS: [&[u32]; 3] = [&[0, 1, 2], &[0, 1], &[1, 2]];

fn action() -> impl Strategy<Value = Action> {
    let rank = 0..RANKS;
    prop_oneof![
        6 => (rank.clone(), 0..GROUPS.len()).prop_map(|(rank, group)| Action::AllReduce(rank, group)),
        2 => (rank.clone(), 1..RANKS).prop_map(|(from, by)| Action::Offer(from, (from + by) % RANKS)),
        3 => any::<usize>().prop_map(Action::Take),
        6 => rank.clone().prop_map(Action::Encode),
        6 => rank.clone().prop_map(Action::Ready),
        1 => Just(Action::Die),
        4 => rank.prop_map(Action::Open),
        3 => (0u64..1500).prop_map(Action::Pass),
    ]
}

/// Sessions that do what actions say.
struct World {
    cuts: Cuts,
    now: Instant,
    recorded: Vec<Vec<Recorded>>,
    /// Transfers of which the second part is missing: its session, and the number.
    half: Vec<(u32, u64)>,
    transfers: u64,
    epoch: u64,
    /// The epoch that each session is in.
    epochs: Vec<u64>,
    /// The cut from which the sessions in the present process go on.
    restored: Option<u64>,
    commits: BTreeSet<u64>,
}

impl World {
    fn new() -> Self {
        let mut cuts = Cuts::new(RANKS as usize);
        (0..RANKS).for_each(|rank| cuts.opened(rank, 0));
        Self {
            cuts,
            now: Instant::now(),
            recorded: vec![Vec::new(); RANKS as usize],
            half: Vec::new(),
            transfers: 0,
            epoch: 0,
            epochs: vec![0; RANKS as usize],
            restored: None,
            commits: BTreeSet::new(),
        }
    }

    fn record(&mut self, rank: u32, recorded: Recorded) {
        self.recorded[rank as usize].push(recorded);
    }

    fn mark(&mut self, rank: u32) {
        if let Some(number) = self.cuts.place_mark(rank, self.now) {
            self.record(rank, Recorded::Mark(number));
        }
    }

    fn transfer(&mut self, rank: u32, number: u64) {
        self.mark(rank);
        let mut capability = [0; 16];
        capability[..8].copy_from_slice(&number.to_le_bytes());
        self.cuts.transfer(capability);
        self.record(rank, Recorded::Transfer(number));
    }

    fn act(&mut self, action: &Action) {
        match *action {
            Action::AllReduce(rank, group) if GROUPS[group].contains(&rank) => {
                self.mark(rank);
                self.cuts.all_reduce(rank, GROUPS[group]);
                self.record(rank, Recorded::AllReduce(group));
            }
            Action::AllReduce(..) => {}
            Action::Offer(from, to) => {
                self.transfers += 1;
                self.transfer(from, self.transfers);
                self.half.push((to, self.transfers));
            }
            Action::Take(at) if !self.half.is_empty() => {
                let (rank, number) = self.half.swap_remove(at % self.half.len());
                self.transfer(rank, number);
            }
            Action::Take(_) => {}
            Action::Encode(rank) => {
                self.cuts.begin_if_due(self.now, interval);
                self.mark(rank);
            }
            Action::Ready(rank) => {
                let marks = self.recorded[rank as usize].iter().rev();
                let last = marks.filter_map(|it| match it {
                    Recorded::Mark(number) => Some(*number),
                    _ => None,
                });
                if let Some(number) = last.take(1).next() {
                    answer(&mut self.cuts, rank, number);
                }
            }
            Action::Die => (self.epoch, self.restored) = (self.epoch + 1, None),
            Action::Open(rank) => {
                let at = rank as usize;
                self.cuts.opening(rank);
                let committed = self.cuts.committed();
                if let (true, Some(committed)) = (self.epochs[at] != self.epoch, committed) {
                    let first = *self.restored.get_or_insert(committed);
                    assert_eq!(first, committed, "all go on from the same cut");
                    self.epochs[at] = self.epoch;
                }
                self.cuts.opened(rank, self.epochs[at]);
            }
            Action::Pass(ms) => self.now += Duration::from_millis(ms),
        }
        if let Some(committed) = self.cuts.committed()
            && self.commits.insert(committed)
        {
            self.check(committed);
        }
    }

    /// Checks that a committed cut splits no all-reduce and no transfer.
    fn check(&self, number: u64) {
        let mark = Recorded::Mark(number);
        let before = |rank: u32| {
            let recorded = &self.recorded[rank as usize];
            let at = recorded.iter().position(|it| *it == mark);
            let at = at.expect("each session has a mark of the cut");
            recorded[..at].iter()
        };
        for (index, group) in GROUPS.iter().enumerate() {
            let reduce = Recorded::AllReduce(index);
            let counts = group.iter();
            let counts = counts.map(|rank| before(*rank).filter(|it| **it == reduce).count());
            assert_eq!(counts.collect::<BTreeSet<_>>().len(), 1, "{group:?}");
        }
        for transfer in 1..=self.transfers {
            let part = Recorded::Transfer(transfer);
            let parts = (0..RANKS).filter(|rank| before(*rank).any(|it| *it == part));
            assert_ne!(parts.count(), 1, "transfer {transfer} is split");
        }
    }
}

proptest! {
    #[test]
    fn committed_cuts_are_consistent(actions in prop::collection::vec(action(), 0..400)) {
        let mut world = World::new();
        actions.iter().for_each(|action| world.act(action));
    }
}

#[test]
fn lockstep_sessions_commit_cuts() {
    let mut world = World::new();
    for step in 0..20 {
        for rank in 0..RANKS {
            for group in 0..GROUPS.len() {
                world.act(&Action::AllReduce(rank, group));
            }
            world.act(&Action::Encode(rank));
            world.act(&Action::Ready(rank));
        }
        if step % 4 == 3 {
            world.act(&Action::Offer(0, 1));
            world.act(&Action::Take(0));
        }
        world.act(&Action::Pass(700));
    }
    assert!(world.commits.len() > 3, "{:?}", world.commits);
}
