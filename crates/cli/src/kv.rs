//! `polder kv`: caches of blocks, seen from outside.

mod metrics;
pub(crate) mod room;
mod top;

use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;

use clap::Subcommand;
use polder_attach::session::{self, Session, SessionError};
use polder_attach::settings::Settings;
use polder_linux::doctor::{Finding, Severity};
use polder_platform::{printable, quoted};
use polder_pool::PoolError;
use polder_pool::kv::{Cache, CacheStat, check as check_caches, inspect};

use crate::Failure;
use crate::pool::{at, bytes, listed, shown};

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Show what caches of keys and values hold: their hosts, and the identities whose blocks they have.
    Stat {
        /// This cache; without it all of the pool.
        name: Option<String>,
        /// Print one JSON object a cache.
        #[arg(long)]
        json: bool,
    },
    /// Show caches each second, with blocks put and evicted in a second; q ends.
    Top {
        /// This cache; without it all of the pool.
        name: Option<String>,
    },
    /// Look for damage: read the lines of all blocks, and the blocks that have a checksum. Fails if there is any; changes nothing.
    Check {
        /// This cache; without it all of the pool.
        name: Option<String>,
        /// Print one JSON object a cache.
        #[arg(long)]
        json: bool,
    },
    /// Answer Prometheus until stopped.
    Metrics {
        /// At this address of this machine alone; port 0 takes any.
        #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9587")]
        listen: SocketAddr,
    },
    /// Remove a cache with all its blocks, unless a process has it open.
    Flush {
        /// The cache.
        name: String,
        /// Give back the room of this host's blocks alone. It has left the pool, or has been evicted and fenced.
        #[arg(long = "of-host", value_name = "ID")]
        host: Option<u16>,
    },
}

pub(crate) fn run(command: &Command, settings: &Settings) -> Result<ExitCode, Failure> {
    match command {
        Command::Stat { name, json } => stat(settings, name.as_deref(), *json),
        Command::Flush { name, host: None } => flush(settings, name),
        Command::Flush { name, host: Some(host) } => flush_host(settings, name, *host),
        Command::Top { name } => top::run(settings, name.as_deref()),
        Command::Check { name, json } => check(settings, name.as_deref(), *json),
        Command::Metrics { listen } => metrics::run(settings, *listen),
    }
}

/// The pool, and its caches or the one of this name.
fn caches<'s>(settings: &'s Settings, name: Option<&str>) -> Result<(&'s Path, Vec<CacheStat>), Failure> {
    let path = settings.pool.as_deref().ok_or(SessionError::NoPool)?;
    let memory = session::open_memory(path, settings.coherence.unwrap_or_default())?;
    let caches = inspect(&memory).map_err(at(path))?;
    let names: Vec<_> = caches.iter().map(|cache| cache.name.clone()).collect();
    Ok((path, wanted(path, name, &names, caches)?))
}

/// Those of this name, or all.
fn wanted<T>(path: &Path, name: Option<&str>, names: &[String], all: Vec<T>) -> Result<Vec<T>, Failure> {
    let Some(name) = name else { return Ok(all) };
    let one = all.into_iter().zip(names).filter(|(_, its)| *its == name).map(|(it, _)| it);
    let one: Vec<_> = one.collect();
    if one.is_empty() {
        let there = listed(&names.iter().map(|name| printable(name)).collect::<Vec<_>>());
        return Err(Failure(format!("{}: no cache {}; there are {there}", path.display(), quoted(name))));
    }
    Ok(one)
}

