//! Scenario: a pool on the device that two kernels share, from its format to the return of a kernel that was killed.

use std::time::Duration;

use polder_lab::check::{Checks, Failed};
use polder_lab::hosts::{FLUSHES, Part};

use crate::guest::{Host, Process, Rack};
use crate::{Arguments, Device};

const POOL: (&str, &str) = ("POLDER_POOL", "/dev/dax0.0");
const HOSTS: [(&str, &str); 2] = [("POLDER_HOST", "0"), ("POLDER_HOST", "1")];
/// With flushes and without: a wait that succeeds is far shorter, also on a machine that is busy.
const TIMEOUT: (&str, &str) = ("POLDER_TIMEOUT", "10s");
/// Rounds of each litmus test.
const ROUNDS: u32 = 200;
/// On a device to which each access is emulated.
const FEW_ROUNDS: u32 = 20;

/// Longer than any soak takes.
const SOAK: Duration = Duration::from_secs(24 * 3600);

/// Both kernels.
type Pair = [Host; 2];

/// Runs the scenario, and returns how many checks held.
pub(crate) fn run(arguments: &Arguments) -> Result<u32, Failed> {
    let rack = Rack::new(arguments)?;
    let mut checks = Checks::default();
    let mut hosts = [rack.boot(0)?, rack.boot(1)?];
    let [first, second] = &hosts;
    checks.check(
        first.boot != second.boot && first.bytes == second.bytes,
        "two kernels have one device of the same size",
    )?;
    if let Some(what) = &arguments.what {
        kill(&rack, &mut hosts, arguments, &format!(" --what {what}"), &mut checks)?;
        return Ok(checks.0);
    }
    unbind(&mut hosts[0], &mut checks)?;
    format(&mut hosts)?;
    let [one, other] = stats(&mut hosts)?;
    checks.check(one == other, "what one kernel formats the other finds")?;
    let is_slow = arguments.device == Device::Cxl;
    litmus(&mut hosts, if is_slow { FEW_ROUNDS } else { ROUNDS }, &mut checks)?;
    for part in Part::ALL {
        let what = format!("{} between two kernels", part.name());
        checks.check(play(&mut hosts, part, None)?, &what)?;
    }
    ids(&mut hosts, &mut checks)?;
    if arguments.mpi {
        mpi(&mut hosts, None, &mut checks)?;
    }
    recover(&rack, &mut hosts, None, &mut checks)?;
    if is_slow {
        return Ok(checks.0);
    }
    kill(&rack, &mut hosts, arguments, "", &mut checks)?;

    println!("the same, with an emulated cache in each guest:");
    for part in Part::ALL {
        let what = format!("{} between two caches", part.name());
        checks.check(play(&mut hosts, part, Some("shadow"))?, &what)?;
    }
    for (flush, part) in FLUSHES.into_iter().take(arguments.flushes) {
        let site = flush.site();
        let passed = play(&mut hosts, part, Some(&format!("shadow,without={site}")))?;
        checks.check(!passed, &format!("{} fail without the flush at {site}", part.name()))?;
    }
    if arguments.mpi {
        mpi(&mut hosts, Some("shadow"), &mut checks)?;
    }
    recover(&rack, &mut hosts, Some("shadow"), &mut checks)?;
    Ok(checks.0)
}

/// A kernel unbinds the device while a range lies on it.
fn unbind(host: &mut Host, checks: &mut Checks) -> Result<(), Failed> {
    let seen = host.run("/init unbind look", &[])?;
    println!("  {}", seen.said.lines().last().unwrap_or_default());
    checks.check(
        seen.is_good() && seen.said.contains("/sys still gives it"),
        "a dax device that is unbound under a range is named, although /sys still has its size",
    )?;
    host.run("/init unbind bind", &[])?.good()?;
    let touched = host.run("/init unbind touch", &[])?;
    checks.check(
        touched.status.is_none() && touched.said.contains("lies on"),
        "a process that uses the range all the same is ended by a signal",
    )?;
    host.run("/init unbind bind", &[])?.good().map(drop)
}

fn format(hosts: &mut Pair) -> Result<String, Failed> {
    hosts[0].run("/bin/polder pool format --hosts 4 --force", &[POOL])?.good()
}

/// What each kernel sees in the pool.
fn stats(hosts: &mut Pair) -> Result<[String; 2], Failed> {
    let mut stat = |host: usize| hosts[host].run("/bin/polder pool stat --json", &[POOL])?.good();
    Ok([stat(0)?, stat(1)?])
}

/// The settings of a process of `host`.
fn environment(host: usize, wrap: Option<&str>) -> Vec<(&str, &str)> {
    let wrap = wrap.map(|wrap| ("POLDER_WRAP", wrap));
    [POOL, HOSTS[host], TIMEOUT].into_iter().chain(wrap).collect()
}

