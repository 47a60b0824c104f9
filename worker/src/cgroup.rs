//! The control group of this process that may limit its memory, in versions 1 and 2 of
//! Linux's control groups, and the limit itself: the lowest of the group and its ancestors.
//!
//! Other systems do not have these files, and so no limit.

use std::path::{Component, Path, PathBuf};

/// Names of the files with a limit, for each version. Above `memory.high` the kernel does
/// not kill the process but throttles its allocations. Limits on swap are in addition to
/// these and are ignored, as tensors must not be swapped.
const V1_LIMITS: &[&str] = &["memory.limit_in_bytes"];
const V2_LIMITS: &[&str] = &["memory.max", "memory.high"];

/// Returns the memory limit of this process in bytes, if there is one.
pub(crate) fn memory_limit() -> Option<u64> {
    limit(&read)
}

/// Returns the directory of the control group that limits this process's memory, and whether
/// the group is of version 2. If both versions are mounted, version 1 has the memory.
#[cfg(target_os = "linux")]
pub(crate) fn own_memory_group() -> Option<(bool, PathBuf)> {
    let group = own_groups(&read).min_by_key(|group| group.is_v2)?;
    let own = group.folders.into_iter().next()?;
    Some((group.is_v2, own))
}

fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

/// Returns the limit according to the files that `read` returns.
fn limit(read: &dyn Fn(&Path) -> Option<String>) -> Option<u64> {
    let limits = own_groups(read).flat_map(|group| {
        let files = if group.is_v2 { V2_LIMITS } else { V1_LIMITS };
        let folders = group.folders.into_iter();
        let paths = folders.flat_map(|folder| files.iter().map(move |file| folder.join(file)));
        paths.filter_map(|path| parse_limit(&read(&path)?))
    });
    limits.min()
}

/// A control group of this process that may limit memory.
struct OwnGroup {
    is_v2: bool,
    /// The directories of the group and its ancestors, as far as they are visible.
    folders: Vec<PathBuf>,
}

/// Returns this process's groups that may limit memory, of each version.
fn own_groups(read: &dyn Fn(&Path) -> Option<String>) -> impl Iterator<Item = OwnGroup> {
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let mounts = read(Path::new("/proc/self/mountinfo")).unwrap_or_default();
    let mounts: Vec<_> = mounts.lines().filter_map(Mount::parse).collect();
    let own = groups.lines().filter_map(|line| {
        let (is_v2, group) = memory_group(line)?;
        let mount = mounts.iter().find(|mount| mount.is_v2 == is_v2)?;
        let folders = mount.folders(Path::new(group)).collect();
        Some(OwnGroup { is_v2, folders })
    });
    own.collect::<Vec<_>>().into_iter()
}

/// Returns the group in a line of `/proc/self/cgroup` and whether it is of version 2, if
/// the group may limit memory.
fn memory_group(line: &str) -> Option<(bool, &str)> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (controllers, group) = (parts.next()?, parts.next()?);
    let is_v2 = controllers.is_empty();
    let is_memory = is_v2 || controllers.split(',').any(|name| name == "memory");
    is_memory.then_some((is_v2, group))
}

/// Parses a limit in bytes. `max` or an empty file is no limit.
fn parse_limit(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

/// A mount of a hierarchy of control groups that may limit memory.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    is_v2: bool,
    /// The group at the root of the mount.
    root: PathBuf,
    /// The mount point.
    mount_point: PathBuf,
}

impl Mount {
    /// Parses a line of `/proc/self/mountinfo`.
    fn parse(line: &str) -> Option<Self> {
        let (mount, system) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(3);
        let (root, mount_point) = (mount.next()?, mount.next()?);
        let mut system = system.split(' ');
        let is_v2 = match system.next()? {
            "cgroup2" => true,
            "cgroup" => false,
            _ => return None,
        };
        let has_memory = |options: &str| options.split(',').any(|option| option == "memory");
        if !is_v2 && !system.nth(1).is_some_and(has_memory) {
            return None;
        }
        Some(Self {
            is_v2,
            root: unescaped(root).into(),
            mount_point: unescaped(mount_point).into(),
        })
    }

    /// Returns the directories of `group` and its ancestors, as far as the mount contains
    /// them.
    fn folders(&self, group: &Path) -> impl Iterator<Item = PathBuf> {
        // In a container, the group may be outside the mount. The mount point is then the
        // nearest visible group.
        let below = group.strip_prefix(&self.root).unwrap_or(Path::new(""));
        let is_plain = |part| matches!(part, Component::Normal(_));
        let below = match below.components().all(is_plain) {
            true => below,
            false => Path::new(""),
        };
        let folders: Vec<_> = below
            .ancestors()
            .map(|part| self.mount_point.join(part))
            .collect();
        folders.into_iter()
    }
}

