//! Table IX of the Vistara paper: two caches on one server, without bounds and with Fair Share.
//!
//! What keeps the bounds is given: `polder-dev` gives the agent itself.

use std::ops::Range;

use polder_platform::{DataError, Folder, read};
use polder_sim::Random;
use polder_sim::pages::{Kernel, Pages, PagesError, Service};
use serde::{Deserialize, Serialize};

use super::vistara::VistaraError;

/// The table, as data: `data/figures/vistara-table9.toml`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FairFigure {
    /// What it is, in a line.
    pub title: String,
    /// Where it was published.
    pub source: String,
    /// The machine.
    pub platform: String,
    fast_gb: f64,
    slow_gb: f64,
    unit_gb: [f64; 2],
    server_gb: [f64; 2],
    requests: f64,
    cores: f64,
    page_bytes: f64,
    reclaim_pages: f64,
    /// Simulated pages that stand for a GB.
    pub pages_a_gb: u32,
    /// GB that demotion keeps free of local memory.
    pub free_gb: f64,
    /// What B grows by in a generation: fitted.
    pub growth_gb: f64,
    heap: f64,
    heap_accesses: f64,
    accesses: u32,
    scan_gb: f64,
    /// GB that the kernel moves in a second when the agent asks for it.
    pub moves_gb: f64,
    spike_gb: f64,
    seed: u64,
    /// The parts of A and B that are local, without bounds.
    pub published_baseline: [f64; 2],
    /// The same with Fair Share.
    pub published_fair: [f64; 2],
    /// P99 of A and B in microseconds, without bounds and with Fair Share.
    pub published_p99_us: [[f64; 2]; 2],
    /// The part of A's requests that are lost in the spike, without bounds and with Fair Share.
    pub published_drop: [f64; 2],
    published_used_gb: [f64; 2],
    /// GB of local and of CXL memory of A and of B, without bounds and with Fair Share.
    published_gb: [[[f64; 2]; 2]; 2],
    /// The same two caches with nothing of the table.
    pub absolute: Absolute,
    /// What is taken to be so.
    pub assumed: Vec<String>,
    /// Why signs are as they are, as far as it is known.
    pub mechanism: Vec<String>,
}

/// What other parts of the paper say of the server and of such a cache.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Absolute {
    /// GB of both tiers that a cache had.
    pub tiers_gb: [f64; 2],
    unit_gb: f64,
    full_gb: f64,
    stays_s: [f64; 2],
    /// The part of the time of its cores that a service works.
    pub busy: f64,
    loaded_ns: [f64; 2],
    hint_faults_a_minute: f64,
    /// What is taken to be so.
    pub assumed: Vec<String>,
}

impl Absolute {
    /// GB a second that each of two caches brings: what one has on such a server, once in the time that it keeps an object.
    fn growth_gb(&self) -> f64 {
        let [least, most] = self.stays_s;
        self.full_gb / f64::midpoint(least, most) / 2.0
    }

    /// `memory.max` of each: half of the server.
    #[must_use]
    pub fn limit_gb(&self) -> f64 {
        self.tiers_gb.iter().sum::<f64>() / 2.0
    }
}

/// The server and both caches, in GB.
struct Scene {
    /// What is kept free of local memory not among it.
    tiers: [f64; 2],
    units: [f64; 2],
    limit: Option<f64>,
    /// What B grows by in a second.
    growth: f64,
    /// What B touches anew in its spike, and how much of it in a second.
    spike: [f64; 2],
    /// What the kernel demotes in a second at most.
    demotions: f64,
}

/// A figure of the table, and the same from nothing of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct JudgedRow {
    /// Which.
    pub what: String,
    /// As published.
    pub published: f64,
    /// As simulated.
    pub simulated: f64,
    /// Its unit: `GB`, `%`, `us`, or `killed` for 0 and 1.
    pub unit: &'static str,
    /// How far it may be off: a part of it for GB and us, else points.
    pub most: f64,
}

impl JudgedRow {
    /// How far it is off, as [`JudgedRow::most`] counts.
    #[must_use]
    pub fn off(&self) -> f64 {
        match self.unit {
            "GB" | "us" => self.simulated / self.published - 1.0,
            _ => self.simulated - self.published,
        }
    }

