use std::{
    io::ErrorKind,
    net::SocketAddr,
    os::{fd::OwnedFd, unix::fs::PermissionsExt},
    process::Command,
};

use rustix::{
    fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW},
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketType, accept, listen},
};

use super::*;

fn made(root: &Path, paths: &[&str]) {
    for path in paths {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "x").unwrap();
    }
}

#[test]
fn all_but_hidden_paths_is_the_fewest_paths() {
    let root = tempfile::tempdir().unwrap();
    let root = fs::canonicalize(root.path()).unwrap();
    made(
        &root,
        &["a/b/secret/key", "a/b/open", "a/c/x", "d/x", "url"],
    );
    let hidden = [
        root.join("a/b/secret"),
        root.join("url"),
        root.join("missing"),
    ];
    let allowed = all_but(&root, &hidden);
    let expected = ["a/b/open", "a/c", "d"].map(|path| root.join(path));
    assert_eq!(allowed, expected);
    assert_eq!(all_but(&root, &[]), std::slice::from_ref(&root));
    assert!(all_but(&root, std::slice::from_ref(&root)).is_empty());
}

/// Runs `check` on a confined thread, which ends with it. Returns `None`, with a line, on a
/// kernel that lacks a protection.
fn confined<T: Send + 'static>(
    needs: Needs,
    check: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let thread = std::thread::spawn(move || {
        let calls = restrict_calls().unwrap();
        let missing = [calls, restrict_to(&needs, calls.is_none()).unwrap()];
        let missing: Vec<_> = missing.into_iter().flatten().collect();
        missing.is_empty().then(check).ok_or(missing)
    });
    match thread.join().unwrap() {
        Ok(checked) => Some(checked),
        Err(missing) => {
            eprintln!("not tested: this kernel lacks {}", missing.join(" and "));
            None
        }
    }
}

#[test]
fn confined_thread_starts_no_program_and_listens_nowhere() {
    confined(Needs::default(), || {
        // `true` is a program that could be started otherwise.
        Command::new("/bin/true").status().unwrap_err();
        refuses_tcp_ports();
        assert_eq!(packet_socket().err(), Some(Errno::NOSYS));
        let unbound = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        assert_eq!(listen(&unbound, 1), Err(Errno::NOSYS));
        let name = format!("/proc/self/task/{}/comm", rustix::thread::gettid());
        assert!(fs::write(name, "name").is_err());
        let signalled = rustix::process::test_kill_process(rustix::process::getppid().unwrap());
        signalled.unwrap_err();
        // What a session needs still works.
        std::thread::spawn(|| 1).join().unwrap();
        std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        assert!(fs::read_to_string("/proc/meminfo").is_ok());
    });
}

/// Makes a local socket of the kind that NVIDIA's driver uses.
fn packet_socket() -> Result<OwnedFd, Errno> {
    rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None)
}

/// Checks that this thread cannot choose a port for connections.
fn refuses_tcp_ports() {
    let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
    let socket = rustix::net::socket(family, kind, None).unwrap();
    let address: SocketAddr = "127.0.0.1:0".parse().unwrap();
    assert_eq!(rustix::net::bind(&socket, &address), Err(Errno::ACCESS));
    let multipath = rustix::net::socket(family, kind, Some(rustix::net::ipproto::MPTCP));
    assert_eq!(multipath.err(), Some(Errno::NOSYS));
    let local = rustix::net::socket(AddressFamily::UNIX, kind, None);
    assert_eq!(local.err(), Some(Errno::NOSYS));
}

