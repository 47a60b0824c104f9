//! `tensord gateway`: leased devices for stock Burn programs.
//!
//! The gateway is the client's bridge as a server: programs built without tensord
//! connect to it with Burn's remote device. All programs share one lease, which the
//! gateway holds for as long as it runs.

pub(crate) mod error;

use std::{
    io,
    net::{SocketAddr, TcpListener},
};

use tensord_client::{Lease, LeaseRequest, LeasedDevice, Pool, PoolUrl, Secret};
use tensord_proto::share::{Percent, WHOLE_PERMILLE};
use tracing::info;

use self::error::GatewayError;
use crate::{
    config::{Demand, GatewayConfig, GatewayToken},
    failure::Failure,
    shutdown::Shutdown,
    state::StateDir,
    stdout,
};

/// Runs until a stop is requested or the lease ends.
pub(super) async fn run(config: GatewayConfig) -> Result<(), Failure> {
    let mut shutdown = Shutdown::listen().map_err(Failure::system("wait for signals"))?;
    let token = match config.token {
        GatewayToken::Given(token) => token,
        GatewayToken::FromState(state) => StateDir::open(&state.path)?.gateway_token()?,
    };
    // Binds before it leases, which may take long, so that a wrong address fails at once.
    let failed = |source| GatewayError::Listen {
        listen: config.listen,
        source,
    };
    let listener = TcpListener::bind(config.listen).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let (url, demand) = (config.url, config.demand);
    let leasing = tokio::task::spawn_blocking(move || lease(url, &demand));
    let lease = tokio::select! {
        lease = leasing => lease.map_err(io::Error::other).map_err(Failure::system("lease devices"))??,
        () = shutdown.requested() => return Ok(()),
    };
    let devices: Vec<_> = lease.descriptions().iter().map(kind_and_worker).collect();
    stdout::print(&banner(address, &token, &devices))?;
    let ended = tokio::select! {
        served = lease.serve(listener, &token) => match served {
            Ok(()) => Err(GatewayError::Serve("it returned without an error".into())),
            Err(e) => Err(GatewayError::Serve(e.to_string())),
        },
        reason = lease.ended_async() => Err(GatewayError::LeaseEnded(reason)),
        () = shutdown.requested() => Ok(()),
    };
    // Dropping a lease blocks on the network.
    let _ = tokio::task::spawn_blocking(move || drop(lease)).await;
    Ok(ended?)
}

fn lease(url: PoolUrl, demand: &Demand) -> Result<Lease, GatewayError> {
    let pool = Pool::connect_url(url)?;
    let request = request(demand).on_queued(|position| {
        info!("waiting for devices: the request is at position {position} of the queue")
    });
    Ok(pool.lease(request)?)
}

/// Returns the request for a lease of `demand`.
fn request(demand: &Demand) -> LeaseRequest {
    let request = LeaseRequest::devices(demand.devices)
        .kind(demand.kind.clone().unwrap_or_default())
        .memory_bytes(demand.memory_bytes);
    match demand.share {
        Some(part) => request.share(part),
        None => request,
    }
}

/// Returns the kind of `device` and the name of its worker, and which part of it the lease has.
fn kind_and_worker(device: &LeasedDevice) -> String {
    let place = format!("{} on {}", device.kind, device.worker);
    match device.share() {
        Some(part) => format!(
            "{} of {place}",
            Percent((part * f64::from(WHOLE_PERMILLE)).round() as u32)
        ),
        None => place,
    }
}

/// Returns the text to print when programs can connect, with the code they need.
/// `devices` has the kind and the worker of each device.
fn banner(address: SocketAddr, token: &Secret, devices: &[String]) -> String {
    let (count, s) = (devices.len(), if devices.len() == 1 { "" } else { "s" });
    format!(
        "tensord gateway at ws://{address} with {count} device{s}: {devices}\n\
         \n\
         In a Burn 0.22 program with the feature `remote-websocket`:\n\
         \n    \
             let host = burn::remote::RemoteHost::websocket(\"ws://{address}\")\n        \
                 .with_credential(\"{token}\");\n    \
             let devices = host.devices()?;\n",
        devices = devices.join(", "),
        token = token.reveal(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_the_share_of_the_settings() {
        let demand = |share| Demand {
            devices: 1,
            share,
            kind: Some("cuda".into()),
            memory_bytes: 4 << 30,
        };
        for share in [None, Some(0.25)] {
            let request = format!("{:?}", request(&demand(share)));
            let expected = LeaseRequest::devices(1).kind("cuda").memory_bytes(4 << 30);
            let expected = match share {
                Some(part) => expected.share(part),
                None => expected,
            };
            assert_eq!(request, format!("{expected:?}"));
            assert!(request.contains(&format!("share: {share:?}")), "{request}");
        }
    }

    #[test]
    fn the_banner_has_the_lines_a_program_needs() {
        let address = "127.0.0.1:7463".parse().unwrap();
        let devices = ["flex on gpu-1".to_owned(), "flex on gpu-2".to_owned()];
        let expected = "\
tensord gateway at ws://127.0.0.1:7463 with 2 devices: flex on gpu-1, flex on gpu-2

In a Burn 0.22 program with the feature `remote-websocket`:

    let host = burn::remote::RemoteHost::websocket(\"ws://127.0.0.1:7463\")
        .with_credential(\"token\");
    let devices = host.devices()?;
";
        assert_eq!(banner(address, &Secret::new("token"), &devices), expected);
    }
}
