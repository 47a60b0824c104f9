//! Weights of models from files onto leased devices and back.

use std::{fs, path::Path};

use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    nn::{
        BatchNorm, BatchNormConfig, Linear, LinearConfig,
        conv::{Conv2d, Conv2dConfig},
    },
    tensor::{Bool, DType, Device, Int, Tensor, TensorData},
};
use tensord_client::{
    LeaseRequest, data,
    weights::{
        self,
        burn_store::{BurnpackStore, ModuleSnapshot, PytorchStore, SafetensorsStore},
    },
};
use tensord_testkit::cluster::Cluster;

/// Layers with parameters of each kind.
#[derive(Module, Debug)]
struct Model {
    convolution: Conv2d,
    norm: BatchNorm,
    linear: Linear,
    order: Param<Tensor<1, Int>>,
    mask: Param<Tensor<1, Bool>>,
}

impl Model {
    fn new(device: &Device) -> Self {
        Self {
            convolution: Conv2dConfig::new([1, 4], [3, 3]).init(device),
            norm: BatchNormConfig::new(4).init(device),
            linear: LinearConfig::new(16, 5).init(device),
            order: Param::initialized(
                ParamId::new(),
                Tensor::from_data([0, 0, 0], (device, DType::I64)),
            ),
            mask: Param::initialized(ParamId::new(), Tensor::from_data([false, false], device)),
        }
    }

    /// A model on this host, with values of its own.
    fn local() -> Self {
        let device = Device::flex();
        let mut model = Self::new(&device);
        let integers = TensorData::from([-(1i64 << 40), 7, i64::MAX]);
        model.order = model
            .order
            .map(|_| Tensor::from_data(integers, (&device, DType::I64)));
        model.mask = model
            .mask
            .map(|_| Tensor::from_data([true, false], &device));
        model
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = self.norm.forward(self.convolution.forward(images));
        self.linear
            .forward(x.flatten::<2>(1, 3).slice([0..2, 0..16]))
    }
}

/// All values of a module, in order, by Burn's own reads.
#[derive(Default)]
struct Values(Vec<TensorData>);

impl Values {
    fn of(module: &impl Module) -> Vec<TensorData> {
        let mut values = Self::default();
        module.visit(&mut values);
        values.0
    }
}

impl ModuleVisitor for Values {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(param.val().into_data());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.0.push(param.val().into_data());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        // A boolean has the layout of its device.
        let data = param.val().int().into_data();
        self.0.push(data.try_cast_as::<i64>().unwrap());
    }
}

fn images(device: &Device) -> Tensor<4> {
    let values = (0..72).map(|i| i as f32 / 8.0 - 3.0).collect::<Vec<_>>();
    Tensor::from_data(TensorData::new(values, [2, 1, 6, 6]), device)
}

fn save_as(model: &Model, path: &Path) {
    match path.extension().unwrap().to_str().unwrap() {
        "safetensors" => model
            .save_into(&mut SafetensorsStore::from_file(path))
            .unwrap(),
        _ => model.clone().save_file(path).unwrap(),
    }
}

#[test]
fn files_load_onto_a_leased_device_and_are_saved_from_it_bit_by_bit() {
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let local = Model::local();
    let expected = Values::of(&local);
    for (name, copy) in [
        ("model.safetensors", "copy.safetensors"),
        ("model.bpk", "copy.bpk"),
    ] {
        let (path, copy) = (cluster.path(name), cluster.path(copy));
        save_as(&local, &path);
        let device = lease.devices()[0].clone().autodiff();
        let mut model = Model::new(&device);
        let result = weights::load(&mut model, &path).unwrap();
        assert!(result.is_success() && result.unused.is_empty(), "{result}");
        assert_eq!(Values::of(&model), expected, "{name}");
        let output = data::into_data(model.forward(images(&device))).unwrap();
        // A batch norm normalises by the batch on a device with autodiff.
        let autodiff = Device::flex().autodiff();
        let mut trained = Model::new(&autodiff);
        weights::load(&mut trained, &path).unwrap();
        assert_eq!(output, trained.forward(images(&autodiff)).into_data());
        // Loaded parameters still track gradients.
        let gradients = model.forward(images(&device)).sum().backward();
        assert!(model.linear.weight.grad(&gradients).is_some());

        let mut model = Model::new(&lease.devices()[0]);
        weights::load(&mut model, &path).unwrap();
        weights::save(&model, &copy).unwrap();
        weights::save(&model, &copy).expect("an existing file is replaced");
        let mut back = Model::new(&Device::flex());
        match name {
            "model.bpk" => back = back.try_load_file(&copy).unwrap(),
            _ => drop(
                back.load_from(&mut SafetensorsStore::from_file(&copy))
                    .unwrap(),
            ),
        }
        assert_eq!(Values::of(&back), expected, "{name}");
    }
}

