//! Models whose answers are known, and a server with them.

use std::{convert::Infallible, thread::sleep, time::Duration};

use burn::prelude::*;
use serde_json::{Value, json};
use tensord_client::Pool;
use tensord_serve::{BATCH, Batching, Model, Port, Serve, Server};

/// How long a server may take until it is ready.
pub(crate) const READY_WITHIN: Duration = Duration::from_secs(60);

/// Returns twice its input, plus one: rows of four floats.
pub(crate) fn double() -> Model {
    let input = Port::f32("x", [BATCH, 4]);
    Model::new("double", input, Port::f32("y", [BATCH, 4]), |_: &Device| {
        Ok::<_, Infallible>(|x: Tensor<2>| x * 2.0 + 1.0)
    })
}

/// As [`double`], but takes some time for each batch.
pub(crate) fn slow(time: Duration) -> Model {
    let input = Port::f32("x", [BATCH, 4]);
    Model::new(
        "slow",
        input,
        Port::f32("y", [BATCH, 4]),
        move |_: &Device| {
            Ok::<_, Infallible>(move |x: Tensor<2>| {
                sleep(time);
                x * 2.0 + 1.0
            })
        },
    )
}

/// Panics if its input has an element below -100, and returns the logarithm otherwise.
pub(crate) fn picky() -> Model {
    let input = Port::f32("x", [BATCH, 1]);
    Model::new("picky", input, Port::f32("y", [BATCH, 1]), |_: &Device| {
        Ok::<_, Infallible>(|x: Tensor<2>| {
            let least = x.clone().min().into_scalar::<f32>();
            assert!(least >= -100.0, "{least} is too small");
            x.log()
        })
    })
    .check_finite()
}

/// Adds the products of floats and integers where a truth value is set; returns it, and the integers plus one.
pub(crate) fn several() -> Model {
    let inputs = (
        Port::f32("floats", [BATCH, 3]),
        Port::i64("integers", [BATCH, 3]),
        Port::bool("mask", [BATCH, 3]),
    );
    let outputs = (Port::f32("sum", [BATCH, 1]), Port::i64("next", [BATCH, 3]));
    Model::new("several", inputs, outputs, |_: &Device| {
        Ok::<_, Infallible>(
            |(floats, integers, mask): (Tensor<2>, Tensor<2, Int>, Tensor<2, Bool>)| {
                let products = floats * integers.clone().float();
                let sum = products.mask_fill(mask.bool_not(), 0.0).sum_dim(1);
                (sum, integers + 1)
            },
        )
    })
}

/// Returns a batching that waits for nothing.
pub(crate) fn without_delay() -> Batching {
    Batching {
        max_delay: Duration::ZERO,
        ..Batching::default()
    }
}

/// Serves models without TLS and tokens, and waits until they are ready.
pub(crate) fn serve(pool: Pool, models: impl IntoIterator<Item = Model>) -> Server {
    serve_with(models.into_iter().fold(Serve::new(pool), Serve::model))
}

/// As [`serve`], with further settings.
pub(crate) fn serve_with(serve: Serve) -> Server {
    let server = bind(serve);
    assert!(server.wait_ready(READY_WITHIN), "the server is not ready");
    server
}

/// Serves models without TLS and tokens, which may not be ready yet.
pub(crate) fn bind(serve: Serve) -> Server {
    let serve = serve.plaintext_on_loopback().without_token_on_loopback();
    serve.bind("127.0.0.1:0").expect("the server starts")
}

/// Returns a request with one input of floats.
pub(crate) fn request_of(rows: &[f64], columns: usize) -> Value {
    json!({"inputs": [{
        "name": "x",
        "datatype": "FP32",
        "shape": [rows.len() / columns, columns],
        "data": rows,
    }]})
}
