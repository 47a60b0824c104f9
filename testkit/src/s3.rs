//! An S3 server on this host: Moto, a program in Python, as a process of its own.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use crate::{cluster::Process, host, resource_usage::is_running};

/// The variable that names the directory with the server's Python modules: what
/// `pip install --target DIR -r .ci/s3-server.txt` has left there.
const MODULES: &str = "TENSORD_S3_SERVER";

/// The bucket that the server has.
const BUCKET: &str = "snapshots";

/// How long the server may take to start: it loads some hundred Python modules.
const START_DEADLINE: Duration = Duration::from_secs(60);

/// A running S3 server with one bucket.
pub struct S3Server {
    process: Process,
    address: SocketAddr,
    endpoint: String,
}

impl S3Server {
    /// Starts a server whose log goes to the file `log`. Returns `None` if this host has none, and prints so.
    ///
    /// # Panics
    ///
    /// If the server does not start, or if there is none and `TENSORD_REQUIRE` names `s3`.
    pub fn start(log: PathBuf) -> Option<Self> {
        let Some(modules) = std::env::var_os(MODULES) else {
            let reason = format!("{MODULES} is not set");
            assert!(!host::is_required("s3"), "no S3 server: {reason}");
            println!("left out, as there is no S3 server: {reason}");
            return None;
        };
        let mut command = Command::new("python3");
        command
            .args(["-m", "moto.server", "-H", "127.0.0.1", "-p", "0"])
            .env("PYTHONPATH", modules);
        let process = Process::spawn(command, log);
        let until = Instant::now() + START_DEADLINE;
        let address = loop {
            let log = process.log();
            let address = log.split_once("Running on http://").and_then(|(_, rest)| {
                // The line is written piece by piece.
                let (address, _) = rest.split_once('\n')?;
                address.trim().parse().ok()
            });
            if let Some(address) = address {
                break address;
            }
            let is_late = Instant::now() > until;
            if is_late || !is_running(process.id()) {
                panic!("the S3 server does not start: {log}");
            }
            sleep(Duration::from_millis(50));
        };
        let server = Self {
            process,
            address,
            endpoint: format!("http://{address}"),
        };
        server.request("PUT", "");
        Some(server)
    }

    /// Returns the URL of a snapshot store.
    pub fn url(&self, prefix: &str) -> String {
        format!("s3://{BUCKET}/{prefix}")
    }

    /// Returns the environment variables of a worker that uses the server. The server takes any key.
    pub fn variables(&self) -> [(&str, &str); 5] {
        [
            ("NO_PROXY", "127.0.0.1"),
            ("AWS_ENDPOINT", &self.endpoint),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_ACCESS_KEY_ID", "test-key"),
            ("AWS_SECRET_ACCESS_KEY", "test-secret"),
        ]
    }

    /// Returns the number of objects in the bucket.
    ///
    /// # Panics
    ///
    /// If the server does not respond.
    pub fn objects(&self) -> usize {
        self.list().matches("<Key>").count()
    }

    /// Returns the number of objects in the bucket that were uploaded in `parts` parts.
    ///
    /// # Panics
    ///
    /// If the server does not respond.
    pub fn objects_in_parts(&self, parts: usize) -> usize {
        // The tag of such an object ends with the number.
        let end = format!("-{parts}\"</ETag>");
        self.list().matches(&end).count()
    }

    /// Returns the number of uploads in parts that are not complete.
    ///
    /// # Panics
    ///
    /// If the server does not respond.
    pub fn incomplete_uploads(&self) -> usize {
        self.request("GET", "?uploads")
            .matches("<UploadId>")
            .count()
    }

    fn list(&self) -> String {
        self.request("GET", "?list-type=2")
    }

    /// Stops the server, with all that it has.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Sends a request for the bucket and returns the response.
    fn request(&self, method: &str, query: &str) -> String {
        let mut stream = TcpStream::connect(self.address).expect("the server accepts connections");
        let limited = stream.set_read_timeout(Some(START_DEADLINE));
        limited.expect("the deadline is not zero");
        let Self { address, .. } = self;
        let request = format!(
            "{method} /{BUCKET}{query} HTTP/1.1\r\nHost: {address}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        );
        stream
            .write_all(request.as_bytes())
            .expect("the server reads");
        let mut response = String::new();
        let read = stream.read_to_string(&mut response);
        read.expect("the server responds in time, with text");
        let status = response.split(' ').nth(1);
        assert_eq!(status, Some("200"), "{response}");
        response
    }
}
