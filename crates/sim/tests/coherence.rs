//! Rates of coherent regions by characteristic times, beside a run over all lines with exact caches and an exact snoop filter.

use polder_sim::memory::{CoherentRack, RegionLoad, RegionRates};

/// What two ways to the same rates may differ by: a designer who reads a hit rate off a table cannot tell 5% apart, because caches of two products differ
/// by more. Beside it stands what a run of so many accesses scatters by.
const APART: f64 = 0.05;
const SIGMAS: f64 = 3.0;
/// Accesses of an accelerator to each line, on average, before any is counted: more than twice as long as any line here stays unused in a cache.
const BEFORE: usize = 8;

/// The lines that a cache or the filter holds, the least recently used first: a list through an array.
struct Recent {
    before: Vec<u32>,
    after: Vec<u32>,
    count: usize,
}

const NOWHERE: u32 = u32::MAX;

impl Recent {
    fn new(lines: usize) -> Self {
        let end = lines as u32;
        let mut its = Self { before: vec![NOWHERE; lines + 1], after: vec![NOWHERE; lines + 1], count: 0 };
        (its.before[lines], its.after[lines]) = (end, end);
        its
    }

    fn has(&self, line: u32) -> bool {
        self.after[line as usize] != NOWHERE
    }

    fn remove(&mut self, line: u32) {
        if self.has(line) {
            let (before, after) = (self.before[line as usize], self.after[line as usize]);
            self.after[before as usize] = after;
            self.before[after as usize] = before;
            self.after[line as usize] = NOWHERE;
            self.count -= 1;
        }
    }

    fn touch(&mut self, line: u32) {
        self.remove(line);
        let end = self.after.len() - 1;
        let last = self.before[end];
        (self.before[line as usize], self.after[line as usize]) = (last, end as u32);
        self.after[last as usize] = line;
        self.before[end] = line;
        self.count += 1;
    }

    /// The one that was used the longest ago, if there are as many as there may be.
    fn full(&self, most: usize) -> Option<u32> {
        (self.count >= most).then(|| self.after[self.after.len() - 1])
    }
}

/// Numbers from a seed (xorshift64*, Vigna 2016), which are not those of the crate.
struct Draws(u64);

impl Draws {
    fn unit(&mut self) -> f64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// Who accesses next.
#[derive(Clone, Copy, PartialEq)]
enum Next {
    Any,
    InTurn,
}

struct Region {
    caches: Vec<Recent>,
    cached: usize,
    filter: Recent,
    entries: usize,
    /// The accelerators that cache each line, and whether the only one may write it.
    sharers: Vec<Vec<u32>>,
    is_owned: Vec<bool>,
    seen: RegionRates,
}

impl Region {
    /// Rates of `turns` accesses of each accelerator to each line, on average, once caches that began empty are as they stay.
    fn follow(load: &RegionLoad, next: Next, turns: usize) -> RegionRates {
        let lines = load.lines as usize;
        let mut region = Self {
            caches: (0..load.accelerators).map(|_| Recent::new(lines)).collect(),
            cached: load.cached as usize,
            filter: Recent::new(lines),
            entries: load.filter as usize,
            sharers: vec![vec![]; lines],
            is_owned: vec![false; lines],
            seen: RegionRates::default(),
        };
        let mut draws = Draws(0x9e37_79b9_7f4a_7c15);
        let each = load.accelerators as usize * lines;
        for at in 0..(BEFORE + turns) * each {
            if at == BEFORE * each {
                region.seen = RegionRates::default();
            }
            let accelerator = match next {
                Next::InTurn => at as u32 % load.accelerators,
                Next::Any => (draws.unit() * f64::from(load.accelerators)) as u32,
            };
            let line = zipf(draws.unit(), load.lines, load.skew);
            region.access(accelerator, line, draws.unit() < load.writes);
        }
        let per_access = 1.0 / (turns * each) as f64;
        let RegionRates { hits, filter_misses, back_invalidations, invalidations, waited } = region.seen;
        RegionRates {
            hits: hits * per_access,
            filter_misses: filter_misses * per_access,
            back_invalidations: back_invalidations * per_access,
            invalidations: invalidations * per_access,
            waited: waited * per_access,
        }
    }

    fn access(&mut self, accelerator: u32, line: u32, is_write: bool) {
        let (own, at) = (accelerator as usize, line as usize);
        let may = !is_write || self.is_owned[at] && self.sharers[at] == [accelerator];
        if self.caches[own].has(line) && may {
            self.seen.hits += 1.0;
            return self.caches[own].touch(line);
        }
        if !self.filter.has(line) {
            self.seen.filter_misses += 1.0;
            if let Some(victim) = self.filter.full(self.entries) {
                self.back_invalidate(victim);
            }
        }
        self.filter.touch(line);
        if is_write {
            for other in std::mem::take(&mut self.sharers[at]) {
                if other != accelerator {
                    self.caches[other as usize].remove(line);
                    self.seen.invalidations += 1.0;
                }
            }
        }
        if !self.caches[own].has(line)
            && let Some(victim) = self.caches[own].full(self.cached)
        {
            self.caches[own].remove(victim);
            let sharers = &mut self.sharers[victim as usize];
            sharers.retain(|it| *it != accelerator);
            if sharers.is_empty() {
                self.filter.remove(victim);
            }
        }
        self.caches[own].touch(line);
        if !self.sharers[at].contains(&accelerator) {
            self.sharers[at].push(accelerator);
        }
        self.is_owned[at] = is_write;
    }

