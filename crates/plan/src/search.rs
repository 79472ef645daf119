//! `polder plan search`: every layout on several machines, and those that no other beats.

pub(super) mod costs;
mod csv;
mod page;
mod print;

use std::collections::BTreeSet;
use std::fmt;

use clap::Args;
use polder_platform::{DataError, LeftOut, Platform, Prices, Rates};
use polder_sim::{
    FoundLayout, Job, Layout, Margin, Model, Offload, Order, RANGE, RequestError, Step, StepClass, Tiers,
    accelerators, front, unjudged,
};
use serde::Serialize;
use serde_json::json;

use self::costs::{Costs, Run};
use super::fidelity::ClosedForm;
use super::option::{accelerator_count, expect_names};
use super::train::{Subject, none_fits, threads, with_progress_bar};
use super::written::Outputs;
use crate::Failure;

/// Looks at every layout.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    fidelity: ClosedForm,
    #[command(flatten)]
    subject: Subject,
    /// Numbers of accelerators, with commas between them; each is searched.
    #[arg(
        long,
        value_name = "COUNT",
        value_delimiter = ',',
        required_unless_present = "layout",
        allow_negative_numbers = true
    )]
    gpus: Vec<String>,
    /// The machines: names (`polder plan show`), or paths of files.
    #[arg(long, value_name = "PLATFORM", value_delimiter = ',', required = true)]
    platform: Vec<String>,
    /// What the machines cost in money, watts and carbon: a name (`polder plan show`), or the path of a file.
    #[arg(long, value_name = "PRICES")]
    prices: Option<String>,
    /// Give the cost of a run over this many tokens, such as 15e12, instead of a step.
    #[arg(long, value_name = "TOKENS", requires = "prices", value_parser = tokens)]
    tokens: Option<f64>,
    #[command(flatten)]
    pub(super) outputs: Outputs,
    /// Lines of the table to print, the fastest first.
    #[arg(long, value_name = "COUNT", default_value_t = 20)]
    rows: usize,
    /// Threads [default: one for each core].
    #[arg(long, value_name = "COUNT")]
    threads: Option<usize>,
}

fn tokens(text: &str) -> Result<f64, String> {
    let tokens = text.parse().ok().filter(|tokens: &f64| (1.0..1e30).contains(tokens));
    tokens.ok_or_else(|| "expected a number of tokens such as 15e12".into())
}

impl Arguments {
    /// The counts of accelerators, of which `None` is that of a layout's file.
    fn counts(&self) -> Result<Vec<Option<u32>>, Failure> {
        let counts = self.gpus.iter().map(|text| accelerator_count(text)).collect::<Result<Vec<_>, _>>()?;
        expect_distinct("--gpus", &counts)?;
        expect_distinct("--platform", &self.platform)?;
        match counts[..] {
            [] => Ok(vec![None]),
            _ => Ok(counts.into_iter().map(Some).collect()),
        }
    }
}

fn expect_distinct<T: Ord + fmt::Display>(option: &str, values: &[T]) -> Result<(), Failure> {
    let mut seen = BTreeSet::new();
    match values.iter().find(|value| !seen.insert(*value)) {
        Some(twice) => Err(Failure(format!("{option}: expected each value once, found {twice} twice"))),
        None => Ok(()),
    }
}

/// A platform with a count of accelerators, on which some layout runs.
struct Site<'a> {
    platform: &'a str,
    job: Job<'a>,
    accelerators: u32,
    rates: Option<Rates>,
    /// How far predictions for its accelerator are from published steps.
    margin: Margin,
    /// The fastest layout that fits.
    best: FoundLayout,
}

/// A platform with a count of accelerators, on which no layout runs.
struct LeftOutSite<'a> {
    platform: &'a str,
    accelerators: u32,
    reason: String,
}

impl fmt::Display for LeftOutSite<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = format!("{}: ", self.platform);
        let reason = self.reason.strip_prefix(&named).unwrap_or(&self.reason);
        write!(f, "{} with {}: {reason}", self.platform, accelerators(self.accelerators))
    }
}

/// What was looked at, site by site.
#[derive(Default)]
struct Searched<'a> {
    points: u64,
    fits: u64,
    sites: Vec<Site<'a>>,
    /// The front of each site, by its index.
    fronts: Vec<(usize, FoundLayout)>,
    left_out: Vec<LeftOutSite<'a>>,
}

/// A layout that was found, as every output has it.
#[derive(Serialize)]
struct Point<'a> {
    platform: &'a str,
    /// How the figures were obtained: "simulated".
    kind: &'static str,
    accelerators: u32,
    sequence: u32,
    rack: &'a str,
    fill: u32,
    order: Order,
    layout: Layout,
    step: Step,
    /// From how many to how many seconds the step takes, as far as can be relied on.
    range_s: [f64; 2],
    #[serde(rename = "bill", skip_serializing_if = "Option::is_none")]
    costs: Option<Costs>,
    /// What must be said with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
    /// Of its site.
    #[serde(skip)]
    margin: Margin,
}

