//! Generated models on leased devices: their outputs, and what becomes of ops that a leased
//! device does not have.

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use burn::{
    backend::ExecutionError,
    module::Module,
    tensor::{DType, Device, Tensor, TensorData, Tolerance},
};
use onnx::{
    Models,
    data::{Digits, Expected},
    use_integers_of_onnx,
};
use tensord_client::{LeaseRequest, data, weights};
use tensord_testkit::cluster::{Cluster, Process};

/// What `burn-onnx` made of other models, unchanged.
#[allow(missing_docs, unreachable_pub, dead_code, unused_variables)]
mod generated {
    #[rustfmt::skip]
    pub mod cast;
    #[rustfmt::skip]
    pub mod integers;
    #[rustfmt::skip]
    pub mod quantized;
}

/// The outputs of both models: logits, digits and vectors.
fn outputs(models: &Models) -> [TensorData; 3] {
    let (logits, digits) = models.classify(&Digits::for_tests().unwrap());
    let vectors = models.encode(&Expected::read().unwrap());
    [
        data::into_data(logits).unwrap(),
        data::into_data(digits).unwrap(),
        data::into_data(vectors).unwrap(),
    ]
}

/// Loads the weights of a model of these tests.
fn load<M: Module>(mut model: M, name: &str) -> M {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/generated");
    weights::load(&mut model, folder.join(name)).unwrap();
    model
}

/// A matrix of `rows`.
fn matrix(rows: &[Vec<f32>]) -> TensorData {
    TensorData::new(rows.concat(), [rows.len(), rows[0].len()])
}

#[test]
fn outputs_have_the_bits_of_local_flex() {
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let mut device = lease.devices()[0].clone();
    use_integers_of_onnx(&mut device).unwrap();
    let expected = outputs(&Models::load(&Device::flex()).unwrap());
    assert_eq!(expected[1].dtype(), DType::I64);
    assert_eq!(outputs(&Models::load(&device).unwrap()), expected);
    // The generated code can load its weights itself, which is slower for large ones.
    assert_eq!(outputs(&Models::load_by_generated_code(&device)), expected);
}

#[test]
fn local_flex_gives_what_onnx_itself_computes() {
    let [logits, digits, vectors] = outputs(&Models::load(&Device::flex()).unwrap());
    let expected = Expected::read().unwrap();
    let tolerance = || Tolerance::<f32>::rel_abs(1e-4, 1e-4);
    let count = expected.logits.len();
    let values = logits.try_to_vec::<f32>().unwrap()[..10 * count].to_vec();
    let logits = TensorData::new(values, [count, 10]);
    logits.assert_approx_eq(&matrix(&expected.logits), tolerance());
    vectors.assert_approx_eq(&matrix(&expected.pooled), tolerance());
    let digits = digits.try_to_vec::<i64>().unwrap();
    for (row, digit) in expected.logits.iter().zip(digits) {
        let largest = row.iter().copied().fold(f32::MIN, f32::max);
        assert_eq!(row[usize::try_from(digit).unwrap()], largest);
    }
}

#[test]
fn the_example_prints_the_same_on_a_pool_and_without() {
    let cluster = Cluster::start(&["flex"]);
    let env = [("TENSORD_URL", cluster.client_url())];
    let [leased, local] = [&[][..], &["--local"]].map(|arguments| {
        let log = cluster.path(&format!("onnx-{}.log", arguments.len()));
        let example = Path::new(env!("CARGO_BIN_EXE_onnx"));
        let mut process = Process::start_of(example, arguments, &env, log);
        let cnn = process.wait_for("the CNN", |line| {
            line.starts_with("cnn").then(|| line.to_owned())
        });
        let encoder = process.wait_for("the encoder", |line| {
            line.starts_with("encoder").then(|| line.to_owned())
        });
        assert_eq!(process.exit_code(Duration::from_secs(20)), Some(0));
        [cnn, encoder]
    });
    assert_eq!(leased, local);
    assert!(leased[0].contains("389 digits"), "{leased:?}");
    assert!(leased[0].contains("98.2 % right"), "{leased:?}");
}

#[test]
fn casts_to_the_integers_of_the_device_do_nothing() {
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let mut device = lease.devices()[0].clone();
    use_integers_of_onnx(&mut device).unwrap();
    let run = |device: &Device| {
        let model = load(generated::integers::Model::new(device), "integers.bpk");
        let x = TensorData::from([[0.5f32, -3.7, 9.0, 2.25], [1e6, -1.0, 0.0, 7.9]]);
        let (places, smallest, whole, sum) = model.forward(Tensor::from_data(x, device));
        [
            data::into_data(places).unwrap(),
            data::into_data(smallest).unwrap(),
            data::into_data(whole).unwrap(),
            data::into_data(sum).unwrap(),
        ]
    };
    let outputs = run(&device);
    assert_eq!(outputs[0], TensorData::from([[2i64, 3], [0, 3]]));
    assert_eq!(outputs[1], TensorData::from([1i64, 1]));
    let whole = TensorData::from([[0i64, -3, 9, 2], [1_000_000, -1, 0, 7]]);
    assert_eq!(outputs[2], whole);
    assert_eq!(outputs, run(&Device::flex()));
}

/// Computes an output on a device, and reads it.
type Case = fn(&Device) -> Result<TensorData, ExecutionError>;

/// Models whose generated code casts from one integer type to another.
const CASTS: [(&str, Case); 3] = [
    ("ArgMax without the setting", |device| {
        let models = Models::load(device).unwrap();
        let (_, digits) = models.classify(&Digits::for_tests().unwrap());
        data::into_data(digits)
    }),
    ("Cast from int64 to int32", |device| {
        let ids = data::from_data([1i64, 2], (device, DType::I64));
        data::into_data(generated::cast::Model::new(device).forward(ids))
    }),
    ("QuantizeLinear and DequantizeLinear", |device| {
        let model = load(generated::quantized::Model::new(device), "quantized.bpk");
        data::into_data(model.forward(Tensor::from_data([0.5f32, 1.2], device)))
    }),
];

#[test]
fn an_error_names_the_cast_that_a_leased_device_lacks() {
    let cluster = Cluster::start(&["flex*4"]);
    let pool = cluster.pool();
    let request = || pool.lease(LeaseRequest::devices(1)).unwrap();
    let works = |device: &Device| {
        let sum = Tensor::<1>::ones([3], device).sum();
        assert_eq!(data::into_data(sum).unwrap(), TensorData::from([3.0f32]));
    };
    let bystander = request();
    thread::scope(|scope| {
        for (name, case) in CASTS {
            let lease = request();
            scope.spawn(move || {
                // The same works on a local device.
                case(&Device::flex()).unwrap();
                let started = Instant::now();
                let error = case(&lease.devices()[0]).unwrap_err().to_string();
                assert!(
                    started.elapsed() < Duration::from_secs(30),
                    "{name}: {error}"
                );
                let named = error.contains("BaseInt(Cast)") && error.contains("cast_int");
                assert!(named, "{name}: {error}");
            });
        }
    });
    works(&bystander.devices()[0]);
    // The leases were dropped, and their devices work for the next one.
    let again = pool.lease(LeaseRequest::devices(3)).unwrap();
    again.devices().iter().for_each(works);
}
