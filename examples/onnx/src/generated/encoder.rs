// Generated from ONNX "models/encoder.onnx" by burn-onnx
extern crate alloc;
use burn::prelude::*;
use burn::nn::LayerNorm;
use burn::nn::LayerNormConfig;
use burn::nn::Linear;
use burn::nn::LinearConfig;
use burn::tensor::Bytes;
use burn_store::BurnpackStore;
use burn_store::ModuleSnapshot;


#[derive(Module, Debug)]
pub struct Model {
    constant3: burn::module::Param<Tensor<2>>,
    constant4: burn::module::Param<Tensor<2>>,
    constant7: burn::module::Param<Tensor<1>>,
    constant8: burn::module::Param<Tensor<1>>,
    constant16: burn::module::Param<Tensor<1>>,
    constant33: burn::module::Param<Tensor<1>>,
    layernormalization1: LayerNorm,
    linear1: Linear,
    linear2: Linear,
    linear3: Linear,
    linear4: Linear,
    layernormalization2: LayerNorm,
    linear5: Linear,
    linear6: Linear,
    layernormalization3: LayerNorm,
    linear7: Linear,
    linear8: Linear,
    linear9: Linear,
    linear10: Linear,
    layernormalization4: LayerNorm,
    linear11: Linear,
    linear12: Linear,
    layernormalization5: LayerNorm,
    #[module(skip)]
    device: Device,
}


extern crate std;

impl Default for Model {
    fn default() -> Self {
        Self::from_file("src/generated/encoder.bpk", &Default::default())
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
        let constant3: burn::module::Param<Tensor<2>> = burn::module::Param::uninitialized(
            burn::module::ParamId::new(),
            move |device, _require_grad| Tensor::<
                2,
            >::zeros([64, 32], (device, burn::tensor::DType::F32)),
            device.clone(),
            false,
            [64, 32].into(),
        );
        let constant4: burn::module::Param<Tensor<2>> = burn::module::Param::uninitialized(
            burn::module::ParamId::new(),
            move |device, _require_grad| Tensor::<
                2,
            >::zeros([16, 32], (device, burn::tensor::DType::F32)),
            device.clone(),
            false,
            [16, 32].into(),
        );
        let constant7: burn::module::Param<Tensor<1>> = burn::module::Param::uninitialized(
            burn::module::ParamId::new(),
            move |device, _require_grad| Tensor::<
                1,
            >::zeros([1], (device, burn::tensor::DType::F32)),
            device.clone(),
            false,
            [1].into(),
        );
        let constant8: burn::module::Param<Tensor<1>> = burn::module::Param::uninitialized(
            burn::module::ParamId::new(),
            move |device, _require_grad| Tensor::<
                1,
            >::zeros([1], (device, burn::tensor::DType::F32)),
            device.clone(),
            false,
            [1].into(),
        );
        let constant16: burn::module::Param<Tensor<1>> = burn::module::Param::uninitialized(
            burn::module::ParamId::new(),
            move |device, _require_grad| Tensor::<
                1,
            >::zeros([1], (device, burn::tensor::DType::F32)),
            device.clone(),
            false,
            [1].into(),
        );
        let constant33: burn::module::Param<Tensor<1>> = burn::module::Param::uninitialized(
            burn::module::ParamId::new(),
            move |device, _require_grad| Tensor::<
                1,
            >::zeros([1], (device, burn::tensor::DType::F32)),
            device.clone(),
            false,
            [1].into(),
        );
        let layernormalization1 = LayerNormConfig::new(32)
            .with_epsilon(0.000009999999747378752f64)
            .with_bias(true)
            .init(device);
        let linear1 = LinearConfig::new(32, 32).with_bias(true).init(device);
        let linear2 = LinearConfig::new(32, 32).with_bias(true).init(device);
        let linear3 = LinearConfig::new(32, 32).with_bias(true).init(device);
        let linear4 = LinearConfig::new(32, 32).with_bias(true).init(device);
        let layernormalization2 = LayerNormConfig::new(32)
            .with_epsilon(0.000009999999747378752f64)
            .with_bias(true)
            .init(device);
        let linear5 = LinearConfig::new(32, 64).with_bias(true).init(device);
        let linear6 = LinearConfig::new(64, 32).with_bias(true).init(device);
        let layernormalization3 = LayerNormConfig::new(32)
            .with_epsilon(0.000009999999747378752f64)
            .with_bias(true)
            .init(device);
        let linear7 = LinearConfig::new(32, 32).with_bias(true).init(device);
        let linear8 = LinearConfig::new(32, 32).with_bias(true).init(device);
        let linear9 = LinearConfig::new(32, 32).with_bias(true).init(device);
        let linear10 = LinearConfig::new(32, 32).with_bias(true).init(device);
        let layernormalization4 = LayerNormConfig::new(32)
            .with_epsilon(0.000009999999747378752f64)
            .with_bias(true)
            .init(device);
        let linear11 = LinearConfig::new(32, 64).with_bias(true).init(device);
        let linear12 = LinearConfig::new(64, 32).with_bias(true).init(device);
        let layernormalization5 = LayerNormConfig::new(32)
            .with_epsilon(0.000009999999747378752f64)
            .with_bias(true)
            .init(device);
        Self {
            constant3,
            constant4,
            constant7,
            constant8,
            constant16,
            constant33,
            layernormalization1,
            linear1,
            linear2,
            linear3,
            linear4,
            layernormalization2,
            linear5,
            linear6,
            layernormalization3,
            linear7,
            linear8,
            linear9,
            linear10,
            layernormalization4,
            linear11,
            linear12,
            layernormalization5,
            device: device.clone(),
        }
    }

