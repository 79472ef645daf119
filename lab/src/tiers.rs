//! Scenario: two services on a host with a slow tier, an agent that is stopped and one that is killed.

use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, Stdio};

use bytesize::ByteSize;
use polder_lab::check::{Checks, Failed};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::machine::{Service, read, settings, write};

const POLICY: &str = r#"
period = "250ms"
step = "16MiB"

[service.cache]
cgroup = "/cache"
tier = "opt-in"
local_low = 0.60
local_high = 0.70

[service.web]
cgroup = "/web"
tier = "opt-out"
"#;
const HIGH: f64 = 0.70;
pub(crate) const JOURNAL: &str = "/run/agent.journal";
const STATE: &str = "/run/agent.state";
const RECORD: &str = "/run/record.jsonl";
/// Changes of the policy that leave every setting as found.
const CHANGES: u64 = 100;
/// Control rounds within which a share is within its bounds, from a start 30 points outside.
const ROUNDS: u64 = 12;
/// Control rounds within which an opted-out service has nothing on the slow tier.
const REPAIR_ROUNDS: u64 = 2;

/// The agent under test, and the rounds that it prints.
pub(crate) struct Agent {
    child: Child,
    rounds: Lines<BufReader<ChildStdout>>,
}

impl Agent {
    pub(crate) fn start() -> Result<Self, Failed> {
        let mut command = Command::new("/bin/polder");
        command.args(["agent", "run", "--policy", "/run/policy.toml", "--journal", JOURNAL, "--json"]);
        command.args(["--state", STATE, "--record", RECORD]);
        let mut child =
            command.stdout(Stdio::piped()).spawn().map_err(|error| format!("polder agent: {error}"))?;
        let rounds = BufReader::new(child.stdout.take().expect("its output is a pipe")).lines();
        Ok(Self { child, rounds })
    }

    /// The next round, past lines that tell of restored settings.
    pub(crate) fn round(&mut self) -> Result<Value, Failed> {
        loop {
            let line = self.rounds.next().ok_or("the agent ended")?.map_err(|error| error.to_string())?;
            match serde_json::from_str(&line) {
                Ok(round) => return Ok(round),
                Err(_) => println!("  agent: {line}"),
            }
        }
    }

    pub(crate) fn signal(&self, signal: Signal) -> Result<(), Failed> {
        kill_process(Pid::from_child(&self.child), signal).map_err(|error| format!("kill: {error}"))
    }

    pub(crate) fn end(mut self, signal: Signal) -> Result<(), Failed> {
        self.signal(signal)?;
        // What it printed before its end, so that it never waits for a reader.
        for line in self.rounds.by_ref().map_while(Result::ok).filter(|line| !line.starts_with('{')) {
            println!("  agent: {line}");
        }
        self.child.wait().map(drop).map_err(|error| error.to_string())
    }
}

