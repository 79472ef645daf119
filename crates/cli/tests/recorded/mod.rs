//! Copies of the files of a host, with what Linux 6.12 said in a guest of the lab.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::command::polder;

/// Files of a cgroup as Linux 6.12 has them, recorded in a guest of the lab.
const RECORDED: [(&str, &str); 5] = [
    ("memory.numa_stat", include_str!("memory.numa_stat")),
    ("memory.stat", include_str!("memory.stat")),
    ("memory.pressure", include_str!("memory.pressure")),
    ("memory.events", include_str!("memory.events")),
    ("memory.reclaim", ""),
];

pub(crate) fn put(root: &Path, path: &str, text: &str) {
    let path = root.join(path.trim_start_matches('/'));
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// A host with a fast and a slow node, and so many services.
pub(crate) fn host(services: usize) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    for (path, text) in [
        ("/sys/devices/system/node/has_memory", "0-1\n"),
        ("/sys/devices/system/node/has_cpu", "0\n"),
        ("/sys/devices/system/node/node0/meminfo", include_str!("meminfo")),
        ("/sys/devices/system/node/node1/meminfo", include_str!("meminfo")),
        ("/sys/devices/virtual/memory_tiering/memory_tier4/nodelist", "0\n"),
        ("/sys/devices/virtual/memory_tiering/memory_tier90/nodelist", "1\n"),
        ("/sys/kernel/mm/numa/demotion_enabled", "false\n"),
        ("/proc/sys/kernel/osrelease", "6.12.0\n"),
        ("/proc/sys/kernel/numa_balancing", "1\n"),
        ("/proc/vmstat", include_str!("vmstat")),
    ] {
        put(root, path, text);
    }
    for service in 0..services {
        let cgroup = format!("/sys/fs/cgroup/system.slice/s{service}.service");
        for (name, text) in RECORDED {
            put(root, &format!("{cgroup}/{name}"), text);
        }
        // Those that the policy opts out are kept to the fast node already.
        let (own, effective) = if service % 3 == 1 { ("0\n", "0\n") } else { ("\n", "0-1\n") };
        put(root, &format!("{cgroup}/cpuset.mems"), own);
        put(root, &format!("{cgroup}/cpuset.mems.effective"), effective);
    }
    folder
}

/// A policy over services of all kinds.
pub(crate) fn policy(services: usize, period: &str) -> String {
    let mut text = format!("period = \"{period}\"\n");
    for service in 0..services {
        let place = match service % 2 {
            0 => format!("unit = \"s{service}.service\""),
            _ => format!("cgroup = \"/system.slice/s{service}.service\""),
        };
        let tier = ["opt-in", "opt-out", "background"][service % 3];
        text += &format!("[service.s{service}]\n{place}\ntier = \"{tier}\"\n");
        if tier == "opt-in" {
            text += "local_low = 0.5\nlocal_high = 0.6\n";
        }
    }
    text
}

/// `polder agent run` on the host below `root`.
pub(crate) fn agent(root: &Path, more: &[&str]) -> Command {
    let mut command = polder();
    command
        .args(["agent", "run", "--journal", "/agent.journal", "--state", "/agent.state", "--root"])
        .arg(root);
    command.arg("--policy").arg(root.join("policy.toml")).args(more);
    command
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
