//! Runs the example with a pool of one worker: it trains, serves, and reads a digit.

use std::{
    io::{Read, Write},
    net::TcpStream,
    path::Path,
    time::Duration,
};

use tensord_testkit::cluster::{Cluster, Process};

/// A seven, as the page would send it.
const SEVEN: [[u8; 8]; 8] = [
    [1, 1, 1, 1, 1, 1, 1, 1],
    [1, 1, 1, 1, 1, 1, 1, 1],
    [0, 0, 0, 0, 0, 0, 1, 1],
    [0, 0, 0, 0, 0, 1, 1, 0],
    [0, 0, 0, 0, 1, 1, 0, 0],
    [0, 0, 0, 1, 1, 0, 0, 0],
    [0, 0, 1, 1, 0, 0, 0, 0],
    [0, 0, 1, 1, 0, 0, 0, 0],
];

/// Sends a request to the server and returns the answer.
fn request(port: &str, request: &str) -> String {
    let mut stream = TcpStream::connect(format!("127.0.0.1:{port}")).expect("the server listens");
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream
        .read_to_string(&mut answer)
        .expect("the server answers");
    answer
}

#[test]
fn it_reads_a_digit() {
    let cluster = Cluster::start(&["flex"]);
    let env = [("TENSORD_URL", cluster.client_url())];
    let weights = cluster.path("digits.safetensors");
    let arguments = [
        "--listen",
        "127.0.0.1:0",
        "--weights",
        weights.to_str().unwrap(),
    ];
    let example = Path::new(env!("CARGO_BIN_EXE_serve-digits"));
    let mut process = Process::start_of(example, &arguments, &env, cluster.path("serve.log"));
    let url = |line: &str| {
        let url = line.strip_prefix("draw a digit: http://localhost:")?;
        let (port, token) = url.split_once("/#")?;
        Some((port.to_owned(), token.to_owned()))
    };
    let seen = process.try_wait_for("the URL", Duration::from_secs(180), url);
    let (port, token) = seen.unwrap_or_else(|e| panic!("{e}"));
    let page = request(
        &port,
        "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    );
    assert!(page.contains("<title>Draw a digit</title>"), "{page}");
    let body = serde_json::json!({"inputs": [
        {"name": "image", "datatype": "FP32", "shape": [1, 8, 8], "data": [SEVEN]},
    ]});
    let body = body.to_string();
    let head = format!(
        "POST /v2/models/digits/infer HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
         Authorization: Bearer {token}\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    let answer = request(&port, &(head + &body));
    let (_, body) = answer
        .split_once("\r\n\r\n")
        .expect("the answer has a body");
    let body: serde_json::Value =
        serde_json::from_str(body).unwrap_or_else(|e| panic!("{e}: {answer}"));
    let probabilities: Vec<f64> =
        serde_json::from_value(body["outputs"][0]["data"].clone()).unwrap();
    let best = (0..10).max_by(|a, b| probabilities[*a].total_cmp(&probabilities[*b]));
    assert_eq!(best, Some(7), "{probabilities:?}");
    // The end is orderly.
    process.signal("TERM");
    assert_eq!(process.exit_code(Duration::from_secs(30)), Some(0));
}
