//! `polder plan offload`: where the tensors of an offloaded training step lie under several policies, and what each takes.

use clap::Args;
use polder_platform::{Platform, quoted};
use polder_sim::offload::{GpuUse, Optimizer, Pinned, Placed, PlacingPolicy, Planner, Point, Settings};
use polder_sim::{Model, accelerators, grouped};
use serde::Serialize;
use serde_json::json;

use super::fidelity::ClosedForm;
use super::option::{Machine, accelerator_count, choice, given};
use super::page::filled;
use super::table::{self, size};
use super::written::{Outputs, escaped_csv};
use crate::Failure;

/// Predicts offloaded steps.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    fidelity: ClosedForm,
    /// The model: a name (`polder plan show`), or a path: a file of Polder, a Hugging Face config.json, or a model of
    /// Calculon.
    #[arg(long, value_name = "MODEL")]
    model: String,
    #[command(flatten)]
    machine: Machine,
    /// GPUs of the host, each with its own batch.
    #[arg(long, value_name = "COUNT", default_value = "1", allow_negative_numbers = true)]
    gpus: String,
    /// Tokens of a sequence, such as 4096,32768 [default: the model's].
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', allow_negative_numbers = true)]
    context: Vec<String>,
    /// Sequences of each GPU, such as 1,32.
    #[arg(
        long,
        value_name = "SEQUENCES",
        value_delimiter = ',',
        default_value = "1",
        allow_negative_numbers = true
    )]
    batch: Vec<String>,
    /// Where tensors lie: dram, interleave, paper, optimal, or a JSON file of fractions; several side by side.
    #[arg(
        long,
        value_name = "POLICY",
        value_delimiter = ',',
        default_value = "dram,interleave,paper,optimal",
        value_hint = clap::ValueHint::FilePath
    )]
    policy: Vec<String>,
    #[command(flatten)]
    training: Training,
    #[command(flatten)]
    memory: Memory,
    #[command(flatten)]
    pub(super) outputs: Outputs,
}

/// How it is trained.
#[derive(Args)]
struct Training {
    /// How parameters are updated.
    #[arg(long, value_name = "WHICH", value_parser = choice::<Optimizer>(["adam", "lion"]), default_value = "adam")]
    optimizer: Optimizer,
    /// Train LoRA's matrices of this rank beside each matrix of a block, and nothing else.
    #[arg(long, value_name = "RANK", allow_negative_numbers = true)]
    lora: Option<String>,
    /// Keep all activations in the GPU's memory, and offload none.
    #[arg(long)]
    no_checkpointing: bool,
    /// Compute attention as separate products, not fused (FlashAttention).
    #[arg(long)]
    no_flash: bool,
    /// Compute the loss of all tokens at once, not in chunks (Liger Kernel).
    #[arg(long)]
    no_liger: bool,
}

/// What memory there is, and what takes of it besides tensors.
#[derive(Args)]
struct Memory {
    /// How much of the host's own memory the step may take, such as "128 GiB" [default: all of it].
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    dram: Option<String>,
    /// Cards of each kind behind the host [default: as many as it has].
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true)]
    cards: Option<String>,
    /// Size of pinned allocations: as asked for, or the next power of two, as torch has it by default.
    #[arg(long, value_name = "HOW", value_parser = choice::<Pinned>(["exact", "powers-of-two"]), default_value = "exact")]
    pinned: Pinned,
    /// Double buffers of the framework in host memory, such as "4 GiB" [default: none].
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    buffers: Option<String>,
    /// What else the framework takes of host memory, such as "30 GiB" [default: nothing].
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    overhead: Option<String>,
}

/// What is printed as JSON.
#[derive(Serialize)]
struct Report<'a> {
    kind: &'static str,
    model: &'a str,
    platform: &'a str,
    gpus: u32,
    optimizer: Optimizer,
    lora: Option<u32>,
    checkpointing: bool,
    flash: bool,
    liger: bool,
    pinned: Pinned,
    link_bytes_per_s: f64,
    tiers: Vec<TierRow>,
    note: Option<String>,
    points: Vec<Point>,
}

