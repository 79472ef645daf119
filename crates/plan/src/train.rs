//! `polder plan train`: a step of a layout, or of the best of all layouts.

mod mixed;
mod page;
mod trace;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use polder_platform::TierId;
use polder_sim::contention::FlitOptions;
use polder_sim::{
    Answer, Execution, Exposure, FabricRates, Fidelity, GivenLayout, Layout, Margin, Model, Offload,
    OrderError, Overlap, Pooled, Precision, Progress, Recompute, Request, Space, Stage, Step, StepFigure,
    TierUse, Tiers, Zero, accelerators, alternatives, counted, grouped, listed,
};

use super::fidelity::{Closeness, followed};
use super::option::{accelerator_count, choice, expect_names, failed_links};
use super::table;
use super::table::{decimals, print_wrapped, span, three};
use super::written::{Json, write};
use crate::Failure;

/// What is trained, on what.
#[derive(Args)]
pub(crate) struct Subject {
    /// The model: a name (`polder plan show`), or a path: a file of Polder, a Hugging Face config.json, or a model of
    /// Calculon.
    #[arg(long, value_name = "MODEL")]
    pub(super) model: String,
    /// An execution of Calculon, which gives accelerators and layout. Other options replace its values.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    layout: Option<String>,
    /// Sequences of a step [default: the largest power of two with at most 16 Mi tokens, and 32 Ki an accelerator].
    #[arg(long, value_name = "SEQUENCES")]
    batch: Option<u32>,
    /// Tokens of a sequence [default: the model's].
    #[arg(long, value_name = "TOKENS")]
    pub(super) sequence: Option<u32>,
    /// Kind of rack, if the platform has several [default: the first by name]. A step uses one kind.
    #[arg(long, value_name = "NAME")]
    rack: Option<String>,
    /// Accelerators used of each rack [default: the most that fill all racks evenly].
    #[arg(long, value_name = "COUNT")]
    fill: Option<u32>,
    /// Order in which ranks are placed, the closest first [default: tp-cp-ep-dp-pp].
    #[arg(long, value_name = "ORDER")]
    pub(super) order: Option<String>,
    #[command(flatten)]
    fixed: Fixed,
}

