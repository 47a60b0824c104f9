//! The messages between a worker's [`Supervisor`](crate::supervisor::Supervisor) and the
//! processes that run its leases ([`lease_process`](crate::lease_process)).
//!
//! Both ends are the same build. The supervisor still treats every message as hostile, as the
//! program of a lease may have gained control of the process that runs the lease.

use prost::{Message, Oneof};
use tensord_proto::{
    ids::SessionId,
    v1::{self, Mark},
};

/// The build, which both ends must share.
pub(crate) const BUILD: &str = concat!("tensord-worker ", env!("CARGO_PKG_VERSION"));

/// A message to a process.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ToProcess {
    #[prost(
        oneof = "Task",
        tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17"
    )]
    pub(crate) task: Option<Task>,
}

/// What a process is to do. The first message decides what the process is for: `Describe`,
/// `Probe` or `Start`. The others belong to a process that was started for a lease.
#[derive(Clone, PartialEq, Oneof)]
#[expect(
    clippy::large_enum_variant,
    reason = "a process gets one `Start`, and other tasks are acted on at once"
)]
pub(crate) enum Task {
    /// Describe the devices, and exit.
    #[prost(message, tag = "1")]
    Describe(Describe),
    /// Test a device, and exit.
    #[prost(message, tag = "2")]
    Probe(OfferedDevice),
    /// Run a lease.
    #[prost(message, tag = "3")]
    Start(Start),
    /// Serve the connection whose socket comes with this message.
    #[prost(message, tag = "4")]
    Connection(PassedConnection),
    /// End all sessions, and exit.
    #[prost(message, tag = "5")]
    End(End),
    /// The scheduler's time, in milliseconds since 1970.
    #[prost(uint64, tag = "6")]
    Time(u64),
    /// The scheduler is unreachable.
    #[prost(message, tag = "7")]
    Unreachable(Empty),
    /// The public key that verifies lease tokens.
    #[prost(bytes = "vec", tag = "8")]
    LeaseKey(Vec<u8>),
    /// Query the memory of the devices.
    #[prost(message, tag = "9")]
    QueryMemory(Empty),
    /// Uploads kept for the lease's tenant, in the shared memory that comes with this message.
    #[prost(message, tag = "10")]
    Uploads(KeptUploads),
    /// The process has the turn of this device.
    #[prost(uint32, tag = "11")]
    GrantTurn(u32),
    /// The process is to return the turn of this device.
    #[prost(uint32, tag = "12")]
    RevokeTurn(u32),
    /// The snapshot, in the shared memory that comes with this message, of a session whose process
    /// has died.
    #[prost(message, tag = "13")]
    Snapshot(SnapshotInfo),
    /// The reply to a snapshot that the process has sent.
    #[prost(message, tag = "14")]
    SnapshotKept(SnapshotKept),
    /// The base, in the shared memory that comes with this message, of a snapshot that follows.
    #[prost(message, tag = "15")]
    SnapshotBase(SnapshotInfo),
    /// Another process waits for the turn of this device: the process is to return it when it has
    /// no work.
    #[prost(uint32, tag = "16")]
    WantTurn(u32),
    /// The worker is done with the uploads of this number that the process has sent: it keeps them, or
    /// it does not.
    #[prost(uint64, tag = "17")]
    UploadsDone(u64),
}

/// The end of a lease's sessions.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct End {
    /// The error for the clients.
    #[prost(message, required, tag = "1")]
    pub(crate) error: v1::Error,
    /// Whether the lease goes on from its snapshots later. The other workers of the lease must then
    /// not fail the all-reduces and transfers that wait for sessions here.
    #[prost(bool, tag = "2")]
    pub(crate) goes_on: bool,
}

/// A snapshot of a session.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct SnapshotInfo {
    #[prost(uint64, tag = "1")]
    pub(crate) session_id: u64,
    #[prost(uint64, tag = "2")]
    pub(crate) mark: u64,
    /// The latest mark from which the client can go on. Snapshots of earlier ones are not needed.
    #[prost(uint64, tag = "3")]
    pub(crate) committed: u64,
    /// Without the base.
    #[prost(uint64, tag = "4")]
    pub(crate) size_bytes: u64,
    /// The base that has some of the contents; 0 if there is none.
    #[prost(uint64, tag = "5")]
    pub(crate) base_id: u64,
}

