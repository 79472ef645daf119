//! `polder pool`: makes, shows, mends and removes pools.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{IsTerminal, Read, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use polder_attach::session::{self, Session, SessionError};
use polder_attach::settings::{ByteCount, CoherenceChoice, Settings, TimeSpan};
use polder_mem::{Coherence, Memory, Region, RegionError, RegionKind};
use polder_platform::{printable, quoted, shell_word};
use polder_pool::keeper::{MembershipChange, ReplaceKeeper, change_membership_replacing};
use polder_pool::{
    Geometry, HostStat, Inspection, Member, Overwrite, PairStat, PairsStat, Pool, PoolError, PoolStat,
    Superblock, SweepReport, Uuid, expect_vacant, format_as, inspect, read_superblock,
};
use rustix::fs::SeekFrom;

use crate::Failure;

/// What the size of a file is a multiple of.
const PAGE: u64 = 4096;

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Make a pool on a device, or in a new file of --size bytes. Numbers that are not given follow from its size, and are printed.
    Format(Format),
    /// List the objects in a pool.
    List {
        /// List only names that begin with this.
        #[arg(default_value = "/")]
        prefix: String,
        /// Print one JSON object a line.
        #[arg(long)]
        json: bool,
    },
    /// Show how full a pool is, and which hosts and processes are there.
    Stat {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
        /// Repeat at this interval, such as 1s, until stopped.
        #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "1s", value_parser = interval)]
        watch: Option<TimeSpan>,
        /// Show the directory and its chunks too, as a developer of Polder needs them.
        #[arg(long, short, conflicts_with = "json")]
        verbose: bool,
        /// List what each endpoint and each pair of endpoints has for messages.
        #[arg(long)]
        messages: bool,
    },
    /// Look for damage: prints the offset of each damaged byte, and fails if there is any. Changes nothing.
    Check,
    /// Remove endpoints, rings, windows and groups that killed processes have left. Those in use stay.
    Sweep {
        /// The job [default: all].
        #[arg(long)]
        job: Option<u64>,
    },
    /// Remove one object. Its bytes stay until the last process closes it.
    Remove {
        /// Its name, as `polder pool list` prints it.
        name: String,
        /// Remove it even if live processes hold it open.
        #[arg(long)]
        force: bool,
    },
    /// Evict a host, so that the others stop waiting for it.
    Evict {
        /// The host id.
        id: u16,
        /// Confirm that the host is off and stays off, so that its id, names and space become free.
        #[arg(long)]
        fenced: bool,
        /// Take the place of an earlier keeper that this machine cannot see. Give it only if every earlier keeper is gone
        /// for certain.
        #[arg(long)]
        force: bool,
    },
    /// Remove a pool and everything in it: deletes a file, clears the superblock of a device.
    Destroy {
        /// Do it without asking.
        #[arg(long)]
        yes: bool,
    },
}

#[derive(Args)]
pub(crate) struct Format {
    /// Size of the new file, such as 1GiB, rounded down to a page. A device or an existing file keeps its size.
    #[arg(long)]
    size: Option<ByteCount>,
    /// Number of host ids, 1 to 64.
    #[arg(long)]
    hosts: Option<u16>,
    /// Processes of a host at most, 1 to 512.
    #[arg(long)]
    processes: Option<u16>,
    /// Slots of a directory level in one host's shard at most. More slots hold more objects.
    #[arg(long)]
    names: Option<u32>,
    /// Levels of the directory, 1 to 16. More levels hold more objects.
    #[arg(long)]
    levels: Option<u16>,
    /// Unit in which hosts claim space, a power of two such as 2MiB.
    #[arg(long)]
    chunk: Option<ByteCount>,
    /// Objects that a process may hold open at most.
    #[arg(long)]
    opens: Option<u32>,
    /// Places for keepers, 1 to 64. A place is free again once its keeper is gone for certain and a newer one has run.
    #[arg(long)]
    keepers: Option<u16>,
    /// Overwrite what is there, also a pool in use.
    #[arg(long)]
    force: bool,
}

/// A time that passes.
fn interval(text: &str) -> Result<TimeSpan, String> {
    match text.parse() {
        Ok(TimeSpan(Duration::ZERO)) => Err("expected a time above 0, such as 1s".to_owned()),
        parsed => parsed,
    }
}

