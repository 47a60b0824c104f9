//! Peers without a token: the resources they can take, and the effect on others.

#[cfg(target_os = "linux")]
use std::{fs, os::unix::fs::PermissionsExt};
use std::{
    io::Read,
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use burn::tensor::{Device, Tensor};
use tensord_client::{LeaseRequest, PoolUrl};
use tensord_proto::MAX_FRAME_BYTES;
use tensord_testkit::{
    cluster::Cluster,
    host,
    raw::{self, ClientStream, RawSession, carriers, channel, open_call},
    resource_usage::Bound,
};
use tensord_transport::{Dialer, TransportChoice, link::FIRST_FRAME_BYTES, tls::Trust};
use tokio::{
    net::UdpSocket,
    task::JoinSet,
    time::{sleep, timeout},
};
use tonic::Code;

const STATUS: &str = "/tensord.v1.Pool/Status";

/// Timeout for any single step, long enough for a slow machine.
const STEP_TIMEOUT: Duration = Duration::from_secs(30);

fn works(device: &Device) -> bool {
    Tensor::<1>::ones([3], device).sum().into_scalar::<f32>() == 3.0
}

/// Returns how long `tensord status` takes.
fn status_latency(cluster: &Cluster) -> Duration {
    let begun = Instant::now();
    let status = cluster.pool().status().expect("the pool answers");
    assert_eq!(status.workers.len(), cluster.workers.len());
    begun.elapsed()
}

#[test]
fn unauthenticated_calls_are_refused_at_once() {
    const CALLS: usize = 500;
    let cluster = Cluster::start(&[]);
    let scheduler = cluster.scheduler.as_ref().unwrap();
    let before = scheduler.resource_usage();
    raw::block(async {
        for token in [
            None,
            Some("wrong"),
            Some("a-token-of-the-usual-length-but-not-the-one"),
        ] {
            let channel = channel(cluster.client_url()).await.unwrap();
            let mut calls = JoinSet::new();
            for _ in 0..CALLS {
                let channel = channel.clone();
                calls.spawn(async move { open_call(&channel, STATUS, token).await });
            }
            let answers = timeout(STEP_TIMEOUT, calls.join_all()).await;
            let answers = answers.expect("no call is held open");
            let codes: Vec<_> = answers.into_iter().map(|a| a.unwrap().code()).collect();
            // A connection without a token is closed after a time limit, with the calls
            // that still wait on it.
            let refused = [Code::Unauthenticated, Code::Unavailable];
            assert!(codes.iter().all(|code| refused.contains(code)), "{codes:?}");
            assert!(codes.contains(&Code::Unauthenticated), "{codes:?}");
        }
    });
    assert!(status_latency(&cluster) < Duration::from_secs(5));
    scheduler.wait_until_settled(&before, Bound::default());
}

#[test]
fn unauthenticated_connection_is_closed_even_if_busy() {
    let cluster = Cluster::start(&[]);
    let ended = raw::block(async {
        let channel = channel(cluster.client_url()).await.unwrap();
        let closed = async {
            loop {
                let refused = open_call(&channel, STATUS, None).await;
                let refused = refused.expect("there is no token");
                if refused.code() != Code::Unauthenticated {
                    return;
                }
            }
        };
        timeout(STEP_TIMEOUT, closed).await
    });
    ended.expect("a connection that shows no token does not stay");
}

/// Sends one frame of `MAX_FRAME_BYTES` over each of `links` links at once, and waits until
/// all links have ended.
async fn first_frames(address: &str, trust: &Trust, choice: TransportChoice, links: usize) {
    let mut ends = JoinSet::new();
    for _ in 0..links {
        let (address, trust) = (address.to_owned(), trust.clone());
        ends.spawn(async move {
            let dialer = Dialer::new(choice);
            let Ok(mut link) = dialer.dial(&address, &trust, STEP_TIMEOUT).await else {
                return; // A rejection is fine, too.
            };
            let frame = vec![7; MAX_FRAME_BYTES].into();
            // The link ends during the frame, or the frame is not accepted.
            let _ = timeout(STEP_TIMEOUT, link.sender.send(&[frame])).await;
            let end = timeout(STEP_TIMEOUT, async {
                while let Ok(Some(_)) = link.receiver.recv().await {}
            });
            end.await.expect("a stranger's link does not stay");
        });
    }
    ends.join_all().await;
}

#[test]
fn first_frames_of_unauthenticated_peers_take_little_memory() {
    const LINKS: usize = 100;
    let cluster = Cluster::start(&["flex"]);
    let pool = cluster.pool();
    let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
    let address = pool.status().unwrap().workers[0].address.clone();
    let trust = cluster.worker_trust(0);
    let worker = &cluster.workers[0];
    worker.wait_for_processes(1, 1);
    for choice in carriers() {
        let before = worker.resource_usage();
        raw::block(first_frames(&address, &trust, choice, LINKS));
        let peak = worker.resource_usage().peak_bytes;
        let bound = before.peak_bytes + (LINKS * 8 * FIRST_FRAME_BYTES) as u64;
        assert!(
            peak < bound,
            "over {choice:?}: {before} became {peak} bytes"
        );
        worker.wait_until_settled(&before, Bound::default());
        assert!(works(&lease.devices()[0]));
    }
}

/// Connections that complete the handshake, answer pings and never call. Each one is
/// reopened after it is closed. They end when the value is dropped.
struct IdleConnections {
    _tasks: JoinSet<()>,
    made: Arc<AtomicUsize>,
}

impl IdleConnections {
    async fn of(count: usize, url: &str) -> Self {
        let (mut tasks, made) = (JoinSet::new(), Arc::<AtomicUsize>::default());
        for _ in 0..count {
            let (url, made) = (url.to_owned(), made.clone());
            tasks.spawn(async move {
                loop {
                    if let Ok(_channel) = channel(&url).await {
                        made.fetch_add(1, Ordering::Relaxed);
                        // By then the other side has closed the connection.
                        sleep(Duration::from_secs(2)).await;
                    }
                    sleep(Duration::from_millis(100)).await;
                }
            });
        }
        Self {
            _tasks: tasks,
            made,
        }
    }

    fn made(&self) -> usize {
        self.made.load(Ordering::Relaxed)
    }
}

/// Checks the effect of `count` strangers: a program trains on, its worker stays
/// registered, `status` replies, and the scheduler releases what the strangers took.
fn check_idle_connections(count: usize, lasting: Duration, at_most: Duration) {
    let cluster = Cluster::start(&["flex"]);
    let pool = cluster.pool();
    let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
    let device = &lease.devices()[0];
    assert!(works(device));
    let scheduler = cluster.scheduler.as_ref().unwrap();
    let before = scheduler.resource_usage();
    let crowd = raw::block(IdleConnections::of(count, cluster.client_url()));
    // The limit of connections served at once from one address is reached; the others wait.
    cluster.wait("the strangers", || crowd.made() >= count.min(256));
    let until = Instant::now() + lasting;
    let (mut slowest, mut looks) = (Duration::ZERO, 0);
    while looks < 3 || Instant::now() < until {
        slowest = slowest.max(status_latency(&cluster));
        looks += 1;
        assert!(works(device), "a program goes on");
        let now = scheduler.resource_usage();
        let grown = now.resident_bytes.saturating_sub(before.resident_bytes);
        assert!(grown < 100 << 20, "{before} became {now}");
    }
    assert!(slowest < at_most, "status took {slowest:?} under attack");
    assert_eq!(lease.ended(), None);
    assert!(
        !scheduler.log().contains("was cut off"),
        "a worker was lost"
    );
    println!(
        "{looks} looks, the slowest took {slowest:?}; {} connections",
        crowd.made()
    );
    raw::block(async { drop(crowd) });
    scheduler.wait_until_settled(&before, Bound::default());
    assert!(status_latency(&cluster) < Duration::from_secs(2));
}

#[test]
fn idle_unadmitted_connections_do_not_block_others() {
    check_idle_connections(1500, Duration::ZERO, Duration::from_secs(4));
}

/// The same for a minute and with 5,000 connections, which the host's descriptor limit must
/// allow (`ulimit -n 20000`). To be run by hand, in a release build.
#[test]
#[ignore = "takes a minute, and 5,000 descriptors in each of two processes"]
fn five_thousand_idle_connections_do_not_block_others() {
    check_idle_connections(5000, Duration::from_secs(60), Duration::from_secs(1));
}

#[test]
fn silent_sockets_do_not_block_others() {
    const SOCKETS: usize = 1000;
    let cluster = Cluster::start(&["flex"]);
    let scheduler = cluster.scheduler.as_ref().unwrap();
    let before = scheduler.resource_usage();
    let url: PoolUrl = cluster.client_url().parse().unwrap();
    let connect = || TcpStream::connect((url.host.as_str(), url.port)).unwrap();
    let sockets: Vec<TcpStream> = (0..SOCKETS).map(|_| connect()).collect();
    assert!(status_latency(&cluster) < Duration::from_secs(4));
    // Sockets that were served are closed, whether or not others wait.
    for mut socket in sockets.into_iter().take(10) {
        socket.set_read_timeout(Some(STEP_TIMEOUT)).unwrap();
        assert_eq!(socket.read(&mut [0; 8]).unwrap_or(0), 0);
    }
    scheduler.wait_until_settled(&before, Bound::default());
}

/// Whoever sees a connection's first packet learns the lease's id.
#[cfg(target_os = "linux")]
#[test]
fn first_packets_without_a_connection_leave_the_process_of_a_lease_alone() {
    /// More than the process of a lease may have open files.
    const PACKETS: usize = 2000;

    let directory = tempfile::tempdir().unwrap();
    let limited = directory.path().join("limited");
    let binary = host::binary();
    let script = format!(
        "#!/bin/sh\nulimit -n 1024\nexec {} \"$@\"\n",
        binary.display()
    );
    fs::write(&limited, script).unwrap();
    fs::set_permissions(&limited, fs::Permissions::from_mode(0o755)).unwrap();
    let cluster = Cluster::start_with(limited, &["flex*2"]);
    let worker = &cluster.workers[0];
    raw::block(async {
        let mut attached = ClientStream::to(cluster.client_url()).await.unwrap();
        let targets = attached.lease(2).await.unwrap();
        let mut session = RawSession::open(&targets[0]).await.unwrap();
        let tensor = session.upload(&[1.0, 2.0]);
        session.flush().await.unwrap();
        let process = worker.process_of_lease();
        // A long header of type Initial, version 1, and a connection id that begins with that of the lease.
        let mut packet = vec![0xc0, 0, 0, 0, 1, 20];
        packet.extend(targets[0].lease_id.to_be_bytes());
        packet.resize(1200, 7);
        let sending = async {
            for _ in 0..PACKETS {
                let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
                socket.send_to(&packet, &targets[0].address).await.unwrap();
                sleep(Duration::from_millis(1)).await;
            }
        };
        session.stay_connected_during(sending).await.unwrap();
        let read = session.fetch(&tensor).await.unwrap().unwrap();
        assert_eq!(raw::floats(&read), [1.0, 2.0]);
        assert_eq!(worker.process_of_lease(), process);
        // New connections are served, too.
        let opened = timeout(STEP_TIMEOUT, RawSession::open(&targets[1])).await;
        opened.unwrap().unwrap();
    });
}
