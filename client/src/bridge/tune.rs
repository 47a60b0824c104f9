//! Sets up Burn's remote client for a server in the same process.

use burn_std::config::{BurnConfig, RuntimeConfig};

/// Ops in a batch that Burn's client sends to the bridge. With Burn's default of 4,
/// every fourth op costs a system call and wakes several threads, which is more than
/// everything else that is done for those ops. Reads and syncs are sent at once in
/// any case.
const BATCH_OPS: usize = 64;

/// Makes [`BATCH_OPS`] the default of this process, unless the program or its
/// `burn.toml` has set another value, or Burn has read its configuration already,
/// which can then not be changed any more.
pub(super) fn set_batch_size() {
    let config = BurnConfig::from_current_dir().override_from_env();
    let default = BurnConfig::default().remote().flush_threshold;
    if config.remote().flush_threshold != default {
        return;
    }
    // The fields are private, but the configuration can be serialized.
    let Ok(mut fields) = serde_json::to_value(&config) else {
        return;
    };
    fields["remote"]["flush_threshold"] = BATCH_OPS.into();
    if let Ok(config) = serde_json::from_value(fields) {
        BurnConfig::try_set(config);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_size_is_the_default_of_an_unconfigured_program() {
        set_batch_size();
        assert_eq!(BurnConfig::get().remote().flush_threshold, BATCH_OPS);
        // The first configuration that was set stays.
        set_batch_size();
        assert!(!BurnConfig::try_set(BurnConfig::default()));
    }
}
