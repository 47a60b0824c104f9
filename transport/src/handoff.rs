//! Passes accepted connections to another process of this host.
//!
//! A worker has one port, and may run each lease in a process of its own. It reads from the
//! first bytes of a connection which lease the connection is for (`handoff/client_hello.rs`), and
//! passes the socket on before the TLS handshake, over a [`channel`](channel()) that carries
//! frames and file descriptors. So the other process terminates TLS itself, with its own key,
//! and no byte of the connection passes the worker. QUIC connections are passed on with their
//! first datagram (`handoff/quic.rs`).
//!
//! Neither side trusts the other: frames, their number of descriptors and their size are
//! checked.

mod client_hello;
pub(crate) mod quic;

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    net::UdpSocket,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use rustix::fs::fcntl_get_seals;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use tensord_proto::ids::LeaseId;
use tokio::{
    io::Interest,
    net::{TcpStream, UnixStream},
    sync::{Notify, mpsc},
    task::consume_budget,
};

pub(crate) use self::client_hello::lease_of;

/// Decides which connections other processes of this host serve.
pub trait LeaseRouter: Send + Sync + 'static {
    /// Returns which process serves the connections of `lease`.
    fn destination(&self, lease: LeaseId) -> Destination;

    /// Returns the `Notify` whose waiters are woken when a lease has become known.
    fn announced(&self) -> &Notify;
}

/// Which process serves the connections of a lease.
#[derive(Debug)]
pub enum Destination {
    /// Another process, which takes connections from this queue.
    Process(mpsc::Sender<Passed>),
    /// This process.
    Here,
    /// This process, unless the lease becomes known shortly: a client may connect before the
    /// scheduler's announcement of the lease has reached the worker.
    Unknown,
}

/// A connection that is passed to another process.
#[derive(Debug)]
pub enum Passed {
    /// A TCP connection of which nothing was read.
    Tcp(TcpStream),
    /// A QUIC connection.
    Quic {
        /// A socket that is connected to the client.
        socket: UdpSocket,
        /// The client's first datagram.
        first: Bytes,
    },
}

impl Passed {
    /// Makes a connection of a socket that another process has passed on, and of the first
    /// datagram if it is a QUIC connection. Must be called within a Tokio runtime.
    ///
    /// # Errors
    ///
    /// When the system refuses a call.
    pub fn received(socket: OwnedFd, first: Option<Bytes>) -> io::Result<Self> {
        Ok(match first {
            None => Self::Tcp(TcpStream::from_std(socket.into())?),
            Some(first) => Self::Quic {
                socket: socket.into(),
                first,
            },
        })
    }

    /// Returns the socket and the first datagram of a QUIC connection.
    pub fn parts(&self) -> (BorrowedFd<'_>, Option<&Bytes>) {
        match self {
            Self::Tcp(stream) => (stream.as_fd(), None),
            Self::Quic { socket, first } => (socket.as_fd(), Some(first)),
        }
    }
}

/// Largest frame.
pub const MAX_FRAME_BYTES: usize = 1 << 20;

/// Length of the header of a frame: the frame's length, little-endian, with [`HAS_FD`].
const HEADER_BYTES: usize = 4;

/// The bit of a header that is set if a file descriptor comes with the frame.
const HAS_FD: u32 = 1 << 31;

/// Bytes to read at a time.
const READ_BYTES: usize = 16 << 10;

/// Most file descriptors that the kernel lets through with one message (`SCM_MAX_FD`). There is room
/// for all of them, as the kernel would close the others on the thread that receives the message.
const MAX_MESSAGE_FDS: usize = 253;

/// Most file descriptors that may arrive before their frames are complete. A read returns at
/// most one. Two can wait: that of the incomplete frame, and that of the next frame, whose first
/// bytes came with the same read.
const MAX_EARLY_FDS: usize = 2;

/// Why a channel ended.
#[derive(Debug, thiserror::Error)]
pub enum HandoffError {
    /// The other process is gone, or the system refused a call.
    #[error("the channel failed: {0}")]
    Io(#[from] io::Error),
    /// The other process broke a rule.
    #[error("the other process broke a rule: {0}")]
    Violation(&'static str),
}

/// The sending half of a channel.
#[derive(Debug)]
pub struct Sender(Arc<UnixStream>);

/// The receiving half of a channel.
#[derive(Debug)]
pub struct Receiver {
    stream: Arc<UnixStream>,
    buffer: BytesMut,
    /// The descriptors of frames that were not returned; `None` for one that this process could not receive.
    fds: Vec<Option<OwnedFd>>,
    accepts: Descriptors,
}

/// Which file descriptors a receiver accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Descriptors {
    All,
    /// Files in memory. To close another descriptor may take as long as a hostile process wants,
    /// such as that of a socket with `SO_LINGER`.
    MemoryFiles,
}

/// Why a frame was not sent.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The system refused to send it, as too many descriptors are on their way, or for lack of memory.
    /// The channel can go on.
    #[error("the system did not send the message: {0}")]
    Refused(io::Error),
    /// The other process is gone, or got a part of the frame.
    #[error("the channel failed: {0}")]
    Broken(io::Error),
}

