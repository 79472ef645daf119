//! The memory that this process may have.

/// Bytes that a cgroup may have, and those that it has and cannot be taken from it: page cache that was not used lately is
/// taken before anything fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Group {
    limit: u64,
    used: u64,
}

/// Each limit of the cgroups that this process is in, up to the root: of version 2, of version 1, or of both.
fn groups(read: &impl Fn(&str) -> Option<String>) -> Vec<Group> {
    let lines = read("/proc/self/cgroup").unwrap_or_default();
    // ID:controllers:path, and a path may have colons.
    let fields = lines.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':');
        Some((parts.next()?, parts.next()?, parts.next()?))
    });
    fields
        .flat_map(|(_, controllers, path)| {
            let (mount, limits, current, cache) = match controllers {
                "" => ("", ["memory.max", "memory.high"].as_slice(), "memory.current", "inactive_file "),
                _ if controllers.split(',').any(|controller| controller == "memory") => (
                    "/memory",
                    ["memory.limit_in_bytes"].as_slice(),
                    "memory.usage_in_bytes",
                    "total_inactive_file ",
                ),
                _ => return vec![],
            };
            let above = std::iter::successors(Some(path.trim_end_matches('/')), |path| {
                Some(path.rsplit_once('/')?.0)
            });
            above
                .filter_map(|path| {
                    let file = |name: &str| read(&format!("{}{mount}{path}/{name}", crate::CGROUPS));
                    let number = |name: &str| file(name)?.trim().parse::<u64>().ok();
                    let limit = limits.iter().filter_map(|name| number(name)).min()?;
                    let stat = file("memory.stat").unwrap_or_default();
                    let cache = stat
                        .lines()
                        .find_map(|line| line.strip_prefix(cache)?.trim().parse().ok())
                        .unwrap_or(0);
                    Some(Group { limit, used: number(current)?.saturating_sub(cache) })
                })
                .collect()
        })
        .collect()
}

/// Bytes of memory that this process may still take: what the host has left, and no more than each of its cgroups.
/// `read` returns the text of a file. [`None`] if nothing says it.
pub fn available_memory(read: impl Fn(&str) -> Option<String>) -> Option<u64> {
    let text = read("/proc/meminfo")?;
    let kib = text
        .lines()
        .find_map(|it| it.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?.trim().parse().ok());
    let host = kib.map(|kib: u64| kib << 10);
    host.into_iter().chain(groups(&read).iter().map(|it| it.limit.saturating_sub(it.used))).min()
}

