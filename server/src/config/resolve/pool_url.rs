//! Reads the URL of a pool, which must have a token.

use std::{fs, path::PathBuf};

use tensord_transport::{PoolUrl, Secret};

use crate::config::ConfigError;

/// Reads the URL in the file at `path`.
pub(super) fn url_in_file(path: PathBuf) -> Result<PoolUrl, ConfigError> {
    match fs::read_to_string(&path) {
        Ok(text) => pool_url(&Secret::new(text), format!("--url-file {}", path.display())),
        Err(source) => Err(ConfigError::UrlFileUnreadable { path, source }),
    }
}

/// Parses a URL that comes from `origin`.
pub(super) fn pool_url(text: &Secret, origin: String) -> Result<PoolUrl, ConfigError> {
    match text.reveal().parse::<PoolUrl>() {
        Ok(url) if url.token.is_some() => Ok(url),
        Ok(_) => Err(ConfigError::UrlWithoutToken { origin }),
        Err(source) => Err(ConfigError::Url { origin, source }),
    }
}
