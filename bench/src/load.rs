//! A client that requests inferences at a given rate, in a process of its own: this binary again, started by a hidden
//! command.
//!
//! The load is open: requests are sent at their times, whether or not earlier ones were answered, as the clients of
//! a service do. A latency begins at the time at which the request was to be sent, so that a server which holds up its
//! clients does not look fast. A rate of 0 is one request after the other instead.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    sync::mpsc,
    task::JoinSet,
};

use crate::{
    models::{PIXELS, SIDE},
    process::{announce, start_server},
    stats::quantile,
};

/// Most connections at a time: nearly as many as a server takes, and more than wait in the queue of a model, so that
/// requests are refused there if there are too many.
const CONNECTIONS: usize = 1000;

/// After this time, a request counts as failed.
const TIMEOUT: Duration = Duration::from_secs(20);

/// What to request.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Load {
    pub(crate) address: SocketAddr,
    pub(crate) model: String,
    /// The rows of each request.
    pub(crate) rows: usize,
    /// Requests per second; 0 for one after the other.
    pub(crate) rate: f64,
    pub(crate) seconds: f64,
    /// The time that the client waits, of which the server knows.
    pub(crate) deadline_ms: u64,
}

/// What became of the requests.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct LoadResult {
    /// Answered within their deadlines.
    pub(crate) answered: usize,
    /// Refused with 429, as there is too much to do.
    pub(crate) refused: usize,
    /// Answered after the deadline, or with the error that it has passed.
    pub(crate) late: usize,
    /// Answered with another error, or not at all.
    pub(crate) broken: usize,
    /// Not sent, as all connections had requests without an answer.
    pub(crate) unsent: usize,
    /// Requests answered within their deadlines, per second.
    pub(crate) per_s: f64,
    /// The latencies of those: half of them, and 99 of 100, are below.
    pub(crate) median_ms: f64,
    pub(crate) p99_ms: f64,
}

impl LoadResult {
    /// Returns how many requests were sent and not refused.
    pub(crate) fn accepted(&self) -> usize {
        self.answered + self.failed()
    }

    /// Returns how many of those have no answer in time.
    pub(crate) fn failed(&self) -> usize {
        self.late + self.broken
    }

    /// Returns the part of those with an answer in time.
    pub(crate) fn in_time(&self) -> f64 {
        self.answered as f64 / self.accepted() as f64
    }
}

/// Runs a load in a process of its own.
///
/// # Errors
///
/// If the process fails.
pub(crate) fn run(load: &Load, dir: &TempDir) -> Result<LoadResult> {
    let task = serde_json::to_string(load)?;
    let (_process, result) = start_server(&["load", &task], dir)?;
    Ok(result)
}

/// Sends the requests, and announces what became of them.
///
/// # Errors
///
/// If the server cannot be reached.
pub(crate) fn serve(task: &str, runtime: &tokio::runtime::Runtime) -> Result<()> {
    let load: Load = serde_json::from_str(task).context("the task is malformed")?;
    announce(&runtime.block_on(send(load))?)
}

/// The bytes of a request, with a body in which the pixels are binary.
fn request(load: &Load) -> Vec<u8> {
    let pixels = (0..load.rows * PIXELS).map(|it| (it % 251) as f32 / 251.0);
    let pixels: Vec<u8> = pixels.flat_map(f32::to_le_bytes).collect();
    let head = json!({
        "parameters": {"timeout": load.deadline_ms * 1000, "binary_data_output": true},
        "inputs": [{
            "name": "image",
            "datatype": "FP32",
            "shape": [load.rows, SIDE, SIDE],
            "parameters": {"binary_data_size": pixels.len()},
        }],
    })
    .to_string();
    let (model, json_length) = (&load.model, head.len());
    let length = json_length + pixels.len();
    let http = format!(
        "POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\
         Inference-Header-Content-Length: {json_length}\r\n\r\n{head}"
    );
    [http.as_bytes(), &pixels].concat()
}

/// What became of a request.
enum Outcome {
    /// After so many ms.
    Answered(f64),
    Refused,
    Late,
    Broken,
    Unsent,
}

