//! A custom op of the worker: the example `worker/examples/custom_op.rs`.

use burn::tensor::{Tensor, TensorData, Tolerance};
use tensord_client::{CustomOp, LeaseRequest};
use tensord_testkit::cluster::{Cluster, Process};

use tensord_testkit::host;

/// Starts a pool with the example as its worker.
fn cluster(devices: &str) -> Cluster {
    let mut cluster = host::cluster(&[]);
    let env = [("TENSORD_URL", cluster.worker_url())];
    let log = cluster.path("custom-op.log");
    let example = host::example("custom_op");
    let process = Process::start_of(&example, &["--devices", devices], &env, log);
    process.wait_for("joining", |line| line.contains("joined").then_some(()));
    cluster.workers.push(process);
    cluster
}

#[test]
fn custom_op_of_a_worker_runs() {
    for kind in host::kinds().into_iter().chain(["flex"]) {
        let cluster = cluster(kind);
        let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
        let device = &lease.devices()[0];
        let values: Vec<f32> = (0..4000).map(|i| (i as f32 - 2000.0) / 100.0).collect();
        let x = Tensor::<1>::from_floats(&values[..], device).reshape([40, 100]);
        let swish = |x: Tensor<2>, beta: f32| {
            let call = CustomOp::new("swish").input(x).scalar(beta);
            call.call::<2, burn::tensor::Float>([40, 100])
        };
        // On an input that is still to be computed, twice in a row, and between Burn's own
        // ops.
        let y = swish(swish(x.clone() + 0.25, 1.5), 0.5) * 2.0;
        let reference = |x: f64, beta: f64| x / (1.0 + (-beta * x).exp());
        let expected = values.iter().map(|x| {
            let once = reference(f64::from(*x) + 0.25, 1.5);
            (2.0 * reference(once, 0.5)) as f32
        });
        let expected = TensorData::new(expected.collect::<Vec<_>>(), [40, 100]);
        let data = y.try_into_data().unwrap();
        data.assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(1e-4, 1e-5));

        // An unknown or failing custom op is a fault that states the cause.
        let absent: Tensor<2> = CustomOp::new("mish").input(x.clone()).call([40, 100]);
        let error = absent.try_into_data().unwrap_err().to_string();
        assert!(
            error.contains("no custom op \"mish\"") && error.contains("swish"),
            "{error}"
        );
        let failed: Tensor<2> = CustomOp::new("swish").input(x.clone()).call([40, 100]);
        let error = failed.try_into_data().unwrap_err().to_string();
        assert!(error.contains("one scalar, not 0 scalars"), "{error}");
        let sum: f32 = x.ones_like().sum().into_scalar();
        assert_eq!(sum, 4000.0);
    }
}
