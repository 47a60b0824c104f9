//! Laws 1, 2, 5 and 6: what passes over a link, and at what pace.

use std::{pin::pin, time::Duration};

use bytes::Bytes;
use tensord_proto::MAX_FRAME_BYTES;
use tensord_transport::{LinkError, LinkReceiver, LinkSender, link::IDLE_TIMEOUT};
use tokio::time::{sleep, timeout};

use crate::harness::*;

laws! {
    frames_pass_whole_in_order_both_ways_at_once
    frames_sent_together_arrive_one_by_one
    send_now_keeps_frame_order
    try_recv_returns_arrived_frames
    parts_are_joined
    a_frame_over_the_limit_is_refused_and_the_link_goes_on
    send_waits_for_a_receiver_that_does_not_read
    recv_is_cancel_safe
    send_is_cancel_safe
    the_listener_learns_of_a_link_from_its_first_frame
    many_links_share_a_listener
}

/// Sizes around every boundary: of prefixes, packets, buffers, limits.
fn sizes() -> Vec<usize> {
    let mut sizes = vec![
        0, 1, 3, 4, 5, 1_100, 1_200, 1_500, 16_383, 16_384, 65_535, 65_536,
    ];
    sizes.extend([1 << 20, MAX_FRAME_BYTES - 1, MAX_FRAME_BYTES, 0, 7]);
    // And a burst that shares packets and buffers.
    sizes.extend((0..500).map(|n| n * 13 % 200));
    sizes
}

async fn send_all(mut sender: LinkSender, first: usize) {
    for (n, size) in sizes().into_iter().enumerate() {
        sender.send(&[frame(first + n, size)]).await.unwrap();
    }
    sender.finish().await;
}

async fn expect_all(mut receiver: LinkReceiver, first: usize) {
    for (n, size) in sizes().into_iter().enumerate() {
        expect_frame(&mut receiver, first + n, size).await;
    }
    assert_eq!(receiver.recv().await, Ok(None));
}

async fn frames_pass_whole_in_order_both_ways_at_once(kind: Kind) {
    let (near, far, _server) = connect(kind).await;
    tokio::join!(
        send_all(near.sender, 1),
        send_all(far.sender, 10_000),
        expect_all(far.receiver, 1),
        expect_all(near.receiver, 10_000),
    );
}

async fn frames_sent_together_arrive_one_by_one(kind: Kind) {
    let (mut near, mut far, _server) = connect(kind).await;
    let frames: Vec<_> = sizes()
        .into_iter()
        .enumerate()
        .map(|(n, size)| {
            let whole = frame(n, size);
            let (a, b) = (size / 7, size / 2);
            [whole.slice(..a), whole.slice(a..b), whole.slice(b..)]
        })
        .collect();
    let sending = async {
        near.sender.send_all(&[]).await.unwrap();
        for row in frames.chunks(100) {
            near.sender.send_all(row).await.unwrap();
        }
        // A frame that is too large holds back the others of its batch, and nothing else.
        let over = frame(0, MAX_FRAME_BYTES + 1);
        let row = [
            [frame(0, 5), Bytes::new(), Bytes::new()],
            [over, Bytes::new(), Bytes::new()],
        ];
        let refused = near.sender.send_all(&row).await;
        assert_eq!(refused, Err(LinkError::TooLarge(MAX_FRAME_BYTES + 1)));
        near.sender.finish().await;
    };
    let receiving = async {
        for (n, size) in sizes().into_iter().enumerate() {
            expect_frame(&mut far.receiver, n, size).await;
        }
        assert_eq!(far.receiver.recv().await, Ok(None));
    };
    tokio::join!(sending, receiving);
}

async fn send_now_keeps_frame_order(kind: Kind) {
    const SIZE: usize = 100_000;
    let row = |number| {
        let whole = frame(number, SIZE);
        [whole.slice(..9), Bytes::new(), whole.slice(9..)]
    };
    let (mut near, mut far, _server) = connect(kind).await;
    if !near.sender.can_send_now() {
        near.sender.send_now(&[row(1)]).unwrap_err();
        near.sender.send(&[frame(1, 10)]).await.unwrap();
        return expect_frame(&mut far.receiver, 1, 10).await;
    }
    let over = [frame(0, MAX_FRAME_BYTES), frame(0, 1), Bytes::new()];
    let refused = near.sender.send_now(&[over]);
    assert_eq!(refused, Err(LinkError::TooLarge(MAX_FRAME_BYTES + 1)));
    // As nobody reads, the kernel accepts no more at some point. A switch accepts a frame
    // or fails.
    let most = if kind.behind_switch { 50 } else { 500 };
    let (mut sent, mut is_kept) = (0, false);
    while !is_kept && sent < most {
        is_kept = !near
            .sender
            .send_now(&[row(sent + 1), row(sent + 2)])
            .unwrap();
        sent += 2;
    }
    assert_eq!(is_kept, !kind.behind_switch);
    let sending = async {
        near.sender.send_all(&[]).await.unwrap();
        near.sender.send(&row(sent + 1)).await.unwrap();
    };
    tokio::join!(sending, expect_frames(&mut far.receiver, sent + 1, SIZE));
}

