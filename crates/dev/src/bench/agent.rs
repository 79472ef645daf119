//! `polder-dev bench agent`: what `polder agent run` takes of a core and of memory, on a made-up host of 2 TB.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;
use std::{fs, thread};

use clap::{Args, ValueHint};
use polder_agent::{ExampleService, write_host};
use polder_measure::{Row, Sample, Scratch};

use crate::Failure;

/// Memory of both tiers, and the part of it that services have.
const TIERS: [u64; 2] = [1_500_000_000_000, 500_000_000_000];
const USED: f64 = 0.9;
/// The default period. Rounds here follow each other, and each counts as the work of one period.
const PERIOD_S: f64 = 2.0;
const RUNS: usize = 5;
/// Ticks of a second in `/proc/PID/stat`, on every Linux.
const TICKS: f64 = 100.0;

/// How many services, and which agent.
#[derive(Args)]
pub(super) struct Arguments {
    /// Services of the host.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    services: u32,
    /// Control rounds of a run.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(10..))]
    rounds: u32,
    /// The command whose agent is measured.
    #[arg(long, default_value = "polder", value_name = "FILE", value_hint = ValueHint::CommandName)]
    polder: PathBuf,
}

/// Runs the agent on a host whose services are all within their bounds, and on one where all are over.
pub(super) fn run(arguments: &Arguments) -> Result<Vec<Row>, Failure> {
    let scratch = Scratch::new()?;
    let root = scratch.path().join("host");
    let cgroups: Vec<String> =
        (0..arguments.services).map(|index| format!("/system.slice/s{index}.service")).collect();
    let bytes = TIERS.map(|tier| (tier as f64 * USED / f64::from(arguments.services)) as u64);
    let services: Vec<ExampleService<'_>> = cgroups.iter().map(|cgroup| (&**cgroup, bytes)).collect();
    write_host(&root, TIERS, &services)?;
    let sample = |values| Sample::of(values).ok_or_else(|| Failure("no run".into()));
    let mut rows = vec![];
    // Three quarters of each service are fast. Nothing goes down in files, so that those over their bound are asked in each round.
    for (words, high) in [("within their bounds", 0.8), ("over their bounds", 0.6)] {
        fs::write(root.join("policy.toml"), policy(&cgroups, high))?;
        let [mut shares, mut memory] = [(); 2].map(|()| vec![]);
        for _ in 0..RUNS {
            let (cpu_s, bytes) = once(arguments, &root)?;
            shares.push(100.0 * cpu_s / f64::from(arguments.rounds) / PERIOD_S);
            memory.push(bytes as f64 / 1e6);
        }
        let name = format!("{} services {words}, 2 TB", arguments.services);
        rows.push(Row::measured("agent", &name, "of a core", sample(shares)?, "%"));
        rows.push(Row::measured("agent", &name, "memory at most", sample(memory)?, "MB"));
    }
    Ok(rows)
}

fn policy(cgroups: &[String], high: f64) -> String {
    let mut policy = "period = \"1ms\"\nstep = \"8GiB\"\n".to_owned();
    for (index, cgroup) in cgroups.iter().enumerate() {
        // Writing to a string cannot fail.
        let _ = writeln!(
            policy,
            "[service.s{index}]\ncgroup = \"{cgroup}\"\ntier = \"opt-in\"\nlocal_low = 0.5\nlocal_high = {high:?}"
        );
    }
    policy
}

/// A run of the agent: seconds of a core, and bytes of memory that it had at most.
fn once(arguments: &Arguments, root: &std::path::Path) -> Result<(f64, u64), Failure> {
    let before = cpu_of_children_s()?;
    let mut command = Command::new(&arguments.polder);
    command.args(["agent", "run", "--journal", "/agent.journal", "--state", "/agent.state"]);
    command.arg("--policy").arg(root.join("policy.toml")).arg("--root").arg(root);
    command.args(["--rounds", &arguments.rounds.to_string()]).stdout(Stdio::null());
    let mut child = command.spawn().map_err(|error| {
        Failure(format!("{}: {error}; name one with --polder", arguments.polder.display()))
    })?;
    let mut most = 0;
    let status = loop {
        most = most.max(peak_bytes(child.id()).unwrap_or(0));
        if let Some(status) = child.try_wait()? {
            break status;
        }
        thread::sleep(Duration::from_millis(5));
    };
    if !status.success() {
        return Err(Failure(format!("polder agent run ended with {status}")));
    }
    Ok((cpu_of_children_s()? - before, most))
}

/// Seconds of a core that children took which have ended.
fn cpu_of_children_s() -> Result<f64, Failure> {
    let stat = fs::read_to_string("/proc/self/stat")?;
    // The name in parentheses may have spaces; cutime and cstime are the 14th and 15th field behind it.
    let fields = stat.rsplit_once(") ").map_or("", |(_, rest)| rest).split(' ').skip(13).take(2);
    Ok(fields.filter_map(|field| field.parse::<f64>().ok()).sum::<f64>() / TICKS)
}

fn peak_bytes(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}
