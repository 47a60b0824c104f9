//! Workers that break rules: what their programs tolerate, and how they detect it.

use std::sync::{Arc, Mutex};

use burn::tensor::{Device, Tensor};
use burn_backend::DType;
use bytes::Bytes;
use prost::Message;
use tensord_client::{Lease, LeaseError, LeaseRequest, Pool};
use tensord_proto::{
    v1::{
        Chunk, Closed, DeviceSettings, Error, ErrorCode, Fault, Frame, Held, Hello, Opened, Ops,
        Ping, Rejected, Synced, TensorValue, Value, Values, frame::Body, tensor_value, value,
    },
    version,
};
use tensord_testkit::raw::{self, RAW_WORKER, RawPool, ServedTrack};

/// Elements of a small read, whose value is inline in the reply frame.
const FEW: usize = 2;

/// Elements of a large read, whose value is a payload.
const MANY: usize = 100_000;

/// Returns text that must not appear unescaped in a log or an error.
fn text() -> String {
    "forged\nline\u{1b}[2J".repeat(50_000)
}

fn answer(request_id: u64, kind: (&[usize], DType), content: tensor_value::Content) -> Value {
    let tensor = TensorValue {
        r#type: Some(raw::type_of(kind.0, kind.1)),
        content: Some(content),
    };
    Value {
        request_id,
        result: Some(value::Result::Tensor(tensor)),
    }
}

fn values(values: Vec<Value>) -> Body {
    Body::Values(Values { values })
}

/// Returns an honest worker's reply to a read of `FEW` ones.
fn honest(request: u64) -> Value {
    inline(request, &[FEW], DType::F32, &raw::bytes_of(&[1.0; FEW]))
}

fn inline(request: u64, shape: &[usize], dtype: DType, bytes: &[u8]) -> Value {
    let bytes = Bytes::copy_from_slice(bytes);
    answer(request, (shape, dtype), tensor_value::Content::Bytes(bytes))
}

fn payload(request: u64, number: u64) -> Value {
    let content = tensor_value::Content::Payload(number);
    answer(request, (&[MANY], DType::F32), content)
}

fn chunk(size_bytes: u64, bytes: usize) -> Body {
    let bytes = vec![0; bytes].into();
    Body::Chunk(Chunk { size_bytes, bytes })
}

/// Starts a pool with a worker that replies to each opening of a track with `greeting`, and
/// to each read with `answers`. On the track for bulk bytes it sends `bulk`.
fn worker(
    greeting: impl Fn() -> Body + Send + Sync + 'static,
    answers: impl Fn(&mut ServedTrack, u64) + Send + Sync + 'static,
    bulk: impl Fn(&mut ServedTrack) + Send + Sync + 'static,
) -> RawPool {
    let parts = Arc::new((greeting, answers, bulk));
    raw::block(RawPool::start(move |mut track: ServedTrack| {
        let parts = parts.clone();
        async move {
            let (greeting, answers, bulk) = &*parts;
            track.greet(greeting()).await;
            if track.open.bulk {
                bulk(&mut track);
            }
            while let Some(body) = track.next().await {
                if let Body::Reads(reads) = body {
                    answers(&mut track, reads.request_id);
                }
            }
        }
    }))
}

fn opened() -> Body {
    Body::Opened(ServedTrack::opened())
}

fn lease(worker: &RawPool) -> (Pool, Result<Lease, LeaseError>) {
    let pool = Pool::connect(worker.url()).expect("the pool is there");
    let lease = pool.lease(LeaseRequest::devices(1));
    (pool, lease)
}

fn read(device: &Device, elements: usize) -> Result<Vec<f32>, String> {
    let data = Tensor::<1>::ones([elements], device).try_into_data();
    let data = data.map_err(|e| e.to_string())?;
    Ok(data.try_to_vec().expect("the value has the requested type"))
}

/// The text that Burn puts before the error of a read.
const HEADING: &str = "An error happened during execution\nCaused by:\n";

/// Checks that an error with a peer's text is short, in one line and without escape
/// sequences.
fn assert_readable(error: &str) {
    assert!(error.len() < 10_000, "{} bytes", error.len());
    let error = error.strip_prefix(HEADING).unwrap_or(error);
    assert!(!error.contains(['\n', '\u{1b}']), "{error:?}");
}

/// Reads until a read fails, and checks that the error names the worker and `rule`.
fn assert_rule_broken(rule: &str, elements: usize, worker: &RawPool) {
    let (_pool, lease) = lease(worker);
    let lease = lease.unwrap_or_else(|e| panic!("{rule}: {e}"));
    let device = &lease.devices()[0];
    let error = (0..20).find_map(|_| read(device, elements).err());
    let error = error.unwrap_or_else(|| panic!("{rule}: nothing failed"));
    assert_readable(&error);
    let named = format!("worker {RAW_WORKER} at 127.0.0.1:");
    assert!(error.contains(&named), "{rule}: {error}");
    assert!(error.contains("broke the protocol"), "{rule}: {error}");
    assert!(error.contains(rule), "{rule}: {error}");
    let ended = lease.ended().expect("the session is over");
    assert!(ended.contains(rule), "{rule}: {ended}");
}

