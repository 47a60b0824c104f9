//! What happens to requests among others: in batches, when the model fails for one, and when there are too many.

use std::{
    convert::Infallible,
    sync::atomic::{AtomicUsize, Ordering},
    thread::{self, sleep},
    time::{Duration, Instant},
};

use burn::prelude::*;
use serde_json::json;
use tensord_serve::{BATCH, Batching, Limits, Model, Port, Serve};
use tensord_testkit::cluster::Cluster;

use crate::{
    client::{Connection, elements, get, infer, metric, request, request_bytes},
    models::{
        READY_WITHIN, bind, double, picky, request_of, serve, serve_with, slow, without_delay,
    },
};

#[test]
fn requests_are_put_together_and_each_gets_its_own_rows() {
    let cluster = Cluster::start(&["flex"]);
    let batching = Batching {
        max_delay: Duration::from_millis(300),
        ..Batching::default()
    };
    let server = serve(cluster.pool(), [double().batching(batching)]);
    thread::scope(|scope| {
        for client in 0..8 {
            let address = server.address();
            scope.spawn(move || {
                let rows = 1 + client % 3;
                let values: Vec<_> = (0..rows * 4)
                    .map(|it| f64::from(100 * client + it))
                    .collect();
                let answer = infer(address, "double", &request_of(&values, 4));
                let expected: Vec<_> = values.iter().map(|it| 2.0 * it + 1.0).collect();
                assert_eq!(elements(&answer), expected);
            });
        }
    });
    let batches = metric(&server, "tensord_serve_batch_rows_count");
    assert_eq!(metric(&server, "tensord_serve_batch_rows_sum"), 15.0);
    assert!(batches < 8.0, "{batches} batches for 8 requests");
}

#[test]
fn requests_to_a_model_without_batches_are_computed_one_by_one() {
    let cluster = Cluster::start(&["flex"]);
    let (input, output) = (Port::f32("x", [4]), Port::f32("y", [4]));
    let load = |_: &Device| Ok::<_, Infallible>(|x: Tensor<1>| x * 2.0 + 1.0);
    let batching = Batching {
        max_delay: Duration::from_millis(300),
        ..Batching::default()
    };
    let model = Model::new("vector", input, output, load).batching(batching);
    let server = serve(cluster.pool(), [model]);
    thread::scope(|scope| {
        for client in 0..8 {
            let address = server.address();
            scope.spawn(move || {
                let value = f64::from(client);
                let mut body = request_of(&[value; 4], 4);
                body["inputs"][0]["shape"] = json!([4]);
                let answer = infer(address, "vector", &body);
                assert_eq!(elements(&answer), [2.0 * value + 1.0; 4]);
            });
        }
    });
    assert_eq!(metric(&server, "tensord_serve_batch_rows_count"), 8.0);
}

#[test]
fn a_request_for_which_the_model_fails_spoils_no_other() {
    let cluster = Cluster::start(&["flex"]);
    let batching = Batching {
        max_delay: Duration::from_millis(300),
        ..Batching::default()
    };
    let server = serve(cluster.pool(), [picky().batching(batching)]);
    thread::scope(|scope| {
        for (value, status, expected) in [
            (1.0, 200, ""),
            (
                -1.0,
                500,
                "the model returned a NaN or an infinity in output `y`",
            ),
            (-1000.0, 500, "the model panicked: -1000 is too small"),
            (1.0, 200, ""),
        ] {
            let address = server.address();
            scope.spawn(move || {
                let answer = infer(address, "picky", &request_of(&[value], 1));
                assert_eq!(answer.status, status, "{value}: {}", answer.text());
                match status {
                    200 => assert_eq!(elements(&answer), [0.0]),
                    _ => assert_eq!(answer.error(), expected),
                }
            });
        }
    });
}