/// What of the layout is given; the rest is searched for.
#[derive(Args)]
struct Fixed {
    /// Ranks that share each matrix (tensor parallelism).
    #[arg(long, value_name = "RANKS")]
    tp: Option<u32>,
    /// Ranks that share a sequence (context parallelism).
    #[arg(long, value_name = "RANKS")]
    cp: Option<u32>,
    /// Ranks that share the experts (expert parallelism); part of the copies of --dp.
    #[arg(long, value_name = "RANKS")]
    ep: Option<u32>,
    /// Pipeline stages.
    #[arg(long, value_name = "STAGES")]
    pp: Option<u32>,
    /// Copies of the model (data parallelism); must be gpus / (tp cp pp).
    #[arg(long, value_name = "COPIES")]
    dp: Option<u32>,
    /// Parts of each stage (interleaved schedule).
    #[arg(long, value_name = "PARTS")]
    interleave: Option<u32>,
    /// Sequences of a micro-batch.
    #[arg(long, value_name = "SEQUENCES")]
    micro_batch: Option<u32>,
    /// Split norms and residuals along the sequence among the ranks of --tp.
    #[arg(long, value_name = "BOOL")]
    sequence_parallel: Option<bool>,
    /// Keep what sequence parallelism gathers, instead of gathering it again in the backward pass. Only layouts with
    /// sequence parallelism are tried then.
    #[arg(long)]
    keep_gathered: bool,
    /// What the backward pass computes again, to save memory.
    #[arg(long, value_name = "WHAT", value_parser = choice::<Recompute>(["none", "selective", "full", "needed", "operators"]))]
    recompute: Option<Recompute>,
    /// What the copies of the model share, to save memory (ZeRO).
    #[arg(long, value_name = "WHAT", value_parser = choice::<Zero>(["none", "optimizer", "gradients", "weights"]))]
    zero: Option<Zero>,
    /// Compute attention as separate products, not fused.
    #[arg(long)]
    no_flash: bool,
    /// Number type of products with weights.
    #[arg(long, value_name = "TYPE", value_parser = choice::<Precision>(["bf16", "fp8", "fp32"]))]
    precision: Option<Precision>,
    /// Add gradients up in 32 bits [default: true].
    #[arg(long, value_name = "BOOL")]
    wide_gradients: Option<bool>,
    /// Communication that runs beside computation [default: all but expert, which needs a schedule with two micro-batches at
    /// a time].
    #[arg(long, value_name = "WHAT", value_delimiter = ',', conflicts_with = "no_overlap")]
    overlap: Option<Vec<OverlapKind>>,
    /// Communication that does not run beside computation; without a value, none does.
    #[arg(long, value_name = "WHAT", value_delimiter = ',', num_args = 0..)]
    no_overlap: Option<Vec<OverlapKind>>,
    /// Tensors to keep outside the accelerators' memory, or `none`. If it is left out, `search` tries all; `train` tries
    /// them only if nothing fits otherwise.
    #[arg(long, value_name = "WHAT", value_delimiter = ',')]
    offload: Vec<OffloadKind>,
    /// Where --offload keeps them: host, pool, or a tier of the host such as cxl [default: host; every place if --offload is
    /// left out too].
    #[arg(long, value_name = "TIER")]
    to: Option<TierId>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OverlapKind {
    None,
    Tensor,
    Context,
    Expert,
    Pipeline,
    Data,
    Offload,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OffloadKind {
    None,
    Weights,
    Optimizer,
    Activations,
}

/// Predicts a training step.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    subject: Subject,
    #[command(flatten)]
    json: Json,
    /// Number of accelerators; one for each `--platform`.
    #[arg(long, value_name = "COUNT", required_unless_present = "layout", allow_negative_numbers = true)]
    gpus: Option<String>,
    /// The machine: a name (`polder plan show`), or the path of a file or of a system of Calculon. A second one has the other of two
    /// kinds of rack, such as NVLink and UALink, that one fabric joins: then `--rack` and `--gpus` have two values each, with a comma
    /// between them.
    #[arg(long, value_name = "PLATFORM", value_delimiter = ',', required = true)]
    platform: Vec<String>,
    /// Predict the same layout on this platform too, in a second column; on a kind of rack with `:RACK` behind it.
    #[arg(long, value_name = "PLATFORM")]
    against: Option<String>,
    #[command(flatten)]
    closeness: Closeness,
    /// Links between two switches of the fabric between racks that have failed, such as "3-520,4-520" (with `--fidelity L1` or `L2`):
    /// transfers take the shortest ways that are left. The platform of `--against` has all of its links.
    #[arg(long, value_name = "SWITCH-SWITCH", value_delimiter = ',')]
    failed: Vec<String>,
    /// Write a timeline of each stage, for Perfetto (ui.perfetto.dev) or chrome://tracing.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub(super) trace: Option<PathBuf>,
    /// Write an HTML page that draws the parts of the step, its memory and its timeline.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub(super) html: Option<PathBuf>,
}

impl Arguments {
    fn request(&self, platform: &str, accelerators: Option<u32>) -> Result<Request, Failure> {
        Ok(Request {
            against: self.against.clone(),
            fidelity: self.closeness.level(),
            flits: self.closeness.flits()?,
            failed: failed_links(&self.failed)?,
            ..self.subject.request(platform, accelerators, Tiers::IfNeeded)?
        })
    }
}

impl Fixed {
    fn given(&self, batch: Option<u32>) -> GivenLayout {
        let offload = Offload {
            tier: self.to.unwrap_or_default(),
            weights: self.offload.contains(&OffloadKind::Weights),
            optimizer: self.offload.contains(&OffloadKind::Optimizer),
            activations: self.offload.contains(&OffloadKind::Activations),
        };
        GivenLayout {
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
            recompute: self.recompute,
            zero: self.zero,
            wide_gradients: self.wide_gradients,
            flash: self.no_flash.then_some(false),
            precision: self.precision,
            overlap: self.overlap(),
            offload: (!self.offload.is_empty()).then_some(offload),
            tiers: Tiers::default(),
        }
    }