/// Runs one of the commands.
pub(crate) fn run(command: Command, settings: &Settings) -> Result<ExitCode, Failure> {
    let path = settings.pool.as_deref().ok_or(SessionError::NoPool)?;
    match command {
        Command::List { prefix, json } => return list(path, settings, &prefix, json),
        Command::Stat { json, watch, verbose, messages } => {
            return stat(path, settings, Shown { json, verbose, messages }, watch);
        }
        Command::Check => return check(path, settings),
        Command::Sweep { job } => sweep(path, settings, job)?,
        Command::Remove { name, force } => remove(path, settings, &name, force)?,
        Command::Format(arguments) => make(path, settings, &arguments)?,
        Command::Evict { id, fenced, force } => evict(path, settings, id, fenced, force)?,
        Command::Destroy { yes } => destroy(path, settings, yes)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn make(path: &Path, settings: &Settings, arguments: &Format) -> Result<(), Failure> {
    let choice = settings.coherence.unwrap_or_default();
    let made = match (path.exists(), arguments.size) {
        (false, Some(ByteCount(size))) => {
            let size = if size > PAGE { size - size % PAGE } else { size };
            session::create_as(path, size, &arguments.geometry(size), choice)?
        }
        (false, None) => {
            // One in /dev would be a device.
            let missing = session::open_unformatted(path, choice).map(drop);
            let file = || Failure(format!("{} does not exist; give --size to make a file", path.display()));
            return Err(match missing {
                Err(error @ RegionError::Missing { .. }) if error.is_of_device() => error.into(),
                _ => file(),
            });
        }
        (true, Some(_)) => {
            let (size, fits) = match session::open_unformatted(path, choice) {
                Ok(memory) => {
                    // Nothing that somebody keeps is to be removed.
                    if !arguments.force {
                        expect_vacant(&memory, written(path, memory.region())?).map_err(at(path))?;
                    }
                    (memory.region().bytes(), true)
                }
                // A file that is shorter than a page.
                Err(RegionError::Size { bytes, .. }) => (bytes, false),
                Err(error) => return Err(error.into()),
            };
            let remedy = match (path.is_file(), fits) {
                (true, true) => "remove it first for a file of another size, or leave --size out",
                (true, false) if holds_bytes(path)? => "it is no pool; check the path",
                (true, false) => "remove it first",
                (false, _) => "leave --size out",
            };
            return Err(Failure(format!(
                "{} is there already and has {}; --size only makes a new file; {remedy}",
                path.display(),
                bytes(size)
            )));
        }
        (true, None) => {
            let memory = session::open_unformatted(path, choice)?;
            let geometry = arguments.geometry(memory.region().bytes());
            let overwrite = if arguments.force { Overwrite::Force } else { Overwrite::Refuse };
            let parts = if arguments.force { vec![] } else { written(path, memory.region())? };
            if !arguments.force {
                expect_vacant(&memory, parts).map_err(at(path))?;
            }
            let coherence = session::formatted_coherence(choice, memory.region().kind());
            format_as(&memory, &geometry, Uuid::fresh(), overwrite, coherence).map_err(at(path))?
        }
    };
    warn_of_coherent(path, &made);
    describe(path, &made)
}

/// Says what a coherent pool does not promise where it may have a second kernel.
fn warn_of_coherent(path: &Path, made: &Superblock) {
    let is_shared = session::open_unformatted(path, CoherenceChoice::Software)
        .is_ok_and(|memory| !matches!(memory.region().kind(), RegionKind::Tmpfs | RegionKind::HugePages));
    if is_shared && made.coherence == Some(Coherence::Coherent) {
        eprintln!(
            "polder: {}: in a coherent pool the last stores of a host are lost if that host dies alone; if two hosts share this memory, format it with --coherence software",
            shown(path)
        );
    }
}

/// The parts of a region that may hold something: those of a file that are no holes; of a device, which has none, the end,
/// where tables stand a second time.
fn written(path: &Path, region: &Region) -> Result<Vec<Range<u64>>, Failure> {
    let bytes = region.bytes();
    if region.kind() == RegionKind::DaxDevice {
        return Ok(std::iter::once(bytes.saturating_sub(1 << 20)..bytes).collect());
    }
    let file = File::open(path)?;
    let (mut parts, mut at) = (vec![], 0);
    while at < bytes {
        let start = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => {
                return Err(Failure(format!("{}: cannot look for its data: {error}", path.display())));
            }
        };
        at = rustix::fs::seek(&file, SeekFrom::Hole(start)).unwrap_or(bytes);
        parts.push(start..at);
    }
    Ok(parts)
}

impl Format {
    /// What was asked for, and what suits a region of `bytes` where nothing was.
    fn geometry(&self, bytes: u64) -> Geometry {
        let default = Geometry::for_region(bytes);
        Geometry {
            hosts: self.hosts.unwrap_or(default.hosts),
            processes: self.processes.unwrap_or(default.processes),
            names: self.names.unwrap_or(default.names),
            levels: self.levels.unwrap_or(default.levels),
            chunk_bytes: self.chunk.map_or(default.chunk_bytes, |chunk| chunk.0),
            opens: self.opens.unwrap_or(default.opens),
            keepers: self.keepers.unwrap_or(default.keepers),
        }
    }
}

/// A path as a terminal may get it.
pub(crate) fn shown(path: &Path) -> String {
    printable(&path.to_string_lossy()).into_owned()
}

fn describe(path: &Path, made: &Superblock) -> Result<(), Failure> {
    let layout = made.layout()?;
    let Geometry { hosts, processes, chunk_bytes, .. } = made.geometry;
    let data = u64::from(layout.chunks()) * chunk_bytes;
    println!("{}: pool {} for {hosts} hosts of {processes} processes", shown(path), made.uuid);
    println!("{} for data in {} chunks of {}", bytes(data), layout.chunks(), bytes(chunk_bytes));
    Ok(())
}

fn look(path: &Path, settings: &Settings) -> Result<Inspection, Failure> {
    let memory = session::open_memory(path, settings.coherence.unwrap_or_default())?;
    inspect(&memory).map_err(at(path))
}

fn list(path: &Path, settings: &Settings, prefix: &str, json: bool) -> Result<ExitCode, Failure> {
    let report = look(path, settings)?;
    for object in report.objects.iter().filter(|object| object.name.starts_with(prefix)) {
        match json {
            true => println!("{}", serde_json::to_string(object)?),
            false => println!(
                "{:>12}  host {:<3} job {:<6} {}",
                bytes(object.bytes),
                object.owner,
                object.job,
                object.name
            ),
        }
    }
    Ok(damage(&report.stat))
}

/// Says on stderr that there is more than what was printed; what is damaged is no success.
fn damage(stat: &PoolStat) -> ExitCode {
    match stat.damaged {
        0 => return ExitCode::SUCCESS,
        1 => eprintln!("1 entry is damaged; run `polder pool check`"),
        damaged => eprintln!("{damaged} entries are damaged; run `polder pool check`"),
    }
    ExitCode::FAILURE
}

/// Between two views at least: reading a pool is work for all else that uses its memory.
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);

