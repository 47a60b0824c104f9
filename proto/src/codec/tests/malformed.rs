//! Bytes that no encoder wrote: each rule that they can break, by hand, and millions of
//! mutated valid streams.
//!
//! The mutated streams are made from a fixed seed, so a failure can be reproduced.

use std::collections::BTreeSet;

use super::{
    super::wire::{self, RecordKind},
    corpus::{Stream, streams},
    mutate::{corrupt, mutate},
    program::Program,
    *,
};

/// A frame that breaks a rule: the rule, the frame, the count of ops it claims, and the
/// offset of the breach. Digits of a rule are `#`.
type Breach = (&'static str, Vec<u8>, u32, usize);

/// A frame of raw bytes for a fresh decoder.
fn bytes(rule: &'static str, frame: &[u8], offset: usize) -> Breach {
    (rule, frame.to_vec(), 1, offset)
}

/// A frame with one valid op, followed by `records`.
fn after_an_op(rule: &'static str, records: &[u8], count: u32, at: usize) -> Breach {
    let mut frame = Pair::default().encode(&[drop_of(1)]);
    let offset = frame.len() + at;
    frame.extend(records);
    (rule, frame, count, offset)
}

/// A frame with one op of a template without holes.
fn template(rule: &'static str, template: &[u8]) -> Breach {
    let mut frame = Vec::new();
    wire::put_head(&mut frame, RecordKind::New, template.len() as u64);
    frame.extend(template);
    frame.push(0);
    let offset = frame.len();
    (rule, frame, 1, offset)
}

/// A record's head of one byte.
const fn head(kind: RecordKind, n: u8) -> u8 {
    n << 3 | kind as u8
}

/// Breaches of every rule, at least one each.
fn breaches() -> Vec<Breach> {
    use RecordKind::*;
    let (wide, beyond) = ([0xff; 11], [[0xff; 9].as_slice(), &[0x7f]].concat());
    let too_wide_an_id = [&[head(New, 0), 1, 0], beyond.as_slice()].concat();
    let longer_than_it_is = [postcard::to_stdvec(&drop_of(1)).unwrap(), vec![0]].concat();
    vec![
        ("a frame has # ops; the limit is #", Vec::new(), u32::MAX, 0),
        after_an_op("# bytes follow the last of # ops", &[0, 0], 1, 0),
        bytes("a run has # ops; it must have # to #", &[head(Run, 0)], 1),
        bytes("a run has # ops; it must have # to #", &[head(Run, 2)], 1),
        bytes("the history has no op # to move to", &[head(Move, 3)], 1),
        bytes(MISPLACED, &[head(Run, 1)], 1),
        after_an_op(MISPLACED, &[head(Patch, 1)], 2, 1),
        after_an_op(
            "value # does not exist in an op with # values",
            &[head(Move, 1), head(Patch, 2)],
            2,
            2,
        ),
        bytes("there is no template #", &[head(Known, 0)], 1),
        after_an_op("there is no template #", &[head(Known, 1)], 2, 1),
        bytes("there is no hole kind #", &[head(New, 1), 0, 1, 3], 4),
        bytes(
            "a hole is at byte # of a template of # bytes",
            &[head(New, 1), 11, 1, 8],
            4,
        ),
        bytes("# bytes are needed, but # are left", &[], 0),
        bytes("# bytes are needed, but # are left", &[head(New, 9), 1], 1),
        bytes("a number has more than # bits", &beyond, 10),
        bytes("a number has more than # bits", &too_wide_an_id, 13),
        bytes("a number is longer than # bytes", &wide, 10),
        bytes("there is no record kind #", &[head(New, 0) + 1], 1),
        bytes("there is no scalar kind #", &[head(New, 0), 1, 1, 6], 4),
        template("# bytes follow the end of an op", &longer_than_it_is),
        template("malformed op", &[99]),
        template("malformed op", &[]),
        too_many_plain_bytes(),
    ]
}

const MISPLACED: &str = "the cursor is not at an op of the history";

/// A few bytes that stand for very many: a run of large ops.
fn too_many_plain_bytes() -> Breach {
    let inputs: Vec<_> = (0..900).map(tensor).collect();
    let large = burn_ir::CustomOpIr::new("large", &inputs, &[]);
    let mut frame = Pair::default().encode(&[OperationIr::Custom(large)]);
    wire::put_head(&mut frame, RecordKind::Move, wire::zigzag(-1));
    wire::put_head(&mut frame, RecordKind::Run, 60_000);
    let offset = frame.len();
    (TOO_LARGE, frame, 60_001, offset)
}

const TOO_LARGE: &str = "the ops of a frame have more than # bytes";

/// Returns a rule without the details of one breach of it.
fn rule(error: &CodecError) -> String {
    let mut rule = String::new();
    for c in error.rule.chars() {
        match c {
            '0'..='9' if rule.ends_with('#') => {}
            '0'..='9' => rule.push('#'),
            // The rest comes from another library.
            ':' => break,
            c => rule.push(c),
        }
    }
    rule
}

#[test]
fn an_error_names_the_offset_and_the_rule() {
    for (name, frame, count, offset) in breaches() {
        let error = OpDecoder::default().decode(&frame, count).unwrap_err();
        assert_eq!((rule(&error).as_str(), error.offset), (name, offset));
        let text = error.to_string();
        let place = format!("malformed ops at byte {offset}: ");
        assert!(
            text.starts_with(&place) && text.ends_with(&error.rule),
            "{text}"
        );
    }
}

#[test]
fn malformed_op_error_names_the_offset_in_the_op() {
    let (_, frame, ..) = template("malformed op", &[0, 99]);
    let error = OpDecoder::default().decode(&frame, 1).unwrap_err();
    assert!(error.rule.ends_with(", at byte 2 of the op"), "{error}");
}

#[test]
fn wrong_op_count_error_names_the_offset() {
    let bytes = Pair::default().encode(&some_ops());
    let short = OpDecoder::default().decode(&bytes, 2).unwrap_err();
    assert!(short.rule.contains("follow the last of 2 ops"), "{short}");
    let long = OpDecoder::default().decode(&bytes, 4).unwrap_err();
    assert_eq!(long.offset, bytes.len());
}

/// Decodes until an error, as a session does, and returns the error.
fn decode_all(stream: &Stream) -> Option<CodecError> {
    let mut decoder = OpDecoder::default();
    for (frame, count) in stream {
        match decoder.decode(frame, *count) {
            Ok(ops) => assert_eq!(ops.len(), *count as usize),
            Err(error) => {
                assert!(error.offset <= frame.len() && error.what == "ops");
                return Some(error);
            }
        }
    }
    None
}

#[test]
fn corrupted_streams_never_panic() {
    const STREAMS: usize = 2_000_000;
    let valid = streams(256);
    let (mut rng, mut seen, mut bearable) = (Rng(3), BTreeSet::new(), 0);
    assert!(valid.iter().all(|stream| decode_all(stream).is_none()));
    let mut spoilt = Stream::new();
    for _ in 0..STREAMS {
        let [one, other] = [0; 2].map(|_: u8| &valid[rng.below(valid.len())]);
        spoilt.clone_from(one);
        mutate(&mut spoilt, other, &mut rng);
        match decode_all(&spoilt) {
            Some(error) => drop(seen.insert(rule(&error))),
            None => bearable += 1,
        }
    }
    // The mutations reach far into the decoder: many streams stay valid, and the others
    // break every rule but one, which needs larger ops than the corpus has.
    println!("{bearable} of {STREAMS} streams were valid all the same");
    assert!(
        (STREAMS / 50..STREAMS / 2).contains(&bearable),
        "{bearable}"
    );
    let mut known: BTreeSet<_> = breaches()
        .into_iter()
        .map(|(rule, ..)| rule.into())
        .collect();
    known.remove(TOO_LARGE);
    assert_eq!(seen, known);
}

#[test]
fn corrupted_steady_steps_never_panic() {
    // Short frames late in a stream: each mutated byte is a record of a run.
    let mut pair = Pair::default();
    let mut program = Program::new();
    for _ in 0..4 {
        program.step();
        pair.send(&program.ops);
    }
    program.step();
    let frame = pair.encode(&program.ops);
    assert!(frame.len() < 60);
    let mut rng = Rng(4);
    for _ in 0..20_000 {
        let mut spoilt = frame.clone();
        corrupt(&mut spoilt, &mut rng);
        // This decoder goes on after an error, which no session does: it must withstand
        // that, too.
        let count = program.ops.len() + rng.below(3) - 1;
        let _ = pair.decoder.decode(&spoilt, count as u32);
    }
}

#[test]
fn garbage_never_panics() {
    let mut rng = Rng(5);
    for _ in 0..500_000 {
        let mut bytes: Vec<u8> = (0..rng.below(64)).map(|_| rng.next() as u8).collect();
        // Small numbers are more often valid.
        let mask = [0xff, 0x7f, 0x1f, 0x07][rng.below(4)];
        bytes.iter_mut().for_each(|byte| *byte &= mask);
        let _ = OpDecoder::default().decode(&bytes, rng.below(100) as u32);
    }
}
