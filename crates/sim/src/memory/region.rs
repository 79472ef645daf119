//! Hits of accelerators' caches, misses of the snoop filter and back-invalidations in a coherent region.
//!
//! Each accelerator caches lines of the region, the least recently used go first. The home of a line has an entry of the snoop filter while any
//! accelerator caches it. A filter without room takes the entry of the line that was asked for the longest ago, and has its copies
//! invalidated (CXL 3, back-invalidate).
//!
//! Rates follow from characteristic times, after Che, Tung and Wang (IEEE JSAC 20(7), 2002): in a large cache that drops what was used the
//! longest ago, a line stays for one time after its last use, the same for all lines. That time follows from the lines that there is room for.
//! Caches have one such time here, and the snoop filter another. Given both, lines are independent, and each is a Markov chain: no copy, one
//! copy with the right to write, or 1 to all accelerators with copies to read.

use serde::{Deserialize, Serialize};

use crate::given::GivenError;

/// What is asked of a coherent region.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegionLoad {
    /// Accelerators that access it.
    pub accelerators: u32,
    /// Lines of the region.
    pub lines: f64,
    /// Lines of it that each accelerator may cache.
    pub cached: f64,
    /// Entries of the snoop filter.
    pub filter: f64,
    /// The part of the accesses that write.
    pub writes: f64,
    /// How much more often some lines are accessed: the exponent of Zipf's law, 0 where all are alike.
    pub skew: f64,
}

/// What comes of it, each a number an access.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct RegionRates {
    /// Found in the accelerator's own cache, with the right to do it.
    pub hits: f64,
    /// Of the accesses, those whose line the snoop filter did not know.
    pub filter_misses: f64,
    /// Copies that the filter had invalidated because it had no room.
    pub back_invalidations: f64,
    /// Copies that a write had invalidated.
    pub invalidations: f64,
    /// Accesses that waited for a back-invalidation.
    pub waited: f64,
}

/// Lines of unlike popularity that are taken as alike, as a part of those that are more popular.
const ALIKE: f64 = 0.08;
/// How exactly the room that there is gets filled.
const FILLED: f64 = 1e-6;
/// The most looks at a time that fills it.
const LOOKS: u32 = 100;
/// A time without end, as a number that may be multiplied.
const FOR_EVER: f64 = 1e300;
/// Of exponents: what is rarer than this does not happen.
const NEVER: f64 = 460.0;

impl RegionLoad {
    /// What comes of accesses of accelerators alike, each of which is independent of those before it. All lines are counted.
    ///
    /// # Errors
    /// When a number cannot be.
    pub fn rates(&self) -> Result<RegionRates, GivenError> {
        self.check()?;
        Ok(self.by_characteristic_times())
    }

    /// What comes of it with the times that fill the caches and the filter.
    fn by_characteristic_times(&self) -> RegionRates {
        let groups = groups(self.lines.round().max(1.0), self.skew);
        let all = |times: Times| {
            let each = groups.iter().map(|(lines, part)| (*lines, self.line(*part, times)));
            each.fold(Line::default(), |sum, (lines, line)| sum.plus(lines, &line))
        };
        let accelerators = f64::from(self.accelerators);
        let with = |filter: f64| {
            let cached = |cache: f64| all(Times { cache, filter }).copies / accelerators;
            // An access adds one copy at most.
            Times { cache: filled(self.cached, self.cached, cached), filter }
        };
        let filter = filled(self.filter, self.filter / accelerators, |filter| all(with(filter)).known);
        all(with(filter)).rates
    }

    /// A line that such a part of the accesses go to.
    fn line(&self, part: f64, times: Times) -> Line {
        if times.filter < FOR_EVER {
            return Chain::new(self, part, times).line();
        }
        // The filter takes nothing, so that all is exact: a copy is there if its accelerator's last access was not long ago, and no write of
        // another came after it.
        let all = f64::from(self.accelerators);
        let (reads, writes) = (part * (1.0 - self.writes), part * self.writes);
        let ends = part + (all - 1.0) * writes;
        let copies = all * part * -(-ends * times.cache).exp_m1() / ends;
        let known = -(-all * part * times.cache).exp_m1();
        // The last access of all was a write, or reads alone of the accelerator that wrote.
        let owned = match self.writes > 0.0 {
            true => known * self.writes / (1.0 - known * (1.0 - self.writes) / all),
            false => 0.0,
        };
        Line {
            copies,
            known,
            rates: RegionRates {
                hits: ((copies - owned) * reads + owned * part) / all,
                filter_misses: (1.0 - known) * part,
                invalidations: writes * (all - 1.0) * copies / all,
                ..RegionRates::default()
            },
        }
    }

