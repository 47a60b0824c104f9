//! Arrays of the crate `ndarray`, from and to devices.

use burn::tensor::{Bool, DType, Device, Float, Int, Tensor};
use ndarray::{Array, Array1, Array2, Array3, array, s};
use tensord_client::{LeaseRequest, data};
use tensord_testkit::cluster::Cluster;

fn round_trips(device: &Device) {
    let floats = Array3::from_shape_fn([2, 3, 4], |(i, j, k)| (i * 12 + j * 4 + k) as f32 - 7.5);
    let tensor: Tensor<3> = data::from_array(floats.clone(), device);
    assert_eq!(tensor.shape().as_slice(), [2, 3, 4]);
    assert_eq!(data::into_array::<f32, 3, _>(tensor).unwrap(), floats);

    // Views, in an order and with gaps of their own.
    let view = floats.slice(s![.., ..;-1, 1..3]).permuted_axes([2, 0, 1]);
    let tensor: Tensor<3> = data::from_array(view, device);
    let doubled: Array3<f32> = data::into_array(tensor * 2.0).unwrap();
    assert_eq!(doubled, &view * 2.0);
    let shared = floats.to_shared();
    let tensor: Tensor<3> = data::from_array(shared, device);
    assert_eq!(data::into_array::<f32, 3, _>(tensor).unwrap(), floats);

    let integers: Array1<i64> = array![i64::MIN, -1, i64::MAX];
    let tensor: Tensor<1, Int> = data::from_array(integers.clone(), (device, DType::I64));
    assert_eq!(data::into_array::<i64, 1, Int>(tensor).unwrap(), integers);

    let flags: Array2<bool> = array![[true, false], [false, false]];
    let tensor: Tensor<2, Bool> = data::from_array(flags.clone(), device);
    let flipped: Array2<bool> = data::into_array(tensor.bool_not()).unwrap();
    assert_eq!(flipped, flags.mapv(|flag| !flag));

    let empty: Array2<f32> = Array::zeros([0, 5]);
    let tensor: Tensor<2> = data::from_array(empty.clone(), device);
    assert_eq!(data::into_array::<f32, 2, Float>(tensor).unwrap(), empty);
}

#[test]
fn arrays_round_trip_on_leased_and_local_devices() {
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    round_trips(&lease.devices()[0]);
    round_trips(&Device::flex());
}

#[test]
fn arrays_of_another_type_are_refused_before_anything_is_read() {
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let device = &lease.devices()[0];
    let tensor: Tensor<1> = data::from_array(array![1.0f32, 2.0], device);
    let error = data::into_array::<f64, 1, _>(tensor.clone()).unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("of f32") && error.contains("of f64"),
        "{error}"
    );
    let bad = tensor.select(0, data::from_array(array![99], device));
    let error = data::into_array::<f32, 1, _>(bad).unwrap_err().to_string();
    assert!(error.contains("Select"), "{error}");
}
