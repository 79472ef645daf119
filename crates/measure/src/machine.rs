//! What this machine's memory, lines, rings and sockets take, as a file that the planner reads.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Instant;

use polder_attach::settings::CoherenceChoice;
use polder_mem::lines::{
    Sampling, WriteMethod, memory_bandwidth, memory_latency, memset, memset_bandwidth, range_bandwidth,
    range_latency,
};
use polder_mem::{Mapped, Region, allowed_cpus, bind_memory, pin_to_cpu};
use polder_offload::{DiskRates, Range, TierFile, disk_rates};
use polder_platform::{
    Accelerator, Attach, AttachKind, Bandwidth, BuiltTier, Bytes, Compute, Curve, DataError, Disk,
    Efficiency, Exchange, Fabric, Fitted, FittedTier, FlopRate, Host, Link, LocalTier, MemoryTier,
    OffloadRates, Packet, Platform, Quantity, Rack, Reached, ReachedRates, Reduction, Server, Sharing,
    Software, Switch, ThreadRates, Time, Topology, TransferRate, Unit,
};

use serde::Deserialize;

use crate::ring::one_way;
use crate::{Failure, Sample, Scratch, Tied, python};

/// How long to measure each.
const FEW: Sampling = Sampling { samples: 15, sample_ns: 200_000 };
/// Larger than most caches.
const MEMORY: usize = 256 << 20;
/// Small enough for every cache.
const CACHED: u64 = 128 << 10;
const SAMPLES: usize = 5;

/// Measures this machine, as the text of a file that `--platform` takes: with the disks of these folders and these dax devices as tiers for
/// `polder.offload`. Beside it stands by what part half of a kernel's samples differ from their median, where kernels were measured.
///
/// # Errors
/// When a folder or a device is no tier, what is timed fails, or the machine is so busy that the planner would refuse the figures.
pub fn measured(folders: &[PathBuf], paths: &[PathBuf]) -> Result<(String, Option<f64>), Failure> {
    // First, because a folder that is no tier is soon found.
    let disk = disks(folders)?;
    let devices = devices(paths)?;
    eprintln!(
        "polder: measuring takes one to three minutes; other work on this machine makes the figures worse"
    );
    until_it_is_read(|| {
        let (platform, noise) = machine(&disk, &devices)?;
        Ok((toml::to_string(&platform)?, noise))
    })
}

/// How often a machine is measured of which the planner would refuse the file, as it does on a busy one.
const ATTEMPTS: u32 = 3;

/// The first text that `--platform` takes, with what was measured beside it.
fn until_it_is_read<T>(
    mut measure: impl FnMut() -> Result<(String, T), Failure>,
) -> Result<(String, T), Failure> {
    let scratch = Scratch::new()?;
    let path = scratch.path().join("platform.toml").display().to_string();
    let mut attempt = 1;
    loop {
        let (text, beside) = measure()?;
        fs::write(&path, &text)?;
        let Err(DataError { key, problem, .. }) = Platform::load(&path) else { return Ok((text, beside)) };
        let refused = format!("measured an impossible value, {key}: {problem}");
        if attempt == ATTEMPTS {
            let remedy = "other work takes the cores; end it, and probe again";
            return Err(Failure(format!("{refused}, {attempt} times; {remedy}")));
        }
        attempt += 1;
        eprintln!("polder: {refused}; measuring again ({attempt} of {ATTEMPTS})");
    }
}