/// A tier, with its rates in bytes a second.
#[derive(Serialize)]
struct TierRow {
    name: String,
    capacity_bytes: f64,
    step_read: f64,
    step_write: f64,
    copied_out: f64,
    copied_in: f64,
}

/// A whole number from 1 on.
fn count(option: &str, text: &str) -> Result<u32, Failure> {
    text.parse().ok().filter(|count| *count > 0).ok_or_else(|| {
        Failure(format!("{option}: expected a whole number from 1 on, found \"{}\"", quoted(text)))
    })
}

impl Arguments {
    fn settings(&self) -> Result<Settings, Failure> {
        let (training, memory) = (&self.training, &self.memory);
        let cards = memory.cards.as_deref().map(|text| {
            let expected =
                || Failure(format!("--cards: expected a whole number of cards, found \"{}\"", quoted(text)));
            text.parse().map_err(|_| expected())
        });
        Ok(Settings {
            gpus: accelerator_count(&self.gpus)?,
            rack: self.machine.rack.clone(),
            dram: given("--dram", memory.dram.as_deref())?,
            cards: cards.transpose()?,
            optimizer: training.optimizer,
            lora: training.lora.as_deref().map(|text| count("--lora", text)).transpose()?,
            checkpointing: !training.no_checkpointing,
            flash: !training.no_flash,
            liger: !training.no_liger,
            pinned: memory.pinned,
            buffers: given("--buffers", memory.buffers.as_deref())?,
            overhead: given("--overhead", memory.overhead.as_deref())?,
        })
    }

    /// The model at each context.
    fn models(&self) -> Result<Vec<Model>, Failure> {
        if self.context.is_empty() {
            return Ok(vec![Model::load(&self.model)?]);
        }
        let at = |text: &String| Ok(Model::load_with(&self.model, Some(count("--context", text)?))?);
        self.context.iter().map(at).collect()
    }
}

/// Prints offloaded steps.
pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    arguments.fidelity.check(
        "offload",
        "an offloaded step is of one host; plan train --fidelity L1 has steps on fabrics",
    )?;
    let platform = Platform::load(&arguments.machine.platform)?;
    let settings = arguments.settings()?;
    let planner = Planner::new(&platform, &arguments.machine.platform, settings.clone())?;
    let policies =
        arguments.policy.iter().map(|name| PlacingPolicy::parse(name)).collect::<Result<Vec<_>, _>>()?;
    let batches =
        arguments.batch.iter().map(|text| count("--batch", text)).collect::<Result<Vec<_>, Failure>>()?;
    let models = arguments.models()?;
    let mut points = vec![];
    for model in &models {
        for batch in &batches {
            points.push(planner.point(model, *batch, &policies)?);
        }
    }
    let tiers = planner.tiers().iter().map(|tier| {
        let device = tier.device.unwrap_or(tier.cpu);
        TierRow {
            name: tier.name.clone(),
            capacity_bytes: tier.capacity.value(),
            step_read: tier.cpu.read.value(),
            step_write: tier.cpu.write.value(),
            copied_out: device.read.value(),
            copied_in: device.write.value(),
        }
    });
    let report = Report {
        kind: "simulated",
        model: &arguments.model,
        platform: &arguments.machine.platform,
        gpus: settings.gpus,
        optimizer: settings.optimizer,
        lora: settings.lora,
        checkpointing: settings.checkpointing,
        flash: settings.flash,
        liger: settings.liger,
        pinned: settings.pinned,
        link_bytes_per_s: planner.link().value(),
        tiers: tiers.collect(),
        note: planner.conflict(),
        points,
    };
    let title = &models[0].title;
    let fits = expect_fit(&report.points);
    let words = || {
        if fits.is_ok() {
            print(title, &report);
        }
    };
    arguments.outputs.json.print(&report, words)?;
    fits?;
    arguments.outputs.table(|| csv(&report))?;
    arguments.outputs.page(|| page(title, &report))
}