    fn check(&self) -> Result<(), GivenError> {
        if !(1..=1024).contains(&self.accelerators) {
            let problem = format!("expected 1 to 1024, found {}", self.accelerators);
            return Err(GivenError::new("accelerators", problem));
        }
        for (key, value) in [("region", self.lines), ("cache", self.cached), ("snoop-filter", self.filter)] {
            if !(value >= 1.0 && value.is_finite()) {
                return Err(GivenError::new(key, format!("expected a line or more, found {value}")));
            }
        }
        for (key, value, most) in [("writes", self.writes, 1.0), ("skew", self.skew, 4.0)] {
            if !(0.0..=most).contains(&value) {
                return Err(GivenError::new(
                    key,
                    format!("expected a number from 0 to {most}, found {value}"),
                ));
            }
        }
        Ok(())
    }
}

/// For how long lines are kept after they were asked for, in accesses of an accelerator.
#[derive(Clone, Copy)]
struct Times {
    cache: f64,
    filter: f64,
}

/// What a line has and does on average.
#[derive(Clone, Copy, Default)]
struct Line {
    copies: f64,
    /// The part of the time that the filter has an entry of it.
    known: f64,
    rates: RegionRates,
}

impl Line {
    fn plus(self, times: f64, other: &Self) -> Self {
        let of = |one: f64, other: f64| one + times * other;
        let (a, b) = (&self.rates, &other.rates);
        Self {
            copies: of(self.copies, other.copies),
            known: of(self.known, other.known),
            rates: RegionRates {
                hits: of(a.hits, b.hits),
                filter_misses: of(a.filter_misses, b.filter_misses),
                back_invalidations: of(a.back_invalidations, b.back_invalidations),
                invalidations: of(a.invalidations, b.invalidations),
                waited: of(a.waited, b.waited),
            },
        }
    }
}

/// Groups of lines by Zipf's law, which is taken to be continuous: how many, and the part of the accesses that go to each. The most popular
/// are alone.
fn groups(lines: f64, skew: f64) -> Vec<(f64, f64)> {
    let exponent = 1.0 - skew;
    // The integral of x^-skew, without the difference of two numbers that are almost alike.
    let between = |from: f64, until: f64| {
        let log = (until / from).ln();
        let grown = if exponent.abs() < 1e-9 { log } else { (exponent * log).exp_m1() / exponent };
        from.powf(exponent) * grown
    };
    let whole = between(1.0, lines + 1.0);
    let mut groups = vec![];
    let mut first = 0.0;
    while first < lines {
        let count = (first * ALIKE).floor().max(1.0).min(lines - first);
        let part = between(first + 1.0, first + count + 1.0) / whole;
        groups.push((count, part / count));
        first += count;
    }
    groups
}

/// The time, `least` or longer, with which `occupied` comes to `room`; without end where there is room for all.
fn filled(room: f64, least: f64, occupied: impl Fn(f64) -> f64) -> f64 {
    let beyond = |log: f64| (occupied(log.exp()) / room).ln();
    if (occupied(FOR_EVER) / room).ln() <= FILLED {
        return FOR_EVER;
    }
    // The false position of the Illinois method, in logarithms.
    let [mut low, mut high] = [least.ln(), least.ln()];
    let mut below = beyond(low).min(-FILLED);
    let mut above = below;
    for _ in 0..LOOKS {
        if above > 0.0 {
            break;
        }
        (low, below) = (high, above);
        high += 1.0;
        above = beyond(high);
    }
    for _ in 0..LOOKS {
        let middle = (low * above - high * below) / (above - below);
        let at = beyond(middle);
        if at.abs() <= FILLED || high - low <= FILLED {
            return middle.exp();
        }
        match at > 0.0 {
            true => {
                (high, above) = (middle, at);
                below /= 2.0;
            }
            false => {
                (low, below) = (middle, at);
                above /= 2.0;
            }
        }
    }
    low.exp()
}

/// The rate of what ends a state once nothing else happened for so long, if that happens at a `rate` and begins the time anew: of the times
/// between two such, exp(-rate x time) are longer.
fn lapse(rate: f64, time: f64) -> f64 {
    match rate > 0.0 {
        true => rate / (rate * time).min(NEVER).exp_m1(),
        false => 1.0 / time,
    }
}

/// With so many copies to read, how often that ends: in fewer by one, and in all that leads to no more copies than there are, directly or by
/// way of more.
#[derive(Clone, Copy, Default)]
struct Reading {
    /// The filter takes the entry.
    taken: f64,
    /// A cache drops one of the copies.
    dropped: f64,
    all: f64,
}