async fn try_recv_returns_arrived_frames(kind: Kind) {
    const FRAMES: usize = 20;
    let (mut near, mut far, _server) = connect(kind).await;
    assert_eq!(far.receiver.try_recv(), None);
    let row = |from: usize| -> Vec<_> {
        let numbers = from..from + FRAMES;
        numbers
            .map(|n| [frame(n, 100), Bytes::new(), Bytes::new()])
            .collect()
    };
    let mut number = 1;
    for _ in 0..3 {
        near.sender.send_all(&row(number)).await.unwrap();
        let until = number + FRAMES;
        while number < until {
            // A call that found nothing must not lose the wakeup of the next one.
            let received = match far.receiver.try_recv() {
                Some(received) => received,
                None => far.receiver.recv().await,
            };
            assert_eq!(received, Ok(Some(frame(number, 100))), "frame {number}");
            number += 1;
        }
        assert_eq!(far.receiver.try_recv(), None);
    }
}

async fn parts_are_joined(kind: Kind) {
    let (mut near, mut far, _server) = connect(kind).await;
    let empty = Bytes::new();
    let cases: [&[Bytes]; 6] = [
        &[],
        &[empty.clone(), empty.clone()],
        &[frame(1, 3), frame(2, 1 << 20), frame(3, 5)],
        &[empty.clone(), frame(4, 10), empty.clone()],
        &[frame(5, 1), empty, frame(6, 1)],
        &[frame(7, MAX_FRAME_BYTES / 2), frame(8, MAX_FRAME_BYTES / 2)],
    ];
    for parts in cases {
        let (sent, received) = tokio::join!(near.sender.send(parts), far.receiver.recv());
        sent.unwrap();
        let received = received.unwrap().unwrap();
        assert!(received == parts.concat(), "{} parts", parts.len());
    }
}

async fn a_frame_over_the_limit_is_refused_and_the_link_goes_on(kind: Kind) {
    let (mut near, mut far, _server) = connect(kind).await;
    let error = Err(LinkError::TooLarge(MAX_FRAME_BYTES + 1));
    let whole = [frame(1, MAX_FRAME_BYTES + 1)];
    let in_parts = [frame(1, MAX_FRAME_BYTES), frame(2, 1)];
    for link in [&mut near, &mut far] {
        assert_eq!(link.sender.send(&whole).await, error);
        assert_eq!(link.sender.send(&in_parts).await, error);
        link.sender.send(&[frame(3, 10)]).await.unwrap();
    }
    for link in [&mut near, &mut far] {
        assert_eq!(link.receiver.recv().await, Ok(Some(frame(3, 10))));
    }
}

async fn send_waits_for_a_receiver_that_does_not_read(kind: Kind) {
    const FRAME_BYTES: usize = 1 << 20;
    const BOUND_BYTES: usize = 64 << 20;
    const FRAMES: usize = 100;
    // The longest that a frame may take before its sender counts as waiting.
    const STALL: Duration = Duration::from_secs(2);

    let (mut near, mut far, _server) = connect(kind).await;
    let mut accepted = 0;
    loop {
        let parts = [frame(accepted + 1, FRAME_BYTES)];
        let mut sending = pin!(near.sender.send(&parts));
        if let Ok(sent) = timeout(STALL, &mut sending).await {
            sent.unwrap();
            accepted += 1;
            let bytes = accepted * FRAME_BYTES;
            assert!(
                bytes < BOUND_BYTES,
                "{bytes} bytes were accepted, and none read"
            );
            continue;
        }
        // The call completes as soon as the receiver reads.
        let (sent, ()) = tokio::join!(
            sending,
            expect_frames(&mut far.receiver, accepted + 1, FRAME_BYTES)
        );
        sent.unwrap();
        break;
    }
    let rest = async {
        for number in accepted + 2..=FRAMES {
            near.sender
                .send(&[frame(number, FRAME_BYTES)])
                .await
                .unwrap();
        }
    };
    let reading = async {
        for number in accepted + 2..=FRAMES {
            expect_frame(&mut far.receiver, number, FRAME_BYTES).await;
        }
    };
    tokio::join!(rest, reading);
}

