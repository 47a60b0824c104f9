//! A network namespace for each host, all on one bridge.
//!
//! ```text
//! here:  bridge ── link 0 ═══ eth0 :host 0
//!             └─── link 1 ═══ eth0 :host 1
//! ```
//!
//! Both ends of a link have the same queue: a token bucket for the rate, within netem for a
//! delay. So traffic from a host is shaped at the host's end, and traffic to it at the
//! bridge's end. A namespace lives as long as a process in it, here a process that does
//! nothing else. The links are removed with the namespace.

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
use tensord_testkit::cluster::Process;

use super::Shape;
use crate::process::{announce, read_announcement};

/// Burst size of a link in bytes: more than the 64 KiB that the kernel passes to it as one
/// packet, and little compared with the bytes measured.
const BURST_BYTES: u64 = 128 << 10;

/// Time that a full queue takes to drain, as in a switch with large buffers.
const QUEUE_MS: u64 = 50;

/// Maximum number of packets in the delay queue; a link of 1 Gbit/s has some 2,000 in
/// flight in 20 ms.
const DELAYED_PACKETS: &str = "100000";

/// How often a process that holds a namespace checks that its parent lives.
const HOLD_CHECK: Duration = Duration::from_secs(1);

/// The namespaces, and the bridge between them.
pub(crate) struct Namespaces {
    /// A number that is unique among the networks of this process.
    number: u8,
    holders: Vec<Process>,
}

/// Sets up the namespace that this process has just entered: its loopback is down at first.
///
/// # Errors
///
/// If the process lacks the permission.
pub(crate) fn set_up_namespace() -> Result<()> {
    run("ip link set lo up")
}

/// Holds a namespace until this process is killed or its parent has ended.
///
/// # Errors
///
/// If the announcement to the parent fails.
pub(crate) fn hold_namespace() -> Result<()> {
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
    anyhow::bail!("this system has no network namespaces")
}

impl Namespaces {
    /// Creates the bridge and `hosts` hosts.
    ///
    /// # Errors
    ///
    /// If a command fails. The error contains the command's message.
    pub(super) fn start(hosts: usize, shape: Shape, dir: &TempDir) -> Result<Self> {
        static NUMBER: AtomicU8 = AtomicU8::new(1);
        let mut network = Self {
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            holders: Vec::new(),
        };
        let (bridge, bridge_address) = (network.bridge(), network.bridge_address());
        run(&format!("ip link add {bridge} type bridge forward_delay 0"))?;
        run(&format!("ip address add {bridge_address}/24 dev {bridge}"))?;
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
        read_announcement::<()>(&holder)?;
        let id = holder.id();
        self.holders.push(holder);
        let (bridge, address) = (self.bridge(), self.address(host));
        let link = format!("link{}x{host}", self.number);
        run(&format!(
            "ip link add {link} type veth peer name eth0 netns {id}"
        ))?;
        run(&format!("ip link set {link} master {bridge} up"))?;
        let in_namespace = enter(id);
        run(&format!("{in_namespace} ip link set lo up"))?;
        run(&format!(
            "{in_namespace} ip address add {address}/24 dev eth0"
        ))?;
        run(&format!("{in_namespace} ip link set eth0 up"))?;
        for queue in queues(shape) {
            run(&format!("{in_namespace} tc qdisc add dev eth0 {queue}"))?;
            run(&format!("tc qdisc add dev {link} {queue}"))?;
        }
        Ok(())
    }

    fn bridge(&self) -> String {
        format!("bridge{}", self.number)
    }

    /// Returns the bridge's address in this process's namespace.
    pub(super) fn bridge_address(&self) -> IpAddr {
        Ipv4Addr::new(10, 77, self.number, 254).into()
    }

    /// Returns the address of a host.
    pub(super) fn address(&self, host: usize) -> IpAddr {
        let last = u8::try_from(host + 1).expect("there are few hosts");
        Ipv4Addr::new(10, 77, self.number, last).into()
    }

    /// Returns a command that runs `program` on `host`.
    pub(super) fn command(&self, host: usize, program: &Path) -> Command {
        let enter = enter(self.holders[host].id());
        let mut words = enter.split(' ');
        let mut command = Command::new(words.next().expect("a program comes first"));
        command.args(words).arg(program);
        command
    }

    /// Returns the bytes that each host's interface has sent.
    pub(super) fn sent(&self) -> Result<Vec<u64>> {
        let sent = self.holders.iter().map(|holder| {
            let path = format!("/proc/{}/net/dev", holder.id());
            let counters = std::fs::read_to_string(&path);
            let counters = counters.with_context(|| format!("cannot read {path}"))?;
            sent_bytes(&counters, "eth0").with_context(|| format!("{path} does not list eth0"))
        });
        sent.collect()
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        self.holders.clear();
        // At the latest, the bridge is removed with this process's namespace.
        let _ = run(&format!("ip link delete {}", self.bridge()));
    }
}

/// Returns the prefix of a command that runs in the network namespace of process `id`.
fn enter(id: u32) -> String {
    format!("nsenter --net=/proc/{id}/ns/net --")
}

/// Returns the queues of each end of a link, as arguments of `tc`.
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

/// Runs a command line whose arguments are separated by spaces.
fn run(line: &str) -> Result<()> {
    let mut words = line.split(' ');
    let program = words.next().context("the command line is empty")?;
    let output = Command::new(program).args(words).output();
    let output = output.with_context(|| format!("cannot run {program}"))?;
    let words = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`{line}` failed: {}", words.trim());
    Ok(())
}

/// Returns the bytes that `interface` has sent, from the text of `/proc/…/net/dev`.
fn sent_bytes(counters: &str, interface: &str) -> Option<u64> {
    /// Index of the column; those for received traffic come first.
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
    fn transmitted_bytes_are_read_from_column_nine() {
        let text = "Inter-|   Receive  |  Transmit\n face |bytes\n    lo: 1 1 0 0 0 0 0 0 2 1 0\n  \
                    eth0:  133161    2012    0    0    0     0          0         0 131206480  7 0\n";
        assert_eq!(sent_bytes(text, "eth0"), Some(131_206_480));
        assert_eq!(sent_bytes(text, "lo"), Some(2));
        assert_eq!(sent_bytes(text, "eth1"), None);
    }

    #[test]
    fn delay_is_split_between_both_ends() {
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
    fn error_of_a_failed_command_has_its_output() {
        let error = run("ls /nowhere-at-all").unwrap_err().to_string();
        assert!(error.contains("nowhere-at-all"), "{error}");
    }
}