    /// Whether that is not too far.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.off().abs() <= self.most
    }
}

/// What could make requests wait, and how much at most by what the sources say of it. Nothing is fitted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Suspect {
    /// What.
    pub what: &'static str,
    /// Who says how much.
    pub source: &'static str,
    /// The part of the requests that it meets at most.
    pub part: f64,
    /// P99 with it, at most.
    pub p99_us: f64,
    /// The part of the requests that are lost, at most.
    pub drop: f64,
}

/// What keeps bounds: it gets the seconds since they were set, and the pages as each second ends.
pub type Keeper<'k> = &'k mut (dyn FnMut(u32, &mut Pages) + 'k);

/// What becomes of A and B.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct FairOutcome {
    /// The parts of each that are local, before the spike.
    pub local: [f64; 2],
    /// GB of local and of CXL memory of each, before the spike.
    pub gb: [[f64; 2]; 2],
    /// GB of local memory in use, before the spike.
    pub local_gb: f64,
    /// The part of A's accesses that go to CXL memory, before B's spike and in it.
    pub slow_accesses: [f64; 2],
    /// The least part of A that is local in the spike.
    pub least_local: f64,
    /// In the spike, GB of new and of hot pages that found no room in local memory.
    pub no_room_gb: f64,
    /// The parts of A's and B's requests that wait for room, before the spike.
    pub waits: [f64; 2],
    /// The same of A in the spike.
    pub spike_waits: f64,
    /// First touches that found no memory.
    pub failures: u64,
    /// Whether the kernel kills A, and B.
    pub killed: [bool; 2],
}

/// The table made again.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct FairReport {
    /// Both bounds of each cache.
    pub bound: f64,
    /// Without bounds.
    pub baseline: FairOutcome,
    /// With them.
    pub fair: FairOutcome,
}

impl FairReport {
    /// Whether A keeps more local memory in the spike with Fair Share, of what it had before.
    #[must_use]
    pub fn dip_is_smaller(&self) -> bool {
        let kept = |it: &FairOutcome| it.least_local / it.local[0];
        kept(&self.fair) > kept(&self.baseline)
    }

    /// Whether fewer new and hot pages wait for room with Fair Share.
    #[must_use]
    pub fn has_more_room(&self) -> bool {
        self.fair.no_room_gb < self.baseline.no_room_gb
    }

    /// Whether the spike sends fewer of A's accesses to CXL memory with Fair Share.
    #[must_use]
    pub fn spike_costs_less(&self) -> bool {
        let more = |it: &FairOutcome| it.slow_accesses[1] - it.slow_accesses[0];
        more(&self.fair) < more(&self.baseline)
    }
}

/// Points that a fraction may be off.
pub const FAIR_POINTS: f64 = 3.0;
/// Parts that a latency may be off.
pub const P99_PART: f64 = 0.25;
/// Points that a drop of requests may be off.
pub const DROP_POINTS: f64 = 10.0;
/// Parts that memory may be off.
pub const GB_PART: f64 = 0.1;

/// Generations of A alone, of both before the spike, and of the spike.
const ALONE: u32 = 60;
const STEADY: u32 = 600;
const SPIKE: u32 = 60;
/// How many times as many accesses B gets in the spike.
const SPIKED: u32 = 10;

impl FairFigure {
    /// Reads the table.
    ///
    /// # Errors
    /// When its file is damaged.
    pub fn load() -> Result<Self, DataError> {
        read(Folder::Figures, "vistara-table9")
    }

    /// Both bounds of each cache: the part of the server's memory that is local.
    #[must_use]
    pub fn bound(&self) -> f64 {
        self.server_gb[0] / (self.server_gb[0] + self.server_gb[1])
    }

    /// Microseconds that a request waits whose page finds no room.
    #[must_use]
    pub fn wait_us(&self) -> f64 {
        self.reclaim_pages * self.page_bytes / (self.moves_gb * 1e9) * 1e6
    }

    /// P99 of A and B without bounds in microseconds: the paper's with Fair Share, and what more than one request of a hundred waits more.
    #[must_use]
    pub fn p99_us(&self, report: &FairReport) -> [f64; 2] {
        let waits = |it: &FairOutcome, at: usize| if it.waits[at] > 0.01 { self.wait_us() } else { 0.0 };
        [0, 1].map(|at| self.published_p99_us[1][at] + waits(&report.baseline, at) - waits(&report.fair, at))
    }

