//! Runs ops of every variant, valid and invalid, through decoder, rules, tensor table and
//! Flex: see `tensord_fuzz::execute`.
//!
//! A child process does the work and writes its current position to a file. If the child
//! is killed, this process reports the op from that file.

use std::{
    fs::File,
    io::{Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use clap::Parser;
use tensord_fuzz::{
    execute::{self, report::Report, templates::Templates},
    guard,
};

/// Time after which an op that has not ended is reported, and after which the run fails.
const WARN_AFTER: Duration = Duration::from_secs(10);
const GIVE_UP_AFTER: Duration = Duration::from_secs(120);

/// Size of a thread's position in the file: session, op and variant, eight bytes each.
const POSITION_BYTES: usize = 24;

/// Environment variable that gives the child process the path of the file of positions.
const POSITIONS: &str = "TENSORD_FUZZ_POSITIONS";

/// Feeds sessions on Flex with valid and invalid ops of every variant, until the time is
/// over or all ops were made, and counts the outcomes.
#[derive(Debug, Clone, Parser)]
struct Options {
    /// Seconds to run.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Number of ops after which the run stops, even if time is left.
    #[arg(long, default_value_t = u64::MAX, hide_default_value = true)]
    ops: u64,
    /// Seed that determines the whole run.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run only the session with this seed, which the message of a failure names.
    #[arg(long, value_parser = hexadecimal)]
    session: Option<u64>,
    /// Fail unless every variant was executed and refused at least this often.
    #[arg(long, default_value_t = 0)]
    require_counts: u64,
    /// Number of threads, which run sessions in parallel.
    #[arg(long, default_value_t = 1)]
    threads: u64,
    /// Run without guard pages around allocations, which take most of the time.
    #[arg(long)]
    no_guard: bool,
    /// Read beyond an allocation, to show that the guard pages detect it.
    #[arg(long, hide = true)]
    trip: bool,
}

fn hexadecimal(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|e| e.to_string())
}

fn main() -> ExitCode {
    let options = Options::parse();
    let done = match std::env::var_os(POSITIONS) {
        Some(positions) => work(&options, Path::new(&positions)).map(|()| true),
        None => watch(&options),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("fuzz: {e}");
            ExitCode::FAILURE
        }
    }
}

/// Starts a child process that does the work, and supervises it.
fn watch(options: &Options) -> Result<bool, String> {
    let io = |e: std::io::Error| e.to_string();
    let positions = std::env::temp_dir().join(format!("tensord-fuzz-{}", std::process::id()));
    std::fs::write(&positions, []).map_err(io)?;
    let result = supervise(options, &positions);
    let _ = std::fs::remove_file(&positions);
    result
}

