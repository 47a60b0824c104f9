//! The API below `Tensor`: Burn's `Backend`, autodiff over it, and tensors that move
//! between devices.

use burn::tensor::Tensor;
use burn_autodiff::Autodiff;
use burn_backend::{
    AutodiffBackend, DType, Scalar, Shape, TensorData, TensorMetadata, ops::FloatTensorOps,
};
use burn_ir::TensorId;
use burn_router::{RouterClient, RouterTensor};
use tensord_client::{LeaseRequest, Tensord};
use tensord_testkit::cluster::Cluster;

type Differentiable = Autodiff<Tensord>;

fn read(tensor: <Tensord as burn_backend::BackendTypes>::FloatTensorPrimitive) -> Vec<f32> {
    let data = burn_backend::read_sync(Tensord::float_into_data(tensor));
    data.unwrap().try_to_vec().unwrap()
}

#[test]
fn autodiff_works_over_the_backend() {
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let device = lease.backend_devices()[0];
    let x = Differentiable::float_from_data(TensorData::from([1.0f32, 2.0, 3.0]), &device);
    let x = Differentiable::float_set_require_grad(x, true);
    let y = Differentiable::float_mul(x.clone(), x.clone());
    let y = Differentiable::float_mul_scalar(y, Scalar::from(2.0f32));
    let gradients = Differentiable::backward(Differentiable::float_sum(y));
    let gradient = Differentiable::grad(&x, &gradients).expect("x has a gradient");
    assert_eq!(read(gradient), [4.0, 8.0, 12.0]);
}

#[test]
fn an_unknown_tensor_is_a_fault_that_says_so() {
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let device = lease.backend_devices()[0];
    let fine = Tensord::float_from_data(TensorData::from([1.0f32, 2.0]), &device);
    let client = fine.client.clone();
    let unknown = RouterTensor::new(TensorId::new(1 << 40), Shape::new([2]), DType::F32, client);
    let sum = Tensord::float_add(unknown, fine.clone());
    let error = burn_backend::read_sync(Tensord::float_into_data(sum)).unwrap_err();
    let error = error.reason().to_owned();
    for part in [
        "NumericFloat.Add",
        "worker-0",
        "does not exist",
        "1099511627776",
    ] {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
    // The device trusts its own table, not an op's claim about a tensor.
    let id = fine.id();
    let lie = RouterTensor::new(id, Shape::new([3]), DType::F32, fine.client.clone());
    let error = burn_backend::read_sync(Tensord::float_into_data(lie.clone())).unwrap_err();
    assert!(
        error.reason().contains("does not fit"),
        "{}",
        error.reason()
    );
    std::mem::forget(lie);
    assert_eq!(read(fine), [1.0, 2.0]);
}

#[test]
fn aliases_are_independent_tensors() {
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let device = lease.backend_devices()[0];
    let first = Tensord::float_from_data(TensorData::from([1.0f32, 2.0]), &device);
    let client = first.client.clone();
    let id = client.create_empty_handle();
    client.register_alias(id, first.id());
    let second = RouterTensor::new(id, first.shape(), first.dtype(), client);
    drop(first);
    assert_eq!(read(second), [1.0, 2.0]);
}

#[test]
fn tensors_move_between_devices_and_faults_move_with_them() {
    let cluster = Cluster::start(&["flex", "flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(2)).unwrap();
    let [from, to] = lease.devices() else {
        panic!("two devices were leased")
    };
    let tensor = Tensor::<2>::from_data([[1.0, 2.0], [3.0, 4.0]], from);
    let moved = tensor.clone().to_device(to) + 1.0;
    let values: Vec<f32> = moved.into_data().try_to_vec().unwrap();
    assert_eq!(values, [2.0, 3.0, 4.0, 5.0]);
    let index = Tensor::<1, burn::tensor::Int>::from_data([99], from);
    let bad = tensor.select(0, index).to_device(to) * 2.0;
    let error = bad.try_into_data().unwrap_err().to_string();
    assert!(error.contains("Select"), "{error}");
    let fine: f32 = Tensor::<1>::ones([2], to).sum().into_scalar();
    assert_eq!(fine, 2.0);
}