/// Runs the scenario, and returns how many checks held.
///
/// With `is_slow` each access to the slow tier is emulated: what moves memory often or measures it has few pages, and nothing is moved up
/// and down for a check alone.
pub(crate) fn run(is_slow: bool) -> Result<u32, Failed> {
    println!("lab: kernel {}", read("/proc/sys/kernel/osrelease")?.trim());
    write_new("/run/policy.toml", POLICY)?;
    doctor()?;
    if kernel_tiers()? < 2 {
        return refused();
    }
    let cache = Service::start("/cache", 160, 40)?;
    let web = Service::start("/web", 80, 80)?;
    let both = [&cache, &web];
    let mut checks = Checks::default();
    show("before", &both)?;
    let before = settings(&both)?;

    without_agent(&web, &mut checks)?;
    conformance(&mut checks)?;

    let mut agent = Agent::start()?;
    hold_share(&mut agent, &mut checks)?;
    repair(&mut agent, &web, &mut checks)?;
    show("with the agent", &both)?;
    // Up to Linux 6.5 pages that NUMA balancing watches may not come up; what came with 6.9 tells.
    if !is_slow && std::path::Path::new(polder_linux::INTERLEAVE).exists() {
        rise(&mut agent, &cache, &mut checks)?;
    }
    noisy_neighbour(&mut agent, &mut checks)?;
    let said = polder(&["agent", "explain", "cache", "--state", STATE])?;
    checks
        .check(said.contains("(/run/policy.toml line "), "polder agent explain names a line of the policy")?;
    checks
        .check(settings(&both)? != before, "the agent changed settings (the control of the checks below)")?;
    agent.end(Signal::TERM)?;
    checks.check(settings(&both)? == before, "after a stop every setting is in effect as found")?;

    let mut agent = Agent::start()?;
    agent.round()?;
    agent.end(Signal::KILL)?;
    checks.check(
        settings(&both)? != before,
        "after kill -9 settings are left changed (the control of the next)",
    )?;
    let status = Command::new("/bin/polder").args(["agent", "restore", "--journal", JOURNAL]).status();
    checks.check(status.is_ok_and(|status| status.success()), "polder agent restore ends well")?;
    checks.check(
        settings(&both)? == before,
        "after kill -9 and a restore every setting is in effect as found",
    )?;
    let said = polder(&["agent", "replay", RECORD])?;
    checks.check(
        said.contains("decided as recorded"),
        "the record of these runs replays to the same decisions",
    )?;
    let (cache, web) = match is_slow {
        false => (cache, web),
        true => {
            drop((cache, web));
            (Service::start("/cache", 8, 1)?, Service::start("/web", 4, 1)?)
        }
    };
    let both = [&cache, &web];
    change_often(&both, &before, &mut checks)?;
    show("after", &both)?;
    drop((cache, web));
    if !is_before(6, 19)? {
        kernel_share(&mut checks)?;
    }
    stress(if is_slow { "1" } else { "32" }, &mut checks)?;
    Ok(checks.0)
}

/// The acceptance test of a share, where the kernel holds it by goals of DAMON, as from Linux 6.19 on.
fn kernel_share(checks: &mut Checks) -> Result<(), Failed> {
    let cache = Service::start("/cache", 160, 40)?;
    let damon =
        || polder_linux::share_settings().iter().filter_map(|path| read(path).ok()).collect::<Vec<_>>();
    let found = (settings(&[&cache])?, damon());
    change_policy(&format!(
        "fair_share = \"kernel\"\n{}",
        POLICY.split("[service.web]").next().unwrap_or(POLICY)
    ))?;
    let mut agent = Agent::start()?;
    checks.check(
        cache.bytes()?[1] < 8 << 20,
        "cache starts 25 points or more above its bounds (the control of the next)",
    )?;
    hold_share(&mut agent, checks)?;
    let round = agent.round()?;
    let cause = service(&round, "cache")?["cause"]["what"].as_str().unwrap_or_default().to_owned();
    println!("cache: {cause}; alarms {}", round["alarms"]);
    checks.check(cause.contains("goals of DAMON"), "the kernel holds that share")?;
    checks.check(damon() != found.1, "DAMON is set up (the control of the next)")?;
    agent.end(Signal::KILL)?;
    polder(&["agent", "restore", "--journal", JOURNAL])?;
    checks.check((settings(&[&cache])?, damon()) == found, "after kill -9 and a restore DAMON is as found")
}