/// Starts one command on both kernels.
fn start_both(hosts: &mut Pair, words: [&str; 2], wrap: Option<&str>) -> Result<[Process; 2], Failed> {
    let mut start = |host: usize| hosts[host].start(words[host], &environment(host, wrap));
    Ok([start(0)?, start(1)?])
}

/// Whether both hosts come to the end of `part`, in a new pool.
fn play(hosts: &mut Pair, part: Part, wrap: Option<&str>) -> Result<bool, Failed> {
    format(hosts)?;
    let words = format!("/init act play {}", part.name());
    let [one, other] = start_both(hosts, [&words; 2], wrap)?;
    let ends = [one.end()?, other.end()?];
    if wrap.is_none_or(|wrap| !wrap.contains("without")) {
        ends.iter().filter(|end| !end.is_good()).for_each(|end| println!("{}", end.said));
    }
    Ok(ends.iter().all(|end| end.is_good()))
}

/// The litmus tests show nothing that is forbidden. Their controls need caches that are not kept in step.
fn litmus(hosts: &mut Pair, rounds: u32, checks: &mut Checks) -> Result<(), Failed> {
    let [zero, one] = [0, 1].map(|role| format!("/bin/polder verify --litmus {role} --rounds {rounds}"));
    let [one, other] = start_both(hosts, [&zero, &one], None)?;
    let ends = [one.end()?, other.end()?];
    let last = ends[0].said.lines().last().unwrap_or_default();
    println!("  {last}");
    let forbidden = |said: &str| {
        let counts = said.lines().filter_map(|line| line.split_once(", forbidden "));
        counts.map(|(_, count)| count.trim().parse::<u64>().unwrap_or(u64::MAX)).collect::<Vec<_>>()
    };
    let counts: Vec<_> = ends.iter().flat_map(|end| forbidden(&end.said)).collect();
    checks.check(
        !counts.is_empty()
            && counts.iter().all(|count| *count == 0)
            && ends.iter().all(|end| end.status != Some(1)),
        &format!("{} litmus tests between two kernels show nothing forbidden", counts.len() / 2),
    )
}

/// Hosts without an id ask the keeper, and each gets one of its own.
fn ids(hosts: &mut Pair, checks: &mut Checks) -> Result<(), Failed> {
    format(hosts)?;
    let mut keeper = hosts[0].start("/bin/polder keeper --ids keeper", &[POOL])?;
    keeper.await_line("runs;")?;
    let mut given = vec![];
    for host in hosts.iter_mut() {
        let said = host.run(&format!("/init act make /of/{}", given.len()), &[POOL, TIMEOUT])?.good()?;
        given.extend(said.lines().find_map(|line| line.strip_prefix("attached as host ").map(str::to_owned)));
    }
    println!("  the keeper gave {}", given.join(" and "));
    checks.check(given.len() == 2 && given[0] != given[1], "the keeper gives each kernel a host id")?;
    let seen = hosts[0].run("/init act look /of/1", &[POOL, TIMEOUT])?;
    checks.check(seen.is_good(), "an object that one kernel made is read under the other")?;
    hosts[0].kill(keeper).map(drop)
}

/// An MPI program that was compiled for any libfabric, with ranks under both kernels.
fn mpi(hosts: &mut Pair, wrap: Option<&str>, checks: &mut Checks) -> Result<(), Failed> {
    format(hosts)?;
    let machines = "--hosts 10.0.0.1,10.0.0.2 --mpiexec /bin/mpiexec";
    let launcher = [("HYDRA_LAUNCHER", "ssh"), ("HYDRA_LAUNCHER_EXEC", "/bin/rsh")];
    let env: Vec<_> =
        [POOL, TIMEOUT].into_iter().chain(launcher).chain(wrap.map(|wrap| ("POLDER_WRAP", wrap))).collect();
    let end = hosts[0].run(&format!("/bin/polder mpi run -n 4 {machines} -- /bin/hello"), &env)?;
    println!("{}", end.said.trim_end());
    let on = |host: u16| end.said.matches(&format!("runs on host {host} of the pool")).count();
    let sums = end.said.contains("the sum of all ranks is 6");
    checks.check(
        end.is_good() && sums && on(0) == 2 && on(1) == 2,
        "an MPI program of two ranks under each kernel computes its sum",
    )
}