/// One line of a region.
struct Chain {
    accelerators: f64,
    /// Accesses of an accelerator to it, in one of its accesses: those that read, those that write.
    reads: f64,
    writes: f64,
    /// By how many copies there are; nothing with none.
    reading: Vec<Reading>,
    /// The rates at which an only copy that may be written is dropped and taken.
    owned: [f64; 2],
}

impl Chain {
    fn new(load: &RegionLoad, part: f64, times: Times) -> Self {
        let accelerators = f64::from(load.accelerators);
        let (reads, writes) = (part * (1.0 - load.writes), part * load.writes);
        let others = (accelerators - 1.0) * part;
        // What drops a copy first: its cache, or the filter. Each lapses only while the other has not.
        let owned = {
            let dropped = lapse(part + others + lapse(others, times.filter), times.cache);
            let taken = lapse(others + dropped, times.filter);
            [lapse(part + others + taken, times.cache), taken]
        };
        let mut chain = Self {
            accelerators,
            reads,
            writes,
            reading: vec![Reading::default(); load.accelerators as usize + 2],
            owned,
        };
        let (mut more, mut more_out) = (0.0, [0.0; 2]);
        for copies in (1..=load.accelerators as usize).rev() {
            let count = copies as f64;
            // An own access, or a write of another, ends the wait of a copy; a miss, or a write, that of the entry.
            let ends = part + (accelerators - 1.0) * writes;
            let asked = (accelerators - count) * part + count * writes;
            let mut taken = lapse(asked, times.filter);
            let mut dropped = lapse(ends + taken, times.cache);
            if copies == 1 {
                taken = lapse(asked + dropped, times.filter);
                dropped = lapse(ends + taken, times.cache);
            }
            let grows = chain.grows(copies);
            let part_of = |out: f64| if more > 0.0 { grows * out / more } else { 0.0 };
            let out = [accelerators * writes + part_of(more_out[0]), taken + part_of(more_out[1])];
            let dropped = count * dropped;
            (more, more_out) = (dropped + out[0] + out[1], out);
            chain.reading[copies] = Reading { taken, dropped, all: more };
        }
        chain
    }

    /// The rate at which a line with so many copies to read gets one more.
    fn grows(&self, copies: usize) -> f64 {
        (self.accelerators - copies as f64) * self.reads
    }

