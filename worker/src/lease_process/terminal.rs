//! Separates this process from the worker's terminal.
//!
//! A session of its own would do that, too. But Linux schedules each session as one group (see
//! "autogroup" in sched(7)), and on a host whose processors are busy it leaves a group that mostly
//! sleeps without processor time for seconds. So this process stays in the worker's session.

use std::fs::File;

use rustix::{
    ioctl::{NoArg, Opcode, ioctl},
    process::setpgid,
};

/// Moves this process out of the terminal's foreground, so that Ctrl+C reaches only the worker,
/// which lets its leases end; and gives up the terminal, which this process then cannot open.
#[expect(unsafe_code, reason = "the system call that gives up a terminal")]
pub(super) fn leave_terminal() {
    // An error means that this process leads a session, so it has no terminal of the worker's.
    let _ = setpgid(None, None);
    // This fails if there is no terminal.
    let Ok(terminal) = File::open("/dev/tty") else {
        return;
    };
    // SAFETY: `TIOCNOTTY` is an operation that takes no argument, so the kernel accesses none of
    // this process's memory.
    let given_up = unsafe {
        let give_up = NoArg::<{ libc::TIOCNOTTY as Opcode }>::new();
        ioctl(&terminal, give_up)
    };
    // An error means that it is not this process's terminal.
    let _ = given_up;
}
