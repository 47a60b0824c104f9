//! The files of the audit log: the current one, and older ones by number.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::PathBuf,
};

use serde::Serialize;

use super::Settings;

/// Name of the current file; the newest of the older ones is `audit.1.jsonl`.
const CURRENT: &str = "audit.jsonl";

/// The current file, with its size.
pub(super) struct Files {
    settings: Settings,
    current: File,
    size_bytes: u64,
}

impl Files {
    /// Opens the current file to append to it; creates it if missing.
    pub(super) fn open(settings: Settings) -> io::Result<Self> {
        let current = append(&settings.directory.join(CURRENT))?;
        let size_bytes = current.metadata()?.len();
        Ok(Self {
            settings,
            current,
            size_bytes,
        })
    }

    /// Writes `line` as JSON; rotates first if the current file has no room for it.
    pub(super) fn put(&mut self, line: &impl Serialize) -> io::Result<()> {
        let mut text = serde_json::to_vec(line).map_err(io::Error::other)?;
        text.push(b'\n');
        let size = text.len() as u64;
        if self.size_bytes > 0 && self.size_bytes + size > self.settings.file_bytes {
            self.rotate()?;
        }
        // A line is passed to one `write_all`, so that no crash between two calls can leave a
        // part of it.
        self.current.write_all(&text)?;
        self.size_bytes += size;
        Ok(())
    }

    /// Starts a new file. Each older one gets the next number, and the oldest is removed.
    fn rotate(&mut self) -> io::Result<()> {
        for number in (1..self.settings.files).rev() {
            match fs::rename(self.path(number - 1), self.path(number)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        if self.settings.files == 1 {
            fs::remove_file(self.path(0))?;
        }
        self.current = append(&self.path(0))?;
        self.size_bytes = 0;
        Ok(())
    }

    fn path(&self, number: u32) -> PathBuf {
        self.settings.directory.join(match number {
            0 => CURRENT.into(),
            number => format!("audit.{number}.jsonl"),
        })
    }
}

fn append(path: &std::path::Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(0o600).open(path)
}