/// What is printed of a search.
struct Report<'a> {
    arguments: &'a Arguments,
    points: u64,
    fits: u64,
    sites: &'a [Site<'a>],
    /// What no other layout surely beats, the one that surely ends first at the beginning.
    front: &'a [Point<'a>],
    /// The fastest of each site, in the same order.
    best: &'a [Point<'a>],
    /// What no run or publication validates, each platform once.
    unproved: BTreeSet<(&'a str, &'static str)>,
    unjudged: Option<&'static str>,
    costs_left_out: LeftOut<'a>,
}

/// Looks at every layout on every platform, and prints the front.
pub(super) fn search(arguments: &Arguments) -> Result<(), Failure> {
    let why = "it compares millions of layouts; give the one that it finds to plan train --fidelity L1";
    arguments.fidelity.check("search", why)?;
    expect_names("--platform", &arguments.platform)?;
    let counts = arguments.counts()?;
    let prices = arguments.prices.as_deref().map(Prices::load).transpose()?;
    let machines = arguments.platform.iter().map(|name| Ok((name.as_str(), Platform::load(name)?)));
    let machines = machines.collect::<Result<Vec<_>, DataError>>()?;
    if let Some(prices) = &prices {
        prices.unknown(&machines)?.iter().for_each(|warning| eprintln!("polder: {warning}"));
    }
    let model = arguments.subject.loaded()?;
    // Steps of several counts are compared: they have one batch.
    let most = counts.iter().copied().flatten().max();
    let batch = most.map(|most| {
        arguments.subject.request("", None, Tiers::All).map(|request| request.layout.batch(&model, most))
    });
    let mut searched = Searched::of(arguments, &machines, &counts, batch.transpose()?, prices.as_ref())?;
    searched.expect_any()?;
    let mut rates: Vec<_> =
        searched.sites.iter_mut().filter_map(|site| Some((site.platform, site.rates.as_mut()?))).collect();
    let costs_left_out = Rates::leave_out_incomparable(&mut rates);
    let Searched { points, fits, sites, fronts, left_out } = &searched;
    let run = arguments.tokens.map(|tokens| Run { tokens, sequence: model.sequence.into() });
    let paid = |(site, candidate): &(usize, FoundLayout)| {
        let Site { rates, margin, .. } = &sites[*site];
        let costs = rates.as_ref().map(|rates| Costs::new(rates, margin, candidate, run));
        costs.map_or([0.0; Rates::NAMES.len()], |costs| costs.paid().map(|cost| cost.unwrap_or(0.0)))
    };
    let front: Vec<_> = front(fronts, |(site, _)| &sites[*site].margin, paid);
    let unproved = unproved(sites, &front);
    let front: Vec<_> =
        front.iter().map(|(site, candidate)| Point::new(&sites[*site], candidate, &model, run)).collect();
    let mut best: Vec<_> = sites.iter().map(|site| Point::new(site, &site.best, &model, run)).collect();
    best.sort_by(|a, b| a.range_s[1].total_cmp(&b.range_s[1]));
    arguments.outputs.table(|| csv::csv(&front))?;
    let report = Report {
        arguments,
        points: *points,
        fits: *fits,
        sites,
        front: &front,
        best: &best,
        unproved,
        unjudged: unjudged(&model),
        costs_left_out,
    };
    arguments.outputs.page(|| page::page(&report))?;
    match arguments.outputs.json.json {
        true => print_json(&report, left_out),
        false => {
            print::print(&report);
            Ok(())
        }
    }
}