/// How much is shown of a pool.
#[derive(Clone, Copy)]
struct Shown {
    json: bool,
    verbose: bool,
    messages: bool,
}

fn stat(
    path: &Path,
    settings: &Settings,
    shown: Shown,
    watch: Option<TimeSpan>,
) -> Result<ExitCode, Failure> {
    let boot = session::boot()?;
    loop {
        let report = look(path, settings)?;
        match (shown.json, watch) {
            (true, _) => println!("{}", counters(&report, boot, shown)?),
            // Home, and clear what an earlier, longer view left.
            (false, Some(_)) if std::io::stdout().is_terminal() => {
                print!("\x1b[H\x1b[J{}", table(path, &report, boot, shown))
            }
            (false, _) => print!("{}", table(path, &report, boot, shown)),
        }
        std::io::stdout().flush()?;
        let code = damage(&report.stat);
        let Some(TimeSpan(pause)) = watch else { return Ok(code) };
        std::thread::sleep(pause.max(SHORTEST_PAUSE));
    }
}

fn counters(report: &Inspection, boot: u64, shown: Shown) -> Result<serde_json::Value, Failure> {
    let mut counters = serde_json::to_value(&report.stat)?;
    for (number, host) in report.stat.hosts.iter().enumerate() {
        counters["hosts"][number]["gone"] = here_and_gone(host, boot).1.into();
    }
    if shown.messages {
        let pair = |((from, to), pair): (&(String, String), &PairStat)| {
            let mut pair = serde_json::to_value(pair)?;
            (pair["from"], pair["to"]) = (from.as_str().into(), to.as_str().into());
            Ok(pair)
        };
        counters["by_pair"] = report.pairs.iter().map(pair).collect::<Result<_, Failure>>()?;
    }
    Ok(counters)
}