    /// That a list does not say that there is none, and what there is.
    fn expect_none_alone(&self) -> Result<(), Failure> {
        fn is_both<T: PartialEq>(kinds: &[T], none: &T) -> bool {
            kinds.contains(none) && kinds.iter().any(|kind| kind != none)
        }
        let overlaps = |kinds: &Option<Vec<_>>| is_both(kinds.as_deref().unwrap_or(&[]), &OverlapKind::None);
        let option = [
            ("--offload", is_both(&self.offload, &OffloadKind::None)),
            ("--overlap", overlaps(&self.overlap)),
            ("--no-overlap", overlaps(&self.no_overlap)),
        ];
        match option.into_iter().find(|(_, is_both)| *is_both) {
            Some((option, _)) => {
                Err(Failure(format!("{option}: expected none alone, found something beside it")))
            }
            None => Ok(()),
        }
    }

    fn overlap(&self) -> Option<Overlap> {
        let only = |has: &dyn Fn(OverlapKind) -> bool| Overlap {
            tensor: has(OverlapKind::Tensor),
            context: has(OverlapKind::Context),
            expert: has(OverlapKind::Expert),
            pipeline: has(OverlapKind::Pipeline),
            data: has(OverlapKind::Data),
            offload: has(OverlapKind::Offload),
        };
        match (&self.overlap, &self.no_overlap) {
            (Some(these), _) => Some(only(&|kind| these.contains(&kind))),
            (None, Some(none)) if none.is_empty() => Some(Overlap::NONE),
            (None, Some(these)) => Some(only(&|kind| kind != OverlapKind::Expert && !these.contains(&kind))),
            (None, None) => None,
        }
    }
}

impl Subject {
    /// The model, with the sequence that is given.
    pub(super) fn loaded(&self) -> Result<Model, Failure> {
        Ok(Model::load_with(&self.model, self.sequence)?)
    }

