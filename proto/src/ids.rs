//! Ids, as distinct types so that one cannot be used in place of another.
//!
//! All have 64 bits. Session and lease ids are random, and the ids of clients and workers
//! are hashes of random bytes, so no two processes need to agree on a counter. Ids print
//! as 16 hex digits, the form used in logs and errors.

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:016x}", self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({:016x})", stringify!($name), self.0)
            }
        }
    };
}

id!(
    /// A client process; the same after a reconnect.
    ClientId
);
id!(
    /// A worker process, from its start to its end.
    WorkerId
);
id!(
    /// A lease, unique in the pool.
    LeaseId
);
id!(
    /// A session: one op stream bound to one leased device.
    SessionId
);
id!(
    /// A client's lease request, unique within the client.
    RequestId
);
id!(
    /// A snapshot store, whichever workers have it open. The first worker that opens it makes the id.
    StoreId
);

/// What a lease has on one of its workers: the position of the worker among those of the lease, in the
/// order of its ranks. It stays the same when the lease goes on at other workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PartId {
    /// The lease.
    pub lease: LeaseId,
    /// The position, from 0.
    pub index: u32,
}

impl PartId {
    /// Returns the id that is before those of all parts of a lease, and the one after them.
    pub fn range_of(lease: LeaseId) -> std::ops::RangeInclusive<Self> {
        let part = |index| Self { lease, index };
        part(0)..=part(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_print_as_sixteen_hex_digits() {
        assert_eq!(LeaseId(0xab).to_string(), "00000000000000ab");
        assert_eq!(format!("{:?}", LeaseId(0xab)), "LeaseId(00000000000000ab)");
    }
}