/// What NVIDIA's driver needs, as seen with its version 580.
#[test]
fn thread_with_driver_has_a_local_socket_and_named_threads() {
    let needs = Needs {
        has_drivers: true,
        ..Needs::default()
    };
    confined(needs, || {
        let socket = packet_socket().unwrap();
        let name = format!("tensord-test-{}", std::process::id());
        let name = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        rustix::net::bind(&socket, &name).unwrap();
        listen(&socket, 1).unwrap();
        assert_eq!(accept(&socket).err(), Some(Errno::NOSYS));
        // A socket at a path would be in the way of a service.
        let directory = std::env::temp_dir();
        let path = directory.join(format!("tensord-test-{}", std::process::id()));
        let path = SocketAddrUnix::new(path).unwrap();
        let at_path = rustix::net::bind(packet_socket().unwrap(), &path);
        assert_eq!(at_path, Err(Errno::ACCESS));
        refuses_tcp_ports();
        Command::new("/bin/true").status().unwrap_err();
        // Also a thread that begins later.
        std::thread::spawn(|| {
            let name = format!("/proc/self/task/{}/comm", rustix::thread::gettid());
            fs::write(&name, "named").unwrap();
            assert_eq!(fs::read_to_string(&name).unwrap(), "named\n");
        })
        .join()
        .unwrap();
        let parent = rustix::process::getppid().unwrap().as_raw_nonzero();
        let other = fs::write(format!("/proc/{parent}/task/{parent}/comm"), "x");
        assert_eq!(other.unwrap_err().kind(), ErrorKind::PermissionDenied);
    });
}

#[test]
fn confined_thread_affects_no_other_process() {
    use rustix::{
        net::sockopt::{set_socket_broadcast, set_socket_linger, set_socket_reuseport},
        process::{
            Resource, getrlimit, getuid, set_parent_process_death_signal, setpriority_process,
            setpriority_user,
        },
    };
    confined(Needs::default(), || {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        // Lower the priority of all processes of the user.
        assert_eq!(setpriority_user(getuid(), 1), Err(Errno::NOSYS));
        setpriority_process(None, 0).unwrap();
        // Outlive the worker.
        assert_eq!(set_parent_process_death_signal(None), Err(Errno::NOSYS));
        // Take other sockets' datagrams.
        assert_eq!(set_socket_reuseport(&socket, true), Err(Errno::NOSYS));
        // Have the worker wait when it closes a socket.
        let minute = Some(std::time::Duration::from_secs(60));
        assert_eq!(set_socket_linger(&socket, minute), Err(Errno::NOSYS));
        set_socket_broadcast(&socket, true).unwrap();
        // Use up the descriptors that may be on their way between the user's processes.
        let files = getrlimit(Resource::Nofile).maximum;
        assert!(files.is_some_and(|files| files <= MAX_FILES), "{files:?}");
    });
}

#[test]
fn links_lead_to_no_hidden_path() {
    let root = tempfile::tempdir().unwrap();
    let root = fs::canonicalize(root.path()).unwrap();
    made(&root, &["a/secret/key", "a/open"]);
    std::os::unix::fs::symlink(root.join("a/secret/key"), root.join("a/link")).unwrap();
    std::os::unix::fs::symlink(&root, root.join("a/loop")).unwrap();
    let allowed = all_but(&root, &[root.join("a/secret")]);
    assert_eq!(allowed, [root.join("a/open")]);
}

#[test]
fn secrets_are_out_of_reach() {
    let directory = tempfile::tempdir().unwrap();
    made(directory.path(), &["state/worker.pem", "kernels/x"]);
    let (secret, kernels) = (
        directory.path().join("state/worker.pem"),
        directory.path().join("kernels"),
    );
    for has_drivers in [false, true] {
        let needs = Needs {
            has_drivers,
            kernel_cache: Some(kernels.clone()),
            hidden: vec![directory.path().join("state")],
        };
        let (secret, kernels) = (secret.clone(), kernels.clone());
        confined(needs, move || {
            let read = fs::read(&secret).unwrap_err();
            assert_eq!(read.kind(), ErrorKind::PermissionDenied);
            let parent = rustix::process::getppid().unwrap().as_raw_nonzero();
            let environment = fs::read(format!("/proc/{parent}/environ")).unwrap_err();
            assert_eq!(environment.kind(), ErrorKind::PermissionDenied);
            let written = fs::write(kernels.join("y"), "y");
            assert_eq!(written.is_ok(), has_drivers);
            // Their modes and times cannot be changed, either.
            let mode = fs::set_permissions(&secret, fs::Permissions::from_mode(0o666));
            assert_eq!(mode.unwrap_err().raw_os_error(), Some(libc::ENOSYS));
            let now = Timespec {
                tv_sec: 0,
                tv_nsec: UTIME_NOW,
            };
            let times = Timestamps {
                last_access: now,
                last_modification: now,
            };
            let times = rustix::fs::utimensat(CWD, &secret, &times, AtFlags::empty());
            assert_eq!(times, Err(Errno::NOSYS));
        });
    }
}
