//! Bytes that no encoder wrote.

use std::time::{Duration, Instant};

use super::{kinds::any_op, program::Program, *};

#[test]
fn a_wrong_count_is_an_error_with_its_place() {
    let bytes = Pair::default().encode(&some_ops());
    let short = OpDecoder::default().decode(&bytes, 2).unwrap_err();
    assert!(short.rule.contains("after the last of 2 ops"), "{short}");
    let long = OpDecoder::default().decode(&bytes, 4).unwrap_err();
    assert_eq!(long.offset, bytes.len());
    let limit = OpDecoder::default().decode(&bytes, u32::MAX).unwrap_err();
    assert!(limit.rule.contains("more than"), "{limit}");
}

/// A record's head, as short as that.
fn head(kind: u8, n: u8) -> u8 {
    n << 3 | kind
}

#[test]
fn an_error_names_the_rule() {
    let cases: [(&[u8], &str); 8] = [
        (&[head(0, 1)], "the cursor is at no op"),
        (&[head(0, 0)], "a run of 0 ops where 1 to 1 may come"),
        (&[head(0, 2)], "a run of 2 ops where 1 to 1 may come"),
        (&[head(1, 3), head(2, 1)], "is remembered to move to"),
        (&[head(3, 0)], "there is no template 0"),
        (&[head(4, 9), 1], "9 bytes wanted, 1 left"),
        (
            &[head(4, 1), 11, 1, 8],
            "a hole at byte 2 of a template of 1",
        ),
        (&[head(5, 0)], "there is no record kind 5"),
    ];
    for (bytes, rule) in cases {
        let error = OpDecoder::default().decode(bytes, 1).unwrap_err();
        assert!(error.rule.contains(rule), "{error} is not for {rule:?}");
    }
}

#[test]
fn a_few_bytes_cannot_ask_for_much() {
    let mut pair = Pair::default();
    let inputs: Vec<_> = (0..900).map(tensor).collect();
    pair.send(&[OperationIr::Custom(burn_ir::CustomOpIr::new(
        "large",
        &inputs,
        &[],
    ))]);
    let mut bytes = Vec::new();
    wire::put_head(&mut bytes, wire::RecordKind::Move, wire::zigzag(-1));
    wire::put_head(&mut bytes, wire::RecordKind::Run, 60_000);
    let error = pair.decoder.decode(&bytes, 60_000).unwrap_err();
    assert!(error.rule.contains("bytes in one frame"), "{error}");
}

/// Frames of a stream that uses all of the grammar, with their counts.
fn frames() -> Vec<(Vec<u8>, u32)> {
    let mut pair = Pair::default();
    let mut program = Program::new();
    let mut numbers = Numbers(7);
    let mut frames = Vec::new();
    for _ in 0..4 {
        program.step();
        let mut ops = program.ops.clone();
        ops.insert(numbers.below(ops.len()), drop_of(7));
        let others = (0..20).filter_map(|_| any_op(&mut numbers));
        ops.extend(others.collect::<Vec<_>>());
        let frame = pair.encode(&ops);
        frames.push((frame, ops.len() as u32));
    }
    frames
}

/// Spoils a frame at a few places, and may cut it short or tear a part out.
fn spoil(frame: &mut Vec<u8>, numbers: &mut Numbers) {
    for _ in 0..=numbers.below(4) {
        let at = numbers.below(frame.len());
        match numbers.below(6) {
            0 => frame[at] = numbers.next() as u8,
            1 => frame[at] ^= 1 << numbers.below(8),
            2 => frame[at] = frame[at].wrapping_add(1),
            3 => drop(frame.remove(at)),
            4 => frame.insert(at, numbers.next() as u8),
            _ => frame.truncate(at.max(1)),
        }
        if frame.is_empty() {
            frame.push(0);
        }
    }
}

/// Decodes until something is wrong, as a session does; the ops that came.
fn decode_all(frames: &[(Vec<u8>, u32)]) -> usize {
    let mut decoder = OpDecoder::default();
    let mut decoded = 0;
    for (frame, count) in frames {
        match decoder.decode(frame, *count) {
            Ok(ops) => {
                assert_eq!(ops.len(), *count as usize);
                decoded += ops.len();
            }
            Err(error) => {
                assert!(error.offset <= frame.len() && !error.rule.is_empty());
                break;
            }
        }
    }
    decoded
}

/// Runs `attempt` very often, but not for longer than a test may take.
fn for_a_while(mut attempt: impl FnMut(&mut Numbers)) {
    let started = Instant::now();
    let mut numbers = Numbers(3);
    for _ in 0..1_000_000 {
        attempt(&mut numbers);
        if started.elapsed() > Duration::from_secs(3) {
            break;
        }
    }
}

#[test]
fn spoilt_streams_never_panic() {
    let frames = frames();
    assert!(decode_all(&frames) > 0);
    for_a_while(|numbers| {
        let mut spoilt = frames[..1 + numbers.below(frames.len())].to_vec();
        let at = numbers.below(spoilt.len());
        spoil(&mut spoilt[at].0, numbers);
        if numbers.below(8) == 0 {
            spoilt[at].1 = numbers.next() as u32 >> numbers.below(32);
        }
        decode_all(&spoilt);
    });
}

#[test]
fn spoilt_steady_steps_never_panic() {
    // Short frames late in a stream: each spoilt byte is a record of a run.
    let mut pair = Pair::default();
    let mut program = Program::new();
    for _ in 0..4 {
        program.step();
        pair.send(&program.ops);
    }
    program.step();
    let frame = pair.encode(&program.ops);
    let frames_before = frame.len();
    assert!(frames_before < 60);
    for_a_while(|numbers| {
        let mut spoilt = frame.clone();
        spoil(&mut spoilt, numbers);
        // A decoder that has seen nonsense goes on here, which no session does:
        // it must bear that, too.
        let count = program.ops.len() + numbers.below(3) - 1;
        let _ = pair.decoder.decode(&spoilt, count as u32);
    });
}

#[test]
fn garbage_never_panics() {
    for_a_while(|numbers| {
        let mut bytes: Vec<u8> = (0..numbers.below(64))
            .map(|_| numbers.next() as u8)
            .collect();
        // Small numbers are more often valid.
        let mask = [0xff, 0x7f, 0x1f, 0x07][numbers.below(4)];
        bytes.iter_mut().for_each(|byte| *byte &= mask);
        let _ = OpDecoder::default().decode(&bytes, numbers.below(100) as u32);
    });
}
