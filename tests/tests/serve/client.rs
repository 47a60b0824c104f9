//! A client of HTTP/1.1 that sends what it is given, also what no library would send.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use serde_json::Value;
use tensord_serve::Server;

/// After this time without a byte, a test fails.
const SILENCE: Duration = Duration::from_secs(60);

/// An answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// Names in small letters.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut headers = self.headers.iter();
        headers
            .find(|(it, _)| it == name)
            .map(|(_, value)| value.as_str())
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("the body is text")
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    /// Returns the text of an error.
    pub(crate) fn error(&self) -> String {
        self.json()["error"]
            .as_str()
            .expect("there is an error")
            .into()
    }
}

/// A connection to a server without TLS.
pub(crate) struct Connection(TcpStream);

impl Connection {
    pub(crate) fn open(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("the server listens");
        stream.set_read_timeout(Some(SILENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self(stream)
    }

    /// Sends bytes as they are.
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).expect("the server reads");
    }

    /// Sends a request with these headers, and returns the answer.
    pub(crate) fn request(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Answer {
        let mut text = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n",
            body.len()
        );
        for (name, value) in headers {
            text += &format!("{name}: {value}\r\n");
        }
        text += "\r\n";
        self.send(&[text.as_bytes(), body].concat());
        self.answer()
    }

    /// Requests an inference by JSON.
    pub(crate) fn infer(&mut self, model: &str, body: &Value) -> Answer {
        self.send(&request_bytes(model, body));
        self.answer()
    }

    /// Waits until the server closes the connection, whatever it sends before. Returns whether it does.
    pub(crate) fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        let read = self.0.read_to_end(&mut rest);
        read.is_ok() || read.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset)
    }

    /// Returns whether the server answers, and does not close the connection.
    pub(crate) fn is_answered(&mut self) -> bool {
        let mut byte = [0];
        self.0.read(&mut byte).is_ok_and(|bytes| bytes > 0)
    }

    /// Reads the next answer.
    pub(crate) fn answer(&mut self) -> Answer {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(self.byte());
        }
        let head = String::from_utf8(head).expect("the head is text");
        let mut lines = head.lines();
        let status = lines
            .next()
            .and_then(|it| it.split(' ').nth(1)?.parse().ok());
        let headers = lines.filter_map(|it| it.split_once(": "));
        let headers: Vec<_> = headers
            .map(|(name, value)| (name.to_ascii_lowercase(), value.into()))
            .collect();
        let mut answer = Answer {
            status: status.expect("the head has a status"),
            headers,
            body: Vec::new(),
        };
        if answer.header("transfer-encoding").is_some() {
            answer.body = self.chunks();
        } else if let Some(length) = answer.header("content-length") {
            answer.body = vec![0; length.parse().expect("the length is a number")];
            self.0
                .read_exact(&mut answer.body)
                .expect("the body is complete");
        }
        answer
    }

    fn chunks(&mut self) -> Vec<u8> {
        let mut body = Vec::new();
        loop {
            let mut line = Vec::new();
            while !line.ends_with(b"\r\n") {
                line.push(self.byte());
            }
            let line = String::from_utf8(line).expect("the length of a chunk is text");
            let length = usize::from_str_radix(line.trim(), 16).expect("the length is a number");
            let mut chunk = vec![0; length + 2];
            self.0
                .read_exact(&mut chunk)
                .expect("the chunk is complete");
            body.extend_from_slice(&chunk[..length]);
            if length == 0 {
                return body;
            }
        }
    }

    fn byte(&mut self) -> u8 {
        let mut byte = [0];
        self.0.read_exact(&mut byte).expect("the server answers");
        byte[0]
    }
}

/// Sends one request on a connection of its own.
pub(crate) fn request(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Answer {
    Connection::open(address).request(method, path, headers, body)
}

/// Sends one request without a body.
pub(crate) fn get(address: SocketAddr, path: &str) -> Answer {
    request(address, "GET", path, &[], b"")
}

/// Requests an inference by JSON, on a connection of its own.
pub(crate) fn infer(address: SocketAddr, model: &str, body: &Value) -> Answer {
    Connection::open(address).infer(model, body)
}

/// Returns the bytes of a request for an inference by JSON.
pub(crate) fn request_bytes(model: &str, body: &Value) -> Vec<u8> {
    let body = body.to_string();
    let length = body.len();
    let head = format!(
        "POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}"
    );
    format!("{head}\r\n\r\n{body}").into_bytes()
}

/// Returns the elements of the first output of an answer in JSON.
#[track_caller]
pub(crate) fn elements(answer: &Answer) -> Vec<f64> {
    assert_eq!(answer.status, 200, "{}", answer.text());
    let data = answer.json()["outputs"][0]["data"].clone();
    serde_json::from_value(data).expect("the elements are numbers")
}

/// Returns the value of a metric of the one model that has it.
pub(crate) fn metric(server: &Server, name: &str) -> f64 {
    let page = get(server.address(), "/metrics");
    let mut lines = page.text().lines().filter(|line| line.starts_with(name));
    let value = lines
        .next()
        .and_then(|line| line.rsplit(' ').next()?.parse().ok());
    value.unwrap_or_else(|| panic!("there is no {name} in\n{}", page.text()))
}
