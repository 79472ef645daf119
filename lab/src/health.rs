//! Scenario: a CXL device reports poison and a media error, the agent names the services whose pages lie there, and answers as the policy says.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use polder_lab::check::{Checks, Failed};
use rustix::process::Signal;
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
use serde_json::{Value, json};

use crate::machine::{Service, read, settings};
use crate::slow::CXL;
use crate::tiers::{Agent, JOURNAL, bytes, change_policy, polder, service};

const INSTANCE: &str = "/sys/kernel/tracing/instances/polder";
const POLICY: &str = r#"
period = "250ms"
step = "32MiB"

[health]
bad_memory = "opt-out"

[service.batch]
cgroup = "/batch"
tier = "background"

[service.index]
cgroup = "/index"
tier = "background"

[service.web]
cgroup = "/web"
tier = "opt-in"
"#;
/// Control rounds within which what was reported is answered.
const ROUNDS: u32 = 40;

/// QEMU's monitor, at the other end of the second serial line.
struct Monitor {
    line: BufReader<File>,
    /// Commands so far.
    asked: u64,
}

impl Monitor {
    fn open() -> Result<Self, Failed> {
        let line = OpenOptions::new().read(true).write(true).open("/dev/ttyS1").map_err(text)?;
        let mut raw = tcgetattr(&line).map_err(text)?;
        raw.make_raw();
        tcsetattr(&line, OptionalActions::Now, &raw).map_err(text)?;
        // Until the line was raw, the guest's terminal may have sent the monitor's greeting back to it. What its parser has of that ends here, as
        // the specification of QMP has it.
        (&line).write_all(&[0xff]).map_err(text)?;
        let mut monitor = Self { line: BufReader::new(line), asked: 0 };
        monitor.ask(json!({ "execute": "qmp_capabilities" }))?;
        Ok(monitor)
    }

    /// Has a command done.
    fn ask(&mut self, mut command: Value) -> Result<(), Failed> {
        self.asked += 1;
        command["id"] = self.asked.into();
        self.line.get_mut().write_all(format!("{command}\n").as_bytes()).map_err(text)?;
        let mut answer = String::new();
        loop {
            answer.clear();
            if self.line.read_line(&mut answer).map_err(text)? == 0 {
                return Err("QEMU's monitor hung up".to_owned());
            }
            // Its greeting, its events and what it says of what was sent back to it have no id, and what was said before the line was open is
            // cut short.
            let Ok(answer) = serde_json::from_str::<Value>(&answer) else { continue };
            if answer.get("id") != command.get("id") {
                continue;
            }
            if answer.get("return").is_some() {
                return Ok(());
            }
            if let Some(error) = answer.get("error") {
                return Err(format!("{command}: {error}"));
            }
        }
    }
}

/// Runs the scenario on a guest whose slow node is a CXL region, and returns how many checks held.
pub(crate) fn run() -> Result<u32, Failed> {
    let mut checks = Checks::default();
    let mut monitor = Monitor::open()?;
    let batch = Service::start("/batch", 32, 1)?;
    let index = Service::start("/index", 32, 1)?;
    let web = Service::start("/web", 32, 32)?;
    let all = [&batch, &index, &web];
    let before = settings(&all)?;
    change_policy(POLICY)?;
    let mut agent = Agent::start()?;
    let round = await_round(&mut agent, |round| {
        let on_slow = |name| service(round, name).and_then(|row| bytes(row, "slow"));
        Ok(on_slow("batch")? > 16 << 20 && on_slow("index")? > 16 << 20)
    })?;
    println!("devices: {}", round["devices"]);
    checks.check(named(&round).is_empty(), "nothing is wrong before (the control of the next)")?;

    let place = place_of(&batch)?;
    println!("poison at {place:#x} on the device, in a page of batch");
    let path = "/machine/peripheral/cxl0";
    monitor.ask(json!({ "execute": "cxl-inject-poison", "arguments": { "path": path, "start": place, "length": 64 } }))?;
    // An operator who wants to know at once, and not within a minute.
    agent.signal(Signal::HUP)?;
    let round = await_round(&mut agent, |round| Ok(!named(round).is_empty()))?;
    show(&round);
    checks
        .check(named(&round) == ["batch"], "poison names the service whose page lies there, and no other")?;
    let round = await_round(&mut agent, |round| Ok(bytes(service(round, "batch")?, "slow")? == 0))?;
    let cause = service(&round, "batch")?["cause"]["what"].to_string();
    checks.check(cause.contains("CXL memory is bad"), "the policy opts that service out of the slow tier")?;
    let left = bytes(service(&round, "index")?, "slow")?;
    checks.check(left > 16 << 20, "the others stay (the control of the check before)")?;

    let place = place_of(&index)?;
    println!("an uncorrectable media event at {place:#x} on the device, in a page of index");
    monitor.ask(json!({ "execute": "cxl-inject-general-media-event", "arguments": {
        "path": path, "log": "failure", "flags": 1, "dpa": place, "descriptor": 1, "type": 0, "transaction-type": 1,
        "channel": 0, "rank": 0, "device": 0, "component-id": "polder lab" } }))?;
    let round = await_round(&mut agent, |round| Ok(named(round).iter().any(|name| name == "index")))?;
    show(&round);
    checks.check(
        named(&round) == ["batch", "index"],
        "a media event names the service whose page lies there",
    )?;
    await_round(&mut agent, |round| Ok(bytes(service(round, "index")?, "slow")? == 0))?;
    checks.check(true, "the policy opts it out too")?;

    checks
        .check(Path::new(INSTANCE).exists(), "the agent has a tracing instance (the control of the next)")?;
    agent.end(Signal::KILL)?;
    polder(&["agent", "restore", "--journal", JOURNAL])?;
    let is_as_found = !Path::new(INSTANCE).exists() && settings(&all)? == before;
    checks
        .check(is_as_found, "after kill -9 and a restore it is gone, and every setting in effect as found")?;
    Ok(checks.0)
}

