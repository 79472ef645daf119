//! `polder probe`: what this machine's memory, lines, rings and sockets take, as a file that the planner reads.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Instant;

use polder_mem::lines::{Effort, Way, memory_bandwidth, memory_latency, memset, memset_bandwidth};
use polder_mem::{Region, Software, allowed_cpus, pin_to_cpu};
use polder_platform::{Bandwidth, Bytes, Exchange, Platform, Sharing, Tier, Time};
use polder_pool::settings::CoherenceChoice;

use crate::Failure;
use crate::bench::ring::one_way;
use crate::scratch::Scratch;

/// Larger than most caches.
const MEMORY: usize = 256 << 20;
/// Small enough for every cache.
const CACHED: u64 = 128 << 10;
const SAMPLES: usize = 5;

/// Measures this machine.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Where the machine's description goes.
    #[arg(long, short, default_value = "platform.toml", value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    out: PathBuf,
    /// Replace a file that is there.
    #[arg(long)]
    force: bool,
}

/// Measures, and writes the file.
pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let out = &arguments.out;
    let wrong = |error: std::io::Error| Failure(format!("{}: {error}", out.display()));
    if out.exists() && !arguments.force {
        return Err(Failure(format!("{} exists: --force replaces it, --out names another", out.display())));
    }
    let sharing = sharing()?;
    let name = processor().unwrap_or_else(|| "a processor without a name".into());
    let platform = Platform {
        title: format!("{name}, {} cores", sharing.cores),
        source: format!("measured by polder {} on this machine", env!("CARGO_PKG_VERSION")),
        rack: [].into(),
        between: None,
        pool: None,
        sharing: Some(sharing),
        server: [].into(),
    };
    let text = toml::to_string(&platform)?;
    fs::write(out, &text).map_err(wrong)?;
    print!("{text}");
    eprintln!("polder: measured; it stands in {}", out.display());
    Ok(())
}

fn sharing() -> Result<Sharing, Failure> {
    let step = |what: &str| eprintln!("polder: measuring {what}");
    let cores = allowed_cpus().len();
    let few = Effort { samples: 15, ..Effort::default() };
    step("memory");
    let latency = memory_latency(MEMORY, few).median / 1e9;
    let read = memory_bandwidth(cores, MEMORY / cores, few).median * 1e9;
    step("lines");
    let scratch = Scratch::new()?;
    let lines = Software::new(Region::create(scratch.path().join("region"), MEMORY as u64)?);
    let past = memset_bandwidth(&lines, Way::NonTemporal, cores, few)?;
    let write = past.map_or(read, |timing| timing.median * 1e9);
    let near = memset(&lines, Way::Cached, CACHED, few)?;
    let cached = near.map_or(read, |timing| CACHED as f64 / timing.median * 1e9);
    drop((lines, scratch));
    step("turns between two processes of one core");
    let switch = handed_over()?;
    let each = |bandwidth: f64| Bandwidth::new(bandwidth / cores as f64);
    let exchange = |turn: f64, far: [Option<f64>; 2]| Exchange {
        // A call looks at as many lines as a turn.
        call: Time::new(turn),
        turn: Time::new(turn),
        switch: Time::new(switch),
        cached: Bandwidth::new(cached),
        copied: each(read),
        write: far[0].map(each),
        read: far[1].map(each),
    };
    step("rings");
    let turn = |kind| one_way(kind)?.ok_or_else(|| Failure("the ring gave no figure".into()));
    let coherent = exchange(turn(CoherenceChoice::Coherent)?, [None; 2]);
    let software = exchange(turn(CoherenceChoice::Software)?, [Some(write), Some(read)]);
    step("sockets");
    let (message, stream) = loopback()?;
    let sockets = exchange(message, [Some(stream * cores as f64), None]);
    Ok(Sharing {
        cores: cores as u32,
        cache: Bytes::new(cache().unwrap_or(32 << 20) as f64),
        memory: Tier {
            capacity: Bytes::new(capacity().ok_or_else(|| Failure("/proc/meminfo: no MemTotal".into()))?),
            read: Bandwidth::new(read),
            write: Bandwidth::new(write),
            latency: Time::new(latency),
        },
        exchange: [
            ("coherent".into(), coherent),
            ("software".into(), software),
            ("loopback".into(), sockets),
        ]
        .into(),
    })
}

