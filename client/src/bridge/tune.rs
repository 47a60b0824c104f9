//! Burn's remote client, set up for a server in the same process.

use burn_std::config::{BurnConfig, RuntimeConfig};

/// Ops that Burn's client sends the bridge at once. Its own default of 4 makes a
/// system call and a wake of some threads for every fourth op, which costs more
/// than all else that is done for them. What a program reads or syncs is sent at
/// once in any case.
const BATCH_OPS: usize = 64;

/// Makes [`BATCH_OPS`] the default of this process, unless the program or its
/// `burn.toml` has set something else, or Burn has been in use for so long that
/// it cannot be changed any more.
pub(super) fn send_in_batches() {
    let config = BurnConfig::from_current_dir().override_from_env();
    let default = BurnConfig::default().remote().flush_threshold;
    if config.remote().flush_threshold != default {
        return;
    }
    // The fields are private, but the configuration is data.
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
    fn a_program_that_set_nothing_sends_in_batches() {
        send_in_batches();
        assert_eq!(BurnConfig::get().remote().flush_threshold, BATCH_OPS);
        // Whoever came first has a say.
        send_in_batches();
        assert!(!BurnConfig::try_set(BurnConfig::default()));
    }
}
