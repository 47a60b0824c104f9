//! What a `FaultSwitch` guarantees.

use std::time::{Duration, Instant};

use bytes::Bytes;
use tensord_transport::{Dialer, Link, faults::FaultSwitch};

use crate::harness::*;

/// Makes a test of each guarantee for each carrier.
macro_rules! guarantees {
    ($($guarantee:ident)*) => {
        $(mod $guarantee {
            laws!(@test $guarantee, quic, crate::harness::QUIC);
            laws!(@test $guarantee, grpc, crate::harness::GRPC);
            laws!(@test $guarantee, tcp, crate::harness::TCP);
        })*
    };
}

guarantees! {
    drop_next_loses_that_many_frames
    a_delayed_frame_comes_later_and_in_order
    delayed_frames_overlap
    a_cut_ends_both_calls_and_new_links_work
    a_cut_is_seen_at_the_other_end
    half_open_lets_nothing_pass_until_it_heals
    half_open_link_buffers_a_bounded_amount
    a_half_open_link_can_be_cut
    a_link_dropped_half_open_does_not_finish
}

/// A link whose dialling end is under a switch.
async fn behind_switch(kind: Kind) -> (FaultSwitch, Link, Link, Server) {
    let mut server = Server::start().await;
    let switch = FaultSwitch::default();
    let (near, far) = dial(&mut server, kind, &switch).await;
    (switch, near, far, server)
}

async fn dial(server: &mut Server, kind: Kind, switch: &FaultSwitch) -> (Link, Link) {
    let dialer = Dialer::new(kind.choice).with_faults(switch.clone());
    let near = dialer
        .dial(&server.address(), &server.trust, DIAL_DEADLINE)
        .await;
    server.exchange_first_frame(near.unwrap()).await
}

async fn drop_next_loses_that_many_frames(kind: Kind) {
    let (switch, mut near, mut far, _server) = behind_switch(kind).await;
    for number in 1..=10 {
        if number == 3 {
            switch.drop_next(4);
        }
        near.sender.send(&[frame(number, 100)]).await.unwrap();
    }
    for number in [1, 2, 7, 8, 9, 10] {
        assert_eq!(
            far.receiver.recv().await,
            Ok(Some(frame(number, 100))),
            "{number}"
        );
    }
}

async fn a_delayed_frame_comes_later_and_in_order(kind: Kind) {
    const DELAY: Duration = Duration::from_millis(400);
    let (switch, mut near, mut far, _server) = behind_switch(kind).await;
    let start = Instant::now();
    switch.delay(DELAY);
    near.sender.send(&[frame(1, 100)]).await.unwrap();
    switch.delay(Duration::ZERO);
    near.sender.send(&[frame(2, 100)]).await.unwrap();
    expect_frames(&mut far.receiver, 2, 100).await;
    assert!(start.elapsed() >= DELAY, "{:?}", start.elapsed());
}

async fn delayed_frames_overlap(kind: Kind) {
    let (switch, mut near, mut far, _server) = behind_switch(kind).await;
    // One after the other, they would take longer than a test may.
    switch.delay(Duration::from_secs(1));
    tokio::join!(
        send_frames(&mut near.sender, 100, 100),
        expect_frames(&mut far.receiver, 100, 100),
    );
}

async fn a_cut_ends_both_calls_and_new_links_work(kind: Kind) {
    let (switch, mut near, _far, mut server) = behind_switch(kind).await;
    let (waiting, _not_reading) = dial(&mut server, kind, &switch).await;
    let (mut sender, mut receiver) = (waiting.sender, waiting.receiver);
    let mut receiving = tokio::spawn(async move { expect_error(&mut receiver).await });
    let mut sending = tokio::spawn(async move { send_until_error(&mut sender).await });
    assert!(is_pending(&mut receiving).await);
    assert!(is_pending(&mut sending).await);
    switch.cut();
    // A call that begins after the cut, one that waits to receive, one that waits to
    // send.
    let error = near.sender.send(&[frame(1, 100)]).await.unwrap_err();
    assert!(
        error.to_string().contains("the test cut the link"),
        "{error}"
    );
    let row = [frame(1, 100), Bytes::new(), Bytes::new()];
    near.sender.send_now(&[row]).unwrap_err();
    expect_error(&mut near.receiver).await;
    receiving.await.unwrap();
    sending.await.unwrap();

    let (mut near, mut far) = dial(&mut server, kind, &switch).await;
    assert_eq!(switch.links(), 3);
    send_frames(&mut near.sender, 5, 100).await;
    expect_frames(&mut far.receiver, 5, 100).await;
}

async fn a_cut_is_seen_at_the_other_end(kind: Kind) {
    let (switch, _near, mut far, _server) = behind_switch(kind).await;
    switch.cut();
    expect_error(&mut far.receiver).await;
}

async fn half_open_lets_nothing_pass_until_it_heals(kind: Kind) {
    let (switch, mut near, mut far, mut server) = behind_switch(kind).await;
    switch.half_open();
    send_frames(&mut near.sender, 5, 100).await;
    send_frames(&mut far.sender, 5, 100).await;
    assert!(is_pending(far.receiver.recv()).await);
    assert!(is_pending(near.receiver.recv()).await);
    // Dialling itself works; only frames do not pass.
    let dialer = Dialer::new(kind.choice).with_faults(switch.clone());
    let later = dialer
        .dial(&server.address(), &server.trust, DIAL_DEADLINE)
        .await;
    let mut later = later.unwrap();
    later.sender.send(&[frame(1, 10)]).await.unwrap();
    assert!(is_pending(server.listener.accept()).await);

    switch.heal();
    expect_frames(&mut far.receiver, 5, 100).await;
    expect_frames(&mut near.receiver, 5, 100).await;
    let mut later = server.listener.accept().await;
    later.receiver.admit().unwrap();
    expect_frames(&mut later.receiver, 1, 10).await;
}

async fn half_open_link_buffers_a_bounded_amount(kind: Kind) {
    const FRAME_BYTES: usize = 1 << 20;
    const BOUND: usize = 64;
    let (switch, mut near, mut far, _server) = behind_switch(kind).await;
    switch.half_open();
    let mut accepted = 0;
    while !is_pending(near.sender.send(&[frame(accepted + 1, FRAME_BYTES)])).await {
        accepted += 1;
        assert!(
            accepted < BOUND,
            "{accepted} MiB were accepted, and none passed"
        );
    }
    switch.heal();
    expect_frames(&mut far.receiver, accepted, FRAME_BYTES).await;
}

async fn a_half_open_link_can_be_cut(kind: Kind) {
    let (switch, mut near, mut far, _server) = behind_switch(kind).await;
    switch.half_open();
    switch.cut();
    expect_error(&mut near.receiver).await;
    send_until_error(&mut near.sender).await;
    expect_error(&mut far.receiver).await;
}

async fn a_link_dropped_half_open_does_not_finish(kind: Kind) {
    let (switch, mut near, mut far, _server) = behind_switch(kind).await;
    switch.half_open();
    near.sender.send(&[frame(1, 100)]).await.unwrap();
    drop(near);
    expect_error(&mut far.receiver).await;
}
