//! Mutations of a stream.

use super::{super::wire, Rng, corpus::Stream};

/// Mutates a stream, mostly at one place. `other` is a valid stream to take parts from.
pub(super) fn mutate(stream: &mut Stream, other: &Stream, rng: &mut Rng) {
    loop {
        let at = rng.below(stream.len());
        match rng.below(24) {
            0 => count(&mut stream[at].1, rng),
            1 => stream.truncate(at + 1),
            2 => stream.insert(at, other[rng.below(other.len())].clone()),
            3..6 => splice(&mut stream[at].0, other, rng),
            _ => corrupt(&mut stream[at].0, rng),
        }
        if rng.below(3) > 0 {
            return;
        }
    }
}

/// Mutates the bytes of a frame at one place.
pub(super) fn corrupt(frame: &mut Vec<u8>, rng: &mut Rng) {
    if frame.is_empty() {
        frame.push(0);
    }
    let at = rng.below(frame.len());
    match rng.below(8) {
        0 => remove(frame, at, rng),
        1 => frame.truncate(at),
        2 => blow_up(frame, at, rng),
        3 => repeat(frame, at, rng),
        4 => insert_run(frame, at, rng),
        _ => frame[at] = changed(frame[at], rng),
    }
}

fn count(count: &mut u32, rng: &mut Rng) {
    *count = match rng.below(64) {
        0 => rng.next() as u32 >> rng.below(32),
        n => count.saturating_add(n as u32 % 4).saturating_sub(2),
    };
}

/// Joins the beginning of one frame with the end of another.
fn splice(frame: &mut Vec<u8>, other: &Stream, rng: &mut Rng) {
    let (tail, _) = &other[rng.below(other.len())];
    frame.truncate(rng.below(frame.len() + 1));
    frame.extend(&tail[rng.below(tail.len() + 1)..]);
}

/// Returns another byte: with one bit flipped, a step up or down in its number or above
/// its lowest three bits, or random.
fn changed(byte: u8, rng: &mut Rng) -> u8 {
    match rng.below(3) {
        0 => byte ^ 1 << rng.below(8),
        1 => byte.wrapping_add([1, 8, 0xff, 0xf8][rng.below(4)]),
        _ => rng.next() as u8,
    }
}

fn remove(frame: &mut Vec<u8>, at: usize, rng: &mut Rng) {
    let end = frame.len().min(at + 1 + rng.below(4));
    frame.drain(at..end);
}

/// Replaces a byte by a number of many bytes.
fn blow_up(frame: &mut Vec<u8>, at: usize, rng: &mut Rng) {
    let fill = [0xff, 0x80, frame[at] | 0x80][rng.below(3)];
    let last = rng.next() as u8 >> rng.below(8);
    let number = std::iter::repeat_n(fill, 1 + rng.below(11)).chain([last]);
    frame.splice(at..=at, number);
}

/// Repeats a part several times: a record, if it happens to be one.
fn repeat(frame: &mut Vec<u8>, at: usize, rng: &mut Rng) {
    let end = frame.len().min(at + 1 + rng.below(6));
    let part = frame[at..end].repeat(1 + rng.below(4));
    frame.splice(at..at, part);
}

/// Inserts a run, or a move and a run.
fn insert_run(frame: &mut Vec<u8>, at: usize, rng: &mut Rng) {
    let mut records = Vec::new();
    if rng.below(2) == 0 {
        let by = wire::zigzag(-1 - rng.below(8) as i64);
        wire::put_head(&mut records, wire::RecordKind::Move, by);
    }
    let ops = 1 + rng.below(3) as u64;
    wire::put_head(&mut records, wire::RecordKind::Run, ops);
    frame.splice(at..at, records);
}
