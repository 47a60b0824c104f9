//! Traces of jobs: a text file with a header and one line for each job, in the order of their arrival.
//!
//! ```text
//! arrival,tenant,user,devices,kind,share,memory,duration,priority
//! 0,research,ada,2,cuda,,40GiB,3600,
//! 12.5,students,,1,,,,90,5
//! ```
//!
//! Values have no quotes: names have letters, digits and - _ . only.

use std::fmt::Write;

use crate::config::values::{Memory, Name};

/// The header of a trace: the names of its columns.
pub(crate) const HEADER: &str = "arrival,tenant,user,devices,kind,share,memory,duration,priority";

/// Number of columns.
const COLUMNS: usize = 9;

/// The most jobs of a trace: they take some 200 MB.
pub(crate) const MAX_JOBS: usize = 1_000_000;

/// The latest arrival, in milliseconds: 300 years, so that seconds since 1970 are allowed.
const MAX_ARRIVAL_MS: u64 = 10_000_000_000 * 1000;

/// The longest duration, in milliseconds: a year of 366 days.
const MAX_DURATION_MS: u64 = 366 * 86_400 * 1000;

/// The most devices of a job: as many as the largest pool has.
const MAX_DEVICES: u32 = super::pool_spec::MAX_DEVICES;

/// A job: a line of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Job {
    /// When its program requests the devices, in milliseconds.
    pub(crate) arrival_ms: u64,
    /// The tenant of the program.
    pub(crate) tenant: String,
    /// The name of the user, which may be empty. The engine does not distinguish the users of a tenant.
    pub(crate) user: String,
    /// The number of devices, which it gets all at once.
    pub(crate) devices: u32,
    /// The kind of the devices; any if `None`.
    pub(crate) kind: Option<String>,
    /// The least memory that each device must have, in bytes.
    pub(crate) memory_bytes: u64,
    /// How long it has devices until it ends, in milliseconds, without the time for which it is suspended.
    pub(crate) duration_ms: u64,
    /// Among the requests of one tenant, those with a higher one come first.
    pub(crate) priority: i32,
}

/// Why a trace was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}")]
pub(crate) struct TraceError {
    /// The line, from 1.
    pub(crate) line: usize,
    /// The column, its value and the rule that it breaks.
    pub(crate) problem: String,
}

/// Parses a trace.
///
/// # Errors
///
/// The first line that breaks a rule.
pub(crate) fn parse(text: &str) -> Result<Vec<Job>, TraceError> {
    let error = |line, problem| TraceError { line, problem };
    let mut lines = (1..).zip(text.lines());
    let (_, header) = lines.next().unwrap_or((1, ""));
    if header != HEADER {
        return Err(error(1, format!("the first line must be {HEADER}")));
    }
    let mut jobs = Vec::<Job>::new();
    for (number, line) in lines {
        if jobs.len() == MAX_JOBS {
            let problem = format!("a trace has at most {MAX_JOBS} jobs");
            return Err(error(number, problem));
        }
        let job = parse_line(line).map_err(|problem| error(number, problem))?;
        if jobs
            .last()
            .is_some_and(|last| last.arrival_ms > job.arrival_ms)
        {
            let problem = "arrival is before that of the line above; sort the lines by arrival";
            return Err(error(number, problem.into()));
        }
        jobs.push(job);
    }
    match jobs.is_empty() {
        true => Err(error(2, "a trace must have at least one job".into())),
        false => Ok(jobs),
    }
}

