//! `polder plan sync`: a data-parallel step by the way in which gradients are synchronised.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use polder_platform::{Bandwidth, Bytes, Time, quoted};
use polder_sim::program::StepFabric;
use polder_sim::sync::{MOST_LAYERS, MOST_SHARDS, ShardOrder, SplitPoint, SyncJob, SyncSeconds, layers_of};
use polder_sim::{Fidelity, Model, StepFlits, counted};
use serde::Serialize;

use super::fidelity::{Closeness, followed};
use super::option::{given, quantity};
use super::table::{self, size, time};
use super::written::{Json, escaped_csv, write};
use crate::Failure;

/// Predicts synchronisation.
#[derive(Args)]
pub(crate) struct Arguments {
    /// The model: a name (`polder plan show`), or the path of a file. Its gradients are of 4 bytes.
    #[arg(long, value_name = "MODEL", required_unless_present = "layers", conflicts_with = "layers")]
    model: Option<String>,
    /// Gradient bytes of each layer, the first one first, such as "125MB,24x50MB".
    #[arg(long, value_name = "SIZES", value_delimiter = ',')]
    layers: Vec<String>,
    /// Number of workers.
    #[arg(long, value_name = "COUNT", default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..=65536))]
    workers: u32,
    /// Time of a forward pass, such as "40 ms".
    #[arg(long, value_name = "TIME")]
    forward: String,
    /// Time of a backward pass.
    #[arg(long, value_name = "TIME")]
    backward: String,
    /// What an all-reduce among workers reaches: bytes of the gradients x 2(p-1)/p over seconds, such as "12 GB/s".
    #[arg(long, value_name = "BANDWIDTH", required_unless_present = "platform", conflicts_with = "platform")]
    worker_bandwidth: Option<String>,
    /// The machine whose accelerators the workers are, in place of --worker-bandwidth: they reduce all gradients as in
    /// `plan train`.
    #[arg(long, value_name = "PLATFORM")]
    platform: Option<String>,
    /// Kind of rack, if the platform has several [default: the first by name].
    #[arg(long, value_name = "NAME", requires = "platform")]
    rack: Option<String>,
    /// Number of proxies, each of which sums shards of its own [default: one for each worker].
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1024))]
    proxies: Option<u32>,
    /// What a proxy's device carries each way, both ways at once, for all workers [default: that of the workers].
    #[arg(long, value_name = "BANDWIDTH")]
    proxy_bandwidth: Option<String>,
    /// What a worker's link to the proxies carries each way, both ways at once [default: that of a proxy's device].
    #[arg(long, value_name = "BANDWIDTH")]
    link_bandwidth: Option<String>,
    /// What all workers together read of one memory device, for the central server [default: that of a link].
    #[arg(long, value_name = "BANDWIDTH")]
    device_read: Option<String>,
    /// What they write to it [default: that of a link].
    #[arg(long, value_name = "BANDWIDTH")]
    device_write: Option<String>,
    /// Time of each push, sum and pull of a shard, and of each all-reduce, besides its bytes.
    #[arg(long, value_name = "TIME", default_value = "10 us")]
    latency: String,
    /// Bytes of a shard.
    #[arg(long, value_name = "SIZE", default_value = "2 MiB")]
    shard: String,
    /// Which of the shards that wait goes first.
    #[arg(long, value_name = "ORDER", value_enum, default_value = "first-layers-first")]
    shards: OrderKind,
    #[command(flatten)]
    closeness: Closeness,
    #[command(flatten)]
    json: Json,
    /// Write the step by the part on the proxies as CSV.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    csv: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum OrderKind {
    FirstInFirstOut,
    FirstLayersFirst,
}

