//! Databases in the state directory.

use std::{
    fs::{self, File},
    io,
};

use redb::{Builder, Database, Key, TableDefinition, Value, backends::FileBackend};
use tracing::error;

use super::{StateDir, StateError};

/// Size of the cache of pages. Entries have a few hundred bytes, and are read once, at the start.
const CACHE_BYTES: usize = 1 << 20;

/// The reason why a database could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(crate) struct DatabaseError(Box<redb::Error>);

impl DatabaseError {
    /// Returns whether the content of the file is wrong, rather than the file in use or the disk at
    /// fault.
    pub(crate) fn is_damage(&self) -> bool {
        match &*self.0 {
            redb::Error::Corrupted(_) | redb::Error::UpgradeRequired(_) => true,
            redb::Error::Io(error) => matches!(
                error.kind(),
                io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof
            ),
            _ => false,
        }
    }
}

impl<E: Into<redb::Error>> From<E> for DatabaseError {
    fn from(error: E) -> Self {
        Self(Box::new(error.into()))
    }
}

/// Opens a file of the state directory by `open`. If it is damaged, puts it aside and begins a new one; `loss` is
/// what that means, for the log.
///
/// # Errors
///
/// If the file can neither be opened nor created.
pub(crate) fn open_or_put_aside<T>(
    state: &StateDir,
    file: &str,
    loss: &str,
    open: impl Fn(File) -> Result<T, DatabaseError>,
) -> Result<T, StateError> {
    let path = state.path().join(file);
    let open = || Ok::<_, StateError>(open(state.private_file(file)?));
    let opened = match open()? {
        Err(reason) if reason.is_damage() => {
            let aside = path.with_extension("redb.damaged");
            fs::rename(&path, &aside).map_err(|source| StateError::Io {
                what: "rename",
                path: path.clone(),
                source,
            })?;
            error!(
                "{} cannot be read ({reason}), so {loss}; the file is now {}",
                path.display(),
                aside.display()
            );
            open()?
        }
        opened => opened,
    };
    opened.map_err(|error| StateError::Records {
        path,
        reason: error.to_string(),
    })
}

/// Opens the database in a file, or creates it if the file is empty, with a table.
///
/// # Errors
///
/// If the file cannot be read or written, or is damaged.
pub(crate) fn open<K: Key + 'static, V: Value + 'static>(
    file: File,
    table: TableDefinition<'_, K, V>,
) -> Result<Database, DatabaseError> {
    let mut builder = Builder::new();
    builder.set_cache_size(CACHE_BYTES);
    // Without the check, a damaged file could make later reads panic.
    builder.set_check_integrity_on_open(true);
    let database = builder.create_with_backend(FileBackend::new(file)?)?;
    // Creates the table, which reads would miss otherwise.
    let transaction = database.begin_write()?;
    transaction.open_table(table)?;
    transaction.commit()?;
    Ok(database)
}
