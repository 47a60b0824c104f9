use bytes::Bytes;
use rustix::fs::SealFlags;
use tensord_proto::v1::SnapshotPart;

use super::*;
use crate::supervisor::keeping_laws::places::{PART, allow, worker};

fn begin(mark: u64, size_bytes: u64) -> Body {
    Body::SnapshotBegin(SnapshotBegin {
        id: Some(SnapshotId {
            session_id: 1,
            mark,
            epoch: 0,
            base_id: 0,
        }),
        size_bytes,
        ..SnapshotBegin::default()
    })
}

fn part(data: &'static [u8]) -> Body {
    let data = Bytes::from_static(data);
    Body::SnapshotPart(SnapshotPart { data })
}

#[tokio::test]
async fn worker_without_memory_for_a_snapshot_refuses_it_and_keeps_the_next_one() {
    let ((keeper, _), (source, _)) = (worker(2, None), worker(1, None));
    allow(&keeper, &source, 1);
    let certificate = Some(source.settings.identity.fingerprint());
    let connection = SourceConnection::new(&keeper, PART, certificate, 1).unwrap();
    let mut receiving = None;
    let received = |receiving: &mut _, body| connection.on_frame(body, receiving).unwrap();

    assert_eq!(received(&mut receiving, begin(1, 8)), None);
    // As if there were no memory, the next write fails.
    let begun = receiving.as_ref().and_then(|it| it.files.as_ref()).unwrap();
    fcntl_add_seals(&begun.snapshot, SealFlags::WRITE).unwrap();
    let refused = received(&mut receiving, part(b"abc")).unwrap();
    assert!(
        refused
            .error
            .starts_with("no memory for 3 bytes of the snapshot: ")
    );
    assert_eq!(refused.id.unwrap().mark, 1);
    assert_eq!(received(&mut receiving, part(b"defgh")), None);

    assert_eq!(received(&mut receiving, begin(2, 3)), None);
    let kept = received(&mut receiving, part(b"abc")).unwrap();
    assert_eq!((kept.error.as_str(), kept.id.unwrap().mark), ("", 2));
}
