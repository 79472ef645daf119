//! Scenario: a service of 3 GB, which the agent brings to its share in a minute of rounds by its default settings.

use polder_lab::check::{Checks, Failed};
use rustix::process::Signal;

use crate::machine::{Service, read, settings};
use crate::tiers::{Agent, bytes, polder, service, size, write_new};

/// Bounds, and nothing else.
const POLICY: &str = r#"
[service.large]
cgroup = "/large"
tier = "opt-in"
local_high = 0.75
"#;
const HIGH: f64 = 0.75;
const MIB: usize = 3072;
const HOT_MIB: usize = 64;
/// Rounds of the default period of 2 s, which come to a minute.
const ROUNDS: u64 = 30;

/// Runs the scenario, and returns how many checks held.
pub(crate) fn run() -> Result<u32, Failed> {
    let mut checks = Checks::default();
    println!("lab: kernel {}, a service of {MIB} MiB", read("/proc/sys/kernel/osrelease")?.trim());
    write_new("/run/policy.toml", POLICY)?;
    let large = Service::start("/large", MIB, HOT_MIB)?;
    let [fast, slow] = large.bytes()?;
    println!("before: {} fast, {} slow", size(fast), size(slow));
    checks.check(
        fast as f64 > 0.95 * (fast + slow) as f64,
        "nearly all of it starts on the fast node (the control of the next)",
    )?;
    let before = settings(&[&large])?;
    polder(&["agent", "check", "--policy", "/run/policy.toml"])?;
    let mut agent = Agent::start()?;
    let (mut begin, mut within) = (None, None);
    for _ in 0..ROUNDS {
        let round = agent.round()?;
        let row = service(&round, "large")?;
        let now = round["time_ms"].as_u64().ok_or("time_ms is no number")?;
        let begin = *begin.get_or_insert(now);
        let local = row["local"].as_f64().ok_or("local is no number")?;
        println!(
            "round {} after {:.1} s: {:.1}% local, {} demoted, pressure {}%",
            round["round"],
            (now - begin) as f64 / 1e3,
            100.0 * local,
            size(bytes(row, "demoted")?),
            row["pressure"]
        );
        if local <= HIGH + 0.01 {
            within = Some(now - begin);
            break;
        }
    }
    checks.check(within.is_some(), "it is within a point of its bound in 30 rounds of 2 s")?;
    let [fast, slow] = large.bytes()?;
    println!("after: {} fast, {} slow", size(fast), size(slow));
    checks.check((fast + slow) as f64 > 0.97 * (MIB << 20) as f64, "nothing of it was evicted on the way")?;
    agent.end(Signal::TERM)?;
    checks.check(settings(&[&large])? == before, "after a stop every setting is in effect as found")?;
    Ok(checks.0)
}