/// Seconds until a thread runs that waits for another of the same core.
fn handed_over() -> Result<f64, Failure> {
    const TURNS: u32 = 2000;
    let cpu = *allowed_cpus().first().ok_or_else(|| Failure("no processor to run on".into()))?;
    let ((there, hear), (back, heard)) = (channel::<()>(), channel::<()>());
    let here = move |turns: u32| {
        for _ in 0..turns {
            if there.send(()).is_err() || heard.recv().is_err() {
                break;
            }
        }
    };
    // Pinned threads of their own, so that the caller stays where it is.
    thread::scope(|scope| {
        scope.spawn(move || {
            drop(pin_to_cpu(cpu));
            while hear.recv().is_ok() && back.send(()).is_ok() {}
        });
        let timed = scope.spawn(move || {
            drop(pin_to_cpu(cpu));
            let mut samples: Vec<_> = (0..SAMPLES)
                .map(|_| {
                    let begin = Instant::now();
                    here(TURNS);
                    begin.elapsed().as_secs_f64() / f64::from(2 * TURNS)
                })
                .collect();
            median(&mut samples)
        });
        timed.join().map_err(|_| Failure("a thread that was timed has ended".into()))
    })
}

/// Seconds of a message of 8 bytes one way over TCP on this machine, and bytes a second of many.
fn loopback() -> Result<(f64, f64), Failure> {
    const TURNS: u32 = 2000;
    const STREAM: usize = 64 << 20;
    const PIECE: usize = 1 << 20;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let other = thread::spawn(move || -> std::io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        let mut word = [0; 8];
        for _ in 0..SAMPLES * TURNS as usize {
            stream.read_exact(&mut word)?;
            stream.write_all(&word)?;
        }
        let mut piece = vec![0; PIECE];
        for _ in 0..SAMPLES {
            (0..STREAM / PIECE).try_for_each(|_| stream.read_exact(&mut piece))?;
            stream.write_all(&word)?;
        }
        Ok(())
    });
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    let mut word = [7; 8];
    let (mut turns, mut streams) = (Vec::new(), Vec::new());
    for _ in 0..SAMPLES {
        let begin = Instant::now();
        for _ in 0..TURNS {
            stream.write_all(&word)?;
            stream.read_exact(&mut word)?;
        }
        turns.push(begin.elapsed().as_secs_f64() / f64::from(2 * TURNS));
    }
    let piece = vec![7; PIECE];
    for _ in 0..SAMPLES {
        let begin = Instant::now();
        (0..STREAM / PIECE).try_for_each(|_| stream.write_all(&piece))?;
        stream.read_exact(&mut word)?;
        streams.push(STREAM as f64 / begin.elapsed().as_secs_f64());
    }
    other.join().map_err(|_| Failure("a thread that was timed has ended".into()))??;
    Ok((median(&mut turns), median(&mut streams)))
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Bytes of memory.
fn capacity() -> Option<f64> {
    let kib: f64 = line_of("/proc/meminfo", "MemTotal")?.strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024.0)
}

/// The processor's name.
fn processor() -> Option<String> {
    line_of("/proc/cpuinfo", "model name")
}

/// What stands behind a key and a colon.
fn line_of(path: &str, key: &str) -> Option<String> {
    let mut text = String::new();
    File::open(path).ok()?.read_to_string(&mut text).ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(key)?.trim_start().strip_prefix(':'));
    value.map(|value| value.trim().to_owned())
}

/// Bytes of the largest cache of the first processor.
fn cache() -> Option<u64> {
    let folder = Path::new("/sys/devices/system/cpu/cpu0/cache");
    let sizes = fs::read_dir(folder).ok()?.filter_map(|entry| {
        let size = fs::read_to_string(entry.ok()?.path().join("size")).ok()?;
        size.trim().strip_suffix('K')?.parse::<u64>().ok()
    });
    sizes.max().map(|kib| kib << 10)
}
