//! When and what a test kills, at random.
//!
//! `TENSORD_KILLS` is how often a test kills, and `TENSORD_SEED` repeats its random numbers. The times still depend on
//! the machine.

use std::{env, time::Duration};

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

/// The random numbers of a test.
pub struct RandomKills {
    /// How often the test kills.
    pub kills: usize,
    random: StdRng,
}

impl RandomKills {
    /// Returns random numbers for a test that kills `kills` times, unless `TENSORD_KILLS` says otherwise. Prints their
    /// seed, which a failed test shows.
    ///
    /// # Panics
    ///
    /// If a variable is not a number.
    pub fn new(kills: usize) -> Self {
        let number = |name: &str| {
            let set = env::var(name).ok()?;
            Some(set.parse::<u64>().expect("the variable is a number"))
        };
        let kills = number("TENSORD_KILLS").map_or(kills, |kills| kills as usize);
        let seed = number("TENSORD_SEED").unwrap_or_else(rand::random);
        println!("TENSORD_KILLS={kills} TENSORD_SEED={seed}");
        Self {
            kills,
            random: StdRng::seed_from_u64(seed),
        }
    }

    /// Returns a time of up to `longest`.
    pub fn time(&mut self, longest: Duration) -> Duration {
        longest.mul_f64(self.random.random())
    }

    /// Returns `count` of the numbers below `of`, all different.
    ///
    /// # Panics
    ///
    /// If there are fewer.
    pub fn choose(&mut self, count: usize, of: usize) -> Vec<usize> {
        let mut all: Vec<_> = (0..of).collect();
        let chosen = (0..count).map(|_| all.remove(self.random.random_range(0..all.len())));
        chosen.collect()
    }
}
