//! How a parameter service divides its work (the COARSE paper, sections III-E and III-F): shards, routes, and which gradients
//! go to the proxies; pure functions of what was measured.
//!
//! ```
//! use polder_place::sync::{Pace, split};
//! use polder_platform::Bandwidth;
//!
//! let gb_per_s = |rate: f64| Bandwidth::new(rate * 1e9);
//! let pace = Pace { forward_s: 0.04, backward_s: 0.08, proxy: gb_per_s(12.0), worker: gb_per_s(12.0) };
//! // Four workers and 1.325 GB of gradients: what the proxies carry beside a backward pass, and half of what is left.
//! let proxied = split(1.325e9, 4, &pace);
//! assert!((proxied - 982.5e6).abs() < 1.0);
//! ```

use std::ops::Range;

use polder_platform::Bandwidth;

/// What one link from a client to a proxy takes, as a profile measured it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Seconds of the least message.
    pub latency_s: f64,
    /// Bytes a second of large ones.
    pub bandwidth: Bandwidth,
}

impl Link {
    /// Seconds of so many bytes.
    #[must_use]
    pub fn seconds(&self, bytes: f64) -> f64 {
        self.latency_s + bytes / self.bandwidth.value()
    }
}

/// Where tensors go, by size (section III-E): the paper's table of three entries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// What is smaller goes to [`Routing::small`], everything else to [`Routing::large`].
    pub threshold_bytes: f64,
    /// The proxy of the least latency.
    pub small: usize,
    /// The proxy of the highest bandwidth.
    pub large: usize,
}

impl Routing {
    /// The routing over these links: the threshold is the size at which both proxies take the same time. Of equally good
    /// proxies the first counts. `None` without links.
    ///
    /// There are three cases. Links that are equal, and a local proxy that is better in both, have one proxy and no
    /// threshold. A local proxy of less latency and less bandwidth (anti-locality) has small tensors alone. Bandwidths within
    /// `slack` of the highest count as equal: below that a measurement says nothing, and the threshold of two bandwidths that
    /// hardly differ is enormous.
    #[must_use]
    pub fn over(links: &[Link], slack: f64) -> Option<Self> {
        let best = |cost: fn(&Link) -> f64| {
            (0..links.len()).min_by(|&one, &other| cost(&links[one]).total_cmp(&cost(&links[other])))
        };
        let large = best(|link| -link.bandwidth.value())?;
        let small = best(|link| link.latency_s)?;
        let [near, wide] = [links[small], links[large]];
        if near.bandwidth.value() >= wide.bandwidth.value() * (1.0 - slack) {
            return Some(Self { threshold_bytes: 0.0, small, large: small });
        }
        if near.latency_s == wide.latency_s {
            return Some(Self { threshold_bytes: 0.0, small: large, large });
        }
        let slower = 1.0 / near.bandwidth.value() - 1.0 / wide.bandwidth.value();
        Some(Self { threshold_bytes: (wide.latency_s - near.latency_s) / slower, small, large })
    }
}

/// The proxy of each shard, in the order in which shards are pushed. Shards below the routing's threshold go to the proxy of
/// the least latency. Each other one goes to the proxy that would have summed it first: with equal links in turn. So the
/// bandwidth of all proxies is used, where the paper's clients have one proxy each. `slack` is that of [`Routing::over`].
///
/// # Panics
/// Without links.
#[must_use]
pub fn routes(shards: &[u64], links: &[Link], slack: f64) -> Vec<usize> {
    let routing = Routing::over(links, slack).expect("a service has proxies");
    let mut busy_s = vec![0.0; links.len()];
    let route = |&bytes: &u64| {
        let until = |proxy: usize| busy_s[proxy] + bytes as f64 / links[proxy].bandwidth.value();
        let soonest = (0..links.len()).min_by(|&one, &other| until(one).total_cmp(&until(other)));
        let is_small = (bytes as f64) < routing.threshold_bytes;
        let proxy = if is_small { routing.small } else { soonest.expect("a service has proxies") };
        busy_s[proxy] = until(proxy);
        proxy
    };
    shards.iter().map(route).collect()
}

