//! Throughput of large tensors, up and down, compared with plain sockets.
//!
//! A sample is one or more transfers, one after the other, in GB (10⁹ bytes) per second. An
//! upload is complete when a sync returns; its content is new each time. A download is a
//! read of a tensor that was on the device before.
//!
//! Uploads are measured in their steady state. A worker keeps received uploads up to a
//! bound. Until that bound is reached, it allocates memory that the system has to clear, or
//! even to get from its host; from then on it reuses its own. So every contender uploads
//! that much, and a few payloads, before it is measured.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use burn::tensor::{Tensor, TensorData};
use serde_json::{Value, json};

use crate::{
    context::Context,
    data::{self, Upload},
    peer::{Kind, Peer},
    plain::{Direction, Server, Socket},
    race::{Contender, Results},
    report::{Report, add_results, table},
};

const MIB: usize = 1 << 20;

/// Minimum bytes of all transfers in a sample: 16 MiB take 20 to 50 ms, of which a short
/// run of any other process would be a large part.
const MIN_SAMPLE_BYTES: usize = 64 * MIB;

/// Bytes that are uploaded before the measurement: twice what the peers' worker keeps of a
/// session.
const WARMUP_BYTES: usize = 192 * MIB;

/// Minimum number of payloads that are uploaded before the measurement: while one is received, the one before may still
/// be there, and each lease has a process, and memory, of its own.
const WARMUP_PAYLOADS: usize = 3;

/// Runs the bench.
///
/// # Errors
///
/// If a peer fails or loses bytes.
pub(super) fn run(context: &Context) -> Result<Report> {
    let dir = tempfile::tempdir()?;
    let server = Server::start(&dir)?;
    let mut rows = table(&["MiB", "way", "peer"], &["GB/s", "quartiles"]);
    let mut sizes = Vec::new();
    for &mib in context.full_or_quick::<&[usize]>(&[1, 16, 64, 256], &[1]) {
        let mut json = json!({ "mib": mib });
        for (direction, name) in [(Direction::Up, "up"), (Direction::Down, "down")] {
            let found = measure(context, &server, mib, direction)?;
            add_results(&mut rows, &[&mib.to_string(), name], &found);
            json[name] = Value::from(found.to_json());
        }
        sizes.push(json);
    }
    Ok(Report {
        json: json!({ "sizes": sizes }),
        table: rows.to_string(),
    })
}

fn measure(
    context: &Context,
    server: &Server,
    mib: usize,
    direction: Direction,
) -> Result<Results> {
    let at_least = |total: usize| (total / (mib * MIB)).max(1);
    let (warm_bytes, warm_payloads) = match direction {
        Direction::Up => context.full_or_quick((WARMUP_BYTES, WARMUP_PAYLOADS), (0, 1)),
        Direction::Down => (0, 1),
    };
    let size = SamplePlan {
        bytes: mib * MIB,
        count: at_least(MIN_SAMPLE_BYTES),
        warm_count: at_least(warm_bytes).max(warm_payloads),
    };
    let (tcp, tls) = (
        server.tcp(context.runtime())?,
        server.tls(context.runtime())?,
    );
    let mut contenders = vec![
        socket("tcp_gbs", "TCP", tcp, size, direction),
        socket("tls_gbs", "TLS over TCP", tls, size, direction),
    ];
    let peers = context.peers()?.iter();
    for peer in peers.filter(|peer| peer.kind != Kind::Local) {
        contenders.push(tensors(peer, size, direction, Upload::Helper));
        if peer.kind == Kind::Tensord {
            contenders.push(tensors(peer, size, direction, Upload::Plain));
        }
    }
    context.race(&format!("bulk {mib} MiB {direction:?}"), contenders)
}

/// The payloads of a sample.
#[derive(Clone, Copy)]
struct SamplePlan {
    /// Bytes of a payload.
    bytes: usize,
    /// Number of payloads in a sample.
    count: usize,
    /// Number of payloads in the first sample, which does not count.
    warm_count: usize,
}