fn table(path: &Path, report: &Inspection, boot: u64, shown: Shown) -> String {
    let Shown { verbose, messages, .. } = shown;
    let stat = &report.stat;
    let mut lines = vec![
        format!(
            "{}: {} in all, {} of it metadata",
            self::shown(path),
            bytes(stat.bytes),
            bytes(stat.metadata_bytes)
        ),
        format!(
            "{} objects of {}; {} that no host has claimed",
            stat.objects,
            bytes(stat.object_bytes),
            bytes(stat.unclaimed_bytes)
        ),
    ];
    lines.extend(verbose.then(|| {
        format!(
            "directory: {} slots, {} claimed, {} condemned, {} tombstones; epoch {}",
            stat.slots, stat.claimed, stat.condemned, stat.tombstones, stat.epoch
        )
    }));
    lines.extend(stat.coherence.map(|coherence| format!("coherence: {coherence}, for every process")));
    for host in &stat.hosts {
        let (here, gone) = here_and_gone(host, boot);
        let gone = if gone.is_empty() { String::new() } else { format!(", gone {}", listed(&gone)) };
        let HostStat { host, state, objects, chunks, .. } = host;
        let here = listed(&here);
        let chunks = if verbose { format!(", {chunks} chunks") } else { String::new() };
        lines.push(format!("host {host} {state}: {objects} objects{chunks}, processes {here}{gone}"));
    }
    for (job, held) in &stat.jobs {
        lines.push(format!("job {job}: {}", bytes(*held)));
    }
    for (of, held) in &stat.uses {
        lines.push(format!("{of}: {}", bytes(*held)));
    }
    lines.extend(endpoints(stat));
    lines.extend(pairs(stat));
    if messages {
        lines.extend(each_endpoint_and_pair(report));
    }
    lines.join("\n") + "\n"
}

/// What the endpoints of ranks have together, and the one that has most.
fn endpoints(stat: &PoolStat) -> Option<String> {
    let all = stat.endpoints.values();
    let (total, rings) = all.clone().fold((0, 0), |(sum, rings), end| (sum + end.bytes, rings + end.rings));
    let most = all.map(|end| end.bytes).max()?;
    Some(format!(
        "{} endpoints: {} in all, {} at most for one; {rings} rings of pairs",
        stat.endpoints.len(),
        bytes(total),
        bytes(most)
    ))
}

/// What the pairs have that have talked, each direction for itself.
fn pairs(stat: &PoolStat) -> Option<String> {
    let PairsStat { pairs, with_rings, bytes: total, most_bytes, .. } = stat.pairs;
    let average = total.checked_div(pairs)?;
    Some(format!(
        "{pairs} directions of pairs: {} in all, {} on average, {} at most for one; {with_rings} have a ring of their own",
        bytes(total),
        bytes(average),
        bytes(most_bytes)
    ))
}

fn each_endpoint_and_pair(report: &Inspection) -> impl Iterator<Item = String> {
    let endpoints = report.stat.endpoints.iter().map(|(name, end)| {
        format!(
            "{name}: {}, of it {} small rings, {} send buffers, {} rings of pairs",
            bytes(end.bytes),
            bytes(end.small_ring_bytes),
            bytes(end.send_buffer_bytes),
            bytes(end.ring_bytes)
        )
    });
    let pairs = report.pairs.iter().map(|((from, to), pair)| {
        format!(
            "{from} to {to}: {} small ring, {} ring of its own",
            bytes(pair.small_ring_bytes),
            bytes(pair.ring_bytes)
        )
    });
    endpoints.chain(pairs)
}

