//! Mutations of a stream.

use super::{super::wire, Numbers, corpus::Stream};

/// Mutates a stream, mostly at one place. `other` is a valid stream to take parts from.
pub(super) fn mutate(stream: &mut Stream, other: &Stream, numbers: &mut Numbers) {
    loop {
        let at = numbers.below(stream.len());
        match numbers.below(24) {
            0 => count(&mut stream[at].1, numbers),
            1 => stream.truncate(at + 1),
            2 => stream.insert(at, other[numbers.below(other.len())].clone()),
            3..6 => splice(&mut stream[at].0, other, numbers),
            _ => spoil(&mut stream[at].0, numbers),
        }
        if numbers.below(3) > 0 {
            return;
        }
    }
}

/// Mutates the bytes of a frame at one place.
pub(super) fn spoil(frame: &mut Vec<u8>, numbers: &mut Numbers) {
    if frame.is_empty() {
        frame.push(0);
    }
    let at = numbers.below(frame.len());
    match numbers.below(8) {
        0 => remove(frame, at, numbers),
        1 => frame.truncate(at),
        2 => blow_up(frame, at, numbers),
        3 => repeat(frame, at, numbers),
        4 => insert_run(frame, at, numbers),
        _ => frame[at] = changed(frame[at], numbers),
    }
}

fn count(count: &mut u32, numbers: &mut Numbers) {
    *count = match numbers.below(64) {
        0 => numbers.next() as u32 >> numbers.below(32),
        n => count.saturating_add(n as u32 % 4).saturating_sub(2),
    };
}

/// Joins the beginning of one frame with the end of another.
fn splice(frame: &mut Vec<u8>, other: &Stream, numbers: &mut Numbers) {
    let (tail, _) = &other[numbers.below(other.len())];
    frame.truncate(numbers.below(frame.len() + 1));
    frame.extend(&tail[numbers.below(tail.len() + 1)..]);
}

/// Returns another byte: with one bit flipped, a step up or down in its number or above
/// its lowest three bits, or random.
fn changed(byte: u8, numbers: &mut Numbers) -> u8 {
    match numbers.below(3) {
        0 => byte ^ 1 << numbers.below(8),
        1 => byte.wrapping_add([1, 8, 0xff, 0xf8][numbers.below(4)]),
        _ => numbers.next() as u8,
    }
}

fn remove(frame: &mut Vec<u8>, at: usize, numbers: &mut Numbers) {
    let end = frame.len().min(at + 1 + numbers.below(4));
    frame.drain(at..end);
}

/// Replaces a byte by a number of many bytes.
fn blow_up(frame: &mut Vec<u8>, at: usize, numbers: &mut Numbers) {
    let fill = [0xff, 0x80, frame[at] | 0x80][numbers.below(3)];
    let last = numbers.next() as u8 >> numbers.below(8);
    let number = std::iter::repeat_n(fill, 1 + numbers.below(11)).chain([last]);
    frame.splice(at..=at, number);
}

/// Repeats a part several times: a record, if it happens to be one.
fn repeat(frame: &mut Vec<u8>, at: usize, numbers: &mut Numbers) {
    let end = frame.len().min(at + 1 + numbers.below(6));
    let part = frame[at..end].repeat(1 + numbers.below(4));
    frame.splice(at..at, part);
}

/// Inserts a run, or a move and a run.
fn insert_run(frame: &mut Vec<u8>, at: usize, numbers: &mut Numbers) {
    let mut records = Vec::new();
    if numbers.below(2) == 0 {
        let by = wire::zigzag(-1 - numbers.below(8) as i64);
        wire::put_head(&mut records, wire::RecordKind::Move, by);
    }
    let ops = 1 + numbers.below(3) as u64;
    wire::put_head(&mut records, wire::RecordKind::Run, ops);
    frame.splice(at..at, records);
}
