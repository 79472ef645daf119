//! Scenario: two sockets, each with a fast and a slow node. A service stays on those of the socket that its threads run on.

use polder_lab::check::{Checks, Failed};
use rustix::process::Signal;

use crate::machine::{Service, read, settings};
use crate::tiers::{Agent, polder, service, size, write_new};

const POLICY: &str = r#"
period = "250ms"
step = "16MiB"

[service.east]
cgroup = "/east"
tier = "opt-in"
local_low = 0.60
local_high = 0.70

[service.west]
cgroup = "/west"
tier = "opt-in"
local_low = 0.60
local_high = 0.70
"#;
const MIB: usize = 64;
/// Of bytes that a scenario is about, so many lie where they should. The kernel and the file cache have some of their own everywhere.
const MOST: f64 = 0.90;
/// Control rounds within which both shares are within their bounds.
const ROUNDS: u32 = 40;

/// Runs the scenario, and returns how many checks held.
pub(crate) fn run() -> Result<u32, Failed> {
    let mut checks = Checks::default();
    println!("lab: kernel {}, two sockets", read("/proc/sys/kernel/osrelease")?.trim());
    write_new("/run/policy.toml", POLICY)?;
    let said = polder(&["agent", "check", "--policy", "/run/policy.toml"])?;
    checks.check(said.contains("fast tier: nodes 0-1; slow tier: nodes 2-3"), "both tiers have two nodes")?;
    let east = Service::start_on("0-1", "/east", MIB, 2)?;
    let west = Service::start_on("2-3", "/west", MIB, 2)?;
    let both = [&east, &west];
    let before = settings(&both)?;
    show("before", &both)?;
    let near = |fast: bool| -> Result<bool, Failed> {
        let of = |service: &Service, [own, other]: [&str; 2]| -> Result<bool, Failed> {
            let nodes = service.nodes()?;
            let bytes = |node: &str| nodes.get(node).copied().unwrap_or(0) as f64;
            Ok(bytes(own) >= MOST * (bytes(own) + bytes(other)) && bytes(own) > 0.0)
        };
        let (first, second) = if fast { ("N0", "N1") } else { ("N2", "N3") };
        Ok(of(&east, [first, second])? && of(&west, [second, first])?)
    };
    checks.check(near(true)?, "each service starts on the fast node of its socket")?;
    let free = |node: u32| -> Result<u64, Failed> {
        let path = format!("/sys/devices/system/node/node{node}/meminfo");
        let text = read(&path)?;
        let line = text.lines().find_map(|line| line.split_once("MemFree:"));
        line.and_then(|(_, kib)| kib.trim().split(' ').next()?.parse().ok()).ok_or(path)
    };
    checks.check(
        free(0)? > free(1)? + ((MIB as u64 / 2) << 10),
        "the first socket has much more free memory (the control of where pages come up)",
    )?;

    let mut agent = Agent::start()?;
    await_shares(&mut agent, |local| local <= 0.73)?;
    show("within their bounds", &both)?;
    checks.check(near(false)?, "what went down lies on the slow node of its socket")?;
    let balancing = read(polder_linux::BALANCING)?;
    checks.check(balancing.trim() == "3", "the kernel goes on to bring pages near their threads")?;

    // It stands still meanwhile, so that it does not repair what is not broken yet.
    agent.signal(Signal::STOP)?;
    for service in both {
        // So does the service: the kernel takes few pages at once that are in use.
        service.signal(Signal::STOP)?;
        for _ in 0..20 {
            let fast: u64 = service.bytes()?.iter().sum();
            if fast < (MIB as u64) << 18 {
                break;
            }
            service.reclaim(4)?;
        }
        service.signal(Signal::CONT)?;
    }
    show("demoted further", &both)?;
    let low = |service: &Service| -> Result<bool, Failed> {
        Ok(service.bytes()?.iter().sum::<u64>() < (MIB as u64 * 4 / 10) << 20)
    };
    checks.check(low(&east)? && low(&west)?, "both are under 40% local (the control of the next)")?;
    agent.signal(Signal::CONT)?;
    // One round may have looked before it was stopped.
    agent.round()?;
    agent.round()?;
    await_shares(&mut agent, |local| local >= 0.57)?;
    show("up again", &both)?;
    checks.check(near(true)?, "what came up lies on the fast node of its socket")?;
    checks.check(near(false)?, "what stayed lies on the slow node of its socket")?;
    agent.end(Signal::TERM)?;
    checks.check(settings(&both)? == before, "after a stop every setting is in effect as found")?;
    Ok(checks.0)
}

/// Rounds until the shares of both are as wanted.
fn await_shares(agent: &mut Agent, wanted: impl Fn(f64) -> bool) -> Result<(), Failed> {
    for _ in 0..ROUNDS {
        let round = agent.round()?;
        let local =
            |name: &str| service(&round, name)?["local"].as_f64().ok_or("local is no number".to_owned());
        let shares = [local("east")?, local("west")?];
        println!(
            "round {}: east {:.1}% local, west {:.1}% local",
            round["round"],
            100.0 * shares[0],
            100.0 * shares[1]
        );
        if shares.into_iter().all(&wanted) {
            return Ok(());
        }
    }
    Err(format!("shares are not as wanted within {ROUNDS} rounds"))
}

fn show(when: &str, services: &[&Service]) -> Result<(), Failed> {
    println!("{when}:");
    for service in services {
        let nodes = service.nodes()?;
        let nodes: Vec<String> =
            nodes.iter().map(|(node, bytes)| format!("{node} {}", size(*bytes))).collect();
        println!("  {:<6} {}", service.cgroup.trim_start_matches('/'), nodes.join(", "));
    }
    Ok(())
}