impl<'a> Searched<'a> {
    /// Looks at every platform with every count.
    fn of(
        arguments: &Arguments,
        machines: &'a [(&'a str, Platform)],
        counts: &[Option<u32>],
        batch: Option<u32>,
        prices: Option<&Prices>,
    ) -> Result<Self, Failure> {
        let mut searched = Self::default();
        for (platform, machine) in machines {
            for &count in counts {
                searched.look(arguments, platform, machine, (count, batch), prices)?;
            }
        }
        Ok(searched)
    }

    fn look(
        &mut self,
        arguments: &Arguments,
        platform: &'a str,
        machine: &'a Platform,
        (count, batch): (Option<u32>, Option<u32>),
        prices: Option<&Prices>,
    ) -> Result<(), Failure> {
        let mut request = arguments.subject.request(platform, count, Tiers::All)?;
        request.layout.batch = request.layout.batch.or(batch);
        let accelerators = request.accelerators;
        let looked = with_progress_bar(|progress| {
            let rates = prices.map(|prices| request.rates(prices)).transpose()?;
            Ok((rates, request.search(threads(arguments.threads), progress)?))
        });
        let (rates, outcome) = match looked {
            Err(error @ RequestError::Refused { .. }) => {
                self.left_out.push(LeftOutSite { platform, accelerators, reason: error.to_string() });
                return Ok(());
            }
            looked => looked?,
        };
        self.points += outcome.points;
        self.fits += outcome.fits;
        if let Some(FoundLayout { layout, step }) = &outcome.nearest {
            let none = none_fits(outcome.points, layout, step, &outcome.would_fit);
            self.left_out.push(LeftOutSite { platform, accelerators, reason: format!("{platform}: {none}") });
        }
        if let Some(best) = outcome.best().copied() {
            let job = Job::chosen(machine, request.rack.as_deref(), request.fill, request.order)?;
            let class = StepClass::of(&arguments.subject.loaded()?, &best.layout);
            let margin = Margin::of(&job.rack().accelerator, class)?;
            self.fronts.extend(outcome.front.into_iter().map(|it| (self.sites.len(), it)));
            self.sites.push(Site { platform, job, accelerators, rates, margin, best });
        }
        Ok(())
    }

    /// Says what was left out, and fails when that is everything.
    fn expect_any(&self) -> Result<(), Failure> {
        match &self.left_out[..] {
            [only] if self.sites.is_empty() => return Err(Failure(only.reason.clone())),
            all => all.iter().for_each(|it| eprintln!("polder: left out {it}")),
        }
        match self.sites.is_empty() {
            true => {
                Err(Failure("no platform that was asked for can run it with so many accelerators".into()))
            }
            false => Ok(()),
        }
    }
}

/// What no run over CXL validates: also of a site that others beat.
fn unproved<'a>(sites: &[Site<'a>], front: &[(usize, FoundLayout)]) -> BTreeSet<(&'a str, &'static str)> {
    let everywhere = sites.iter().map(|site| (site, Offload::default()));
    let offloads = everywhere.chain(front.iter().map(|(at, it)| (&sites[*at], it.layout.offload)));
    offloads.filter_map(|(site, offload)| Some((site.platform, site.job.unproved(&offload)?))).collect()
}

fn print_json(report: &Report<'_>, left_out: &[LeftOutSite<'_>]) -> Result<(), Failure> {
    let Report { arguments, front, best, costs_left_out, .. } = report;
    for point in *front {
        println!("{}", serde_json::to_string(point)?);
    }
    let prices = arguments.prices.as_deref().unwrap_or_default();
    if let Some(line) = costs::electricity_line(costs_left_out, prices) {
        eprintln!("polder: {line}");
    }
    // A site of which nothing is on the front.
    for point in best.iter().filter(|it| front.iter().all(|point| point.place() != it.place())) {
        let Point { platform, accelerators, .. } = point;
        println!("{}", json!({"platform": platform, "accelerators": accelerators, "beaten": point}));
    }
    for LeftOutSite { platform, accelerators, reason } in left_out {
        println!("{}", json!({"platform": platform, "accelerators": accelerators, "left_out": reason}));
    }
    Ok(())
}

impl<'a> Point<'a> {
    fn new(site: &'a Site<'_>, candidate: &FoundLayout, model: &Model, run: Option<Run>) -> Self {
        let Site { platform, job, accelerators, rates, margin, .. } = site;
        let FoundLayout { layout, step } = *candidate;
        let notes = [job.unproved(&layout.offload), unjudged(model)].into_iter().flatten();
        Self {
            platform,
            kind: "simulated",
            accelerators: *accelerators,
            sequence: model.sequence,
            rack: job.rack_name(),
            fill: job.fill(&layout),
            order: job.order(),
            layout,
            step,
            range_s: margin.spread(step.total_s),
            costs: rates.as_ref().map(|rates| Costs::new(rates, margin, candidate, run)),
            note: notes.map(String::from).reduce(|all, note| format!("{all}, and {note}")),
            margin: margin.clone(),
        }
    }

    /// Where it was looked at.
    const fn place(&self) -> (&'a str, u32) {
        (self.platform, self.accelerators)
    }

    /// Its figures, each with the name of its column.
    fn columns(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let names = Step::FIGURES.into_iter().map(|figure| figure.key).chain(RANGE);
        let figures = names.zip(self.step.figures().into_iter().chain(self.range_s));
        figures.chain(self.costs.iter().flat_map(Costs::columns))
    }
}

/// What comes before a layout in its line: where it was looked at.
const SITE: [&str; 7] = ["platform", "kind", "accelerators", "sequence", "rack", "fill", "order"];
