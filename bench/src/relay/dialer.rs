//! Finds the process at the other end of a connection on this host, from `/proc`.
//!
//! The relay has to know whose link a connection takes, but workers dial from addresses and
//! ports that the system picks.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
};

use tensord_testkit::resource_usage::children;

const TABLES: [&str; 2] = ["/proc/self/net/tcp", "/proc/self/net/tcp6"];

/// Returns whether this system has the tables.
pub(super) fn is_supported() -> bool {
    Path::new(TABLES[0]).exists()
}

/// Returns which of `processes`, or of those that they have started, has a connection from
/// `address`, if any. Returns the one of `processes`.
pub(super) fn owner(address: SocketAddr, processes: &[u32]) -> Option<u32> {
    let tables = TABLES
        .iter()
        .filter_map(|path| fs::read_to_string(path).ok());
    let inode = tables
        .into_iter()
        .find_map(|table| inode(&table, address))?;
    let socket = format!("socket:[{inode}]");
    let has = |process: &u32| {
        let files = fs::read_dir(format!("/proc/{process}/fd")).ok()?;
        let mut files = files
            .flatten()
            .filter_map(|file| fs::read_link(file.path()).ok());
        files
            .any(|file| file.as_os_str() == socket.as_str())
            .then_some(*process)
    };
    let has_one = |process: &u32| {
        let of_children = children(*process);
        let mut all = std::iter::once(process).chain(&of_children);
        all.any(|process| has(process).is_some())
    };
    processes.iter().copied().find(has_one)
}

/// Returns the inode of the socket with the local `address`, from the text of a table of
/// sockets.
fn inode(table: &str, address: SocketAddr) -> Option<u64> {
    const LOCAL: usize = 1;
    const INODE: usize = 9;
    table.lines().skip(1).find_map(|line| {
        let columns: Vec<_> = line.split_whitespace().collect();
        let local = parse(columns.get(LOCAL)?)?;
        let inode = columns.get(INODE)?.parse().ok()?;
        (local == address && inode != 0).then_some(inode)
    })
}

/// Parses an address in the kernel's format: words in the machine's byte order.
fn parse(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let words = ip.as_bytes().chunks(8).map(|word| {
        let word = std::str::from_utf8(word).ok()?;
        Some(u32::from_str_radix(word, 16).ok()?.to_ne_bytes())
    });
    let words: Vec<[u8; 4]> = words.collect::<Option<_>>()?;
    let ip = match words.concat().as_slice() {
        [a, b, c, d] => IpAddr::from(Ipv4Addr::new(*a, *b, *c, *d)),
        bytes => IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?)),
    };
    Some(SocketAddr::new(ip.to_canonical(), port))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_connection_is_found_by_its_address() {
        if !is_supported() {
            return;
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _dialed = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (_, address) = listener.accept().unwrap();
        let own = std::process::id();
        assert_eq!(owner(address, &[own]), Some(own));
        assert_eq!(owner(address, &[]), None);
        assert_eq!(owner("127.0.0.1:1".parse().unwrap(), &[own]), None);
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn addresses_are_in_the_machines_byte_order() {
        let check = |text, expected: &str| assert_eq!(parse(text), expected.parse().ok());
        check("0100007F:1F90", "127.0.0.1:8080");
        check("00000000000000000000000001000000:0050", "[::1]:80");
        check("0000000000000000FFFF00000100007F:0050", "127.0.0.1:80");
        assert_eq!(parse("nonsense"), None);
        assert_eq!(parse("0100007F00:1F90"), None);
    }
}