impl SnapshotInfo {
    /// Describes the snapshot of a session at `mark`.
    pub(crate) fn new(session: SessionId, mark: Mark, size_bytes: u64, base: Option<u64>) -> Self {
        Self {
            session_id: session.0,
            mark: mark.mark,
            committed: mark.committed,
            size_bytes,
            base_id: base.unwrap_or_default(),
        }
    }

    /// Returns the worker's reply to the snapshot: why it is not kept, or an empty text.
    pub(crate) fn reply(&self, error: String) -> SnapshotKept {
        SnapshotKept {
            session_id: self.session_id,
            mark: self.mark,
            error,
            sending_us: 0,
        }
    }
}

/// The worker's reply to a snapshot.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct SnapshotKept {
    #[prost(uint64, tag = "1")]
    pub(crate) session_id: u64,
    #[prost(uint64, tag = "2")]
    pub(crate) mark: u64,
    /// Why the snapshot is not kept; empty if it is.
    #[prost(string, tag = "3")]
    pub(crate) error: String,
    /// For how long the snapshot was sent to the keeper, in microseconds.
    #[prost(uint64, tag = "4")]
    pub(crate) sending_us: u64,
}

/// A connection that was accepted for a process.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct PassedConnection {
    /// The client's first datagram, for a QUIC connection; `None` for a TCP connection.
    #[prost(bytes = "vec", optional, tag = "1")]
    pub(crate) first_datagram: Option<Vec<u8>>,
}

/// A message without content.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct Empty {}

/// Which devices to describe.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Describe {
    #[prost(message, repeated, tag = "1")]
    pub(crate) devices: Vec<DeviceName>,
    /// Replaces the memory size of each device.
    #[prost(uint64, optional, tag = "2")]
    pub(crate) memory_bytes: Option<u64>,
}

/// A device of the host, as in `--devices`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct DeviceName {
    #[prost(string, tag = "1")]
    pub(crate) kind: String,
    #[prost(uint32, tag = "2")]
    pub(crate) index: u32,
}

/// A device that the worker offers.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct OfferedDevice {
    /// The device's index on the worker.
    #[prost(uint32, tag = "1")]
    pub(crate) index: u32,
    #[prost(message, required, tag = "2")]
    pub(crate) name: DeviceName,
    /// Limit of the memory that sessions may take. Of a share of a device, the memory of the share.
    #[prost(uint64, tag = "3")]
    pub(crate) memory_bytes: u64,
}

/// All that a process needs to run a lease. It has no secret of the pool or of another
/// lease.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Start {
    /// The lease, with its grants.
    #[prost(message, required, tag = "1")]
    pub(crate) granted: v1::LeaseGranted,
    /// The lease's devices on this worker.
    #[prost(message, repeated, tag = "2")]
    pub(crate) devices: Vec<OfferedDevice>,
    #[prost(uint64, tag = "3")]
    pub(crate) worker_id: u64,
    #[prost(string, tag = "4")]
    pub(crate) worker_name: String,
    /// The process's own certificate chain, which the worker issued for this lease.
    #[prost(bytes = "vec", repeated, tag = "6")]
    pub(crate) certificate_chain: Vec<Vec<u8>>,
    /// The private key of that certificate.
    #[prost(bytes = "vec", tag = "7")]
    pub(crate) private_key: Vec<u8>,
    #[prost(message, required, tag = "8")]
    pub(crate) settings: ProcessSettings,
    /// Files and directories that the process must not open.
    #[prost(bytes = "vec", repeated, tag = "9")]
    pub(crate) hidden: Vec<Vec<u8>>,
    /// Higher than that of all earlier processes of the lease, on whichever worker.
    #[prost(uint64, tag = "10")]
    pub(crate) epoch: u64,
}

/// Settings of the worker that its processes share.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ProcessSettings {
    /// Most bytes of uploads that a session may keep that begins at this worker.
    #[prost(uint64, tag = "1")]
    pub(crate) new_kept_limit_bytes: u64,
    #[prost(uint64, tag = "2")]
    pub(crate) op_timeout_ms: u64,
    #[prost(uint64, tag = "3")]
    pub(crate) collective_timeout_ms: u64,
    #[prost(uint64, optional, tag = "4")]
    pub(crate) bucket_bytes: Option<u64>,
    /// Directory of compiled kernels.
    #[prost(bytes = "vec", optional, tag = "5")]
    pub(crate) kernel_cache: Option<Vec<u8>>,
    /// Bytes of memory for snapshots of the sessions of one lease; 0 if none are kept.
    #[prost(uint64, tag = "6")]
    pub(crate) snapshot_bytes: u64,
    /// Most bytes of uploads that a session may keep that began at another worker.
    #[prost(uint64, tag = "7")]
    pub(crate) restored_kept_limit_bytes: u64,
}

