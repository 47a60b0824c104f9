//! A network namespace for each host, all on one bridge.
//!
//! ```text
//! here:  bridge ── link 0 ═══ eth0 :host 0
//!             └─── link 1 ═══ eth0 :host 1
//! ```
//!
//! Both ends of a link have the same queue: a token bucket for the rate, within
//! netem for a delay. So what a host sends is shaped at its end, and what it is
//! sent at the bridge's. A namespace lives as long as a process in it, here one
//! that does nothing else; the links go with it.

use std::{
    net::{IpAddr, Ipv4Addr},
    path::Path,
    process::Command,
    sync::atomic::{AtomicU8, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;
use tensord_tests::cluster::Process;

use super::Shape;
use crate::process::{announce, announced};

/// What a link lets through at once: more than the 64 KiB that the system hands
/// to it as one, and little beside what is measured.
const BURST_BYTES: u64 = 128 << 10;

/// How long a full queue takes to drain, as in a switch with large buffers.
const QUEUE_MS: u64 = 50;

/// Packets that a delay holds at most; a link of 1 Gbit/s has some 2,000 on the
/// way in 20 ms.
const DELAYED_PACKETS: &str = "100000";

/// How often a process that keeps a namespace looks whether it is still wanted.
const HOLD_CHECK: Duration = Duration::from_secs(1);

/// The namespaces, and the bridge between them.
pub(crate) struct Namespaces {
    /// Sets this network apart from others of this process.
    number: u8,
    holders: Vec<Process>,
}

/// Makes a namespace that this process has just entered fit for use: its loopback
/// is down at first.
///
/// # Errors
///
/// When it may not.
pub(crate) fn move_in() -> Result<()> {
    run("ip link set lo up")
}

/// Keeps a namespace until this process is ended, or its parent has.
///
/// # Errors
///
/// When the parent cannot be told.
pub(crate) fn hold() -> Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::process::parent_id;
        let parent = parent_id();
        announce(&())?;
        while parent_id() == parent {
            thread::sleep(HOLD_CHECK);
        }
        Ok(())
    }
    #[cfg(not(unix))]
    anyhow::bail!("there are no namespaces on this system")
}

impl Namespaces {
    /// Makes the bridge and `hosts` hosts.
    ///
    /// # Errors
    ///
    /// When a command fails, with its words.
    pub(super) fn start(hosts: usize, shape: Shape, dir: &TempDir) -> Result<Self> {
        static NUMBER: AtomicU8 = AtomicU8::new(1);
        let mut network = Self {
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            holders: Vec::new(),
        };
        let (bridge, middle) = (network.bridge(), network.middle());
        run(&format!("ip link add {bridge} type bridge forward_delay 0"))?;
        run(&format!("ip address add {middle}/24 dev {bridge}"))?;
        run(&format!("ip link set {bridge} up"))?;
        for host in 0..hosts {
            network.add_host(host, shape, dir)?;
        }
        Ok(network)
    }

    fn add_host(&mut self, host: usize, shape: Shape, dir: &TempDir) -> Result<()> {
        let mut command = Command::new("unshare");
        command.arg("--net").arg(std::env::current_exe()?);
        command.arg("hold-namespace");
        let log = dir.path().join(format!("hold-{}-{host}.log", self.number));
        let holder = Process::spawn(command, log);
        announced::<()>(&holder)?;
        let id = holder.id();
        self.holders.push(holder);
        let (bridge, address) = (self.bridge(), self.address(host));
        let link = format!("link{}x{host}", self.number);
        run(&format!(
            "ip link add {link} type veth peer name eth0 netns {id}"
        ))?;
        run(&format!("ip link set {link} master {bridge} up"))?;
        let there = enter(id);
        run(&format!("{there} ip link set lo up"))?;
        run(&format!("{there} ip address add {address}/24 dev eth0"))?;
        run(&format!("{there} ip link set eth0 up"))?;
        for queue in queues(shape) {
            run(&format!("{there} tc qdisc add dev eth0 {queue}"))?;
            run(&format!("tc qdisc add dev {link} {queue}"))?;
        }
        Ok(())
    }

    fn bridge(&self) -> String {
        format!("bridge{}", self.number)
    }

