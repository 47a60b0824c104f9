//! A session between a client's end of the wire and a real device, without a
//! network: the test carries the frames and gives the turns.

use burn_backend::{DType, Shape, TensorData};
use burn_flex::{Flex, FlexDevice};
use burn_ir::{
    BinaryOpIr, FloatOperationIr, NumericOperationIr, OperationIr, RandomOpIr, TensorId, TensorIr,
    TensorStatus,
};
use tensord_proto::{
    codec::{OpEncoder, decode_type, encode_tensor, encode_type},
    v1::{self, frame::Body, value},
};

use super::*;
use crate::backend::BurnDevice;

const CAPACITY: u64 = 1 << 30;

/// A session, its client's end of the wire, and what came back.
struct Bench {
    session: Arc<Session>,
    queue: Arc<RunQueue>,
    memory: Arc<DeviceMemory>,
    client: Duplex,
    encoder: OpEncoder,
    connection: u64,
    answers: Vec<Body>,
    _runtime: tokio::runtime::Runtime,
}

impl Bench {
    fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        let (queue, memory) = (Arc::new(RunQueue::default()), DeviceMemory::new(CAPACITY));
        let site = Site {
            device: BurnDevice::<Flex>::shared(FlexDevice),
            memory: memory.clone(),
            queue: queue.clone(),
            worker: "bench".into(),
            ops: Arc::default(),
            runtime: runtime.handle().clone(),
        };
        let session = Session::new(SessionId(1), LeaseId(1), 0, 7, site);
        let mut bench = Self {
            session,
            queue,
            memory,
            client: Duplex::new(1 << 30, 0, u64::MAX),
            encoder: OpEncoder::default(),
            connection: 0,
            answers: Vec::new(),
            _runtime: runtime,
        };
        bench.connect();
        bench
    }

    /// A new connection, as after a loss.
    fn connect(&mut self) {
        let received = self.client.inbox().received();
        let (connection, received, credit) = self.session.attach(received).unwrap();
        self.client.rewind(received, credit).unwrap();
        self.connection = connection;
    }

    fn ops(&mut self, ops: &[OperationIr]) {
        let mut encoded = Vec::new();
        ops.iter()
            .for_each(|op| self.encoder.encode(op, &mut encoded));
        self.encoder.finish(&mut encoded);
        let count = ops.len() as u32;
        self.client.push(Body::Ops(v1::Ops {
            count,
            encoded: encoded.into(),
        }));
    }

    fn upload(&mut self, id: u64, values: &[f32]) {
        let shape = Shape::new([values.len()]);
        self.client.push(Body::Upload(v1::Upload {
            tensor_id: id,
            r#type: Some(encode_type(&shape, DType::F32)),
            size_bytes: 4 * values.len() as u64,
            bytes: values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect(),
        }));
        self.encoder.note_tensor(TensorId::new(id));
    }

    fn read(&mut self, request_id: u64, tensor: &TensorIr) {
        self.client.push(Body::Read(v1::Read {
            request_id,
            tensor: encode_tensor(tensor),
        }));
    }

    /// Carries frames from the client, at most `count`.
    fn carry(&mut self, count: usize) -> Result<(), IntakeError> {
        for _ in 0..count {
            let Some(parts) = self.client.next_to_send() else {
                break;
            };
            self.session
                .receive(self.connection, parts.concat().into())?;
        }
        Ok(())
    }

    /// Gives turns while there are any to give.
    fn run(&mut self) {
        while let Some(session) = self.queue.try_pop() {
            if session.run(&mut || true) == Turn::Again {
                self.queue.push(session);
            }
        }
    }

    /// Carries what the session says.
    fn hear(&mut self) {
        while let Outgoing::Frame(parts) = self.session.next_to_send(self.connection) {
            let heard = self.client.receive(parts.concat().into()).unwrap();
            self.answers.extend(heard.map(|(body, _)| body));
        }
    }

    fn all(&mut self) {
        self.carry(usize::MAX).unwrap();
        self.run();
        self.hear();
    }

    /// The values answered, by request.
    fn values(&self) -> Vec<(u64, Result<Vec<f32>, String>)> {
        let value = |body: &Body| match body {
            Body::Value(value) => Some((value.request_id, result(value))),
            _ => None,
        };
        self.answers.iter().filter_map(value).collect()
    }
}

