//! The system calls that the process of a lease may make.
//!
//! A list of what is allowed, not of what is forbidden, as kernels gain calls. The others
//! fail with `ENOSYS`, as on a kernel that does not have them, so that libraries fall back to
//! older calls.
//!
//! NVIDIA's driver does not work without a local socket that listens for other processes with its
//! devices. So a process that may yet load a driver may make such a socket, and have it listen;
//! but it cannot accept a connection.

use std::io;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use seccompiler::BpfProgram;

/// Restricts the system calls of this thread, and of those that it starts, to those that sessions
/// and drivers need. Returns false if the kernel, or this build's processor, has no filters.
pub(super) fn restrict() -> io::Result<bool> {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    return apply(&filter::program().map_err(io::Error::other)?);
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    Ok(false)
}

/// Also forbids the calls that only drivers need. Returns false as [`restrict`] does.
pub(super) fn restrict_to_sessions() -> io::Result<bool> {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    return apply(&filter::without_driver().map_err(io::Error::other)?);
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    Ok(false)
}

/// Applies a filter in addition to those of this thread. Returns false if the kernel has none.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn apply(filter: &BpfProgram) -> io::Result<bool> {
    match seccompiler::apply_filter(filter) {
        Ok(()) => Ok(true),
        Err(seccompiler::Error::Prctl(e) | seccompiler::Error::Seccomp(e))
            if is_unsupported(&e) =>
        {
            Ok(false)
        }
        Err(e) => Err(io::Error::other(e)),
    }
}

