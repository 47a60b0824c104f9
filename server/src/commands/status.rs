//! `tensord status`: who is in the pool, and what they do.

use crate::{config::StatusConfig, failure::Failure, status, stdout};

/// Asks once and prints the answer.
pub(super) async fn run(config: StatusConfig) -> Result<(), Failure> {
    let reply = status::fetch(&config.url).await?;
    let text = match config.json {
        true => status::json(&reply),
        false => status::table(&reply),
    };
    stdout::print(&text)
}