/// A rule, and the first frame of a worker that breaks it.
type InvalidReply = (&'static str, Box<dyn Fn() -> Body + Send + Sync>);

fn invalid_opened_replies() -> Vec<InvalidReply> {
    let opened = |change: fn(&mut Opened)| {
        move || {
            let mut opened = ServedTrack::opened();
            change(&mut opened);
            Body::Opened(opened)
        }
    };
    let settings = |encoded: Vec<u8>| {
        let encoded = encoded.into();
        Some(DeviceSettings { encoded })
    };
    vec![
        (
            "the worker chose protocol 9",
            Box::new(opened(|o| o.protocol = 9)),
        ),
        (
            "frame 5 was acknowledged",
            Box::new(opened(|o| o.received = 5)),
        ),
        (
            "device profile",
            Box::new(move || {
                let settings = settings(vec![0xff; 100]);
                let opened = ServedTrack::opened();
                Body::Opened(Opened { settings, ..opened })
            }),
        ),
        (
            "the limit is 64",
            Box::new(move || {
                let honest = ServedTrack::opened().settings.unwrap_or_default();
                let mut profile = tensord_proto::codec::DeviceProfile::decode(&honest.encoded)
                    .expect("an honest profile");
                profile.dtypes = vec![(DType::F32, 1); 100_000];
                let settings = settings(profile.encode().to_vec());
                let opened = ServedTrack::opened();
                Body::Opened(Opened { settings, ..opened })
            }),
        ),
        (
            "no common protocol version",
            Box::new(opened(|o| {
                o.hello = Some(Hello {
                    protocol_min: 90,
                    protocol_max: 99,
                    ir_version: text(),
                    software: text(),
                });
            })),
        ),
        (
            "did not answer the request to open a session",
            Box::new(|| Body::Ping(Ping { sent: 0 })),
        ),
        (
            "forged\\nline",
            Box::new(|| {
                let error = Some(Error::new(ErrorCode::Lease, text()));
                Body::Rejected(Rejected { error })
            }),
        ),
    ]
}

#[test]
fn invalid_opened_reply_fails_the_lease() {
    for (rule, greeting) in invalid_opened_replies() {
        let worker = worker(greeting, |_, _| {}, |_| {});
        let (_pool, lease) = lease(&worker);
        let error = lease.err().unwrap_or_else(|| panic!("{rule}: no error"));
        let error = error.to_string();
        assert_readable(&error);
        assert!(
            error.contains(rule) && error.contains(RAW_WORKER),
            "{rule}: {error}"
        );
    }
}

#[test]
fn unsolicited_reply_ends_the_session() {
    type Case = (&'static str, fn(u64) -> Vec<Body>);
    let cases: Vec<Case> = vec![
        ("the worker answered read 77", |_| {
            vec![values(vec![honest(77)])]
        }),
        ("which is not pending", |r| {
            vec![values(vec![honest(r), honest(r)])]
        }),
        ("the worker answered sync 9", |_| {
            let (request_id, fault) = (9, None);
            vec![Body::Synced(Synced { request_id, fault })]
        }),
        ("[3] of f32", |r| {
            let bytes = raw::bytes_of(&[1.0; 3]);
            vec![values(vec![inline(r, &[3], DType::F32, &bytes)])]
        }),
        ("of i64", |r| {
            vec![values(vec![inline(r, &[FEW], DType::I64, &[0; 16])])]
        }),
        ("the answer to read", |r| {
            vec![values(vec![inline(r, &[FEW], DType::F32, &[0; 4])])]
        }),
        ("is empty", |request_id| {
            let result = None;
            vec![values(vec![Value { request_id, result }])]
        }),
        ("tensor type", |request_id| {
            let tensor = TensorValue::default();
            let result = Some(value::Result::Tensor(tensor));
            vec![values(vec![Value { request_id, result }])]
        }),
        ("not a whole number of hashes", |_| {
            let hashes = vec![1; 17].into();
            vec![Body::Held(Held { hashes })]
        }),
        ("the limit is 8192", |_| {
            let hashes = vec![1; 16 * 100_000].into();
            vec![Body::Held(Held { hashes })]
        }),
        ("a second list", |_| vec![Body::Held(Held::default()); 2]),
        ("workers do not send", |_| vec![Body::Ops(Ops::default())]),
        ("workers do not send", |_| vec![chunk(1, 1)]),
    ];
    for (rule, bodies) in cases {
        let answers = move |track: &mut ServedTrack, request: u64| {
            bodies(request)
                .into_iter()
                .for_each(|body| track.push(body));
        };
        assert_rule_broken(rule, FEW, &worker(opened, answers, |_| {}));
    }
}

#[test]
fn misnumbered_frames_end_the_session() {
    type Case = (&'static str, fn(u64) -> Vec<u8>);
    let cases: Vec<Case> = vec![
        ("has no number", |r| raw::frame(0, values(vec![honest(r)]))),
        ("was acknowledged", |_| {
            let (ack, body) = (1 << 40, Some(Body::Ping(Ping { sent: 0 })));
            let frame = Frame {
                ack,
                body,
                ..Frame::default()
            };
            frame.encode_to_vec()
        }),
        ("is malformed", |_| vec![0xff; 100]),
    ];
    for (rule, frame) in cases {
        let worker = raw::block(RawPool::start(move |mut track: ServedTrack| async move {
            track.greet(opened()).await;
            while let Some(body) = track.next().await {
                if let Body::Reads(reads) = body {
                    track.send_bytes(frame(reads.request_id)).await;
                }
            }
        }));
        assert_rule_broken(rule, FEW, &worker);
    }
}

#[test]
fn payloads_beyond_pending_reads_end_the_session() {
    let size = 4 * MANY as u64;
    type Case = (&'static str, fn(u64) -> Vec<Value>, Vec<Body>);
    let huge = format!("has {} bytes, but the pending reads need", 1u64 << 44);
    let cases: Vec<Case> = vec![
        (huge.leak(), |_| vec![], vec![chunk(1 << 44, 10)]),
        (
            "but the pending reads need",
            |_| vec![],
            vec![chunk(size, size as usize); 8],
        ),
        ("is for no pending read", |_| vec![], vec![chunk(1, 1); 3]),
        (
            "the first chunk of a payload has no size",
            |_| vec![],
            vec![chunk(0, 10)],
        ),
        (
            "beyond the end of its payload",
            |_| vec![],
            vec![chunk(10, 20)],
        ),
        (
            "before the end of the previous one",
            |_| vec![],
            vec![chunk(size, 10); 2],
        ),
        (
            "but only 0 payloads have arrived",
            |r| vec![payload(r, 1)],
            vec![],
        ),
        (
            "but only 0 payloads have arrived",
            |r| vec![payload(r, u64::MAX)],
            vec![],
        ),
        (
            "which is not pending",
            |r| vec![payload(r, 0), payload(r, 0)],
            vec![],
        ),
        (
            "the answer to read",
            |r| vec![payload(r, 0)],
            vec![chunk(16, 16)],
        ),
    ];
    for (rule, announced, bulk) in cases {
        let answers = move |track: &mut ServedTrack, request: u64| match announced(request) {
            none if none.is_empty() => {}
            some => track.push(values(some)),
        };
        let message =
            move |track: &mut ServedTrack| bulk.iter().for_each(|body| track.push(body.clone()));
        assert_rule_broken(rule, MANY, &worker(opened, answers, message));
    }
}

/// A worker's replies to reads.
enum Phase {
    Faults,
    Honest,
    Closes,
}

/// Values and texts that a worker may send in any size without an effect.
#[test]
fn huge_grants_and_texts_are_harmless() {
    let greeting = || {
        Body::Opened(Opened {
            credit_bytes: u64::MAX,
            kept_bytes: u64::MAX,
            hello: Some(Hello {
                software: text(),
                ..version::hello()
            }),
            ..ServedTrack::opened()
        })
    };
    let phase = Arc::new(Mutex::new(Phase::Faults));
    let message = phase.clone();
    let answers = move |track: &mut ServedTrack, request_id: u64| {
        let value = match *message.lock().unwrap() {
            Phase::Faults => Value {
                request_id,
                result: Some(value::Result::Fault(Fault {
                    op_name: text(),
                    worker: text(),
                    reason: text(),
                    ..Fault::default()
                })),
            },
            Phase::Honest => honest(request_id),
            Phase::Closes => {
                let error = Some(Error::new(ErrorCode::Internal, text()));
                return track.push(Body::Closed(Closed { error }));
            }
        };
        track.push(values(vec![value]));
    };
    let worker = worker(greeting, answers, |_| {});
    let (_pool, lease) = lease(&worker);
    let lease = lease.unwrap();
    let device = &lease.devices()[0];
    let fault = read(device, FEW).unwrap_err();
    assert_readable(&fault);
    assert!(fault.contains("forged\\nline"), "{fault}");
    *phase.lock().unwrap() = Phase::Honest;
    assert_eq!(read(device, FEW), Ok(vec![1.0; FEW]));
    *phase.lock().unwrap() = Phase::Closes;
    let closed = read(device, FEW).unwrap_err();
    assert_readable(&closed);
    assert!(closed.contains("the worker ended the session"), "{closed}");
}