fn result(value: &v1::Value) -> Result<Vec<f32>, String> {
    match value.result.as_ref().unwrap() {
        value::Result::Fault(fault) => Err(fault.to_string()),
        value::Result::Tensor(tensor) => {
            let (shape, dtype, _) = decode_type(tensor.r#type.as_ref()).unwrap();
            let data = TensorData::from_bytes_vec(tensor.bytes.to_vec(), shape, dtype);
            Ok(data.try_to_vec().unwrap())
        }
    }
}

fn tensor(id: u64, status: TensorStatus) -> TensorIr {
    TensorIr {
        id: TensorId::new(id),
        shape: Shape::new([2]),
        status,
        dtype: DType::F32,
    }
}

fn add(lhs: u64, rhs: u64, out: u64) -> OperationIr {
    let read = |id| tensor(id, TensorStatus::ReadOnly);
    let op = BinaryOpIr {
        lhs: read(lhs),
        rhs: read(rhs),
        out: tensor(out, TensorStatus::NotInit),
    };
    OperationIr::NumericFloat(DType::F32, NumericOperationIr::Add(op))
}

fn random(out: u64) -> OperationIr {
    let distribution = burn_backend::Distribution::Uniform(0.0, 1.0);
    let out = tensor(out, TensorStatus::NotInit);
    OperationIr::Float(
        DType::F32,
        FloatOperationIr::Random(RandomOpIr { out, distribution }),
    )
}

#[test]
fn each_op_runs_once_however_often_the_connection_is_lost() {
    let mut bench = Bench::new();
    bench.upload(1, &[1.0, 2.0]);
    for step in 0..20 {
        bench.ops(&[add(1 + step, 1, 2 + step)]);
    }
    bench.read(1, &tensor(21, TensorStatus::ReadOnly));
    for frames in [3, 1, 0, 7, 2] {
        bench.carry(frames).unwrap();
        // What the session had to say, acks included, is lost with the connection.
        bench.connect();
    }
    bench.all();
    assert_eq!(bench.values(), [(1, Ok(vec![21.0, 42.0]))]);
}

#[test]
fn a_lost_answer_is_given_again() {
    let mut bench = Bench::new();
    bench.upload(1, &[1.0, 2.0]);
    bench.read(9, &tensor(1, TensorStatus::ReadOnly));
    bench.carry(usize::MAX).unwrap();
    bench.run();
    while let Outgoing::Frame(_) = bench.session.next_to_send(bench.connection) {}
    bench.connect();
    bench.hear();
    assert_eq!(bench.values(), [(9, Ok(vec![1.0, 2.0]))]);
}

#[test]
fn a_replaced_connection_has_no_say() {
    let mut bench = Bench::new();
    bench.upload(1, &[1.0, 2.0]);
    let late = bench.client.next_to_send().unwrap().concat().into();
    let old = bench.connection;
    bench.connect();
    assert!(!bench.session.receive(old, late).unwrap());
    assert!(matches!(
        bench.session.next_to_send(old),
        Outgoing::Replaced
    ));
}

#[test]
fn bytes_that_are_no_ops_end_the_session_and_say_where() {
    let mut bench = Bench::new();
    bench.upload(1, &[1.0, 2.0]);
    bench.all();
    assert_eq!(bench.memory.live_bytes(), 8);
    let encoded = bytes::Bytes::from_static(&[0xff; 7]);
    bench.client.push(Body::Ops(v1::Ops { count: 1, encoded }));
    bench.all();
    let Some(Body::Closed(closed)) = bench.answers.last() else {
        panic!("no farewell: {:?}", bench.answers);
    };
    let error = closed.error.as_ref().unwrap();
    assert_eq!(error.code(), ErrorCode::Protocol);
    assert!(error.message.contains("malformed ops at byte 7"), "{error}");
    assert!(bench.session.has_ended());
    assert_eq!(bench.memory.live_bytes(), 0, "its memory is back");
}

#[test]
fn draws_depend_on_the_seed_and_on_nothing_in_between() {
    let draw = |between: bool| {
        let mut bench = Bench::new();
        bench.client.push(Body::Seed(v1::Seed { seed: 42 }));
        bench.upload(1, &[1.0, 2.0]);
        bench.ops(&[random(2)]);
        if between {
            bench.ops(&[add(1, 1, 3), add(1, 1, 4)]);
        }
        bench.ops(&[random(5)]);
        bench.read(1, &tensor(2, TensorStatus::ReadOnly));
        bench.read(2, &tensor(5, TensorStatus::ReadOnly));
        bench.all();
        bench.values()
    };
    let values = draw(false);
    assert_eq!(values, draw(true));
    assert_ne!(values[0].1, values[1].1);
}

#[test]
fn a_client_that_takes_no_answers_stops_its_own_session_alone() {
    let mut bench = Bench::new();
    let elements = 1 << 22;
    let shape = Shape::new([elements]);
    let ones = burn_ir::FullOpIr {
        out: TensorIr::uninit(TensorId::new(1), shape.clone(), DType::F32),
        value: burn_ir::ScalarIr::Float(1.0),
    };
    bench.ops(&[OperationIr::NumericFloat(
        DType::F32,
        NumericOperationIr::Full(ones),
    )]);
    let big = TensorIr {
        shape,
        status: TensorStatus::ReadOnly,
        ..tensor(1, TensorStatus::ReadOnly)
    };
    // 16 MiB each, of which the outbox keeps 64.
    (1..=8).for_each(|request| bench.read(request, &big));
    bench.carry(usize::MAX).unwrap();
    bench.run();
    let announced = |bench: &Bench| {
        let value = |body: &&Body| matches!(body, Body::Value(_));
        bench.answers.iter().filter(value).count()
    };
    bench.hear();
    assert_eq!(
        announced(&bench),
        4,
        "it waits for its client, and its turn is over"
    );
    // The client's next word confirms what it took.
    let beat = bench.client.beat();
    bench.session.receive(bench.connection, beat).unwrap();
    bench.run();
    bench.hear();
    assert_eq!(announced(&bench), 8);
}
