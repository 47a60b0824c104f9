//! The account of a session on real Flex is exactly the bytes of the storages that exist,
//! after each op of random programs, also if the session goes on from a snapshot in between.
//! The steps of the programs are in `program_steps`.

mod last_uses;
mod program_steps;

use std::{collections::HashMap, io, time::Duration};

use burn_backend::{DType, Shape, TensorData};
use burn_ir::TensorStatus;
use proptest::prelude::*;
use tensord_backend::{CustomOps, StoredTensor, flex_device};
use tensord_proto::v1::Fault;

use self::program_steps::{ProgramStep, steps};
use super::{
    super::dataflow::{NAME_BYTES, Refusal},
    *,
};
use crate::{memory::DeviceMemory, op_progress::Signals};

/// Elements of a row. A value of more than 64 rows is not copied into a frame.
const COLUMNS: usize = 64;

/// Bytes of device memory: enough for most tensors of these programs, but not for all.
const CAPACITY: u64 = 1 << 20;

/// A reply of more than `INLINE_BYTES`, with the memory that it holds.
enum HeldReply {
    Storage {
        id: usize,
        bytes: u64,
        _data: TensorData,
    },
    Copy {
        bytes: u64,
        _data: TensorData,
    },
}

/// A program, its interpreter and all that the program holds.
struct Program {
    interpreter: Interpreter,
    device: Arc<DeviceMemory>,
    /// Tensors with a value, and poisoned ones.
    live: Vec<TensorIr>,
    poisoned: Vec<TensorIr>,
    /// Replies that the client has not acknowledged.
    held_replies: Vec<HeldReply>,
    next: u64,
    snapshots: KeptSnapshots,
}

/// The snapshots of a program that a worker keeps.
#[derive(Default)]
struct KeptSnapshots {
    tracker: BaseTracker,
    /// The bases that were made, by id.
    bases: Vec<Vec<u8>>,
    /// Number of snapshots that shared contents with an earlier one.
    shared: usize,
}

impl KeptSnapshots {
    /// Returns the bytes of a snapshot, and keeps its base.
    fn keep(&mut self, mut snapshot: Snapshot) -> Vec<u8> {
        self.tracker.set_min_bytes(64);
        let new_id = self.bases.len() as u64 + 1;
        self.tracker.assign(&mut snapshot, &[], new_id);
        if let Some(size_bytes) = snapshot.new_base_bytes() {
            let mut base = Vec::new();
            snapshot.write_base(&mut base).unwrap();
            assert_eq!(base.len() as u64, size_bytes);
            self.bases.push(base);
        } else if snapshot.base_id().is_some() {
            self.shared += 1;
        }
        snapshot.outcome.set(true).unwrap();
        let mut bytes = Vec::new();
        snapshot.write(&mut bytes).unwrap();
        assert_eq!(snapshot.size_bytes(), bytes.len() as u64);
        bytes
    }

    fn read(&self, bytes: &[u8]) -> Snapshot {
        let open_base = |id: u64| Ok(&self.bases[id as usize - 1][..]);
        Snapshot::read(&mut &*bytes, open_base, CAPACITY).unwrap()
    }
}

impl Program {
    fn capture(&mut self) -> Snapshot {
        let captured = self.interpreter.capture(0).unwrap();
        captured.into_snapshot().unwrap()
    }

    fn new() -> Self {
        let device = DeviceMemory::new(CAPACITY);
        let backend = flex_device(&CustomOps::new()).open();
        let signals = Signals::new("here".into(), Duration::from_secs(60), Arc::default());
        let op_progress = OpProgress::new(signals);
        let interpreter = Interpreter::new(backend, device.open(), op_progress, 1);
        Self {
            interpreter,
            device,
            live: Vec::new(),
            poisoned: Vec::new(),
            held_replies: Vec::new(),
            next: 0,
            snapshots: KeptSnapshots::default(),
        }
    }

    fn out(&mut self, rows: usize, columns: usize) -> TensorIr {
        self.next += 1;
        TensorIr::uninit(
            TensorId::new(self.next),
            Shape::new([rows, columns]),
            DType::F32,
        )
    }

    /// Picks a live tensor, for its last use if `last` is true.
    fn pick(&mut self, at: usize, last: bool) -> Option<TensorIr> {
        let at = at % self.live.len().max(1);
        let picked = self.live.get(at)?.clone();
        let status = match last {
            true => TensorStatus::ReadWrite,
            false => TensorStatus::ReadOnly,
        };
        if last {
            self.live.swap_remove(at);
        }
        Some(TensorIr { status, ..picked })
    }

