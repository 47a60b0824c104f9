//! A program with a lease that attacks its worker, to slow down the other leases.
//!
//! It does four things at the same time, until its process ends: it sends ops that the worker
//! must refuse, provokes large faults, sends malformed frames, and opens connections that
//! send garbage. It ignores every error and starts again.

use std::{convert::Infallible, time::Duration};

use anyhow::{Context as _, Result, bail};
use burn_backend::DType;
use burn_ir::{BinaryOpIr, CustomOpIr, NumericOperationIr, OperationIr, TensorIr};
use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt as _};
use tensord_proto::ids::LeaseId;
use tensord_testkit::raw::{self, ClientStream, RawSession, SessionError, Target};
use tensord_transport::{Dialer, TransportChoice};
use tokio::{runtime::Runtime, task::JoinSet, time::sleep};

/// Refused ops between two syncs: more than a worker takes in one turn.
const REFUSED_OPS: usize = 2048;

/// Bytes of an op's name, which the worker's fault may repeat.
const NAME_BYTES: usize = 64 << 10;

/// Bytes of a malformed frame.
const GARBAGE_BYTES: usize = 64 << 10;

/// Tasks that open connections, send garbage and close them.
const GARBAGE_TASKS: usize = 4;

/// Pause after a refused connection. A refusal costs this process more than the worker, and
/// both share the host's cores in a bench.
const RETRY_DELAY: Duration = Duration::from_millis(10);

/// Timeout of dialling a connection.
const DEADLINE: Duration = Duration::from_secs(5);

/// A task's work in a session until the session ends.
type Attack = fn(RawSession) -> BoxFuture<'static, Result<Infallible, SessionError>>;

/// Leases a device of the pool at `url`, and attacks its worker as long as the process
/// lives. Calls `begun` once all tasks have started.
///
/// # Errors
///
/// If there is no lease, or the lease ends.
pub(crate) fn attack(runtime: &Runtime, url: &str, begun: impl FnOnce()) -> Result<Infallible> {
    runtime.block_on(async {
        let attached = ClientStream::to(url).await;
        let mut attached = attached.context("cannot attach")?;
        let leased = attached.lease(1).await;
        let leased = leased.map_err(|e| anyhow::anyhow!("cannot lease a device: {e}"))?;
        let target = leased.into_iter().next();
        let target = target.context("the lease has no device")?;
        let mut tasks = JoinSet::new();
        let attacks: [Attack; 3] = [
            |session| send_refused_ops(session).boxed(),
            |session| provoke_faults(session).boxed(),
            |session| send_malformed_frame(session).boxed(),
        ];
        for attack in attacks {
            // Opened before the storm starts, which might block it.
            let session = RawSession::open(&target).await?;
            tasks.spawn(repeat_attack(target.clone(), session, attack));
        }
        for _ in 0..GARBAGE_TASKS {
            tasks.spawn(send_garbage_connections(target.clone()));
        }
        begun();
        // Keeps the stream open, and with it the lease.
        let ended = attached.hold().await;
        bail!("the scheduler ended the stream: {ended:?}")
    })
}

/// Runs `attack` in one session after the other, forever.
async fn repeat_attack(target: Target, first: RawSession, attack: Attack) -> Infallible {
    let mut opened = Ok(first);
    loop {
        match opened {
            Ok(session) => {
                // The worker ended the session; the attack goes on.
                let _ = attack(session).await;
            }
            Err(_) => sleep(RETRY_DELAY).await,
        }
        opened = RawSession::open(&target).await;
    }
}

/// Sends ops that name a tensor with a wrong shape, and ops on tensors that do not exist.
async fn send_refused_ops(mut session: RawSession) -> Result<Infallible, SessionError> {
    let existing = session.upload(&[1.0, 2.0]);
    let wrong = raw::tensor(existing.id.value(), &[3]);
    loop {
        let outs: Vec<_> = (0..REFUSED_OPS).map(|_| session.new_id()).collect();
        let ops = outs.iter().map(|&id| match id % 2 {
            0 => add(&wrong, raw::out(id, &[3])),
            _ => add(&raw::tensor(1, &[3]), raw::out(id, &[3])),
        });
        session.ops(&ops.collect::<Vec<_>>());
        let drops = outs
            .iter()
            .map(|&id| OperationIr::Drop(raw::last(&raw::tensor(id, &[3]))));
        session.ops(&drops.collect::<Vec<_>>());
        session.sync().await?;
    }
}

fn add(to_itself: &TensorIr, out: TensorIr) -> OperationIr {
    let add = BinaryOpIr {
        lhs: to_itself.clone(),
        rhs: to_itself.clone(),
        out,
    };
    OperationIr::NumericFloat(DType::F32, NumericOperationIr::Add(add))
}

/// Sends custom ops with unknown and very long names, and reads their results: each reply
/// is a fault that names the op.
async fn provoke_faults(mut session: RawSession) -> Result<Infallible, SessionError> {
    let mut number = 0u64;
    loop {
        number += 1;
        let id = session.new_id();
        // Each name is different, so that it cannot be cached.
        let name = format!("{number:016}").repeat(NAME_BYTES / 16);
        let op = CustomOpIr {
            id: name,
            inputs: Vec::new(),
            outputs: vec![raw::out(id, &[1])],
            scalars: Vec::new(),
        };
        session.ops(&[OperationIr::Custom(op)]);
        let result = raw::tensor(id, &[1]);
        // Ignores the fault.
        let _ = session.fetch(&raw::last(&result)).await?;
    }
}

/// Sends one malformed frame; the worker ends the session.
async fn send_malformed_frame(mut session: RawSession) -> Result<Infallible, SessionError> {
    session.send_bytes(vec![0xff; GARBAGE_BYTES]).await?;
    Err(session.end().await)
}

/// Opens one connection after the other and sends garbage on each after the TLS handshake.
async fn send_garbage_connections(target: Target) -> Infallible {
    let dialler = Dialer::new(TransportChoice::Tcp).for_lease(LeaseId(target.lease_id));
    let garbage = Bytes::from_static(&[0xff; 4096]);
    loop {
        match dialler.dial(&target.address, &target.trust, DEADLINE).await {
            Ok(mut link) => {
                // The worker may have closed the link already.
                let _ = link.sender.send(std::slice::from_ref(&garbage)).await;
            }
            Err(_) => sleep(RETRY_DELAY).await,
        }
    }
}