/// All but disks and devices, and by what part half of a kernel's samples differ from their median.
fn machine(
    disk: &BTreeMap<String, Disk>,
    devices: &BTreeMap<String, LocalTier>,
) -> Result<(Platform, Option<f64>), Failure> {
    let sharing = sharing()?;
    let name = processor().unwrap_or_else(|| "a processor without a name".into());
    let (mut rack, mut library, mut noise) = (BTreeMap::new(), String::new(), None);
    let mut server = BTreeMap::new();
    let mut local_tiers = devices.clone();
    local_tiers.extend(nodes()?);
    let tiers = tiers()?;
    if let Some(measured) = kernels()? {
        library = format!(", and with {}", measured.library);
        noise = Some(measured.noise);
        if let Some(gpu) = &measured.gpu {
            rack.insert("gpu".into(), on_gpu(gpu, &sharing, &tiers)?);
        }
        rack.insert("here".into(), cores(&name, &sharing, &measured.core, tiers)?);
    } else {
        eprintln!(
            "polder: PyTorch is not installed, so matrix products are not measured: `make torch` installs it"
        );
        if !tiers.is_empty() {
            server.insert("here".into(), Server { count: 1, tiers, nic: [].into(), path: [].into() });
        }
    }
    let platform = Platform {
        title: format!("{name}, {} cores", sharing.cores),
        source: format!("measured by polder {}{library} on this machine", env!("CARGO_PKG_VERSION")),
        rack,
        between: None,
        pool: None,
        storage: None,
        sharing: Some(sharing),
        server,
        local_tiers,
        disk: disk.clone(),
    };
    Ok((platform, noise))
}

