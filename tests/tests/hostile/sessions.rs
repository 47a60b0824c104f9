//! Connections that claim a session of another device.

use tensord_proto::v1::{ErrorCode, Open};
use tensord_testkit::{
    cluster::Cluster,
    raw::{self, ClientStream, RawSession, SessionError},
};

fn assert_rejected(broken: &SessionError) {
    let error = broken
        .error()
        .unwrap_or_else(|| panic!("no word: {broken}"));
    assert_eq!(error.code(), ErrorCode::Session, "{error}");
    assert!(error.message.contains("is on device"), "{error}");
}

#[test]
fn session_can_only_be_resumed_on_its_device() {
    let cluster = Cluster::start(&["flex*2"]);
    raw::block(async {
        let mut attached = ClientStream::to(cluster.client_url()).await.unwrap();
        let targets = attached.lease(2).await.unwrap();
        let [own, other] = &targets[..] else {
            panic!("two devices");
        };
        let open = own.open();
        let mut session = RawSession::open_with(own, open.clone()).await.unwrap();
        let tensor = session.upload(&[1.0, 2.0]);
        session.sync().await.unwrap();
        let of_other = Open {
            device_index: other.device_index,
            ..open.clone()
        };
        // As a new session, as a resumed session, and as the session's second track.
        let resuming = Open {
            resume: true,
            received: 1,
            ..of_other.clone()
        };
        let bulk = Open {
            bulk: true,
            resume: true,
            ..of_other.clone()
        };
        for opening in [of_other, resuming, bulk] {
            let opened = RawSession::open_with(other, opening).await;
            assert_rejected(&opened.expect_err("it is turned away"));
        }
        session.resume(own, open).await.unwrap();
        let value = session.fetch(&tensor).await.unwrap().unwrap();
        assert_eq!(raw::floats(&value), [1.0, 2.0]);
    });
}
