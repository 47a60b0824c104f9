//! Casts between integer types, which Burn's own remote devices do not survive.

use std::net::TcpListener;

use burn::{
    remote::RemoteHost,
    tensor::{DType, Device, Int, IntDType, Tensor, TensorData},
};
use tensord_client::{LeaseRequest, Secret, data};
use tensord_testkit::cluster::Cluster;
use tokio::runtime::Runtime;

const TYPES: [IntDType; 8] = [
    IntDType::I64,
    IntDType::I32,
    IntDType::I16,
    IntDType::I8,
    IntDType::U64,
    IntDType::U32,
    IntDType::U16,
    IntDType::U8,
];

/// Returns the extremes of `dtype` and what is next to them and to zero, as a matrix.
fn extremes(dtype: IntDType) -> TensorData {
    macro_rules! extremes {
        ($type:ty) => {{
            let (min, max) = (<$type>::MIN, <$type>::MAX);
            // -1, or the largest value.
            let minus_one = <$type>::default().wrapping_sub(1);
            TensorData::from([
                [min, min + 1, 0],
                [1, max - 1, max],
                [minus_one, 100, max / 3],
            ])
        }};
    }
    match dtype {
        IntDType::I64 => extremes!(i64),
        IntDType::I32 => extremes!(i32),
        IntDType::I16 => extremes!(i16),
        IntDType::I8 => extremes!(i8),
        IntDType::U64 => extremes!(u64),
        IntDType::U32 => extremes!(u32),
        IntDType::U16 => extremes!(u16),
        IntDType::U8 => extremes!(u8),
    }
}

/// Casts between each two types on `device`, and compares with Burn's cast on a local device.
fn compare_all(device: &Device) {
    let local = Device::flex();
    for from in TYPES {
        for to in TYPES {
            let dtype = DType::from(from);
            let expected = Tensor::<2, Int>::from_data(extremes(from), (&local, dtype));
            let expected = expected.transpose().cast(to);
            for device in [device, &local] {
                let input: Tensor<2, Int> = data::from_data(extremes(from), (device, dtype));
                let cast = data::cast_int(input.transpose(), to);
                assert_eq!(cast.dtype(), DType::from(to));
                let cast = data::into_data(cast).unwrap();
                assert_eq!(cast, expected.to_data(), "{from:?} to {to:?}");
            }
        }
    }
}

#[test]
fn casts_between_integers_are_those_of_a_local_device() {
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let device = &lease.devices()[0];
    compare_all(device);
    // A cast is an op like any other: its result is an input of later ops.
    let wide: Tensor<1, Int> = data::from_data([3i64, -4], (device, DType::I64));
    let narrow = data::cast_int(wide.clone(), IntDType::I16) * 2 + 1;
    let narrow = data::into_data(narrow).unwrap();
    assert_eq!(narrow, TensorData::from([7i16, -7]));
    assert_eq!(data::into_data(wide).unwrap(), [3i64, -4].into());
}

#[test]
fn a_cast_keeps_the_autodiff_device() {
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let device = lease.devices()[0].clone().autodiff();
    let labels: Tensor<1, Int> = data::from_data([1i64, 0], (&device, DType::I64));
    let labels = data::cast_int(labels, IntDType::I32);
    assert!(labels.device().is_autodiff());
    let weights = Tensor::<1>::from_data([1.0, 2.0], &device).require_grad();
    let gradients = (weights.clone() * 3.0).gather(0, labels).sum().backward();
    let gradient = weights.grad(&gradients).unwrap();
    assert_eq!(data::into_data(gradient).unwrap(), [3.0f32, 3.0].into());
}

#[test]
fn a_cast_of_a_faulty_tensor_has_the_fault_and_ends_nothing() {
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let device = &lease.devices()[0];
    let fine: Tensor<1, Int> = data::from_data([1i64, 2], (device, DType::I64));
    let bad = fine.clone().select(0, data::from_data([99], device));
    let error = data::into_data(data::cast_int(bad, IntDType::U8)).unwrap_err();
    assert!(error.to_string().contains("Select"), "{error}");
    let cast = data::cast_int(fine, IntDType::U8);
    assert_eq!(data::into_data(cast).unwrap(), [1u8, 2].into());
}

#[test]
fn casts_work_on_a_remote_device_that_is_not_leased() {
    let cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("ws://{}", listener.local_addr().unwrap());
    let runtime = Runtime::new().unwrap();
    runtime.spawn(lease.serve(listener, &Secret::new("a-token")));
    let host = RemoteHost::websocket(&url).with_credential("a-token".to_owned());
    let device = host.devices().unwrap().into_iter().next().unwrap();
    compare_all(&device);
}
