//! `polder-dev bench ab`: a command on the memory of some nodes, and on that of others, in turn: the Vistara paper's A/B tests with
//! and without slow memory, which differ in `cpuset.mems` alone.

use std::ffi::OsString;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use polder_linux::{CGROUPS, Cgroup, Host, parse_nodes, show_nodes};

use super::memory::kind;
use crate::Failure;
use polder_cli::{Asked, signals};
use polder_measure::{Better, Row, Sample};

/// A command, and the memory that it is given in turn.
#[derive(Args)]
pub(super) struct Arguments {
    /// Nodes of the control, such as 0.
    #[arg(long, value_name = "NODES")]
    a: String,
    /// Nodes of the test, such as 0-1.
    #[arg(long, value_name = "NODES")]
    b: String,
    /// Runs of each.
    #[arg(long, default_value_t = 5, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=1000))]
    rounds: u16,
    /// The cgroup that gets one more for each, by its path below the mount.
    #[arg(long, default_value = "/", value_name = "PATH")]
    parent: String,
    /// The command. Its output goes to stderr.
    #[arg(required = true, last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// What runs in a cgroup, in place of this process.
#[derive(Args)]
pub(crate) struct Enter {
    /// The folder of the cgroup.
    folder: PathBuf,
    /// The command.
    #[arg(required = true, last = true)]
    command: Vec<OsString>,
}

/// Puts this process into a cgroup, and runs the command in its place.
pub(crate) fn enter(arguments: &Enter) -> Result<ExitCode, Failure> {
    let file = arguments.folder.join("cgroup.procs");
    // 0 is the process that writes it.
    fs::write(&file, "0").map_err(|error| Failure(format!("{}: {error}", file.display())))?;
    let (program, words) = arguments.command.split_first().ok_or_else(|| Failure("no command".into()))?;
    let error = Command::new(program).args(words).exec();
    Err(Failure(format!("{}: {error}", program.to_string_lossy())))
}

/// Runs the command in turn on both.
pub(super) fn run(arguments: &Arguments) -> Result<Vec<Row>, Failure> {
    let asked = signals()?;
    let sides = [Side::make(arguments, "a", &arguments.a)?, Side::make(arguments, "b", &arguments.b)?];
    let mut runs = [Vec::new(), Vec::new()];
    for round in 0..usize::from(arguments.rounds) {
        // The order is turned in each round, so that what a run leaves warm serves both.
        for turn in 0..2 {
            let side = (round + turn) % 2;
            runs[side].push(sides[side].run(&arguments.command, &asked)?);
        }
    }
    Ok(rows(&sides.each_ref().map(|side| side.nodes.as_str()), &runs))
}

/// What one run took.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// Seconds from its start to its end.
    elapsed: f64,
    /// Seconds of CPUs.
    cpu: f64,
    /// Bytes that the kernel promoted and demoted.
    moved: f64,
}

/// A figure of a run.
type Figure = fn(&Run) -> f64;

/// Rows of both sides, those of the test beside the control's.
fn rows(nodes: &[&str; 2], runs: &[Vec<Run>; 2]) -> Vec<Row> {
    let figures: [(&str, Figure, &str); 3] = [
        ("time", |run| run.elapsed, "s"),
        ("CPU time", |run| run.cpu, "s"),
        ("migrated", |run| run.moved, "B"),
    ];
    let mut rows = Vec::new();
    for (metric, figure, unit) in figures {
        let samples = runs.each_ref().map(|runs| Sample::of(runs.iter().map(figure).collect()));
        let [Some(a), Some(b)] = samples else { continue };
        let row = |side: &str, nodes: &str, sample| Row {
            kind: kind(),
            ..Row::measured("ab", format!("{side}: memory of nodes {nodes}"), metric, sample, unit)
        };
        rows.push(row("A", nodes[0], a));
        let test = row("B", nodes[1], b);
        rows.push(if a.median > 0.0 && b.median > 0.0 {
            test.beside("A", a.median, Better::Less)
        } else {
            test
        });
    }
    rows
}

/// A cgroup of this run alone, which is removed with it.
struct Side {
    nodes: String,
    folder: PathBuf,
    cgroup: Cgroup,
}