/// What `tests/data/layers.pt` has.
#[derive(Module, Debug)]
struct Layers {
    linear: Linear,
    steps: Param<Tensor<1, Int>>,
}

impl Layers {
    fn new(outputs: usize, device: &Device) -> Self {
        Self {
            linear: LinearConfig::new(3, outputs).init(device),
            steps: Param::initialized(ParamId::new(), Tensor::zeros([2], device)),
        }
    }
}

/// Written by `tests/data/make_pt.py`.
const PYTORCH_FILE: &[u8] = include_bytes!("../../data/layers.pt");

#[test]
fn a_pytorch_file_loads_as_burn_has_its_layers() {
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let path = cluster.path("layers.pt");
    fs::write(&path, PYTORCH_FILE).unwrap();
    let mut layers = Layers::new(2, &lease.devices()[0]);
    weights::load(&mut layers, &path).unwrap();
    // Burn has one row for each input.
    let expected = [
        TensorData::from([[0.5f32, 1e-3], [-1.25, 7.75], [3.0, -0.0]]),
        TensorData::from([0.1f32, -2.5]),
        TensorData::from([-(1i64 << 40), 7]),
    ];
    let bits = |values: &[TensorData]| -> Vec<Vec<u8>> {
        values.iter().map(|data| data.as_bytes().to_vec()).collect()
    };
    assert_eq!(bits(&Values::of(&layers)), bits(&expected));
    let error = weights::save(&layers, &path).unwrap_err().to_string();
    assert!(error.contains("can only be loaded"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), PYTORCH_FILE);
    // A store with settings of its own: other names, and a part of the module.
    let mut other = Layers::new(2, &lease.devices()[0]);
    let store = PytorchStore::from_file(&path).with_regex("bias");
    let result = weights::load_from(&mut other, &mut store.allow_partial(true)).unwrap();
    assert_eq!(result.applied, ["linear.bias"]);
    assert_eq!(bits(&Values::of(&other)[1..2]), bits(&expected[1..2]));
}

