//! `polder plan train`: a step of a layout, or of the best of all layouts.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use polder_sim::{
    Answer, Execution, FarTier, Given, Layout, Margin, Model, Offload, OrderError, Overlap, Precision,
    Progress, Recompute, Request, RequestError, Shown, Step, Stretch, Work, Zero, timeline,
};
use serde_json::json;

use super::{grouped, table};
use crate::Failure;

/// What is trained, on what.
#[derive(Args)]
pub(crate) struct Subject {
    /// What is trained: a name (`polder plan list`), or the path of a file, or of a Hugging Face config.json or a model of
    /// Calculon.
    #[arg(long, value_name = "MODEL")]
    pub(super) model: String,
    /// An execution of Calculon, which gives the accelerators and the layout; what is given beside it counts in its place.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    layout: Option<String>,
    /// Sequences of a step; when left out, the power of two that makes 16 Mi tokens at most.
    #[arg(long, value_name = "SEQUENCES")]
    batch: Option<u32>,
    /// Tokens of a sequence, in place of the model's.
    #[arg(long, value_name = "TOKENS")]
    sequence: Option<u32>,
    /// Kind of rack, where the platform has several: a step is laid out over one kind. When left out, the first by name.
    #[arg(long, value_name = "NAME")]
    rack: Option<String>,
    /// Accelerators of each rack that are used; when left out, the most that fill all racks evenly.
    #[arg(long, value_name = "COUNT")]
    fill: Option<u32>,
    /// In which order ranks are counted, the closest first; when left out, tp-cp-ep-dp-pp.
    #[arg(long, value_name = "ORDER")]
    pub(super) order: Option<String>,
    #[command(flatten)]
    fixed: Fixed,
    /// Print one JSON object.
    #[arg(long)]
    pub(super) json: bool,
}

/// What of the layout is given; the rest is searched for.
#[derive(Args)]
struct Fixed {
    /// Tensor parallelism.
    #[arg(long, value_name = "RANKS")]
    tp: Option<u32>,
    /// Context parallelism.
    #[arg(long, value_name = "RANKS")]
    cp: Option<u32>,
    /// Expert parallelism, inside data parallelism.
    #[arg(long, value_name = "RANKS")]
    ep: Option<u32>,
    /// Pipeline stages.
    #[arg(long, value_name = "STAGES")]
    pp: Option<u32>,
    /// Data parallelism; checked against gpus / (tp cp pp).
    #[arg(long, value_name = "COPIES")]
    dp: Option<u32>,
    /// Parts of each stage.
    #[arg(long, value_name = "PARTS")]
    interleave: Option<u32>,
    /// Sequences at once.
    #[arg(long, value_name = "SEQUENCES")]
    micro_batch: Option<u32>,
    /// Share along the sequence what tensor parallelism does not share.
    #[arg(long, value_name = "BOOL")]
    sequence_parallel: Option<bool>,
    /// Keep what is gathered along the sequence, and do not gather it again in the backward pass.
    #[arg(long)]
    keep_gathered: bool,
    /// What is computed again in the backward pass.
    #[arg(long, value_name = "WHAT")]
    recompute: Option<Again>,
    /// What copies of the model share.
    #[arg(long, value_name = "WHAT")]
    zero: Option<Share>,
    /// Compute attention as separate products that keep their scores.
    #[arg(long)]
    no_flash: bool,
    /// What products with weights are computed in.
    #[arg(long, value_name = "TYPE")]
    precision: Option<Type>,
    /// Let nothing run beside computation.
    #[arg(long)]
    no_overlap: bool,
    /// Keep these outside the accelerators' memory; a search tries all, when none is given.
    #[arg(long, value_name = "WHAT", value_delimiter = ',')]
    offload: Vec<What>,
    /// Where that is kept.
    #[arg(long, value_name = "TIER", default_value = "host")]
    to: Tier,
}

#[derive(Clone, Copy, ValueEnum)]
enum Again {
    None,
    Selective,
    Full,
}

#[derive(Clone, Copy, ValueEnum)]
enum Share {
    None,
    Optimizer,
    Gradients,
    Weights,
}

#[derive(Clone, Copy, ValueEnum)]
enum Type {
    Bf16,
    Fp8,
    Fp32,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    Weights,
    Optimizer,
    Activations,
}

#[derive(Clone, Copy, ValueEnum)]
enum Tier {
    Host,
    Pool,
}