    /// Executes `op`, which makes `out`, and records whether `out` has a value.
    fn run(&mut self, op: OperationIr, out: TensorIr) {
        self.interpreter.run(Box::new(op));
        self.note(out);
    }

    fn note(&mut self, out: TensorIr) {
        if self.interpreter.tensors.is_live(out.id) {
            self.live.push(out);
        } else if self.interpreter.tensors.len() > self.live.len() + self.poisoned.len() {
            self.poisoned.push(out);
        }
    }

    /// Goes on from a snapshot, on another device of the same size. The client has no replies that
    /// hold memory there.
    fn go_on_elsewhere(&mut self) {
        self.held_replies.clear();
        let snapshot = self.capture();
        let bytes = self.snapshots.keep(snapshot);
        let Self {
            mut interpreter,
            device,
            ..
        } = Self::new();
        let read = self.snapshots.read(&bytes);
        interpreter.restore(&read).unwrap();
        self.snapshots.tracker = BaseTracker::default();
        self.snapshots.tracker.restore(&read, &[]);
        (self.interpreter, self.device) = (interpreter, device);
    }

    /// Returns each tensor with a value: where its elements are, and the bytes of its storage.
    fn layouts(&mut self) -> Vec<(TensorIr, Vec<isize>, usize, Vec<u8>)> {
        let store = self.interpreter.tensors.store();
        let stored = store.stored(self.live.clone(), 0).unwrap();
        let layout = |(tensor, (_, stored)): (&TensorIr, (_, Result<StoredTensor, String>))| {
            let stored = stored.unwrap();
            let bytes = stored.storage.to_vec();
            (tensor.clone(), stored.strides, stored.offset, bytes)
        };
        self.live
            .iter()
            .zip((stored.stored)())
            .map(layout)
            .collect()
    }

    /// Returns the faults that no reply has reported.
    fn unreported(&mut self) -> Vec<Fault> {
        let interpreter = &mut self.interpreter;
        let request = SyncRequest {
            id: 1,
            shares_uploads: false,
        };
        let mut next = || match interpreter.sync(request) {
            Reply::Synced { fault, .. } => fault,
            _ => panic!("it is the reply to a sync"),
        };
        std::iter::from_fn(|| next().map(Arc::unwrap_or_clone)).collect()
    }

