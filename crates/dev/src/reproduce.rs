//! Published figures, made again.

mod coarse;
mod cxl;
mod programs;
mod server;
mod tiers;
mod toptier;
mod vistara;

use clap::{Args, ValueEnum};
use polder_dev::judge::open::OpenValue;
use polder_dev::judge::scalepool::{Choice, Figure, Pair, Paper, Parameter, Shipped, categories, summary};
use polder_platform::Platform;
use polder_sim::{Job, grouped};
use serde::Serialize;

use crate::Failure;
use polder_plan::table;

/// Makes a published figure again.
#[derive(Args)]
pub(crate) struct Arguments {
    /// The figure.
    figure: Name,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Name {
    /// Training time of five models over InfiniBand and over CXL (ScalePool, Figure 6).
    ScalepoolFig6,
    /// Access time by working set, in two tiers of memory (ScalePool, Figure 7).
    ScalepoolFig7,
    /// CG and miniAMR over CXL memory and over TCP, by nodes (cMPI, Figure 10).
    CmpiFig10,
    /// Memory of an offloaded step by context (Liaw and Chen, Figure 2).
    CxlFig2,
    /// Throughput and memory of an offloaded step by batch (Liaw and Chen, Figure 3).
    CxlFig3,
    /// Latency of memory and of a CXL card (Liaw and Chen, Figure 4).
    CxlFig4,
    /// CPU Adam's step on a CXL card by elements (Liaw and Chen, Figure 5).
    CxlFig5,
    /// Copies between host memory and GPUs (Liaw and Chen, Figure 6).
    CxlFig6,
    /// Phases of an offloaded step with interleaved pages (Liaw and Chen, Figure 7).
    CxlFig7,
    /// Throughput of offloaded steps with one CXL card (Liaw and Chen, Figure 9).
    CxlFig9,
    /// Throughput of offloaded steps with two CXL cards (Liaw and Chen, Figure 10).
    CxlFig10,
    /// CPU Adam's steps as Liaw and Chen measured them.
    CxlAdam,
    /// Copies between host memory and GPUs as Liaw and Chen measured them.
    CxlCopies,
    /// Training with a parameter service on memory devices: speed (COARSE, Figures 2, 14 and 16).
    CoarseFig16,
    /// The same: blocked communication (COARSE, Figure 17).
    CoarseFig17,
    /// Gains of services by CXL memory, and where the paper contradicts itself (Vistara, Table VII and Figures 9 to 12).
    VistaraTable7,
    /// CXL bandwidth, hint faults and promotions of services (Vistara, Table VIII).
    VistaraTable8,
    /// Local memory of two caches on one server, without bounds and with Fair Share (Vistara, Table IX).
    VistaraTable9,
    /// Four services, one of which comes when fast memory is full, with limits by tier (Hahn, RFC v2 of April 2026).
    ToptierLimits,
    /// Two services with less and less local memory (Vistara, section V-G).
    VistaraRatio,
    /// CXL bandwidth of these two services, by a law that comes from Table VIII alone.
    VistaraTier,
    /// Latency and bandwidths of two tiers while more and more memory is hot (Vistara, Table X).
    VistaraTable10,
}

#[derive(Serialize)]
struct Report {
    paper: Paper,
    simulated: Paper,
    pairs: Vec<Pair>,
    open: Vec<Moved>,
    choices: Vec<Chosen>,
    /// By the platforms that Polder brings along.
    shipped: Shipped,
}

/// How far the result moves over a parameter's plausible range.
#[derive(Serialize)]
struct Moved {
    #[serde(flatten)]
    open: OpenValue<Parameter>,
    simulated: [Paper; 2],
}

/// How far the result moves with what else is plausible.
#[derive(Serialize)]
struct Chosen {
    what: String,
    taken: String,
    instead: Vec<Tried>,
}

#[derive(Serialize)]
struct Tried {
    value: String,
    simulated: Paper,
    /// Whether all steps fit where they lie.
    fits: bool,
}

/// Whose fabric has the ports that each accelerator's bandwidth is counted in: CXL 3, x16 at 64 GT/s.
const PORTS_OF: &str = "nvl72-cxl";

pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    match arguments.figure {
        Name::ScalepoolFig6 => training(arguments),
        Name::ScalepoolFig7 => tiers::run(arguments.json),
        Name::CmpiFig10 => programs::run(arguments.json),
        Name::CxlFig2 => cxl::text("cxl-fig2", arguments.json),
        Name::CxlFig3 => cxl::text("cxl-fig3", arguments.json),
        Name::CxlFig4 => cxl::text("cxl-fig4", arguments.json),
        Name::CxlFig5 => cxl::text("cxl-fig5", arguments.json),
        Name::CxlFig6 => cxl::text("cxl-fig6", arguments.json),
        Name::CxlFig7 => cxl::text("cxl-fig7", arguments.json),
        Name::CxlFig9 => cxl::throughput("cxl-fig9", arguments.json),
        Name::CxlFig10 => cxl::throughput("cxl-fig10", arguments.json),
        Name::CxlAdam => cxl::adam(arguments.json),
        Name::CxlCopies => cxl::copies(arguments.json),
        Name::CoarseFig16 => coarse::run(&["16", "2", "14"], arguments.json),
        Name::CoarseFig17 => coarse::run(&["17"], arguments.json),
        Name::VistaraTable7 => vistara::gains(arguments.json),
        Name::VistaraTable8 => vistara::telemetry(arguments.json),
        Name::VistaraTable9 => vistara::fair(arguments.json),
        Name::ToptierLimits => toptier::run(arguments.json),
        Name::VistaraRatio => vistara::ratio(arguments.json),
        Name::VistaraTier => vistara::tier(arguments.json),
        Name::VistaraTable10 => vistara::knee(arguments.json),
    }
}