    /// What is asked; what is kept elsewhere is tried in `tiers` when it is not given.
    pub(super) fn request(
        &self,
        platform: &str,
        accelerators: Option<u32>,
        tiers: Tiers,
    ) -> Result<Request, Failure> {
        let order = self.order.as_deref().map(str::parse).transpose();
        let mut request = Request {
            model: self.model.clone(),
            platform: platform.into(),
            accelerators: accelerators.unwrap_or(0),
            rack: self.rack.clone(),
            fill: self.fill,
            order: order.map_err(|error: OrderError| Failure(format!("--order: {error}")))?,
            against: None,
            sequence: self.sequence,
            fidelity: Fidelity::default(),
            flits: FlitOptions::default(),
            failed: vec![],
            layout: self.fixed.given(self.batch),
        };
        if let Some(file) = &self.layout {
            request = request.or(&Execution::load(file)?);
        }
        let layout = &mut request.layout;
        layout.tiers = tiers;
        self.fixed.expect_none_alone()?;
        if self.fixed.keep_gathered {
            let nothing = |given: &str, remedy: &str| {
                Err(Failure(format!("--keep-gathered: nothing is gathered with {given}; give {remedy}")))
            };
            match (layout.sequence_parallel, layout.tp) {
                (Some(false), _) => return nothing("--sequence-parallel false", "--sequence-parallel true"),
                (_, Some(1)) => return nothing("--tp 1", "--tp 2 or more"),
                _ => layout.sequence_parallel = Some(true),
            }
        }
        if let Some(to) = self.fixed.to {
            match (&mut layout.offload, tiers) {
                (Some(offload), _) if offload.is_any() => offload.tier = to,
                (None, Tiers::All) => layout.tiers = Tiers::One(to),
                _ => {
                    let remedy = "give --offload weights, optimizer or activations too";
                    return Err(Failure(format!("--to {to}: nothing is offloaded; {remedy}")));
                }
            }
        }
        Ok(request)
    }
}

/// Does what takes a while, with a bar.
pub(super) fn with_progress_bar<T, E>(work: impl FnOnce(Progress<'_>) -> Result<T, E>) -> Result<T, E> {
    let bar = ProgressBar::new(0);
    let style = ProgressStyle::with_template("searching {bar:40} {percent}%");
    bar.set_style(style.expect("the template is right"));
    let done = work(&|_, all| {
        bar.set_length(all as u64);
        bar.inc(1);
    });
    bar.finish_and_clear();
    done
}

/// Predicts a step.
pub(super) fn train(arguments: &Arguments) -> Result<(), Failure> {
    let subject = &arguments.subject;
    expect_names("--platform", &arguments.platform)?;
    let [platform] = &arguments.platform[..] else { return mixed::train(arguments) };
    let gpus = arguments.gpus.as_deref().map(accelerator_count).transpose()?;
    let request = arguments.request(platform, gpus)?;
    let answer = with_progress_bar(|progress| request.train(threads(None), progress))?;
    expect_drawn(arguments, &answer.layout)?;
    if arguments.json.json {
        println!("{}", serde_json::to_string(&answer)?);
    }
    if !answer.fits {
        return Err(Failure(none_fits(answer.points, &answer.layout, &answer.step, &answer.would_fit)));
    }
    if !arguments.json.json {
        print(subject, &answer)?;
    }
    if let Some(left_out) = &answer.left_out {
        eprintln!("polder: left out {left_out}");
    }
    if let Some(path) = &arguments.trace {
        write(path, &trace::trace(&answer)?)?;
    }
    if let Some(path) = &arguments.html {
        write(path, &page::page(&answer)?)?;
    }
    Ok(())
}

/// Passes of a step that are written out, at most: hundreds of bytes each.
const DRAWN: u64 = 200_000;

/// Whether the passes of a step that is to be drawn are as many as can be.
fn expect_drawn(arguments: &Arguments, layout: &Layout) -> Result<(), Failure> {
    let options = [("--trace", &arguments.trace), ("--html", &arguments.html)];
    let asked = options.into_iter().find(|(_, path)| path.is_some());
    let counts = [2, layout.pp, layout.interleave, layout.micro_batches()];
    let passes = counts.map(u64::from).iter().product();
    match asked.filter(|_| passes > DRAWN) {
        Some((option, _)) => {
            let [passes, most] = [passes, DRAWN].map(grouped);
            let remedy = "give less of --batch, --pp or --interleave, or a larger --micro-batch";
            Err(Failure(format!("{option}: the step has {passes} passes, {most} can be drawn; {remedy}")))
        }
        None => Ok(()),
    }
}

pub(super) fn threads(asked: Option<usize>) -> usize {
    asked.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, Into::into)).max(1)
}

/// Why no layout of so many fits, of which this one comes nearest, and what would.
pub(super) fn none_fits(points: u64, layout: &Layout, step: &Step, would_fit: &[String]) -> String {
    let (lacks, would) = (missing_memory(step, layout), alternatives(would_fit, "fit"));
    match points {
        1 => format!("it does not fit: {lacks}{would}"),
        _ => format!(
            "of {} layouts none fits; the nearest ({}) takes {lacks}{would}",
            grouped(points),
            layout_line(layout)
        ),
    }
}

/// How much of which memory a step takes that does not fit.
fn missing_memory(step: &Step, layout: &Layout) -> String {
    let [accelerator, offloaded] = &step.memory.tiers;
    let gigabytes = |tier: &TierUse| [tier.used_bytes / 1e9, tier.capacity_bytes / 1e9];
    if accelerator.fits() {
        let [used, has] = gigabytes(offloaded);
        let tier = layout.offload.tier;
        return format!("{used:.1} of {has:.1} GB an accelerator in the memory of the {tier}");
    }
    let [used, has] = gigabytes(accelerator);
    let (what, bytes) =
        accelerator.kinds().into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).expect("four kinds");
    format!("{used:.1} of {has:.1} GB, most of it {what} ({:.1} GB)", bytes / 1e9)
}

/// 1 accelerator is, 8 accelerators are.
fn used(count: u32) -> String {
    format!("{} {}", accelerators(count), if count == 1 { "is" } else { "are" })
}

