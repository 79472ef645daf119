//! `polder-dev bench pages`: accesses to the pages of four services on two tiers, beside the plainest C that decides the same.
//!
//! Both follow the same trace, in turn: services that are accessed by zipf, with hot pages that wander, so that pages are
//! promoted and demoted in each generation, and bounds of fair share. Neither's time counts what makes or reads the trace.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use clap::Args;
use polder_dev::trace::Zipf;
use polder_place::pages::{LocalBounds, ServicePolicy, TierRule};
use polder_sim::Random;
use polder_sim::pages::{Control, Kernel, Pages, Seen, Service};

use super::peer::Peer;
use crate::Failure;
use polder_measure::Scratch;
use polder_measure::{Better, Row, Sample};

const SERVICES: u32 = 4;
const RUNS: usize = 5;
/// Thousandths of its pages that a service may have on the fast tier.
const LOCAL_HIGH: u32 = 720;

/// How much is simulated.
#[derive(Args)]
pub(super) struct Arguments {
    /// Pages of all services, a power of two from 65536 on.
    #[arg(long, default_value_t = 1 << 22, value_parser = power_of_two)]
    pages: u32,
    /// Generations that are timed, each with as many accesses as there are pages.
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u32).range(1..=100))]
    generations: u32,
    /// Measure without the C model.
    #[arg(long)]
    alone: bool,
}

fn power_of_two(text: &str) -> Result<u32, String> {
    let expected = || format!("expected a power of two from 65536 to {}, found {text:?}", 1_u32 << 30);
    let pages = text.parse().map_err(|_| expected())?;
    (u32::is_power_of_two(pages) && (1 << 16..=1 << 30).contains(&pages))
        .then_some(pages)
        .ok_or_else(expected)
}

/// Measures both in turn.
pub(super) fn run(arguments: &Arguments) -> Result<Vec<Row>, Failure> {
    let scratch = Scratch::new()?;
    let peer = (!arguments.alone).then(|| PEER.compile(scratch.path())).transpose()?;
    let case = Case::new(arguments.pages, arguments.generations)?;
    let file = scratch.path().join("trace");
    if peer.is_some() {
        std::fs::write(&file, case.bytes()?)?;
    }
    let [mut ours, mut theirs] = [(); 2].map(|()| vec![]);
    for _ in 0..RUNS {
        let simulated = case.simulate()?;
        ours.push(case.rate(simulated.seconds));
        if let Some(program) = &peer {
            let other = plain(program, &file)?;
            if (&other.seen, other.hash) != (&simulated.seen, simulated.hash) {
                return Err(Failure("the C model and polder_sim::pages decided otherwise".into()));
            }
            theirs.push(case.rate(other.seconds));
        }
    }
    let name = format!("{} Mi pages, {SERVICES} services", f64::from(arguments.pages) / f64::from(1 << 20));
    let sample = Sample::of(ours).ok_or_else(|| Failure("no run".into()))?;
    let row = Row::measured("pages", name, "accesses", sample, "M/s");
    Ok(vec![match Sample::of(theirs) {
        Some(theirs) => row.beside("plain C", theirs.median, Better::More),
        None => row,
    }])
}

/// A host, and the accesses of each generation; the first one fills it.
struct Case {
    kernel: Kernel,
    services: Vec<Service>,
    control: Control,
    generations: Vec<Vec<u32>>,
}

/// What became of the pages.
#[derive(Debug, PartialEq)]
struct Found {
    seconds: f64,
    seen: Vec<Seen>,
    /// Of where each page lies (FNV-1a).
    hash: u64,
}

impl Case {
    fn new(pages: u32, generations: u32) -> Result<Self, Failure> {
        let each = pages / SERVICES;
        let local = LocalBounds { low: 0.0, high: f64::from(LOCAL_HIGH) / 1000.0 };
        let policy = ServicePolicy { rule: TierRule::OptIn, local: Some(local), slow_cache: false };
        let service = |index| Service { name: format!("s{index}"), pages: each, policy, limit: None };
        let services: Vec<_> = (0..SERVICES).map(service).collect();
        // 3:1, with an eighth of the slow tier to spare.
        let kernel = Kernel {
            fast_pages: pages / 4 * 3,
            slow_pages: pages / 4 + pages / 32,
            min_free: pages / 1024,
            low_free: pages / 512,
            high_free: pages / 256,
            scan: pages / 128,
            hot_age: 0,
            promotions: u32::MAX,
            demotions: u32::MAX,
        };
        let control = Control { step: pages / 256, free_low: 0.0, free_high: 0.0 };
        let first = |service: u32| Pages::new(kernel, &services).map(|it| it.first_page(service as usize));
        let firsts: Vec<u32> = (0..SERVICES).map(first).collect::<Result<_, _>>()?;
        let (zipf, mut random) = (Zipf::new(each, 0.9), Random::new(1));
        let mut traces = vec![firsts.iter().flat_map(|first| *first..first + each).collect()];
        for generation in 0..generations {
            let access = |_| {
                let bits = random.bits();
                // An odd factor strews ranks over the pages, each to one; hot ranks wander by a hundredth.
                let rank = zipf.draw(&mut random) + generation * (each / 100);
                firsts[bits as usize % firsts.len()] + rank.wrapping_mul(0x9e37_79b1) % each
            };
            traces.push((0..pages).map(access).collect());
        }
        Ok(Self { kernel, services, control, generations: traces })
    }