/// Unescapes a path of `mountinfo`, where spaces and similar characters are octal numbers.
fn unescaped(path: &str) -> String {
    let escapes = [
        ("\\040", " "),
        ("\\011", "\t"),
        ("\\012", "\n"),
        ("\\134", "\\"),
    ];
    let mut path = path.to_owned();
    for (escape, what) in escapes {
        path = path.replace(escape, what);
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    const V2: &str =
        "31 23 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate";
    const V1: &str = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory";

    /// Returns the memory limit if `/proc/self/cgroup` has the text `groups`,
    /// `/proc/self/mountinfo` the lines `mounts`, and each other file of `files`, by path,
    /// its text.
    fn limit_of(groups: &str, mounts: &[&str], files: &[(&str, &str)]) -> Option<u64> {
        let mounts = mounts.join("\n");
        let mut all = vec![
            ("/proc/self/cgroup", groups),
            ("/proc/self/mountinfo", &mounts),
        ];
        all.extend(files);
        limit(&|path| {
            let found = all.iter().find(|(name, _)| Path::new(name) == path);
            found.map(|(_, text)| (*text).to_owned())
        })
    }

    #[test]
    fn smallest_limit_of_all_ancestors_applies() {
        let files = |own, above| {
            [
                ("/sys/fs/cgroup/a/b.service/memory.max", own),
                ("/sys/fs/cgroup/a/memory.max", above),
                ("/sys/fs/cgroup/memory.max", "max\n"),
            ]
        };
        let limit = |own, above| limit_of("0::/a/b.service\n", &[V2], &files(own, above));
        assert_eq!(limit("max\n", "max\n"), None);
        assert_eq!(limit("1073741824\n", "max\n"), Some(1 << 30));
        assert_eq!(limit("1073741824\n", "536870912\n"), Some(512 << 20));
        assert_eq!(limit("", "no number"), None);
    }

    #[test]
    fn memory_high_is_a_limit_too() {
        let files = [
            ("/sys/fs/cgroup/a/memory.max", "1073741824\n"),
            ("/sys/fs/cgroup/a/memory.high", "805306368\n"),
            ("/sys/fs/cgroup/a/memory.swap.max", "0\n"),
        ];
        assert_eq!(limit_of("0::/a\n", &[V2], &files), Some(768 << 20));
    }

    #[test]
    fn cgroup_namespace_shows_its_group_as_the_root() {
        let files = [("/sys/fs/cgroup/memory.max", "268435456\n")];
        assert_eq!(limit_of("0::/\n", &[V2], &files), Some(256 << 20));
        assert_eq!(
            limit_of("0::/../elsewhere\n", &[V2], &files),
            Some(256 << 20)
        );
    }

    #[test]
    fn cgroup_v1_files_are_read() {
        let groups = "9:name=systemd:/\n4:cpu,memory:/docker/1f\n0::/\n";
        let cpu = "33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu";
        let files = [
            ("/sys/fs/cgroup/cpu/docker/1f/memory.limit_in_bytes", "1"),
            (
                "/sys/fs/cgroup/memory/docker/1f/memory.limit_in_bytes",
                "134217728\n",
            ),
            (
                "/sys/fs/cgroup/memory/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
        ];
        assert_eq!(limit_of(groups, &[cpu, V1], &files), Some(128 << 20));
    }

    #[test]
    fn mount_may_show_a_subtree() {
        let mount = "35 31 0:32 /docker/1f /sys/fs/c\\040group rw - cgroup cgroup rw,memory";
        let files = [("/sys/fs/c group/memory.limit_in_bytes", "4096")];
        assert_eq!(
            limit_of("4:memory:/docker/1f\n", &[mount], &files),
            Some(4096)
        );
        // A group outside the mount: only the mount point is visible.
        assert_eq!(
            limit_of("4:memory:/docker/2e\n", &[mount], &files),
            Some(4096)
        );
    }

    #[test]
    fn no_cgroups_means_no_limit() {
        assert_eq!(limit(&|_| None), None);
        assert_eq!(limit_of("0::/a\n", &[V2], &[]), None);
        for odd in [
            "",
            "0",
            "0::",
            "::::",
            "x - cgroup2",
            " - ",
            "1 2 3 - cgroup cgroup",
        ] {
            assert_eq!(limit_of(odd, &[odd, V2], &[]), None, "{odd:?}");
        }
    }
}