    #[allow(clippy::let_and_return, clippy::approx_constant)]
    pub fn forward(&self, ids: Tensor<2, Int>, mask: Tensor<2, Int>) -> Tensor<2> {
        let constant3_out1 = self.constant3.val();
        let constant4_out1 = self.constant4.val();
        let constant7_out1 = self.constant7.val();
        let constant8_out1 = self.constant8.val();
        let constant16_out1 = self.constant16.val();
        let constant33_out1 = self.constant33.val();
        let gather1_out1 = {
            let axis_size = constant3_out1.dims()[0] as i64;
            let negative = ids.clone().lower_elem(0i64);
            let corrected = ids.clone() + axis_size;
            let indices = ids.mask_where(negative, corrected);
            constant3_out1.take::<2, 3>(0, indices)
        };
        let add1_out1 = gather1_out1.add((constant4_out1).unsqueeze_dims(&[0isize]));
        let layernormalization1_out1 = {
            let dtype = add1_out1.dtype();
            self.layernormalization1
                .forward(add1_out1.cast(burn::tensor::DType::F32))
                .cast(dtype)
        };
        let cast1_out1 = mask.float().cast(burn::tensor::DType::F32);
        let sub1_out1 = (constant7_out1)
            .unsqueeze_dims(&[0isize])
            .sub(cast1_out1.clone());
        let mul1_out1 = sub1_out1.mul((constant8_out1).unsqueeze_dims(&[0isize]));
        let unsqueeze1_out1: Tensor<4> = mul1_out1.unsqueeze_dims::<4>(&[1, 2]);
        let linear1_out1 = self.linear1.forward(layernormalization1_out1.clone());
        let reshape1_out1 = linear1_out1.reshape([0, 16, 4, 8]);
        let transpose1_out1 = reshape1_out1.permute([0, 2, 1, 3]);
        let linear2_out1 = self.linear2.forward(layernormalization1_out1.clone());
        let reshape2_out1 = linear2_out1.reshape([0, 16, 4, 8]);
        let transpose2_out1 = reshape2_out1.permute([0, 2, 1, 3]);
        let linear3_out1 = self.linear3.forward(layernormalization1_out1.clone());
        let reshape3_out1 = linear3_out1.reshape([0, 16, 4, 8]);
        let transpose3_out1 = reshape3_out1.permute([0, 2, 3, 1]);
        let matmul4_out1 = transpose1_out1.matmul(transpose3_out1);
        let div1_out1 = matmul4_out1
            .div((constant16_out1).unsqueeze_dims(&[0isize, 1isize, 2isize]));
        let add2_out1 = div1_out1.add(unsqueeze1_out1.clone());
        let softmax1_out1 = burn::tensor::activation::softmax(add2_out1, 3);
        let matmul5_out1 = softmax1_out1.matmul(transpose2_out1);
        let transpose4_out1 = matmul5_out1.permute([0, 2, 1, 3]);
        let reshape4_out1 = transpose4_out1.reshape([0, 16, 32]);
        let linear4_out1 = self.linear4.forward(reshape4_out1);
        let add3_out1 = layernormalization1_out1.add(linear4_out1);
        let layernormalization2_out1 = {
            let dtype = add3_out1.dtype();
            self.layernormalization2
                .forward(add3_out1.cast(burn::tensor::DType::F32))
                .cast(dtype)
        };
        let linear5_out1 = self.linear5.forward(layernormalization2_out1.clone());
        let gelu1_out1 = burn::tensor::activation::gelu(linear5_out1);
        let linear6_out1 = self.linear6.forward(gelu1_out1);
        let add4_out1 = layernormalization2_out1.add(linear6_out1);
        let layernormalization3_out1 = {
            let dtype = add4_out1.dtype();
            self.layernormalization3
                .forward(add4_out1.cast(burn::tensor::DType::F32))
                .cast(dtype)
        };
        let linear7_out1 = self.linear7.forward(layernormalization3_out1.clone());
        let reshape5_out1 = linear7_out1.reshape([0, 16, 4, 8]);
        let transpose5_out1 = reshape5_out1.permute([0, 2, 1, 3]);
        let linear8_out1 = self.linear8.forward(layernormalization3_out1.clone());
        let reshape6_out1 = linear8_out1.reshape([0, 16, 4, 8]);
        let transpose6_out1 = reshape6_out1.permute([0, 2, 1, 3]);
        let linear9_out1 = self.linear9.forward(layernormalization3_out1.clone());
        let reshape7_out1 = linear9_out1.reshape([0, 16, 4, 8]);
        let transpose7_out1 = reshape7_out1.permute([0, 2, 3, 1]);
        let matmul12_out1 = transpose5_out1.matmul(transpose7_out1);
        let div2_out1 = matmul12_out1
            .div((constant33_out1).unsqueeze_dims(&[0isize, 1isize, 2isize]));
        let add5_out1 = div2_out1.add(unsqueeze1_out1);
        let softmax2_out1 = burn::tensor::activation::softmax(add5_out1, 3);
        let matmul13_out1 = softmax2_out1.matmul(transpose6_out1);
        let transpose8_out1 = matmul13_out1.permute([0, 2, 1, 3]);
        let reshape8_out1 = transpose8_out1.reshape([0, 16, 32]);
        let linear10_out1 = self.linear10.forward(reshape8_out1);
        let add6_out1 = layernormalization3_out1.add(linear10_out1);
        let layernormalization4_out1 = {
            let dtype = add6_out1.dtype();
            self.layernormalization4
                .forward(add6_out1.cast(burn::tensor::DType::F32))
                .cast(dtype)
        };
        let linear11_out1 = self.linear11.forward(layernormalization4_out1.clone());
        let gelu2_out1 = burn::tensor::activation::gelu(linear11_out1);
        let linear12_out1 = self.linear12.forward(gelu2_out1);
        let add7_out1 = layernormalization4_out1.add(linear12_out1);
        let layernormalization5_out1 = {
            let dtype = add7_out1.dtype();
            self.layernormalization5
                .forward(add7_out1.cast(burn::tensor::DType::F32))
                .cast(dtype)
        };
        let unsqueeze2_out1: Tensor<3> = cast1_out1.unsqueeze_dims::<3>(&[2]);
        let mul2_out1 = layernormalization5_out1.mul(unsqueeze2_out1.clone());
        let reducesum1_out1 = { mul2_out1.sum_dim(1usize) };
        let reducesum2_out1 = { unsqueeze2_out1.sum_dim(1usize) };
        let div3_out1 = reducesum1_out1.div(reducesum2_out1);
        let reshape9_out1 = div3_out1.reshape([0, 32]);
        reshape9_out1
    }
}