/// The blocks of stages that come out uneven.
pub(super) fn blocks_line(stages: &[Stage]) -> Option<String> {
    let alike = stages.chunk_by(|a, b| a.blocks == b.blocks).map(|all| match all {
        [one] => one.blocks.to_string(),
        all => format!("{} in each of {}", all[0].blocks, all.len()),
    });
    let is_uneven = stages.iter().any(|it| it.blocks != stages[0].blocks);
    is_uneven.then(|| format!("blocks of the stages: {}", alike.collect::<Vec<_>>().join(", ")))
}

/// The range that a step lies in, then what is predicted.
pub(super) fn range_line(answer: &Answer) -> String {
    let Answer { platform, range_s, step, .. } = answer;
    format!("a step on {platform} takes {} s; predicted: {} s", span(*range_s), three(step.total_s))
}

/// What the range rests on: how far off steps were that were predicted without their publication.
pub(super) fn range_source(answer: &Answer) -> String {
    let Margin { step_class: class, range, publications, blind, fitted, .. } = &answer.margin;
    let class = class.name();
    let off = |what: &str, of: &Pooled| match of.published {
        0 => format!("{what}: none of {class} was published"),
        published => format!(
            "{what}: {published} of {class}, off by {:.1}% on average, by {:.1}% with a scalar for their software; {:.0}% lay in their range",
            of.mean_without_scalar * 100.0,
            of.mean * 100.0,
            of.in_range * 100.0
        ),
    };
    format!(
        "the range: 80% of steps of {class} that others publish should lie in it; {publications} publications set it, {} times what is predicted;\n  {};\n  {};\n  {}",
        span(*range),
        off("published steps that no constant is fitted to", blind),
        off("others, each predicted without its publication", fitted),
        fitted_line(answer)
    )
}

/// Whether anything is fitted to the accelerator.
fn fitted_line(answer: &Answer) -> String {
    match &answer.margin.accelerator {
        Some(name) => format!("constants of {name} are fitted to published steps of it"),
        None => "no constant of this accelerator is fitted to a published step of it: the range is that of steps that were predicted with constants of other accelerators".into(),
    }
}

/// A step: the range that it lies in and how it is laid out, what it is made of, and what that rests on.
fn print(subject: &Subject, answer: &Answer) -> Result<(), Failure> {
    let others: Vec<_> = answer.against.iter().map(AsRef::as_ref).collect();
    let title = subject.loaded()?.title;
    // A title may name its file.
    let name = if title.contains(&answer.model) { String::new() } else { format!("{}: ", answer.model) };
    print_wrapped(&format!("{name}{title} on {}, simulated", accelerators(answer.accelerators)));
    print_wrapped(&range_line(answer));
    others.iter().for_each(|other| print_wrapped(&range_line(other)));
    print_wrapped(&layout_line(&answer.layout));
    if let [other] = others[..] {
        print_comparison(answer, other);
    }
    table::print(&rows(answer, &others));
    print_wrapped("TFLOP/s count attention over all pairs of tokens; a causal kernel computes half of them");
    print_taken(subject, answer, &others);
    answer.note.iter().for_each(|note| print_wrapped(note));
    range_source(answer).lines().for_each(print_wrapped);
    for other in others.iter().filter(|it| !it.margin.is_of_one_accelerator(&answer.margin)) {
        print_wrapped(&format!("on {}: {}", other.platform, fitted_line(other)));
    }
    print_wrapped("`polder plan validate` prints these published steps beside what is predicted of them");
    Ok(())
}

/// What was taken, and how the step was found.
fn print_taken(subject: &Subject, answer: &Answer, others: &[&Answer]) {
    if answer.points > 1 {
        print_wrapped(&format!("the fastest that fits of {} layouts", grouped(answer.points)));
        // Where nothing fits without, it was looked at.
        let is_open = subject.fixed.offload.is_empty() && !answer.layout.offload.is_any();
        let offload = if is_open { "offload; " } else { "" };
        print_wrapped(&format!("not looked at unless given: {offload}{}", Space::left_out()));
    }
    print_wrapped(&format!("{}; racks of {}", computed_line(answer.sequence, &answer.layout), answer.rack));
    blocks_line(&answer.stages).iter().for_each(|blocks| print_wrapped(blocks));
    let order: Vec<_> = answer.order.words().collect();
    let order = format!("ranks are placed {} (--order {}); ", order.join(", "), answer.order);
    let order = if subject.order.is_some() { order } else { String::new() };
    print_wrapped(&format!("{order}of each rack {} used", used(answer.fill)));
    // What of the machine changes no figure is of interest where it differs.
    for other in others.iter().filter(|other| other.machine != answer.machine) {
        print_wrapped(&answer.machine);
        print_wrapped(&format!("on {}: {}", other.platform, other.machine));
    }
    print_wrapped(&fidelity_line(answer));
    for other in others.iter().filter(|other| other.flits != answer.flits) {
        print_wrapped(&format!("on {}: {}", other.platform, fidelity_line(other)));
    }
}