/// Whether any policy fits at any point.
fn expect_fit(points: &[Point]) -> Result<(), Failure> {
    let mut all = points.iter().flat_map(|point| point.policies.iter().map(move |it| (point, it)));
    let Some((point, first)) = all.next() else { return Ok(()) };
    if first.fits || all.any(|(_, it)| it.fits) {
        return Ok(());
    }
    let Point { context, batch, .. } = point;
    let at = format!("context {context} and batch {batch} under policy {}", first.policy);
    Err(Failure(format!("it does not fit: {at}: {}", misfit_reason(first))))
}

/// What does not fit, and what would.
fn misfit_reason(placed: &Placed) -> String {
    let lacks = placed.lacks.as_deref().unwrap_or_default();
    match &placed.would_fit {
        Some(change) => format!("{lacks}; {change} would fit"),
        None => format!("{lacks}; no other policy, card, batch or context fits either"),
    }
}

fn gigabytes(bytes: f64) -> String {
    if bytes == 0.0 { "0".into() } else { format!("{:.1}", bytes / 1e9) }
}

fn print(title: &str, report: &Report) {
    println!("{title} on {} of {}, simulated", accelerators(report.gpus), report.platform);
    table::print(&tier_rows(report));
    if let Some(note) = &report.note {
        println!("{note}");
    }
    for point in &report.points {
        print_point(point, &report.tiers);
    }
    println!(
        "\na phase lasts as long as its slowest link, or its computation; none of the three runs beside another"
    );
    println!(
        "published throughputs are about 3 points off: policies that are closer than that count as equal"
    );
    println!(
        "in a clone, `make reproduce NAME=cxl-fig9` and `NAME=cxl-fig10` put published throughputs beside what is predicted of them"
    );
}

/// Capacity and rates of each tier.
fn tier_rows(report: &Report) -> Vec<Vec<String>> {
    let mut rows = vec![table::head("| GB | STEP reads GB/s | writes | copies out GB/s | in")];
    for tier in &report.tiers {
        let rates = [tier.step_read, tier.step_write, tier.copied_out, tier.copied_in];
        let cells = rates.iter().map(|rate| format!("{:.1}", rate / 1e9));
        rows.push([tier.name.clone(), gigabytes(tier.capacity_bytes)].into_iter().chain(cells).collect());
    }
    let link = format!("{:.1}", report.link_bytes_per_s / 1e9);
    rows.push(["link of a GPU", "", "", "", &link, &link].map(String::from).to_vec());
    rows
}

fn print_point(point: &Point, tiers: &[TierRow]) {
    let [context, batch] = [point.context, point.batch].map(|number| grouped(number.into()));
    println!("\ncontext {context}, batch {batch}: {} tokens a step", grouped(point.tokens as u64));
    let mut rows = vec![vec![String::new()]];
    rows[0].extend(point.policies.iter().map(|placed| placed.policy.clone()));
    let mut row = |name: String, cell: &dyn Fn(&Placed) -> Option<String>| {
        let cells = point.policies.iter().map(|placed| cell(placed).unwrap_or_default());
        rows.push(std::iter::once(name).chain(cells).collect());
    };
    for (index, name) in ["FWD", "BWD", "STEP"].into_iter().enumerate() {
        row(format!("{name}, s"), &|placed| match placed.phases.get(index) {
            Some(phase) => Some(format!("{:.2}", phase.seconds)),
            None => (index == 0).then(|| "does not fit".into()),
        });
    }
    row("all, s".into(), &|placed| placed.step_s.map(|seconds| format!("{seconds:.2}")));
    row("tokens a second".into(), &|placed| placed.tokens_per_s.map(|rate| grouped(rate as u64)));
    let dram = point.dram_only_s;
    row("of DRAM alone".into(), &|placed| {
        placed.step_s.map(|seconds| format!("{:.1}%", dram / seconds * 100.0))
    });
    let names: Vec<_> = tiers.iter().map(|tier| tier.name.as_str()).collect();
    row(format!("GB in {}", names.join(" + ")), &|_| None);
    for (index, object) in point.objects.iter().enumerate() {
        row(format!("  {}, {}", object.name, gigabytes(object.bytes)), &|placed| {
            let bytes = placed.bytes.get(index)?;
            Some(bytes.iter().map(|part| gigabytes(*part)).collect::<Vec<_>>().join(" + "))
        });
    }
    row(format!("  all, {}", gigabytes(point.bytes)), &|placed| {
        let all = (0..tiers.len()).map(|tier| placed.bytes.iter().map(|row| row[tier]).sum::<f64>());
        placed.fits.then(|| all.map(gigabytes).collect::<Vec<_>>().join(" + "))
    });
    table::print(&rows);
    println!("{}", gpu_line(&point.gpu));
    for placed in point.policies.iter().filter(|placed| !placed.fits) {
        println!("{} does not fit: {}", placed.policy, misfit_reason(placed));
    }
}