/// Figure 6.
fn training(arguments: &Arguments) -> Result<(), Failure> {
    let figure = Figure::load()?;
    let pairs = figure.predict(None)?;
    let moved = |open: &OpenValue<Parameter>| {
        let at = |value| Ok::<_, Failure>(summary(&figure.predict(Some((open.name, value)))?));
        let simulated = [at(open.range[0])?, at(open.range[1])?];
        Ok::<_, Failure>(Moved { open: open.clone(), simulated })
    };
    let open = figure.open.iter().map(moved).collect::<Result<Vec<_>, _>>()?;
    let choices = figure.choice.iter().map(|choice| chosen(&figure, choice)).collect::<Result<_, _>>()?;
    let shipped = figure.shipped()?;
    let report = Report { paper: figure.paper, simulated: summary(&pairs), pairs, open, choices, shipped };
    match arguments.json {
        true => println!("{}", serde_json::to_string(&report)?),
        false => print(&figure, &report)?,
    }
    Ok(())
}

fn chosen(figure: &Figure, choice: &Choice) -> Result<Chosen, Failure> {
    let instead = choice.instead.iter().map(|instead| {
        let pairs = figure.with(instead)?.predict(None)?;
        let fits = |pair: &Pair| pair.baseline.memory.fits() && pair.scalepool.memory.fits();
        let (value, fits) = (instead.value.clone(), pairs.iter().all(fits));
        Ok(Tried { value, simulated: summary(&pairs), fits })
    });
    let instead = instead.collect::<Result<_, Failure>>()?;
    Ok(Chosen { what: choice.what.clone(), taken: choice.taken.clone(), instead })
}

fn print(figure: &Figure, report: &Report) -> Result<(), Failure> {
    println!("{}\n  {}\n", figure.title, figure.source);
    print_pairs(&report.pairs);
    print_numbers(report);
    print_shipped(report);
    print_open(figure, &report.open)?;
    print_choices(&report.choices);
    print_ports(figure, report)?;
    println!(
        "The published numbers follow from two bandwidths and a pool as fast as C2C; latencies hardly move them."
    );
    println!(
        "Communication gives the ratio of two bandwidths; how high they are follows from what else a step takes. A fit in which that"
    );
    println!(
        "took longer met the same numbers at 25.0 and 94.6 GB/s, where here communication would weigh more."
    );
    println!(
        "Taken besides: only tensor parallelism inside racks, as the paper says; weights fetched for each pass of each micro-"
    );
    println!(
        "batch; products in bf16; stragglers among bubbles and offloading. PaLM, whose copies all lie in other racks, leads."
    );
    println!("They are met with fitted values, on simulated machines: no run over CXL validates them.");
    Ok(())
}

/// Parts of each model's step over both fabrics.
fn print_pairs(pairs: &[Pair]) {
    let mut rows = vec![table::head(
        "| accelerators | communication | computation | other | step s | times faster | between racks",
    )];
    for pair in pairs {
        let whole = pair.baseline.total_s;
        for (side, step) in [("InfiniBand", &pair.baseline), ("CXL", &pair.scalepool)] {
            let mut row = vec![format!("{}, {side}", pair.model), grouped(pair.accelerators.into())];
            row.extend(categories(step).map(|seconds| format!("{:.3}", seconds / whole)));
            row.push(format!("{:.2}", step.total_s));
            if side == "CXL" {
                row.extend([pair.speedup, pair.communication_speedup].map(|times| format!("{times:.2}")));
            }
            rows.push(row);
        }
    }
    table::print(&rows);
    println!(
        "  (parts of the InfiniBand side's step, as the paper's bars are; other: bubbles and offloading. Between racks: how many times"
    );
    println!("  faster communication there is, as far as it holds computation up)");
    println!(
        "By model and category the paper's text gives no number to put beside these, only the three that follow.\n"
    );
}

/// The paper's three numbers, published and simulated.
fn print_numbers(report: &Report) {
    let line = |name: &str, paper: f64, simulated: f64| {
        vec![
            name.into(),
            format!("{paper:.2}"),
            format!("{simulated:.2}"),
            format!("{:+.1}%", (simulated / paper - 1.0) * 100.0),
        ]
    };
    let (paper, ours) = (report.paper, report.simulated);
    table::print(&[
        table::head("| published | simulated, fitted to it | off"),
        line("mean, times faster", paper.mean, ours.mean),
        line("best", paper.best, ours.best),
        line("communication between racks", paper.communication, ours.communication),
    ]);
}