#[test]
fn a_request_is_not_computed_after_its_deadline_or_its_client() {
    let cluster = Cluster::start(&["flex"]);
    let model = slow(Duration::from_millis(500)).batching(Batching {
        max_size: 1,
        ..without_delay()
    });
    let server = serve(cluster.pool(), [model]);
    let before = metric(&server, "tensord_serve_batch_rows_count");
    let address = server.address();
    thread::scope(|scope| {
        let first = scope.spawn(move || infer(address, "slow", &request_of(&[1.0; 4], 4)));
        sleep(Duration::from_millis(100));
        // Two can be with the replica.
        let second = scope.spawn(move || infer(address, "slow", &request_of(&[2.0; 4], 4)));
        sleep(Duration::from_millis(100));
        let gone = scope.spawn(move || {
            let mut connection = Connection::open(address);
            connection.send(&request_bytes("slow", &request_of(&[3.0; 4], 4)));
            sleep(Duration::from_millis(100));
        });
        let mut late = request_of(&[4.0; 4], 4);
        late["parameters"] = json!({"timeout": 200_000});
        let answer = infer(address, "slow", &late);
        // Refused at once if it was known already how long batches take.
        assert!([429, 504].contains(&answer.status), "{}", answer.text());
        gone.join().unwrap();
        assert_eq!(elements(&first.join().unwrap()), [3.0; 4]);
        assert_eq!(elements(&second.join().unwrap()), [5.0; 4]);
    });
    assert_eq!(
        elements(&infer(address, "slow", &request_of(&[5.0; 4], 4))),
        [11.0; 4]
    );
    assert_eq!(
        metric(&server, "tensord_serve_batch_rows_count") - before,
        3.0
    );
}

#[test]
fn more_than_the_queue_takes_is_refused_until_there_is_room() {
    let cluster = Cluster::start(&["flex"]);
    let model = slow(Duration::from_millis(200)).batching(Batching {
        max_size: 2,
        max_queue: 4,
        ..without_delay()
    });
    let server = serve(cluster.pool(), [model]);
    let address = server.address();
    let (answered, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..32 {
            scope.spawn(|| {
                let answer = infer(address, "slow", &request_of(&[1.0; 4], 4));
                if answer.status == 200 {
                    assert_eq!(elements(&answer), [3.0; 4]);
                    answered.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                assert_eq!(answer.status, 429, "{}", answer.text());
                let seconds = answer.header("retry-after").and_then(|it| it.parse().ok());
                assert!(seconds >= Some(1_u64), "{answer:?}");
                refused.fetch_add(1, Ordering::Relaxed);
            });
        }
    });
    let (answered, refused) = (answered.into_inner(), refused.into_inner());
    assert_eq!(answered + refused, 32);
    assert!(
        answered >= 4 && refused > 0,
        "{answered} answered, {refused} refused"
    );
    assert_eq!(
        elements(&infer(address, "slow", &request_of(&[0.0; 4], 4))),
        [1.0; 4]
    );
}

