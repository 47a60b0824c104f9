//! Text from peers in logs and on terminals.

use std::time::{Duration, Instant};

use tensord_client::Pool;
use tensord_proto::{
    v1::{ClientHello, ClientMessage, Hello, Open, client_message, frame, pool_client::PoolClient},
    version,
};
use tensord_testkit::{
    cluster::{Cluster, Process},
    raw::{self, authorised, channel, open_call},
};
use tensord_transport::{Dialer, PoolUrl, TransportChoice, channel::duplex, tls::Trust};
use tokio::time::timeout;

/// Timeout for any single step, long enough for a slow machine.
const STEP_TIMEOUT: Duration = Duration::from_secs(30);

/// A forged log line, and control sequences that a terminal would execute.
const FORGED: &str = "tensord 1\n2026-01-01T00:00:00Z  WARN forged: all is lost\u{1b}[2J\r";

/// Returns a hello that is refused, and whose text appears in the refusal.
fn hello(software: String) -> Hello {
    Hello {
        protocol_min: 90,
        protocol_max: 99,
        software,
        ..version::hello()
    }
}

/// Checks that no line logged after the first `before` bytes is forged or long.
fn check_log(process: &Process, before: usize) {
    let log = process.log();
    let new = &log[before..];
    assert!(
        new.contains("tensord 1\\n2026-01-01"),
        "it is not shown:\n{new}"
    );
    for line in new.lines() {
        assert!(
            !line.starts_with("2026-01-01") && line.len() < 8192,
            "{line}"
        );
        assert!(!line.contains(['\u{1b}', '\r']), "{line:?}");
    }
}

async fn attach(url: &str, software: String) -> tonic::Status {
    let token = url.parse::<PoolUrl>().unwrap().token.unwrap();
    let body = client_message::Body::Hello(ClientHello {
        hello: Some(hello(software)),
        ..ClientHello::default()
    });
    let messages = tokio_stream::once(ClientMessage { body: Some(body) });
    let mut client = PoolClient::new(channel(url).await.unwrap());
    let answer = client
        .attach(authorised(messages, Some(token.reveal())))
        .await;
    match answer {
        Err(status) => status,
        Ok(answer) => answer.into_inner().message().await.unwrap_err(),
    }
}

#[test]
fn client_text_cannot_forge_scheduler_log_lines() {
    let cluster = Cluster::start(&[]);
    let scheduler = cluster.scheduler.as_ref().unwrap();
    let before = scheduler.log().len();
    raw::block(async {
        for software in [FORGED.to_owned(), FORGED.repeat(3000)] {
            let status = attach(cluster.client_url(), software).await;
            assert!(status.message().contains("no common protocol version"));
            assert!(status.message().len() < 4096 && !status.message().contains('\n'));
        }
    });
    check_log(scheduler, before);
}

async fn open(address: &str, trust: &Trust, software: String) {
    let dialer = Dialer::new(TransportChoice::Tcp);
    let mut link = dialer.dial(address, trust, STEP_TIMEOUT).await.unwrap();
    let open = Open {
        hello: Some(hello(software)),
        ..Open::default()
    };
    let open = duplex::encode(frame::Body::Open(open));
    link.sender.send(&[open]).await.unwrap();
    let answer = timeout(STEP_TIMEOUT, link.receiver.recv()).await;
    let answer = duplex::decode(answer.unwrap().unwrap().unwrap()).unwrap();
    assert!(matches!(answer.body, Some(frame::Body::Rejected(_))));
}

#[test]
fn client_text_cannot_forge_worker_log_lines() {
    let cluster = Cluster::start(&["flex"]);
    let worker = &cluster.workers[0];
    let address = Pool::connect(cluster.client_url())
        .unwrap()
        .status()
        .unwrap();
    let address = address.workers[0].address.clone();
    let trust = cluster.worker_trust(0);
    let before = worker.log().len();
    raw::block(async {
        for software in [FORGED.to_owned(), FORGED.repeat(500)] {
            open(&address, &trust, software).await;
        }
    });
    check_log(worker, before);
}

#[test]
fn wrong_tokens_do_not_flood_the_log() {
    const LASTING: Duration = Duration::from_secs(4);
    let cluster = Cluster::start(&[]);
    let scheduler = cluster.scheduler.as_ref().unwrap();
    let begun = Instant::now();
    let refused = raw::block(async {
        let mut refused = 0;
        while begun.elapsed() < LASTING {
            let channel = channel(cluster.client_url()).await.unwrap();
            for _ in 0..100 {
                let token = Some("wrong-but-of-the-usual-length");
                let status = open_call(&channel, "/tensord.v1.Pool/Status", token).await;
                assert_eq!(status.unwrap().code(), tonic::Code::Unauthenticated);
                refused += 1;
            }
        }
        refused
    });
    assert!(refused > 500, "{refused} calls are no attack");
    // The count of the last second is logged when the second is over.
    let counted =
        |log: &str| log.contains("lines within a second that were similar to: call refused");
    cluster.wait("the count", || counted(&scheduler.log()));
    let log = scheduler.log();
    let lines = log.lines().filter(|line| line.contains("call refused: "));
    let lines = lines.count() as u64;
    // Ten lines and their count in each second in which the attack ran.
    let seconds = begun.elapsed().as_secs() + 2;
    assert!(
        lines <= 11 * seconds,
        "{lines} lines in {seconds} s, of {refused} calls"
    );
    assert!(!log.contains("wrong-but"), "a token was logged");
}
