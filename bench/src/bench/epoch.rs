//! Bytes uploaded in each epoch over a shuffled data set.
//!
//! The batcher is that of most Burn programs: a tensor for each item, then `Tensor::stack`.
//! Each epoch shuffles the items again, so batches differ and items do not. All bytes to
//! the worker count, ops included.

use anyhow::{Context as _, Result};
use burn::tensor::{Device, Tensor, TensorData};
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::SliceRandom};
use serde_json::json;

use crate::{
    context::Context,
    counted::CountedRemote,
    data::{self, Upload},
    models::{PIXELS, SIDE},
    peer::{Kind, Peer},
    report::{Report, format_number, table},
    trainer::BATCH,
};

const EPOCHS: usize = 3;

/// Runs the bench.
///
/// # Errors
///
/// If a peer fails.
pub(super) fn run(context: &Context) -> Result<Report> {
    context.progress.update("epoch");
    let items = context.full_or_quick(2048, 2 * BATCH);
    let peers = context.peers()?;
    let ours = peers.get(Kind::Tensord);
    // Different content each time, or the second would profit from the uploads of the
    // first.
    let helper = tensord(ours, &Images::noise(items, 1), Upload::Helper)?;
    let plain = tensord(ours, &Images::noise(items, 2), Upload::Plain)?;
    let counted = CountedRemote::start()?;
    let remote = epochs(
        counted.device(),
        &Images::noise(items, 3),
        Upload::Plain,
        || Ok(counted.traffic()?.0),
    )?;
    let mut rows = table(&["peer"], &["epoch 1", "epoch 2", "epoch 3"]);
    let named = [
        (Kind::Tensord.label(), &helper),
        ("tensord, TCP, plain from_data", &plain),
        ("burn-remote, WebSocket", &remote),
    ];
    for (label, bytes) in named {
        let cells = bytes.iter().map(|&bytes| format_number(bytes as f64));
        rows.add_row(std::iter::once(label.to_owned()).chain(cells));
    }
    Ok(Report {
        json: json!({
            "items": items,
            "item_bytes": PIXELS * 4,
            "epoch1": helper[0],
            "epoch2": helper[1],
            "epoch3": helper[2],
            "plain_epochs": plain,
            "burn_remote_epochs": remote,
        }),
        table: rows.to_string(),
    })
}

fn tensord(peer: &Peer, images: &Images, upload: Upload) -> Result<[u64; EPOCHS]> {
    let lease = peer.lease().context("tensord has a lease")?;
    epochs(&peer.device, images, upload, || {
        Ok(lease.traffic().bytes_up)
    })
}

/// Runs the epochs and returns the bytes of each. `sent` returns the bytes uploaded so far.
fn epochs(
    device: &Device,
    images: &Images,
    upload: Upload,
    sent: impl Fn() -> Result<u64>,
) -> Result<[u64; EPOCHS]> {
    let mut random = StdRng::seed_from_u64(11);
    let mut order: Vec<usize> = (0..images.0.len()).collect();
    let mut bytes = [0; EPOCHS];
    device.sync().context("cannot sync")?;
    let mut before = sent()?;
    for epoch in &mut bytes {
        order.shuffle(&mut random);
        let mut sum = Tensor::<1>::zeros([1], device);
        for batch in order.chunks(BATCH) {
            sum = sum + images.batch(batch, device, upload).mean();
        }
        data::scalar(sum)?;
        let now = sent()?;
        *epoch = now - before;
        before = now;
    }
    Ok(bytes)
}

/// A data set in host memory.
struct Images(Vec<Vec<f32>>);

impl Images {
    fn noise(count: usize, seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let image = |_| (&mut random).random_iter().take(PIXELS).collect();
        Self((0..count).map(image).collect())
    }

    /// Uploads and stacks a batch.
    fn batch(&self, items: &[usize], device: &Device, upload: Upload) -> Tensor<3> {
        let item = |&at: &usize| -> Tensor<2> {
            let data = TensorData::new(self.0[at].clone(), [SIDE, SIDE]);
            data::from_data(data, device, upload)
        };
        Tensor::stack(items.iter().map(item).collect(), 0)
    }
}