fn parse_line(line: &str) -> Result<Job, String> {
    let values: Vec<_> = line.split(',').collect();
    let Ok(
        [
            arrival,
            tenant,
            user,
            devices,
            kind,
            share,
            memory,
            duration,
            priority,
        ],
    ) = <[&str; COLUMNS]>::try_from(values.as_slice())
    else {
        let count = values.len();
        return Err(format!(
            "the line has {count} values; it must have {COLUMNS}: {HEADER}"
        ));
    };
    let duration_rule = "must be a number of seconds from 0.001 to 31622400";
    let duration_ms = millis("duration", duration, MAX_DURATION_MS, duration_rule)?;
    if duration_ms == 0 {
        return Err(wrong("duration", duration, duration_rule));
    }
    if !matches!(share, "" | "1") {
        let rule = "must be empty or 1, as jobs have whole devices";
        return Err(wrong("share", share, rule));
    }
    let arrival_rule = "must be a number of seconds from 0 to 10000000000";
    Ok(Job {
        arrival_ms: millis("arrival", arrival, MAX_ARRIVAL_MS, arrival_rule)?,
        tenant: name("tenant", tenant)?,
        user: if user.is_empty() {
            String::new()
        } else {
            name("user", user)?
        },
        devices: device_count(devices)?,
        kind: (!kind.is_empty()).then(|| name("kind", kind)).transpose()?,
        memory_bytes: match memory {
            "" => 0,
            memory => memory_of(memory)?,
        },
        duration_ms,
        priority: match priority {
            "" => 0,
            priority => {
                let rule = "must be empty or a whole number";
                priority
                    .parse()
                    .map_err(|_| wrong("priority", priority, rule))?
            }
        },
    })
}

fn wrong(column: &str, value: &str, rule: &str) -> String {
    format!("{column} is {value:?}; it {rule}")
}

fn name(column: &str, value: &str) -> Result<String, String> {
    let rule = "must be a name of letters, digits and - _ .";
    let parsed = value
        .parse::<Name>()
        .map_err(|_| wrong(column, value, rule));
    parsed.map(|Name(name)| name)
}

fn device_count(value: &str) -> Result<u32, String> {
    let count = value.parse().ok();
    let count = count.filter(|count| (1..=MAX_DEVICES).contains(count));
    count.ok_or_else(|| {
        let rule = format!("must be a whole number from 1 to {MAX_DEVICES}");
        wrong("devices", value, &rule)
    })
}

fn memory_of(value: &str) -> Result<u64, String> {
    let rule = "must be empty or an amount of memory, such as 512MiB or 16GiB";
    let parsed = value
        .parse::<Memory>()
        .map_err(|_| wrong("memory", value, rule));
    parsed.map(|memory| memory.size_bytes)
}

/// Parses a number of seconds, with at most three decimals, as milliseconds up to `max_ms`.
fn millis(column: &str, value: &str, max_ms: u64, rule: &str) -> Result<u64, String> {
    let (whole, decimals) = value.split_once('.').unwrap_or((value, "0"));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|it| it.is_ascii_digit());
    let parsed = (is_number(whole) && is_number(decimals) && decimals.len() <= 3).then(|| {
        let seconds = whole.parse::<u64>().ok()?;
        let thousandths = format!("{decimals:0<3}").parse::<u64>().ok()?;
        seconds.checked_mul(1000)?.checked_add(thousandths)
    });
    let parsed = parsed.flatten().filter(|&millis| millis <= max_ms);
    parsed.ok_or_else(|| wrong(column, value, &format!("{rule}, with at most 3 decimals")))
}

/// Returns the trace of these jobs as text.
pub(crate) fn print(jobs: &[Job]) -> String {
    let mut text = format!("{HEADER}\n");
    for job in jobs {
        let kind = job.kind.as_deref().unwrap_or_default();
        let memory = match job.memory_bytes {
            0 => String::new(),
            bytes => format!("{}KiB", bytes.div_ceil(1 << 10)),
        };
        let (arrival, duration) = (seconds(job.arrival_ms), seconds(job.duration_ms));
        let (tenant, user, devices, priority) = (&job.tenant, &job.user, job.devices, job.priority);
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{arrival},{tenant},{user},{devices},{kind},,{memory},{duration},{priority}"
        );
    }
    text
}