/// What lies in a GPU's memory.
fn gpu_line(gpu: &GpuUse) -> String {
    let rows = gpu.rows.iter().filter(|(_, bytes)| *bytes > 0.0);
    let rows: Vec<_> = rows.map(|(name, bytes)| format!("{name} {}", gigabytes(*bytes))).collect();
    let [used, has] = [gpu.used_bytes, gpu.capacity_bytes].map(gigabytes);
    format!("a GPU holds {used} of {has} GB: {}", rows.join(", "))
}

/// A line for each context, batch and policy; empty where it does not fit.
fn csv(report: &Report) -> Result<String, Failure> {
    let mut writer = ::csv::Writer::from_writer(vec![]);
    let key = |text: &str| text.replace(' ', "_");
    let Some(first) = report.points.first() else { return Ok(String::new()) };
    let objects = first.objects.iter().flat_map(|object| {
        report.tiers.iter().map(move |tier| format!("{}_{}_bytes", key(&object.name), key(&tier.name)))
    });
    let names = [
        "context",
        "batch",
        "tokens",
        "policy",
        "kind",
        "fits",
        "fwd_s",
        "bwd_s",
        "step_s",
        "total_s",
        "tokens_per_s",
        "dram_only_s",
        "gpu_bytes",
        "bytes",
    ];
    writer.write_record(names.map(String::from).into_iter().chain(objects.clone()))?;
    let cells = objects.count();
    for point in &report.points {
        for policy in &point.policies {
            let number = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
            let phase = |index: usize| number(policy.phases.get(index).map(|phase| phase.seconds));
            let own = [
                point.context.to_string(),
                point.batch.to_string(),
                point.tokens.to_string(),
                policy.policy.clone(),
                report.kind.to_owned(),
                policy.fits.to_string(),
                phase(0),
                phase(1),
                phase(2),
                number(policy.step_s),
                number(policy.tokens_per_s),
                point.dram_only_s.to_string(),
                point.gpu.used_bytes.to_string(),
                point.bytes.to_string(),
            ];
            let bytes: Vec<_> = policy.bytes.iter().flatten().map(f64::to_string).collect();
            let empty = vec![String::new(); cells - bytes.len()];
            writer.write_record(own.into_iter().chain(bytes).chain(empty))?;
        }
    }
    escaped_csv(writer)
}

/// One page that needs nothing else.
fn page(model: &str, report: &Report) -> Result<String, Failure> {
    let title = format!("{model} on {} of {}", accelerators(report.gpus), report.platform);
    let lines: Vec<_> = report.points.iter().map(|point| gpu_line(&point.gpu)).collect();
    let tiers: Vec<_> =
        report.tiers.iter().map(|it| format!("{} {}", it.name, size(it.capacity_bytes))).collect();
    let data = json!({ "report": report, "gpu": lines, "about": tiers.join(", ") });
    filled(include_str!("offload.html"), &title, &data)
}