/// Predicts a training step.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    subject: Subject,
    /// Accelerators.
    #[arg(long, value_name = "COUNT", required_unless_present = "layout")]
    gpus: Option<u32>,
    /// The machine: a name (`polder plan list`), or the path of a file or of a system of Calculon.
    #[arg(long, value_name = "PLATFORM")]
    platform: String,
    /// Another platform, which the same layout is predicted on too.
    #[arg(long, value_name = "PLATFORM")]
    against: Option<String>,
    /// Write the step as it goes by on each stage, for Perfetto (ui.perfetto.dev) or chrome://tracing.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    trace: Option<PathBuf>,
    /// Write one page with the parts of the step, its memory and its timeline drawn.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    html: Option<PathBuf>,
}

impl Fixed {
    fn given(&self, batch: Option<u32>) -> Given {
        let offload = Offload {
            tier: match self.to {
                Tier::Host => FarTier::Host,
                Tier::Pool => FarTier::Pool,
            },
            weights: self.offload.contains(&What::Weights),
            optimizer: self.offload.contains(&What::Optimizer),
            activations: self.offload.contains(&What::Activations),
        };
        Given {
            tp: self.tp,
            cp: self.cp,
            ep: self.ep,
            dp: self.dp,
            pp: self.pp,
            interleave: self.interleave,
            batch,
            micro_batch: self.micro_batch,
            sequence_parallel: self.sequence_parallel,
            gather_again: self.keep_gathered.then_some(false),
            recompute: self.recompute.map(Into::into),
            zero: self.zero.map(Into::into),
            wide_gradients: None,
            flash: self.no_flash.then_some(false),
            precision: self.precision.map(Into::into),
            overlap: self.no_overlap.then(Overlap::default),
            offload: (!self.offload.is_empty()).then_some(offload),
            tiers: false,
        }
    }
}

impl From<Again> for Recompute {
    fn from(it: Again) -> Self {
        match it {
            Again::None => Self::None,
            Again::Selective => Self::Selective,
            Again::Full => Self::Full,
        }
    }
}

impl From<Type> for Precision {
    fn from(it: Type) -> Self {
        match it {
            Type::Bf16 => Self::Bf16,
            Type::Fp8 => Self::Fp8,
            Type::Fp32 => Self::Fp32,
        }
    }
}

impl From<Share> for Zero {
    fn from(it: Share) -> Self {
        match it {
            Share::None => Self::None,
            Share::Optimizer => Self::Optimizer,
            Share::Gradients => Self::Gradients,
            Share::Weights => Self::Weights,
        }
    }
}

impl Subject {
    /// Tokens of a sequence.
    pub(super) fn tokens(&self) -> Result<f64, Failure> {
        let own = || Model::load(&self.model).map(|model| model.sequence);
        Ok(f64::from(self.sequence.map_or_else(own, Ok)?))
    }

    pub(super) fn request(&self, platform: &str, accelerators: Option<u32>) -> Result<Request, Failure> {
        let file = self.layout.as_deref().map(Execution::load).transpose()?;
        let (of_file, fill, layout) =
            file.map_or_else(Default::default, |it| (it.accelerators, Some(it.fill), it.layout));
        let order = self.order.as_deref().map(str::parse).transpose();
        Ok(Request {
            model: self.model.clone(),
            platform: platform.into(),
            accelerators: accelerators.unwrap_or(of_file),
            rack: self.rack.clone(),
            fill: self.fill.or(fill),
            order: order.map_err(|error: OrderError| Failure(format!("--order: {error}")))?,
            against: None,
            sequence: self.sequence,
            layout: self.fixed.given(self.batch).or(layout),
        })
    }
}

/// Does what takes a while, with a bar.
pub(super) fn with_bar<T>(work: impl FnOnce(Progress<'_>) -> Result<T, RequestError>) -> Result<T, Failure> {
    let bar = ProgressBar::new(0);
    bar.set_style(ProgressStyle::with_template("searching {bar:40} {percent}%")?);
    let done = work(&|_, all| {
        bar.set_length(all as u64);
        bar.inc(1);
    });
    bar.finish_and_clear();
    Ok(done?)
}

/// Predicts a step.
pub(super) fn train(arguments: &Arguments) -> Result<(), Failure> {
    let subject = &arguments.subject;
    let request = Request {
        against: arguments.against.clone(),
        ..subject.request(&arguments.platform, arguments.gpus)?
    };
    let answer = with_bar(|progress| request.train(threads(None), progress))?;
    match subject.json {
        true => println!("{}", serde_json::to_string(&answer)?),
        false => print(subject, &answer)?,
    }
    if let Some(path) = &arguments.trace {
        write(path, &trace(&answer)?)?;
    }
    if let Some(path) = &arguments.html {
        write(path, &page(&answer)?)?;
    }
    match answer.fits {
        true => Ok(()),
        false => Err(Failure(does_not_fit(&answer.step, &answer.layout))),
    }
}

pub(super) fn write(path: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text)
        .map_err(|error| Failure(format!("{}: cannot write it: {error}", path.display())))
}

