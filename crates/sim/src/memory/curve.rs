//! Mean access times over the working set, and where two of them meet. Over the bytes of a working set the sum of the access times is a
//! line from one memory's end to the next, so that every crossing is exact.

use super::Configuration;

/// How many times faster what pays is, at least.
pub const PAYS: f64 = 1.05;

/// Working sets from more than one size to another, in bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// More than so many.
    pub from: f64,
    /// So many at most.
    pub until: f64,
}

/// A straight part of a sum of access times, as the working set grows.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Line {
    /// Where it begins and ends.
    span: Span,
    /// Seconds of an access to a byte of it.
    seconds: f64,
}

impl Configuration {
    /// What it holds.
    #[must_use]
    pub fn capacity(&self) -> f64 {
        self.tiers.iter().map(|tier| tier.capacity_bytes).sum()
    }

    /// Where each memory begins and ends, and what an access to so many bytes takes there.
    fn lines(&self, bytes: f64) -> Vec<Line> {
        let mut from = 0.0;
        let line = |tier: &super::Tier| {
            let span = Span { from, until: from + tier.capacity_bytes };
            from = span.until;
            Line { span, seconds: tier.access.seconds(bytes) }
        };
        self.tiers.iter().map(line).collect()
    }

    /// What each memory ends at, in order.
    pub(super) fn ends(&self) -> impl Iterator<Item = f64> {
        self.tiers.iter().scan(0.0, |end, tier| {
            *end += tier.capacity_bytes;
            Some(*end)
        })
    }

    /// The access times of all bytes of a working set, added up.
    fn sum(&self, bytes: f64, set: f64) -> f64 {
        let held = |Line { span, .. }: &Line| (set.min(span.until) - span.from).max(0.0);
        let lines = self.lines(bytes);
        let all = lines.iter().map(|line| held(line) * line.seconds).sum();
        if self.caching.is_none() {
            return all;
        }
        // What caches answer comes as soon as own memory; a filter without room asks first for its entry back.
        let cached = || self.tiers.iter().zip(&lines).filter(|(tier, _)| tier.is_cached);
        let rates = self.cached(cached().map(|(_, line)| held(line)).sum(), bytes);
        let own = lines.first().map_or(0.0, |line| line.seconds);
        let each = cached().map(|(tier, line)| {
            let snoop = tier.access.idle() - tier.access.memory_s;
            held(line) * (rates.hits * (own - line.seconds) + rates.waited * snoop)
        });
        all + each.sum::<f64>()
    }

    /// The part of the accesses to a working set that caches answer, of all; `None` where it holds less.
    #[must_use]
    pub fn hits(&self, bytes: f64, set: f64) -> Option<f64> {
        let held = |Line { span, .. }: &Line| (set.min(span.until) - span.from).max(0.0);
        let lines = self.lines(bytes);
        let cached = self.tiers.iter().zip(&lines).filter(|(tier, _)| tier.is_cached);
        let region: f64 = cached.map(|(_, line)| held(line)).sum();
        (set > 0.0 && set <= self.capacity()).then(|| self.cached(region, bytes).hits * region / set)
    }

    /// Seconds of an access to so many bytes of a working set, each byte of which is as likely, on average; `None` where it holds less.
    #[must_use]
    pub fn seconds(&self, bytes: f64, set: f64) -> Option<f64> {
        (set > 0.0 && set <= self.capacity()).then(|| self.sum(bytes, set) / set)
    }
}

/// Into how many straight parts a span is cut where caches answer accesses.
const BENDS: u32 = 16;

/// Where either has the end of a memory inside a span, and the ends of the span.
fn corners(one: &Configuration, other: &Configuration, span: Span) -> Vec<f64> {
    let until = span.until.min(one.capacity()).min(other.capacity());
    if until <= span.from {
        return vec![];
    }
    // Hits bend the lines: so close to one another they are straight enough.
    let is_bent = one.caching.or(other.caching).is_some();
    let bends = (1..BENDS)
        .filter(|_| is_bent)
        .map(|at| span.from + (until - span.from) * f64::from(at) / f64::from(BENDS));
    let inner = one.ends().chain(other.ends()).chain(bends).filter(|end| *end > span.from && *end < until);
    let mut corners: Vec<_> = inner.chain([span.from, until]).collect();
    corners.sort_by(f64::total_cmp);
    corners
}

/// Where a function that is straight between corners first gets to 0 from below or from above.
fn crossing(corners: &[f64], of: impl Fn(f64) -> f64) -> Option<f64> {
    let pairs = corners.windows(2).map(|pair| [pair[0], pair[1]]);
    let mut crossings = pairs.filter_map(|[from, until]| {
        let [low, high] = [of(from), of(until)];
        if low == 0.0 {
            return Some(from);
        }
        (low * high <= 0.0).then(|| from + (until - from) * low / (low - high))
    });
    crossings.next()
}

