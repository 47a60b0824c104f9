//! `tensord status`: the workers of a pool, and the use of their devices.

use crate::{config::StatusConfig, failure::Failure, status, stdout};

/// Makes one request and prints the reply.
pub(super) async fn run(config: StatusConfig) -> Result<(), Failure> {
    let reply = status::fetch(&config.url).await?;
    let text = match config.json {
        true => status::json(&reply),
        false => status::table(&reply),
    };
    stdout::print(&text)
}
