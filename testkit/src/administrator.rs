//! An administrator of a pool, who runs `tensord`.

use std::{
    thread::sleep,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{cluster::Cluster, host};

/// How long the pool may take to do what an administrator waits for.
const DEADLINE: Duration = Duration::from_secs(30);

/// An administrator of a cluster's pool.
pub struct Administrator {
    access: Access,
}

/// Where the commands get a URL with a token.
enum Access {
    /// From the scheduler's state directory.
    State(String),
    /// From `TENSORD_URL`.
    Url(String),
}

impl Administrator {
    /// Returns the administrator of the pool of `cluster`.
    ///
    /// # Panics
    ///
    /// If the path of the scheduler's state is no text.
    pub fn of(cluster: &Cluster) -> Self {
        let state = cluster.path("state").into_os_string();
        let state = state.into_string().expect("temporary paths are text");
        Self::with_state(state)
    }

    /// Returns the administrator of the pool whose scheduler has this state directory.
    pub fn with_state(state: String) -> Self {
        let access = Access::State(state);
        Self { access }
    }

    /// Returns somebody who runs the commands of an administrator with this URL.
    pub fn with_url(url: &str) -> Self {
        let access = Access::Url(url.into());
        Self { access }
    }

    /// Runs a command. Returns its output.
    ///
    /// # Errors
    ///
    /// What the command prints as its error.
    pub fn try_run(&self, args: &[&str]) -> Result<String, String> {
        let output = match &self.access {
            Access::State(state) => host::run(&[args, &["--state", state]].concat(), &[]),
            Access::Url(url) => host::run(args, &[("TENSORD_URL", url)]),
        };
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match output.status.success() {
            true => Ok(text(&output.stdout)),
            false => Err(text(&output.stderr)),
        }
    }

    /// Runs a command that must succeed, and returns its output.
    ///
    /// # Panics
    ///
    /// If it fails.
    pub fn run(&self, args: &[&str]) -> String {
        let ran = self.try_run(args);
        ran.unwrap_or_else(|error| panic!("{args:?}: {error}"))
    }

    /// Runs `tensord token create` with `args`. Returns the URL with the token.
    ///
    /// # Panics
    ///
    /// If the command fails, or prints no URL in quotes.
    pub fn create_token(&self, args: &[&str]) -> String {
        let made = self.run(&[&["token", "create"], args].concat());
        let url = made.split('\'').nth(1);
        url.expect("a URL in quotes").to_owned()
    }

    /// Returns the leases, as `tensord lease list` shows them.
    ///
    /// # Panics
    ///
    /// If the command fails, or prints something else.
    pub fn leases(&self) -> Vec<Value> {
        let listed = self.run(&["lease", "list", "--json"]);
        let listed: Value = serde_json::from_str(&listed).unwrap();
        listed["leases"].as_array().unwrap().clone()
    }

    /// Runs `tensord lease`. Returns its output if it succeeds.
    pub fn command(&self, args: &[&str]) -> Option<String> {
        self.try_run(&[&["lease"], args].concat()).ok()
    }

    /// Returns the number of workers that have the snapshots of the first lease, which is suspended.
    ///
    /// # Panics
    ///
    /// If there is no such lease.
    pub fn holders(&self) -> usize {
        let leases = self.leases();
        leases[0]["suspended_at"].as_array().unwrap().len()
    }

    /// Returns the id of a lease that has devices, or of one that was suspended and not resumed.
    fn find_lease(&self, is_running: bool) -> Option<String> {
        let is_wanted = |lease: &&Value| match is_running {
            true => !lease["places"].as_array().unwrap().is_empty(),
            false => {
                let holders = lease["suspended_at"].as_array().unwrap();
                !holders.is_empty() && lease["resumed"] == false
            }
        };
        let leases = self.leases();
        let id = leases.iter().find(is_wanted)?["lease"].as_str();
        id.map(str::to_owned)
    }

    /// Waits until `holds` returns true. `what` is what is waited for.
    ///
    /// # Panics
    ///
    /// If that takes too long.
    pub fn wait(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let until = Instant::now() + DEADLINE;
        while !holds() {
            assert!(
                Instant::now() < until,
                "waited too long for {what}: {:?}",
                self.leases()
            );
            sleep(Duration::from_millis(20));
        }
    }

    /// Suspends the lease that runs, as soon as a worker has its snapshots. Returns its id.
    ///
    /// # Panics
    ///
    /// If no lease runs, or it cannot be suspended for long.
    pub fn suspend_running(&self) -> String {
        let id = self.find_lease(true).expect("a lease runs");
        self.wait("the lease to be suspended", || {
            self.command(&["suspend", &id]).is_some()
        });
        id
    }

    /// Resumes a lease that is suspended, if one is. Another thread may resume it at the same time.
    ///
    /// # Panics
    ///
    /// If the lease stays suspended.
    pub fn resume_suspended(&self) {
        let Some(id) = self.find_lease(false) else {
            return;
        };
        self.wait("the lease to be resumed", || {
            match self.try_run(&["lease", "resume", &id]) {
                Ok(text) => text.starts_with(&format!("lease {id} goes on ")),
                // Another thread has resumed it, or its program has released it.
                Err(_) => self.find_lease(false).as_ref() != Some(&id),
            }
        });
    }
}
