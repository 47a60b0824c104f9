// Generated from ONNX "models/cnn.onnx" by burn-onnx
extern crate alloc;
use burn::prelude::*;
use burn::nn::BatchNorm;
use burn::nn::BatchNormConfig;
use burn::nn::PaddingConfig2d;
use burn::nn::conv::Conv2d;
use burn::nn::conv::Conv2dConfig;
use burn::nn::pool::MaxPool2d;
use burn::nn::pool::MaxPool2dConfig;
use burn::tensor::Bytes;
use burn_store::BurnpackStore;
use burn_store::ModuleSnapshot;


#[derive(Module, Debug)]
pub struct Model {
    constant9: burn::module::Param<Tensor<2>>,
    constant10: burn::module::Param<Tensor<1>>,
    batchnormalization1: BatchNorm,
    conv2d1: Conv2d,
    maxpool2d1: MaxPool2d,
    conv2d2: Conv2d,
    #[module(skip)]
    device: Device,
}


extern crate std;

impl Default for Model {
    fn default() -> Self {
        Self::from_file("src/generated/cnn.bpk", &Default::default())
    }
}

impl Model {
    /// Load model weights from a burnpack file.
    pub fn from_file<P: AsRef<std::path::Path>>(file: P, device: &Device) -> Self {
        let mut model = Self::new(device);
        let mut store = BurnpackStore::from_file(&file);
        model
            .load_from(&mut store)
            .unwrap_or_else(|e| {
                panic!("Failed to load burnpack file {}: {e}", file.as_ref().display())
            });
        model
    }

    /// Load model weights from in-memory bytes.
    ///
    /// The bytes must be the contents of a `.bpk` file.
    pub fn from_bytes(bytes: Bytes, device: &Device) -> Self {
        let mut model = Self::new(device);
        let mut store = BurnpackStore::from_bytes(Some(bytes));
        model
            .load_from(&mut store)
            .unwrap_or_else(|e| panic!("Failed to load burnpack bytes: {e}"));
        model
    }
}

impl Model {
    #[allow(unused_variables)]
    pub fn new(device: &Device) -> Self {
        let constant9: burn::module::Param<Tensor<2>> = burn::module::Param::uninitialized(
            burn::module::ParamId::new(),
            move |device, _require_grad| Tensor::<
                2,
            >::zeros([10, 256], (device, burn::tensor::DType::F32)),
            device.clone(),
            false,
            [10, 256].into(),
        );
        let constant10: burn::module::Param<Tensor<1>> = burn::module::Param::uninitialized(
            burn::module::ParamId::new(),
            move |device, _require_grad| Tensor::<
                1,
            >::zeros([10], (device, burn::tensor::DType::F32)),
            device.clone(),
            false,
            [10].into(),
        );
        let batchnormalization1 = BatchNormConfig::new(1)
            .with_epsilon(0.000009999999747378752f64)
            .with_momentum(0f64)
            .init(device);
        let conv2d1 = Conv2dConfig::new([1, 8], [3, 3])
            .with_stride([1, 1])
            .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
            .with_dilation([1, 1])
            .with_groups(1)
            .with_bias(true)
            .init(device);
        let maxpool2d1 = MaxPool2dConfig::new([2, 2])
            .with_strides([2, 2])
            .with_padding(PaddingConfig2d::Valid)
            .with_dilation([1, 1])
            .with_ceil_mode(false)
            .init();
        let conv2d2 = Conv2dConfig::new([8, 16], [3, 3])
            .with_stride([1, 1])
            .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
            .with_dilation([1, 1])
            .with_groups(1)
            .with_bias(true)
            .init(device);
        Self {
            constant9,
            constant10,
            batchnormalization1,
            conv2d1,
            maxpool2d1,
            conv2d2,
            device: device.clone(),
        }
    }

    #[allow(clippy::let_and_return, clippy::approx_constant)]
    pub fn forward(&self, images: Tensor<4>) -> (Tensor<2>, Tensor<1, Int>) {
        let constant9_out1 = self.constant9.val();
        let constant10_out1 = self.constant10.val();
        let batchnormalization1_out1 = self.batchnormalization1.forward(images);
        let conv2d1_out1 = self.conv2d1.forward(batchnormalization1_out1);
        let relu1_out1 = burn::tensor::activation::relu(conv2d1_out1);
        let maxpool2d1_out1 = self.maxpool2d1.forward(relu1_out1);
        let conv2d2_out1 = self.conv2d2.forward(maxpool2d1_out1);
        let relu2_out1 = burn::tensor::activation::relu(conv2d2_out1);
        let flatten1_out1 = {
            let leading_dim = relu2_out1.shape()[..1].iter().product::<usize>() as i32;
            relu2_out1.reshape::<2, _>([leading_dim, -1])
        };
        let gemm1_out1 = flatten1_out1.matmul(constant9_out1.transpose())
            + constant10_out1.unsqueeze();
        let argmax_result = gemm1_out1.clone().argmax(1);
        let argmax1_out1 = argmax_result
            .squeeze_dim::<1usize>(1)
            .cast(burn::tensor::DType::I64);
        (gemm1_out1, argmax1_out1)
    }
}
