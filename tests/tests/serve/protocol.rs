//! What a client sees of the protocol.

use serde_json::json;
use tensord_serve::{Limits, Model, Serve, Server};
use tensord_testkit::cluster::Cluster;

use crate::{
    client::{Answer, elements, get, infer, request},
    models::{READY_WITHIN, double, request_of, serve, serve_with, several},
};

/// A server and the processes that it needs.
struct Setup {
    server: Server,
    _cluster: Cluster,
}

impl Setup {
    fn of(models: impl IntoIterator<Item = Model>) -> Self {
        let cluster = Cluster::start(&["flex*3"]);
        Self {
            server: serve(cluster.pool(), models),
            _cluster: cluster,
        }
    }

    fn get(&self, path: &str) -> Answer {
        get(self.server.address(), path)
    }

    fn post(&self, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        request(self.server.address(), "POST", path, headers, body)
    }

    /// Asserts that a request has an error.
    #[track_caller]
    fn check_error(&self, path: &str, body: &str, status: u16, expected: &str) {
        let answer = self.post(path, &[], body.as_bytes());
        assert_eq!(
            (answer.status, answer.error().as_str()),
            (status, expected),
            "{path} {body}"
        );
    }
}

#[test]
fn server_and_models_describe_themselves() {
    let setup = Setup::of([double(), double().version("10"), double().version("9")]);
    assert_eq!(setup.get("/v2/health/live").status, 200);
    assert_eq!(setup.get("/v2/health/ready").status, 200);
    let server = setup.get("/v2").json();
    assert_eq!(server["name"], "tensord-serve");
    assert_eq!(server["extensions"], json!(["binary_tensor_data"]));
    let model = setup.get("/v2/models/double").json();
    let expected = json!({
        "name": "double",
        "versions": ["1", "9", "10"],
        "platform": "burn",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}],
    });
    assert_eq!(model, expected);
    assert_eq!(setup.get("/v2/models/double/versions/9/ready").status, 200);
    let answer = infer(setup.server.address(), "double", &request_of(&[1.0; 4], 4));
    assert_eq!(answer.json()["model_version"], "10");
    assert_eq!(elements(&answer), [3.0; 4]);
}

#[test]
fn tensors_travel_as_json_or_as_bytes() {
    let setup = Setup::of([several()]);
    let inputs = json!([
        {"name": "mask", "datatype": "BOOL", "shape": [2, 3], "data": [true, true, false, false, false, true]},
        {"name": "floats", "datatype": "FP32", "shape": [2, 3], "data": [[0.5, 1.5, 9.0], [9.0, 9.0, 2.0]]},
        {"name": "integers", "datatype": "INT64", "shape": [2, 3], "data": [2, 4, 9, 9, 9, -3]},
    ]);
    let all = json!({"id": "seven", "inputs": inputs});
    let answer = infer(setup.server.address(), "several", &all).json();
    let expected = json!({
        "model_name": "several",
        "model_version": "1",
        "id": "seven",
        "outputs": [
            {"name": "sum", "datatype": "FP32", "shape": [2, 1], "data": [7.0, -6.0]},
            {"name": "next", "datatype": "INT64", "shape": [2, 3], "data": [3, 5, 10, 10, 10, -2]},
        ],
    });
    assert_eq!(answer, expected);

    // The same with bytes, and one output of two.
    let floats: Vec<u8> = [0.5_f32, 1.5, 9.0]
        .iter()
        .flat_map(|it| it.to_le_bytes())
        .collect();
    let integers: Vec<u8> = [2_i64, 4, 9]
        .iter()
        .flat_map(|it| it.to_le_bytes())
        .collect();
    let head = json!({
        "inputs": [
            {"name": "floats", "datatype": "FP32", "shape": [1, 3], "parameters": {"binary_data_size": 12}},
            {"name": "mask", "datatype": "BOOL", "shape": [1, 3], "data": [true, true, false]},
            {"name": "integers", "datatype": "INT64", "shape": [1, 3], "parameters": {"binary_data_size": 24}},
        ],
        "outputs": [{"name": "sum", "parameters": {"binary_data": true}}],
    })
    .to_string();
    let body = [head.as_bytes(), &floats, &integers].concat();
    let length = head.len().to_string();
    let headers = [("Inference-Header-Content-Length", length.as_str())];
    let answer = setup.post("/v2/models/several/infer", &headers, &body);
    assert_eq!(
        answer.status,
        200,
        "{}",
        String::from_utf8_lossy(&answer.body)
    );
    let length: usize = answer
        .header("inference-header-content-length")
        .unwrap()
        .parse()
        .unwrap();
    let (head, bytes) = answer.body.split_at(length);
    let head: serde_json::Value = serde_json::from_slice(head).unwrap();
    assert_eq!(head["outputs"][0]["parameters"]["binary_data_size"], 4);
    assert_eq!(bytes, 7.0_f32.to_le_bytes());
}

