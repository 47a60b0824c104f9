use std::{
    cell::Cell,
    future::poll_fn,
    io::{Read, Seek, Write},
    net::TcpListener,
    os::fd::AsRawFd,
    pin::pin,
    task::Poll,
    time::Duration,
};

use super::*;

fn pair() -> (UnixStream, UnixStream) {
    UnixStream::pair().unwrap()
}

/// Returns a file that contains `text`.
fn file(text: &str) -> std::fs::File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file.rewind().unwrap();
    file
}

fn content(fd: OwnedFd) -> String {
    let mut text = String::new();
    std::fs::File::from(fd).read_to_string(&mut text).unwrap();
    text
}

#[tokio::test]
async fn frames_and_descriptors_arrive_in_order() {
    let (near, far) = pair();
    let ((mut sender, _kept), (_, mut receiver)) = (channel(near), channel(far));
    let sending = async {
        for i in 0..100usize {
            let frame = vec![i as u8; i * 700];
            let file = (i % 3 == 0).then(|| file(&i.to_string()));
            let fd = file.as_ref().map(AsFd::as_fd);
            sender.send(&frame, fd).await.unwrap();
        }
    };
    let receiving = async {
        for i in 0..100usize {
            let received = receiver.recv().await.unwrap().unwrap();
            assert_eq!(received.frame, vec![i as u8; i * 700]);
            let expected = (i % 3 == 0).then(|| i.to_string());
            assert_eq!(received.fd.map(content), expected);
        }
    };
    tokio::join!(sending, receiving);
    drop((sender, _kept));
    assert!(receiver.recv().await.unwrap().is_none());
}

#[tokio::test]
async fn many_frames_do_not_keep_other_work_of_the_task_waiting() {
    // More than the budget of a task, which is 128, and few enough for the buffer of a socket.
    const FRAMES: usize = 200;

    let (near, far) = pair();
    let ((mut sender, _kept), (_, mut receiver)) = (channel(near), channel(far));
    for _ in 0..FRAMES {
        sender.send(b"frame", None).await.unwrap();
    }
    // This one read takes all frames.
    receiver.recv().await.unwrap();
    let received = Cell::new(1);
    let receiving = async {
        loop {
            receiver.recv().await.unwrap();
            received.set(received.get() + 1);
        }
    };
    let mut receiving = pin!(receiving);
    // Returns when the future yields for the first time.
    let once: Poll<()> = poll_fn(|context| Poll::Ready(receiving.as_mut().poll(context))).await;
    assert!(once.is_pending());
    let received = received.get();
    assert!(received < FRAMES, "{received} frames at once");
}

#[tokio::test]
async fn worker_takes_no_descriptor_that_is_slow_to_close() {
    let memory = empty_memory();
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let accepted = |fd: OwnedFd| async move {
        let (near, far) = pair();
        let ((mut sender, _kept), (_, receiver)) = (channel(near), channel(far));
        let mut receiver = receiver.memory_files_only();
        sender.send(b"x", Some(fd.as_fd())).await.unwrap();
        receiver
            .recv()
            .await
            .map(|received| received.unwrap().fd.is_some())
    };
    assert!(accepted(memory).await.unwrap());
    for refused in [socket.into(), file("a file on a disk").into()] {
        let error = accepted(refused).await.unwrap_err().to_string();
        assert!(error.contains("no file in memory"), "{error}");
    }
}

/// Returns a socket that takes five minutes to close, as its peer, which is returned with it, does not read.
fn slow_to_close() -> (OwnedFd, std::net::TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut socket, _) = listener.accept().unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 1 << 16]).is_ok() {}
    let time = Some(Duration::from_secs(300));
    rustix::net::sockopt::set_socket_linger(&socket, time).unwrap();
    (socket.into(), peer)
}

/// Runs `work` on another thread, and panics if that takes much longer than it should.
#[track_caller]
fn soon(work: impl Future<Output = ()> + Send + 'static) {
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_io().build().unwrap().block_on(work);
        done.send(()).unwrap();
    });
    let is_done = is_done.recv_timeout(Duration::from_secs(30));
    is_done.expect("nobody waits for a descriptor to close");
}

fn empty_memory() -> OwnedFd {
    let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
    rustix::fs::memfd_create("tensord-test", flags).unwrap()
}

/// Sends a frame of one byte that is to have one descriptor, with `fds`.
fn send_with(socket: impl AsFd, fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(fds));
    let bytes = (1 | HAS_FD).to_le_bytes();
    let bytes = [IoSlice::new(&bytes), IoSlice::new(b"x")];
    sendmsg(socket, &bytes, &mut control, SendFlags::NOSIGNAL).unwrap();
}

#[test]
fn worker_does_not_wait_for_a_refused_descriptor_to_close() {
    let (slow, _peer) = slow_to_close();
    soon(async {
        let (near, far) = pair();
        let (sender, receiver) = channel(far);
        let mut receiver = receiver.memory_files_only();
        let (first, second) = (empty_memory(), empty_memory());
        send_with(&near, &[first.as_fd(), second.as_fd(), slow.as_fd()]);
        drop(slow);
        receiver.recv().await.unwrap_err();
        close(sender, receiver);
    });
}

#[test]
fn worker_does_not_wait_for_a_descriptor_to_close_that_it_has_not_received() {
    let (slow, _peer) = slow_to_close();
    soon(async {
        let (near, far) = pair();
        let (sender, receiver) = channel(far);
        let mut receiver = receiver.memory_files_only();
        send_with(&near, &[empty_memory().as_fd()]);
        send_with(&near, &[slow.as_fd()]);
        drop(slow);
        assert!(receiver.recv().await.unwrap().unwrap().fd.is_some());
        close(sender, receiver);
    });
}