    /// The address of this process's end.
    pub(super) fn middle(&self) -> IpAddr {
        Ipv4Addr::new(10, 77, self.number, 254).into()
    }

    /// The address of a host.
    pub(super) fn address(&self, host: usize) -> IpAddr {
        let last = u8::try_from(host + 1).expect("there are few hosts");
        Ipv4Addr::new(10, 77, self.number, last).into()
    }

    /// Runs `program` on `host`.
    pub(super) fn command(&self, host: usize, program: &Path) -> Command {
        let enter = enter(self.holders[host].id());
        let mut words = enter.split(' ');
        let mut command = Command::new(words.next().expect("a program comes first"));
        command.args(words).arg(program);
        command
    }

    /// Bytes that each host's interface has sent.
    pub(super) fn sent(&self) -> Result<Vec<u64>> {
        let sent = self.holders.iter().map(|holder| {
            let path = format!("/proc/{}/net/dev", holder.id());
            let counters = std::fs::read_to_string(&path);
            let counters = counters.with_context(|| format!("cannot read {path}"))?;
            sent_bytes(&counters, "eth0").with_context(|| format!("no eth0 in {path}"))
        });
        sent.collect()
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        self.holders.clear();
        // It goes with the namespace that this process is in, at the latest.
        let _ = run(&format!("ip link delete {}", self.bridge()));
    }
}

/// What a command begins with that runs where process `id` is.
fn enter(id: u32) -> String {
    format!("nsenter --net=/proc/{id}/ns/net --")
}

/// The queues of either end of a link, as `tc` takes them.
fn queues(shape: Shape) -> Vec<String> {
    let Shape { rate_mbit, latency } = shape;
    let bucket = format!("tbf rate {rate_mbit}mbit burst {BURST_BYTES}b latency {QUEUE_MS}ms");
    if latency.is_zero() {
        return vec![format!("root {bucket}")];
    }
    // A packet passes two ends on its way.
    let delay = latency.as_micros() / 2;
    vec![
        format!("root handle 1: netem delay {delay}us limit {DELAYED_PACKETS}"),
        format!("parent 1:1 handle 2: {bucket}"),
    ]
}

/// Runs a command line of plain words.
fn run(line: &str) -> Result<()> {
    let mut words = line.split(' ');
    let program = words.next().context("an empty command line")?;
    let output = Command::new(program).args(words).output();
    let output = output.with_context(|| format!("cannot run {program}"))?;
    let words = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`{line}` failed: {}", words.trim());
    Ok(())
}

/// The bytes that `interface` has sent, in the text of `/proc/…/net/dev`.
fn sent_bytes(counters: &str, interface: &str) -> Option<u64> {
    /// Columns for what was received come first.
    const SENT: usize = 8;
    let counters = counters.lines().find_map(|line| {
        let (name, counters) = line.split_once(':')?;
        (name.trim() == interface).then_some(counters)
    })?;
    counters.split_whitespace().nth(SENT)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_sent_are_the_ninth_column() {
        let text = "Inter-|   Receive  |  Transmit\n face |bytes\n    lo: 1 1 0 0 0 0 0 0 2 1 0\n  \
                    eth0:  133161    2012    0    0    0     0          0         0 131206480  7 0\n";
        assert_eq!(sent_bytes(text, "eth0"), Some(131_206_480));
        assert_eq!(sent_bytes(text, "lo"), Some(2));
        assert_eq!(sent_bytes(text, "eth1"), None);
    }

    #[test]
    fn a_delay_is_shared_by_both_ends() {
        let queues = |latency_ms| {
            queues(Shape {
                rate_mbit: 250,
                latency: Duration::from_millis(latency_ms),
            })
        };
        assert_eq!(
            queues(0),
            ["root tbf rate 250mbit burst 131072b latency 50ms"]
        );
        assert!(queues(20)[0].contains("delay 10000us"), "{:?}", queues(20));
    }

    #[test]
    fn a_command_that_fails_tells_its_words() {
        let error = run("ls /nowhere-at-all").unwrap_err().to_string();
        assert!(error.contains("nowhere-at-all"), "{error}");
    }
}
