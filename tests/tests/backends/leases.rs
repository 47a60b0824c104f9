//! One pool of several kinds of devices.

use tensord_client::LeaseRequest;
use tensord_testkit::host;

#[test]
fn a_lease_by_kind_goes_to_a_worker_that_has_it() {
    for kind in host::kinds() {
        let cluster = host::cluster(&["flex", kind]);
        let pool = cluster.pool();
        for _ in 0..2 {
            for (wanted, worker) in [(kind, "worker-1"), ("flex", "worker-0")] {
                let lease = pool.lease(LeaseRequest::devices(1).kind(wanted)).unwrap();
                let got = lease.descriptions().remove(0);
                assert_eq!((got.kind.as_str(), got.worker.as_str()), (wanted, worker));
            }
        }
    }
}