impl SamplePlan {
    /// Returns the number of payloads in the sample of round `run`.
    fn count(self, run: usize) -> usize {
        match run {
            0 => self.warm_count,
            _ => self.count,
        }
    }

    fn gbs(self, since: Instant) -> f64 {
        (self.bytes * self.count) as f64 / 1e9 / since.elapsed().as_secs_f64()
    }
}

fn socket<'a>(
    key: &str,
    label: &str,
    mut socket: Socket<'a>,
    size: SamplePlan,
    direction: Direction,
) -> Contender<'a> {
    let payload = vec![7; size.bytes];
    Contender::new(key, label, move |run| {
        let begun = Instant::now();
        for _ in 0..size.count(run) {
            match direction {
                Direction::Up => socket.upload(&payload)?,
                Direction::Down => socket.download(size.bytes)?,
            }
        }
        Ok(size.gbs(begun))
    })
}

fn tensors<'a>(
    peer: &'a Peer,
    size: SamplePlan,
    direction: Direction,
    upload: Upload,
) -> Contender<'a> {
    let (infix, note) = match upload {
        Upload::Helper => ("", ""),
        Upload::Plain => ("_plain", ", plain from_data and into_data"),
    };
    let key = format!("{}{infix}_gbs", peer.kind.key());
    let label = format!("{}{note}", peer.kind.label());
    let mut content = UniquePayloads::new(size.bytes / 4);
    let mut on_device: Option<Tensor<1>> = None;
    let put_on_device = move |data| -> Tensor<1> { data::from_data(data, &peer.device, upload) };
    Contender::new(key, label, move |run| match direction {
        Direction::Up => {
            if run == 0 {
                for _ in 0..size.warm_count {
                    put_on_device(content.next_payload());
                    peer.device.sync().context("cannot sync")?;
                }
            }
            let fresh: Vec<_> = (0..size.count).map(|_| content.next_payload()).collect();
            let begun = Instant::now();
            for data in fresh {
                let tensor = put_on_device(data);
                peer.device.sync().context("cannot sync")?;
                drop(tensor);
            }
            Ok(size.gbs(begun))
        }
        Direction::Down => {
            let tensor = on_device.get_or_insert_with(|| put_on_device(content.next_payload()));
            // Separate results that are read for the last time, as in a program.
            let tensors: Vec<_> = (0..size.count).map(|_| tensor.clone() + 1.0).collect();
            peer.device.sync().context("cannot sync")?;
            let begun = Instant::now();
            for tensor in tensors {
                let data = data::into_data(tensor, upload)?;
                ensure!(data.as_bytes().len() == size.bytes, "bytes are missing");
            }
            Ok(size.gbs(begun))
        }
    })
}

/// Payloads in which every page is new to all peers.
struct UniquePayloads(Vec<f32>);

impl UniquePayloads {
    /// Elements in a page of 4 KiB.
    const PAGE: usize = 1024;

    fn new(elements: usize) -> Self {
        Self((0..elements).map(|at| (at % 9973) as f32).collect())
    }

    fn next_payload(&mut self) -> TensorData {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        for page in self.0.chunks_mut(Self::PAGE) {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            // Finite whatever the number: these bits are below the exponent's top.
            page[0] = f32::from_bits(number & 0x3fff_ffff);
        }
        TensorData::new(self.0.clone(), [self.0.len()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payload_pages_are_unique() {
        let mut contents = [(); 2].map(|()| UniquePayloads::new(4 * UniquePayloads::PAGE));
        let pages = |data: &TensorData| -> Vec<Vec<u8>> {
            data.as_bytes()
                .chunks(4 * UniquePayloads::PAGE)
                .map(<[u8]>::to_vec)
                .collect()
        };
        let mut seen: Vec<_> = contents
            .iter_mut()
            .flat_map(|c| pages(&c.next_payload()))
            .collect();
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 8);
    }
}
