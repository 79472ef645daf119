//! Synthetic accesses: by zipf, and by how long pages of a service lie idle, drawn from a seed.

use polder_sim::Random;
use polder_sim::pages::Idle;

/// Ranks from 0 on, rank `k` as often as 1 / (k + 1)^exponent (rejection by inversion: Hörmann and Derflinger, 1996).
#[derive(Clone, Debug)]
pub struct Zipf {
    ranks: f64,
    exponent: f64,
    first: f64,
    last: f64,
    skip: f64,
}

impl Zipf {
    /// Draws among so many ranks, which are 1 or more, with an exponent above 0.
    #[must_use]
    pub fn new(ranks: u32, exponent: f64) -> Self {
        let mut zipf = Self { ranks: f64::from(ranks), exponent, first: 0.0, last: 0.0, skip: 0.0 };
        zipf.first = zipf.integral(1.5) - 1.0;
        zipf.last = zipf.integral(zipf.ranks + 0.5);
        zipf.skip = 2.0 - zipf.inverse(zipf.integral(2.5) - zipf.weight(2.0));
        zipf
    }

    fn weight(&self, rank: f64) -> f64 {
        rank.powf(-self.exponent)
    }

    /// The integral of the weight.
    fn integral(&self, rank: f64) -> f64 {
        let less = 1.0 - self.exponent;
        if less.abs() < 1e-9 { rank.ln() } else { rank.powf(less) / less }
    }

    fn inverse(&self, area: f64) -> f64 {
        let less = 1.0 - self.exponent;
        if less.abs() < 1e-9 { area.exp() } else { (area * less).powf(1.0 / less) }
    }

    /// The next rank.
    pub fn draw(&self, random: &mut Random) -> u32 {
        loop {
            let area = self.last + random.unit() * (self.first - self.last);
            let at = self.inverse(area);
            let rank = (at + 0.5).floor().clamp(1.0, self.ranks);
            if rank - at <= self.skip || area >= self.integral(rank + 0.5) - self.weight(rank) {
                return rank as u32 - 1;
            }
        }
    }
}

/// Accesses of a service whose pages lie idle as given: each page at an interval of its own, begun at a random moment of it, so
/// that half of the interval is its mean idle time.
#[derive(Clone, Debug)]
pub struct Touches {
    /// Of each page, the generations between two accesses, and the time of the next one in generations.
    pages: Vec<[f64; 2]>,
    now: f64,
}

impl Touches {
    /// Accesses of so many pages in generations of so many seconds. Ranks of coldness are strewn over the pages.
    #[must_use]
    pub fn new(idle: &Idle, pages: u32, generation_s: f64, random: &mut Random) -> Self {
        let mut found: Vec<_> = (0..pages)
            .map(|page| 2.0 * idle.seconds((f64::from(page) + 0.5) / f64::from(pages)) / generation_s)
            .map(|interval| [interval, interval * random.unit()])
            .collect();
        for last in (1..found.len()).rev() {
            found.swap(last, random.below(last as u32 + 1) as usize);
        }
        Self { pages: found, now: 0.0 }
    }

    /// Adds the pages that are accessed in the next generation, each once, in the order of their numbers from `first` on.
    pub fn generation(&mut self, first: u32, trace: &mut Vec<u32>) {
        self.now += 1.0;
        for (page, [interval, next]) in (first..).zip(&mut self.pages) {
            if *next < self.now {
                *next += *interval * ((self.now - *next) / *interval).ceil();
                trace.push(page);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_come_as_often_as_zipf_says() {
        let (zipf, mut random, mut counts) = (Zipf::new(1000, 0.9), Random::new(7), vec![0_u32; 1000]);
        const DRAWS: u32 = 400_000;
        (0..DRAWS).for_each(|_| counts[zipf.draw(&mut random) as usize] += 1);
        let weights: Vec<_> = (1..=1000).map(|rank| f64::from(rank).powf(-0.9)).collect();
        let sum: f64 = weights.iter().sum();
        for rank in [0, 1, 9, 99, 999] {
            let expected = f64::from(DRAWS) * weights[rank] / sum;
            let found = f64::from(counts[rank]);
            assert!(
                (found - expected).abs() < 5.0 * expected.sqrt(),
                "rank {rank}: {found}, expected {expected}"
            );
        }
    }

    #[test]
    fn idle_pages_of_a_trace_lie_idle_as_the_table_says() {
        let idle = Idle::try_from(vec![[0.25, 22.5], [0.5, 1698.0], [0.75, 4680.0], [0.99, 6840.0]]).unwrap();
        const PAGES: u32 = 2000;
        let mut touches = Touches::new(&idle, PAGES, 30.0, &mut Random::new(1));
        let (mut last, mut trace) = (vec![0_i32; PAGES as usize], vec![]);
        for generation in 1..2000 {
            trace.clear();
            touches.generation(0, &mut trace);
            trace.iter().for_each(|page| last[*page as usize] = generation);
        }
        let mut idle_s: Vec<_> = last.iter().map(|last| f64::from(2000 - last) * 30.0).collect();
        idle_s.sort_by(f64::total_cmp);
        // A page is idle for its mean on average, and the hottest half of the colder pages for less: the median comes out lower.
        for (share, seconds) in [(0.5, 1698.0), (0.75, 4680.0)] {
            let found = idle_s[(share * f64::from(PAGES)) as usize];
            assert!((0.4..1.5).contains(&(found / seconds)), "{share}: {found} s, the table says {seconds}");
        }
    }
}