/// The three bandwidths that are fitted, beside what the platforms have that Polder brings along.
fn print_shipped(report: &Report) {
    let Shipped { platforms: [baseline, scalepool], bandwidths_gb_per_s, replaced, simulated } =
        &report.shipped;
    println!(
        "\nthe three fitted bandwidths, GB/s an accelerator, beside those of {baseline} and {scalepool}"
    );
    let named = [
        ("between racks, InfiniBand", Parameter::InfinibandBandwidth),
        ("between racks, CXL", Parameter::CxlBandwidth),
        ("memory pool, reads alone", Parameter::PoolBandwidth),
    ];
    let mut rows = vec![table::head("| fitted | the platforms'")];
    for ((name, parameter), shipped) in named.into_iter().zip(bandwidths_gb_per_s) {
        let fitted = report.open.iter().find(|it| it.open.name == parameter).map_or(0.0, |it| it.open.value);
        rows.push(vec![name.into(), format!("{fitted:.1}"), format!("{shipped:.1}")]);
    }
    rows.push(vec!["mean / best / communication".into(), three(&report.simulated), three(replaced)]);
    table::print(&rows);
    println!(
        "  (with the CPU memory of {baseline} too; by both platforms as they are: {}. A mean below 1 says that ScalePool is slower: the figure\n  does not follow from platforms that are not fitted to it)",
        three(simulated)
    );
}

/// The three numbers at each end of what the paper leaves open.
fn print_open(figure: &Figure, open: &[Moved]) -> Result<(), Failure> {
    println!(
        "\nwhat the paper leaves open; the three numbers at each end of the plausible range (mean / best / communication"
    );
    println!("between racks, as far as it holds computation up)");
    let mut rows = vec![table::head("| value | | low end | gives | high end | gives")];
    for Moved { open, simulated } in open {
        rows.push(vec![
            open.what.clone(),
            open.value.to_string(),
            open.origin.to_string(),
            open.range[0].to_string(),
            three(&simulated[0]),
            open.range[1].to_string(),
            three(&simulated[1]),
        ]);
    }
    table::print(&rows);
    let racks = Platform::load(&figure.platform)?;
    let host = &Job::new(&racks).rack().host;
    let whole = host.memory.read.value() / 1e9;
    // What is read or written of an accelerator's share goes both ways at once.
    let each = whole / 2.0 / f64::from(host.accelerators);
    println!(
        "  (CPU memory is taken to keep up with C2C; {whole} GB/s of {} accelerators, as {} has it, are {each} each way, the low end)\n",
        host.accelerators, figure.platform
    );
    Ok(())
}

fn print_choices(choices: &[Chosen]) {
    let mut rows = vec![table::head("| taken | instead | gives")];
    for Chosen { what, taken, instead } in choices {
        for tried in instead {
            let over = if tried.fits { "" } else { ", not all fit" };
            let gives = format!("{}{over}", three(&tried.simulated));
            rows.push(vec![what.clone(), taken.clone(), tried.value.clone(), gives]);
        }
    }
    table::print(&rows);
}

fn three(paper: &Paper) -> String {
    format!("{:.2} / {:.2} / {:.2}", paper.mean, paper.best, paper.communication)
}

/// How many CXL ports an accelerator would need.
fn print_ports(figure: &Figure, report: &Report) -> Result<(), Failure> {
    let owner = Platform::load(PORTS_OF)?;
    let between = owner.between.as_ref().expect("its racks are joined");
    let reached = Job::new(&owner).rack().accelerator.fitted.between;
    let [raw, port] = [between.link.raw(), between.link.payload()].map(|rate| rate.value() / 1e9);
    let ports = |parameter| {
        let open = report.open.iter().map(|moved| &moved.open).find(|open| open.name == parameter);
        let value = open.map_or(0.0, |open| open.value);
        (value, value / port)
    };
    let ((cxl, links), (pool, nodes)) = (ports(Parameter::CxlBandwidth), ports(Parameter::PoolBandwidth));
    println!(
        "\nCXL ports an accelerator (x16 at 64 GT/s, {raw} GB/s, {port:.1} of it payload): {links:.2} for {cxl} GB/s between racks, {nodes:.2} for"
    );
    println!(
        "{pool} GB/s to the pool; where collectives reach {reached} of a port, as `polder plan train` has it on {PORTS_OF}, {:.2} between racks",
        links / reached
    );
    for (what, rate) in [("raw rate of one port", raw), ("payload of one port", port)] {
        let one = summary(&figure.predict(Some((Parameter::PoolBandwidth, rate)))?);
        println!(
            "with the {what} to the pool, {rate:.1} GB/s an accelerator: mean {:.2}, best {:.2}: offloading takes longer than to the CPU",
            one.mean, one.best
        );
    }
    Ok(())
}
