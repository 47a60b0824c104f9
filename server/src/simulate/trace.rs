//! Traces of jobs: a text file with a header and one line for each job, in the order of their arrival.
//!
//! ```text
//! arrival,tenant,user,devices,kind,share,memory,duration,priority
//! 0,research,ada,2,cuda,,40GiB,3600,
//! 12.5,students,,1,,0.25,,90,5
//! ```
//!
//! Values have no quotes: names have letters, digits and - _ . only. The columns of [`MORE_COLUMNS`] may follow,
//! for jobs whose leases are not the usual ones.

use std::fmt::Write;

use tensord_proto::share::WHOLE_PERMILLE;

use crate::{
    config::values::{Memory, Name},
    human,
};

/// The header of a trace: the names of its columns.
pub(crate) const HEADER: &str = "arrival,tenant,user,devices,kind,share,memory,duration,priority";

/// The names of the columns that a trace has after those of [`HEADER`], or has not.
pub(crate) const MORE_COLUMNS: &str = ",max_duration,durable,spot";

/// Number of columns of [`HEADER`].
const COLUMNS: usize = 9;

/// Number of columns with those of [`MORE_COLUMNS`].
const ALL_COLUMNS: usize = COLUMNS + 3;

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
    /// The part of the time of its only device that it gets, in thousandths, from 1 to 999; `None`: it gets whole
    /// devices.
    pub(crate) share_permille: Option<u32>,
    /// The least memory that each device must have, in bytes; of a share, the memory that it gets, or 0 for the same
    /// part of the device's memory as of its time.
    pub(crate) memory_bytes: u64,
    /// How long it has devices until it ends, in milliseconds, without the time for which it is suspended.
    pub(crate) duration_ms: u64,
    /// Among the requests of one tenant, those with a higher one come first.
    pub(crate) priority: i32,
    /// How long its lease has devices at most, in milliseconds; the pool then ends it.
    pub(crate) max_duration_ms: Option<u64>,
    /// Whether its lease can be suspended.
    pub(crate) is_durable: bool,
    /// Whether it has a spot lease, in the order that has these.
    pub(crate) is_spot: bool,
}

impl Job {
    /// Returns the devices that it gets, in thousandths of one.
    pub(crate) fn permille(&self) -> u64 {
        let of_each = self.share_permille.unwrap_or(WHOLE_PERMILLE);
        u64::from(self.devices) * u64::from(of_each)
    }

    /// Returns whether a column of [`MORE_COLUMNS`] is not empty.
    fn is_unusual(&self) -> bool {
        self.max_duration_ms.is_some() || !self.is_durable || self.is_spot
    }
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
    let columns = match header.strip_prefix(HEADER) {
        Some("") => COLUMNS,
        Some(MORE_COLUMNS) => ALL_COLUMNS,
        _ => {
            let rule = format!("the first line must be {HEADER}, or that with {MORE_COLUMNS}");
            return Err(error(1, rule));
        }
    };
    let mut jobs = Vec::<Job>::new();
    for (number, line) in lines {
        if jobs.len() == MAX_JOBS {
            let problem = format!("a trace has at most {MAX_JOBS} jobs");
            return Err(error(number, problem));
        }
        let job = parse_line(line, columns).map_err(|problem| error(number, problem))?;
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

/// Parses the line of a job, in a trace with so many columns.
fn parse_line(line: &str, columns: usize) -> Result<Job, String> {
    let mut values: Vec<_> = line.split(',').collect();
    let count = values.len();
    if count == columns {
        // A column that the trace does not have is empty.
        values.resize(ALL_COLUMNS, "");
    }
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
            max_duration,
            durable,
            spot,
        ],
    ) = <[&str; ALL_COLUMNS]>::try_from(values.as_slice())
    else {
        let more = if columns == COLUMNS { "" } else { MORE_COLUMNS };
        return Err(format!(
            "the line has {count} values; it must have {columns}: {HEADER}{more}"
        ));
    };
    let device_count = device_count(devices)?;
    let arrival_rule = "must be a number of seconds from 0 to 10000000000";
    Ok(Job {
        arrival_ms: thousandths("arrival", arrival, MAX_ARRIVAL_MS, arrival_rule)?,
        tenant: name("tenant", tenant)?,
        user: if user.is_empty() {
            String::new()
        } else {
            name("user", user)?
        },
        devices: device_count,
        share_permille: share_of(share, device_count)?,
        kind: (!kind.is_empty()).then(|| name("kind", kind)).transpose()?,
        memory_bytes: match memory {
            "" => 0,
            memory => memory_of(memory)?,
        },
        duration_ms: duration_of("duration", duration, "must be")?,
        priority: match priority {
            "" => 0,
            priority => {
                let rule = "must be empty or a whole number";
                priority
                    .parse()
                    .map_err(|_| wrong("priority", priority, rule))?
            }
        },
        max_duration_ms: match max_duration {
            "" => None,
            value => Some(duration_of("max_duration", value, "must be empty or")?),
        },
        is_durable: !is_set("durable", durable, "off")?,
        is_spot: is_set("spot", spot, "yes")?,
    })
}