#[tokio::test]
async fn receiving_can_be_cancelled() {
    let (near, far) = pair();
    let ((mut sender, _kept), (_, mut receiver)) = (channel(near), channel(far));
    let cancelled = tokio::time::timeout(Duration::ZERO, receiver.recv()).await;
    assert!(cancelled.is_err());
    // A part of a frame has arrived when the wait for the rest is cancelled.
    let frame = vec![7; 1000];
    let file = file("x");
    let header = (frame.len() as u32 | HAS_FD).to_le_bytes();
    sender.write(&header, &[file.as_fd()]).await.unwrap();
    let rest = tokio::time::timeout(Duration::from_millis(20), receiver.recv()).await;
    assert!(rest.is_err());
    sender.write(&frame, &[]).await.unwrap();
    sender.send(b"next", None).await.unwrap();
    let first = receiver.recv().await.unwrap().unwrap();
    assert_eq!((first.frame.to_vec(), first.fd.is_some()), (frame, true));
    assert_eq!(receiver.recv().await.unwrap().unwrap().frame, "next");
}

#[tokio::test]
async fn the_largest_frame_passes_and_a_larger_one_ends_the_channel() {
    let (near, far) = pair();
    let ((mut sender, _kept), (_, mut receiver)) = (channel(near), channel(far));
    let largest = vec![7; MAX_FRAME_BYTES];
    let (sent, received) = tokio::join!(sender.send(&largest, None), receiver.recv());
    sent.unwrap();
    assert_eq!(received.unwrap().unwrap().frame, largest);
    let announced = (MAX_FRAME_BYTES as u32 + 1).to_le_bytes();
    sender.write(&announced, &[]).await.unwrap();
    let error = receiver.recv().await.unwrap_err();
    assert!(error.to_string().contains("too large"), "{error}");
}

#[tokio::test]
async fn rules_about_descriptors_are_enforced() {
    let with_fd = (1 | HAS_FD).to_le_bytes();
    let file = file("x");
    let fd = [file.as_fd()];
    for (case, expected) in [
        "a file descriptor is missing",
        "file descriptors without frames",
        "its last frame is incomplete",
    ]
    .into_iter()
    .enumerate()
    {
        let (near, far) = pair();
        let ((sender, kept), (_, mut receiver)) = (channel(near), channel(far));
        match case {
            0 => {
                sender.write(&with_fd, &[]).await.unwrap();
                sender.write(b"x", &[]).await.unwrap();
            }
            1 => {
                // A frame of which a byte arrives at a time, each with a descriptor.
                for byte in 100u32.to_le_bytes() {
                    sender.write(&[byte], &fd).await.unwrap();
                }
            }
            _ => {
                sender.write(&with_fd, &fd).await.unwrap();
                drop((sender, kept));
            }
        }
        let error = receiver.recv().await.unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[tokio::test]
async fn several_descriptors_at_once_are_refused_and_none_stays_open() {
    let (near, far) = pair();
    let (_, mut receiver) = channel(far);
    let file = file("x");
    send_with(&near, &[file.as_fd(); 3]);
    receiver.recv().await.unwrap_err();
    drop(receiver);
    let same = |fd: &std::path::Path| {
        std::fs::read_link(fd).ok()
            == std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()
    };
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let open = open.filter(|entry| same(&entry.as_ref().unwrap().path()));
    assert_eq!(
        open.count(),
        1,
        "only our own descriptor of the file is open"
    );
}

#[test]
fn a_channel_moves_to_another_runtime_with_what_it_has_received() {
    let runtime = || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_io().build().unwrap()
    };
    let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
    let near_runtime = runtime();
    let near = Detached::new(near);
    let (mut sender, _kept) = near_runtime.block_on(async { near.attach().unwrap() });
    near_runtime.block_on(async {
        sender.send(b"first", None).await.unwrap();
        let file = file("content");
        sender.send(b"second", Some(file.as_fd())).await.unwrap();
    });
    let far = Detached::new(far);
    let far = runtime().block_on(async {
        let (sender, mut receiver) = far.attach().unwrap();
        assert_eq!(receiver.recv().await.unwrap().unwrap().frame, "first");
        detach(sender, receiver).unwrap()
    });
    runtime().block_on(async {
        let (_kept, mut receiver) = far.attach().unwrap();
        let second = receiver.recv().await.unwrap().unwrap();
        assert_eq!(second.frame, "second");
        assert_eq!(second.fd.map(content).unwrap(), "content");
    });
}

#[tokio::test]
async fn a_connection_goes_on_in_the_process_that_receives_it() {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::{TcpListener, TcpStream},
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap())
        .await
        .unwrap();
    let (accepted, address) = listener.accept().await.unwrap();
    client.write_all(b"hello").await.unwrap();
    let (near, far) = pair();
    let ((mut sender, _kept), (_, mut receiver)) = (channel(near), channel(far));
    sender.send(b"", Some(accepted.as_fd())).await.unwrap();
    drop(accepted);
    let passed = receiver.recv().await.unwrap().unwrap().fd.unwrap();
    let passed = std::net::TcpStream::from(passed);
    let mut passed = TcpStream::from_std(passed).unwrap();
    assert_eq!(passed.peer_addr().unwrap(), address);
    let mut read = [0; 5];
    passed.read_exact(&mut read).await.unwrap();
    assert_eq!(&read, b"hello");
}