#[test]
fn weights_that_do_not_fit_are_named_and_change_nothing() {
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let device = &lease.devices()[0];
    let path = cluster.path("layers.pt");
    fs::write(&path, PYTORCH_FILE).unwrap();
    let name = path.to_str().unwrap();

    let mut wide = Layers::new(4, device);
    let before = Values::of(&wide);
    let error = weights::load(&mut wide, &path).unwrap_err().to_string();
    for part in [
        name,
        "linear.weight: the module has the shape [3, 4], the file [3, 2]",
        "linear.bias: the module has the shape [4], the file [2]",
    ] {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
    assert_eq!(Values::of(&wide), before);

    let mut model = Model::new(device);
    let before = Values::of(&model);
    let error = weights::load(&mut model, &path).unwrap_err().to_string();
    for part in [
        "missing: ",
        "convolution.weight",
        "not in the module: steps",
    ] {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
    assert_eq!(Values::of(&model), before);

    // An integer where the module has floats.
    let mut store = PytorchStore::from_file(&path)
        .with_key_remapping("^steps$", "linear.bias.moved")
        .with_key_remapping(r"^linear\.bias$", "steps");
    let error = weights::load_from(&mut Layers::new(2, device), &mut store);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("steps"), "{error}");

    for (path, part) in [
        (cluster.path("none.safetensors"), "none.safetensors"),
        (cluster.path("model.onnx"), "onnx"),
    ] {
        let error = weights::load(&mut model, path).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_file_cut_short_is_an_error_that_names_it() {
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let mut layers = Layers::new(2, &lease.devices()[0]);
    let before = Values::of(&layers);
    let source = cluster.path("layers.pt");
    fs::write(&source, PYTORCH_FILE).unwrap();
    let mut local = Layers::new(2, &Device::flex());
    weights::load(&mut local, &source).unwrap();
    for name in ["layers.pt", "layers.safetensors", "layers.bpk"] {
        let path = cluster.path(name);
        if name != "layers.pt" {
            weights::save(&local, &path).unwrap();
        }
        let whole = fs::read(&path).unwrap();
        for len in (0..whole.len()).step_by(whole.len() / 40) {
            fs::write(&path, &whole[..len]).unwrap();
            let error = weights::load(&mut layers, &path);
            let error = error
                .map(drop)
                .expect_err(&format!("{name} of {len} bytes"));
            assert!(error.to_string().contains(name), "{error}");
        }
    }
    assert_eq!(Values::of(&layers), before);
}

#[test]
fn a_damaged_file_is_no_panic() {
    let device = Device::flex();
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("layers.pt");
    fs::write(&source, PYTORCH_FILE).unwrap();
    let mut layers = Layers::new(2, &device);
    weights::load(&mut layers, &source).unwrap();
    for name in ["layers.pt", "layers.safetensors", "layers.bpk"] {
        let path = dir.path().join(name);
        if name != "layers.pt" {
            weights::save(&layers, &path).unwrap();
        }
        let whole = fs::read(&path).unwrap();
        let mut refused = 0;
        for (at, change) in (0..whole.len()).flat_map(|at| [(at, 0x01), (at, 0x80), (at, 0xff)]) {
            let mut damaged = whole.clone();
            damaged[at] ^= change;
            fs::write(&path, damaged).unwrap();
            // Nothing protects values, so not every damage can be noticed.
            if let Err(e) = weights::load(&mut Layers::new(2, &device), &path) {
                assert!(e.to_string().contains(name), "{e}");
                refused += 1;
            }
        }
        assert!(
            refused > whole.len() / 4,
            "{name}: {refused} of {}",
            whole.len()
        );
    }
}

#[test]
fn a_faulty_parameter_is_named_and_no_file_is_written() {
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let device = &lease.devices()[0];
    let mut layers = Layers::new(2, device);
    let indices: Tensor<1, Int> = data::from_data([99], device);
    let bias = layers.linear.bias.take().unwrap();
    layers.linear.bias = Some(bias.map(|bias| bias.select(0, indices)));
    let path = cluster.path("faulty.safetensors");
    let error = weights::save(&layers, &path).unwrap_err().to_string();
    assert!(error.contains("linear.bias"), "{error}");
    assert!(error.contains("Select"), "{error}");
    assert!(!path.exists());
    let error = weights::save_into(&layers, &mut BurnpackStore::from_file(&path)).unwrap_err();
    assert!(error.to_string().contains("linear.bias"), "{error}");
}

#[test]
fn a_second_program_uploads_almost_nothing() {
    let cluster = Cluster::start(&["flex"]);
    let path = cluster.path("large.safetensors");
    let local = LinearConfig::new(1024, 1024).init(&Device::flex());
    weights::save(&local, &path).unwrap();
    let expected = Values::of(&local);
    let load = || {
        let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
        let mut model = LinearConfig::new(1024, 1024).init(&lease.devices()[0]);
        weights::load(&mut model, &path).unwrap();
        assert_eq!(Values::of(&model), expected);
        lease.traffic().tensor_bytes_up
    };
    assert!(load() >= 4 << 20);
    // The worker sorts kept uploads in the background.
    cluster.wait("the worker to offer what it kept", || load() < 8 << 10);
}
