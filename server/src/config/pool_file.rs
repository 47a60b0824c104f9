//! The file of `tensord apply`: all tenants of a pool, with the words of `tensord tenant add`.
//!
//! ```toml
//! [tenants.default]
//!
//! [tenants.research]
//! weight = 2
//! guarantee = { cuda = 4 }
//! limit = { cuda = 8, memory = "640GiB" }
//! ```

use std::{
    collections::BTreeMap,
    fmt, fs,
    io::{self, Read},
    path::Path,
};

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};

use super::{
    ConfigError, TenantChange, file,
    values::{DeviceLimit, Kinds, Memory, Name},
};

/// The largest file, in bytes: 250 for each of as many tenants as a pool may have.
pub(crate) const MAX_POOL_FILE_BYTES: usize = 256 << 10;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PoolFile {
    /// Not optional: an empty file is a mistake rather than a pool without tenants.
    tenants: BTreeMap<Name, TenantTable>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct TenantTable {
    weight: Option<u32>,
    guarantee: Option<KindTable>,
    limit: Option<LimitTable>,
}

/// Numbers of devices by kind, such as `{ cuda = 4, flex = 2 }`.
#[derive(Debug, Deserialize)]
struct KindTable(BTreeMap<Name, u32>);

/// A limit, such as `{ cuda = 8, memory = "640GiB" }`.
#[derive(Debug)]
struct LimitTable(DeviceLimit);

impl<'de> Deserialize<'de> for LimitTable {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct LimitVisitor;
        impl<'de> Visitor<'de> for LimitVisitor {
            type Value = LimitTable;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table such as { cuda = 8, memory = \"640GiB\" }")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<LimitTable, A::Error> {
                let mut limit = DeviceLimit::default();
                while let Some(Name(key)) = map.next_key()? {
                    if key == "memory" {
                        limit.memory_bytes = Some(map.next_value::<Memory>()?.size_bytes);
                    } else {
                        limit.kinds.insert(key, map.next_value()?);
                    }
                }
                Ok(LimitTable(limit))
            }
        }
        deserializer.deserialize_map(LimitVisitor)
    }
}

/// Reads the tenants of the file at `path`, in the order of their names.
///
/// # Errors
///
/// If the file cannot be read, is larger than [`MAX_POOL_FILE_BYTES`], or breaks a rule; the error names the
/// line, the tenant and the key.
pub(super) fn read(path: &Path) -> Result<Vec<TenantChange>, ConfigError> {
    let unreadable = |source: io::Error| ConfigError::PoolFileUnreadable {
        path: path.into(),
        source,
    };
    let mut bytes = Vec::new();
    let file = fs::File::open(path).map_err(unreadable)?;
    let mut bounded = file.take(MAX_POOL_FILE_BYTES as u64 + 1);
    bounded.read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() > MAX_POOL_FILE_BYTES {
        return Err(ConfigError::PoolFileTooLarge { path: path.into() });
    }
    let text = String::from_utf8(bytes).map_err(|e| unreadable(io::Error::other(e)))?;
    parse(path, &text)
}

fn parse(path: &Path, text: &str) -> Result<Vec<TenantChange>, ConfigError> {
    let parsed = file::parse(path, text).map_err(|error| with_tenant(text, error));
    let PoolFile { tenants } = parsed?;
    let tenants = tenants.into_iter();
    let tenants = tenants.map(|(Name(name), table)| TenantChange {
        name,
        weight: table.weight,
        guaranteed: table.guarantee.map(|KindTable(kinds)| {
            let kinds = kinds.into_iter();
            Kinds(kinds.map(|(Name(kind), count)| (kind, count)).collect())
        }),
        limit: table.limit.map(|LimitTable(limit)| limit),
    });
    Ok(tenants.collect())
}