/// A frame, with the file descriptor that came with it.
#[derive(Debug)]
pub struct Received {
    /// The frame.
    pub frame: Bytes,
    /// The file descriptor. `None` if none was sent, or this process may open no more files.
    pub fd: Option<OwnedFd>,
}

/// Makes a channel of one end of a pair of sockets. The other end must be a channel, too.
pub fn channel(stream: UnixStream) -> (Sender, Receiver) {
    let stream = Arc::new(stream);
    let receiver = Receiver {
        stream: stream.clone(),
        buffer: BytesMut::new(),
        fds: Vec::new(),
        accepts: Descriptors::All,
    };
    (Sender(stream), receiver)
}

/// Closes a channel on a thread of its own: descriptors that the other process has sent and that were not
/// received are closed with the channel, which may take as long as a hostile process wants.
pub fn close(sender: Sender, receiver: Receiver) {
    drop_elsewhere((sender, receiver));
}

/// Drops a value on a thread of its own. If no thread can be started, drops it here.
fn drop_elsewhere(value: impl Send + 'static) {
    let _ = std::thread::Builder::new().spawn(move || drop(value));
}

/// A channel that belongs to no runtime. A process that receives its first frame on a
/// runtime of one thread can then move the channel to another runtime.
#[derive(Debug)]
pub struct Detached {
    stream: std::os::unix::net::UnixStream,
    buffer: BytesMut,
    fds: Vec<Option<OwnedFd>>,
}

impl Detached {
    /// Creates a channel on `stream`, of which nothing was read.
    pub fn new(stream: std::os::unix::net::UnixStream) -> Self {
        Self {
            stream,
            buffer: BytesMut::new(),
            fds: Vec::new(),
        }
    }

    /// Attaches the channel to the current runtime.
    ///
    /// # Errors
    ///
    /// When the system refuses a call.
    pub fn attach(self) -> io::Result<(Sender, Receiver)> {
        self.stream.set_nonblocking(true)?;
        let stream = Arc::new(UnixStream::from_std(self.stream)?);
        let receiver = Receiver {
            stream: stream.clone(),
            buffer: self.buffer,
            fds: self.fds,
            accepts: Descriptors::All,
        };
        Ok((Sender(stream), receiver))
    }
}

/// Detaches a channel from the current runtime, with what it has received and not returned.
///
/// # Errors
///
/// When the system refuses a call.
///
/// # Panics
///
/// When the halves are not of one channel.
pub fn detach(sender: Sender, receiver: Receiver) -> io::Result<Detached> {
    let Receiver {
        stream,
        buffer,
        fds,
        accepts: _,
    } = receiver;
    drop(sender);
    let stream = Arc::into_inner(stream).expect("the halves are of one channel");
    Ok(Detached {
        stream: stream.into_std()?,
        buffer,
        fds,
    })
}

impl Sender {
    /// Sends a frame, and a duplicate of `fd` with it. Waits while the other process does not
    /// keep up, so the caller sets a deadline. After a cancelled call the channel must not be
    /// used any more, as a part of the frame may have been sent.
    ///
    /// # Errors
    ///
    /// When the other process is gone, or the system refuses the message.
    ///
    /// # Panics
    ///
    /// When the frame is larger than [`MAX_FRAME_BYTES`].
    pub async fn send(
        &mut self,
        frame: &[u8],
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), SendError> {
        assert!(frame.len() <= MAX_FRAME_BYTES, "the frame is too large");
        let flag = if fd.is_some() { HAS_FD } else { 0 };
        let mut bytes = BytesMut::with_capacity(HEADER_BYTES + frame.len());
        bytes.put_u32_le(frame.len() as u32 | flag);
        bytes.put_slice(frame);
        // The descriptor goes with the first byte.
        let fds = fd.as_slice();
        let sent = self.write(&bytes, fds).await;
        let sent = sent.map_err(|e| match e.kind() {
            io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::NotConnected => SendError::Broken(e),
            _ => SendError::Refused(e),
        })?;
        bytes.advance(sent);
        while !bytes.is_empty() {
            let sent = self.write(&bytes, &[]).await;
            bytes.advance(sent.map_err(SendError::Broken)?);
        }
        Ok(())
    }