/// Parses a number of seconds as milliseconds.
fn duration_of(column: &str, value: &str, must_be: &str) -> Result<u64, String> {
    let rule = format!("{must_be} a number of seconds from 0.001 to 31622400");
    match thousandths(column, value, MAX_DURATION_MS, &rule)? {
        0 => Err(wrong(column, value, &rule)),
        duration_ms => Ok(duration_ms),
    }
}

/// Returns whether a column has `word`; it is empty otherwise.
fn is_set(column: &str, value: &str, word: &str) -> Result<bool, String> {
    match value.is_empty() || value == word {
        true => Ok(!value.is_empty()),
        false => Err(wrong(column, value, &format!("must be empty or {word}"))),
    }
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

/// Parses the part of a device that a job gets, in thousandths; `None` if it gets `devices` whole ones.
fn share_of(value: &str, devices: u32) -> Result<Option<u32>, String> {
    if value.is_empty() {
        return Ok(None);
    }
    let rule = "must be empty or a number from 0.001 to 1";
    let permille = thousandths("share", value, WHOLE_PERMILLE.into(), rule)?;
    match (permille as u32, devices) {
        (0, _) => Err(wrong("share", value, rule)),
        (WHOLE_PERMILLE, _) => Ok(None),
        (permille, 1) => Ok(Some(permille)),
        (_, devices) => {
            let rule = format!("must be empty or 1, as the job has {devices} devices");
            Err(wrong("share", value, &rule))
        }
    }
}

fn memory_of(value: &str) -> Result<u64, String> {
    let rule = "must be empty or an amount of memory, such as 512MiB or 16GiB";
    let parsed = value
        .parse::<Memory>()
        .map_err(|_| wrong("memory", value, rule));
    parsed.map(|memory| memory.size_bytes)
}

/// Parses a number with at most three decimals, up to `max` thousandths, as thousandths: seconds as milliseconds.
fn thousandths(column: &str, value: &str, max: u64, rule: &str) -> Result<u64, String> {
    let (whole, decimals) = value.split_once('.').unwrap_or((value, "0"));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|it| it.is_ascii_digit());
    let parsed = (is_number(whole) && is_number(decimals) && decimals.len() <= 3).then(|| {
        let whole = whole.parse::<u64>().ok()?;
        let part = format!("{decimals:0<3}").parse::<u64>().ok()?;
        whole.checked_mul(1000)?.checked_add(part)
    });
    let parsed = parsed.flatten().filter(|&parsed| parsed <= max);
    parsed.ok_or_else(|| wrong(column, value, &format!("{rule}, with at most 3 decimals")))
}

