//! A large tensor from one worker to another, and the traffic of the program.
//!
//! Both workers are processes on this host. The tensor exists beforehand; it has moved when
//! a sync of its new device returns. The program's own traffic is that of `Lease::traffic`,
//! the sync included.

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use burn::tensor::{Device, Tensor};
use serde_json::json;

use crate::{
    context::Context,
    data::scalar,
    fleet::Fleet,
    network::Network,
    race::Contender,
    report::{Report, format_number, format_quartiles, table},
    stats::round,
};

const MIB: usize = 1 << 20;

/// Runs the bench.
///
/// # Errors
///
/// If a worker fails, or bytes are lost.
pub(super) fn run(context: &Context) -> Result<Report> {
    context.progress.update("transfer");
    let mib = context.full_or_quick(256, 4);
    let network = Network::Plain;
    let fleet = Fleet::start(&network, 2, None)?;
    let [from, to] = fleet.devices() else {
        anyhow::bail!("the lease must have two devices");
    };
    let elements = mib * MIB / 4;
    let tensor = Tensor::<1>::ones([elements], from);
    let mut client_bytes = 0;
    let contender = Contender::new("gbs", "tensord", |run| {
        from.sync().context("cannot sync")?;
        let before = fleet.lease().traffic();
        let begun = Instant::now();
        let moved = move_to(&tensor, to)?;
        let took = begun.elapsed();
        let after = fleet.lease().traffic();
        let bytes = |traffic: tensord_client::Traffic| traffic.bytes_up + traffic.bytes_down;
        client_bytes = client_bytes.max(bytes(after) - bytes(before));
        if run == 0 {
            let range = [scalar(moved.clone().min())?, scalar(moved.max())?];
            ensure!(
                range == [1.0; 2],
                "the tensor that arrived differs from the one sent"
            );
        }
        Ok((mib * MIB) as f64 / took.as_secs_f64() / 1e9)
    });
    let found = context.race("transfer", vec![contender])?;
    let gbs = found
        .iter()
        .next()
        .context("the benchmark returned no figures")?
        .summary;
    let mut rows = table(&["MiB"], &["GB/s", "quartiles", "client's bytes, most"]);
    rows.add_row([
        mib.to_string(),
        format_number(gbs.median),
        format_quartiles(&gbs),
        format_number(client_bytes as f64),
    ]);
    Ok(Report {
        json: json!({
            "mib": mib,
            "gbs": round(gbs.median),
            "client_bytes": client_bytes,
            "quartiles": { "gbs": [round(gbs.q1), round(gbs.q3)] },
        }),
        table: rows.to_string(),
    })
}

fn move_to(tensor: &Tensor<1>, device: &Device) -> Result<Tensor<1>> {
    let moved = tensor.clone().to_device(device);
    device.sync().context("cannot sync")?;
    Ok(moved)
}
