//! Opens the objects of a snapshot store: the files of a directory, or what a bucket has under a prefix.

use std::{
    fs::DirBuilder,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use object_store::{
    ObjectStore, ObjectStoreExt, PutMode, PutPayload, local::LocalFileSystem,
    path::Path as ObjectPath,
};
use tensord_proto::ids::StoreId;
use tokio::task::spawn_blocking;
use url::Url;

use crate::{StoreLocation, store_location::Kind};

/// The object that has the store's id, as 16 hex digits.
pub(super) const ID_OBJECT: &str = "tensord-store-id";

/// Opens the objects in a location. A missing directory is made, for this user alone; a missing bucket is
/// an error.
pub(super) async fn open(location: &StoreLocation) -> Result<Arc<dyn ObjectStore>, String> {
    match &location.0 {
        Kind::Bucket(url) => open_bucket(url),
        Kind::Directory(directory) => {
            let directory = directory.clone();
            let opened = spawn_blocking(move || open_directory(&directory)).await;
            opened.map_err(|e| e.to_string())?
        }
    }
}

fn open_directory(directory: &Path) -> Result<Arc<dyn ObjectStore>, String> {
    let mut builder = DirBuilder::new();
    let made = builder.recursive(true).mode(0o700).create(directory);
    made.map_err(|e| e.to_string())?;
    let opened = LocalFileSystem::new_with_prefix(directory).map_err(|e| e.to_string())?;
    // A snapshot must outlive the host once its client has committed its mark.
    let opened = opened.with_fsync(true).with_automatic_cleanup(true);
    Ok(Arc::new(opened))
}

#[cfg(not(feature = "object-storage"))]
fn open_bucket(_url: &Url) -> Result<Arc<dyn ObjectStore>, String> {
    Err(
        "this build has no object storage; build tensord with the feature `object-storage`, or name a directory"
            .into(),
    )
}

/// Opens what a bucket has under a prefix. Credentials, region, endpoint and such are in variables of the
/// environment, under the names that `object_store` documents.
#[cfg(feature = "object-storage")]
fn open_bucket(url: &Url) -> Result<Arc<dyn ObjectStore>, String> {
    use std::time::Duration;

    use object_store::{
        RetryConfig, aws::AmazonS3Builder, azure::MicrosoftAzureBuilder,
        gcp::GoogleCloudStorageBuilder, prefix::PrefixStore,
    };

    // The HTTP client takes the process's TLS library. An error means that there is one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    // Shorter than `OPEN_DEADLINE`, so that the error has the reason. `StoreLink` tries again by itself.
    let retry = RetryConfig {
        retry_timeout: Duration::from_secs(8),
        ..RetryConfig::default()
    };
    let url_text = url.as_str();
    let bucket: Result<Arc<dyn ObjectStore>, object_store::Error> = match url.scheme() {
        "gs" => GoogleCloudStorageBuilder::from_env()
            .with_url(url_text)
            .with_retry(retry)
            .build()
            .map(|bucket| Arc::new(bucket) as _),
        "az" => MicrosoftAzureBuilder::from_env()
            .with_url(url_text)
            .with_retry(retry)
            .build()
            .map(|bucket| Arc::new(bucket) as _),
        _ => AmazonS3Builder::from_env()
            .with_url(url_text)
            .with_retry(retry)
            .build()
            .map(|bucket| Arc::new(bucket) as _),
    };
    let prefix = ObjectPath::from_url_path(url.path()).map_err(|e| e.to_string())?;
    let objects = PrefixStore::new(bucket.map_err(|e| e.to_string())?, prefix);
    Ok(Arc::new(objects))
}

/// Returns the files and directories that may hold credentials of object storage: those that variables of
/// the environment name, and where the services' own tools keep theirs. Some may be missing.
pub(crate) fn credential_paths() -> Vec<PathBuf> {
    const VARIABLES: [&str; 8] = [
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
        "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AZURE_FEDERATED_TOKEN_FILE",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "GOOGLE_SERVICE_ACCOUNT",
        "GOOGLE_SERVICE_ACCOUNT_PATH",
        "SERVICE_ACCOUNT",
    ];
    const IN_HOME: [&str; 3] = [".aws", ".azure", ".config/gcloud"];
    let named = VARIABLES.into_iter().filter_map(std::env::var_os);
    let home = std::env::home_dir();
    let in_home = IN_HOME
        .into_iter()
        .filter_map(|name| Some(home.as_ref()?.join(name)));
    named.map(PathBuf::from).chain(in_home).collect()
}

/// Returns the store's id. Generates one if the store has none.
pub(super) async fn read_id(objects: &dyn ObjectStore) -> Result<StoreId, String> {
    let path = ObjectPath::from(ID_OBJECT);
    if let Some(id) = find_id(objects, &path).await? {
        return Ok(id);
    }
    let id = StoreId(rand::random_range(1..=u64::MAX));
    let text = PutPayload::from(format!("{id}\n"));
    match objects.put_opts(&path, text, PutMode::Create.into()).await {
        // Another worker may have created it at the same moment: what is there now holds for both.
        Ok(_) | Err(object_store::Error::AlreadyExists { .. }) => {}
        Err(e) => return Err(e.to_string()),
    }
    let found = find_id(objects, &path).await?;
    found.ok_or_else(|| format!("its object {ID_OBJECT} was written and is not there"))
}

/// Returns the id in the object at `path`, if there is one.
async fn find_id(objects: &dyn ObjectStore, path: &ObjectPath) -> Result<Option<StoreId>, String> {
    let found = match objects.get(path).await {
        Ok(found) => found,
        Err(object_store::Error::NotFound { .. }) => return Ok(None),
        Err(e) => return Err(e.to_string()),
    };
    let text = found.bytes().await.map_err(|e| e.to_string())?;
    let text = std::str::from_utf8(&text).unwrap_or_default().trim();
    match u64::from_str_radix(text, 16) {
        Ok(id) if id > 0 && text.len() == 16 => Ok(Some(StoreId(id))),
        _ => Err(format!(
            "its object {ID_OBJECT} has no id in it; if this is not a snapshot store, choose another place, or else delete the object"
        )),
    }
}
