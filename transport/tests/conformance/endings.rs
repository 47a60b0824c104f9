//! Laws 3, 4 and 7: how a link ends.

use tensord_transport::{Link, TransportChoice};
use tokio::sync::oneshot;

use crate::harness::*;

laws! {
    finished_link_delivers_all_frames_then_none
    the_other_direction_goes_on_after_a_finish
    a_dropped_link_ends_with_an_error
    a_dropped_sender_ends_the_link_with_an_error
    a_dropped_receiver_leaves_the_sender_working
    a_lost_connection_ends_both_calls
    a_dropped_listener_leaves_accepted_links_working
    links_leave_no_tasks_behind
}

const FRAMES: usize = 30;
const FRAME_BYTES: usize = 100_000;

/// Runs `law` on links in both directions.
async fn both_directions(kind: Kind, mut law: impl AsyncFnMut(Link, Link)) {
    let mut server = Server::start().await;
    let (near, far) = server.connect(kind).await;
    law(near, far).await;
    let (near, far) = server.connect(kind).await;
    law(far, near).await;
}

async fn finished_link_delivers_all_frames_then_none(kind: Kind) {
    both_directions(kind, async |mut from, mut to| {
        send_frames(&mut from.sender, FRAMES, FRAME_BYTES).await;
        let Link {
            sender, receiver, ..
        } = from;
        sender.finish().await;
        // The whole link is dropped before the peer reads.
        drop(receiver);
        expect_frames(&mut to.receiver, FRAMES, FRAME_BYTES).await;
        assert_eq!(to.receiver.recv().await, Ok(None));
        assert_eq!(to.receiver.recv().await, Ok(None));
    })
    .await;
}

async fn the_other_direction_goes_on_after_a_finish(kind: Kind) {
    both_directions(kind, async |from, mut to| {
        let Link {
            sender,
            mut receiver,
            ..
        } = from;
        sender.finish().await;
        assert_eq!(to.receiver.recv().await, Ok(None));
        let sending = async {
            send_frames(&mut to.sender, 200, FRAME_BYTES).await;
            to.sender.finish().await;
            drop(to.receiver);
        };
        tokio::join!(sending, expect_frames(&mut receiver, 200, FRAME_BYTES));
        assert_eq!(receiver.recv().await, Ok(None));
    })
    .await;
}

async fn a_dropped_link_ends_with_an_error(kind: Kind) {
    both_directions(kind, async |mut from, mut to| {
        send_frames(&mut from.sender, FRAMES, FRAME_BYTES).await;
        drop(from);
        expect_error(&mut to.receiver).await;
        send_until_error(&mut to.sender).await;
    })
    .await;
}

async fn a_dropped_sender_ends_the_link_with_an_error(kind: Kind) {
    both_directions(kind, async |from, mut to| {
        let Link {
            sender,
            mut receiver,
            ..
        } = from;
        drop(sender);
        expect_error(&mut to.receiver).await;
        expect_error(&mut receiver).await;
    })
    .await;
}

async fn a_dropped_receiver_leaves_the_sender_working(kind: Kind) {
    both_directions(kind, async |from, mut to| {
        let Link {
            mut sender,
            receiver,
            ..
        } = from;
        drop(receiver);
        let sending = async {
            send_frames(&mut sender, FRAMES, FRAME_BYTES).await;
            sender.finish().await;
        };
        let receiving = async {
            expect_frames(&mut to.receiver, FRAMES, FRAME_BYTES).await;
            assert_eq!(to.receiver.recv().await, Ok(None));
        };
        tokio::join!(sending, receiving);
    })
    .await;
}

/// The peer vanishes, like a process that is killed: its runtime and its sockets are
/// gone. One call waits for a frame, one for room to send.
async fn a_lost_connection_ends_both_calls(kind: Kind) {
    let (addressed, address) = oneshot::channel();
    let (kill, killed) = oneshot::channel::<()>();
    let peer = std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let mut server = Server::start().await;
            let known = (server.address(), server.trust.clone());
            addressed.send(known).unwrap();
            let mut link = server.listener.accept().await;
            link.receiver.admit().unwrap();
            killed.await.unwrap();
            match kind.choice {
                // The kernel closes a killed process's sockets, and does nothing else.
                TransportChoice::Tcp => drop(link),
                // Not dropped, as that would close the connection properly.
                _ => std::mem::forget((link, server)),
            }
        });
        runtime.shutdown_background();
    });
    let (address, trust) = address.await.unwrap();
    let link = kind
        .dialer()
        .dial(&address, &trust, DIAL_DEADLINE)
        .await
        .unwrap();
    let Link {
        mut sender,
        mut receiver,
        ..
    } = link;
    sender.send(&[frame(0, 5)]).await.unwrap();
    let mut sending = tokio::spawn(async move { send_until_error(&mut sender).await });
    let mut receiving = tokio::spawn(async move { expect_error(&mut receiver).await });
    assert!(is_pending(&mut sending).await);
    assert!(is_pending(&mut receiving).await);
    kill.send(()).unwrap();
    sending.await.unwrap();
    receiving.await.unwrap();
    peer.join().unwrap();
}

async fn a_dropped_listener_leaves_accepted_links_working(kind: Kind) {
    let (mut near, mut far, server) = connect(kind).await;
    let mut not_accepted = server.dial(kind).await;
    not_accepted.sender.send(&[frame(1, 10)]).await.unwrap();
    drop(server);
    expect_error(&mut not_accepted.receiver).await;
    for (from, to) in [
        (&mut near.sender, &mut far.receiver),
        (&mut far.sender, &mut near.receiver),
    ] {
        send_frames(from, FRAMES, FRAME_BYTES).await;
        expect_frames(to, FRAMES, FRAME_BYTES).await;
    }
}

/// However a link ends, and whatever was in flight.
async fn links_leave_no_tasks_behind(kind: Kind) {
    let metrics = tokio::runtime::Handle::current().metrics();
    let before = metrics.num_alive_tasks();
    let mut server = Server::start().await;
    server.connect(kind).await;
    {
        let (near, far) = server.connect(kind).await;
        near.sender.finish().await;
        drop(far.receiver);
        far.sender.finish().await;
    }
    {
        let (mut near, _far) = server.connect(kind).await;
        // Until it waits for the peer to read.
        while !is_pending(near.sender.send(&[frame(1, 1 << 20)])).await {}
    }
    drop(server.dial(kind).await);
    drop(server);
    while metrics.num_alive_tasks() > before {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}
