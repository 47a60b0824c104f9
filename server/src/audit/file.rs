//! The files of the audit log: the current one, and older ones by number.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
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
    /// Whether the last line may have no end: a write failed, or the host lost power.
    is_torn: bool,
}

impl Files {
    /// Opens the current file to append to it; creates it if missing.
    pub(super) fn open(settings: Settings) -> io::Result<Self> {
        let path = settings.directory.join(CURRENT);
        let current = append(&path)?;
        let size_bytes = current.metadata()?.len();
        Ok(Self {
            is_torn: size_bytes > 0 && !ends_with_line(&path)?,
            settings,
            current,
            size_bytes,
        })
    }

    /// Writes `line` as JSON; rotates first if the current file has no room for it.
    pub(super) fn put(&mut self, line: &impl Serialize) -> io::Result<()> {
        let mut text = serde_json::to_vec(line).map_err(io::Error::other)?;
        text.push(b'\n');
        if self.size_bytes > 0 && self.size_bytes + text.len() as u64 > self.settings.file_bytes {
            self.rotate()?;
        }
        if self.is_torn {
            text.insert(0, b'\n');
        }
        // A line is passed to one `write_all`, so that no crash between two calls can leave a
        // part of it.
        if let Err(e) = self.current.write_all(&text) {
            self.size_bytes = self.current.metadata()?.len();
            self.is_torn = true;
            return Err(e);
        }
        self.size_bytes += text.len() as u64;
        self.is_torn = false;
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
        (self.size_bytes, self.is_torn) = (0, false);
        Ok(())
    }

    fn path(&self, number: u32) -> PathBuf {
        self.settings.directory.join(match number {
            0 => CURRENT.into(),
            number => format!("audit.{number}.jsonl"),
        })
    }
}

/// Returns whether a file that is not empty ends with the end of a line.
fn ends_with_line(path: &Path) -> io::Result<bool> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::End(-1))?;
    let mut last = [0];
    file.read_exact(&mut last)?;
    Ok(last == [b'\n'])
}

fn append(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(0o600).open(path)
}