/// The benchmarks of memory over two nodes, in a few samples: that they run, say where the bytes lay, and call their figures emulated.
fn stress(mib: &str, checks: &mut Checks) -> Result<(), Failed> {
    let few = ["--mib", mib, "--samples", "3", "--json"];
    let bench = |words: &[&str]| -> Result<Vec<Value>, Failed> {
        let said = said("/bin/polder-dev", &[&["bench"], words].concat())?;
        said.lines()
            .map(|line| serde_json::from_str(line).map_err(|error| format!("{line}: {error}")))
            .collect()
    };
    let value = |rows: &[Value], case: &str, metric: &str| -> Result<f64, Failed> {
        let is_it = |row: &&Value| row["case"] == case && row["metric"] == metric;
        let row = rows.iter().find(is_it).ok_or_else(|| format!("no row {case}, {metric}"))?;
        row["value"].as_f64().ok_or_else(|| format!("no number: {row}"))
    };
    let memory = bench(&[&["memory"], &few[..]].concat())?;
    let is_emulated = |rows: &[Value]| rows.iter().all(|row| row["kind"] == "emulated");
    let has_both = ["node 0 idle", "node 1 idle"].iter().all(|case| value(&memory, case, "latency").is_ok());
    checks.check(
        has_both && is_emulated(&memory),
        "polder-dev bench memory has rows of both nodes, called emulated",
    )?;
    let knee = bench(&[&["knee", "--local", "75", "--hot", "50,75,100"], &few[..]].concat())?;
    let slow = |hot: u32| value(&knee, &format!("{hot}% hot, 75% local, node 1"), "bandwidth");
    let spills = slow(50)? == 0.0 && slow(75)? == 0.0 && slow(100)? > 0.0;
    checks.check(
        spills,
        "polder-dev bench knee reads the slow node only where the hot part is larger than the fast one",
    )?;
    let words = ["ab", "--a", "0", "--b", "1", "--rounds", "2", "--json", "--"];
    let ab = bench(
        &[&words[..], &["/bin/polder-dev", "bench", "memory", "--node", "1", "--mib", "4", "--samples", "1"]]
            .concat(),
    );
    checks
        .check(ab.is_err(), "a command that needs the memory of node 1 fails under cpuset.mems of node 0")?;
    let ab = bench(&[&words[..], &["/bin/polder", "--version"]].concat())?;
    let times = ["A: memory of nodes 0", "B: memory of nodes 1"].map(|case| value(&ab, case, "time"));
    let has_times = times.iter().all(|time| time.as_ref().is_ok_and(|time| *time > 0.0));
    checks.check(
        has_times && is_emulated(&ab),
        "polder-dev bench ab times a command on the memory of each node",
    )?;
    let left = std::fs::read_dir("/sys/fs/cgroup").map_err(|error| error.to_string())?.flatten();
    let left = left.filter(|entry| entry.file_name().to_string_lossy().starts_with("polder-")).count();
    checks.check(left == 0, "polder-dev bench ab leaves no cgroup")
}

/// What an operator sees first.
fn doctor() -> Result<(), Failed> {
    let output = Command::new("/bin/polder").arg("doctor").output().map_err(|error| error.to_string())?;
    print!("{}", String::from_utf8_lossy(&output.stdout));
    Ok(())
}

fn kernel_tiers() -> Result<usize, Failed> {
    let folder = "/sys/devices/virtual/memory_tiering";
    let entries = std::fs::read_dir(folder).map_err(|error| format!("{folder}: {error}"))?;
    Ok(entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("memory_tier"))
        .count())
}