    /// Microseconds of a core that there are for a request.
    fn core_us(&self) -> f64 {
        self.cores / 2.0 / self.requests * 1e6
    }

    /// P99 in microseconds of requests whose times are exponential, with the mean that a core works for one. A part of them waits for room.
    #[must_use]
    pub fn absolute_p99_us(&self, waits: f64) -> f64 {
        let (mean, wait) = (self.absolute.busy * self.core_us(), self.wait_us());
        let longer = |us: f64| {
            let after = |us: f64| (-us.max(0.0) / mean).exp();
            (1.0 - waits) * after(us) + waits * after(us - wait)
        };
        let (mut low, mut high) = (0.0, 100.0 * (mean + wait));
        for _ in 0..60 {
            let middle = f64::midpoint(low, high);
            if longer(middle) > 0.01 { low = middle } else { high = middle }
        }
        low
    }

    /// The part of the time in which some request waits for room, as PSI counts it: requests come independently.
    #[must_use]
    pub fn pressure(&self, waits: f64) -> f64 {
        -(-self.requests * waits * self.wait_us() * 1e-6).exp_m1()
    }

    /// What the sources name that could make requests wait. Of direct reclaim and of `memory.max` there is none: both need memory to run out,
    /// and the table leaves some.
    #[must_use]
    pub fn suspects(&self) -> [Suspect; 4] {
        let Absolute { busy, loaded_ns: [idle, loaded], hint_faults_a_minute, .. } = self.absolute;
        let (free, both) = (self.absolute_p99_us(0.0), 2.0 * self.requests);
        let drop = |longer: f64| (1.0 - 1.0 / (busy * longer)).max(0.0);
        // That of a part of the requests which wait for a move of 32 pages.
        let waits = |what, source, part: f64| {
            let longer = 1.0 + part * self.wait_us() / (busy * self.core_us());
            Suspect { what, source, part, p99_us: self.absolute_p99_us(part), drop: drop(longer) }
        };
        let all = |what, source, longer: f64, drop: f64| Suspect {
            what,
            source,
            part: 1.0,
            p99_us: free * longer,
            drop,
        };
        [
            all("loads take longer under load", "Table X", loaded / idle, drop(loaded / idle)),
            waits("hint faults", "Table VIII", hint_faults_a_minute / 60.0 / both),
            // Linux, node_reclaim: the bit PGDAT_RECLAIM_LOCKED of a node. Others take memory of the next node meanwhile.
            waits(
                "an allocation reclaims its node (zone_reclaim_mode=7), one task at a time",
                "section IV-B, Linux",
                1.0 / (self.wait_us() * 1e-6) / both,
            ),
            // M/M/1 in place of M/M/79: the time in the system is exponential, and 1/(1 - busy) as long.
            all(
                "each core has a queue of its own, in place of one for all",
                "sections V-A, V-G",
                1.0 / (1.0 - busy),
                0.0,
            ),
        ]
    }

    /// What the table needs: microseconds that more than one request of a hundred waits longer without bounds, of A and of B; and requests of A
    /// that wait at any time in the spike, by Little's law.
    #[must_use]
    pub fn needed(&self) -> ([f64; 2], f64) {
        let [without, fair] = self.published_p99_us;
        let mean_us = self.core_us() / (1.0 - self.published_drop[0]) - self.core_us();
        let still = self.requests * (1.0 - self.published_drop[0]);
        ([0, 1].map(|at| without[at] - fair[at]), still * mean_us * 1e-6)
    }