/// How closely communication was looked at.
pub(super) fn fidelity_line(answer: &Answer) -> String {
    let how = match (answer.fidelity, &answer.flits) {
        (Fidelity::L0, _) => "in closed form, each transfer as if it were alone (--fidelity L0)".into(),
        (Fidelity::L2, Some(it)) => {
            format!("by the flits of all groups at the same time (--fidelity L2): {}", followed(*it))
        }
        _ => "by the flows of all groups at the same time (--fidelity L1)".into(),
    };
    let failed = match answer.failed.len() {
        0 => String::new(),
        count => format!(", without {}", counted(count as u64, "failed link")),
    };
    format!("communication {how}{failed}")
}

/// The table: a column for each platform.
fn rows(answer: &Answer, others: &[&Answer]) -> Vec<Vec<String>> {
    let step = &answer.step;
    let mut head = vec![String::new(), answer.platform.clone()];
    head.extend(others.iter().map(|other| other.platform.clone()));
    let mut rows = vec![head];
    let mut row = |name: &str, cell: &dyn Fn(&Answer) -> String| {
        let mut cells = vec![name.to_owned(), cell(answer)];
        cells.extend(others.iter().map(|other| cell(other)));
        rows.push(cells);
    };
    row("step, s", &|answer| span(answer.range_s));
    // What is done in a second is the more, the less the step takes.
    let in_a_second = |answer: &Answer, scale: f64| {
        let [least, most] = answer.margin.range;
        [most, least].map(|times| answer.rate() * scale / times)
    };
    row("TFLOP/s an accelerator", &|answer| span(in_a_second(answer, 1e-12)));
    row("part of its peak", &|answer| {
        let [least, most] = in_a_second(answer, 100.0 / answer.peak_flops);
        format!("{least:.0} to {most:.0}%")
    });
    row("predicted step, s", &|answer| three(answer.step.total_s));
    for (index, (name, own)) in step.times().into_iter().enumerate() {
        let most = others.iter().fold(own.exposed_s + own.hidden_s, |most, other| {
            most.max(other.step.times()[index].1.exposed_s)
        });
        if most > 0.0 {
            row(&format!("  {name}"), &|answer| cell(answer.step.times()[index].1, answer.step.total_s));
        }
    }
    for key in BYTES {
        let Some(StepFigure { label, of, .. }) = Step::FIGURES.into_iter().find(|figure| figure.key == key)
        else {
            continue;
        };
        let is_there = !key.starts_with("offload_") || step.memory.offloaded().used_bytes > 0.0;
        if is_there && of(step) > 0.0 {
            let name = match key {
                "used_bytes" => format!("{label}, GB"),
                "offload_used_bytes" => format!("{label}, GB an accelerator"),
                _ => format!("  {label}"),
            };
            row(&name, &|answer| format!("{:.1}", of(&answer.step) / 1e9));
        }
    }
    for (place, of) in FABRICS {
        let any = of(answer).or_else(|| others.iter().find_map(|other| of(other)));
        if any.is_some() {
            let number = |value: Option<f64>| value.map_or("none".into(), |value| format!("{value:.1}"));
            row(&format!("links {place} racks, GB/s an accelerator"), &|answer| {
                number(of(answer).map(|rates| rates.payload_bytes_per_s / 1e9))
            });
            row("  reached by collectives", &|answer| {
                number(of(answer).map(|rates| rates.reached_bytes_per_s / 1e9))
            });
            row("  an empty message, us", &|answer| number(of(answer).map(|rates| rates.latency_s * 1e6)));
        }
    }
    rows
}