    async fn write(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        let socket = &*self.0;
        let write = || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(fds));
            }
            let sent = sendmsg(
                socket.as_fd(),
                &[IoSlice::new(bytes)],
                &mut control,
                SendFlags::NOSIGNAL,
            );
            Ok(sent?)
        };
        socket.async_io(Interest::WRITABLE, write).await
    }
}

impl Receiver {
    /// Accepts no file descriptors but those of files in memory (`memfd_create`). Another one
    /// counts as a violation, and is closed on a thread of its own. So the channel should be
    /// [closed](close), too.
    pub fn memory_files_only(mut self) -> Self {
        self.accepts = Descriptors::MemoryFiles;
        self
    }

    /// Returns the next frame, or `None` when the other process has closed the channel. Cancel
    /// safe.
    ///
    /// # Errors
    ///
    /// When the connection fails, or the other process breaks a rule. Descriptors of frames
    /// that were not returned are closed when the receiver is dropped.
    pub async fn recv(&mut self) -> Result<Option<Received>, HandoffError> {
        // Reading does not use up the budget of the task by itself, so that a process which sends
        // without a pause would keep the task from ever yielding.
        consume_budget().await;
        loop {
            if let Some(received) = self.next_frame()? {
                return Ok(Some(received));
            }
            match self.read().await? {
                0 if self.buffer.is_empty() && self.fds.is_empty() => return Ok(None),
                0 => return Err(HandoffError::Violation("its last frame is incomplete")),
                _ if self.fds.len() > MAX_EARLY_FDS => {
                    return Err(HandoffError::Violation(
                        "it sent file descriptors without frames",
                    ));
                }
                _ => {}
            }
        }
    }

    /// Takes the next frame from the buffer, or returns `None` if it is incomplete.
    fn next_frame(&mut self) -> Result<Option<Received>, HandoffError> {
        let Some((header, _)) = self.buffer.split_first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let header = u32::from_le_bytes(*header);
        let size = (header & !HAS_FD) as usize;
        if size > MAX_FRAME_BYTES {
            return Err(HandoffError::Violation("a frame is too large"));
        }
        if self.buffer.len() < HEADER_BYTES + size {
            return Ok(None);
        }
        self.buffer.advance(HEADER_BYTES);
        let frame = self.buffer.split_to(size).freeze();
        let fd = match header & HAS_FD {
            0 => None,
            _ if self.fds.is_empty() => {
                return Err(HandoffError::Violation("a file descriptor is missing"));
            }
            _ => self.fds.remove(0),
        };
        Ok(Some(Received { frame, fd }))
    }

    /// Receives bytes, and at most one descriptor. Cancel safe: it only
    /// waits while it has received nothing.
    async fn read(&mut self) -> Result<usize, HandoffError> {
        loop {
            self.stream.readable().await?;
            match self.try_read() {
                Err(HandoffError::Io(e)) if e.kind() == io::ErrorKind::WouldBlock => {}
                read => return read,
            }
        }
    }

    fn try_read(&mut self) -> Result<usize, HandoffError> {
        let Self {
            stream,
            buffer,
            fds,
            accepts,
        } = self;
        let mut new = Vec::new();
        let start = buffer.len();
        buffer.resize(start + READ_BYTES, 0);
        let read = || {
            let mut space =
                [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MESSAGE_FDS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let received = recvmsg(
                stream.as_fd(),
                &mut [IoSliceMut::new(&mut buffer[start..])],
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            )?;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(received) = message {
                    new.extend(received);
                }
            }
            Ok((received.bytes, received.flags))
        };
        let read = stream.try_io(Interest::READABLE, read);
        let size = read.as_ref().map_or(0, |(size, _)| *size);
        buffer.truncate(start + size);
        let (size, flags) = read?;
        // The kernel drops descriptors if this process may open no more files. A peer can bring that about, so
        // it ends nothing.
        let is_lost = flags.contains(ReturnFlags::CTRUNC);
        let memory_only = *accepts == Descriptors::MemoryFiles;
        let is_no_memory = |fd: &OwnedFd| fcntl_get_seals(fd).is_err();
        let broken = if memory_only && new.iter().any(is_no_memory) {
            Some("it sent a file descriptor that is no file in memory")
        } else if new.len() + usize::from(is_lost) > 1 {
            Some("it sent several file descriptors with a frame")
        } else {
            None
        };
        if let Some(rule) = broken {
            if memory_only {
                drop_elsewhere(new);
            }
            return Err(HandoffError::Violation(rule));
        }
        fds.extend(new.into_iter().map(Some));
        fds.extend(is_lost.then_some(None));
        Ok(size)
    }
}

#[cfg(test)]
mod tests;
