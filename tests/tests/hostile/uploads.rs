//! Uploads that a worker keeps: access by other programs and by other tenants.

use std::time::Duration;

use burn_backend::DType;
use burn_ir::TensorIr;
use bytes::Bytes;
use tensord_proto::{
    content::{Content, Entry, Hash, MAX_HELD, hash},
    v1::{self, ErrorCode, frame::Body},
};
use tensord_testkit::{
    cluster::{Cluster, Process},
    raw::{self, ClientStream, RawSession, Target},
};
use tokio::time::sleep;

/// The values that one tenant uploads.
const SECRET: [f32; 64] = [42.0; 64];

/// Creates a token for programs of `tenant` and returns the URL with which they connect to
/// `cluster`.
fn url_of(cluster: &Cluster, tenant: &str) -> String {
    let state = cluster.path("state");
    let state = state.to_str().expect("temporary paths are text");
    let log = cluster.path(&format!("tenant-{tenant}.log"));
    let added = Process::start(&["tenant", "add", tenant, "--state", state], &[], log);
    added.wait_for("tenant", |line| line.contains("tokens").then_some(()));
    let args = [
        "token", "create", "--name", tenant, "--tenant", tenant, "--state", state,
    ];
    let log = cluster.path(&format!("token-{tenant}.log"));
    let made = Process::start(&args, &[], log);
    made.wait_for("URL", |line| {
        let (_, url) = line.split_once("tensord://")?;
        let url = url.split(['\'', '"', ' ']).next().unwrap_or_default();
        Some(format!("tensord://{url}"))
    })
}

async fn target(url: &str) -> (ClientStream, Target) {
    let mut attached = ClientStream::to(url).await.unwrap();
    let target = attached.lease(1).await.unwrap().remove(0);
    (attached, target)
}

/// Opens a session at `target` and returns it with the hashes that the worker offers, which
/// arrive before all else.
async fn open_with_offer(target: &Target) -> (RawSession, Vec<Hash>) {
    let mut session = RawSession::open(target).await.unwrap();
    let probe = session.upload(&[1.0]);
    session.reads(std::slice::from_ref(&probe));
    let mut offered = Vec::new();
    loop {
        match session.next().await.unwrap() {
            Body::Held(held) => offered.extend_from_slice(held.hashes.as_chunks().0),
            Body::Values(_) => return (session, offered),
            other => panic!("unexpected: {other:?}"),
        }
    }
}

fn secret_bytes() -> Bytes {
    raw::bytes_of(&SECRET).into()
}

fn secret(id: u64) -> TensorIr {
    raw::typed(id, &[SECRET.len()], DType::F32)
}

/// Uploads `bytes`, of the size of the secret, and has them kept in `slot`.
fn keep(session: &mut RawSession, bytes: Bytes, slot: u32) {
    let keep = Some(slot);
    let id = session.new_id();
    let upload = Entry::Upload(Content::Inline { bytes, keep });
    session.upload_from(secret(id), &[upload]);
}

/// Opens a session at `target` that uploads the secret, has it kept, and closes.
async fn leave_secret(target: &Target) {
    let mut session = RawSession::open(target).await.unwrap();
    keep(&mut session, secret_bytes(), 0);
    session.push(Body::Close(v1::Close {}));
    session.end().await;
}

/// Waits until a new session at `target` is offered anything. Returns the session and the
/// hashes.
async fn wait_for_offer(target: &Target) -> (RawSession, Vec<Hash>) {
    loop {
        let (mut session, offered) = open_with_offer(target).await;
        if !offered.is_empty() {
            return (session, offered);
        }
        // The worker hashes kept uploads in the background.
        session.push(Body::Close(v1::Close {}));
        session.end().await;
        sleep(Duration::from_millis(50)).await;
    }
}

/// Reads the upload at index `index` of the worker's offer.
async fn read_held(session: &mut RawSession, index: u32) -> Vec<f32> {
    let id = session.new_id();
    let held = Entry::Upload(Content::Held(index));
    let tensor = session.upload_from(secret(id), &[held]);
    raw::floats(&session.fetch(&tensor).await.unwrap().unwrap())
}