/// Of a list so many are named.
const NAMED: usize = 3;

/// The first of many, and how many more there are.
pub(crate) fn listed(many: &[impl ToString]) -> String {
    let named = if many.len() > NAMED + 1 { NAMED } else { many.len() };
    let words: Vec<_> = many[..named].iter().map(ToString::to_string).collect();
    match (words.is_empty(), many.len() - named) {
        (true, _) => "none".to_owned(),
        (_, 0) => words.join(", "),
        (_, more) => format!("{} and {more} more", words.join(", ")),
    }
}

/// Which processes of a host are there, and which are gone; of another kernel's nobody can tell here.
fn here_and_gone(host: &HostStat, boot: u64) -> (Vec<u32>, Vec<u32>) {
    let runs = |pid: &u32| Path::new("/proc").join(pid.to_string()).exists();
    host.processes.iter().partition(|pid| host.boot != boot || runs(pid))
}

fn check(path: &Path, settings: &Settings) -> Result<ExitCode, Failure> {
    let Inspection { stat, problems, .. } = look(path, settings)?;
    for problem in &problems {
        println!("{problem}");
    }
    println!("{}: {} objects, {} problems", shown(path), stat.objects, problems.len());
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn sweep(path: &Path, settings: &Settings, job: Option<u64>) -> Result<(), Failure> {
    let session = Session::open(settings)?;
    let pool = session.pool();
    let groups = pool.sweep_groups(job)?;
    if !groups.objects.is_empty() {
        println!("{}: groups: removed {}", shown(path), removed(&groups));
    }
    for job in job.map_or_else(|| pool.jobs(), |job| Ok(BTreeSet::from([job])))? {
        println!("{}: job {job}: removed {}", shown(path), removed(&pool.sweep_job(job)?));
    }
    // What other hosts owned goes when they look after it.
    Ok(pool.maintain()?)
}

fn remove(path: &Path, settings: &Settings, name: &str, force: bool) -> Result<(), Failure> {
    let session = Session::open(settings)?;
    if let Some(cache) = cache_of(session.pool(), name).map_err(at(path))? {
        let what =
            format!("{} is of the cache {}, which would be damaged without it", quoted(name), quoted(cache));
        let remedy = format!("remove the whole cache with `polder kv flush {}`", shell_word(cache));
        return Err(Failure(format!("{}: {what}; {remedy}", path.display())));
    }
    let holders = session.pool().holders(name).map_err(at(path))?;
    let named = listed(&holders);
    if !holders.is_empty() && !force {
        let what = format!("{} is held open by {named}", quoted(name));
        return Err(Failure(format!(
            "{}: {what}; end those processes, or remove it anyway with --force",
            path.display()
        )));
    }
    session.pool().destroy(name).and_then(|()| session.pool().maintain()).map_err(at(path))?;
    println!("{}: removed {name}", shown(path));
    if !holders.is_empty() {
        eprintln!("{name}: its bytes are freed once {named} close it");
    }
    Ok(())
}

/// Whether a file begins with more than zeros.
fn holds_bytes(path: &Path) -> Result<bool, Failure> {
    const MOST: u64 = 1 << 20;
    let mut beginning = vec![];
    File::open(path)?.take(MOST).read_to_end(&mut beginning)?;
    Ok(beginning.iter().any(|byte| *byte != 0))
}

/// The cache of keys and values that an object is of, if that cache is there.
fn cache_of<'n, M: Memory>(pool: &Pool<M>, name: &'n str) -> Result<Option<&'n str>, PoolError> {
    let Some(cache) = name.strip_prefix("/kv/").and_then(|of| of.split('/').next()) else { return Ok(None) };
    let root = format!("/kv/{cache}");
    Ok(pool.list(&root)?.iter().any(|object| object.name == root).then_some(cache))
}

/// How many objects of how many bytes, and whose they were.
pub(crate) fn removed(swept: &SweepReport) -> String {
    let SweepReport { objects, dead, .. } = swept;
    let noun = if objects.len() == 1 { "object" } else { "objects" };
    let held = objects.iter().map(|object| object.bytes).sum();
    let of = if dead.is_empty() { String::new() } else { format!(", left by {}", listed(dead)) };
    format!("{} {noun} of {}{of}", objects.len(), bytes(held))
}