fn sharing() -> Result<Sharing, Failure> {
    let step = |what: &str| eprintln!("polder: measuring {what}");
    let cores = allowed_cpus().len();
    step("memory");
    let (latency, read) = of_memory();
    step("lines");
    let scratch = Scratch::new()?;
    let lines = Mapped::new(Region::create(scratch.path().join("region"), MEMORY as u64)?);
    let past = memset_bandwidth(&lines, WriteMethod::NonTemporal, cores, FEW)?;
    let write = past.map_or(read, |timing| timing.median * 1e9);
    let near = memset(&lines, WriteMethod::Cached, CACHED, FEW)?;
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
    let [own, last] = caches().unwrap_or([1 << 20, 32 << 20]);
    Ok(Sharing {
        cores: cores as u32,
        cache: Bytes::new(last as f64),
        core_cache: Bytes::new(own as f64),
        memory: MemoryTier {
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

/// Bytes that are written to a disk and read again, in each of a few rounds.
const DISK: usize = 256 << 20;
const DISK_ROUNDS: usize = 3;

/// Folders on disks, each by its last name.
fn disks(folders: &[PathBuf]) -> Result<BTreeMap<String, Disk>, Failure> {
    let measured = |folder: &PathBuf| -> Result<_, Failure> {
        // A folder that is no tier is refused in one line.
        drop(TierFile::create(folder, 1)?);
        eprintln!("polder: measuring the disk of {}", folder.display());
        let DiskRates { free, read, write } = disk_rates(folder, DISK, DISK_ROUNDS)?;
        let folder = folder.canonicalize()?;
        let name = folder.file_name().map_or("root".into(), |it| it.to_string_lossy().into_owned());
        let disk = Disk {
            folder: folder.to_string_lossy().into_owned(),
            // A disk that is full to the last byte serves nobody.
            capacity: Bytes::new(free as f64 * 0.9),
            read: Bandwidth::new(read),
            write: Bandwidth::new(write),
        };
        Ok((name, disk))
    };
    folders.iter().map(measured).collect()
}

/// Dax devices as tiers, by name.
fn devices(paths: &[PathBuf]) -> Result<BTreeMap<String, LocalTier>, Failure> {
    let measured = |path: &PathBuf| -> Result<_, Failure> {
        let size = Region::open(path)?.bytes();
        let mut range = Range::new(MEMORY.min(size as usize))?;
        let whole = range.bytes();
        range.map(0, whole, path)?;
        let name = path.file_name().map_or("dax".into(), |it| it.to_string_lossy().into_owned());
        eprintln!("polder: measuring {}", path.display());
        let device = Some(path.to_string_lossy().into_owned());
        Ok((name, of_range(range, None, device, size as f64)))
    };
    paths.iter().map(measured).collect()
}

/// The memory of every NUMA node as a tier, by name; that of the node which this program runs on is `dram`.
fn nodes() -> Result<BTreeMap<String, LocalTier>, Failure> {
    let folder = Path::new("/sys/devices/system/node");
    let Ok(nodes) = fs::read_to_string(folder.join("has_memory")) else { return Ok([].into()) };
    let cpu = allowed_cpus().first().copied().unwrap_or(0);
    let measured = |node: usize| -> Result<_, Failure> {
        let of_node = folder.join(format!("node{node}"));
        let own = fs::read_to_string(of_node.join("cpulist")).unwrap_or_default();
        let name = if numbers(&own).contains(&cpu) { "dram".into() } else { format!("node{node}") };
        eprintln!("polder: measuring tier {name}");
        let path = of_node.join("meminfo");
        let kib = line_of(&path, &format!("Node {node} MemTotal")).and_then(|it| kib(&it));
        let capacity = kib.ok_or_else(|| Failure(format!("{}: no MemTotal", path.display())))?;
        let mut range = Range::new(MEMORY.min(capacity as usize / 4))?;
        let whole = range.bytes();
        range.bind(0, whole, node)?;
        Ok((name, of_range(range, Some(node as u32), None, capacity)))
    };
    numbers(&nodes).into_iter().map(measured).collect()
}

/// What a range that lies in a tier says of it.
fn of_range(mut range: Range, node: Option<u32>, device: Option<String>, capacity: f64) -> LocalTier {
    let cores = allowed_cpus().len();
    let latency = Time::new(range_latency(range.words(), FEW).median / 1e9);
    let mut counts = vec![1, cores];
    counts.dedup();
    let threads = counts.into_iter().map(|threads| {
        let [read, write] =
            range_bandwidth(range.words(), threads, FEW).map(|it| Bandwidth::new(it.median * 1e9));
        ThreadRates { threads: threads as u32, read, write }
    });
    let threads = threads.collect();
    LocalTier { node, device, capacity: Bytes::new(capacity), latency, threads }
}

/// The memory of NUMA nodes other than the one that this program runs on, by name.
fn tiers() -> Result<BTreeMap<String, BuiltTier>, Failure> {
    let folder = Path::new("/sys/devices/system/node");
    let Ok(nodes) = fs::read_to_string(folder.join("has_memory")) else { return Ok([].into()) };
    let cpu = allowed_cpus().first().copied().unwrap_or(0);
    let of_node = |node: usize| folder.join(format!("node{node}"));
    let others = numbers(&nodes).into_iter().filter(|node| {
        let own = fs::read_to_string(of_node(*node).join("cpulist")).unwrap_or_default();
        !numbers(&own).contains(&cpu)
    });
    let measured = |node: usize| -> Result<_, Failure> {
        eprintln!("polder: measuring memory of node {node}");
        let path = of_node(node).join("meminfo");
        let kib = line_of(&path, &format!("Node {node} MemTotal")).and_then(|it| kib(&it));
        let capacity = kib.ok_or_else(|| Failure(format!("{}: no MemTotal", path.display())))?;
        let (latency, read) = thread::scope(|scope| scope.spawn(|| on_node(node)).join())
            .map_err(|_| Failure("a thread that was timed has ended".into()))??;
        let memory = BuiltTier {
            capacity: Bytes::new(capacity),
            channels: 1,
            rate: TransferRate::new(read / 8.0),
            latency: Time::new(latency),
            hosts: 1,
            port: None,
            flushed: None,
            fitted: FittedTier::default(),
        };
        Ok((format!("node{node}"), memory))
    };
    others.map(measured).collect()
}

/// Seconds of a load from the memory of a NUMA node, and bytes a second that all cores read of it. The thread takes its memory
/// there from now on.
fn on_node(node: usize) -> Result<(f64, f64), Failure> {
    bind_memory(node).map_err(|error| Failure(format!("memory of node {node}: {error}")))?;
    Ok(of_memory())
}

/// Seconds of a load from memory, and bytes a second that all cores read of it.
fn of_memory() -> (f64, f64) {
    let cores = allowed_cpus().len();
    let latency = memory_latency(MEMORY, FEW).median / 1e9;
    (latency, memory_bandwidth(cores, MEMORY / cores, FEW).median * 1e9)
}

/// The numbers of a list such as `0-2,5`.
fn numbers(list: &str) -> Vec<usize> {
    let ranges = list.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse().ok()?..=last.parse().ok()?)
    });
    ranges.flatten().collect()
}

/// What the library that trains was seen to do.
#[derive(Deserialize)]
struct Library {
    /// Its name and version.
    library: String,
    /// A core while the others do the same, in 32 bits.
    core: Kernels,
    /// By what part half of a kernel's samples differ from their median, the median of the kernels.
    noise: f64,
    gpu: Option<Gpu>,
}

/// The first GPU, in bf16.
#[derive(Deserialize)]
struct Gpu {
    name: String,
    /// How many there are.
    count: u32,
    /// Bytes of its memory.
    capacity: f64,
    /// Bytes a second of copies from the host.
    from_host: f64,
    /// And of copies to it.
    to_host: f64,
    kernels: Kernels,
}

/// What kernels reach.
#[derive(Deserialize)]
struct Kernels {
    /// Operations of a product, and operations a second.
    products: Vec<(f64, f64)>,
    /// Bytes that a kernel moves, and bytes a second.
    moved: Vec<(f64, f64)>,
    launch_s: f64,
    /// Operations a second of fused attention.
    attention: f64,
    /// How much longer the slowest takes, for each doubling of how many there are.
    straggle: f64,
}

/// Measures in Python; nothing without the library, or without Python.
fn kernels() -> Result<Option<Library>, Failure> {
    let Ok(python) = python() else { return Ok(None) };
    eprintln!("polder: measuring kernels");
    let done = Tied::output(Command::new(&python).args(["-P", "-m", "polder.probe"]))?;
    if !done.status.success() {
        return Err(Failure(format!("{} -m polder.probe: {}", python.display(), done.status)));
    }
    Ok(serde_json::from_slice(&done.stdout)?)
}

/// What does what was measured: the most that is reached as the peak, and parts of it by size.
fn accelerator(
    name: &str,
    kernels: &Kernels,
    (capacity, latency): (f64, Time),
    compute: impl Fn(FlopRate) -> Compute,
) -> Result<Accelerator, Failure> {
    let most = |points: &[(f64, f64)]| points.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
    let (operations, bytes) = (most(&kernels.products), most(&kernels.moved));
    Ok(Accelerator {
        name: name.into(),
        compute: compute(FlopRate::new(operations)),
        memory: MemoryTier {
            capacity: Bytes::new(capacity),
            read: Bandwidth::new(bytes),
            write: Bandwidth::new(bytes),
            latency,
        },
        fitted: Fitted {
            matrix: 1.0,
            depth: 0.0,
            attention: (kernels.attention / operations).min(1.0),
            stream: 1.0,
            launch: Time::new(kernels.launch_s),
            inside: 1.0,
            between: 1.0,
            straggle: kernels.straggle,
        },
        efficiency: Efficiency {
            matrix: Some(curve(&kernels.products, operations)?),
            memory: Some(curve(&kernels.moved, bytes)?),
            in_turn: false,
        },
    })
}

/// One GPU behind the host. What joins several is not measured.
fn on_gpu(gpu: &Gpu, sharing: &Sharing, tiers: &BTreeMap<String, BuiltTier>) -> Result<Rack, Failure> {
    let Gpu { name, count, .. } = gpu;
    if *count > 1 {
        eprintln!("polder: {count} of {name}; the links between them are not measured, and one is described");
    }
    // How long a load of its own takes is not measured, and no part of a step.
    let memory = (gpu.capacity, Time::new(0.0));
    let compute = |peak| Compute { bf16: Some(peak), fp8: None, fp32: None };
    let [read, write] = [gpu.from_host, gpu.to_host].map(|rate| Some(Bandwidth::new(rate)));
    let copies = ReachedRates { step: None, read, write };
    Ok(Rack {
        accelerators: 1,
        accelerator: accelerator(name, &gpu.kernels, memory, compute)?,
        fabric: None,
        coherent: None,
        host: Host {
            accelerators: 1,
            memory: sharing.memory,
            attach: Attach {
                kind: Some(AttachKind::Pcie),
                bandwidth: Bandwidth::new(gpu.from_host),
                accelerators: 1,
            },
            tiers: tiers.clone(),
            offload: Some(OffloadRates {
                tiers: [("host".to_owned(), copies)].into(),
                ..OffloadRates::default()
            }),
        },
    })
}

/// Cores as accelerators that share the host's memory, joined by a coherent pool.
fn cores(
    name: &str,
    sharing: &Sharing,
    kernels: &Kernels,
    tiers: BTreeMap<String, BuiltTier>,
) -> Result<Rack, Failure> {
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
        software: Software { message: pool.call, call: pool.call, step: pool.turn, processors: 0.0 },
        carries: vec![],
        pbr: None,
        controllers: None,
    };
    let memory = &sharing.memory;
    let share = (memory.capacity.value() / f64::from(count), memory.latency);
    let compute = |peak| Compute { bf16: None, fp8: None, fp32: Some(peak) };
    Ok(Rack {
        accelerators: count,
        accelerator: accelerator(&format!("core of {name}"), kernels, share, compute)?,
        fabric: Some(fabric),
        coherent: None,
        host: Host {
            accelerators: count,
            memory: *memory,
            attach: Attach {
                kind: Some(AttachKind::Ucie),
                bandwidth: Bandwidth::new(memory.read.value() / f64::from(count)),
                accelerators: 1,
            },
            tiers,
            offload: None,
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

/// Bytes of memory, and no more than the container allows.
fn capacity() -> Option<f64> {
    let host = kib(&line_of(Path::new("/proc/meminfo"), "MemTotal")?)?;
    let limit = polder_linux::memory_limit(|path| fs::read_to_string(path).ok());
    Some(limit.map_or(host, |limit| host.min(limit as f64)))
}

/// Bytes of a figure such as `24 kB`.
pub fn kib(figure: &str) -> Option<f64> {
    let kib: f64 = figure.strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024.0)
}

/// The processor's name.
pub fn processor() -> Option<String> {
    line_of(Path::new("/proc/cpuinfo"), "model name")
}

/// What stands behind a key and a colon.
pub fn line_of(path: &Path, key: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(key)?.trim_start().strip_prefix(':'));
    value.map(|value| value.trim().to_owned())
}

/// Bytes of the last cache but one of a processor, which is its core's, and of the last.
fn caches() -> Option<[u64; 2]> {
    let folder = format!("/sys/devices/system/cpu/cpu{}/cache", allowed_cpus().first()?);
    let levels = fs::read_dir(folder).ok()?.filter_map(|entry| {
        let folder = entry.ok()?.path();
        let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
        let level: u32 = read("level")?.trim().parse().ok()?;
        Some((level, read("size")?.trim().strip_suffix('K')?.parse::<u64>().ok()? << 10))
    });
    of_core_and_last(&levels.collect::<Vec<_>>())
}

/// Of caches by level, whatever they hold.
fn of_core_and_last(levels: &[(u32, u64)]) -> Option<[u64; 2]> {
    let (last, size) = *levels.iter().max()?;
    let before = levels.iter().filter(|(level, _)| *level < last).max();
    Some([before.map_or(size, |(_, size)| *size), size])
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNELS: &str = r#"{"products": [[1e9, 2e13], [1e12, 6e14]], "moved": [[1e6, 5e11], [1e9, 3e12]], "launch_s": 5e-6,
        "attention": 3e14, "straggle": 0.01}"#;

    /// What Python prints where there are GPUs.
    fn measured() -> Library {
        let gpu = format!(
            r#"{{"name": "a GPU", "count": 2, "capacity": 8e10, "from_host": 5e10, "to_host": 4e10, "kernels": {KERNELS}}}"#
        );
        serde_json::from_str(&format!(
            r#"{{"library": "torch", "core": {KERNELS}, "noise": 0.02, "gpu": {gpu}}}"#
        ))
        .unwrap()
    }

    #[test]
    fn a_cores_cache_is_the_last_but_one() {
        assert_eq!(of_core_and_last(&[(1, 32), (1, 64), (2, 1024), (3, 32768)]), Some([1024, 32768]));
        assert_eq!(of_core_and_last(&[(1, 32), (1, 64)]), Some([64, 64]));
        assert_eq!(of_core_and_last(&[]), None);
    }

    #[test]
    fn a_gpu_and_the_cores_are_racks_that_the_planner_reads() {
        let measured = measured();
        let memory = MemoryTier {
            capacity: Bytes::new(24e9),
            read: Bandwidth::new(2e10),
            write: Bandwidth::new(1e10),
            latency: Time::new(1e-7),
        };
        let exchange = Exchange::from_values([1e-6, 1e-6, 1e-5, 2e10, 1e10, 2e10, 2e10, 1e10, 1e10]);
        let exchange = [("coherent".into(), exchange)].into();
        let sharing =
            Sharing { cores: 2, cache: Bytes::new(3e7), core_cache: Bytes::new(1e6), memory, exchange };
        let rack = on_gpu(measured.gpu.as_ref().unwrap(), &sharing, &[].into()).unwrap();
        let cores = cores("a processor", &sharing, &measured.core, [].into()).unwrap();
        let mut range = Range::new(1 << 20).unwrap();
        range.bind(0, 1 << 20, 0).unwrap();
        let platform = Platform {
            title: "here".into(),
            source: "made up".into(),
            rack: [("gpu".into(), rack), ("here".into(), cores)].into(),
            between: None,
            pool: None,
            storage: None,
            sharing: Some(sharing),
            server: [].into(),
            local_tiers: [("dram".into(), of_range(range, Some(0), None, 1e9))].into(),
            disk: [].into(),
        };
        let text = toml::to_string(&platform).unwrap();
        let scratch = Scratch::new().unwrap();
        let path = scratch.path().join("here.toml");
        fs::write(&path, text).unwrap();
        let loaded = Platform::load(path.to_str().unwrap()).unwrap();
        let tier = &loaded.local_tiers["dram"];
        assert_eq!((tier.node, tier.threads[0].threads), (Some(0), 1));
        assert!(
            tier.latency.value() > 0.0
                && tier.rates(None).0.value() > 0.0
                && tier.rates(Some(1)).1.value() > 0.0
        );
        assert_eq!(loaded.rack["gpu"].accelerator.compute.bf16.unwrap().value(), 6e14);
        assert_eq!(loaded.rack["gpu"].host.attach.bandwidth.value(), 5e10);
        let copies = loaded.rack["gpu"].host.offload.as_ref().unwrap().tiers["host"];
        assert_eq!([copies.read, copies.write].map(|it| it.unwrap().value()), [5e10, 4e10]);
        assert_eq!(loaded.rack["here"].accelerator.compute.fp32.unwrap().value(), 6e14);
    }

    /// A core that others keep busy straggles by 7.58 and more, which no platform may.
    #[test]
    fn what_the_planner_would_refuse_is_measured_again_and_never_written() {
        let text = |straggle: f64| {
            let platform = Platform::load("dgx-h100").unwrap();
            let text = toml::to_string(&platform).unwrap();
            let line = text.lines().find(|line| line.starts_with("straggle = ")).unwrap().to_owned();
            text.replace(&line, &format!("straggle = {straggle}"))
        };
        let mut straggles = vec![0.1, 7.58, 3.0];
        let found = until_it_is_read(|| Ok((text(straggles.pop().unwrap()), straggles.len()))).unwrap();
        assert_eq!(found, (text(0.1), 0));
        let mut times = 0;
        let refused = until_it_is_read(|| {
            times += 1;
            Ok((text(7.58), ()))
        });
        let refused = refused.unwrap_err().0;
        assert_eq!(times, ATTEMPTS);
        let expected = "straggle: expected a part from 0 to 1, found 7.58, 3 times; other work takes the cores; end it, ";
        assert!(refused.contains(expected), "{refused}");
    }

    #[test]
    fn memory_of_a_node_is_timed_where_it_lies() {
        assert_eq!(numbers("0-2,5\n"), [0, 1, 2, 5]);
        assert!(numbers("").is_empty());
        let refused = thread::spawn(|| on_node(1000)).join().unwrap();
        assert!(refused.unwrap_err().0.starts_with("memory of node 1000: "));
    }
}