/// Formats milliseconds as seconds with the decimals that they need.
fn seconds(millis: u64) -> String {
    match millis % 1000 {
        0 => format!("{}", millis / 1000),
        thousandths => format!("{}.{thousandths:03}", millis / 1000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(lines: &str) -> (usize, String) {
        let error = parse(&format!("{HEADER}\n{lines}")).unwrap_err();
        (error.line, error.to_string())
    }

    #[test]
    fn a_line_is_a_job() {
        let text = format!("{HEADER}\r\n0.25,red,ada,2,cuda,1,40GiB,1.5,-3\r\n1,blue,,1,,,,9,\r\n");
        let red = Job {
            arrival_ms: 250,
            tenant: "red".into(),
            user: "ada".into(),
            devices: 2,
            kind: Some("cuda".into()),
            memory_bytes: 40 << 30,
            duration_ms: 1500,
            priority: -3,
        };
        let blue = Job {
            arrival_ms: 1000,
            tenant: "blue".into(),
            user: String::new(),
            devices: 1,
            kind: None,
            memory_bytes: 0,
            duration_ms: 9000,
            priority: 0,
        };
        let jobs = parse(&text).unwrap();
        assert_eq!(jobs, [red, blue]);
        assert_eq!(parse(&print(&jobs)).unwrap(), jobs);
    }

    #[test]
    fn an_error_has_the_line_the_column_the_value_and_the_rule() {
        let seconds = "with at most 3 decimals";
        let arrival = "it must be a number of seconds from 0 to 10000000000";
        let duration = "it must be a number of seconds from 0.001 to 31622400";
        let cases = [
            ("1,red,,1,,,,9", format!("the line has 8 values; it must have 9: {HEADER}")),
            ("", format!("the line has 1 values; it must have 9: {HEADER}")),
            ("-1,red,,1,,,,9,", format!("arrival is \"-1\"; {arrival}, {seconds}")),
            ("1.2345,red,,1,,,,9,", format!("arrival is \"1.2345\"; {arrival}, {seconds}")),
            ("1e3,red,,1,,,,9,", format!("arrival is \"1e3\"; {arrival}, {seconds}")),
            ("10000000001,red,,1,,,,9,", format!("arrival is \"10000000001\"; {arrival}, {seconds}")),
            ("1,red,,1,,,,0,", format!("duration is \"0\"; {duration}")),
            ("1,red,,1,,,,,", format!("duration is \"\"; {duration}, {seconds}")),
            ("1,,,1,,,,9,", "tenant is \"\"; it must be a name of letters, digits and - _ .".into()),
            ("1,red,a b,1,,,,9,", "user is \"a b\"; it must be a name of letters, digits and - _ .".into()),
            ("1,red,,0,,,,9,", "devices is \"0\"; it must be a whole number from 1 to 100000".into()),
            ("1,red,,1,\"cuda\",,,9,", "kind is \"\\\"cuda\\\"\"; it must be a name of letters, digits and - _ .".into()),
            ("1,red,,1,,0.5,,9,", "share is \"0.5\"; it must be empty or 1, as jobs have whole devices".into()),
            ("1,red,,1,,,40GB,9,", "memory is \"40GB\"; it must be empty or an amount of memory, such as 512MiB or 16GiB".into()),
            ("1,red,,1,,,,9,high", "priority is \"high\"; it must be empty or a whole number".into()),
        ];
        for (line, expected) in cases {
            let lines = format!("1,red,,1,,,,9,\n{line}\n");
            assert_eq!(refused(&lines), (3, expected), "{line}");
        }
        let earlier = "2,red,,1,,,,9,\n1.999,red,,1,,,,9,\n";
        let (line, problem) = refused(earlier);
        assert_eq!(line, 3);
        assert!(problem.starts_with("arrival is before"), "{problem}");
        assert_eq!(
            refused(""),
            (2, "a trace must have at least one job".into())
        );
        let expected = format!("the first line must be {HEADER}");
        assert_eq!(parse("1,red,,1,,,,9,").unwrap_err().to_string(), expected);
    }
}