/// Bytes of memory that the cgroups of this process allow it; [`None`] without a limit.
pub fn memory_limit(read: impl Fn(&str) -> Option<String>) -> Option<u64> {
    groups(&read).iter().map(|it| it.limit).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// What is left in a tree of files below the mount of the cgroups, on a host that has 24 GB.
    fn left(cgroup: &str, files: &[(&str, u64)]) -> u64 {
        left_of(cgroup, &files.iter().map(|(name, it)| (*name, it.to_string())).collect::<Vec<_>>())
    }

    fn left_of(cgroup: &str, files: &[(&str, String)]) -> u64 {
        let read = |path: &str| match path {
            "/proc/meminfo" => Some("MemTotal: 25000000 kB\nMemAvailable:   24000000 kB\n".to_owned()),
            "/proc/self/cgroup" => Some(cgroup.to_owned()),
            _ => {
                let name = path.strip_prefix("/sys/fs/cgroup")?;
                files.iter().find(|it| it.0 == name).map(|it| it.1.clone())
            }
        };
        available_memory(read).expect("the host says what it has")
    }

    #[test]
    fn a_host_without_limits_has_what_is_available() {
        assert_eq!(left("0::/a\n", &[]), 24_000_000 << 10);
        let files = [("/a/memory.max", "max\n".to_owned()), ("/a/memory.current", "5".to_owned())];
        assert_eq!(left_of("0::/a\n", &files), 24_000_000 << 10);
    }

    #[test]
    fn the_limit_of_a_group_or_of_one_above_it_counts_with_what_is_in_use() {
        assert_eq!(
            left(
                "0::/a.slice/b\n",
                &[("/a.slice/b/memory.max", 4 * GIB), ("/a.slice/b/memory.current", GIB)]
            ),
            3 * GIB
        );
        assert_eq!(left("0::/p/c\n", &[("/p/memory.max", 4 * GIB), ("/p/memory.current", GIB)]), 3 * GIB);
        // In a container the group is the root of the mount.
        assert_eq!(left("0::/\n", &[("/memory.max", 4 * GIB), ("/memory.current", GIB)]), 3 * GIB);
        assert_eq!(left("0::/a\n", &[("/a/memory.max", GIB), ("/a/memory.current", 2 * GIB)]), 0);
    }

    #[test]
    fn a_path_may_have_colons() {
        let files = [
            ("/app-dbus\\x2d:1.2\\x2dorg.slice/memory.max", 4 * GIB),
            ("/app-dbus\\x2d:1.2\\x2dorg.slice/memory.current", GIB),
        ];
        assert_eq!(left("0::/app-dbus\\x2d:1.2\\x2dorg.slice\n", &files), 3 * GIB);
    }

    #[test]
    fn version_1_counts_alone_and_beside_version_2() {
        let files = [
            ("/memory/docker/abc/memory.limit_in_bytes", 4 * GIB),
            ("/memory/docker/abc/memory.usage_in_bytes", GIB),
            ("/memory/memory.limit_in_bytes", i64::MAX as u64),
            ("/memory/memory.usage_in_bytes", 8 * GIB),
        ];
        let hybrid = "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n";
        assert_eq!(left(hybrid, &files), 3 * GIB);
        // A container sees its own group as the root, and may be told its name outside.
        assert_eq!(
            left(
                "4:memory:/docker/other\n",
                &[("/memory/memory.limit_in_bytes", 4 * GIB), ("/memory/memory.usage_in_bytes", GIB)]
            ),
            3 * GIB
        );
    }

    #[test]
    fn a_group_is_slowed_from_memory_high_on_so_that_is_its_limit() {
        let files = [
            ("/a/memory.max", "max".to_owned()),
            ("/a/memory.high", (4 * GIB).to_string()),
            ("/a/memory.current", GIB.to_string()),
        ];
        assert_eq!(left_of("0::/a\n", &files), 3 * GIB);
    }

    #[test]
    fn page_cache_that_was_not_used_lately_is_free() {
        let version_2 = [
            ("/a/memory.max", (4 * GIB).to_string()),
            ("/a/memory.current", (3 * GIB + GIB / 2).to_string()),
            ("/a/memory.stat", format!("anon 5\ninactive_file {}\nactive_file 7\n", 3 * GIB)),
        ];
        assert_eq!(left_of("0::/a\n", &version_2), 3 * GIB + GIB / 2);
        let version_1 = [
            ("/memory/a/memory.limit_in_bytes", (4 * GIB).to_string()),
            ("/memory/a/memory.usage_in_bytes", (2 * GIB).to_string()),
            // What groups below it have is in the total alone.
            ("/memory/a/memory.stat", format!("inactive_file 5\ntotal_inactive_file {GIB}\n")),
        ];
        assert_eq!(left_of("4:memory:/a\n", &version_1), 3 * GIB);
    }

    #[test]
    fn a_limit_is_known_whatever_is_in_use() {
        let read = |path: &str| match path {
            "/proc/self/cgroup" => Some("0::/a/b\n".to_owned()),
            "/sys/fs/cgroup/a/memory.max" => Some("4096\n".to_owned()),
            "/sys/fs/cgroup/a/memory.current" => Some("8192\n".to_owned()),
            _ => None,
        };
        assert_eq!(memory_limit(read), Some(4096));
        assert_eq!(memory_limit(|_| None), None);
    }
}
