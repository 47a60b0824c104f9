//! A session without a driver and links: the caller moves its frames and its clock.

use std::{sync::Arc, time::Instant};

use burn_backend::{ExecutionError, TensorData};
use burn_ir::{OperationIr, TensorId, TensorIr};
use bytes::Bytes;
use tensord_proto::{
    collective_op::AllReduce,
    ids::SessionId,
    v1::{Error, Open, Opened, RestorePoint},
};
use tensord_session::{Cohort, CohortMember, ConnectionEnd, Delivery, Track, rejected_by};
use tensord_transport::channel::{Broken, Connection, Look, Next};
use tokio::sync::oneshot;

use super::{Session, SessionAccess};
use crate::lease::Durability;

/// The receiver of a read's value.
pub type PendingValue = oneshot::Receiver<Result<TensorData, ExecutionError>>;

/// The receiver of the reply to a sync.
pub type PendingSync = oneshot::Receiver<Result<(), ExecutionError>>;

/// How a connection of a [`SimulatedSession`] ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SimulatedEnd {
    /// The session may go on with another connection.
    Lost(String),
    /// The worker has ended the session, which may go on elsewhere.
    Ended(String),
    /// The session is over.
    Over(String),
}

impl From<ConnectionEnd> for SimulatedEnd {
    fn from(end: ConnectionEnd) -> Self {
        match end {
            ConnectionEnd::Lost(reason) => Self::Lost(reason),
            ConnectionEnd::Over(reason)
            | ConnectionEnd::LeaseOver(reason)
            | ConnectionEnd::Diverged(reason) => Self::Over(reason),
            ConnectionEnd::BrokeRule(rule) => {
                Self::Over(format!("the worker broke a rule: {rule}"))
            }
        }
    }
}

/// A program's session whose caller does what its driver does otherwise: it moves frames between
/// the session and a worker, opens connections, and passes the time. It records ops like a leased
/// device, but never blocks: the caller must look whether it [is full](Self::is_full).
pub struct SimulatedSession {
    session: Arc<Session>,
    access: SessionAccess,
    /// The latest connection of each track; `None` until there was one.
    connections: [Option<Connection>; 2],
}

impl SimulatedSession {
    /// Creates the sessions of a lease of `devices` devices, in the order of the devices.
    pub fn lease(devices: usize, seed: u64, durability: Durability) -> Vec<Self> {
        let cohort = Cohort::new(1, devices);
        let session = |lease_rank: u32| {
            let cohort_member = CohortMember {
                cohort: cohort.clone(),
                lease_rank,
            };
            let id = SessionId(1 + u64::from(lease_rank));
            Self {
                session: Session::new(id, cohort_member, durability, [7; 32]),
                access: SessionAccess {
                    lease_token: Bytes::new(),
                    device_index: lease_rank,
                    seed: seed.wrapping_add(u64::from(lease_rank)),
                },
                connections: [None; 2],
            }
        };
        (0..devices as u32).map(session).collect()
    }

    /// Records an all-reduce of sessions, whose indices are ascending.
    pub fn all_reduce(&self, op: AllReduce, now: Instant) {
        self.session.record_all_reduce(op, now);
    }

    /// Offers a tensor to the session `to`, which takes it with the same `capability`.
    pub fn offer(&self, tensor: &TensorIr, capability: [u8; 16], to: u32, now: Instant) {
        self.session.offer(tensor, &capability, to, now);
    }

    /// Makes tensor `id`, like `tensor`, of what the session `from` offers.
    pub fn take_offer(
        &self,
        id: TensorId,
        tensor: &TensorIr,
        capability: [u8; 16],
        from: u32,
        now: Instant,
    ) {
        self.session.take_offer(id, tensor, &capability, from, now);
    }

    /// Sets where the session is: on the device with this index, to which the token entitles.
    pub fn set_access(&mut self, lease_token: Bytes, device_index: u32) {
        self.access.lease_token = lease_token;
        self.access.device_index = device_index;
    }

    /// Returns the session's id.
    pub fn id(&self) -> u64 {
        self.session.id.0
    }

    /// Returns the marks from which the session could go on in another process.
    pub fn restore_points(&self) -> Vec<RestorePoint> {
        self.session.lock().restore_points()
    }

    /// Returns a tensor id that was not used before.
    pub fn new_tensor(&self) -> TensorId {
        self.session.new_tensor()
    }