fn stat(settings: &Settings, name: Option<&str>, json: bool) -> Result<ExitCode, Failure> {
    let (path, caches) = caches(settings, name)?;
    if caches.is_empty() && !json {
        println!("{}: no caches", shown(path));
    }
    for cache in &caches {
        match json {
            true => println!("{}", serde_json::to_string(cache)?),
            false => print!("{}", table(cache)),
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn check(settings: &Settings, name: Option<&str>, json: bool) -> Result<ExitCode, Failure> {
    let path = settings.pool.as_deref().ok_or(SessionError::NoPool)?;
    let memory = session::open_memory(path, settings.coherence.unwrap_or_default())?;
    let checked = check_caches(&memory).map_err(at(path))?;
    let names: Vec<_> = checked.iter().map(|cache| cache.name.clone()).collect();
    let mut is_whole = true;
    if checked.is_empty() && !json {
        println!("{}: no caches", shown(path));
    }
    for cache in wanted(path, name, &names, checked)? {
        is_whole &= cache.damaged.is_empty();
        if json {
            println!("{}", serde_json::to_string(&cache)?);
            continue;
        }
        let (name, damaged) = (printable(&cache.name), cache.damaged.len());
        println!("cache {name}: {} blocks, {} of them read; {damaged} damaged", cache.blocks, cache.read);
        for it in &cache.damaged {
            println!(
                "  slab {}/{} slot {} at offset {:#x}: {}",
                it.host, it.slab, it.slot, it.offset, it.what
            );
        }
        for host in &cache.want_room {
            println!("  host {host} wants room: there was no slab when it last asked for one");
        }
    }
    Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What `polder doctor` says of the pool that is set: that it cannot be opened, or which hosts want room in its caches, and how to give them
/// some.
pub(crate) fn findings(settings: &Settings) -> Vec<Finding> {
    let finding = |severity, subject, found, remedy: &str| Finding {
        severity,
        subject,
        found,
        remedy: remedy.to_owned(),
    };
    if settings.pool.is_none() {
        return vec![];
    }
    let (path, caches) = match caches(settings, None) {
        Ok(found) => found,
        Err(error) => {
            let remedy = "name another pool with --pool, or look at this one with polder pool check";
            return vec![finding(Severity::Problem, "pool".to_owned(), error.to_string(), remedy)];
        }
    };
    let wants = |cache: &CacheStat| {
        let short: Vec<_> = cache.hosts.iter().filter(|part| part.wants_room).map(|part| part.host).collect();
        let gone: Vec<_> =
            cache.hosts.iter().filter(|part| part.gone && part.claimed > 0).map(|part| part.host).collect();
        let kept = if gone.is_empty() {
            String::new()
        } else {
            format!("; hosts that are gone have room: {}", listed(&gone))
        };
        let found =
            format!("there was no slab for these hosts when they last asked: {}{kept}", listed(&short));
        let remedy = match gone.is_empty() {
            true => {
                "where blocks make room too early, make the cache anew with a larger budget, or the pool larger"
            }
            false => "run polder keeper, which gives room of hosts that are gone to those",
        };
        let subject = || format!("cache {} in {}", printable(&cache.name), shown(path));
        (!short.is_empty()).then(|| finding(Severity::Note, subject(), found, remedy))
    };
    caches.iter().filter_map(wants).collect()
}

fn table(cache: &CacheStat) -> String {
    let CacheStat { blocks, claimed, budget, .. } = *cache;
    let (held, name) = (bytes(cache.bytes), printable(&cache.name));
    let slabs = format!("slabs take {} of {}", bytes(claimed), bytes(budget));
    let mut lines = vec![format!("cache {name}: {blocks} blocks of {held}; {slabs}")];
    for part in &cache.hosts {
        let (slabs, host) = (bytes(part.claimed), part.host);
        let counts = format!("{} blocks, {} put, {} evicted", part.blocks, part.puts, part.evictions);
        let reads = format!("{} hits, {} misses", part.hits, part.misses);
        let oldest = part.oldest_seconds.map(|age| format!(", oldest of {age} s"));
        let pinned = part.pinned.map(|pinned| format!(", {pinned} pinned"));
        let wants = part.wants_room.then(|| ", wants room".to_owned());
        let gone = part.gone.then(|| ", gone".to_owned());
        let held = [oldest, pinned, wants, gone].into_iter().flatten().collect::<String>();
        lines.push(format!("  host {host}: {counts}, slabs of {slabs}; {reads}{held}"));
    }
    for identity in &cache.identities {
        let (hash, held) = (identity.hash.get(..12).unwrap_or(&identity.hash), bytes(identity.bytes));
        let text = match identity.text.as_str() {
            "" => "not described".to_owned(),
            text => quoted(text).to_string(),
        };
        lines.push(format!("  identity {}: {} blocks of {held}: {text}", printable(hash), identity.blocks));
    }
    lines.join("\n") + "\n"
}

/// Has this process stand in for a host: the pool refuses that while the host may go on under another kernel.
fn stand_in(settings: &Settings, host: u16) -> Result<Session, SessionError> {
    Session::open(&Settings { host: Some(host), ..settings.clone() })
}

fn flush_host(settings: &Settings, name: &str, host: u16) -> Result<ExitCode, Failure> {
    let path = settings.pool.as_deref().ok_or(SessionError::NoPool)?;
    let session = stand_in(settings, host)?;
    // The pool lets a process of its kernel stand in for a host that goes on, as any other of its processes.
    let holders = session.pool().holders(&format!("/kv/{name}")).map_err(at(path))?;
    let own: Vec<_> = holders.into_iter().filter(|peer| peer.host == host).collect();
    if !own.is_empty() {
        let what =
            format!("host {host} is here, and has the cache {} open in {}", quoted(name), listed(&own));
        return Err(Failure(format!("{}: {what}; end those processes", path.display())));
    }
    let given = Cache::give_up_part(session.pool(), name).map_err(at(path))?;
    let (path, name) = (shown(path), printable(name));
    println!("{path}: host {host} gave back {} of the cache {name}", bytes(given.bytes));
    if given.kept > 0 {
        println!("{} slabs stay, because processes write to them or have pinned their blocks", given.kept);
    }
    Ok(ExitCode::SUCCESS)
}

fn flush(settings: &Settings, name: &str) -> Result<ExitCode, Failure> {
    let path = settings.pool.as_deref().ok_or(SessionError::NoPool)?;
    let session = Session::open(settings)?;
    let pool = session.pool();
    let holders = match pool.holders(&format!("/kv/{name}")) {
        // A removal that was cut short has left the rest.
        Err(PoolError::NotFound { .. }) => vec![],
        holders => holders.map_err(at(path))?,
    };
    if !holders.is_empty() {
        let what = format!("the cache {} is open in {}", quoted(name), listed(&holders));
        return Err(Failure(format!("{}: {what}; end those processes", path.display())));
    }
    match Cache::remove(pool, name) {
        // Which there are is said.
        Err(error @ PoolError::NotFound { .. }) => {
            caches(settings, Some(name))?;
            return Err(at(path)(error));
        }
        removed => removed.and_then(|()| pool.maintain()).map_err(at(path))?,
    }
    println!("{}: removed the cache {}", shown(path), printable(name));
    Ok(ExitCode::SUCCESS)
}
