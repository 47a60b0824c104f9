//! A relay before a worker, through which everybody reaches it, and which can turn away what certain processes
//! send: the network between two hosts that is broken while others reach both.

use std::{
    fs, io,
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use crate::resource_usage::children;

/// A connection that is relayed.
struct Relayed {
    /// The socket of the process that has connected, as the system numbers it.
    socket: u64,
    ends: [TcpStream; 2],
}

impl Relayed {
    fn close(&self) {
        for end in &self.ends {
            // An error means that it is closed.
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

#[derive(Default)]
struct State {
    /// The processes that are turned away.
    refused: Vec<u32>,
    connections: Vec<Relayed>,
}

/// Relays connections until the process ends.
#[derive(Clone)]
pub struct Relay(Arc<Mutex<State>>);

impl Relay {
    /// Starts to relay connections to `listen` on to `target`.
    ///
    /// # Errors
    ///
    /// If the address cannot be listened on.
    pub fn start(listen: SocketAddr, target: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(listen)?;
        let relay = Self(Arc::default());
        let accepting = relay.clone();
        thread::spawn(move || {
            for accepted in listener.incoming().flatten() {
                // An error means that one of the two is gone, which the other notices.
                let _ = accepting.relay(accepted, target);
            }
        });
        Ok(relay)
    }

    /// Turns the connections of a process away, and closes those that it has.
    pub fn refuse(&self, process: u32) {
        self.refuse_all(vec![process]);
    }

    /// Turns the connections of a worker away, and of the processes of its leases, and closes those that they have.
    pub fn refuse_worker(&self, worker: u32) {
        let mut processes = children(worker);
        processes.push(worker);
        self.refuse_all(processes);
    }

    fn refuse_all(&self, processes: Vec<u32>) {
        let mut state = self.lock();
        let (refused, kept) = std::mem::take(&mut state.connections)
            .into_iter()
            .partition(|it| has_socket(&processes, it.socket));
        (state.refused, state.connections) = (processes, kept);
        let refused: Vec<Relayed> = refused;
        refused.iter().for_each(Relayed::close);
    }

    fn relay(&self, accepted: TcpStream, target: SocketAddr) -> io::Result<()> {
        let socket = socket_of(accepted.peer_addr()?, accepted.local_addr()?)?;
        let mut state = self.lock();
        if has_socket(&state.refused, socket) {
            return accepted.shutdown(Shutdown::Both);
        }
        let dialled = TcpStream::connect(target)?;
        let ends = [accepted.try_clone()?, dialled.try_clone()?];
        state.connections.push(Relayed { socket, ends });
        drop(state);
        copy(accepted.try_clone()?, dialled.try_clone()?);
        copy(dialled, accepted);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Copies what one connection receives to another one, until one of them is closed.
fn copy(mut from: TcpStream, mut to: TcpStream) {
    thread::spawn(move || {
        let _ = io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
    });
}

/// Returns whether one of these processes has a socket.
fn has_socket(processes: &[u32], socket: u64) -> bool {
    let link = format!("socket:[{socket}]");
    processes.iter().any(|id| {
        // The process may have ended.
        let files = fs::read_dir(format!("/proc/{id}/fd"));
        let mut files = files.into_iter().flatten().flatten();
        files.any(|file| fs::read_link(file.path()).is_ok_and(|it| it.as_os_str() == &*link))
    })
}

/// Returns the socket from which `peer` has connected to `local`, as the system numbers it.
fn socket_of(peer: SocketAddr, local: SocketAddr) -> io::Result<u64> {
    let known = fs::read_to_string("/proc/net/tcp")?;
    let ports = [peer.port(), local.port()].map(|port| format!(":{port:04X}"));
    let mut lines = known
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    let line = lines.find(|line| {
        let ends = line.get(1..3);
        ends.is_some_and(|ends| (0..2).all(|it| ends[it].ends_with(&ports[it])))
    });
    let number = line.and_then(|line| line.get(9)?.parse().ok());
    number.ok_or_else(|| io::Error::other(format!("no process has connected from {peer}")))
}
