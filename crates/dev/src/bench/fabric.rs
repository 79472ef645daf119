//! `polder-dev bench fabric`: a permutation on hosts of a Clos, flow by flow, beside SimGrid with the same links and routes.
//!
//! Both share links by max-min fairness. SimGrid runs without cross-traffic, without weights by bandwidth, without bounds by
//! TCP's window and with factors of 1. Neither's time counts what reads or builds the platform and its routes. Flits are measured
//! alone: SimGrid has none.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use clap::Args;
use polder_platform::{Fabric, Platform, Topology};
use polder_sim::Fidelity;
use polder_sim::contention::{
    FabricQuestion, FlitOptions, Flow, Network, Routing, TrafficPattern, answer, finish_times,
};

use super::peer::Peer;
use crate::Failure;
use polder_measure::Scratch;
use polder_measure::{Better, Kind, Row, Sample};

/// SimGrid's own names of what makes it share as is described above.
const OPTIONS: [&str; 6] = [
    "--log=root.thresh:warning",
    "--cfg=network/crosstraffic:0",
    "--cfg=network/weight-S:0",
    "--cfg=network/TCP-gamma:1e30",
    "--cfg=network/bandwidth-factor:1",
    "--cfg=network/latency-factor:1",
];

const HOSTS: [u32; 2] = [1024, 4096];
const RUNS: usize = 7;
const BYTES: f64 = 1e9;
/// Seconds of a link, the same of all.
const LATENCY: f64 = 500e-9;

/// What is measured.
#[derive(Args)]
pub(super) struct Arguments {
    /// Measure without SimGrid.
    #[arg(long)]
    alone: bool,
}

/// Simulates the same flows in turn.
pub(super) fn run(arguments: &Arguments) -> Result<Vec<Row>, Failure> {
    let scratch = Scratch::new()?;
    let peer = (!arguments.alone).then(|| PEER.compile(scratch.path())).transpose()?;
    let mut rows = vec![];
    for hosts in HOSTS {
        let case = Case::new(hosts)?;
        let file = scratch.path().join("flows");
        if peer.is_some() {
            std::fs::write(&file, case.text())?;
        }
        let [mut ours, mut routed, mut theirs] = [(); 3].map(|()| vec![]);
        let mut apart: f64 = 0.0;
        for _ in 0..RUNS {
            let begin = Instant::now();
            let ends = finish_times(&case.capacities, &case.flows);
            ours.push(case.rate(begin.elapsed().as_secs_f64()));
            let begin = Instant::now();
            let again = Case::new(hosts)?;
            let same = finish_times(&again.capacities, &again.flows);
            routed.push(case.rate(begin.elapsed().as_secs_f64()));
            if same != ends {
                return Err(Failure("the same flows ended at other times".into()));
            }
            if let Some(program) = &peer {
                let (seconds, other) = simgrid(program, &file, ends.len())?;
                theirs.push(case.rate(seconds));
                apart = ends
                    .iter()
                    .zip(other)
                    .map(|(one, other)| (one / other - 1.0).abs())
                    .fold(apart, f64::max);
            }
        }
        let name = format!("permutation on {hosts} hosts");
        let sample = |values| Sample::of(values).ok_or_else(|| Failure("no run".into()));
        let row = Row::measured("fabric", name.clone(), "rate", sample(ours)?, "M/s");
        let with_routes = Row::measured(
            "fabric",
            format!("{name}, with its network and routes"),
            "rate",
            sample(routed)?,
            "M/s",
        );
        match Sample::of(theirs) {
            None => rows.extend([row, with_routes]),
            Some(theirs) => {
                rows.push(row.beside("SimGrid", theirs.median, Better::More));
                rows.push(with_routes);
                let difference = Sample::one(apart * 100.0);
                let row = Row::measured("fabric", name, "ends apart, at most", difference, "%");
                rows.push(Row { kind: Kind::Simulated, ..row });
            }
        }
    }
    rows.extend(flits()?);
    Ok(rows)
}

