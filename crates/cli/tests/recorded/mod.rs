//! Copies of the files of a host, with what Linux 6.12 said in a guest of the lab.

use std::fs;
use std::path::Path;
use std::process::Command;

use polder_agent::{ExampleService, keep_to_fast, write_host};

use crate::command::polder;

pub(crate) fn put(root: &Path, path: &str, text: &str) {
    let path = root.join(path.trim_start_matches('/'));
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// A host with a fast and a slow node of a TB each, and so many services with the bytes of one in the lab.
pub(crate) fn host(services: usize) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let cgroups: Vec<String> =
        (0..services).map(|service| format!("/system.slice/s{service}.service")).collect();
    let services: Vec<ExampleService<'_>> =
        cgroups.iter().map(|cgroup| (&**cgroup, [117_198_848, 50_577_408])).collect();
    write_host(folder.path(), [1_000_000_000_000; 2], &services).unwrap();
    for cgroup in cgroups.iter().skip(1).step_by(3) {
        // Those that the policy opts out are kept to the fast node already.
        keep_to_fast(folder.path(), cgroup).unwrap();
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
    agent_with(root, "/agent.journal", "/agent.state", more)
}

/// As [`agent`], with another journal or state.
pub(crate) fn agent_with(root: &Path, journal: &str, state: &str, more: &[&str]) -> Command {
    let mut command = polder();
    command.args(["agent", "run", "--journal", journal, "--state", state, "--root"]).arg(root);
    command.arg("--policy").arg(root.join("policy.toml")).args(more);
    command
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