/// What is printed.
#[derive(Serialize)]
struct Report {
    kind: &'static str,
    layers: usize,
    gradient_bytes: u64,
    workers: u32,
    /// The machine of the workers, and how closely its fabric was looked at; none where bandwidths were given.
    platform: Option<String>,
    fidelity: Option<Fidelity>,
    /// What of the all-reduce was followed flit by flit.
    flits: Option<StepFlits>,
    worker_bytes_per_s: f64,
    forward_s: f64,
    backward_s: f64,
    all_reduce: SyncSeconds,
    overlapped: SyncSeconds,
    central: SyncSeconds,
    split_bytes: f64,
    service: SplitPoint,
    best: SplitPoint,
    sweep: Vec<SplitPoint>,
}

/// Points of the sweep beside that at 0.
const STEPS: u32 = 10;
fn seconds(option: &str, text: &str) -> Result<f64, Failure> {
    quantity(option, text).map(Time::value)
}

/// Layers as `--layers` has them: a size, or so many of a size.
fn layers(texts: &[String]) -> Result<Vec<u64>, Failure> {
    let mut layers = vec![];
    for text in texts {
        let (count, size) = match text.split_once('x') {
            Some((count, size)) if !count.is_empty() && count.bytes().all(|digit| digit.is_ascii_digit()) => {
                (count, size)
            }
            _ => ("1", text.as_str()),
        };
        let count = count.parse::<usize>().ok().filter(|count| (1..=MOST_LAYERS).contains(count));
        let count = count.ok_or_else(|| {
            Failure(format!(
                "--layers: expected 1 to {MOST_LAYERS} layers of a size, found \"{}\"",
                quoted(text)
            ))
        })?;
        let bytes: Bytes = quantity("--layers", size)?;
        if layers.len() + count > MOST_LAYERS {
            return Err(Failure(format!("--layers: expected {MOST_LAYERS} layers at most, in all")));
        }
        layers.extend(std::iter::repeat_n(bytes.value() as u64, count));
    }
    match layers.iter().any(|bytes| *bytes > 0) {
        true => Ok(layers),
        false => Err(Failure("--layers: expected 1 B of gradients or more".into())),
    }
}

impl Arguments {
    /// The step, and what of its all-reduce was followed flit by flit.
    fn job(&self) -> Result<(SyncJob, Option<StepFlits>), Failure> {
        let layers = match &self.model {
            None => layers(&self.layers)?,
            // Gradients have no tokens, which the file of a model need not have then.
            Some(name) => layers_of(&Model::load_with(name, Some(1))?),
        };
        let (worker, flits) = self.worker(layers.iter().sum())?;
        let proxy = given("--proxy-bandwidth", self.proxy_bandwidth.as_deref())?.unwrap_or(worker);
        let shard: Bytes = quantity("--shard", &self.shard)?;
        let job = SyncJob {
            layers,
            workers: self.workers,
            forward_s: seconds("--forward", &self.forward)?,
            backward_s: seconds("--backward", &self.backward)?,
            worker,
            proxies: Some(self.proxies.unwrap_or(self.workers)),
            proxy,
            link: given("--link-bandwidth", self.link_bandwidth.as_deref())?.unwrap_or(proxy),
            latency_s: seconds("--latency", &self.latency)?,
            shard_bytes: shard.value() as u64,
            order: match self.shards {
                OrderKind::FirstInFirstOut => ShardOrder::FirstInFirstOut,
                OrderKind::FirstLayersFirst => ShardOrder::FirstLayersFirst,
            },
        };
        let count = job.bytes() / job.shard_bytes.max(1);
        if count > MOST_SHARDS {
            let least = Bytes::new((job.bytes() / MOST_SHARDS) as f64);
            return Err(Failure(format!(
                "--shard: {} are {count} shards of {}, more than {MOST_SHARDS}; give {least} or more",
                Bytes::new(job.bytes() as f64),
                Bytes::new(job.shard_bytes as f64)
            )));
        }
        Ok((job, flits))
    }
}