/// Flits over the links of a permutation that meets on many of them, and a windowed all-reduce of 1 GiB.
fn flits() -> Result<[Row; 2], Failure> {
    let permutation = FabricQuestion {
        platform: "nvl72-cxl".into(),
        rack: None,
        accelerators: 256,
        pattern: TrafficPattern::Permutation,
        message_bytes: 1048576.0,
        routing: Routing::Minimal,
        failed: vec![],
        seed: 1,
        fidelity: Fidelity::L2,
        flits: FlitOptions::default(),
    };
    let flits = FlitOptions { window_bytes: Some(16.0 * 1048576.0), ..FlitOptions::default() };
    let all_reduce = FabricQuestion {
        accelerators: 72,
        pattern: TrafficPattern::AllReduce,
        message_bytes: f64::from(1 << 30),
        flits,
        ..permutation.clone()
    };
    let [mut rates, mut seconds] = [(); 2].map(|()| vec![]);
    for _ in 0..RUNS {
        let begin = Instant::now();
        let by_flits = answer(&permutation)?;
        let hops = by_flits.flits.map_or(0, |it| it.flit_hops);
        rates.push(hops as f64 / begin.elapsed().as_secs_f64() / 1e6);
        let begin = Instant::now();
        answer(&all_reduce)?;
        seconds.push(begin.elapsed().as_secs_f64());
    }
    let sample = |values| Sample::of(values).ok_or_else(|| Failure("no run".into()));
    Ok([
        Row::measured(
            "fabric",
            "flits of a permutation on 256 accelerators",
            "rate",
            sample(rates)?,
            "M hops/s",
        ),
        Row::measured(
            "fabric",
            "all-reduce of 1 GiB on 72 accelerators, windowed",
            "time",
            sample(seconds)?,
            "s",
        ),
    ])
}

/// A permutation and the links of it.
struct Case {
    hosts: u32,
    capacities: Vec<f64>,
    flows: Vec<Flow>,
    pairs: Vec<(u32, u32)>,
}

impl Case {
    /// Hosts of one half send to the other half's and back, at random, so that all routes have as many links.
    fn new(hosts: u32) -> Result<Self, Failure> {
        let platform = Platform::load("nvl72-ndr")?;
        let between =
            platform.between.ok_or_else(|| Failure("nvl72-ndr has no fabric between racks".into()))?;
        // Two levels of 64 ports end at 2,048.
        let levels = if hosts <= 2048 { 2 } else { 3 };
        let fabric = Fabric { links: 1, topology: Topology::Clos { levels }, ..between };
        let failed = |error: polder_sim::contention::NetworkError| Failure(error.to_string());
        let mut network = Network::new(&fabric, hosts).map_err(failed)?;
        let half = hosts / 2;
        let mut state = 1;
        let mut pairs = vec![];
        for (first, other) in [(0, half), (half, 0)] {
            let mut to: Vec<_> = (other..other + half).collect();
            for last in (1..to.len()).rev() {
                state = next(state);
                to.swap(last, (state >> 33) as usize % (last + 1));
            }
            pairs.extend((first..first + half).zip(to));
        }
        let route = |(from, to): &(u32, u32)| {
            let links = network.route(*from, *to, Routing::Minimal)?;
            let start_s = links.len() as f64 * LATENCY;
            Ok(Flow { links, bytes: BYTES, start_s })
        };
        let flows: Vec<Flow> = pairs.iter().map(route).collect::<Result<_, _>>().map_err(failed)?;
        if flows.iter().any(|flow| flow.links.len() != flows[0].links.len()) {
            return Err(Failure("routes of unequal length".into()));
        }
        Ok(Self { hosts, capacities: vec![fabric.link.payload().value(); network.len()], flows, pairs })
    }

    /// Millions of flows a second.
    fn rate(&self, seconds: f64) -> f64 {
        self.flows.len() as f64 / seconds / 1e6
    }

    /// What SimGrid's side reads.
    fn text(&self) -> String {
        let mut text = format!("{} {} {}\n", self.hosts, self.capacities.len(), self.flows.len());
        for capacity in &self.capacities {
            let _ = writeln!(text, "{capacity} {LATENCY}");
        }
        for (flow, (from, to)) in self.flows.iter().zip(&self.pairs) {
            let _ = write!(text, "{from} {to} {} {}", flow.bytes, flow.links.len());
            flow.links.iter().for_each(|link| {
                let _ = write!(text, " {link}");
            });
            text.push('\n');
        }
        text
    }
}

const fn next(state: u64) -> u64 {
    state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407)
}

/// SimGrid's side.
const PEER: Peer = Peer {
    name: "SimGrid's side",
    source: ("simgrid.cpp", include_str!("simgrid.cpp")),
    compiler: "c++",
    options: &["-O2", "-std=c++17"],
    library: "-lsimgrid",
    packages: "g++ libsimgrid-dev",
};

/// SimGrid's seconds, and when each flow ends.
fn simgrid(program: &Path, flows: &Path, count: usize) -> Result<(f64, Vec<f64>), Failure> {
    let ended = Command::new(program).arg(flows).args(OPTIONS).output()?;
    let text = String::from_utf8_lossy(&ended.stdout);
    let figures: Vec<f64> = text.lines().filter_map(|line| line.parse().ok()).collect();
    match figures.split_first() {
        Some((seconds, ends)) if ended.status.success() && ends.len() == count => {
            Ok((*seconds, ends.to_vec()))
        }
        _ => {
            let why = String::from_utf8_lossy(&ended.stderr);
            Err(Failure(format!("SimGrid's side failed: {}", why.trim())))
        }
    }
}