    fn back_invalidate(&mut self, victim: u32) {
        let copies = std::mem::take(&mut self.sharers[victim as usize]);
        copies.iter().for_each(|sharer| self.caches[*sharer as usize].remove(victim));
        self.seen.back_invalidations += copies.len() as f64;
        self.seen.waited += f64::from(u8::from(!copies.is_empty()));
        self.filter.remove(victim);
    }
}

/// A line by Zipf's law, which is taken to be continuous.
fn zipf(draw: f64, lines: f64, skew: f64) -> u32 {
    let exponent = 1.0 - skew;
    let at = (draw * ((lines + 1.0).powf(exponent) - 1.0) + 1.0).powf(1.0 / exponent);
    (at - 1.0).min(lines - 1.0) as u32
}

/// A region with a cache and a filter that are such parts of it.
fn load(accelerators: u32, lines: f64, [cached, filter]: [f64; 2], [skew, writes]: [f64; 2]) -> RegionLoad {
    RegionLoad { accelerators, lines, cached: lines * cached, filter: lines * filter, writes, skew }
}

/// Mean seconds of an access, as [`CoherentRack::region`] has them.
fn seconds(rack: &CoherentRack, load: &RegionLoad, rates: &RegionRates) -> f64 {
    let waits = rates.invalidations.min(load.writes) + rates.waited;
    rates.hits * rack.own_s + (1.0 - rates.hits) * rack.load_s + waits * rack.snoop_s
}

/// Holds rates against a run over all lines: the error of hits, as a part of them.
fn hold(rack: &CoherentRack, load: &RegionLoad, turns: usize, broken: &mut Vec<String>) -> f64 {
    let (exact, predicted) = (Region::follow(load, Next::Any, turns), load.rates().unwrap());
    let count = turns as f64 * load.lines * f64::from(load.accelerators);
    let off = predicted.hits / exact.hits - 1.0;
    let times = [&exact, &predicted].map(|rates| seconds(rack, load, rates));
    let RegionLoad { accelerators, lines, cached, filter, writes, skew } = load;
    println!(
        "{accelerators} x {lines} lines, cache {cached}, filter {filter}, writes {writes}, skew {skew}: hits {:.4}, exact {:.4}, off {:+.1}%; time {:+.1}%",
        predicted.hits,
        exact.hits,
        100.0 * off,
        100.0 * (times[1] / times[0] - 1.0)
    );
    println!("    {predicted:?}\n    {exact:?}");
    for (name, exact, predicted) in [
        ("hits", exact.hits, predicted.hits),
        ("filter misses", exact.filter_misses, predicted.filter_misses),
        ("invalidations", exact.invalidations, predicted.invalidations),
    ] {
        let may = APART * exact + SIGMAS * (exact / count).sqrt();
        if (predicted - exact).abs() > may {
            broken.push(format!("{load:?}: {name} {predicted}, exact {exact}, may differ by {may}"));
        }
    }
    if (times[1] / times[0] - 1.0).abs() > APART {
        broken.push(format!("{load:?}: seconds, exact and found: {times:?}"));
    }
    off
}

#[test]
fn rates_are_those_of_exact_caches_at_two_sizes_and_three_skews() {
    let rack = CoherentRack::new("nvl72-cxl", None).unwrap();
    // Caches bind, the filter binds, and both do.
    let parts = [[0.25, 1.0], [0.25, 0.125], [0.05, 0.2]];
    let (mut worst, mut broken) = (0.0_f64, vec![]);
    let mut hold = |load: RegionLoad, turns| worst = worst.max(hold(&rack, &load, turns, &mut broken).abs());
    for skew in [0.0, 0.8, 1.2] {
        for parts in parts {
            hold(load(8, 32_768.0, parts, [skew, 0.05]), 2);
            for writes in [0.0, 0.05, 0.3] {
                hold(load(8, 4096.0, parts, [skew, writes]), 6);
            }
        }
        hold(load(72, 4096.0, [0.0625, 0.25], [skew, 0.05]), 2);
    }
    println!("hits are {:.1}% off at worst", 100.0 * worst);
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn accelerators_in_turn_hit_less_on_popular_lines_that_are_written() {
    let load = load(8, 4096.0, [0.25, 1.0], [1.2, 0.3]);
    let [any, in_turn] = [Next::Any, Next::InTurn].map(|next| Region::follow(&load, next, 6).hits);
    println!("hits {any:.4}, in turn {in_turn:.4}");
    assert!(in_turn < any && in_turn > 0.9 * any, "{in_turn}, {any}");
}