    /// Records an op.
    pub fn record(&self, op: OperationIr) {
        self.session.record(op);
    }

    /// Records an upload as tensor `id`.
    pub fn upload(&self, id: TensorId, data: TensorData) {
        self.session.upload(id, data);
    }

    /// Gives the tensor `source` a second id.
    pub fn alias(&self, id: TensorId, source: TensorId) {
        self.session.alias(id, source);
    }

    /// Seeds the random ops.
    pub fn seed(&self, seed: u64) {
        self.session.seed(seed);
    }

    /// Requests a tensor's value.
    pub fn read(&self, tensor: &TensorIr) -> PendingValue {
        self.session.read(tensor)
    }

    /// Requests a reply for when all ops so far are done.
    pub fn sync(&self) -> PendingSync {
        self.session.sync()
    }

    /// Returns whether a program would have to wait before it records more. A caller that records
    /// then blocks forever.
    pub fn is_full(&self) -> bool {
        self.session.lock().is_full()
    }

    /// Returns whether the session needs its track for bulk bytes.
    pub fn needs_bulk(&self) -> bool {
        self.session.lock().has_bulk
    }

    /// Returns the first message of a new connection for a track.
    pub fn open(&self, is_bulk: bool) -> Open {
        let track = track(is_bulk);
        let resume = self.connections[track as usize].is_some();
        self.session.open(track, resume, &self.access)
    }

    /// Begins a connection on which the worker sent `opened`.
    ///
    /// # Errors
    ///
    /// Why the connection must end.
    pub fn opened(&mut self, is_bulk: bool, opened: &Opened) -> Result<(), SimulatedEnd> {
        let track = track(is_bulk);
        let connection = self.session.opened(track, opened)?;
        self.connections[track as usize] = Some(connection);
        Ok(())
    }

    /// Returns how a connection ends on which the worker has rejected what [`open`](Self::open) requested.
    pub fn rejected(&self, is_bulk: bool, open: &Open, error: &Error) -> SimulatedEnd {
        let is_durable = !open.restore.is_empty();
        rejected_by(error, track(is_bulk), open.resume, is_durable).into()
    }

    /// Returns whether the session can go on in another process, if that has the snapshot of its restore point.
    pub fn can_be_restored(&self) -> bool {
        self.session.can_be_restored()
    }

    /// Returns the frames that the session sends on the latest connection of a track.
    /// `is_patient` is whether ops that may be batched with later ones may still wait.
    pub fn next_frames(&mut self, is_bulk: bool, is_patient: bool, now: Instant) -> Vec<Bytes> {
        let look = Look {
            patient: is_patient,
            rested: true,
        };
        match self.session.next_to_send(track(is_bulk), look, now) {
            Next::Frames(frames) => frames.iter().map(|parts| parts.concat().into()).collect(),
            _ => Vec::new(),
        }
    }

    /// Returns a ping for the latest connection of a track.
    pub fn ping(&mut self, is_bulk: bool) -> Option<Bytes> {
        let track = track(is_bulk);
        let connection = self.connections[track as usize]?;
        let parts = self.session.ping(track, connection, true)?;
        Some(parts.concat().into())
    }

    /// Processes a frame that arrived on the latest connection of a track, and delivers the
    /// values that it completes.
    ///
    /// # Errors
    ///
    /// Why the connection must end.
    ///
    /// # Panics
    ///
    /// If the track has had no connection.
    pub fn receive(
        &mut self,
        is_bulk: bool,
        frame: Bytes,
        now: Instant,
    ) -> Result<(), SimulatedEnd> {
        let track = track(is_bulk);
        let connection = self.connections[track as usize].expect("frames come on a connection");
        let mut deliveries = Vec::new();
        let received = self
            .session
            .receive(track, connection, frame, now, &mut deliveries);
        deliveries.into_iter().for_each(Delivery::deliver);
        received.map_err(|broken| match broken {
            Broken::Loss(reason) => SimulatedEnd::Lost(reason),
            Broken::Replaced => SimulatedEnd::Lost("replaced".into()),
            Broken::Over(ConnectionEnd::Lost(reason), _) => SimulatedEnd::Ended(reason),
            Broken::Over(end, _) => end.into(),
        })
    }
}

fn track(is_bulk: bool) -> Track {
    match is_bulk {
        true => Track::Bulk,
        false => Track::Ops,
    }
}