    fn line(&self) -> Line {
        let Self { accelerators, reads, writes, reading, owned: [dropped, taken] } = self;
        let (all, part) = (*accelerators, reads + writes);
        let others_read = (all - 1.0) * reads;
        // A write makes a line owned, from whatever it was.
        let owned = match *writes > 0.0 {
            true => all * writes / (all * writes + others_read + dropped + taken),
            false => 0.0,
        };
        // Of the time with two copies or more: the part with just two, then means of the copies, of the rate of entries taken, and of copies so.
        let last = reading.len() - 2;
        let of =
            |copies: usize| [copies as f64, reading[copies].taken, copies as f64 * reading[copies].taken];
        let (mut part_of_it, mut means) = (1.0, of(last));
        for copies in (2..last).rev() {
            part_of_it = 1.0 / (1.0 + self.grows(copies) / reading[copies + 1].all / part_of_it);
            let here = of(copies);
            means = std::array::from_fn(|at| part_of_it * here[at] + (1.0 - part_of_it) * means[at]);
        }
        // The parts of the time with one copy to read and with more, beside that with none, and those that follow from owned lines.
        let one = all * reads / reading[1].all;
        let several = |one: f64, from_owned: f64| match last {
            1 => 0.0,
            _ => (self.grows(1) * one + from_owned) / (reading[2].all * part_of_it),
        };
        let read_by_others = owned * others_read;
        let [one_of_owned, several_of_owned] = match read_by_others > 0.0 {
            true => {
                let one = read_by_others * reading[2].dropped / (reading[2].all * reading[1].all);
                [one, several(one, read_by_others)]
            }
            false => [0.0; 2],
        };
        let beside = 1.0 + one + several(one, 0.0);
        let none = ((1.0 - owned - one_of_owned - several_of_owned) / beside).max(0.0);
        let one = if none > 0.0 { none * one } else { 0.0 } + one_of_owned;
        let several = (1.0 - owned - none - one).max(0.0);
        let copies = one + several * means[0];
        let alone_taken = owned * taken + one * reading[1].taken;
        Line {
            copies: copies + owned,
            known: 1.0 - none,
            rates: RegionRates {
                hits: (copies * reads + owned * part) / all,
                filter_misses: none * part,
                back_invalidations: (alone_taken + several * means[2]) / all,
                invalidations: writes * (all - 1.0) * (copies + owned) / all,
                waited: (alone_taken + several * means[1]) / all,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD: RegionLoad =
        RegionLoad { accelerators: 4, lines: 4000.0, cached: 1000.0, filter: 4000.0, writes: 0.0, skew: 0.0 };

    #[test]
    fn even_accesses_hit_as_often_as_the_cache_is_a_part_of_the_region() {
        let found = LOAD.rates().unwrap();
        assert!((found.hits - 0.25).abs() < 0.01, "{found:?}");
        assert_eq!(found.back_invalidations, 0.0, "the filter has an entry for each line");
        let whole = RegionLoad { cached: 4000.0, ..LOAD }.rates().unwrap();
        assert!(whole.hits > 0.99, "{whole:?}");
    }

    #[test]
    fn a_filter_without_room_takes_copies_away() {
        let small = RegionLoad { filter: 500.0, ..LOAD }.rates().unwrap();
        assert!(small.back_invalidations > 0.1 && small.hits < 0.2, "{small:?}");
        assert!(small.waited <= small.filter_misses + 1e-9);
        // No more lines are cached than the filter has entries: each is cached by a quarter of the accelerators or more.
        assert!(small.hits <= 500.0 / 4000.0 + 0.01, "{small:?}");
    }

    #[test]
    fn writes_take_the_copies_of_others_away_and_skew_makes_hits() {
        let even = RegionLoad { writes: 0.3, ..LOAD }.rates().unwrap();
        assert!(even.invalidations > 0.0 && even.hits < LOAD.rates().unwrap().hits, "{even:?}");
        let skewed = RegionLoad { skew: 1.2, ..LOAD }.rates().unwrap();
        assert!(skewed.hits > 0.7, "{skewed:?}");
    }

    #[test]
    fn rates_of_even_accesses_follow_parts_and_those_of_skewed_ones_the_size() {
        let large = RegionLoad { lines: 4e6, cached: 1e6, filter: 4e6, ..LOAD };
        assert!((large.rates().unwrap().hits - LOAD.rates().unwrap().hits).abs() < 0.01, "{large:?}");
        let hits = |load: RegionLoad| RegionLoad { skew: 1.2, ..load }.rates().unwrap().hits;
        assert!(hits(large) > hits(LOAD) + 0.05, "popular lines have a larger part of the accesses");
        let error = RegionLoad { writes: 2.0, ..LOAD }.rates().unwrap_err();
        assert_eq!(error.to_string(), "writes: expected a number from 0 to 1, found 2");
    }

    #[test]
    fn rates_are_numbers_wherever_loads_end() {
        for accelerators in [1, 2, 72] {
            for lines in [1.0, 2.0, 1e10] {
                for (cached, filter) in [(1.0, 1.0), (1.0, 1e10), (1e10, 1.0), (1e10, 1e10), (1e5, 1e6)] {
                    for (writes, skew) in [(0.0, 0.0), (1e-9, 4.0), (0.05, 1.0), (1.0, 0.8)] {
                        let load = RegionLoad { accelerators, lines, cached, filter, writes, skew };
                        let rates = load.rates().unwrap();
                        let RegionRates { hits, filter_misses, back_invalidations, invalidations, waited } =
                            rates;
                        let parts = [hits, filter_misses, waited];
                        assert!(
                            parts.iter().all(|it| (-1e-9..=1.0 + 1e-6).contains(it)),
                            "{load:?}: {rates:?}"
                        );
                        assert!(hits + filter_misses <= 1.0 + 1e-6, "{load:?}: {rates:?}");
                        // Each copy was made by a miss.
                        let lost = back_invalidations + invalidations;
                        assert!(lost >= 0.0 && lost <= (1.0 - hits) * 1.01 + 1e-6, "{load:?}: {rates:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn groups_hold_all_lines_and_all_accesses() {
        for (lines, skew) in [(1.0, 0.8), (100.0, 0.0), (4096.0, 1.0), (1e9, 0.8), (1e9, 1.2), (1e9, 4.0)] {
            let groups = groups(lines, skew);
            let [counted, parts] = groups
                .iter()
                .fold([0.0; 2], |[counted, parts], (count, part)| [counted + count, parts + count * part]);
            assert_eq!(counted, lines);
            assert!((parts - 1.0).abs() < 1e-6, "{lines} lines, skew {skew}: {parts}");
            assert!(groups.windows(2).all(|pair| pair[1].1 <= pair[0].1 * (1.0 + 1e-6)));
        }
    }

    #[test]
    fn a_time_that_fills_is_exact_and_endless_with_room_for_all() {
        let occupied = |time: f64| 100.0 * (1.0 - (-time / 100.0).exp());
        let time = filled(50.0, 50.0, occupied);
        assert!((occupied(time) - 50.0).abs() < 1e-3, "{time}");
        assert_eq!(filled(100.0, 100.0, occupied), FOR_EVER);
    }
}
