//! What a worker reports of the time for which it sends snapshots to their keeper.

use std::time::Instant;

use tensord_proto::v1::{Durability, LeaseRequest};
use tensord_testkit::{
    cluster::Cluster,
    raw::{self, ANSWER_DEADLINE, ClientStream, Target},
};

use super::{large, open};

#[test]
fn marks_have_the_time_of_sending_where_all_reduces_use_the_network() {
    let mut cluster = Cluster::start(&[]);
    cluster.add_worker("flex");
    cluster.add_worker("flex");
    cluster.wait_for_workers(2);
    raw::block(async {
        let mut attached = ClientStream::to(cluster.client_url()).await.unwrap();
        let durable = LeaseRequest {
            devices: 2,
            durability: Durability::Auto.into(),
            ..LeaseRequest::default()
        };
        let granted = attached.request(durable).await.unwrap();
        let target = Target::all(&granted).remove(0);
        let (_, mut session) = open(&target).await;
        large(&mut session);
        // The first marks count as kept without the keeper, until the worker is connected to it.
        let until = Instant::now() + ANSWER_DEADLINE;
        for mark in 1.. {
            session.mark(mark, mark - 1);
            let marked = session.marked().await.unwrap();
            assert_eq!((marked.mark, marked.error.as_str()), (mark, ""));
            if marked.sending_us > 0 {
                break;
            }
            assert!(
                Instant::now() < until,
                "no time of sending after {mark} marks"
            );
        }
    });
}