/// Returns whether the child process succeeded. If it was killed, the error names the ops
/// that its threads were executing.
fn supervise(options: &Options, positions: &PathBuf) -> Result<bool, String> {
    let io = |e: std::io::Error| e.to_string();
    println!(
        "seed {}, {} threads, {}",
        options.seed,
        options.threads,
        match options.no_guard {
            true => "without guard pages",
            false => "with guard pages",
        }
    );
    let mut work = Command::new(std::env::current_exe().map_err(io)?);
    work.args(std::env::args_os().skip(1));
    work.env(POSITIONS, positions);
    if std::env::var_os("RAYON_NUM_THREADS").is_none() {
        work.env("RAYON_NUM_THREADS", "1");
    }
    let mut work = work.spawn().map_err(io)?;
    let templates = Templates::default();
    let mut seen: Vec<(Position, Instant, bool)> = Vec::new();
    loop {
        if let Some(status) = work.try_wait().map_err(io)? {
            if status.code().is_some() {
                // The child has printed its own error.
                return Ok(status.success());
            }
            let places = read(positions);
            let places = places.iter().map(|p| format!("\n  {}", p.show(&templates)));
            let places: String = places.collect();
            return Err(format!(
                "seed {}: the run ended with {status} at{places}",
                options.seed
            ));
        }
        let now = Instant::now();
        for (i, position) in read(positions).into_iter().enumerate() {
            if i == seen.len() {
                seen.push((position, now, false));
            }
            let (last, since, is_reported) = &mut seen[i];
            if *last != position {
                (*last, *since, *is_reported) = (position, now, false);
            } else if now - *since > WARN_AFTER && !*is_reported {
                *is_reported = true;
                let at = position.show(&templates);
                eprintln!(
                    "fuzz: seed {}: an op has run for more than {WARN_AFTER:?}: {at}",
                    options.seed
                );
            } else if now - *since > GIVE_UP_AFTER {
                let _ = work.kill();
                let _ = work.wait();
                let at = position.show(&templates);
                return Err(format!(
                    "seed {}: an op did not end within {GIVE_UP_AFTER:?}: {at}",
                    options.seed
                ));
            }
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// The op that a thread is executing.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Position {
    session: u64,
    op: u64,
    variant: u64,
}

impl Position {
    fn bytes(self) -> [u8; POSITION_BYTES] {
        let mut bytes = [0; POSITION_BYTES];
        let numbers = [self.session, self.op, self.variant];
        for (place, number) in bytes.chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    fn of(bytes: &[u8]) -> Self {
        let mut numbers = bytes.chunks_exact(8).map(|number| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(number);
            u64::from_le_bytes(bytes)
        });
        let mut next = || numbers.next().unwrap_or_default();
        Self {
            session: next(),
            op: next(),
            variant: next(),
        }
    }

    fn show(self, templates: &Templates) -> String {
        let variant = self.variant as usize;
        let made = match variant < templates.len() {
            true => format!("made for {}", templates.get(variant).0),
            false => "from a corrupted frame".into(),
        };
        format!(
            "op {} of session {:#x}, {made}; repeat it with --session {:#x}",
            self.op, self.session, self.session
        )
    }
}

fn read(positions: &Path) -> Vec<Position> {
    let bytes = std::fs::read(positions).unwrap_or_default();
    bytes
        .chunks_exact(POSITION_BYTES)
        .map(Position::of)
        .collect()
}

/// Runs sessions in all threads until the run is over, and prints the counts.
fn work(options: &Options, positions: &Path) -> Result<(), String> {
    if !options.no_guard {
        guard::install()?;
    }
    let begun = Instant::now();
    let templates = Templates::default();
    let mut total = Report::new(&templates);
    let (ops, failed) = (AtomicU64::new(0), AtomicBool::new(false));
    let stop = || {
        let is_over = begun.elapsed() >= Duration::from_secs(options.seconds);
        is_over || failed.load(Ordering::Relaxed) || ops.load(Ordering::Relaxed) >= options.ops
    };
    let (templates, ops, stop) = (&templates, &ops, &stop);
    let results: Vec<Result<Report, String>> = thread::scope(|scope| {
        let failed = &failed;
        let threads: Vec<_> = (0..options.threads)
            .map(|thread| {
                scope.spawn(move || {
                    let result = sessions(options, thread, positions, templates, ops, stop);
                    failed.fetch_or(result.is_err(), Ordering::Relaxed);
                    result
                })
            })
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined
            .map(|result| result.unwrap_or_else(|_| Err("the fuzzer itself panicked".into())))
            .collect()
    });
    for report in results {
        total.add(&report?);
    }
    let seconds = begun.elapsed().as_secs_f64();
    println!(
        "{total}\n{:.0} ops/s for {seconds:.1} s, nothing found",
        total.ops() as f64 / seconds
    );
    let lacks = total.undertested_variants(options.require_counts);
    match lacks.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "some variants ran too rarely ({} executions and refusals are required): {}",
            options.require_counts,
            lacks.join(", ")
        )),
    }
}

/// Runs the sessions of one thread, one after the other.
fn sessions(
    options: &Options,
    thread: u64,
    positions: &Path,
    templates: &Templates,
    ops: &AtomicU64,
    stop: &dyn Fn() -> bool,
) -> Result<Report, String> {
    let file = File::options().write(true).open(positions);
    let mut file = file.map_err(|e| format!("{}: {e}", positions.display()))?;
    let place = SeekFrom::Start(thread * POSITION_BYTES as u64);
    let mut note = |session: u64, op: u64, variant: usize| {
        let variant = variant as u64;
        let position = Position {
            session,
            op,
            variant,
        };
        // If the write fails, a failure is reported without its position.
        let _ = file
            .seek(place)
            .and_then(|_| file.write_all(&position.bytes()));
    };
    let mut report = Report::new(templates);
    if let Some(seed) = options.session {
        execute::run(seed, templates, &mut report, &mut note)?;
        return Ok(report);
    }
    for number in (thread..).step_by(options.threads.max(1) as usize) {
        if stop() {
            break;
        }
        let before = report.ops();
        let seed = execute::session_seed(options.seed, number);
        execute::run(seed, templates, &mut report, &mut note)?;
        if options.trip {
            guard::read_beyond(1000);
        }
        ops.fetch_add(report.ops() - before, Ordering::Relaxed);
    }
    Ok(report)
}