#[test]
fn a_slow_sender_is_refused_and_holds_up_nobody() {
    let cluster = Cluster::start(&["flex"]);
    let limits = Limits {
        body_timeout: Duration::from_millis(300),
        header_timeout: Duration::from_millis(300),
        connections: 3,
        ..Limits::default()
    };
    let server = serve_with(Serve::new(cluster.pool()).model(double()).limits(limits));
    let address = server.address();
    let mut slow_body = Connection::open(address);
    slow_body.send(
        b"POST /v2/models/double/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
    );
    let mut slow_head = Connection::open(address);
    slow_head.send(b"GET /v2 HT");
    assert_eq!(
        elements(&infer(address, "double", &request_of(&[1.0; 4], 4))),
        [3.0; 4]
    );
    let answer = slow_body.answer();
    assert_eq!(
        (answer.status, answer.error().as_str()),
        (408, "the body of the request did not arrive within 300ms")
    );
    // The places of both are free again.
    let until = Instant::now() + Duration::from_secs(20);
    let mut free = Vec::new();
    while free.len() < 2 && Instant::now() < until {
        let mut connection = Connection::open(address);
        connection.send(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n");
        if connection.is_answered() {
            free.push(connection);
        }
    }
    assert_eq!(free.len(), 2);
}

#[test]
fn metrics_count_requests_by_their_results() {
    let cluster = Cluster::start(&["flex"]);
    let server = serve(cluster.pool(), [double()]);
    let address = server.address();
    for rows in [1, 2] {
        let values = vec![1.0; rows * 4];
        assert_eq!(
            infer(address, "double", &request_of(&values, 4)).status,
            200
        );
    }
    let answer = request(address, "POST", "/v2/models/double/infer", &[], b"{");
    assert_eq!(answer.status, 400);
    let count = |result: &str| {
        let name =
            "tensord_serve_requests_total{model=\"double\",version=\"1\",protocol=\"http\",result=";
        metric(&server, &format!("{name}\"{result}\"}}"))
    };
    assert_eq!((count("ok"), count("invalid")), (2.0, 1.0));
    assert_eq!(metric(&server, "tensord_serve_queue_rows{"), 0.0);
    assert!(get(address, "/metrics").text().ends_with("# EOF\n"));
}

#[test]
fn answers_that_clients_do_not_take_are_bounded() {
    /// More than the buffers of a connection hold.
    const COLUMNS: usize = 8 << 20;
    let cluster = Cluster::start(&["flex"]);
    let output = Port::f32("y", [BATCH, COLUMNS as i64]);
    let load = |_: &Device| Ok::<_, Infallible>(|x: Tensor<2>| x.repeat_dim(1, COLUMNS));
    let wide = Model::new("wide", Port::f32("x", [BATCH, 1]), output, load);
    let wide = wide.batching(Batching {
        max_size: 1,
        ..without_delay()
    });
    let limits = Limits {
        all_body_bytes: COLUMNS * 4 * 3 / 2,
        ..Limits::default()
    };
    let server = serve_with(Serve::new(cluster.pool()).model(wide).limits(limits));
    let mut body = request_of(&[7.0], 1);
    body["parameters"] = json!({"binary_data_output": true});
    let mut first = Connection::open(server.address());
    first.send(&request_bytes("wide", &body));
    assert!(first.is_answered());
    let second = infer(server.address(), "wide", &body);
    let expected = format!(
        "the bodies of all requests and answers would have more than {} bytes; try again in 1s",
        COLUMNS * 6
    );
    assert_eq!((second.status, second.error()), (429, expected));
    assert!(second.header("retry-after").is_some());
    drop(first);
    let until = Instant::now() + READY_WITHIN;
    while infer(server.address(), "wide", &body).status != 200 {
        assert!(
            Instant::now() < until,
            "an answer counts after its client has gone"
        );
        sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_connection_that_does_nothing_is_closed() {
    let cluster = Cluster::start(&["flex"]);
    let limits = Limits {
        header_timeout: Duration::from_millis(300),
        ..Limits::default()
    };
    let server = bind(Serve::new(cluster.pool()).model(double()).limits(limits));
    // Nothing, a part of a request, and parts of the preface of HTTP/2 and of the whole.
    for start in [
        "",
        "GET /v2 HT",
        "PRI * HT",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ] {
        let mut connection = Connection::open(server.address());
        connection.send(start.as_bytes());
        assert!(connection.is_closed(), "after {start:?}");
    }
}

#[test]
fn sizes_that_overflow_are_refused() {
    let cluster = Cluster::start(&["flex"]);
    let input = Port::u8("x", [BATCH, BATCH, BATCH]);
    let output = Port::u8("y", [BATCH, BATCH, BATCH]);
    let same = |_: &Device| Ok::<_, Infallible>(|x: Tensor<3, Int>| x);
    let server = serve(cluster.pool(), [Model::new("same", input, output, same)]);
    let address = server.address();
    let body = |shape: [u64; 3], data: &[u8]| json!({"inputs": [{"name": "x", "datatype": "UINT8", "shape": shape, "data": data}]});
    let answer = infer(address, "same", &body([3, 1 << 62, 0], &[]));
    let expected = format!(
        "input `x` has shape [3, {}, 0]; only tensors with elements are computed",
        1_u64 << 62
    );
    assert_eq!((answer.status, answer.error()), (400, expected));
    assert_eq!(
        elements(&infer(address, "same", &body([1, 2, 1], &[7, 255]))),
        [7.0, 255.0]
    );
}