async fn recv_is_cancel_safe(kind: Kind) {
    const FRAMES: usize = 12;
    let (mut near, mut far, _server) = connect(kind).await;
    let sending = send_frames(&mut near.sender, FRAMES, MAX_FRAME_BYTES);
    let receiving = async {
        let mut cancelled = 0;
        for number in 1..=FRAMES {
            let received = loop {
                tokio::select! {
                    biased;
                    received = far.receiver.recv() => break received,
                    // Polled once, then dropped: as often as possible.
                    () = tokio::task::yield_now() => cancelled += 1,
                }
            };
            assert!(
                received == Ok(Some(frame(number, MAX_FRAME_BYTES))),
                "frame {number}"
            );
        }
        assert!(cancelled > 0, "no call was cancelled");
    };
    tokio::join!(sending, receiving);
}

async fn send_is_cancel_safe(kind: Kind) {
    const FRAMES: usize = 60;
    const LAST: usize = FRAMES + 1;
    let (mut near, mut far, _server) = connect(kind).await;
    let number_and_noise = |number: usize| {
        let number_bytes = Bytes::copy_from_slice(&number.to_le_bytes());
        [
            number_bytes,
            frame(number, MAX_FRAME_BYTES - size_of::<usize>()),
        ]
    };
    let sending = async {
        let mut cancelled = 0;
        for number in 1..=FRAMES {
            let parts = number_and_noise(number);
            tokio::select! {
                biased;
                sent = near.sender.send(&parts) => sent.unwrap(),
                () = sleep(Duration::from_millis(1)) => cancelled += 1,
            }
        }
        near.sender.send(&number_and_noise(LAST)).await.unwrap();
        near.sender.finish().await;
        assert!(cancelled > 0, "no call was cancelled");
    };
    let receiving = async {
        let mut last = 0;
        while let Some(received) = far.receiver.recv().await.unwrap() {
            let number = usize::from_le_bytes(*received.first_chunk().unwrap());
            assert!(number > last, "frame {number} after {last}");
            assert!(
                received == number_and_noise(number).concat(),
                "frame {number}"
            );
            last = number;
        }
        assert_eq!(last, LAST);
    };
    tokio::join!(sending, receiving);
}

async fn the_listener_learns_of_a_link_from_its_first_frame(kind: Kind) {
    let mut server = Server::start().await;
    let near = server.dial(kind).await;
    assert!(is_pending(server.listener.accept()).await);
    server.exchange_first_frame(near).await;
}

async fn many_links_share_a_listener(kind: Kind) {
    const LINKS: usize = 40;
    const FRAMES: usize = 5;
    let Server {
        mut listener,
        trust,
        ..
    } = Server::start().await;
    let address = listener.address().to_string();
    let dialler = |number: usize| {
        let (address, trust) = (address.clone(), trust.clone());
        async move {
            let mut link = kind
                .dialer()
                .dial(&address, &trust, DIAL_DEADLINE)
                .await
                .unwrap();
            for n in 0..FRAMES {
                let frame = frame(number * 100 + n, 50_000);
                link.sender
                    .send(std::slice::from_ref(&frame))
                    .await
                    .unwrap();
                assert!(
                    link.receiver.recv().await == Ok(Some(frame)),
                    "link {number}"
                );
            }
            link.sender.finish().await;
            assert_eq!(link.receiver.recv().await, Ok(None));
        }
    };
    let mut tasks = tokio::task::JoinSet::new();
    (0..LINKS).for_each(|number| drop(tasks.spawn(dialler(number))));
    for _ in 0..LINKS {
        let mut link = listener.accept().await;
        link.receiver.admit().unwrap();
        tasks.spawn(async move {
            while let Some(frame) = link.receiver.recv().await.unwrap() {
                link.sender.send(&[frame]).await.unwrap();
            }
            link.sender.finish().await;
        });
    }
    tasks.join_all().await;
}

/// One test for all carriers, as it takes long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_link_stays_open() {
    let idle = async |kind: Kind| {
        let (mut near, mut far, _server) = connect(kind).await;
        sleep(IDLE_TIMEOUT + Duration::from_secs(2)).await;
        for (from, to) in [(&mut near, &mut far)] {
            from.sender.send(&[frame(1, 10)]).await.unwrap();
            assert_eq!(to.receiver.recv().await, Ok(Some(frame(1, 10))), "{kind:?}");
            to.sender.send(&[frame(2, 10)]).await.unwrap();
            assert_eq!(
                from.receiver.recv().await,
                Ok(Some(frame(2, 10))),
                "{kind:?}"
            );
        }
    };
    let behind_switch = [QUIC.with_fault_switch(), GRPC.with_fault_switch()];
    let all = async {
        tokio::join!(
            idle(QUIC),
            idle(GRPC),
            idle(behind_switch[0]),
            idle(behind_switch[1])
        );
    };
    no_hang(all).await;
}