    /// Each figure of the table beside what follows from nothing of it.
    #[must_use]
    pub fn judge(&self, report: &FairReport) -> Vec<JudgedRow> {
        let mut rows = vec![];
        let sides = [("without bounds", &report.baseline), ("Fair Share", &report.fair)];
        let fractions = [self.published_baseline, self.published_fair];
        for (side, (words, outcome)) in sides.into_iter().enumerate() {
            for (at, name) in ["A", "B"].into_iter().enumerate() {
                let mut row = |what: &str, published, simulated, unit, most| {
                    let what = format!("{name}, {words}: {what}");
                    rows.push(JudgedRow { what, published, simulated, unit, most });
                };
                for (tier, tier_name) in ["local memory", "CXL memory"].into_iter().enumerate() {
                    row(tier_name, self.published_gb[side][at][tier], outcome.gb[at][tier], "GB", GB_PART);
                }
                let local = 100.0 * outcome.local[at];
                row("part that is local", 100.0 * fractions[side][at], local, "%", FAIR_POINTS);
                let p99 = self.absolute_p99_us(outcome.waits[at]);
                row("P99", self.published_p99_us[side][at], p99, "us", P99_PART);
                if at == 0 {
                    let drop = 100.0 * self.drop(outcome);
                    row(
                        "drop of requests in B's spike",
                        100.0 * self.published_drop[side],
                        drop,
                        "%",
                        DROP_POINTS,
                    );
                    let killed = f64::from(u8::from(outcome.killed[0]));
                    row("killed in B's spike", f64::from(u8::from(side == 0)), killed, "killed", 0.0);
                }
            }
        }
        rows
    }

    /// The part of A's requests that are lost in the spike, because others wait longer.
    #[must_use]
    pub fn drop(&self, outcome: &FairOutcome) -> f64 {
        let core_us = self.core_us();
        let [before, spike] =
            [outcome.waits[0], outcome.spike_waits].map(|part| core_us + part * self.wait_us());
        1.0 - before / spike
    }

    /// GB of both tiers, with what is kept free of local memory.
    #[must_use]
    pub fn tiers_gb(&self) -> [f64; 2] {
        [self.fast_gb + self.free_gb, self.slow_gb]
    }

    /// Follows both caches without bounds, and with those that `keeper` keeps. A and B are the services 0 and 1.
    ///
    /// # Errors
    /// When the file is damaged.
    pub fn beside(&self, keeper: Keeper<'_>) -> Result<FairReport, VistaraError> {
        let units = self.unit_gb;
        self.both(
            keeper,
            &Scene {
                tiers: [self.fast_gb, self.slow_gb],
                units,
                limit: None,
                growth: self.growth_gb,
                spike: [self.spike_gb, self.spike_gb / 2.0],
                demotions: f64::INFINITY,
            },
        )
    }

    /// The same with nothing of the table: what other parts of the paper say of the server and of such a cache.
    ///
    /// # Errors
    /// As [`FairFigure::beside`].
    pub fn absolute(&self, keeper: Keeper<'_>) -> Result<FairReport, VistaraError> {
        let Absolute { tiers_gb, unit_gb, .. } = self.absolute;
        let (growth, limit) = (self.absolute.growth_gb(), self.absolute.limit_gb());
        self.both(
            keeper,
            &Scene {
                tiers: tiers_gb,
                units: [unit_gb; 2],
                limit: Some(limit),
                growth,
                // Its requests bring as many times more, until it has all that it may have.
                spike: [limit - unit_gb, f64::from(SPIKED) * growth],
                demotions: self.moves_gb,
            },
        )
    }

    fn both(&self, keeper: Keeper<'_>, scene: &Scene) -> Result<FairReport, VistaraError> {
        let baseline = self.follow(scene, None)?;
        let fair = self.follow(scene, Some(keeper))?;
        Ok(FairReport { bound: self.bound(), baseline, fair })
    }

    /// GB that nobody uses in the paper's table, without bounds and with Fair Share.
    #[must_use]
    pub fn unused_gb(&self) -> [f64; 2] {
        self.published_used_gb.map(|used| self.fast_gb + self.slow_gb - used)
    }

    fn pages_of(&self, gb: f64) -> u32 {
        (gb * f64::from(self.pages_a_gb)).round() as u32
    }