/// A page that needs nothing else: the figures stand in it, and are drawn by its script.
fn page(answer: &Answer) -> Result<String, Failure> {
    let Answer { layout, step, .. } = answer;
    let times = TIMES.iter().map(|(name, of)| (name.trim(), of(step)));
    let times = times.filter(|(_, seconds)| seconds.exposed_s + seconds.hidden_s > 0.0);
    let times: Vec<_> = times
        .map(|(name, seconds)| json!([name.trim_end_matches(", s"), seconds.exposed_s, seconds.hidden_s]))
        .collect();
    let memory = &step.memory;
    let bytes = [
        ("weights", memory.weights_bytes),
        ("gradients", memory.gradients_bytes),
        ("optimizer states", memory.optimizer_bytes),
        ("activations", memory.activations_bytes),
    ];
    let stretch = |it: &Stretch| {
        let kind = match it.work {
            Work::Forward { .. } => 0,
            Work::Backward { .. } => 1,
            Work::Optimizer => 2,
            Work::Data => 3,
            Work::Stragglers => 4,
            Work::Offload => 5,
        };
        json!([it.stage, kind, it.begin_s, it.seconds])
    };
    let data = json!({
        "about": layout_line(layout),
        "note": format!("Stages all keep the slowest one's pace. {}", answer.note.unwrap_or_default()),
        "total_s": step.total_s,
        "used_gb": memory.used_bytes / 1e9,
        "capacity_gb": memory.capacity_bytes / 1e9,
        "times": times,
        "bytes": bytes.map(|(name, bytes)| json!([name, bytes / 1e9, 0.0])),
        "stages": layout.pp,
        "timeline": timeline(layout, step).iter().map(stretch).collect::<Vec<_>>(),
    });
    let title = format!(
        "{} on {}, {} accelerators",
        answer.model,
        answer.platform,
        grouped(answer.accelerators.into())
    );
    // Names may be paths, and a path may hold anything.
    let plain = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;");
    let data = serde_json::to_string(&data)?.replace('<', "\\u003c");
    Ok(include_str!("page.html")
        .replace("@TITLE@", &plain(&title))
        .replace("@SURE@", &plain(&how_sure(answer)))
        .replace("@DATA@", &data))
}

/// A Chrome trace: a thread for each stage, times in microseconds.
fn trace(answer: &Answer) -> Result<String, Failure> {
    let stretch = |it: Stretch| {
        let (name, category, details) = match it.work {
            Work::Forward { micro_batch, part } => {
                (format!("forward {micro_batch}"), "forward", json!({ "part": part }))
            }
            Work::Backward { micro_batch, part } => {
                (format!("backward {micro_batch}"), "backward", json!({ "part": part }))
            }
            Work::Data => ("gradients and weights".into(), "data", json!({})),
            Work::Offload => ("offload".into(), "offload", json!({})),
            Work::Optimizer => ("optimizer".into(), "optimizer", json!({})),
            Work::Stragglers => ("stragglers".into(), "stragglers", json!({})),
        };
        let (ts, dur) = (it.begin_s * 1e6, it.seconds * 1e6);
        json!({"name": name, "cat": category, "ph": "X", "pid": 0, "tid": it.stage, "ts": ts, "dur": dur, "args": details})
    };
    let process = format!("{} on {}, simulated", answer.model, answer.platform);
    let names =
        std::iter::once(json!({"name": "process_name", "ph": "M", "pid": 0, "args": {"name": process}}));
    let stages = (0..answer.layout.pp)
        .map(|stage| json!({"name": "thread_name", "ph": "M", "pid": 0, "tid": stage, "args": {"name": format!("stage {stage}")}}));
    let events: Vec<_> =
        names.chain(stages).chain(timeline(&answer.layout, &answer.step).into_iter().map(stretch)).collect();
    Ok(serde_json::to_string(&json!({"displayTimeUnit": "ms", "traceEvents": events}))?)
}