/// Returns the trace of these jobs as text.
pub(crate) fn print(jobs: &[Job]) -> String {
    let has_more = jobs.iter().any(Job::is_unusual);
    let more = if has_more { MORE_COLUMNS } else { "" };
    let mut text = format!("{HEADER}{more}\n");
    for job in jobs {
        let kind = job.kind.as_deref().unwrap_or_default();
        let share = job.share_permille.map(|it| human::thousandths(it.into()));
        let share = share.unwrap_or_default();
        let memory = match job.memory_bytes {
            0 => String::new(),
            bytes => format!("{}KiB", bytes.div_ceil(1 << 10)),
        };
        let [arrival, duration] = [job.arrival_ms, job.duration_ms].map(human::thousandths);
        let (tenant, user, devices, priority) = (&job.tenant, &job.user, job.devices, job.priority);
        // Writing to a string does not fail.
        let _ = write!(
            text,
            "{arrival},{tenant},{user},{devices},{kind},{share},{memory},{duration},{priority}"
        );
        if has_more {
            let max_duration = job.max_duration_ms.map(human::thousandths);
            let max_duration = max_duration.unwrap_or_default();
            let durable = if job.is_durable { "" } else { "off" };
            let spot = if job.is_spot { "yes" } else { "" };
            let _ = write!(text, ",{max_duration},{durable},{spot}");
        }
        text.push('\n');
    }
    text
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
        let text =
            format!("{HEADER}\r\n0.25,red,ada,2,cuda,1,40GiB,1.5,-3\r\n1,blue,,1,,0.25,,9,\r\n");
        let red = Job {
            arrival_ms: 250,
            tenant: "red".into(),
            user: "ada".into(),
            devices: 2,
            kind: Some("cuda".into()),
            share_permille: None,
            memory_bytes: 40 << 30,
            duration_ms: 1500,
            priority: -3,
            max_duration_ms: None,
            is_durable: true,
            is_spot: false,
        };
        let blue = Job {
            arrival_ms: 1000,
            tenant: "blue".into(),
            user: String::new(),
            devices: 1,
            kind: None,
            share_permille: Some(250),
            memory_bytes: 0,
            duration_ms: 9000,
            priority: 0,
            max_duration_ms: None,
            is_durable: true,
            is_spot: false,
        };
        let jobs = parse(&text).unwrap();
        assert_eq!(jobs, [red, blue]);
        assert_eq!(parse(&print(&jobs)).unwrap(), jobs);
        // The columns that may be left out.
        let text =
            format!("{HEADER}{MORE_COLUMNS}\n1,red,,1,,,,9,0,,,\n1,red,,1,,,,9,0,12.5,off,yes\n");
        let jobs = parse(&text).unwrap();
        let columns = jobs
            .iter()
            .map(|job| (job.max_duration_ms, job.is_durable, job.is_spot));
        let expected = [(None, true, false), (Some(12_500), false, true)];
        assert_eq!(columns.collect::<Vec<_>>(), expected);
        assert_eq!(print(&jobs), text);
        // All of a device is no share.
        for whole in ["1", "1.0", "1.000"] {
            let text = format!("{HEADER}\n1,blue,,2,,{whole},,9,\n");
            assert_eq!(parse(&text).unwrap()[0].share_permille, None);
        }
    }

    #[test]
    fn an_error_has_the_line_the_column_the_value_and_the_rule() {
        let seconds = "with at most 3 decimals";
        let arrival = "it must be a number of seconds from 0 to 10000000000";
        let duration = "it must be a number of seconds from 0.001 to 31622400";
        let share = "it must be empty or a number from 0.001 to 1";
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
            ("1,red,,1,,0,,9,", format!("share is \"0\"; {share}")),
            ("1,red,,1,,1.001,,9,", format!("share is \"1.001\"; {share}, {seconds}")),
            ("1,red,,1,,0.0005,,9,", format!("share is \"0.0005\"; {share}, {seconds}")),
            ("1,red,,1,,-0.5,,9,", format!("share is \"-0.5\"; {share}, {seconds}")),
            ("1,red,,1,,half,,9,", format!("share is \"half\"; {share}, {seconds}")),
            ("1,red,,2,,0.5,,9,", "share is \"0.5\"; it must be empty or 1, as the job has 2 devices".into()),
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
        let more = [
            ("9,,,yes", "the line has 11 values; it must have 12: "),
            (
                "9,,0,,",
                "max_duration is \"0\"; it must be empty or a number of seconds from 0.001 to 31622400",
            ),
            (
                "9,,x,,",
                "max_duration is \"x\"; it must be empty or a number of seconds from 0.001 to 31622400, with",
            ),
            ("9,,,on,", "durable is \"on\"; it must be empty or off"),
            ("9,,,,1", "spot is \"1\"; it must be empty or yes"),
        ];
        for (end, expected) in more {
            let text = format!("{HEADER}{MORE_COLUMNS}\n1,red,,1,,,,{end}\n");
            let error = parse(&text).unwrap_err();
            assert!(error.problem.starts_with(expected), "{end}: {error}");
        }
        let expected = format!("the first line must be {HEADER}, or that with {MORE_COLUMNS}");
        assert_eq!(parse("1,red,,1,,,,9,").unwrap_err().to_string(), expected);
    }
}