    /// Returns the bytes that should be charged, derived from the backend's storages.
    fn expected(&mut self) -> u64 {
        let names = (self.live.len() + self.poisoned.len()) as u64;
        let mut storages = HashMap::new();
        for tensor in &self.live {
            let storage = self.interpreter.tensors.store().storage(tensor).unwrap();
            storages.insert(storage.id, storage.bytes);
        }
        let mut copies = 0;
        for answer in &self.held_replies {
            match answer {
                HeldReply::Storage { id, bytes, .. } => {
                    storages.insert(*id, *bytes);
                }
                HeldReply::Copy { bytes, .. } => copies += bytes,
            }
        }
        let mut faults = HashMap::new();
        for tensor in &self.poisoned {
            let Err(Refusal::Inherited(fault)) = self.interpreter.tensors.check(tensor) else {
                panic!("it has no value");
            };
            let texts = [&fault.op_name, &fault.worker, &fault.reason];
            let texts: usize = texts.iter().map(|text| text.len()).sum();
            faults.insert(Arc::as_ptr(&fault), size_of::<Fault>() + 64 + texts);
        }
        let faults: usize = faults.values().sum();
        names * NAME_BYTES + storages.values().sum::<u64>() + copies + faults as u64
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn account_equals_the_live_storages(steps in steps()) {
        let mut program = Program::new();
        for (step, last) in steps {
            let description = format!("{step:?}, {last}");
            program.step(step, last);
            prop_assert_eq!(program.device.live_bytes(), program.expected(), "after {}", description);
        }
        let Program { interpreter, device, held_replies, .. } = program;
        drop(interpreter);
        let held: u64 = device.live_bytes();
        prop_assert_eq!(held > 0, !held_replies.is_empty());
        drop(held_replies);
        prop_assert_eq!(device.live_bytes(), 0);
    }

    #[test]
    fn session_goes_on_from_a_snapshot_as_if_nothing_had_happened(
        steps in steps(),
        moves in prop::collection::vec(any::<prop::sample::Index>(), 1..4),
        marks in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
    ) {
        let (mut program, mut moved) = (Program::new(), Program::new());
        let count = steps.len();
        for (number, (step, last)) in steps.into_iter().enumerate() {
            if moves.iter().any(|index| index.index(count) == number) {
                program.held_replies.clear();
                moved.go_on_elsewhere();
            }
            if marks.iter().any(|index| index.index(count) == number) {
                let snapshot = moved.capture();
                moved.snapshots.keep(snapshot);
            }
            let description = format!("{step:?}, {last}");
            program.step(step.clone(), last);
            moved.step(step, last);
            prop_assert_eq!(moved.device.live_bytes(), moved.expected(), "after {}", &description);
            let (bytes, expected) = (moved.device.live_bytes(), program.device.live_bytes());
            prop_assert_eq!(bytes, expected, "after {}", &description);
            prop_assert_eq!(moved.layouts(), program.layouts(), "after {}", &description);
        }
        prop_assert_eq!(moved.unreported(), program.unreported());
    }

    #[test]
    fn snapshot_that_is_made_later_has_the_state_of_its_mark(
        steps in steps(),
        marks in prop::collection::vec(any::<prop::sample::Index>(), 1..4),
    ) {
        let mut program = Program::new();
        let bytes = |captured: capture::CapturedTensors| {
            let mut bytes = Vec::new();
            captured.into_snapshot().unwrap().write(&mut bytes).unwrap();
            bytes
        };
        let (mut pending, count) = (None, steps.len());
        for (number, (step, last)) in steps.into_iter().enumerate() {
            if marks.iter().any(|index| index.index(count) == number) {
                let at_once = bytes(program.interpreter.capture(0).unwrap());
                let later = program.interpreter.capture(0).unwrap();
                if let Some((expected, captured)) = pending.replace((at_once, later)) {
                    prop_assert!(bytes(captured) == expected);
                }
            }
            program.step(step, last);
        }
        // A program without steps has no mark.
        if let Some((expected, captured)) = pending {
            prop_assert!(bytes(captured) == expected);
        }
    }
}

#[test]
fn malformed_snapshots_are_refused() {
    let mut program = Program::new();
    for step in [
        ProgramStep::Full(4),
        ProgramStep::Slice(0, 2),
        ProgramStep::Mismatch(0),
    ] {
        program.step(step, false);
    }
    let snapshot = program.capture();
    let mut bytes = Vec::new();
    snapshot.write(&mut bytes).unwrap();
    let no_base = |_| -> io::Result<&[u8]> { Err(io::ErrorKind::NotFound.into()) };
    let restore = |bytes: &[u8]| {
        let snapshot = Snapshot::read(&mut &*bytes, no_base, CAPACITY)?;
        let mut program = Program::new();
        program.interpreter.restore(&snapshot)
    };
    restore(&bytes).unwrap();
    for size in 0..bytes.len() {
        restore(&bytes[..size]).unwrap_err();
    }
    // For any header, nothing is read outside of a storage, and nothing panics.
    for at in 0..bytes.len().min(600) {
        for bit in 0..8 {
            let mut changed = bytes.clone();
            changed[at] ^= 1 << bit;
            drop(restore(&changed));
        }
    }
    assert!(
        Snapshot::read(&mut &*bytes, no_base, 100).is_err(),
        "its storages have more bytes"
    );
}

/// Runs a program that fills a tensor, and then another one again and again.
fn program_with_constant(rows: usize) -> Program {
    let mut program = Program::new();
    program.step(ProgramStep::Full(rows), false);
    program
}

#[test]
fn what_does_not_change_is_stored_once() {
    let mut program = program_with_constant(64);
    let size_bytes = |program: &mut Program| {
        let snapshot = program.capture();
        let bases = program.snapshots.bases.len();
        let bytes = program.snapshots.keep(snapshot);
        let read = program.snapshots.read(&bytes);
        assert_eq!(read.storages.len(), program.live.len());
        let new_bases = program.snapshots.bases[bases..].iter();
        (bytes.len(), new_bases.map(Vec::len).sum::<usize>())
    };
    let constant_bytes = 64 * COLUMNS * 4;
    let (first, base) = size_bytes(&mut program);
    assert!(first > constant_bytes && base == 0);
    program.step(ProgramStep::Full(2), false);
    let (second, base) = size_bytes(&mut program);
    assert!(second < constant_bytes && base == constant_bytes);
    let (third, base) = size_bytes(&mut program);
    assert!(third < constant_bytes && base == 0);
    assert_eq!(program.snapshots.shared, 1);
    let refuse = |program: &mut Program| {
        let mut snapshot = program.capture();
        program.snapshots.tracker.assign(&mut snapshot, &[], 7);
        snapshot.outcome.set(false).unwrap();
    };
    // The worker still has the base.
    refuse(&mut program);
    let (next, base) = size_bytes(&mut program);
    assert!(next < constant_bytes && base == 0);
    // It may not have it.
    refuse(&mut program);
    refuse(&mut program);
    let (next, base) = size_bytes(&mut program);
    assert!(next < constant_bytes && base > constant_bytes, "a new base");
}
