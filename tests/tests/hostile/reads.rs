//! Reads of tensors that do not exist.

use tensord_proto::v1::FaultKind;
use tensord_testkit::{
    cluster::Cluster,
    raw::{self, ClientStream, RawSession},
};

#[test]
fn a_read_of_an_unknown_tensor_is_a_fault_and_the_session_goes_on() {
    let cluster = Cluster::start(&["flex"]);
    raw::block(async {
        let mut attached = ClientStream::to(cluster.client_url()).await.unwrap();
        let target = attached.lease(1).await.unwrap().remove(0);
        let mut session = RawSession::open(&target).await.unwrap();
        let unknown = raw::tensor(7, &[2]);
        let fault = session.fetch(&unknown).await.unwrap().unwrap_err();
        assert_eq!(fault.kind(), FaultKind::UnknownTensor, "{fault}");
        let known = session.upload(&[1.0, 2.0]);
        let value = session.fetch(&known).await.unwrap().unwrap();
        assert_eq!(raw::floats(&value), [1.0, 2.0]);
        // Even the session that owns a value cannot read it under another shape.
        let wrong = raw::tensor(known.id.value(), &[3]);
        let fault = session.fetch(&wrong).await.unwrap().unwrap_err();
        assert_eq!(fault.kind(), FaultKind::Mismatch, "{fault}");
        assert_eq!(session.sync().await.unwrap(), None);
    });
}