/// Returns whether the kernel was built without filters: `EINVAL` or `ENOSYS`.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn is_unsupported(error: &io::Error) -> bool {
    [libc::EINVAL, libc::ENOSYS]
        .iter()
        .any(|code| error.raw_os_error() == Some(*code))
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod filter {
    use std::collections::BTreeMap;

    use seccompiler::{
        BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
        SeccompFilter, SeccompRule,
    };

    /// Files, whose paths Landlock restricts. Landlock does not restrict changes of modes and times, so only those
    /// of open files are allowed, and of modes only with a driver.
    const FILES: &[i64] = &[
        libc::SYS_close,
        libc::SYS_close_range,
        libc::SYS_copy_file_range,
        libc::SYS_dup,
        libc::SYS_dup3,
        libc::SYS_eventfd2,
        libc::SYS_faccessat,
        libc::SYS_faccessat2,
        libc::SYS_fadvise64,
        libc::SYS_fallocate,
        libc::SYS_fchmod,
        libc::SYS_fdatasync,
        libc::SYS_flock,
        libc::SYS_fstat,
        libc::SYS_fstatfs,
        libc::SYS_fsync,
        libc::SYS_ftruncate,
        libc::SYS_getcwd,
        libc::SYS_getdents64,
        libc::SYS_linkat,
        libc::SYS_lseek,
        libc::SYS_memfd_create,
        libc::SYS_mkdirat,
        libc::SYS_newfstatat,
        libc::SYS_openat,
        libc::SYS_openat2,
        libc::SYS_pipe2,
        libc::SYS_pread64,
        libc::SYS_preadv,
        libc::SYS_preadv2,
        libc::SYS_pwrite64,
        libc::SYS_pwritev,
        libc::SYS_pwritev2,
        libc::SYS_read,
        libc::SYS_readlinkat,
        libc::SYS_readv,
        libc::SYS_renameat,
        libc::SYS_renameat2,
        libc::SYS_sendfile,
        libc::SYS_statfs,
        libc::SYS_statx,
        libc::SYS_umask,
        libc::SYS_unlinkat,
        libc::SYS_write,
        libc::SYS_writev,
    ];

    /// Memory.
    const MEMORY: &[i64] = &[
        libc::SYS_brk,
        libc::SYS_get_mempolicy,
        libc::SYS_madvise,
        libc::SYS_mbind,
        libc::SYS_membarrier,
        libc::SYS_mincore,
        libc::SYS_mlock,
        libc::SYS_mlock2,
        libc::SYS_mmap,
        libc::SYS_mprotect,
        libc::SYS_mremap,
        libc::SYS_msync,
        libc::SYS_munlock,
        libc::SYS_munmap,
        libc::SYS_set_mempolicy,
    ];

    /// Threads, signals within the process, what a process may know of itself, and Landlock's
    /// calls, which can only restrict it further.
    const PROCESS: &[i64] = &[
        libc::SYS_capget,
        libc::SYS_exit,
        libc::SYS_exit_group,
        libc::SYS_futex,
        libc::SYS_futex_waitv,
        libc::SYS_get_robust_list,
        libc::SYS_getcpu,
        libc::SYS_getegid,
        libc::SYS_geteuid,
        libc::SYS_getgid,
        libc::SYS_getgroups,
        libc::SYS_getpgid,
        libc::SYS_getpid,
        libc::SYS_getppid,
        libc::SYS_getpriority,
        libc::SYS_getresgid,
        libc::SYS_getresuid,
        libc::SYS_getrusage,
        libc::SYS_getsid,
        libc::SYS_gettid,
        libc::SYS_getuid,
        libc::SYS_landlock_add_rule,
        libc::SYS_landlock_create_ruleset,
        libc::SYS_landlock_restrict_self,
        libc::SYS_restart_syscall,
        libc::SYS_rseq,
        libc::SYS_rt_sigaction,
        libc::SYS_rt_sigpending,
        libc::SYS_rt_sigprocmask,
        libc::SYS_rt_sigreturn,
        libc::SYS_rt_sigsuspend,
        libc::SYS_rt_sigtimedwait,
        libc::SYS_sched_get_priority_max,
        libc::SYS_sched_get_priority_min,
        libc::SYS_sched_getaffinity,
        libc::SYS_sched_getattr,
        libc::SYS_sched_getparam,
        libc::SYS_sched_getscheduler,
        libc::SYS_sched_yield,
        libc::SYS_set_robust_list,
        libc::SYS_set_tid_address,
        libc::SYS_sigaltstack,
        libc::SYS_signalfd4,
        libc::SYS_sysinfo,
        libc::SYS_times,
        libc::SYS_uname,
        libc::SYS_wait4,
        libc::SYS_waitid,
    ];

    /// Time, random numbers, and waiting for events.
    const EVENTS: &[i64] = &[
        libc::SYS_clock_getres,
        libc::SYS_clock_gettime,
        libc::SYS_clock_nanosleep,
        libc::SYS_epoll_create1,
        libc::SYS_epoll_ctl,
        libc::SYS_epoll_pwait,
        libc::SYS_epoll_pwait2,
        libc::SYS_getrandom,
        libc::SYS_gettimeofday,
        libc::SYS_nanosleep,
        libc::SYS_ppoll,
        libc::SYS_pselect6,
        libc::SYS_timerfd_create,
        libc::SYS_timerfd_gettime,
        libc::SYS_timerfd_settime,
    ];

    /// Connections that were passed on, or that the process dials to other workers. `bind`
    /// is for a UDP socket's own port; Landlock refuses it for TCP, and there is no `accept`.
    const NETWORK: &[i64] = &[
        libc::SYS_bind,
        libc::SYS_connect,
        libc::SYS_getpeername,
        libc::SYS_getsockname,
        libc::SYS_getsockopt,
        libc::SYS_listen,
        libc::SYS_recvfrom,
        libc::SYS_recvmmsg,
        libc::SYS_recvmsg,
        libc::SYS_sendmmsg,
        libc::SYS_sendmsg,
        libc::SYS_sendto,
        libc::SYS_shutdown,
        libc::SYS_socketpair,
    ];

    /// Calls that only x86-64 has, mostly older forms of the calls above.
    #[cfg(target_arch = "x86_64")]
    const OLDER: &[i64] = &[
        libc::SYS_access,
        libc::SYS_arch_prctl,
        libc::SYS_dup2,
        libc::SYS_epoll_create,
        libc::SYS_epoll_wait,
        libc::SYS_eventfd,
        libc::SYS_getdents,
        libc::SYS_getpgrp,
        libc::SYS_getrlimit,
        libc::SYS_lstat,
        libc::SYS_mkdir,
        libc::SYS_open,
        libc::SYS_pause,
        libc::SYS_pipe,
        libc::SYS_poll,
        libc::SYS_readlink,
        libc::SYS_rename,
        libc::SYS_rmdir,
        libc::SYS_select,
        libc::SYS_stat,
        libc::SYS_time,
        libc::SYS_unlink,
    ];
    #[cfg(target_arch = "aarch64")]
    const OLDER: &[i64] = &[];

    /// Returns the filter for this process.
    pub(super) fn program() -> Result<BpfProgram, BackendError> {
        let free = [FILES, MEMORY, PROCESS, EVENTS, NETWORK, OLDER];
        let mut rules: BTreeMap<i64, Vec<SeccompRule>> = free
            .into_iter()
            .flatten()
            .map(|&call| (call, Vec::new()))
            .collect();
        rules.extend(limited()?);
        let filter = SeccompFilter::new(
            rules,
            SeccompAction::Errno(libc::ENOSYS as u32),
            SeccompAction::Allow,
            std::env::consts::ARCH.try_into()?,
        )?;
        filter.try_into()
    }

    /// Returns the filter that forbids what only a driver needs.
    pub(super) fn without_driver() -> Result<BpfProgram, BackendError> {
        let local = SeccompRule::new(vec![equals(0, libc::AF_UNIX as u64)?])?;
        let calls = [
            (libc::SYS_fchmod, Vec::new()),
            (libc::SYS_listen, Vec::new()),
            (libc::SYS_socket, vec![local]),
        ];
        let filter = SeccompFilter::new(
            calls.into_iter().collect(),
            SeccompAction::Allow,
            SeccompAction::Errno(libc::ENOSYS as u32),
            std::env::consts::ARCH.try_into()?,
        )?;
        filter.try_into()
    }

    /// Returns the calls that are allowed only with certain arguments. An entry of `calls` has the
    /// call, the index of the argument, and its allowed values.
    fn limited() -> Result<Vec<(i64, Vec<SeccompRule>)>, BackendError> {
        let own = u64::from(std::process::id());
        let calls: [(i64, u8, &[u64]); 4] = [
            // Another process of this user must not be stopped or slowed down.
            (libc::SYS_kill, 0, &[own]),
            (libc::SYS_tgkill, 0, &[own]),
            (libc::SYS_prlimit64, 0, &[0, own]),
            (libc::SYS_sched_setaffinity, 0, &[0, own]),
        ];
        let mut rules = Vec::new();
        for (call, argument, values) in calls {
            let alternatives = values
                .iter()
                .map(|&value| SeccompRule::new(vec![equals(argument, value)?]));
            rules.push((call, alternatives.collect::<Result<_, _>>()?));
        }
        rules.push((libc::SYS_socket, sockets()?));
        // The times of an open file, which has no path.
        let no_path = SeccompCondition::new(1, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?;
        rules.push((libc::SYS_utimensat, vec![SeccompRule::new(vec![no_path])?]));
        rules.extend(excluding()?);
        // Another filter, which can only restrict the process further.
        const SECCOMP_SET_MODE_FILTER: u64 = 1;
        let further = vec![equals(0, SECCOMP_SET_MODE_FILTER)?, equals(1, 0)?];
        rules.push((libc::SYS_seccomp, vec![SeccompRule::new(further)?]));
        // The priority of this process or a thread, not of all of the user's.
        let own_priority = vec![equals(0, libc::PRIO_PROCESS as u64)?, equals(1, 0)?];
        rules.push((libc::SYS_setpriority, vec![SeccompRule::new(own_priority)?]));
        // A thread, but no process. The flags of `clone3` are in memory, which a filter cannot
        // read; libraries fall back to `clone`.
        let thread = libc::CLONE_THREAD as u64;
        let has_flag = SeccompCmpOp::MaskedEq(thread);
        let condition = SeccompCondition::new(0, SeccompCmpArgLen::Qword, has_flag, thread)?;
        rules.push((libc::SYS_clone, vec![SeccompRule::new(vec![condition])?]));
        Ok(rules)
    }

    /// Returns the sockets that may be made: of TCP and UDP, and the local kind that NVIDIA's driver needs,
    /// which the sockets of Docker, D-Bus and the like are not. Landlock does not restrict the ports of
    /// other protocols, such as MPTCP.
    fn sockets() -> Result<Vec<SeccompRule>, BackendError> {
        // The rest of the argument is flags.
        const KIND: u64 = 0xf;
        let is_packets = SeccompCmpOp::MaskedEq(KIND);
        let packets = libc::SOCK_SEQPACKET as u64;
        let packets = SeccompCondition::new(1, SeccompCmpArgLen::Dword, is_packets, packets)?;
        let local = vec![equals(0, libc::AF_UNIX as u64)?, packets];
        let mut sockets = vec![SeccompRule::new(local)?];
        for family in [libc::AF_INET, libc::AF_INET6] {
            // 0 is the usual protocol of the kind.
            for protocol in [0, libc::IPPROTO_TCP, libc::IPPROTO_UDP] {
                let socket = vec![equals(0, family as u64)?, equals(2, protocol as u64)?];
                sockets.push(SeccompRule::new(socket)?);
            }
        }
        Ok(sockets)
    }

    fn equals(argument: u8, value: u64) -> Result<SeccompCondition, BackendError> {
        SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
    }

    fn differs(argument: u8, value: u64) -> Result<SeccompCondition, BackendError> {
        SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, value)
    }

    /// Returns the calls of which some operations are left out.
    fn excluding() -> Result<Vec<(i64, Vec<SeccompRule>)>, BackendError> {
        // By these the kernel sends a signal to another process when a file is ready. Linux has
        // them in `fcntl.h` and `sockios.h`, for all processors.
        const F_SETOWN: u64 = 8;
        const F_SETSIG: u64 = 10;
        const F_SETOWN_EX: u64 = 15;
        const FIOSETOWN: u64 = 0x8901;
        const SIOCSPGRP: u64 = 0x8902;
        // Types into a terminal.
        const TIOCSTI: u64 = 0x5412;
        // By this, the process would outlive the worker.
        const PR_SET_PDEATHSIG: u64 = libc::PR_SET_PDEATHSIG as u64;
        // With these, a socket could take datagrams for another one on the same port.
        let shared_ports = [
            libc::SO_REUSEADDR,
            libc::SO_REUSEPORT,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            libc::SO_ATTACH_REUSEPORT_EBPF,
        ];
        let all_but = |argument: u8, values: &[u64]| {
            let conditions = values.iter().map(|&value| differs(argument, value));
            SeccompRule::new(conditions.collect::<Result<_, _>>()?)
        };
        let socket = libc::SOL_SOCKET as u64;
        // With this option, the last process to close a socket waits, and that may be the worker.
        let linger = libc::SO_LINGER;
        let mut of_socket = vec![equals(1, socket)?];
        for option in shared_ports.into_iter().chain([linger]) {
            of_socket.push(differs(2, option as u64)?);
        }
        Ok(vec![
            (
                libc::SYS_fcntl,
                vec![all_but(1, &[F_SETOWN, F_SETSIG, F_SETOWN_EX])?],
            ),
            (
                libc::SYS_ioctl,
                vec![all_but(1, &[FIOSETOWN, SIOCSPGRP, TIOCSTI])?],
            ),
            (libc::SYS_prctl, vec![all_but(0, &[PR_SET_PDEATHSIG])?]),
            (
                libc::SYS_setsockopt,
                vec![all_but(1, &[socket])?, SeccompRule::new(of_socket)?],
            ),
        ])
    }
}