/// How many times faster `one` is than `other`; `None` where either holds less.
#[must_use]
pub fn ratio(one: &Configuration, other: &Configuration, bytes: f64, set: f64) -> Option<f64> {
    Some(other.seconds(bytes, set)? / one.seconds(bytes, set)?)
}

/// The least and the most that [`ratio`] comes to over a span; `None` where either holds none of it. Both are at corners, because the
/// quotient of two straight lines only rises or only falls.
#[must_use]
pub fn ratios(one: &Configuration, other: &Configuration, bytes: f64, span: Span) -> Option<[f64; 2]> {
    let corners = corners(one, other, span);
    let at = corners.iter().filter_map(|set| ratio(one, other, bytes, *set));
    (!corners.is_empty())
        .then(|| at.fold([f64::INFINITY, 0.0], |[least, most], it| [least.min(it), most.max(it)]))
}

/// The smallest working set of a span at which [`ratio`] is `times`.
#[must_use]
pub fn met(one: &Configuration, other: &Configuration, bytes: f64, span: Span, times: f64) -> Option<f64> {
    let apart = |set: f64| other.sum(bytes, set) - times * one.sum(bytes, set);
    crossing(&corners(one, other, span), apart)
}

/// The smallest working set from which the memory at `tier` of `one` pays: with it an access is [`PAYS`] times faster than with `other`'s
/// memory for the same bytes, what comes before being the same.
#[must_use]
pub fn pays_from(one: &Configuration, tier: usize, other: &Configuration, bytes: f64) -> Option<f64> {
    let begin: f64 = one.tiers[..tier].iter().map(|it| it.capacity_bytes).sum();
    let span = Span { from: begin, until: begin + one.tiers[tier].capacity_bytes };
    let before = one.sum(bytes, begin) - other.sum(bytes, begin);
    let gained = |set: f64| before + other.sum(bytes, set) - PAYS * one.sum(bytes, set);
    crossing(&corners(one, other, span), gained)
}

#[cfg(test)]
mod tests {
    use super::super::{Access, How, Tier};
    use super::*;

    fn configuration(tiers: &[(f64, f64)]) -> Configuration {
        let tier = |&(capacity_bytes, memory_s): &(f64, f64)| {
            let access = Access { how: How::Load, memory_s, ..Access::at(f64::INFINITY) };
            Tier { name: "own", capacity_bytes, access, is_cached: false, holders: None }
        };
        let tiers = tiers.iter().map(tier).collect();
        Configuration { name: "tiered", platform: "p".into(), tiers, caching: None }
    }

    #[test]
    fn a_mean_weighs_each_memory_by_its_part_of_the_working_set() {
        let it = configuration(&[(100.0, 1.0), (300.0, 3.0), (600.0, 10.0)]);
        let means = [50.0, 100.0, 200.0, 400.0, 1000.0].map(|set| it.seconds(64.0, set).unwrap());
        assert_eq!(means, [1.0, 1.0, 2.0, 2.5, 7.0]);
        assert_eq!([0.0, 1000.1, -1.0].map(|set| it.seconds(64.0, set)), [None; 3]);
    }

    #[test]
    fn crossings_are_exact_and_extremes_are_at_corners() {
        let fast = configuration(&[(100.0, 1.0), (900.0, 2.0)]);
        let slow = configuration(&[(100.0, 1.0), (300.0, 3.0), (600.0, 10.0)]);
        let beyond = Span { from: 100.0, until: 1000.0 };
        let met = met(&fast, &slow, 64.0, beyond, 1.4).unwrap();
        assert!((ratio(&fast, &slow, 64.0, met).unwrap() - 1.4).abs() < 1e-12, "{met}");
        let [least, most] = ratios(&fast, &slow, 64.0, beyond).unwrap();
        assert_eq!((least, most), (1.0, 7.0 / 1.9));
        // 100 + 3 x = 1.05 (100 + 2 x)
        let pays = pays_from(&fast, 1, &slow, 64.0).unwrap();
        assert!((pays - (100.0 + 5.0 / 0.9)).abs() < 1e-9, "{pays}");
        assert_eq!(pays_from(&slow, 1, &fast, 64.0), None, "what is slower never pays");
        assert_eq!(super::met(&fast, &slow, 64.0, beyond, 4.0), None);
        let none = Span { from: 1000.0, until: 2000.0 };
        assert_eq!(ratios(&fast, &slow, 64.0, none), None, "nothing is that large");
    }
}
