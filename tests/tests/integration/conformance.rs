//! Every op of the suite gives the same result on tensord as on local Flex.

use burn::tensor::Device;
use tensord_client::{LeaseRequest, testing::Options};
use tensord_testkit::cluster::Cluster;
use tensord_tests::conformance;

fn check(option: &str) {
    let cluster = Cluster::start(&["flex"]);
    let pool = cluster.pool_with(option, Options::default());
    let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
    let report = conformance::run_all(&lease.devices()[0], &Device::flex());
    println!("{report}");
    assert!(report.failures.is_empty(), "{report}");
}

#[test]
fn every_op_agrees_with_flex_over_tcp() {
    check("transport=tcp");
}

#[test]
fn every_op_agrees_with_flex_over_quic() {
    check("transport=quic");
}

#[test]
fn every_op_agrees_with_flex_over_grpc() {
    check("transport=grpc");
}
