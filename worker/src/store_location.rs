//! Where a snapshot store is.

use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
};

use url::Url;

/// The schemes of object storage: Amazon S3 and whatever has its protocol, Google Cloud Storage, and
/// Azure Blob Storage.
const SCHEMES: [&str; 3] = ["s3", "gs", "az"];

/// Where a worker keeps snapshots, in addition to memory.
///
/// As text, a location is a directory, or the URL of a bucket and a prefix in it:
///
/// ```
/// use tensord_worker::StoreLocation;
///
/// let directory: StoreLocation = "/mnt/snapshots".parse()?;
/// assert_eq!(directory.directory(), Some("/mnt/snapshots".as_ref()));
/// let bucket: StoreLocation = "s3://snapshots/pool".parse()?;
/// assert_eq!(bucket.to_string(), "s3://snapshots/pool");
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreLocation(pub(crate) Kind);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    Directory(PathBuf),
    Bucket(Url),
}

impl StoreLocation {
    /// Returns the directory, if the location is one.
    pub fn directory(&self) -> Option<&Path> {
        match &self.0 {
            Kind::Directory(directory) => Some(directory),
            Kind::Bucket(_) => None,
        }
    }

    /// Returns the URL, if the location is in object storage. It has a bucket, for Azure called container,
    /// as its host, and a prefix as its path.
    pub fn bucket(&self) -> Option<&Url> {
        match &self.0 {
            Kind::Directory(_) => None,
            Kind::Bucket(url) => Some(url),
        }
    }
}

impl From<PathBuf> for StoreLocation {
    fn from(directory: PathBuf) -> Self {
        Self(Kind::Directory(directory))
    }
}

impl FromStr for StoreLocation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err("the directory or URL is empty".into());
        }
        if !text.contains("://") {
            return Ok(PathBuf::from(text).into());
        }
        // The URL is not repeated in errors: it may have a secret in it.
        let url =
            Url::parse(text).map_err(|e| format!("the snapshot store has no valid URL: {e}"))?;
        if !SCHEMES.contains(&url.scheme()) {
            return Err(format!(
                "{}:// is not the URL of a snapshot store; write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, or a directory without a scheme",
                url.scheme()
            ));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err("the URL of a snapshot store has no user or password; set the variables of the storage, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY".into());
        }
        if url.query().is_some() || url.fragment().is_some() || url.port().is_some() {
            return Err("the URL of a snapshot store has a bucket and a prefix only; set the variables of the storage for other options, such as AWS_ENDPOINT and AWS_REGION".into());
        }
        if url.host_str().is_none_or(str::is_empty) {
            return Err(format!(
                "the URL of the snapshot store has no bucket; write {}://BUCKET/PREFIX",
                url.scheme()
            ));
        }
        Ok(Self(Kind::Bucket(url)))
    }
}

impl fmt::Display for StoreLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Directory(directory) => directory.display().fmt(f),
            Kind::Bucket(url) => url.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<StoreLocation, String> {
        text.parse()
    }

    #[test]
    fn directories_have_no_scheme() {
        for text in ["/mnt/store", "store", "s3:store", "a//b"] {
            let location = parse(text).unwrap();
            assert_eq!(location.directory(), Some(Path::new(text)));
            assert_eq!(location.bucket(), None);
            assert_eq!(location.to_string(), text);
        }
    }

    #[test]
    fn buckets_have_urls() {
        for text in ["s3://bucket/a/b", "gs://bucket/a", "az://container/a/b"] {
            let location = parse(text).unwrap();
            assert_eq!(location.bucket().unwrap().as_str(), text);
            assert_eq!(location.directory(), None);
            assert_eq!(location.to_string(), text);
        }
        assert!(parse("s3://bucket").is_ok());
    }

    #[test]
    fn other_urls_are_refused() {
        for (text, part) in [
            ("", "empty"),
            ("http://host/store", "http:// is not the URL"),
            ("file:///store", "a directory without a scheme"),
            ("s3:///prefix", "no bucket"),
            ("s3://key:secret@bucket/a", "AWS_SECRET_ACCESS_KEY"),
            ("s3://bucket/a?token=secret", "AWS_ENDPOINT"),
            ("s3://bucket:9000/a", "AWS_ENDPOINT"),
            ("s3://key:secret@/a", "no valid URL"),
            ("s3://key:secret@ab/cd@bucket/a", "AWS_SECRET_ACCESS_KEY"),
            ("s3://key:se/cret@bucket/a", "no valid URL"),
            ("s 3://bucket", "no valid URL"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
            for secret in ["secret@", "cret@", "token="] {
                assert!(!error.contains(secret), "{error}");
            }
        }
    }
}