/// The pieces of a tensor of `bytes` bytes (section IV-B): as many as have `shard_bytes` bytes or more each, of equal size up to
/// one `grain`. A tensor smaller than two shards stays whole. Every piece but the last is a multiple of `grain` bytes.
pub fn pieces(bytes: u64, shard_bytes: u64, grain: u64) -> impl Iterator<Item = Range<u64>> {
    let grain = grain.max(1);
    let (grains, least) = (bytes / grain, shard_bytes.div_ceil(grain).max(1));
    let count = if bytes == 0 { 0 } else { (grains / least).max(1) };
    // The first pieces take what does not divide.
    let begin = move |piece: u64| (grains / count * piece + piece.min(grains % count)) * grain;
    (0..count).map(move |piece| begin(piece)..if piece + 1 == count { bytes } else { begin(piece + 1) })
}

/// The smallest size whose bandwidth is full (section III-E): within `slack` of the highest. `None` when nothing was measured.
#[must_use]
pub fn full_from(measured: &[(u64, Bandwidth)], slack: f64) -> Option<u64> {
    let highest = measured.iter().map(|(_, rate)| rate.value()).max_by(f64::total_cmp)?;
    let is_full = |rate: Bandwidth| rate.value() >= highest * (1.0 - slack);
    measured.iter().filter(|(_, rate)| is_full(*rate)).map(|(bytes, _)| *bytes).min()
}

/// What a step takes without synchronisation, and how fast each side synchronises. Both bandwidths are of the ring's formula:
/// bytes x 2(p-1)/p / seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// `T_FP`, seconds of a forward pass.
    pub forward_s: f64,
    /// `T_BP`, seconds of a backward pass.
    pub backward_s: f64,
    /// `BW_proxy`, of pushes, sums and pulls.
    pub proxy: Bandwidth,
    /// `BW_worker`, of all-reduces among the workers; the paper calls it `BW_GPU`.
    pub worker: Bandwidth,
}

/// `2(p-1)/p`, what a ring moves of each byte.
#[must_use]
pub fn ring(workers: u32) -> f64 {
    if workers == 0 { 0.0 } else { 2.0 * f64::from(workers - 1) / f64::from(workers) }
}

/// Seconds of a step with `proxied` of `bytes` bytes on the proxies (section III-F): `T_FP` and the longer of
/// `T_BP + T_sync(worker)` and `T_sync(proxy)`.
#[must_use]
pub fn step_seconds(bytes: f64, workers: u32, pace: &Pace, proxied: f64) -> f64 {
    let by_workers = ring(workers) * (bytes - proxied) / pace.worker.value();
    let by_proxies = ring(workers) * proxied / pace.proxy.value();
    pace.forward_s + (pace.backward_s + by_workers).max(by_proxies)
}

/// The paper's m (section III-F): how many of `bytes` bytes the proxies synchronise so that [`step_seconds`] is least. They are
/// those whose gradients come first. Both terms are equal there, unless the proxies take all within a backward pass.
#[must_use]
pub fn split(bytes: f64, workers: u32, pace: &Pace) -> f64 {
    let ring = ring(workers);
    let [worker, proxy] = [pace.worker, pace.proxy].map(|rate| ring / rate.value());
    if worker + proxy == 0.0 {
        return bytes;
    }
    ((pace.backward_s + bytes * worker) / (worker + proxy)).min(bytes)
}

/// What a step is predicted from: the paper's formula lets gradients be there from the begin of a backward pass on, and this knows when
/// each of them comes, what copies cost the training thread, and that a proxy sums nothing before it came.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timeline<'a> {
    /// Of each tensor its gradient's bytes and when it is there, in seconds from the begin of the backward pass, without copies.
    pub gradients: &'a [(u64, f64)],
    /// How many workers.
    pub workers: u32,
    /// Seconds of a backward pass without copies.
    pub backward_s: f64,
    /// Bytes a second with which the training thread copies gradients into the pool.
    pub copy: Bandwidth,
    /// Each proxy: the least message, and what it sums for all workers.
    pub proxies: &'a [Link],
    /// `BW_worker`, as in [`Pace`].
    pub worker: Bandwidth,
    /// The least bytes of a shard.
    pub shard_bytes: u64,
    /// Shards begin at multiples of so many bytes.
    pub grain: u64,
    /// That of [`Routing::over`].
    pub slack: f64,
}