/// A kernel is killed: the other is told, evicts it, and lets it come back once it is fenced.
fn recover(rack: &Rack, hosts: &mut Pair, wrap: Option<&str>, checks: &mut Checks) -> Result<(), Failed> {
    format(hosts)?;
    let [mine, theirs] = [environment(0, wrap), environment(1, wrap)];
    hosts[1].run("/init act make /kept", &theirs)?.good()?;
    let look = |host: &mut Host, env: &[(&str, &str)]| host.run("/init act look /kept", env);
    checks.check(look(&mut hosts[0], &mine)?.is_good(), "host 0 reads what host 1 made")?;

    let [mut waits, mut still] = start_both(hosts, ["/init act wait"; 2], wrap)?;
    waits.await_line("they have met")?;
    still.await_line("they have met")?;
    let before = hosts[1].boot.clone();
    hosts[1].cut()?;
    let end = waits.end()?;
    println!("  {}", end.said.lines().last().unwrap_or_default());
    checks.check(
        !end.is_good() && end.said.contains("host 1"),
        "the kernel of host 1 is killed, and what waits for it gets an error that names it",
    )?;
    let evicted = hosts[0].run("/bin/polder pool evict 1", &mine)?;
    checks.check(evicted.is_good(), "host 0 evicts it")?;
    checks.check(look(&mut hosts[0], &mine)?.is_good(), "what it made stays")?;

    hosts[1] = rack.boot(1)?;
    checks.check(hosts[1].boot != before, "its machine boots again")?;
    let refused = look(&mut hosts[1], &theirs)?;
    println!("  {}", refused.said.lines().last().unwrap_or_default());
    checks.check(
        !refused.is_good() && refused.said.contains("--fenced"),
        "before it is fenced its id is refused to the new kernel (the control of the next)",
    )?;
    let fenced = hosts[0].run("/bin/polder pool evict 1 --fenced", &mine)?;
    checks.check(fenced.is_good(), "it is fenced")?;
    checks
        .check(look(&mut hosts[1], &theirs)?.is_good(), "it returns as host 1, and reads what it had made")?;
    let words = ["/init act play objects"; 2];
    let [one, other] = start_both(hosts, words, wrap)?;
    let ends = [one.end()?, other.end()?];
    checks.check(ends.iter().all(|end| end.is_good()), "both hosts go on with objects of each other")?;
    let swept = hosts[1].run("/bin/polder pool sweep", &theirs)?;
    let checked = hosts[0].run("/bin/polder pool check", &[POOL])?;
    println!("  {}", checked.said.trim_end());
    checks.check(swept.is_good() && checked.is_good(), "the pool is swept, and has no problem")
}

/// Kills processes of host 1, and its kernel, as often as `arguments` say.
fn kill(
    rack: &Rack,
    hosts: &mut Pair,
    arguments: &Arguments,
    scenes: &str,
    checks: &mut Checks,
) -> Result<(), Failed> {
    let Arguments { kills, kernel_kills, seed, .. } = *arguments;
    if kills > 0 {
        soak(rack, hosts, &format!("--kills {kills} --seed {seed}{scenes}"), checks)?;
    }
    if kernel_kills > 0 {
        soak(rack, hosts, &format!("--doom kernel --kills {kernel_kills} --seed {seed}{scenes}"), checks)?;
    }
    Ok(())
}

/// Processes of host 1, or its kernel, are killed at memory operations. The survivors on host 0 must find an exact prefix of what
/// the dead did, and nothing is lost (`polder-dev soak`).
fn soak(rack: &Rack, hosts: &mut Pair, what: &str, checks: &mut Checks) -> Result<(), Failed> {
    const ADDRESS: &str = "10.0.0.1:7000";
    // Few chunks for its hosts, so that none keeps an empty one.
    let shape = "--hosts 64 --processes 4 --names 61 --levels 3 --chunk 128KiB --opens 16 --keepers 4";
    hosts[0].run(&format!("/bin/polder pool format {shape} --force"), &[POOL])?.good()?;
    let plays = hosts[0].start(&format!("/bin/polder-dev soak --listen {ADDRESS} {what}"), &[POOL])?;
    let join = format!("/bin/polder-dev soak --join {ADDRESS}");
    let mut joined = hosts[1].start(&join, &[POOL])?;
    let mut boots = 0;
    // It says nothing while it runs victims. The soak that it joined ends by itself when one of its processes hangs.
    while let Err(off) = joined.end_within(SOAK) {
        if !hosts[1].is_off()? {
            return Err(off);
        }
        hosts[1] = rack.boot(1)?;
        boots += 1;
        joined = hosts[1].start(&join, &[POOL])?;
    }
    let end = plays.end()?;
    let last = end.said.lines().last().unwrap_or_default().to_owned();
    println!("  {last}");
    if !end.is_good() {
        println!("{}", end.said);
    }
    checks.check(end.is_good(), &format!("polder-dev soak {what}, {boots} boots of host 1"))
}