/// One of the fabrics of a platform.
type RatesOf = fn(&Answer) -> Option<FabricRates>;

/// The fabrics of a platform.
const FABRICS: [(&str, RatesOf); 2] =
    [("inside", |answer| answer.fabrics.inside), ("between", |answer| answer.fabrics.between)];

/// The same layout on two platforms.
fn print_comparison(answer: &Answer, other: &Answer) {
    let (one, against) = (&answer.platform, &other.platform);
    if let Some(range) = answer.times_against {
        let predicted = three(answer.step.total_s / other.step.total_s);
        print_wrapped(&format!(
            "{one} takes {} times as long as {against}; predicted: {predicted} times",
            span(range)
        ));
    }
    if other.fill != answer.fill {
        print_wrapped(&format!("on {against}, of each rack {} used", used(other.fill)));
    }
    if !other.fits {
        let missing = missing_memory(&other.step, &answer.layout);
        print_wrapped(&format!("on {against} it does not fit, and is not compared: {missing}"));
    }
}

/// What lies where, in the order of the table: the accelerator's memory and what is in it, then what is offloaded.
const BYTES: [&str; 11] = [
    "used_bytes",
    "capacity_bytes",
    "weights_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "activations_bytes",
    "offload_used_bytes",
    "offload_capacity_bytes",
    "offload_weights_bytes",
    "offload_optimizer_bytes",
    "offload_activations_bytes",
];

/// A part of a step, as closely as the step.
fn cell(seconds: Exposure, total: f64) -> String {
    let Exposure { exposed_s, hidden_s } = seconds;
    let digits = decimals(total);
    let hidden = if hidden_s > 0.0 { format!(" (+{hidden_s:.digits$} hidden)") } else { String::new() };
    format!("{exposed_s:.digits$}{hidden} {:>3.0}%", exposed_s / total * 100.0)
}

/// What of a layout is no cut: how it is computed, and what runs beside that.
pub(super) fn computed_line(sequence: u32, layout: &Layout) -> String {
    let precision = format!("{:?}", layout.precision).to_lowercase();
    let fused = if layout.flash { "fused" } else { "unfused" };
    let bits = if layout.wide_gradients || layout.precision == Precision::Fp32 { 32 } else { 16 };
    let Overlap { tensor, context, expert, pipeline, data, offload } = layout.overlap;
    let all = [
        ("tensor", tensor),
        ("context", context),
        ("expert", expert),
        ("pipeline", pipeline),
        ("data", data),
        ("offload", offload),
    ];
    let beside: Vec<_> = all.into_iter().filter(|(_, is_beside)| *is_beside).map(|(name, _)| name).collect();
    let beside = if beside.is_empty() { "none".into() } else { listed(&beside) };
    format!(
        "sequences of {} tokens, {precision}, {fused} attention, gradients in {bits} bits; overlap: {beside}",
        grouped(sequence.into())
    )
}

/// A choice as its option has it.
pub(super) fn lower(choice: &impl std::fmt::Debug) -> String {
    format!("{choice:?}").to_lowercase()
}

/// How a step is cut, in the words of the options that say so.
pub(super) fn layout_line(layout: &Layout) -> String {
    let Layout { tp, cp, ep, dp, pp, interleave, batch, micro_batch, .. } = layout;
    let interleave = if *interleave > 1 { format!(", interleave {interleave}") } else { String::new() };
    let mut line = format!(
        "layout: tp {tp}, cp {cp}, ep {ep}, dp {dp}, pp {pp}{interleave}; batch {batch}, micro-batch {micro_batch}"
    );
    let sequence = match (layout.sequence_parallel, layout.gather_again) {
        (false, _) => "",
        (true, true) => "sequence-parallel, ",
        (true, false) => "sequence-parallel, keep-gathered, ",
    };
    line += &format!("; {sequence}recompute {}, zero {}", lower(&layout.recompute), lower(&layout.zero));
    if layout.offload.is_any() {
        line += &format!("; {}", layout.offload);
    }
    line
}