impl Timeline<'_> {
    /// Seconds from the begin of the backward pass to the last average, if the proxies take the first `taken` tensors. The longer of two
    /// ends counts: the workers' all-reduce begins after the pass, and each proxy sums one shard after the other. The way back of the
    /// last shard takes as long as its way there; that of the others goes on beside it.
    #[must_use]
    pub fn seconds(&self, taken: usize) -> f64 {
        let (proxied, rest) = self.gradients.split_at(taken.min(self.gradients.len()));
        let (mut shards, mut copied_s) = (vec![], 0.0);
        for &(bytes, at_s) in proxied {
            copied_s += bytes as f64 / self.copy.value();
            let ready_s = at_s + copied_s;
            shards.extend(
                pieces(bytes, self.shard_bytes, self.grain).map(|piece| (piece.end - piece.start, ready_s)),
            );
        }
        let bytes: Vec<u64> = shards.iter().map(|(bytes, _)| *bytes).collect();
        let mut free_s = vec![0.0_f64; self.proxies.len()];
        let mut end_s = self.backward_s + copied_s;
        for (proxy, (bytes, ready_s)) in routes(&bytes, self.proxies, self.slack).into_iter().zip(shards) {
            let Link { latency_s, bandwidth } = self.proxies[proxy];
            let seconds = bytes as f64 / bandwidth.value();
            free_s[proxy] = free_s[proxy].max(ready_s) + seconds;
            end_s = end_s.max(free_s[proxy] + seconds + latency_s);
        }
        let rest: u64 = rest.iter().map(|(bytes, _)| *bytes).sum();
        let by_workers = ring(self.workers) * rest as f64 / self.worker.value();
        end_s.max(self.backward_s + copied_s + by_workers)
    }

    /// How many tensors the proxies take so that [`Timeline::seconds`] is least; of equally good counts the smallest.
    #[must_use]
    pub fn best(&self) -> usize {
        let seconds: Vec<f64> = (0..=self.gradients.len()).map(|taken| self.seconds(taken)).collect();
        let shorter = |&one: &usize, &other: &usize| seconds[one].total_cmp(&seconds[other]);
        (0..seconds.len()).min_by(shorter).unwrap_or_default()
    }
}