/// Adds the name of the tenant in whose table the line of an error is.
fn with_tenant(text: &str, error: ConfigError) -> ConfigError {
    match error {
        ConfigError::File {
            path,
            line,
            problem,
        } => {
            let mut before = text
                .lines()
                .take(line)
                .collect::<Vec<_>>()
                .into_iter()
                .rev();
            let header = before.find_map(|line| line.trim().strip_prefix('['));
            let tenant = header
                .and_then(|header| header.strip_prefix("tenants."))
                .and_then(|name| match name.strip_prefix('"') {
                    Some(quoted) => quoted.split('"').next(),
                    None => name.split([']', '.']).next(),
                });
            let problem = match tenant {
                Some(tenant) => format!("tenant {tenant}: {problem}"),
                None => problem,
            };
            ConfigError::File {
                path,
                line,
                problem,
            }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Vec<TenantChange>, String> {
        parse(Path::new("pool.toml"), text).map_err(|e| e.to_string())
    }

    #[test]
    fn a_file_has_all_tenants() {
        let text = "
            [tenants.research]
            weight = 2
            guarantee = { cuda = 4 }
            limit = { cuda = 8, memory = \"640GiB\" }

            [tenants.default]

            [tenants.students.limit]
            cuda = 2
        ";
        let tenants = parsed(text).unwrap();
        let names: Vec<_> = tenants.iter().map(|tenant| tenant.name.as_str()).collect();
        assert_eq!(names, ["default", "research", "students"]);
        let [default, research, students] = <[_; 3]>::try_from(tenants).unwrap();
        // The flags of `tensord tenant add` give the same values.
        assert_eq!(research.weight, Some(2));
        assert_eq!(research.guaranteed, Some("cuda=4".parse().unwrap()));
        let limit = "cuda=8,memory=640GiB".parse().unwrap();
        assert_eq!(research.limit, Some(limit));
        assert_eq!(students.limit, Some("cuda=2".parse().unwrap()));
        assert_eq!((default.weight, default.guaranteed), (None, None));
        assert_eq!((students.weight, default.limit), (None, None));
        assert_eq!(parsed("[tenants]"), Ok(Vec::new()));
    }

    #[test]
    fn an_error_names_line_tenant_and_rule() {
        let cases = [
            ("", "pool.toml:1: missing field `tenants`"),
            (
                "[tenant.red]",
                "pool.toml:1: unknown field `tenant`, expected `tenants`",
            ),
            (
                "[tenants.red]\n\nwieght = 2",
                "pool.toml:3: tenant red: unknown field `wieght`, expected one of `weight`, `guarantee`, `limit`",
            ),
            (
                "[tenants.\"team.a\"]\nweight = -1",
                "pool.toml:2: tenant team.a: weight: invalid value: integer `-1`, expected u32",
            ),
            (
                "[tenants.red]\nweight = -1",
                "pool.toml:2: tenant red: weight: invalid value: integer `-1`, expected u32",
            ),
            (
                "[tenants.red]\n[tenants.blue]\nguarantee = { cuda = \"4\" }",
                "pool.toml:3: tenant blue: guarantee: invalid type: string \"4\", expected u32",
            ),
            (
                "[tenants.red]\nlimit = { memory = \"640GB\" }",
                "pool.toml:2: tenant red: limit: \"640GB\" is not an amount of memory, such as 512MiB or 16GiB",
            ),
            (
                "[tenants.red.limit]\nmemory = 640",
                "pool.toml:2: tenant red: memory: invalid type: integer `640`, expected a string",
            ),
            (
                "[tenants.red]\nlimit = 8",
                "pool.toml:2: tenant red: limit: invalid type: integer `8`, expected a table such as { cuda = 8, memory = \"640GiB\" }",
            ),
            (
                "[tenants.red]\nlimit = { \"cu da\" = 8 }",
                "pool.toml:2: tenant red: limit: \"cu da\" is not a name of letters, digits and - _ .",
            ),
            (
                "[tenants]\n\"r/d\" = {}",
                "pool.toml:2: \"r/d\": \"r/d\" is not a name of letters, digits and - _ .",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(parsed(text).unwrap_err(), expected, "{text}");
        }
        let twice = parsed("[tenants.red]\n[tenants.red]").unwrap_err();
        assert!(twice.starts_with("pool.toml:2: tenant red: "), "{twice}");
    }

    #[test]
    fn a_file_has_a_largest_size() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pool.toml");
        let mut text = "[tenants]\n".to_owned();
        text += &"#".repeat(MAX_POOL_FILE_BYTES - text.len());
        fs::write(&path, &text).unwrap();
        assert!(read(&path).unwrap().is_empty());
        fs::write(&path, text + "#").unwrap();
        let refused = read(&path).unwrap_err().to_string();
        assert!(refused.contains("has more than 262144 bytes"), "{refused}");
        let missing = read(Path::new("/nowhere")).unwrap_err().to_string();
        assert!(missing.starts_with("cannot read /nowhere: "), "{missing}");
    }
}
