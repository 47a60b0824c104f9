//! The laws of every place that keeps the snapshots of a lease, tested by way of the code that copies snapshots there: the
//! memory of the lease's own worker, that of another worker, over a connection, and a snapshot store in a directory.
//!
//! 1. A place has two snapshots of each session: the last one that counts as kept, and that of the mark which the client
//!    had committed then; byte by byte, with the base that they share.
//! 2. A process that was restored at an earlier mark replaces the later snapshots of the process before. A snapshot of an
//!    earlier process never replaces one of a later process.
//! 3. A session that has ended has no snapshots, and those of other sessions stay. A lease that has ended has none, and
//!    those of other leases stay.
//! 4. A place with a bound refuses what would exceed it, and keeps what it has. The lease goes on.
//! 5. A keeper that lacks snapshots gets them when the lease's worker connects again.
//!
//! A bucket has the code of a directory but for its `ObjectStore`; `training::object_storage` in `tests` tests a bucket.

pub(super) mod places;

use self::places::{
    BOUNDS, Base, Copied, OTHER_LEASE, OtherWorker, Place, Taken, directory, other_worker,
    own_memory, taken,
};
use super::{
    sealed_memory::sealed_memory,
    snapshots::{KeptSnapshot, Refused},
};

async fn last_and_committed_snapshots_stay<P: Place>(mut copied: Copied<P>) {
    let all = [
        taken(1, 0, b"one"),
        taken(2, 1, b"two"),
        taken(3, 2, b"three"),
    ];
    copied.take(all[0]).await.unwrap();
    copied.expect(&all[..1]).await;
    copied.take(all[1]).await.unwrap();
    copied.expect(&all[..2]).await;
    copied.take(all[2]).await.unwrap();
    copied.expect(&all[1..]).await;
    // The client has committed nothing later.
    let fourth = taken(4, 2, &[7; 3 << 16]);
    copied.take(fourth).await.unwrap();
    copied.expect(&[all[1], fourth]).await;
}

async fn snapshots_share_their_base<P: Place>(mut copied: Copied<P>) {
    let with_base = |mark, committed, bytes, (id, base_bytes, is_new)| Taken {
        base: Some(Base {
            id,
            bytes: base_bytes,
            is_new,
        }),
        ..taken(mark, committed, bytes)
    };
    let (first, second): (&[u8], &[u8]) = (b"base", b"another base");
    let all = [
        with_base(1, 0, b"one", (9, first, true)),
        with_base(2, 1, b"two", (9, first, false)),
        with_base(3, 2, b"three", (10, second, true)),
        with_base(4, 3, b"four", (10, second, false)),
    ];
    for (at, snapshot) in all.iter().enumerate() {
        copied.take(*snapshot).await.unwrap();
        copied.expect(&all[at.saturating_sub(1)..=at]).await;
    }
}

async fn later_process_replaces_snapshots<P: Place>(mut copied: Copied<P>) {
    let [one, two] = [taken(1, 0, b"one"), taken(2, 1, b"two")];
    for snapshot in [one, two] {
        copied.take(snapshot).await.unwrap();
    }
    // The process was restored at mark 1.
    let again = Taken {
        epoch: 1,
        ..taken(2, 1, b"two again")
    };
    copied.take(again).await.unwrap();
    copied.expect(&[one, again]).await;
    let late = taken(3, 1, b"late");
    assert!(matches!(copied.take(late).await, Err(Refused::NotKept(_))));
    copied.expect(&[one, again]).await;
}

async fn ended_sessions_and_leases_have_none<P: Place>(mut copied: Copied<P>) {
    let of_session = |session, bytes| Taken {
        session,
        ..taken(1, 0, bytes)
    };
    let all = [of_session(1, b"one"), of_session(2, b"two")];
    for snapshot in all {
        copied.take(snapshot).await.unwrap();
    }
    copied.expect(&all).await;
    copied.end_session(1);
    copied.expect(&all[1..]).await;
    let other = KeptSnapshot::new(0, all[0].info(), sealed_memory(all[0].bytes), None);
    copied.place.keep_other_lease(other).await;
    copied.place.end_lease().await;
    copied.expect(&[]).await;
    assert_eq!(copied.place.load(OTHER_LEASE).await.len(), 1);
}

async fn bound_is_kept<P: Place>(mut copied: Copied<P>) {
    let max_bytes = copied.place.max_bytes().expect("the place has a bound");
    let first = taken(1, 0, b"one");
    copied.take(first).await.unwrap();
    copied.expect(&[first]).await;
    let large = vec![7; usize::try_from(max_bytes).unwrap()];
    // Own memory refuses the snapshot. If only the keeper does, the mark counts as kept all the same.
    let taken_anyway = copied.take(taken(2, 1, &large)).await;
    assert_eq!(taken_anyway.is_ok(), max_bytes < BOUNDS.max_bytes);
    copied.expect(&[first]).await;
    let third = taken(3, 1, b"three");
    copied.take(third).await.unwrap();
    copied.expect(&[first, third]).await;
}

async fn keeper_gets_what_it_lacks(mut copied: Copied<OtherWorker>) {
    let [one, two] = [taken(1, 0, b"one"), taken(2, 1, b"two")];
    copied.take(one).await.unwrap();
    copied.expect(&[one]).await;
    copied.take(two).await.unwrap();
    copied.expect(&[one, two]).await;
    copied.place.begin_anew();
    copied.expect(&[one, two]).await;
    let third = taken(3, 2, b"three");
    copied.take(third).await.unwrap();
    copied.expect(&[two, third]).await;
}

/// Generates a test for each place and each of the laws that it obeys.
macro_rules! test_places {
    ($($place:ident: $($law:ident)*;)*) => {
        $(mod $place {
            $(#[tokio::test]
            async fn $law() {
                super::$law(super::$place().await).await;
            })*
        })*
    };
}

test_places! {
    own_memory:
        last_and_committed_snapshots_stay
        snapshots_share_their_base
        later_process_replaces_snapshots
        ended_sessions_and_leases_have_none
        bound_is_kept;
    other_worker:
        last_and_committed_snapshots_stay
        snapshots_share_their_base
        later_process_replaces_snapshots
        ended_sessions_and_leases_have_none
        bound_is_kept
        keeper_gets_what_it_lacks;
    directory:
        last_and_committed_snapshots_stay
        snapshots_share_their_base
        later_process_replaces_snapshots
        ended_sessions_and_leases_have_none;
}