/// How many of these tensors, in the order of gradients, the proxies take: their bytes come nearest to `proxied`, because a
/// tensor goes one way whole.
#[must_use]
pub fn proxied_tensors(tensors: &[u64], proxied: f64) -> usize {
    let mut sum = 0.0;
    let (mut best, mut taken) = (proxied.abs(), 0);
    for (index, &bytes) in tensors.iter().enumerate() {
        sum += bytes as f64;
        if (sum - proxied).abs() <= best {
            (best, taken) = ((sum - proxied).abs(), index + 1);
        }
    }
    taken
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn link(latency_us: f64, gb_per_s: f64) -> Link {
        Link { latency_s: latency_us * 1e-6, bandwidth: Bandwidth::new(gb_per_s * 1e9) }
    }

    fn links() -> impl Strategy<Value = Vec<Link>> {
        let one = (0.1..100.0, 0.1..100.0).prop_map(|(latency, rate)| link(latency, rate));
        proptest::collection::vec(one, 1..6)
    }

    fn paces() -> impl Strategy<Value = Pace> {
        (0.0..0.5, 0.0..0.5, 0.1..50.0, 0.1..50.0).prop_map(|(forward_s, backward_s, proxy, worker)| Pace {
            forward_s,
            backward_s,
            proxy: Bandwidth::new(proxy * 1e9),
            worker: Bandwidth::new(worker * 1e9),
        })
    }

    #[test]
    fn the_three_cases_of_figures_8_and_15_route_as_in_the_paper() {
        let equal = Routing::over(&[link(1.0, 12.0), link(1.0, 12.0)], 0.0).unwrap();
        assert_eq!((equal.small, equal.large, equal.threshold_bytes), (0, 0, 0.0));
        let anti = Routing::over(&[link(1.0, 6.0), link(3.0, 12.0)], 0.2).unwrap();
        assert_eq!((anti.small, anti.large), (0, 1));
        assert!((anti.threshold_bytes - 24e3).abs() < 1e-6, "{anti:?}");
        let local = Routing::over(&[link(1.0, 12.0), link(3.0, 6.0)], 0.0).unwrap();
        assert_eq!((local.small, local.large, local.threshold_bytes), (0, 0, 0.0));
        assert_eq!(Routing::over(&[], 0.0), None);
        // What one measurement of equal links found.
        let noisy = Routing::over(&[link(233.0, 2.67), link(289.0, 2.71)], 0.2).unwrap();
        assert_eq!((noisy.small, noisy.large, noisy.threshold_bytes), (0, 0, 0.0));
    }

    #[test]
    fn equal_links_take_shards_in_turn_and_small_ones_stay_near() {
        assert_eq!(routes(&[100; 4], &[link(1.0, 6.0); 2], 0.0), [0, 1, 0, 1]);
        let anti = [link(1.0, 6.0), link(3.0, 12.0)];
        assert_eq!(routes(&[1000, 100_000, 100, 100_000, 100_000], &anti, 0.2), [0, 1, 0, 1, 0]);
    }

    #[test]
    fn full_bandwidth_begins_at_the_smallest_size_that_has_it() {
        let rates = [(1 << 16, 3.0), (1 << 18, 9.6), (1 << 20, 10.0), (1 << 22, 9.0)];
        let rates = rates.map(|(bytes, rate)| (bytes, Bandwidth::new(rate)));
        assert_eq!(full_from(&rates, 0.05), Some(1 << 18));
        assert_eq!(full_from(&rates, 0.0), Some(1 << 20));
        assert_eq!(full_from(&[], 0.1), None);
    }

    #[test]
    fn one_worker_has_nothing_to_synchronise_and_the_proxies_may_have_it() {
        let pace =
            Pace { forward_s: 0.1, backward_s: 0.2, proxy: Bandwidth::new(1e9), worker: Bandwidth::new(1e9) };
        assert_eq!(split(1e9, 1, &pace), 1e9);
        assert!((step_seconds(1e9, 1, &pace, 1e9) - 0.3).abs() < 1e-12);
    }

    fn timeline<'a>(gradients: &'a [(u64, f64)], proxies: &'a [Link]) -> Timeline<'a> {
        Timeline {
            gradients,
            workers: 2,
            backward_s: 1.0,
            copy: Bandwidth::new(1e12),
            proxies,
            worker: Bandwidth::new(100.0),
            shard_bytes: 1,
            grain: 1,
            slack: 0.2,
        }
    }

    #[test]
    fn a_proxy_sums_nothing_before_it_came_and_the_workers_nothing_before_the_pass_is_over() {
        let proxies = [Link { latency_s: 0.0, bandwidth: Bandwidth::new(100.0) }];
        let gradients = [(100, 0.25), (100, 0.5), (100, 0.75), (100, 1.0)];
        let timeline = Timeline { shard_bytes: 100, ..timeline(&gradients, &proxies) };
        let near = |taken: usize, expected: f64| {
            let found = timeline.seconds(taken);
            assert!((found - expected).abs() < 1e-6, "{taken}: {found}");
        };
        near(0, 5.0);
        near(1, 4.0);
        // The second sum begins when the first one is over, and its way back takes a second.
        near(2, 3.25);
        near(3, 4.25);
        near(4, 5.25);
        assert_eq!(timeline.best(), 2);
        // Copies are the training thread's: they move all that comes after them.
        let slow = Timeline { copy: Bandwidth::new(1000.0), ..timeline };
        assert!((slow.seconds(2) - 3.35).abs() < 1e-9, "{}", slow.seconds(2));
        assert_eq!(Timeline { gradients: &[], ..timeline }.best(), 0);
    }

    proptest! {
        #[test]
        fn no_count_is_better_than_the_best_and_none_beats_the_papers_formula(
            sizes in proptest::collection::vec(1_u64..1000, 1..20), rates in proptest::collection::vec(50.0..500.0_f64, 1..4),
        ) {
            let total: u64 = sizes.iter().sum();
            let mut so_far = 0;
            let gradients: Vec<_> = sizes
                .iter()
                .map(|&bytes| {
                    so_far += bytes;
                    (bytes, so_far as f64 / total as f64)
                })
                .collect();
            let proxies: Vec<_> =
                rates.iter().map(|&rate| Link { latency_s: 0.0, bandwidth: Bandwidth::new(rate) }).collect();
            let timeline = timeline(&gradients, &proxies);
            let best = timeline.seconds(timeline.best());
            let pace = Pace {
                forward_s: 0.0,
                backward_s: 1.0,
                proxy: Bandwidth::new(rates.iter().sum()),
                worker: timeline.worker,
            };
            for taken in 0..=sizes.len() {
                let seconds = timeline.seconds(taken);
                prop_assert!(best <= seconds);
                let proxied: u64 = sizes[..taken].iter().sum();
                let bound = step_seconds(total as f64, 2, &pace, proxied as f64);
                prop_assert!(seconds >= bound * (1.0 - 1e-9), "{seconds} {bound}");
            }
        }

        #[test]
        fn pieces_cover_a_tensor_and_are_as_large_as_a_shard(
            bytes in 0_u64..1 << 24, shard in 0_u64..1 << 20, grain in 1_u64..200,
        ) {
            let pieces: Vec<_> = pieces(bytes, shard, grain).take(1 << 20).collect();
            prop_assume!(pieces.len() < 1 << 20);
            let mut end = 0;
            for piece in &pieces {
                prop_assert_eq!(piece.start, end);
                prop_assert!(piece.start < piece.end && piece.start % grain == 0);
                prop_assert!(pieces.len() == 1 || piece.end - piece.start >= shard);
                end = piece.end;
            }
            prop_assert_eq!(end, bytes);
            let sizes = pieces.iter().map(|piece| piece.end - piece.start);
            let (least, most) = (sizes.clone().min().unwrap_or(0), sizes.max().unwrap_or(0));
            prop_assert!(most - least < 2 * grain, "{least} to {most}");
            // As many as there can be.
            let more = pieces.len() as u64 + 1;
            prop_assert!(bytes / more < shard.max(1) + grain || bytes == 0);
        }

        #[test]
        fn below_the_threshold_the_near_proxy_is_sooner_and_above_it_the_other(links in links(), factor in 0.01..100.0_f64) {
            let Routing { threshold_bytes, small, large } = Routing::over(&links, 0.0).unwrap();
            let bytes = threshold_bytes * factor;
            let [near, wide] = [small, large].map(|proxy| links[proxy].seconds(bytes));
            prop_assert!(threshold_bytes >= 0.0);
            let is_right = if factor < 1.0 { near <= wide * (1.0 + 1e-9) } else { wide <= near * (1.0 + 1e-9) };
            prop_assert!(is_right, "{near} and {wide} for {bytes} bytes");
        }

        #[test]
        fn no_proxy_is_busy_much_longer_than_another(
            shards in proptest::collection::vec(1_u64..1 << 20, 1..200), rates in proptest::collection::vec(1.0..10.0_f64, 1..5),
        ) {
            let links: Vec<_> = rates.iter().map(|&rate| link(1.0, rate)).collect();
            let routes = routes(&shards, &links, 0.0);
            let mut busy = vec![0.0; links.len()];
            for (&proxy, &bytes) in routes.iter().zip(&shards) {
                busy[proxy] += bytes as f64 / links[proxy].bandwidth.value();
            }
            let largest = *shards.iter().max().unwrap() as f64;
            let least = busy.iter().copied().fold(f64::INFINITY, f64::min);
            for (busy, link) in busy.iter().zip(&links) {
                let slowest = rates.iter().copied().fold(f64::INFINITY, f64::min) * 1e9;
                prop_assert!(*busy <= least + 2.0 * largest / slowest, "{busy} and {least} over {link:?}");
            }
        }

        #[test]
        fn no_split_is_better_than_the_papers(
            bytes in 1e3..1e10_f64, workers in 1_u32..64, pace in paces(), other in 0.0..1.0_f64,
        ) {
            let proxied = split(bytes, workers, &pace);
            prop_assert!((0.0..=bytes).contains(&proxied));
            let best = step_seconds(bytes, workers, &pace, proxied);
            prop_assert!(best <= step_seconds(bytes, workers, &pace, other * bytes) * (1.0 + 1e-9));
        }

        #[test]
        fn the_split_cuts_blocked_time_as_the_closed_form_says(bytes in 1e6..1e10_f64, workers in 2_u32..64, pace in paces()) {
            // Against an all-reduce that blocks after the backward pass for X seconds.
            let blocking = ring(workers) * bytes / pace.worker.value();
            let best = step_seconds(bytes, workers, &pace, split(bytes, workers, &pace));
            let blocked = best - pace.forward_s - pace.backward_s;
            let share = pace.proxy.value() / (pace.proxy.value() + pace.worker.value());
            let cut = ((1.0 + pace.backward_s / blocking) * share).min(1.0);
            prop_assert!((1.0 - blocked / blocking - cut).abs() < 1e-6, "{blocked} of {blocking}, {cut}");
        }

        #[test]
        fn tensors_go_whole_and_as_near_to_the_split_as_they_can(
            tensors in proptest::collection::vec(0_u64..1000, 0..30), proxied in 0.0..20_000.0_f64,
        ) {
            let taken = proxied_tensors(&tensors, proxied);
            let off = |count: usize| (tensors[..count].iter().sum::<u64>() as f64 - proxied).abs();
            for count in 0..=tensors.len() {
                prop_assert!(off(taken) <= off(count));
            }
        }
    }
}
