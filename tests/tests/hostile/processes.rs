//! The processes of leases: whatever happens in one, no other lease notices.
//!
//! The worker of `examples/unchecked.rs` executes ops without their checks, and has custom ops
//! that end their process. Signals from here do the rest.

use std::{fs, process::Command, time::Duration};

use burn::tensor::Tensor;
use burn_ir::{CustomOpIr, OperationIr};
use tensord_client::{CustomOp, Lease, LeaseRequest, Pool};
use tensord_proto::v1::ErrorCode;
use tensord_testkit::{
    cluster::{Cluster, Process},
    host,
    models::Mlp,
    raw::{self, ClientStream, RawSession, SessionError, Target},
    resource_usage::{children, control_groups, is_running, signal_process, stat_fields},
    training,
};

use crate::ops::{conv1d, shaped};

/// A pool with a worker that executes ops unchecked.
pub(crate) struct UncheckedPool {
    pub(crate) cluster: Cluster,
    pub(crate) worker: Process,
}

impl UncheckedPool {
    fn start(devices: &str) -> Self {
        Self::start_with(devices, &[])
    }

    pub(crate) fn start_with(devices: &str, env: &[(&str, &str)]) -> Self {
        let cluster = Cluster::start(&[]);
        let mut all = vec![("TENSORD_URL", cluster.worker_url())];
        all.extend(env);
        let log = cluster.path("unchecked.log");
        let worker = Process::start_of(&host::example("unchecked"), &[devices], &all, log);
        worker.wait_for("worker", |line| (line == "joined the pool").then_some(()));
        Self { cluster, worker }
    }
}

/// A lease of one device, through a raw client.
struct RawLease {
    target: Target,
    session: RawSession,
    attached: ClientStream,
}

impl RawLease {
    async fn open(url: &str) -> Result<Self, SessionError> {
        let mut attached = ClientStream::to(url).await.unwrap();
        let target = attached.lease(1).await.unwrap().remove(0);
        let session = RawSession::open(&target).await?;
        Ok(Self {
            target,
            session,
            attached,
        })
    }