fn evict(path: &Path, settings: &Settings, host: u16, fenced: bool, force: bool) -> Result<(), Failure> {
    let replace = if force { ReplaceKeeper::Unseen } else { ReplaceKeeper::Gone };
    let memory = session::open_memory(path, settings.coherence.unwrap_or_default())?;
    let Member { timeout, silence, .. } = Member::new(host, 0);
    let timeout = settings.timeout.map_or(timeout, |span| span.0);
    let mut view =
        change_membership_replacing(&memory, host, MembershipChange::Evict, timeout, silence, replace)
            .map_err(at(path))?;
    if fenced {
        view = change_membership_replacing(&memory, host, MembershipChange::Fence, timeout, silence, replace)
            .map_err(at(path))?;
    }
    let was_evicted = view.evicted >> host & 1 == 1;
    let members = hosts(view.members);
    // A server that fences its own id as it boots need not have been a member.
    if !was_evicted && !fenced {
        let what = format!("host {host} is no member, and was not evicted; members {members}");
        let pool = shell_word(&path.to_string_lossy());
        return Err(Failure(format!(
            "{}: {what}; `polder pool stat --pool {pool}` shows them",
            path.display()
        )));
    }
    let is_out = if was_evicted { "is out" } else { "is no member, and was not evicted" };
    println!("epoch {}: host {host} {is_out}; members {members}, fenced {}", view.epoch, hosts(view.fenced));
    Ok(())
}

fn destroy(path: &Path, settings: &Settings, yes: bool) -> Result<(), Failure> {
    let memory = session::open_memory(path, settings.coherence.unwrap_or_default())?;
    // Any user that may write a folder could have put a link there: what is lost is what was named.
    if !memory.region().is_at(path, false)? {
        let leads = path.canonicalize()?;
        return Err(Failure(format!("{} is a link to {}; name that", path.display(), leads.display())));
    }
    // Whatever is removed is a pool: not a file that was named by mistake.
    match read_superblock(&memory) {
        Err(error @ PoolError::NotAPool { .. }) => return Err(at(path)(error)),
        Ok(_) | Err(_) if yes => {}
        Ok(superblock) => {
            let what =
                format!("this removes pool {} and all that is in it; give --yes to confirm", superblock.uuid);
            return Err(Failure(format!("{}: {what}", path.display())));
        }
        Err(error) => {
            return Err(Failure(format!("{}: {error}; give --yes to remove it anyway", path.display())));
        }
    }
    // Damage is no reason to keep it.
    let held = inspect(&memory).map_or_else(|_| vec![], |inspection| inspection.stat.hosts);
    // Before its first line goes: where the file cannot be removed, the pool stays whole.
    if path.is_file() {
        let refused =
            |error| Failure(format!("{}: it cannot be removed, and stays as it is: {error}", shown(path)));
        std::fs::remove_file(path).map_err(refused)?;
    }
    unmake(&memory);
    println!("{}: removed", shown(path));
    let boot = session::boot()?;
    for host in &held {
        let (here, _) = here_and_gone(host, boot);
        if !here.is_empty() {
            let (host, here) = (host.host, listed(&here));
            eprintln!("host {host}: processes {here} still have the removed pool open");
        }
    }
    Ok(())
}

/// Ends the pool with its first line.
fn unmake<M: Memory>(memory: &M) {
    polder_pool::line::publish_and_fence(memory, polder_mem::Offset(0), &[0; polder_pool::line::WORDS]);
}

/// Says which pool an error is about.
pub(crate) fn at(path: &Path) -> impl Fn(PoolError) -> Failure {
    let path: PathBuf = path.to_owned();
    move |source| SessionError::Pool { path: path.clone(), source }.into()
}

/// The host ids in a mask, such as `0 2 3`.
pub(crate) fn hosts(mask: u64) -> String {
    let ids: Vec<_> = (0..64).filter(|host| mask >> host & 1 == 1).map(|host| host.to_string()).collect();
    if ids.is_empty() { "none".to_owned() } else { ids.join(" ") }
}

/// Bytes for people.
pub(crate) fn bytes(bytes: u64) -> String {
    bytesize::ByteSize(bytes).display().iec().to_string()
}