/// A message of a process.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct FromProcess {
    #[prost(oneof = "Event", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13")]
    pub(crate) event: Option<Event>,
}

/// What happened in a process.
#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum Event {
    /// The process is ready for its first message. Its build is [`BUILD`].
    #[prost(string, tag = "1")]
    Hello(String),
    /// The process serves its lease.
    #[prost(message, tag = "2")]
    Started(Empty),
    /// The process cannot do what it was started for, for this reason.
    #[prost(string, tag = "3")]
    Failed(String),
    /// How the lease uses its devices. Sent when that changes.
    #[prost(message, tag = "4")]
    Report(Report),
    /// The reply to `Describe`.
    #[prost(message, tag = "5")]
    Described(Described),
    /// The test op returned the right result.
    #[prost(message, tag = "6")]
    Passed(Empty),
    /// Uploads of a session, in the shared memory that comes with this message. Their hashes
    /// are not trusted, and not sent.
    #[prost(message, tag = "7")]
    Uploads(KeptUploads),
    /// The process has work for this device, and requests its turn.
    #[prost(uint32, tag = "8")]
    RequestTurn(u32),
    /// The process returns the turn of this device.
    #[prost(uint32, tag = "9")]
    ReturnTurn(u32),
    /// A snapshot of a session, in the shared memory that comes with this message.
    #[prost(message, tag = "10")]
    Snapshot(SnapshotInfo),
    /// This session has ended, and needs no snapshots.
    #[prost(uint64, tag = "11")]
    SessionEnded(u64),
    /// The base, in the shared memory that comes with this message, of the snapshot that follows.
    #[prost(message, tag = "12")]
    SnapshotBase(SnapshotInfo),
    /// What the lease has used in the end. The process's last message; of the report, only what was
    /// used counts.
    #[prost(message, tag = "13")]
    Used(Report),
}

/// The uploads in a segment of shared memory.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct KeptUploads {
    /// Their sizes, in order.
    #[prost(uint64, repeated, tag = "1")]
    pub(crate) sizes_bytes: Vec<u64>,
    /// Their hashes, one after the other.
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) hashes: Vec<u8>,
    /// From a process: a number that [`Task::UploadsDone`] is to name, or 0 if it need not be sent.
    #[prost(uint64, tag = "3")]
    pub(crate) number: u64,
}

/// How a lease uses its devices.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Report {
    /// Sessions that have not ended.
    #[prost(uint32, tag = "1")]
    pub(crate) live_sessions: u32,
    #[prost(btree_map = "uint32, message", tag = "2")]
    pub(crate) usage: std::collections::BTreeMap<u32, v1::DeviceUsage>,
    #[prost(message, repeated, tag = "3")]
    pub(crate) out_of_service: Vec<v1::OutOfService>,
    /// What the lease has used of each device, as this process has counted it.
    #[prost(btree_map = "uint32, message", tag = "4")]
    pub(crate) used: std::collections::BTreeMap<u32, v1::UsageCounters>,
    /// Number of steps that the sessions have executed. Lower after a session has ended.
    #[prost(uint64, tag = "5")]
    pub(crate) steps: u64,
    /// Whether a session has something to do.
    #[prost(bool, tag = "6")]
    pub(crate) is_busy: bool,
    /// The other workers of the lease that this process has dialled in vain for a while.
    #[prost(uint64, repeated, tag = "7")]
    pub(crate) missing_peers: Vec<u64>,
}

/// The devices that can be opened, and those that cannot.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Described {
    #[prost(message, repeated, tag = "1")]
    pub(crate) found: Vec<DescribedDevice>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) missing: Vec<Missing>,
    /// The protections of processes that this host's kernel lacks.
    #[prost(string, repeated, tag = "3")]
    pub(crate) lacking: Vec<String>,
}

/// A device that can be opened.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct DescribedDevice {
    #[prost(message, required, tag = "1")]
    pub(crate) name: DeviceName,
    /// What the manufacturer calls the device.
    #[prost(string, tag = "2")]
    pub(crate) model: String,
    #[prost(uint64, tag = "3")]
    pub(crate) memory_bytes: u64,
    #[prost(string, tag = "4")]
    pub(crate) driver: String,
}

/// A device that cannot be opened, and why.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Missing {
    #[prost(string, tag = "1")]
    pub(crate) what: String,
    #[prost(string, tag = "2")]
    pub(crate) reason: String,
}