async fn send(load: Load) -> Result<LoadResult> {
    let request: Arc<[u8]> = request(&load).into();
    let (free, mut idle) = mpsc::channel(CONNECTIONS);
    for _ in 0..match load.rate > 0.0 {
        true => CONNECTIONS,
        false => 1,
    } {
        let stream = connect(load.address).await;
        free.send(stream.context("cannot connect to the server")?)
            .await?;
    }
    let started = Instant::now();
    let mut requests = JoinSet::new();
    let mut outcomes = Vec::new();
    for number in 0_u32.. {
        let due = match load.rate > 0.0 {
            true => started + Duration::from_secs_f64(f64::from(number) / load.rate),
            false => Instant::now(),
        };
        if due.duration_since(started).as_secs_f64() >= load.seconds {
            break;
        }
        tokio::time::sleep_until(due.into()).await;
        let waits = load.rate == 0.0;
        let stream = match idle.try_recv() {
            Ok(stream) => stream,
            Err(_) if waits => idle.recv().await.context("there is no connection")?,
            Err(_) => {
                outcomes.push(Outcome::Unsent);
                continue;
            }
        };
        let due = if waits { Instant::now() } else { due };
        requests.spawn(send_one(
            load.address,
            stream,
            request.clone(),
            free.clone(),
            due,
            load.deadline_ms,
        ));
        while let Some(outcome) = requests.try_join_next() {
            outcomes.push(outcome?);
        }
    }
    while let Some(outcome) = requests.join_next().await {
        outcomes.push(outcome?);
    }
    Ok(summary(&outcomes, load.seconds))
}

async fn connect(address: SocketAddr) -> Result<BufReader<TcpStream>> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(BufReader::new(stream))
}

async fn send_one(
    address: SocketAddr,
    mut stream: BufReader<TcpStream>,
    request: Arc<[u8]>,
    free: mpsc::Sender<BufReader<TcpStream>>,
    due: Instant,
    deadline_ms: u64,
) -> Outcome {
    let answered = tokio::time::timeout(TIMEOUT, exchange(&mut stream, &request)).await;
    let ms = due.elapsed().as_secs_f64() * 1e3;
    let Ok(Ok(status)) = answered else {
        // Another connection takes the place of this one.
        if let Ok(stream) = connect(address).await {
            let _ = free.send(stream).await;
        }
        return Outcome::Broken;
    };
    // There is room, as it was taken from there.
    let _ = free.send(stream).await;
    match status {
        200 if ms <= deadline_ms as f64 => Outcome::Answered(ms),
        200 | 504 => Outcome::Late,
        429 => Outcome::Refused,
        _ => Outcome::Broken,
    }
}

/// Sends a request and returns the status of its answer, which is read whole.
async fn exchange(stream: &mut BufReader<TcpStream>, request: &[u8]) -> Result<u16> {
    stream.write_all(request).await?;
    let (mut status, mut length) = (None, 0);
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).await?;
        let line = line.trim_end();
        if line.is_empty() {
            break;
        }
        if status.is_none() {
            status = line.split(' ').nth(1).and_then(|it| it.parse().ok());
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse()?;
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await?;
    match status {
        Some(status) => Ok(status),
        None => bail!("the answer has no status"),
    }
}

fn summary(outcomes: &[Outcome], seconds: f64) -> LoadResult {
    let mut result = LoadResult::default();
    let mut latencies = Vec::new();
    for outcome in outcomes {
        match outcome {
            Outcome::Answered(ms) => latencies.push(*ms),
            Outcome::Refused => result.refused += 1,
            Outcome::Late => result.late += 1,
            Outcome::Broken => result.broken += 1,
            Outcome::Unsent => result.unsent += 1,
        }
    }
    latencies.sort_by(f64::total_cmp);
    result.answered = latencies.len();
    result.per_s = latencies.len() as f64 / seconds;
    if !latencies.is_empty() {
        result.median_ms = quantile(&latencies, 0.5);
        result.p99_ms = quantile(&latencies, 0.99);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_answers_in_time_count() {
        let outcomes = [
            Outcome::Answered(3.0),
            Outcome::Refused,
            Outcome::Answered(1.0),
            Outcome::Broken,
            Outcome::Late,
            Outcome::Unsent,
        ];
        let found = summary(&outcomes, 2.0);
        assert_eq!((found.answered, found.refused), (2, 1));
        assert_eq!((found.failed(), found.unsent), (2, 1));
        assert_eq!((found.accepted(), found.in_time()), (4, 0.5));
        assert_eq!((found.per_s, found.median_ms), (1.0, 2.0));
        assert_eq!(summary(&[], 1.0).per_s, 0.0);
    }

    #[test]
    fn requests_have_the_length_that_they_name() {
        let load = Load {
            address: ([127, 0, 0, 1], 1).into(),
            model: "cnn".into(),
            rows: 2,
            rate: 1.0,
            seconds: 1.0,
            deadline_ms: 500,
        };
        let bytes = request(&load);
        let end = bytes.windows(4).position(|it| it == b"\r\n\r\n").unwrap() + 4;
        let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
        let length = |name: &str| -> usize {
            let line = head
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .unwrap();
            line.trim_start_matches(": ").parse().unwrap()
        };
        assert_eq!(bytes.len() - end, length("Content-Length"));
        let json = &bytes[end..end + length("Inference-Header-Content-Length")];
        let json: serde_json::Value = serde_json::from_slice(json).unwrap();
        assert_eq!(json["inputs"][0]["shape"], json!([2, SIDE, SIDE]));
        assert_eq!(json["parameters"]["timeout"], 500_000);
    }
}