pub(super) fn threads(asked: Option<usize>) -> usize {
    asked.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, Into::into)).max(1)
}

pub(super) fn does_not_fit(step: &Step, layout: &Layout) -> String {
    let memory = &step.memory;
    let (used, has) = (memory.used_bytes / 1e9, memory.capacity_bytes / 1e9);
    if memory.used_bytes > memory.capacity_bytes {
        let most = [
            ("weights", memory.weights_bytes, "more tp or pp, --zero weights, or --offload weights"),
            ("gradients", memory.gradients_bytes, "more tp or pp, or --zero gradients"),
            ("optimizer states", memory.optimizer_bytes, "--zero optimizer, or --offload optimizer"),
            (
                "activations",
                memory.activations_bytes,
                "--recompute full, a smaller micro-batch, more tp, or --offload activations",
            ),
        ];
        let (what, bytes, remedy) = most.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).expect("four kinds");
        let gigabytes = bytes / 1e9;
        return format!(
            "it does not fit: {used:.0} of {has:.0} GB, most of it {what} ({gigabytes:.0} GB); more accelerators, {remedy} would help"
        );
    }
    let tier = if layout.offload.tier == FarTier::Pool { "pool" } else { "host" };
    let (used, has) = (memory.far_bytes / 1e9, memory.far_capacity_bytes / 1e9);
    format!(
        "it does not fit: {used:.0} of {has:.0} GB an accelerator in the {tier}'s memory; offload less, or share more"
    )
}

/// How far the step may be off: what published steps took, and what comparisons were off by.
fn how_sure(answer: &Answer) -> String {
    let Margin { accelerator, least, most, rows, mean, worst } = &answer.margin;
    let whose = accelerator.as_ref().map_or_else(
        || "nothing was published of this accelerator; steps of others".into(),
        |name| format!("published steps of {name}"),
    );
    let range = |times: f64, digits: usize| match least == most {
        true => format!("{:.digits$}", least * times),
        false => format!("{:.digits$} to {:.digits$}", least * times, most * times),
    };
    format!(
        "how sure: {whose} took {} times what was predicted without them, and so much would make {} s of this one;\n  comparisons on one software were {:.1}% off on average, {:.1}% at worst ({rows:.0} judged)",
        range(1.0, 2),
        range(answer.step.total_s, 3),
        mean * 100.0,
        worst * 100.0
    )
}

fn print(subject: &Subject, answer: &Answer) -> Result<(), Failure> {
    let Answer { layout, step, fill, .. } = answer;
    let others: Vec<_> = answer.against.iter().collect();
    let title = Model::load(&subject.model)?.title;
    println!("{}: {title} on {} accelerators, simulated", answer.model, grouped(answer.accelerators.into()));
    println!("{}", layout_line(layout));
    let order: Vec<_> = answer.order.words().collect();
    println!("ranks are placed {}; {fill} accelerators of each rack are used", order.join(", "));
    if answer.points > 1 {
        let which = if answer.fits { "the fastest that fits" } else { "the nearest to fitting" };
        println!("{which} of {} layouts", grouped(answer.points));
    }
    let mut head = vec![String::new(), answer.platform.clone()];
    head.extend(others.iter().map(|it| it.platform.clone()));
    let mut rows = vec![head];
    let mut row = |name: &str, cell: &dyn Fn(&Answer) -> String| {
        let mut cells = vec![name.to_owned(), cell(answer)];
        cells.extend(others.iter().map(|it| cell(it)));
        rows.push(cells);
    };
    row("step, s", &|it| format!("{:.3}", it.step.total_s));
    row("TFLOP/s an accelerator, the model's", &|it| format!("{:.0}", it.rate() / 1e12));
    row("part of its peak", &|it| format!("{:.0}%", it.rate() / it.peak_flops * 100.0));
    for (name, of) in TIMES {
        let seconds = of(step);
        let seen = others
            .iter()
            .fold(seconds.exposed_s + seconds.hidden_s, |most, it| most.max(of(&it.step).exposed_s));
        if seen > 0.0 {
            row(name, &|it| cell(of(&it.step), it.step.total_s));
        }
    }
    for (name, of) in BYTES {
        if of(step) > 0.0 {
            row(name, &|it| format!("{:.1}", of(&it.step) / 1e9));
        }
    }
    table::print(&rows);
    if let [other] = others[..] {
        let ratio = step.total_s / other.step.total_s;
        println!("{} takes {ratio:.3} times as long as {}", answer.platform, other.platform);
        if other.fill != *fill {
            println!("on {}, {} accelerators of each rack are used", other.platform, other.fill);
        }
        if !other.fits {
            println!("on {} {}", other.platform, does_not_fit(&other.step, layout));
        }
    }
    if let Some(note) = answer.note {
        println!("{note}");
    }
    println!("{}", how_sure(answer));
    for other in others.iter().filter(|it| it.margin != answer.margin) {
        println!("on {}: {}", other.platform, how_sure(other));
    }
    println!("`polder plan validate` prints these published steps beside what is predicted of them");
    Ok(())
}