    fn follow(&self, scene: &Scene, keeper: Option<Keeper<'_>>) -> Result<FairOutcome, PagesError> {
        let sizes = scene.units.map(|gb| self.pages_of(gb));
        let limit = scene.limit.map(|gb| self.pages_of(gb));
        let service = |(name, pages): (&str, u32)| Service { limit, ..Service::opt_in(name, pages) };
        let [spike, spike_step] = scene.spike.map(|gb| self.pages_of(gb));
        let services = [("A", sizes[0]), ("B", sizes[1] + spike)].map(service);
        let free = self.pages_of(self.free_gb);
        let kernel = Kernel {
            fast_pages: self.pages_of(scene.tiers[0]) + free,
            slow_pages: self.pages_of(scene.tiers[1]),
            min_free: 0,
            low_free: free,
            high_free: free,
            scan: self.pages_of(self.scan_gb),
            hot_age: 0,
            promotions: u32::MAX,
            demotions: self.pages_of(scene.demotions),
        };
        let pages = Pages::new(kernel, &services)?;
        let heap = |pages: u32| (f64::from(pages) * self.heap) as u32;
        let cache = |at: usize| Cache {
            first: pages.first_page(at),
            heap: heap(sizes[at]),
            pages: sizes[at],
            figure: self,
        };
        let caches = [cache(0), cache(1)];
        let mut host = Host { pages, caches, keeper: None, random: Random::new(self.seed), second: 0 };
        // A is whole before B starts, and B grows.
        let [a, b] = caches;
        host.pages.access(&(a.first..a.first + a.pages).collect::<Vec<_>>());
        host.run(ALONE, [1, 0], 0..0, 0);
        let growth = self.pages_of(scene.growth).max(1);
        let mut whole = 0;
        while whole < b.pages {
            let next = (whole + growth).min(b.pages);
            host.pages.access(&(b.first + whole..b.first + next).collect::<Vec<_>>());
            whole = next;
            host.caches[1].pages = whole;
            host.generation([1, 1]);
        }
        host.keeper = keeper;
        let no_room = |host: &Host<'_, '_>| {
            [0, 1].map(|at| {
                let seen = host.pages.seen(at);
                (seen.refused + seen.spills) as f64
            })
        };
        // Of the requests of a service in so many seconds, those that meet a page without room.
        let waits = |pages: f64, seconds: u32| {
            let met = pages / f64::from(self.pages_a_gb) * 1e9 / self.page_bytes;
            (met / (self.requests * f64::from(seconds))).min(1.0)
        };
        let at_first = no_room(&host);
        let before = host.run(STEADY, [1, 1], 0..0, 0);
        let shares = [0, 1].map(|at| {
            let seen = host.pages.seen(at);
            f64::from(seen.fast) / f64::from(seen.fast + seen.slow)
        });
        let used = [0, 1].map(|at| f64::from(host.pages.seen(at).fast)).iter().sum::<f64>();
        let no_room_before = no_room(&host);
        let end = b.first + b.pages;
        let gb = [0, 1].map(|at| {
            let seen = host.pages.seen(at);
            [seen.fast, seen.slow].map(|pages| f64::from(pages) / f64::from(self.pages_a_gb))
        });
        let spike = host.run(SPIKE, [1, SPIKED], end..end + spike, spike_step);
        let in_spike = [0, 1].map(|at| no_room(&host)[at] - no_room_before[at]);
        Ok(FairOutcome {
            local: shares,
            gb,
            local_gb: used / f64::from(self.pages_a_gb),
            slow_accesses: [before.0, spike.0],
            least_local: spike.1,
            no_room_gb: in_spike.iter().sum::<f64>() / f64::from(self.pages_a_gb),
            waits: [0, 1].map(|at| waits(no_room_before[at] - at_first[at], STEADY)),
            spike_waits: waits(in_spike[0], SPIKE),
            failures: [0, 1].map(|at| host.pages.seen(at).failures).iter().sum(),
            killed: [0, 1].map(|at| host.pages.seen(at).failures > 0),
        })
    }
}

/// A cache: a heap, and objects.
#[derive(Clone, Copy)]
struct Cache<'a> {
    first: u32,
    heap: u32,
    /// Pages that it has touched.
    pages: u32,
    figure: &'a FairFigure,
}

/// Both caches on their host.
struct Host<'a, 'k> {
    pages: Pages,
    caches: [Cache<'a>; 2],
    keeper: Option<Keeper<'k>>,
    random: Random,
    /// Since bounds were set.
    second: u32,
}

impl Host<'_, '_> {
    /// A generation in which each cache gets so many times its accesses.
    fn generation(&mut self, times: [u32; 2]) {
        let mut trace = vec![];
        for (cache, times) in self.caches.iter().zip(times) {
            for _ in 0..cache.figure.accesses * times {
                let is_heap = self.random.unit() < cache.figure.heap_accesses;
                // The heap has the first pages.
                let among = if is_heap { cache.heap.min(cache.pages) } else { cache.pages };
                trace.push(cache.first + self.random.below(among));
            }
        }
        self.pages.access(&trace);
        self.pages.advance();
        if let Some(keeper) = &mut self.keeper {
            keeper(self.second, &mut self.pages);
            self.second += 1;
        }
    }

