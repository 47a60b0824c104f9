//! What a tiny op costs, end to end.
//!
//! A sample is a long chain of additions to a tensor of one element and one read
//! at its end, divided by the additions. Programs use the `Tensor` API; the
//! `Backend` level is below it, where tensord needs no bridge. There, Burn's
//! router over a client that throws ops away is the floor: whatever is built on
//! the router costs a program at least that. What is to be done with an op while the
//! program goes on takes another thread, which costs more, whatever it does: an op is
//! 616 bytes, and goes from one core's cache to another's. As nobody carries those ops
//! out, they are compared by what they cost the program until all are issued, for a
//! chain of some training steps' length: one that goes on for ever is held back to
//! the pace of the worker, which is what the other figures tell.

use std::time::Instant;

use anyhow::{Context as _, Result};
use burn::tensor::{Tensor, TensorData};
use burn_backend::Backend;
use burn_flex::{Flex, FlexDevice};
use tensord_client::Tensord;

use crate::{
    context::Context,
    data::{self, Upload},
    discard::{Discard, DiscardDevice},
    peer::{Kind, Peer},
    race::Contender,
    report::{Report, add_findings, table},
};

/// Measures.
///
/// # Errors
///
/// When a peer fails.
pub(super) fn run(context: &Context) -> Result<Report> {
    let count = context.pick(20_000, 500);
    let burst = context.pick(2_000, 500);
    let peers = context.peers()?;
    let mut contenders: Vec<_> = peers.iter().map(|peer| tensors(peer, count)).collect();
    let ours = peers.get(Kind::TensordQuic);
    contenders.push(issue(ours, count));
    let ours = ours.backend_device().context("tensord has a device")?;
    let levels = [
        backend::<Tensord>(
            "backend_whole_us",
            "tensord, QUIC, Backend level",
            ours,
            count,
            Until::Read,
        ),
        backend::<Flex>(
            "local_backend_us",
            "Flex, Backend level",
            FlexDevice,
            count,
            Until::Read,
        ),
        backend::<Tensord>(
            "backend_us",
            "tensord, QUIC, Backend level, until issued",
            ours,
            burst,
            Until::Issued,
        ),
        backend::<Discard>(
            "handover_floor_us",
            "Burn's router, and another thread gets the ops, until issued",
            DiscardDevice::Elsewhere,
            burst,
            Until::Issued,
        ),
        backend::<Discard>(
            "router_floor_us",
            "Burn's router alone, until issued",
            DiscardDevice::AtOnce,
            burst,
            Until::Issued,
        ),
    ];
    contenders.extend(levels);
    let found = context.race("ops", contenders)?;
    let mut rows = table(&["peer"], &["µs an op", "quartiles"]);
    add_findings(&mut rows, &[], &found);
    Ok(Report {
        json: found.to_json().into(),
        table: rows,
    })
}

fn micros(since: Instant, count: usize) -> f64 {
    since.elapsed().as_secs_f64() * 1e6 / count as f64
}

/// `count` additions to `tensor`, one after the other.
fn chain(tensor: Tensor<1>, count: usize) -> Tensor<1> {
    (0..count).fold(tensor, |tensor, _| tensor + 1.0)
}

fn tensors(peer: &Peer, count: usize) -> Contender<'_> {
    let key = format!("{}_us", peer.kind.key());
    Contender::new(key, peer.kind.label(), move |_| {
        let zero = data::from_data(TensorData::from([0f32]), &peer.device, Upload::Helper);
        let begun = Instant::now();
        let sum = data::scalar(chain(zero, count))?;
        let took = micros(begun, count);
        anyhow::ensure!(sum == count as f32, "the sum is {sum}, not {count}");
        Ok(took)
    })
}

/// How long the program itself is held up, before it waits for the result.
fn issue(peer: &Peer, count: usize) -> Contender<'_> {
    let key = format!("{}_issue_us", peer.kind.key());
    let label = format!("{}, until issued", peer.kind.label());
    Contender::new(key, label, move |_| {
        let zero = data::from_data(TensorData::from([0f32]), &peer.device, Upload::Helper);
        let begun = Instant::now();
        let sum = chain(zero, count);
        let took = micros(begun, count);
        data::scalar(sum)?;
        Ok(took)
    })
}

/// When the clock stops.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Until {
    /// The program has issued all ops.
    Issued,
    /// Their result is there.
    Read,
}

fn backend<B: Backend>(
    key: &str,
    label: &str,
    device: B::Device,
    count: usize,
    until: Until,
) -> Contender<'static> {
    Contender::new(key, label, move |_| {
        let zero = B::float_from_data(TensorData::from([0f32]), &device);
        let begun = Instant::now();
        let chain = (0..count).fold(zero, |sum, _| B::float_add_scalar(sum, 1.0.into()));
        let issued = micros(begun, count);
        let read = burn_std::future::block_on(B::float_into_data(chain));
        read.context("cannot read the sum")?;
        Ok(match until {
            Until::Issued => issued,
            Until::Read => micros(begun, count),
        })
    })
}