/// A line of the table: its name, and what of a step stands there.
type Line<T> = (&'static str, fn(&Step) -> T);

/// What a step's time is made of.
const TIMES: [Line<Shown>; 17] = [
    ("  forward, s", |step| held(step.compute.forward_s)),
    ("  backward", |step| held(step.compute.backward_s)),
    ("  computed again", |step| held(step.compute.recompute_s)),
    ("  optimizer", |step| held(step.compute.optimizer_s)),
    ("  tensor, inside racks", |step| step.communication.tensor.inside),
    ("  tensor, between racks", |step| step.communication.tensor.between),
    ("  context, inside racks", |step| step.communication.context.inside),
    ("  context, between racks", |step| step.communication.context.between),
    ("  expert, inside racks", |step| step.communication.expert.inside),
    ("  expert, between racks", |step| step.communication.expert.between),
    ("  pipeline, inside racks", |step| step.communication.pipeline.inside),
    ("  pipeline, between racks", |step| step.communication.pipeline.between),
    ("  data, inside racks", |step| step.communication.data.inside),
    ("  data, between racks", |step| step.communication.data.between),
    ("  bubble", |step| held(step.bubble_s)),
    ("  offload", |step| step.offload),
    ("  stragglers", |step| held(step.straggle_s)),
];

const BYTES: [Line<f64>; 8] = [
    ("memory, GB", |step| step.memory.used_bytes),
    ("  of", |step| step.memory.capacity_bytes),
    ("  weights", |step| step.memory.weights_bytes),
    ("  gradients", |step| step.memory.gradients_bytes),
    ("  optimizer states", |step| step.memory.optimizer_bytes),
    ("  activations", |step| step.memory.activations_bytes),
    ("elsewhere, GB an accelerator", |step| step.memory.far_bytes),
    ("  of", |step| if step.memory.far_bytes > 0.0 { step.memory.far_capacity_bytes } else { 0.0 }),
];

const fn held(exposed_s: f64) -> Shown {
    Shown { exposed_s, hidden_s: 0.0 }
}

fn cell(seconds: Shown, total: f64) -> String {
    let Shown { exposed_s, hidden_s } = seconds;
    let hidden = if hidden_s > 0.0 { format!(" (+{hidden_s:.3} hidden)") } else { String::new() };
    format!("{exposed_s:.3}{hidden} {:>3.0}%", exposed_s / total * 100.0)
}

pub(super) fn layout_line(layout: &Layout) -> String {
    let Layout { tp, cp, ep, dp, pp, interleave, batch, micro_batch, .. } = layout;
    let mut line = format!(
        "layout: tp {tp}, cp {cp}, ep {ep}, dp {dp}, pp {pp} in {interleave} parts each; batch {batch}, micro-batch {micro_batch}"
    );
    let recompute = match layout.recompute {
        Recompute::None => "nothing computed again",
        Recompute::Selective => "scores computed again",
        Recompute::Full => "all computed again",
    };
    let zero = match layout.zero {
        Zero::None => "nothing shared among copies",
        Zero::Optimizer => "optimizer states shared among copies",
        Zero::Gradients => "optimizer states and gradients shared among copies",
        Zero::Weights => "optimizer states, gradients and weights shared among copies",
    };
    let sequence = match (layout.sequence_parallel, layout.gather_again) {
        (false, _) => "",
        (true, true) => "sequence parallel, ",
        (true, false) => "sequence parallel with what is gathered kept, ",
    };
    line += &format!("; {sequence}{recompute}, {zero}");
    line
}