    /// Releases the lease, and waits until the scheduler has ended it.
    async fn release(self, pool: &Pool) {
        let before = pool.status().unwrap().leases;
        self.attached.release(self.target.lease_id).await.unwrap();
        while pool.status().unwrap().leases >= before {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Runs ops that end the process, and returns the worker's reason for the session's end.
    async fn end_by(&mut self, ops: &[OperationIr]) -> String {
        self.session.ops(ops);
        let lost = self.session.end().await;
        assert!(matches!(lost, SessionError::Lost(_)), "{lost}");
        let error = raw::refusal(&self.target).await;
        assert_eq!(error.code(), ErrorCode::Session);
        error.message
    }
}

/// Returns a convolution whose weight has 131,072 times the channels of its input: Flex reads
/// 256 GiB of an input of 2 MiB.
fn reads_foreign_memory(session: &mut RawSession) -> OperationIr {
    const LENGTH: usize = 1 << 19;
    const CHANNELS: usize = 1 << 17;
    let x = shaped(session, &vec![0.0; LENGTH], &[1, 1, LENGTH]);
    let weight = shaped(session, &vec![0.0; CHANNELS], &[1, CHANNELS, 1]);
    let out = raw::out(session.new_id(), &[1, 1, LENGTH]);
    conv1d(x, weight, out)
}

pub(crate) fn custom(session: &mut RawSession, name: &'static str) -> OperationIr {
    let out = raw::out(session.new_id(), &[1]);
    OperationIr::Custom(CustomOpIr::new(name, &[], &[out]))
}

fn lease(pool: &Pool) -> Lease {
    pool.lease(LeaseRequest::devices(1)).unwrap()
}

#[test]
fn op_that_breaks_its_process_ends_its_own_lease_only() {
    type Make = fn(&mut RawSession) -> OperationIr;
    let attacks: [(&str, Make, &str); 3] = [
        ("Module.Conv1d", reads_foreign_memory, "SIGSEGV"),
        ("Custom", |session| custom(session, "abort"), "SIGABRT"),
        (
            "Custom",
            |session| custom(session, "exit"),
            "exited with code 7",
        ),
    ];
    let UncheckedPool { cluster, worker } = UncheckedPool::start("flex*2");
    let pool = cluster.pool();
    let steps = 12;
    let undisturbed = {
        let alone = lease(&pool);
        training::losses::<Mlp>(&alone.devices()[0], steps, |_| {}).unwrap()
    };
    let innocent = lease(&pool);
    let mut attacks = attacks.into_iter();
    let losses = training::losses::<Mlp>(&innocent.devices()[0], steps, |step| {
        if step % 3 != 1 {
            return;
        }
        let Some((name, make, expected)) = attacks.next() else {
            return;
        };
        raw::block(async {
            let mut attacker = RawLease::open(cluster.client_url()).await.unwrap();
            let op = make(&mut attacker.session);
            let reason = attacker.end_by(&[op]).await;
            assert!(reason.contains(expected), "{reason}");
            assert!(reason.contains(name), "{reason}");
            attacker.release(&pool).await;
        });
    });
    assert_eq!(losses.unwrap(), undisturbed, "{}", worker.log());
    assert!(attacks.next().is_none(), "all attacks were made");
    assert_eq!(innocent.ended(), None);
}

#[test]
fn read_that_waits_is_told_how_its_process_ended() {
    let UncheckedPool { cluster, worker } = UncheckedPool::start("flex");
    let lease = lease(&cluster.pool());
    let device = lease.devices()[0].clone();
    let hanging: Tensor<1> = CustomOp::new("hang").on(&device).call([1]);
    let process = worker.process_of_lease();
    let error = std::thread::scope(|scope| {
        let reading = scope.spawn(|| hanging.try_into_data().unwrap_err().to_string());
        std::thread::sleep(Duration::from_millis(300));
        worker.signal_child(process, "ABRT");
        reading.join().unwrap()
    });
    for expected in ["signal 6 (SIGABRT", "(Custom"] {
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn device_whose_processes_die_is_tested_before_it_is_offered_again() {
    let UncheckedPool {
        cluster,
        worker: _worker,
    } = UncheckedPool::start("flex");
    let pool = cluster.pool();
    for _ in 0..3 {
        raw::block(async {
            let mut dying = RawLease::open(cluster.client_url()).await.unwrap();
            let abort = custom(&mut dying.session, "abort");
            dying.end_by(&[abort]).await;
            dying.release(&pool).await;
        });
    }
    let log = || cluster.scheduler.as_ref().unwrap().log();
    cluster.wait("the device to be taken off", || {
        log().contains("3 processes that used the device have died")
    });
    cluster.wait("the test of the device", || {
        log().contains("is in service again")
    });
    let lease = lease(&pool);
    let sum = Tensor::<1>::ones([4], &lease.devices()[0]).sum();
    assert_eq!(sum.into_scalar::<f32>(), 4.0);
}

#[test]
fn stopped_process_holds_up_nobody() {
    let UncheckedPool { cluster, worker } = UncheckedPool::start("flex*2");
    let pool = cluster.pool();
    let stopped = lease(&pool);
    let device = stopped.devices()[0].clone();
    assert_eq!(
        Tensor::<1>::ones([4], &device).sum().into_scalar::<f32>(),
        4.0
    );
    let id = worker.process_of_lease();
    worker.signal_child(id, "STOP");
    // Its client gives up, and another lease comes and goes meanwhile.
    for _ in 0..3 {
        let other = lease(&pool);
        let sum = Tensor::<1>::ones([4], &other.devices()[0]).sum();
        assert_eq!(sum.into_scalar::<f32>(), 4.0);
    }
    drop((device, stopped));
    cluster.wait("the process to be killed", || {
        !worker.children().contains(&id)
    });
    let both = pool.lease(LeaseRequest::devices(2)).unwrap();
    assert_eq!(both.devices().len(), 2);
}

/// A session of their own would have the kernel leave them without processor time on a busy host.
#[test]
fn processes_stay_in_the_session_of_their_worker_but_out_of_its_foreground() {
    let UncheckedPool { cluster, worker } = UncheckedPool::start("flex");
    let lease = lease(&cluster.pool());
    let of_worker = stat_fields(worker.id()).unwrap();
    let id = worker.processes_of_leases()[0];
    let of_lease = stat_fields(id).unwrap();
    let [process_group, session, terminal] = [2, 3, 4];
    assert_eq!(of_lease[process_group], id.to_string());
    assert_eq!(of_lease[session], of_worker[session]);
    assert_eq!(of_lease[terminal], "0", "the process has no terminal");
    drop(lease);
}

#[test]
fn killed_worker_leaves_no_process() {
    let UncheckedPool {
        cluster,
        mut worker,
    } = UncheckedPool::start("flex*3");
    let pool = cluster.pool();
    let lease = lease(&pool);
    let ones = Tensor::<1>::ones([4], &lease.devices()[0]);
    assert_eq!(ones.sum().into_scalar::<f32>(), 4.0);
    // Another one never ends its op, and a third one is stopped.
    let (hanging, before, stopped) = raw::block(async {
        let mut hanging = RawLease::open(cluster.client_url()).await.unwrap();
        let hang = custom(&mut hanging.session, "hang");
        hanging.session.ops(&[hang]);
        hanging.session.flush().await.unwrap();
        let before = worker.processes_of_leases();
        let stopped = RawLease::open(cluster.client_url()).await.unwrap();
        (hanging, before, stopped)
    });
    // A spare would not do: it may be stopped before it has asked the kernel to end it with its
    // worker, and then it outlives the worker.
    let leases = worker.processes_of_leases();
    assert_eq!(leases.len(), 3, "{before:?}");
    let third = leases.iter().find(|id| !before.contains(id)).unwrap();
    worker.signal_child(*third, "STOP");
    let processes = worker.children();
    worker.kill();
    cluster.wait("the processes to end", || {
        !processes.iter().any(|&id| is_running(id))
    });
    drop((lease, hanging, stopped));
}

#[test]
fn lease_is_refused_when_no_process_starts_and_the_device_stays() {
    let elsewhere = Cluster::start(&[]);
    let program = elsewhere.path("program");
    fs::copy(host::example("unchecked"), &program).unwrap();
    let path = program.to_str().unwrap();
    let UncheckedPool { cluster, worker } =
        UncheckedPool::start_with("flex", &[("UNCHECKED_PROGRAM", path)]);
    let pool = cluster.pool();
    drop(lease(&pool));
    // The file is gone, and the spares with it.
    let away = elsewhere.path("away");
    fs::rename(&program, &away).unwrap();
    for id in worker.children() {
        // The process of the lease may have ended by itself.
        signal_process(id, "KILL");
    }
    cluster.wait("the processes to be gone", || worker.children().is_empty());
    let refused = pool.lease(LeaseRequest::devices(1)).map(|_| ());
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("cannot start a process"), "{error}");
    cluster.wait("the device to be free", || {
        pool.status().unwrap().workers[0].devices[0].is_free()
    });
    // A program that is not this worker's.
    fs::write(&program, "#!/bin/sh\nexec sleep 0\n").unwrap();
    let executable = Command::new("chmod").args(["+x", path]).status();
    assert!(executable.unwrap().success());
    let refused = pool.lease(LeaseRequest::devices(1)).map(|_| ());
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("a new process is not ready"), "{error}");
    fs::rename(&away, &program).unwrap();
    let lease = lease(&pool);
    let sum = Tensor::<1>::ones([4], &lease.devices()[0]).sum();
    assert_eq!(sum.into_scalar::<f32>(), 4.0);
}

#[test]
fn process_that_takes_too_much_memory_ends_alone() {
    let memory = ("UNCHECKED_MEMORY", "67108864");
    let UncheckedPool { cluster, worker } = UncheckedPool::start_with("flex", &[memory]);
    if worker.log().contains("is not bounded by the kernel") {
        // Only where the worker may make control groups.
        return;
    }
    let pool = cluster.pool();
    raw::block(async {
        let mut greedy = RawLease::open(cluster.client_url()).await.unwrap();
        let grow = custom(&mut greedy.session, "grow");
        let reason = greedy.end_by(&[grow]).await;
        assert!(reason.contains("more than 1.1 GiB of memory"), "{reason}");
        greedy.release(&pool).await;
    });
    let lease = lease(&pool);
    let sum = Tensor::<1>::ones([4], &lease.devices()[0]).sum();
    assert_eq!(sum.into_scalar::<f32>(), 4.0);
}

/// Leases a device, calls `then`, reads a tensor, and releases the lease.
async fn lease_and_read(
    attached: &mut ClientStream,
    then: impl FnOnce(),
) -> Result<(), SessionError> {
    let target = attached.lease(1).await.expect("a device").remove(0);
    let read = async {
        let mut session = RawSession::open(&target).await?;
        let tensor = session.upload(&[1.0, 2.0]);
        then();
        session.fetch(&tensor).await
    };
    let read = read.await;
    let released = attached.release(target.lease_id).await;
    released.expect("the scheduler takes the release");
    assert_eq!(raw::floats(&read?.unwrap()), [1.0, 2.0]);
    Ok(())
}

#[test]
fn leases_leave_nothing_behind() {
    /// Leases in a row, and leases at once.
    const IN_A_ROW: usize = 200;
    const AT_ONCE: usize = 20;

    let UncheckedPool { cluster, worker } = UncheckedPool::start("flex*20");
    let (pool, url) = (cluster.pool(), cluster.client_url());
    // Raw clients: Burn's own leaves a thread behind for each device that a program uses.
    let mut attached = raw::block(ClientStream::to(url)).unwrap();
    raw::block(lease_and_read(&mut attached, || {})).unwrap();
    worker.wait_for_processes(0, 2);
    let before = worker.resource_usage();
    for number in 0..IN_A_ROW {
        let is_killed = number % 10 == 3;
        let read = raw::block(lease_and_read(&mut attached, || {
            if is_killed {
                worker.signal_child(worker.process_of_lease(), "KILL");
            }
        }));
        assert_eq!(read.is_err(), is_killed, "lease {number}: {read:?}");
    }
    // A stream that ends takes its messages along, so they stay until the leases have ended.
    let streams = std::thread::scope(|scope| {
        let lease = || {
            raw::block(async {
                let mut attached = ClientStream::to(url).await.unwrap();
                // The process may be killed, before it runs the lease or later.
                let _ = lease_and_read(&mut attached, || {}).await;
                attached
            })
        };
        let leasing: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(lease)).collect();
        for _ in 0..10 {
            if let Some(id) = children(worker.id()).last() {
                // The process may have ended by itself.
                signal_process(*id, "KILL");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let streams = leasing.into_iter().map(|leasing| leasing.join().unwrap());
        streams.collect::<Vec<_>>()
    });
    cluster.wait("the leases to end", || pool.status().unwrap().leases == 0);
    drop((attached, streams));
    worker.wait_for_processes(0, 2);
    worker.wait_until_settled(&before, Default::default());
    let ids = worker.children();
    assert!(ids.iter().all(|id| children(*id).is_empty()));
    // Each group that is left has a process: a spare.
    let mut members: Vec<u32> = Vec::new();
    for group in control_groups(worker.id()) {
        let processes = fs::read_to_string(group.join("cgroup.procs")).unwrap();
        members.push(processes.trim().parse().expect("one process in the group"));
    }
    assert!(members.iter().all(|member| ids.contains(member)));
}