impl Side {
    fn make(arguments: &Arguments, name: &str, nodes: &str) -> Result<Self, Failure> {
        let wanted = parse_nodes(nodes).filter(|nodes| !nodes.is_empty());
        let wanted =
            wanted.ok_or_else(|| Failure(format!("--{name} {nodes:?} is no list of nodes such as 0-1")))?;
        let parent = arguments.parent.trim_end_matches('/');
        let path = format!("{parent}/polder-{name}-{}", std::process::id());
        let cgroup = Cgroup::new(&path).ok_or_else(|| {
            Failure(format!("--parent {:?} is no path of a cgroup below {CGROUPS}", arguments.parent))
        })?;
        if !PathBuf::from(format!("{CGROUPS}{parent}/cgroup.controllers")).exists() {
            return Err(Failure(format!(
                "{CGROUPS}{parent} is no cgroup of version 2; mount one there, or name a cgroup with --parent"
            )));
        }
        let folder = PathBuf::from(cgroup.folder());
        fs::create_dir(&folder).map_err(|error| {
            Failure(format!(
                "{}: {error}; cgroup version 2 and root are needed, --parent names another",
                folder.display()
            ))
        })?;
        let side = Self { nodes: show_nodes(&wanted), folder, cgroup };
        let controllers = fs::read_to_string(side.folder.join("cgroup.controllers")).unwrap_or_default();
        if let Some(missing) =
            ["cpuset", "memory"].iter().find(|it| !controllers.split_whitespace().any(|has| has == **it))
        {
            return Err(Failure(format!(
                "{CGROUPS}{parent} does not give the controller {missing} to its cgroups; \
                 enable it: echo +{missing} > {CGROUPS}{parent}/cgroup.subtree_control"
            )));
        }
        fs::write(side.folder.join("cpuset.mems"), &side.nodes).map_err(|error| {
            Failure(format!("--{name} {}: {error}; see polder doctor for the nodes", side.nodes))
        })?;
        Ok(side)
    }

    /// Runs the command once. A signal ends it.
    fn run(&self, command: &[OsString], asked: &Receiver<Asked>) -> Result<Run, Failure> {
        let before = self.counters();
        let mut entering = Command::new(std::env::current_exe()?);
        entering.args(["second", "enter"]).arg(&self.folder).arg("--").args(command);
        // Rows alone go to stdout.
        entering.stdin(Stdio::null()).stdout(std::io::stderr());
        let start = Instant::now();
        let mut child = entering.spawn()?;
        let (sender, ended) = channel();
        thread::spawn(move || {
            let status = child.wait();
            // The receiver is gone where the run was stopped.
            drop(sender.send((status, start.elapsed())));
        });
        let (status, elapsed): (std::io::Result<ExitStatus>, Duration) = loop {
            match ended.recv_timeout(Duration::from_millis(100)) {
                Ok(found) => break found,
                Err(_) if asked.try_recv() != Err(TryRecvError::Empty) => {
                    return Err(Failure("stopped; no figures of this run".into()));
                }
                Err(_) => {}
            }
        };
        let status = status?;
        if !status.success() {
            return Err(Failure(format!(
                "the command ended with {status} on memory of nodes {}",
                self.nodes
            )));
        }
        let after = self.counters();
        Ok(Run { elapsed: elapsed.as_secs_f64(), cpu: after[0] - before[0], moved: after[1] - before[1] })
    }

    /// Seconds of CPUs and bytes that were migrated, of all runs.
    fn counters(&self) -> [f64; 2] {
        let text = fs::read_to_string(self.folder.join("cpu.stat")).unwrap_or_default();
        let cpu = text.lines().find_map(|line| line.strip_prefix("usage_usec ")?.trim().parse::<f64>().ok());
        let counts = self.cgroup.counts(&Host::new()).unwrap_or_default();
        [cpu.unwrap_or(0.0) / 1e6, (counts.promoted + counts.demoted) as f64 * polder_offload::PAGE as f64]
    }
}

impl Drop for Side {
    /// Ends what the command left, and removes the cgroup.
    fn drop(&mut self) {
        let kill = self.folder.join("cgroup.kill");
        if kill.exists() {
            drop(fs::write(kill, "1"));
        }
        for _ in 0..100 {
            match fs::remove_dir(&self.folder) {
                Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {
                    thread::sleep(Duration::from_millis(20));
                }
                Ok(()) => return,
                Err(error) => return eprintln!("polder: {}: {error}", self.folder.display()),
            }
        }
        eprintln!("polder: {} still has processes; end them and remove it: rmdir {0}", self.folder.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_test_stands_beside_the_control() {
        let run = |elapsed| Run { elapsed, cpu: 1.0, moved: 0.0 };
        let rows = rows(&["0", "0-1"], &[vec![run(2.0), run(3.0), run(2.5)], vec![run(5.0)]]);
        assert_eq!(rows.len(), 6);
        assert_eq!((rows[0].value, rows[1].peer_value, rows[1].ratio), (2.5, Some(2.5), Some(0.5)));
        assert_eq!(rows[5].ratio, None, "no ratio to nothing");
    }

    #[test]
    fn what_cannot_be_compared_is_named() {
        let arguments = |parent: &str| Arguments {
            a: "0".into(),
            b: "0-x".into(),
            rounds: 1,
            parent: parent.into(),
            command: vec!["true".into()],
        };
        let refused =
            |side| match Side::make(&arguments("/none/such"), side, if side == "a" { "0" } else { "0-x" }) {
                Ok(_) => panic!("made"),
                Err(refused) => refused.0,
            };
        assert_eq!(refused("b"), "--b \"0-x\" is no list of nodes such as 0-1");
        let no_cgroup = "/sys/fs/cgroup/none/such is no cgroup of version 2";
        assert!(refused("a").starts_with(no_cgroup), "{}", refused("a"));
        assert!(
            matches!(Side::make(&arguments("none"), "a", "0"), Err(Failure(said)) if said.starts_with("--parent"))
        );
    }
}