#[test]
fn what_does_not_fit_the_model_is_refused_with_what_does() {
    let setup = Setup::of([double(), several()]);
    let body = request_of(&[1.0; 4], 4).to_string();
    setup.check_error(
        "/v2/models/doubel/infer",
        &body,
        404,
        "there is no model `doubel`; there are `double`, `several`",
    );
    setup.check_error(
        "/v2/models/double/versions/2/infer",
        &body,
        404,
        "model `double` has no version `2`; there are `1`",
    );
    let infer = "/v2/models/double/infer";
    let wrong = |from: &str, to: &str| body.replace(from, to);
    setup.check_error(
        infer,
        &wrong("\"x\"", "\"z\""),
        400,
        "the request lacks input `x`; model `double` takes `x`",
    );
    setup.check_error(
        infer,
        &wrong("FP32", "INT32").replace("1.0", "1"),
        400,
        "input `x` has type INT32; it must be FP32",
    );
    setup.check_error(
        infer,
        &wrong("[1,4]", "[2,2]"),
        400,
        "input `x` has shape [2, 2]; it must be [-1, 4], where -1 is any size",
    );
    let many = request_of(&[1.0; 33 * 4], 4).to_string();
    setup.check_error(
        infer,
        &many,
        400,
        "the request has 33 rows, and model `double` takes 1 to 32",
    );
    let output = wrong("\"inputs\"", "\"outputs\":[{\"name\":\"z\"}],\"inputs\"");
    setup.check_error(
        infer,
        &output,
        400,
        "model `double` has no output `z`; it has `y`",
    );
    let answer = setup.get("/v2/models/double/infer");
    assert_eq!(answer.status, 405, "{}", answer.text());
    let answer = setup.get("/v3");
    assert_eq!(
        (answer.status, answer.error().as_str()),
        (404, "there is no `/v3`; models are at /v2/models/<name>")
    );
    // The server goes on.
    assert_eq!(
        elements(&crate::client::infer(
            setup.server.address(),
            "double",
            &request_of(&[0.0; 4], 4)
        )),
        [1.0; 4]
    );
}

#[test]
fn bodies_may_be_compressed_and_are_bounded_after_that() {
    let cluster = Cluster::start(&["flex"]);
    let limits = Limits {
        body_bytes: 10_000,
        ..Limits::default()
    };
    let server = serve_with(Serve::new(cluster.pool()).model(double()).limits(limits));
    let post = |body: &[u8], headers: &[(&str, &str)]| {
        request(
            server.address(),
            "POST",
            "/v2/models/double/infer",
            headers,
            body,
        )
    };
    let plain = request_of(&[2.0; 4], 4).to_string();
    let gzip = [("Content-Encoding", "gzip")];
    assert_eq!(
        elements(&post(&compressed(plain.as_bytes()), &gzip)),
        [5.0; 4]
    );
    let answer = post(plain.as_bytes(), &[("Accept-Encoding", "gzip")]);
    assert_eq!(answer.header("content-encoding"), Some("gzip"));
    let padded = format!("{plain}{}", " ".repeat(1_000_000));
    for answer in [
        post(padded.as_bytes(), &[]),
        post(&compressed(padded.as_bytes()), &gzip),
    ] {
        let expected =
            "the body of the request has more than the 10000 bytes that the server takes";
        assert_eq!((answer.status, answer.error().as_str()), (413, expected));
    }
    let answer = post(b"not gzip", &gzip);
    assert_eq!(answer.status, 400, "{}", answer.text());
}

fn compressed(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write as _;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn a_client_without_the_token_learns_only_whether_the_server_is_ready() {
    let cluster = Cluster::start(&["flex"]);
    let serve = Serve::new(cluster.pool())
        .model(double())
        .token("open-sesame");
    let server = serve.plaintext_on_loopback().bind("127.0.0.1:0").unwrap();
    assert!(server.wait_ready(READY_WITHIN));
    assert_eq!(get(server.address(), "/v2/health/ready").status, 200);
    for path in ["/v2", "/v2/models/double", "/v2/models/none", "/metrics"] {
        let answer = get(server.address(), path);
        assert_eq!(answer.status, 401, "{path}");
        assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
    }
    for (token, status) in [("Bearer open-sesame", 200), ("Bearer other", 401)] {
        let headers = [("Authorization", token)];
        let answer = request(server.address(), "GET", "/metrics", &headers, b"");
        assert_eq!(answer.status, status);
        assert!(
            status == 401
                || answer
                    .text()
                    .contains("tensord_serve_replicas{model=\"double\",version=\"1\"} 1")
        );
    }
}

#[test]
fn what_is_not_safe_is_refused() {
    let cluster = Cluster::start(&["flex"]);
    let check = |serve: Serve, expected: &str| {
        let error = serve.bind("0.0.0.0:0").expect_err(expected);
        assert!(error.to_string().starts_with(expected), "{error}");
    };
    let serve = || Serve::new(cluster.pool());
    check(serve(), "the server has no model");
    check(
        serve().model(double()).plaintext_on_loopback(),
        "refused to serve without TLS on 0.0.0.0:0",
    );
    check(
        serve().model(double()).without_token_on_loopback(),
        "refused to serve without a token on 0.0.0.0:0",
    );
    check(
        serve().model(double()).model(double()),
        "there are two models `double` of version `1`",
    );
    check(
        serve().model(double().version("a/b")),
        "model `double`, version `a/b`",
    );
    check(
        serve().model(double()).certificate("/none", "/none"),
        "cannot read /none",
    );
}
