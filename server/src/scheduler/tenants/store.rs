//! Where the tenants of a pool are kept.

use std::{
    collections::BTreeMap,
    fmt,
    fs::File,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};

use super::registry::Tenant;
use crate::state::{
    StateDir, StateError,
    database::{self, DatabaseError},
};

/// The tenants, as JSON, by name.
const TENANTS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("tenants");

/// Name of the file in the state directory.
const FILE: &str = "tenants.redb";

/// Where the tenants of a pool are kept.
pub(crate) trait TenantStore: fmt::Debug + Send + Sync {
    /// Returns all tenants, by name.
    ///
    /// # Errors
    ///
    /// If they cannot be read. Nothing is changed.
    fn load(&self) -> Result<BTreeMap<String, Tenant>, StateError>;

    /// Writes some tenants, and removes those that are `None`: all of these, or none. When this returns,
    /// they are on disk.
    ///
    /// # Errors
    ///
    /// If they cannot be written.
    fn write(&self, changes: &BTreeMap<String, Option<Tenant>>) -> Result<(), StateError>;
}

/// Tenants in a file of the state directory.
pub(crate) struct RedbTenants {
    path: PathBuf,
    /// `None` after an error: redb refuses all writes until the file is opened again.
    database: Mutex<Option<Database>>,
}

impl RedbTenants {
    /// Opens the file in a state directory, or creates it.
    ///
    /// # Errors
    ///
    /// If it cannot be opened, or is damaged. Guarantees and limits are not dropped silently.
    pub(crate) fn open(state: &StateDir) -> Result<Self, StateError> {
        let path = state.path().join(FILE);
        let file = state.private_file(FILE)?;
        let database = database::open(file, TENANTS).map_err(|error| unreadable(&path, &error))?;
        let database = Mutex::new(Some(database));
        Ok(Self { path, database })
    }

    /// Runs `access` on the database.
    fn with_database<T>(
        &self,
        access: impl FnOnce(&Database) -> Result<T, DatabaseError>,
    ) -> Result<T, DatabaseError> {
        // A panic leaves `None`, or a database that has undone what was not committed.
        let known = &mut *self.database.lock().unwrap_or_else(PoisonError::into_inner);
        let database = match known.take() {
            Some(database) => database,
            None => {
                let file = File::options().read(true).write(true).open(&self.path)?;
                database::open(file, TENANTS)?
            }
        };
        let result = access(&database)?;
        *known = Some(database);
        Ok(result)
    }
}

fn entries(database: &Database) -> Result<Vec<(String, Vec<u8>)>, DatabaseError> {
    let table = database.begin_read()?.open_table(TENANTS)?;
    let mut entries = Vec::new();
    for entry in table.iter()? {
        let (name, bytes) = entry?;
        entries.push((name.value().to_owned(), bytes.value().to_vec()));
    }
    Ok(entries)
}

fn commit(
    database: &Database,
    changes: &BTreeMap<String, Option<Vec<u8>>>,
) -> Result<(), DatabaseError> {
    let transaction = database.begin_write()?;
    {
        let mut table = transaction.open_table(TENANTS)?;
        for (name, bytes) in changes {
            match bytes {
                Some(bytes) => table.insert(&**name, &**bytes)?,
                None => table.remove(&**name)?,
            };
        }
    }
    transaction.commit()?;
    Ok(())
}

fn unreadable(path: &Path, error: &DatabaseError) -> StateError {
    let (path, reason) = (path.to_owned(), error.to_string());
    match error.is_damage() {
        true => StateError::DamagedTenants { path, reason },
        false => StateError::Records { path, reason },
    }
}

impl TenantStore for RedbTenants {
    fn load(&self) -> Result<BTreeMap<String, Tenant>, StateError> {
        let damaged = |reason: String| StateError::DamagedTenants {
            path: self.path.clone(),
            reason,
        };
        let entries = self.with_database(entries);
        let entries = entries.map_err(|error| unreadable(&self.path, &error))?;
        let parsed = entries.into_iter().map(|(name, bytes)| {
            let tenant = serde_json::from_slice(&bytes);
            let tenant =
                tenant.map_err(|e| damaged(format!("tenant {name:?} cannot be parsed: {e}")));
            Ok((name, tenant?))
        });
        parsed.collect()
    }

    fn write(&self, changes: &BTreeMap<String, Option<Tenant>>) -> Result<(), StateError> {
        let unwritten = |reason: String| StateError::Unwritten {
            path: self.path.clone(),
            reason,
        };
        let encoded = changes.iter().map(|(name, tenant)| {
            let bytes = tenant.as_ref().map(serde_json::to_vec).transpose();
            Ok((name.clone(), bytes.map_err(|e| unwritten(e.to_string()))?))
        });
        let encoded = encoded.collect::<Result<_, StateError>>()?;
        let written = self.with_database(|database| commit(database, &encoded));
        written.map_err(|e| unwritten(e.to_string()))
    }
}

impl fmt::Debug for RedbTenants {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedbTenants")
            .field("path", &self.path)
            .finish()
    }
}