/// A kernel with one tier, such as 6.1: reclaim would evict, so the agent says why it does not start, and changes nothing.
fn refused() -> Result<u32, Failed> {
    let mut checks = Checks::default();
    let cache = Service::start("/cache", 160, 40)?;
    let found = settings(&[&cache])?;
    let mut command = Command::new("/bin/polder");
    command.args(["agent", "run", "--policy", "/run/policy.toml", "--journal", JOURNAL]);
    let output = command.output().map_err(|error| format!("polder agent: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    print!("{said}");
    checks.check(!output.status.success(), "a kernel with one tier is refused")?;
    checks.check(said.contains("into one memory tier"), "the agent says why")?;
    checks.check(settings(&[&cache])? == found, "no setting was changed")?;
    Ok(checks.0)
}

/// The control: demotion breaks an opt-out by cpuset alone, and nobody repairs it.
fn without_agent(web: &Service, checks: &mut Checks) -> Result<(), Failed> {
    let mems = "/sys/fs/cgroup/web/cpuset.mems";
    write(mems, "0")?;
    write("/sys/kernel/mm/numa/demotion_enabled", "true")?;
    web.reclaim(20)?;
    let [_, slow] = web.bytes()?;
    println!("without the agent: web is kept to node 0 by cpuset.mems, and has {} on node 1", size(slow));
    // From about Linux 6.16 on demotion respects cpusets.
    if is_before(6, 16)? {
        checks.check(slow > 0, "demotion ignores cpuset.mems on this kernel (the control of the repair)")?;
    }
    write("/sys/kernel/mm/numa/demotion_enabled", "false")?;
    // A set that changes migrates what lies outside it.
    write(mems, "0-1")?;
    write(mems, "0")?;
    write(mems, "0-1")?;
    checks.check(web.bytes()?[1] == 0, "web starts with nothing on the slow tier")
}

/// What the agent takes for granted of a kernel, which its tests hold a tree of files to.
fn conformance(checks: &mut Checks) -> Result<(), Failed> {
    // From about Linux 6.16 on demotion respects cpusets; nothing of this rests on it.
    let bench = Service::start("/bench", 64, 4)?;
    let cgroup = polder_linux::Cgroup::new(bench.cgroup).ok_or("/bench is no cgroup")?;
    let kernel = polder_linux::Host::new().moving_pages_by(polder_offload::move_pages);
    let checked = polder_linux::conformance::check(&kernel, &cgroup)?;
    println!("this kernel behaves as the tree of files of the tests, in {} ways", checked.len());
    // Three of them are about interleave weights, which Linux before 6.9 has not.
    let fewest = if std::path::Path::new(polder_linux::INTERLEAVE).exists() { 20 } else { 17 };
    checks.check(checked.len() >= fewest, "the kernel behaves as the agent takes for granted")
}

/// Policies that are drawn, one after the other, while the agent runs.
fn change_often(both: &[&Service; 2], found: &[(String, String)], checks: &mut Checks) -> Result<(), Failed> {
    let mut agent = Agent::start()?;
    // From its first round on it catches signals.
    agent.round()?;
    let mut draw = Draw(27);
    let mut differed = 0;
    for change in 1..=CHANGES {
        let text = any_policy(&mut draw);
        change_policy(&text)?;
        agent.signal(Signal::HUP)?;
        while agent.round()?["changes"].as_u64().ok_or("changes is no number")? < change {}
        differed += u64::from(settings(both)? != found);
    }
    println!("{CHANGES} changes of the policy; after {differed} of them settings differed from those found");
    checks
        .check(differed > CHANGES / 4, "changes of the policy change settings (the control of the next)")?;
    agent.end(Signal::TERM)?;
    checks.check(settings(both)? == found, "after 100 changes and a stop every setting is in effect as found")
}

/// A policy over both services.
fn any_policy(draw: &mut Draw) -> String {
    let mut text = format!("period = \"250ms\"\nstep = \"{}MiB\"\n", 1 + draw.below(16));
    if draw.below(2) == 0 {
        text += &format!("promotion_limit = \"{}MB/s\"\n", 1 + draw.below(500));
    }
    text += ["", "[interleave]\nweights = \"auto\"\n", "[interleave]\nweights = { 0 = 3, 1 = 1 }\n"]
        [draw.below(3) as usize];
    for name in ["cache", "web"] {
        let tier = ["opt-in", "opt-out", "background", ""][draw.below(4) as usize];
        if !tier.is_empty() {
            text += &format!("[service.{name}]\ncgroup = \"/{name}\"\ntier = \"{tier}\"\n");
        }
        if tier == "opt-in" {
            text += &format!("local_high = 0.{}\n", 1 + draw.below(9));
        }
    }
    text
}

/// Numbers that look random and are the same in each run (Knuth's MMIX generator).
struct Draw(u64);

impl Draw {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// What a command prints, which it also shows.
pub(crate) fn polder(arguments: &[&str]) -> Result<String, Failed> {
    said("/bin/polder", arguments)
}

/// What a program prints that does what it should.
fn said(program: &str, arguments: &[&str]) -> Result<String, Failed> {
    let output = Command::new(program).args(arguments).output().map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    print!("{said}{}", String::from_utf8_lossy(&output.stderr));
    match output.status.success() {
        true => Ok(said),
        false => Err(format!("{program} {} failed", arguments.join(" "))),
    }
}

/// A service at 100% local comes to its bound of 70% in steps.
fn hold_share(agent: &mut Agent, checks: &mut Checks) -> Result<(), Failed> {
    for _ in 0..ROUNDS {
        let round = agent.round()?;
        let cache = service(&round, "cache")?;
        let local = cache["local"].as_f64().ok_or("local is no number")?;
        println!(
            "round {}: cache {:.1}% local, {} demoted",
            round["round"],
            100.0 * local,
            size(bytes(cache, "demoted")?)
        );
        if local <= HIGH + 0.03 {
            return checks
                .check(local >= 0.60 - 0.03, "cache is within 3 points of its bounds within 12 rounds");
        }
    }
    checks.check(false, "cache is within 3 points of its bounds within 12 rounds")
}

/// The kernel demotes pages of cache that nobody uses, as it does while the fast tier is full: it comes back to its bound of 60%.
fn rise(agent: &mut Agent, cache: &Service, checks: &mut Checks) -> Result<(), Failed> {
    const LOW: f64 = 0.60;
    const RISES: &str = "cache comes up within 3 points of its bounds within 12 rounds";
    let local = || cache.bytes().map(|[fast, slow]| fast as f64 / (fast + slow) as f64);
    // It stands still meanwhile, so that it does not repair what is not broken yet.
    agent.signal(Signal::STOP)?;
    let mut tries = 0;
    while local()? > LOW - 0.25 && tries < 20 {
        cache.reclaim(8)?;
        tries += 1;
    }
    let start = local()?;
    agent.signal(Signal::CONT)?;
    checks.check(
        start <= LOW - 0.20,
        "cache is demoted to 20 points or more below its bound (the control of the next)",
    )?;
    let mut is_seen = false;
    // One round may have looked before it was stopped.
    for _ in 0..=ROUNDS {
        let round = agent.round()?;
        let cache = service(&round, "cache")?;
        let local = cache["local"].as_f64().ok_or("local is no number")?;
        let promoted = size(bytes(cache, "promoted")?);
        println!("round {}: cache {:.1}% local, {promoted} moved up", round["round"], 100.0 * local);
        is_seen |= local < LOW - 0.10;
        if is_seen && (LOW - 0.03..=HIGH + 0.03).contains(&local) {
            return checks.check(true, RISES);
        }
    }
    checks.check(false, RISES)
}

/// A neighbour comes that fills the fast tier (the Vistara paper's section V-H): it gives way, and cache keeps its share. Then it is killed.
fn noisy_neighbour(agent: &mut Agent, checks: &mut Checks) -> Result<(), Failed> {
    const NOISY: &str = "\n[service.noisy]\ncgroup = \"/noisy\"\ntier = \"opt-in\"\nlocal_high = 0.50\n";
    let local = |round: &Value, name: &str| {
        service(round, name)?["local"].as_f64().ok_or_else(|| "local is no number".to_owned())
    };
    // It fills its memory while the agent stands still, so that the first round sees all of it.
    agent.signal(Signal::STOP)?;
    let noisy = Service::start("/noisy", 200, 20)?;
    // With the default step: the longer the fast tier is full, the more of cache the kernel itself demotes.
    change_policy(&format!("{}{NOISY}", POLICY.replace("16MiB", "32MiB")))?;
    agent.signal(Signal::CONT)?;
    agent.signal(Signal::HUP)?;
    let mut round = agent.round()?;
    while service(&round, "noisy").is_err() {
        round = agent.round()?;
    }
    let start = local(&round, "noisy")?;
    checks.check(
        start >= 0.75,
        "noisy starts 25 points or more above its bound of 50% (the control of the next)",
    )?;
    let mut rounds = 1;
    loop {
        let (noisy, cache) = (local(&round, "noisy")?, local(&round, "cache")?);
        println!(
            "round {}: noisy {:.1}% local, cache {:.1}% local",
            round["round"],
            100.0 * noisy,
            100.0 * cache
        );
        if noisy <= 0.53 && (0.57..=HIGH + 0.03).contains(&cache) {
            break;
        }
        if rounds == ROUNDS {
            return checks
                .check(false, "noisy and cache are within 3 points of their bounds within 12 rounds");
        }
        rounds += 1;
        round = agent.round()?;
    }
    checks.check(true, "noisy and cache are within 3 points of their bounds within 12 rounds")?;
    drop(noisy);
    std::fs::remove_dir("/sys/fs/cgroup/noisy").map_err(|error| format!("/noisy: {error}"))?;
    let mut is_told = false;
    // One round may have looked before it went.
    for _ in 0..2 {
        let alarms = agent.round()?["alarms"].clone();
        is_told |= alarms
            .as_array()
            .into_iter()
            .flatten()
            .any(|alarm| alarm["alarm"] == "no-such-cgroup" && alarm["service"] == "noisy");
    }
    checks.check(is_told, "a service that is killed and gone is told of, and the others go on")?;
    change_policy(POLICY)?;
    agent.signal(Signal::HUP)?;
    agent.round().map(drop)
}

/// Replaces the policy in one step, because the agent also looks at the file by itself.
pub(crate) fn change_policy(text: &str) -> Result<(), Failed> {
    write_new("/run/policy.new", text)?;
    std::fs::rename("/run/policy.new", "/run/policy.toml").map_err(|error| error.to_string())
}

/// Demotion breaks the opt-out of web while the agent runs, and the agent repairs it.
fn repair(agent: &mut Agent, web: &Service, checks: &mut Checks) -> Result<(), Failed> {
    // It stands still meanwhile, so that rounds from now on have seen the whole break. So does web: the kernel takes few pages at once that are
    // in use, and on a busy machine for minutes.
    agent.signal(Signal::STOP)?;
    web.signal(Signal::STOP)?;
    if !is_before(6, 16)? {
        web.reclaim(20)?;
        checks.check(web.bytes()?[1] == 0, "demotion respects the opt-out on this kernel")?;
        // So another program breaks it.
        write("/sys/fs/cgroup/web/cpuset.mems", "0-1")?;
    }
    // It takes pages that were in use until now in a second try, and a round that was under way may have put some back.
    let mut tries = 0;
    while web.bytes()?[1] < 20 << 20 && tries < 100 {
        web.reclaim(20)?;
        tries += 1;
    }
    let [_, broken] = web.bytes()?;
    web.signal(Signal::CONT)?;
    agent.signal(Signal::CONT)?;
    println!("web is opted out, and {} of it are on the slow tier", size(broken));
    checks.check(broken >= 10 << 20, "the opt-out is broken by 10 MiB or more (the control of the next)")?;
    // One round may have looked before it was stopped.
    for _ in 0..=REPAIR_ROUNDS {
        let round = agent.round()?;
        for alarm in round["alarms"].as_array().into_iter().flatten() {
            println!("round {}: alarm {alarm}", round["round"]);
        }
    }
    let [_, left] = web.bytes()?;
    if left > 0 {
        web.show_places("N1=")?;
    }
    checks.check(left == 0, "web has nothing on the slow tier within two rounds")
}

pub(crate) fn service<'r>(round: &'r Value, name: &str) -> Result<&'r Value, Failed> {
    let services = round["services"].as_array().ok_or("a round without services")?;
    services.iter().find(|service| service["service"] == name).ok_or_else(|| format!("no {name} in {round}"))
}

pub(crate) fn bytes(service: &Value, key: &str) -> Result<u64, Failed> {
    service[key].as_u64().ok_or_else(|| format!("{key} is no number: {service}"))
}

fn show(when: &str, services: &[&Service]) -> Result<(), Failed> {
    println!("{when}:");
    println!("  {:<8} {:>11} {:>11}", "service", "fast", "slow");
    for service in services {
        let [fast, slow] = service.bytes()?;
        println!("  {:<8} {:>11} {:>11}", service.cgroup.trim_start_matches('/'), size(fast), size(slow));
    }
    Ok(())
}

fn is_before(major: u32, minor: u32) -> Result<bool, Failed> {
    let release = read("/proc/sys/kernel/osrelease")?;
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    Ok((numbers.next(), numbers.next()) < (Some(major), Some(minor)))
}

pub(crate) fn write_new(path: &str, text: &str) -> Result<(), Failed> {
    std::fs::write(path, text).map_err(|error| format!("{path}: {error}"))
}

pub(crate) fn size(bytes: u64) -> String {
    ByteSize(bytes).display().iec().to_string()
}
