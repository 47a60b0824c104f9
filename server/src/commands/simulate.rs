//! `tensord simulate`: runs the scheduler's engine over a trace, and prints how well it does.

use std::{
    fs,
    io::{self, IsTerminal, Read, Write},
    path::Path,
    time::{Duration, Instant},
};

use tensord_scheduler::RequestOrder;

use crate::{
    config::{ConfigError, SimulateConfig, SimulationConfig},
    failure::Failure,
    human,
    simulate::{
        Outcome, Setup, generator, picture, report, run as simulate,
        trace::{self, Job},
    },
    stdout,
};

/// The largest trace, in bytes: 256 for each of as many jobs as a trace may have.
const MAX_TRACE_BYTES: u64 = 256 * trace::MAX_JOBS as u64;

/// After so much time, the progress is shown.
const QUIET: Duration = Duration::from_secs(2);

/// How often the progress is shown.
const INTERVAL: Duration = Duration::from_millis(100);

/// Width of the bar of the progress, in characters.
const BAR_WIDTH: usize = 30;

/// Runs the simulation, or prints a trace.
pub(super) async fn run(config: SimulateConfig) -> Result<(), Failure> {
    let work = tokio::task::spawn_blocking(move || execute(config));
    let done = work.await.map_err(io::Error::other);
    done.map_err(Failure::system("run the simulation"))?
}

fn execute(config: SimulateConfig) -> Result<(), Failure> {
    let config = match config {
        SimulateConfig::Generate(recipe) => {
            return stdout::print(&trace::print(&generator::generate(&recipe)));
        }
        SimulateConfig::Run(config) => config,
    };
    let jobs = read(&config.trace)?;
    let outcomes = outcomes(&config, &jobs);
    if let Some(path) = &config.svg {
        let written = fs::write(path, picture(&outcomes, &jobs, &config.pool));
        written.map_err(Failure::system("write the file of --svg"))?;
    }
    let workers = config.pool.worker_count();
    stdout::print(&match config.json {
        true => stdout::json(&report::json(&outcomes, workers)),
        false => report::text(&outcomes, workers),
    })
}

/// Simulates these jobs in each of the orders.
fn outcomes(config: &SimulationConfig, jobs: &[Job]) -> Vec<Outcome> {
    let outcomes = config.orders.iter().map(|&order| {
        let setup = Setup {
            jobs,
            pool: &config.pool,
            policy: &config.policy,
            order,
            half_life: config.half_life,
            reserve_after: config.reserve_after,
            release_ms: config.release.as_millis() as u64,
        };
        let mut progress = Progress::new(order, jobs.len());
        simulate(&setup, &mut |over| progress.show(over))
    });
    outcomes.collect()
}

/// Reads the trace at `path`.
///
/// # Errors
///
/// If the file cannot be read, is larger than [`MAX_TRACE_BYTES`], or breaks a rule; the error names the line,
/// the column and the rule.
fn read(path: &Path) -> Result<Vec<Job>, ConfigError> {
    let unreadable = |source: io::Error| ConfigError::TraceUnreadable {
        path: path.into(),
        source,
    };
    let mut bytes = Vec::new();
    let file = fs::File::open(path).map_err(unreadable)?;
    let mut bounded = file.take(MAX_TRACE_BYTES + 1);
    bounded.read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MAX_TRACE_BYTES {
        return Err(ConfigError::TraceTooLarge {
            path: path.into(),
            most_bytes: MAX_TRACE_BYTES,
        });
    }
    let text = String::from_utf8(bytes).map_err(|e| unreadable(io::Error::other(e)))?;
    trace::parse(&text).map_err(|error| ConfigError::File {
        path: path.into(),
        line: error.line,
        problem: error.problem,
    })
}

/// A bar on stderr that shows how far a simulation is, if it takes long and stderr is a terminal.
struct Progress {
    order: RequestOrder,
    jobs: usize,
    started: Instant,
    shown: Option<Instant>,
    is_terminal: bool,
}

impl Progress {
    fn new(order: RequestOrder, jobs: usize) -> Self {
        Self {
            order,
            jobs,
            started: Instant::now(),
            shown: None,
            is_terminal: io::stderr().is_terminal(),
        }
    }

    /// Shows that so many jobs have ended.
    fn show(&mut self, over: usize) {
        let is_due = match self.shown {
            Some(shown) => shown.elapsed() >= INTERVAL,
            None => self.started.elapsed() >= QUIET,
        };
        if !self.is_terminal || !is_due {
            return;
        }
        self.shown = Some(Instant::now());
        let order = report::order_name(self.order);
        let bar = "#".repeat(BAR_WIDTH * over / self.jobs.max(1));
        let (over, jobs) = (human::count(over as u64), human::plural(self.jobs, "job"));
        // Nobody may see it, which is no reason to stop.
        let _ = write!(
            io::stderr(),
            "\r{order:8} [{bar:BAR_WIDTH$}] {over} of {jobs}"
        );
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown.is_some() {
            // Erases the line.
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, env, path::PathBuf};

    use super::*;
    use crate::{
        cli::{self, Parsed},
        config::{self, Config, Environment, File},
    };

    /// The folder of the repository.
    const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

    /// If this is set, the test writes the pictures that differ.
    const RENEW: &str = "TENSORD_RENEW_PICTURES";

    /// Returns the configuration of a command whose files are relative to the folder of the repository.
    fn configuration(command: &str) -> SimulationConfig {
        let words = command
            .split_whitespace()
            .map(|word| match word.starts_with("docs/") {
                true => format!("{ROOT}/{word}").into(),
                false => word.into(),
            });
        let parsed = cli::parse(words).unwrap();
        let Parsed::Run(cli) = parsed else {
            panic!("{command}: it has no configuration");
        };
        let config = config::resolve(*cli, File::default(), &Environment::default());
        match config.unwrap_or_else(|error| panic!("{command}: {error}")) {
            Config::Simulate(SimulateConfig::Run(config)) => config,
            other => panic!("{command}: {other:?}"),
        }
    }

    #[test]
    fn the_pictures_of_docs_teams_are_those_of_their_commands() {
        let text = fs::read_to_string(format!("{ROOT}/docs/teams.md")).unwrap();
        let mut drawn = BTreeSet::new();
        let lines = text
            .lines()
            .filter(|line| line.starts_with("tensord simulate docs/"));
        for command in lines {
            let config = configuration(command);
            let path = config.svg.clone().expect(command);
            let jobs = read(&config.trace).unwrap_or_else(|error| panic!("{command}: {error}"));
            let picture = picture(&outcomes(&config, &jobs), &jobs, &config.pool);
            if env::var_os(RENEW).is_some() {
                fs::write(&path, &picture).unwrap();
            }
            let kept = fs::read_to_string(&path).unwrap_or_default();
            assert!(
                kept == picture,
                "{} is not what its command draws now. If the new picture is right, renew it in the folder of the \
                 repository by `{command}`, or all by `{RENEW}=1 cargo test -p tensord pictures`.",
                path.display()
            );
            assert!(
                picture.len() <= 20_000,
                "{command}: {} bytes",
                picture.len()
            );
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            assert!(
                text.contains(&format!("](teams/{name})")),
                "{name} is not shown"
            );
            drawn.insert(path.with_extension(""));
        }
        let files = fs::read_dir(format!("{ROOT}/docs/teams")).unwrap();
        let files = files.map(|file| file.unwrap().path().with_extension(""));
        let made: BTreeSet<PathBuf> = drawn.into_iter().collect();
        assert_eq!(
            made,
            files.collect(),
            "each file of docs/teams is of one command"
        );
    }
}