impl Arguments {
    /// What an all-reduce of so many bytes reaches among workers, and what of it was followed flit by flit.
    fn worker(&self, bytes: u64) -> Result<(Bandwidth, Option<StepFlits>), Failure> {
        let given = self.worker_bandwidth.as_deref();
        if let Some(text) = given {
            let why =
                "plan sync is given bandwidths, no fabric is; give --platform in place of --worker-bandwidth";
            self.closeness.expect_closed(why)?;
            return Ok((quantity("--worker-bandwidth", text)?, None));
        }
        let fabric = StepFabric {
            platform: self.platform.clone().unwrap_or_default(),
            rack: self.rack.clone(),
            fidelity: self.closeness.level(),
            flits: self.closeness.flits()?,
        };
        let (seconds, flits) = fabric.all_reduce(self.workers, bytes)?;
        let workers = f64::from(self.workers);
        let sent = bytes as f64 * 2.0 * (workers - 1.0) / workers;
        Ok((Bandwidth::new(sent / seconds), flits))
    }
}

/// Prints a step with each way to synchronise.
pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let (job, flits) = arguments.job()?;
    let write_rate = given("--device-write", arguments.device_write.as_deref())?.unwrap_or(job.link);
    let read_rate = given("--device-read", arguments.device_read.as_deref())?.unwrap_or(job.link);
    let split_bytes = job.split_bytes();
    let report = Report {
        kind: "simulated",
        layers: job.layers.len(),
        gradient_bytes: job.bytes(),
        workers: job.workers,
        platform: arguments.platform.clone(),
        fidelity: arguments.platform.as_ref().map(|_| arguments.closeness.level()),
        flits,
        worker_bytes_per_s: job.worker.value(),
        forward_s: job.forward_s,
        backward_s: job.backward_s,
        all_reduce: job.all_reduce(),
        overlapped: job.overlapped(),
        central: job.central(write_rate, read_rate),
        split_bytes,
        service: job.service(split_bytes),
        best: job.best(),
        sweep: job.sweep(STEPS),
    };
    arguments.json.print(&report, || print(&report))?;
    if let Some(path) = &arguments.csv {
        let mut writer = ::csv::Writer::from_writer(vec![]);
        writer.write_record(["part", "proxied_bytes", "step_s", "blocked_s"])?;
        for SplitPoint { part, proxied_bytes, seconds } in &report.sweep {
            writer.serialize((part, proxied_bytes, seconds.step_s, seconds.blocked_s))?;
        }
        write(path, &escaped_csv(writer)?)?;
    }
    Ok(())
}

fn print(report: &Report) {
    println!(
        "a step of {} workers with {} of gradients in {}, simulated",
        report.workers,
        size(report.gradient_bytes as f64),
        counted(report.layers as u64, "layer")
    );
    if let Some((platform, fidelity)) = report.platform.as_ref().zip(report.fidelity) {
        println!(
            "an all-reduce among workers on {platform} reaches {}/s (--fidelity {}){}",
            size(report.worker_bytes_per_s),
            fidelity.name(),
            report.flits.map_or_else(String::new, |it| format!(": {}", followed(it)))
        );
    }
    let row = |name: &str, of: &SyncSeconds| {
        vec![
            name.to_owned(),
            time(of.step_s),
            if of.blocked_s > 0.0 { time(of.blocked_s) } else { "0".into() },
        ]
    };
    table::print(&[
        table::head("| step | blocked"),
        row("all-reduce after the backward pass", &report.all_reduce),
        row("all-reduce that overlaps it (DDP)", &report.overlapped),
        row("central server on one device", &report.central),
        row("parameter service, m by the formula", &report.service.seconds),
        row("parameter service, best m", &report.best.seconds),
    ]);
    println!(
        "on the proxies: {} by the formula (m = {}), {} at best\n",
        size(report.service.proxied_bytes as f64),
        size(report.split_bytes),
        size(report.best.proxied_bytes as f64)
    );
    let mut rows = vec![table::head("part on proxies | bytes | step | blocked")];
    for SplitPoint { part, proxied_bytes, seconds } in &report.sweep {
        let mut cells = vec![format!("{part:.1}"), size(*proxied_bytes as f64)];
        cells.extend(row("", seconds).into_iter().skip(1));
        rows.push(cells);
    }
    table::print(&rows);
}