    /// Millions of accesses a second.
    fn rate(&self, seconds: f64) -> f64 {
        self.generations[1..].iter().map(Vec::len).sum::<usize>() as f64 / seconds / 1e6
    }

    fn simulate(&self) -> Result<Found, Failure> {
        let mut pages = Pages::new(self.kernel, &self.services)?;
        let mut seconds = 0.0;
        for (number, trace) in self.generations.iter().enumerate() {
            let begin = Instant::now();
            pages.access(trace);
            pages.advance();
            pages.round(number as u64 + 1, self.control);
            if number > 0 {
                seconds += begin.elapsed().as_secs_f64();
            }
        }
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for (index, service) in self.services.iter().enumerate() {
            let first = pages.first_page(index);
            for page in first..first + service.pages {
                let place = pages.is_slow(page).map_or(0, |is_slow| 1 + u64::from(is_slow));
                hash = (hash ^ place).wrapping_mul(0x0100_0000_01b3);
            }
        }
        let seen = (0..self.services.len()).map(|service| pages.seen(service)).collect();
        Ok(Found { seconds, seen, hash })
    }

    /// What the C model reads.
    fn bytes(&self) -> Result<Vec<u8>, Failure> {
        let Kernel {
            fast_pages, slow_pages, min_free, low_free, high_free, scan, hot_age, promotions, ..
        } = self.kernel;
        let mut numbers = vec![fast_pages, slow_pages, min_free, low_free, high_free, scan, hot_age.into()];
        numbers.extend([promotions, LOCAL_HIGH, self.control.step, self.services.len() as u32]);
        let pages = Pages::new(self.kernel, &self.services)?;
        for (index, service) in self.services.iter().enumerate() {
            numbers.extend([pages.first_page(index), service.pages]);
        }
        numbers.push(self.generations.len() as u32);
        let mut bytes: Vec<u8> = numbers.into_iter().flat_map(u32::to_le_bytes).collect();
        for trace in &self.generations {
            bytes.extend((trace.len() as u32).to_le_bytes());
            bytes.extend(trace.iter().flat_map(|page| page.to_le_bytes()));
        }
        Ok(bytes)
    }
}

/// The C model.
const PEER: Peer = Peer {
    name: "the C model",
    source: ("pages.c", include_str!("pages.c")),
    compiler: "cc",
    options: &["-O2", "-std=c11", "-D_POSIX_C_SOURCE=199309L", "-Wall", "-Wextra", "-Werror"],
    library: "-lm",
    packages: "gcc",
};

/// What the C model says.
fn plain(program: &Path, trace: &Path) -> Result<Found, Failure> {
    let ended = Command::new(program).arg(trace).output()?;
    let text = String::from_utf8_lossy(&ended.stdout);
    let mut lines = text.lines();
    let seconds = lines.next().and_then(|line| line.parse().ok());
    let figures: Vec<u64> = lines.filter_map(|line| line.parse().ok()).collect();
    match (seconds, figures.split_last()) {
        (Some(seconds), Some((hash, figures))) if ended.status.success() => {
            let seen = figures.as_chunks::<10>().0.iter().map(seen).collect();
            Ok(Found { seconds, seen, hash: *hash })
        }
        _ => Err(Failure(format!("the C model failed: {}", ended.status))),
    }
}

fn seen(figures: &[u64; 10]) -> Seen {
    let [fast, slow, fast_accesses, slow_accesses, faults, promotions, refused, demotions, spills, failures] =
        *figures;
    let [fast, slow] = [fast, slow].map(|pages| pages as u32);
    Seen {
        fast,
        slow,
        fast_accesses,
        slow_accesses,
        faults,
        promotions,
        refused,
        demotions,
        spills,
        failures,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_c_model_makes_the_same_decisions() {
        let scratch = Scratch::new().unwrap();
        let program = PEER.compile(scratch.path()).unwrap();
        let case = Case::new(1 << 16, 40).unwrap();
        let file = scratch.path().join("trace");
        std::fs::write(&file, case.bytes().unwrap()).unwrap();
        let (ours, theirs) = (case.simulate().unwrap(), plain(&program, &file).unwrap());
        assert_eq!((&ours.seen, ours.hash), (&theirs.seen, theirs.hash));
        let all = |of: fn(&Seen) -> u64| ours.seen.iter().map(of).sum::<u64>();
        let [promotions, demotions] = [all(|it| it.promotions), all(|it| it.demotions)];
        assert!(promotions > 1000 && demotions > 1000, "{promotions} promotions, {demotions} demotions");
    }
}