    /// So many generations, in the first of which pages are touched anew, so many in each: the part of A's accesses that go to the slow tier,
    /// and the least part of A that is fast.
    fn run(&mut self, generations: u32, times: [u32; 2], mut anew: Range<u32>, step: u32) -> (f64, f64) {
        let before = self.pages.seen(0);
        let mut least = 1.0_f64;
        for _ in 0..generations {
            let touched: Vec<_> = anew.by_ref().take(step as usize).collect();
            self.pages.access(&touched);
            self.generation(times);
            let seen = self.pages.seen(0);
            least = least.min(f64::from(seen.fast) / f64::from(seen.fast + seen.slow));
        }
        let after = self.pages.seen(0);
        let slow = (after.slow_accesses - before.slow_accesses) as f64;
        let fast = (after.fast_accesses - before.fast_accesses) as f64;
        (slow / (slow + fast), least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p99_is_that_of_exponential_times_and_of_what_waits() {
        let figure = FairFigure::load().unwrap();
        let mean = figure.absolute.busy * figure.core_us();
        let p99 = |waits: f64| figure.absolute_p99_us(waits);
        assert!((p99(0.0) / (mean * 100.0_f64.ln()) - 1.0).abs() < 1e-9);
        assert!((p99(1.0) - p99(0.0) - figure.wait_us()).abs() < 1e-6, "each waits");
        assert!(p99(0.0) < p99(0.01) && p99(0.01) < p99(0.5) && p99(0.5) < p99(1.0));
    }

    #[test]
    fn pressure_is_the_time_in_which_any_request_waits() {
        let figure = FairFigure::load().unwrap();
        assert_eq!(figure.pressure(0.0), 0.0);
        // So few waits hardly meet: their times add up.
        let few = 1e-6;
        let time = figure.requests * few * figure.wait_us() * 1e-6;
        assert!((figure.pressure(few) / time - 1.0).abs() < 1e-3);
        assert!(figure.pressure(0.5) > 0.99 && figure.pressure(1.0) <= 1.0);
    }

    #[test]
    fn nothing_that_the_sources_name_makes_requests_wait_as_long_as_the_table_says_but_queues_that_they_do_not_name()
     {
        let figure = FairFigure::load().unwrap();
        let free = figure.absolute_p99_us(0.0);
        let [load, faults, node, queues] = figure.suspects();
        let least = figure.published_p99_us[1][0];
        for suspect in [&load, &faults, &node] {
            assert!(free <= suspect.p99_us && suspect.p99_us < least && suspect.drop < 0.01, "{suspect:?}");
        }
        // One task at a time: the parts of its time add up to all of it.
        assert!((node.part * 2.0 * figure.requests * figure.wait_us() * 1e-6 - 1.0).abs() < 1e-9);
        assert!(node.part < 0.01 && node.p99_us > free, "fewer than one of a hundred");
        let published = figure.published_p99_us.as_flattened();
        assert!(published.iter().all(|p99| free < *p99 && *p99 < queues.p99_us), "{queues:?}");
        let (longer, waiting) = figure.needed();
        assert!(longer.iter().all(|us| *us > figure.wait_us()), "one move is not enough");
        // A has half of the cores: what it does not do waits.
        assert!((waiting - figure.cores / 2.0 * figure.published_drop[0]).abs() < 1e-9, "{waiting}");
    }

    #[test]
    fn a_row_counts_gb_and_us_as_parts_and_others_as_points() {
        let row = |published, simulated, unit, most| {
            let row = JudgedRow { what: String::new(), published, simulated, unit, most };
            (row.off(), row.holds())
        };
        assert_eq!(row(200.0, 250.0, "us", 0.25), (0.25, true));
        assert!(!row(200.0, 140.0, "us", 0.25).1);
        assert_eq!(row(74.0, 75.0, "%", 3.0), (1.0, true));
        assert!(!row(1.0, 0.0, "killed", 0.0).1);
    }
}
