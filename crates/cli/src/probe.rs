//! `polder probe`: what this machine's memory, lines, rings and sockets take, as a file that the planner reads.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Instant;

use polder_mem::lines::{Effort, Way, memory_bandwidth, memory_latency, memset, memset_bandwidth};
use polder_mem::{Region, Software as Lines, allowed_cpus, pin_to_cpu};
use polder_platform::{
    Accelerator, Attach, AttachKind, Bandwidth, Bytes, Compute, Curve, Efficiency, Exchange, Fabric, Fitted,
    FlopRate, Host, Link, Packet, Platform, Quantity, Rack, Reached, Reduction, Sharing, Software, Switch,
    Tier, Time, Topology, TransferRate, Unit,
};
use polder_pool::settings::CoherenceChoice;

use serde::Deserialize;

use crate::Failure;
use crate::bench::Sample;
use crate::bench::collectives::python;
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
    let (mut rack, mut library) = (BTreeMap::new(), String::new());
    if let Some(kernels) = kernels()? {
        library = format!(", and with {}", kernels.library);
        rack.insert("here".into(), cores(&name, &sharing, kernels)?);
    } else {
        eprintln!("polder: no torch beside it, so products are not measured: `make torch` installs it");
    }
    let platform = Platform {
        title: format!("{name}, {} cores", sharing.cores),
        source: format!("measured by polder {}{library} on this machine", env!("CARGO_PKG_VERSION")),
        rack,
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
    let lines = Lines::new(Region::create(scratch.path().join("region"), MEMORY as u64)?);
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
        passed: Bandwidth::new(cached),
        near: Bandwidth::new(cached),
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

/// What kernels of the library that trains reach on one core, in 32 bits.
#[derive(Deserialize)]
struct Kernels {
    library: String,
    /// Operations of a product, and operations a second.
    products: Vec<(f64, f64)>,
    /// Bytes that a kernel moves, and bytes a second.
    moved: Vec<(f64, f64)>,
    launch_s: f64,
    /// Operations a second of fused attention.
    attention: f64,
}

/// Measures in Python; nothing without the library, or without Python.
fn kernels() -> Result<Option<Kernels>, Failure> {
    let Ok(python) = python() else { return Ok(None) };
    eprintln!("polder: measuring kernels");
    let done = Command::new(&python).args(["-m", "polder.probe"]).stderr(Stdio::inherit()).output()?;
    if !done.status.success() {
        return Err(Failure(format!("{} -m polder.probe: {}", python.display(), done.status)));
    }
    Ok(serde_json::from_slice(&done.stdout)?)
}

/// Cores as accelerators that share the host's memory, joined by a coherent pool.
fn cores(name: &str, sharing: &Sharing, kernels: Kernels) -> Result<Rack, Failure> {
    let most = |points: &[(f64, f64)]| points.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
    let (operations, bytes) = (most(&kernels.products), most(&kernels.moved));
    let count = sharing.cores;
    let whole = Packet { bytes: Bytes::new(64.0), payload: Bytes::new(64.0) };
    let pool = &sharing.exchange["coherent"];
    let fabric = Fabric {
        links: 1,
        link: Link {
            rate: TransferRate::new(pool.copied.value() * 8.0),
            lanes: 1,
            encoding: 1.0,
            flit: whole,
            packet: whole,
            propagation: Time::new(0.0),
        },
        switch: Switch { ports: count, latency: Time::new(0.0), reduction: Reduction::None },
        topology: Topology::SingleHop,
        software: Software { message: pool.call, call: pool.call, step: pool.turn },
        carries: vec![],
        pbr: None,
    };
    let memory = &sharing.memory;
    Ok(Rack {
        accelerators: count,
        accelerator: Accelerator {
            name: format!("core of {name}"),
            compute: Compute { bf16: None, fp8: None, fp32: Some(FlopRate::new(operations)) },
            memory: Tier {
                capacity: Bytes::new(memory.capacity.value() / f64::from(count)),
                read: Bandwidth::new(bytes),
                write: Bandwidth::new(bytes),
                latency: memory.latency,
            },
            fitted: Fitted {
                matrix: 1.0,
                depth: 0.0,
                attention: (kernels.attention / operations).min(1.0),
                stream: 1.0,
                launch: Time::new(kernels.launch_s),
                inside: 1.0,
                between: 1.0,
                straggle: 0.0,
            },
            efficiency: Efficiency {
                matrix: Some(curve(&kernels.products, operations)?),
                memory: Some(curve(&kernels.moved, bytes)?),
                in_turn: false,
            },
        },
        fabric: Some(fabric),
        host: Host {
            accelerators: count,
            memory: *memory,
            attach: Attach {
                kind: AttachKind::Ucie,
                bandwidth: Bandwidth::new(memory.read.value() / f64::from(count)),
            },
            tier: [].into(),
        },
    })
}

/// What part of the most is reached, by size.
fn curve<U: Unit>(points: &[(f64, f64)], most: f64) -> Result<Curve<U>, Failure> {
    let point = |&(size, rate): &(f64, f64)| Reached { size: Quantity::new(size), reached: rate / most };
    Curve::try_from(points.iter().map(point).collect::<Vec<_>>()).map_err(Failure)
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
            let sample = |_| {
                let begin = Instant::now();
                here(TURNS);
                begin.elapsed().as_secs_f64() / f64::from(2 * TURNS)
            };
            median((0..SAMPLES).map(sample).collect())
        });
        timed.join().map_err(|_| Failure("a thread that was timed has ended".into()))?
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
    Ok((median(turns)?, median(streams)?))
}

fn median(values: Vec<f64>) -> Result<f64, Failure> {
    let sample = Sample::of(values).ok_or_else(|| Failure("nothing was timed".into()))?;
    Ok(sample.median)
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
    let text = fs::read_to_string(path).ok()?;
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