#[test]
fn kept_uploads_are_hidden_from_other_tenants() {
    let cluster = Cluster::start(&["flex*2"]);
    let (red, blue) = (url_of(&cluster, "red"), url_of(&cluster, "blue"));
    raw::block(async {
        let (_red, red) = target(&red).await;
        let (_blue, blue) = target(&blue).await;
        leave_secret(&red).await;
        let (mut session, found) = wait_for_offer(&red).await;
        assert_eq!(
            found,
            [hash(&secret_bytes())],
            "its own tenant is offered it"
        );
        assert_eq!(read_held(&mut session, 0).await, SECRET);
        // The other tenant is offered nothing, and gets nothing whatever it sends. It
        // cannot send a hash: a session names indices of its own offer and its own slots.
        let last = MAX_HELD as u32 - 1;
        let guesses = [0, 1, last].map(Content::Held);
        for guess in guesses.into_iter().chain([Content::Slot(0)]) {
            let (mut session, found) = open_with_offer(&blue).await;
            assert!(found.is_empty(), "{found:?}");
            let id = session.new_id();
            let tensor = session.upload_from(secret(id), &[Entry::Upload(guess.clone())]);
            session.reads(std::slice::from_ref(&tensor));
            let broken = session.end().await;
            let error = broken
                .error()
                .unwrap_or_else(|| panic!("{guess:?}: {broken}"));
            assert_eq!(error.code(), ErrorCode::Protocol, "{guess:?}: {error}");
            assert!(error.message.contains("has no upload"), "{error}");
        }
        // Having the same bytes reveals nothing about the first tenant: each tenant has its
        // own store.
        leave_secret(&blue).await;
        let (mut session, found) = wait_for_offer(&blue).await;
        assert_eq!(found, [hash(&secret_bytes())]);
        assert_eq!(read_held(&mut session, 0).await, SECRET);
    });
}

#[test]
fn programs_of_one_tenant_share_kept_uploads() {
    let cluster = Cluster::start(&["flex*2"]);
    raw::block(async {
        let (_first, first) = target(cluster.client_url()).await;
        let (_second, second) = target(cluster.client_url()).await;
        leave_secret(&first).await;
        let (mut session, found) = wait_for_offer(&second).await;
        assert_eq!(found, [hash(&secret_bytes())]);
        assert_eq!(read_held(&mut session, 0).await, SECRET);
    });
}

#[test]
fn uploads_of_a_session_that_runs_are_shared_within_its_tenant_only() {
    let cluster = Cluster::start(&["flex*3"]);
    let (red, blue) = (url_of(&cluster, "red"), url_of(&cluster, "blue"));
    raw::block(async {
        let (_first, first) = target(&red).await;
        let (_second, second) = target(&red).await;
        let (_blue, blue) = target(&blue).await;
        let mut session = RawSession::open(&first).await.unwrap();
        keep(&mut session, secret_bytes(), 0);
        assert_eq!(session.sync().await.unwrap(), None);
        let (_, found) = open_with_offer(&second).await;
        assert!(found.is_empty(), "it has not asked for that");
        let request = session.request_sync(true);
        assert_eq!(session.synced(request).await.unwrap(), None);
        let (mut other, found) = open_with_offer(&second).await;
        assert_eq!(found, [hash(&secret_bytes())]);
        assert_eq!(read_held(&mut other, 0).await, SECRET);
        let (_, found) = open_with_offer(&blue).await;
        assert!(found.is_empty(), "{found:?}");
    });
}

#[test]
fn client_that_shares_uploads_all_the_time_costs_a_bounded_amount() {
    /// Syncs that wait for each other's replies: more than the worker takes copies of a process.
    const ROUNDS: u32 = 1_100;
    const SYNCS: u32 = 20_000;
    let cluster = Cluster::start(&["flex*2"]);
    let worker = cluster.workers[0].id();
    let open_files = || {
        let files = std::fs::read_dir(format!("/proc/{worker}/fd")).unwrap();
        files.count()
    };
    raw::block(async {
        let (_hostile, hostile) = target(cluster.client_url()).await;
        let (_other, other) = target(cluster.client_url()).await;
        let mut bystander = RawSession::open(&other).await.unwrap();
        let tensor = bystander.upload(&[1.0]);
        let mut session = RawSession::open(&hostile).await.unwrap();
        let before = open_files();
        let mut last = 0;
        for at in 0..SYNCS {
            // New content each time, so that there is always something to share.
            let content = raw::bytes_of(&[at as f32; SECRET.len()]);
            keep(&mut session, content.into(), at % 8);
            last = session.request_sync(true);
            if at < ROUNDS {
                assert_eq!(session.synced(last).await.unwrap(), None);
            }
            if at % 100 == 0 {
                session.flush().await.unwrap();
                bystander.fetch(&tensor).await.unwrap().unwrap();
            }
        }
        assert_eq!(session.synced(last).await.unwrap(), None);
        // Segments that the tenant has, and those that each of the two processes has.
        let more = open_files().saturating_sub(before);
        assert!(more <= 16 + 2 * 64, "{more} more open files");
        bystander.fetch(&tensor).await.unwrap().unwrap();
        // Each of the first syncs has had one upload to share.
        let (_, found) = open_with_offer(&other).await;
        assert!((1..=1024).contains(&found.len()), "{}", found.len());
    });
}