/// The first round of which `holds` holds.
fn await_round(agent: &mut Agent, holds: impl Fn(&Value) -> Result<bool, Failed>) -> Result<Value, Failed> {
    let mut last = Value::Null;
    for _ in 0..ROUNDS {
        last = agent.round()?;
        if holds(&last)? {
            return Ok(last);
        }
    }
    Err(format!("it does not come within {ROUNDS} rounds: {last}"))
}

/// Services that alarms of bad memory name, of which the page is known.
fn named(round: &Value) -> Vec<String> {
    let alarms = round["alarms"].as_array().into_iter().flatten();
    let bad = alarms.filter(|alarm| alarm["alarm"] == "cxl-memory" && alarm["is_guess"] == false);
    let mut names: Vec<String> =
        bad.map(|alarm| alarm["service"].as_str().unwrap_or("none").to_owned()).collect();
    names.sort();
    names.dedup();
    names
}

fn show(round: &Value) {
    for alarm in round["alarms"].as_array().into_iter().flatten() {
        println!("round {}: alarm {alarm}", round["round"]);
    }
}

/// The address on the device of a page of a service that lies in the region.
fn place_of(service: &Service) -> Result<u64, Failed> {
    const PAGE: u64 = 4096;
    const PRESENT: u64 = 1 << 63;
    const FRAME: u64 = (1 << 55) - 1;
    let hex = |text: &str| u64::from_str_radix(text.trim().trim_start_matches("0x"), 16).map_err(text_of);
    let region = fs::read_dir(CXL).map_err(text)?.flatten().map(|entry| entry.path());
    let region = region.filter(|path| path.join("resource").exists() && path.join("commit").exists()).min();
    let region = region.ok_or("there is no region")?;
    let first = hex(&read(&format!("{}/resource", region.display()))?)?;
    let bytes = hex(&read(&format!("{}/size", region.display()))?)?;
    let pid = service.pid();
    let maps = read(&format!("/proc/{pid}/maps"))?;
    let pagemap = File::open(format!("/proc/{pid}/pagemap")).map_err(text)?;
    for line in maps.lines() {
        let Some((range, rest)) = line.split_once(' ') else { continue };
        let Some((start, end)) = range.split_once('-').filter(|_| rest.starts_with("rw-p")) else { continue };
        for page in hex(start)? / PAGE..hex(end)? / PAGE {
            let mut entry = [0; 8];
            pagemap.read_exact_at(&mut entry, page * 8).map_err(text)?;
            let entry = u64::from_le_bytes(entry);
            let at = (entry & FRAME) * PAGE;
            if entry & PRESENT != 0 && (first..first + bytes).contains(&at) {
                return Ok(at - first);
            }
        }
    }
    Err(format!("no page of {} lies in the region", service.cgroup))
}

fn text_of(error: std::num::ParseIntError) -> Failed {
    error.to_string()
}

fn text(error: impl std::fmt::Display) -> Failed {
    error.to_string()
}
