//! Seconds of a data-parallel step by the way in which gradients are synchronised: an all-reduce after the backward pass, one that overlaps
//! it, a central parameter server (COARSE's DENSE), and a parameter service (COARSE, sections III-D to III-F).
//!
//! Layers have gradients one after the other, the last layer first. The next forward pass needs them in the other order. A service pushes
//! shards over the client's link, sums them and pulls them, all at once. In Polder's each shard has a proxy that sums it, and what a device
//! takes and gives bounds the service. The paper's proxies sum in a ring. The workers' ring sums the first layers, which are the rest.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use polder_place::sync::{Pace, pieces, proxied_tensors, ring, split};
use polder_platform::Bandwidth;
pub use polder_schedule::ShardOrder;
use serde::{Deserialize, Serialize};

use crate::step::model::Model;

/// A step that is asked for, of layers that it shares with others. What is left out is as `polder plan sync` has it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SyncQuestion {
    /// How many workers, from 2 on.
    pub workers: u32,
    /// Seconds of the forward pass.
    pub forward_s: f64,
    /// Seconds of the backward pass.
    pub backward_s: f64,
    /// What an all-reduce among workers reaches, in bytes a second of the ring's formula.
    pub worker_bandwidth: f64,
    /// How many proxies sum.
    pub proxies: Option<u32>,
    /// What a proxy's device carries in each direction, in bytes a second.
    pub proxy_bandwidth: Option<f64>,
    /// What a worker's link carries in each direction.
    pub link_bandwidth: Option<f64>,
    /// Seconds that each shard takes besides its bytes.
    pub latency_s: f64,
    /// Bytes of a shard.
    pub shard: u64,
    /// Whether the shards of the first layers go first.
    pub first_layers_first: bool,
}

impl SyncQuestion {
    /// The step.
    ///
    /// # Errors
    /// What makes no sense, by its name.
    pub fn job(&self, layers: &[u64]) -> Result<SyncJob, String> {
        let rate = |name: &str, value: f64| match value.is_finite() && value > 0.0 {
            true => Ok(Bandwidth::new(value)),
            false => Err(format!("{name} is {value}; give bytes a second above 0")),
        };
        for (name, value) in
            [("forward_s", self.forward_s), ("backward_s", self.backward_s), ("latency_s", self.latency_s)]
        {
            if !(value.is_finite() && value >= 0.0) {
                return Err(format!("{name} is {value}; give seconds from 0 on"));
            }
        }
        if self.workers < 2 || self.proxies == Some(0) {
            let proxies = self.proxies.unwrap_or(self.workers);
            return Err(format!("workers is {} and proxies {proxies}; give 2 and 1 or more", self.workers));
        }
        let job = SyncJob {
            layers: layers.to_vec(),
            workers: self.workers,
            forward_s: self.forward_s,
            backward_s: self.backward_s,
            worker: rate("worker_bandwidth", self.worker_bandwidth)?,
            proxies: Some(self.proxies.unwrap_or(self.workers)),
            proxy: rate("proxy_bandwidth", self.proxy_bandwidth.unwrap_or(self.worker_bandwidth))?,
            link: rate(
                "link_bandwidth",
                self.link_bandwidth.or(self.proxy_bandwidth).unwrap_or(self.worker_bandwidth),
            )?,
            latency_s: self.latency_s,
            shard_bytes: self.shard,
            order: match self.first_layers_first {
                true => ShardOrder::FirstLayersFirst,
                false => ShardOrder::FirstInFirstOut,
            },
        };
        if layers.iter().all(|bytes| *bytes == 0) || layers.len() > MOST_LAYERS {
            return Err(format!(
                "layers are {}; give 1 to {MOST_LAYERS} with bytes of gradients",
                layers.len()
            ));
        }
        if job.bytes() / job.shard_bytes.max(1) > MOST_SHARDS {
            let (bytes, shard) = (job.bytes(), job.shard_bytes);
            return Err(format!("shard is {shard}: {bytes} bytes are more than {MOST_SHARDS} of them"));
        }
        Ok(job)
    }
}

/// Gradient bytes of a model's embedding and of each block, in 32 bits.
#[must_use]
pub fn layers_of(model: &Model) -> Vec<u64> {
    let embedding = model.embedding_parameters();
    let block = (model.parameters() - embedding) / f64::from(model.layers);
    let blocks = std::iter::repeat_n(4.0 * block, model.layers as usize);
    std::iter::once(4.0 * embedding).chain(blocks).map(|bytes| bytes as u64).collect()
}

/// Layers of a model, at most.
pub const MOST_LAYERS: usize = 100_000;
/// Shards that are followed one by one, at most.
pub const MOST_SHARDS: u64 = 1 << 22;

/// What synchronisation is predicted for.
#[derive(Clone, Debug, PartialEq)]
pub struct SyncJob {
    /// Gradient bytes of each layer, the first one first.
    pub layers: Vec<u64>,
    /// How many workers.
    pub workers: u32,
    /// Seconds of the forward pass, which layers share by their bytes.
    pub forward_s: f64,
    /// Seconds of the backward pass, the same.
    pub backward_s: f64,
    /// What the workers' ring carries, in bytes a second of the ring's formula.
    pub worker: Bandwidth,
    /// How many proxies sum shards of their own, each with a device of its own; without, they are the paper's ring.
    pub proxies: Option<u32>,
    /// What each proxy's device carries in each direction, both at once; of a ring what it carries, as the workers'.
    pub proxy: Bandwidth,
    /// What a client's link carries in each direction, both at once.
    pub link: Bandwidth,
    /// Seconds that each shard takes besides its bytes.
    pub latency_s: f64,
    /// Bytes of a shard; 0 leaves layers whole.
    pub shard_bytes: u64,
    /// Which shard goes first.
    pub order: ShardOrder,
}

/// What a step takes with some way to synchronise.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SyncSeconds {
    /// From the begin of the backward pass to the end of the next forward pass.
    pub step_s: f64,
    /// What of it no computation hides.
    pub blocked_s: f64,
}

/// A step for one share of the gradients on the proxies.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SplitPoint {
    /// The part of the bytes that was asked for.
    pub part: f64,
    /// Bytes on the proxies: layers go one way whole.
    pub proxied_bytes: u64,
    /// What the step takes.
    #[serde(flatten)]
    pub seconds: SyncSeconds,
}

/// Work of one resource at a time: when it is free again.
#[derive(Clone, Copy, Default)]
struct Resource(f64);

impl Resource {
    fn take(&mut self, from: f64, seconds: f64) -> f64 {
        self.0 = self.0.max(from) + seconds;
        self.0
    }
}

impl SyncJob {
    /// All gradient bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.layers.iter().sum()
    }

    /// When the gradients of each layer are there.
    fn gradients(&self) -> Vec<f64> {
        let (mut now, all) = (0.0, self.bytes() as f64);
        let mut at = vec![0.0; self.layers.len()];
        for (at, bytes) in at.iter_mut().zip(&self.layers).rev() {
            now += self.backward_s * (*bytes as f64 / all);
            *at = now;
        }
        at
    }

    /// The next forward pass, each of whose layers waits for its own bytes.
    fn seconds(&self, synchronised: &[f64]) -> SyncSeconds {
        let (mut now, all) = (self.backward_s, self.bytes() as f64);
        for (at, bytes) in synchronised.iter().zip(&self.layers) {
            now = now.max(*at) + self.forward_s * (*bytes as f64 / all);
        }
        SyncSeconds { step_s: now, blocked_s: (now - self.backward_s - self.forward_s).max(0.0) }
    }

    /// The time that all workers sum so many bytes in their ring.
    fn summed_s(&self, bytes: f64) -> f64 {
        self.latency_s + ring(self.workers) * bytes / self.worker.value()
    }

    /// One all-reduce after the backward pass.
    #[must_use]
    pub fn all_reduce(&self) -> SyncSeconds {
        let end = self.backward_s + self.summed_s(self.bytes() as f64);
        self.seconds(&vec![end; self.layers.len()])
    }

    /// An all-reduce a layer, as soon as its gradients are there; the forward pass waits for all, as DDP's does.
    #[must_use]
    pub fn overlapped(&self) -> SyncSeconds {
        let gradients = self.gradients();
        let mut ring = Resource::default();
        let end = (0..self.layers.len())
            .rev()
            .map(|layer| ring.take(gradients[layer], self.summed_s(self.layers[layer] as f64)))
            .fold(self.backward_s, f64::max);
        self.seconds(&vec![end; self.layers.len()])
    }

    /// One server whose device all workers write to and read from at these rates, after the backward pass (section III-B).
    #[must_use]
    pub fn central(&self, write: Bandwidth, read: Bandwidth) -> SyncSeconds {
        let all = f64::from(self.workers) * self.bytes() as f64;
        let end = self.backward_s + all / write.value() + all / read.value();
        self.seconds(&vec![end; self.layers.len()])
    }

    /// Seconds that a byte of gradients takes of each stage of the service, which all work at once.
    fn stages_s(&self) -> Vec<f64> {
        let client = 1.0 / self.link.value();
        match self.proxies {
            Some(count) => {
                // Every worker's copy goes into the device, and the sum comes out for every worker.
                let device = f64::from(self.workers) / (f64::from(count) * self.proxy.value());
                vec![client.max(device); 2]
            }
            None => vec![client, ring(self.workers) / self.proxy.value(), client],
        }
    }

    /// What the split rests on.
    #[must_use]
    pub fn pace(&self) -> Pace {
        // The slowest stage is what a byte takes.
        let slowest = self.stages_s().into_iter().fold(0.0, f64::max);
        let ring = ring(self.workers);
        let proxy = if ring > 0.0 { Bandwidth::new(ring / slowest) } else { self.proxy };
        Pace { forward_s: self.forward_s, backward_s: self.backward_s, proxy, worker: self.worker }
    }

    /// The paper's m, in bytes (section III-F).
    #[must_use]
    pub fn split_bytes(&self) -> f64 {
        split(self.bytes() as f64, self.workers, &self.pace())
    }

    /// The service with so many bytes on the proxies: the last layers, whose gradients come first.
    #[must_use]
    pub fn service(&self, proxied: f64) -> SplitPoint {
        let by_gradient: Vec<_> = self.layers.iter().rev().copied().collect();
        let taken = proxied_tensors(&by_gradient, proxied);
        let first = self.layers.len() - taken;
        let gradients = self.gradients();
        let mut synchronised = vec![0.0; self.layers.len()];
        // The workers' own layers are summed by the workers, when these are done with the backward pass.
        let rest: u64 = self.layers[..first].iter().sum();
        if rest > 0 {
            let end = self.backward_s + self.summed_s(rest as f64);
            synchronised[..first].fill(end);
        }
        self.proxies(first, &gradients, &mut synchronised);
        let seconds = self.seconds(&synchronised);
        let proxied_bytes = self.bytes() - rest;
        SplitPoint { part: proxied / self.bytes() as f64, proxied_bytes, seconds }
    }

    /// When shards of the layers from `first` on are back, with pushes, sums and pulls at once.
    fn proxies(&self, first: usize, gradients: &[f64], synchronised: &mut [f64]) {
        let mut shards = vec![];
        for layer in (first..self.layers.len()).rev() {
            let bytes = self.layers[layer];
            let size = if self.shard_bytes == 0 { bytes } else { self.shard_bytes };
            shards.extend(
                pieces(bytes, size, 1)
                    .map(|piece| (layer, (piece.end - piece.start) as f64, gradients[layer])),
            );
        }
        for seconds_a_byte in self.stages_s() {
            shards = self.stage(&shards, seconds_a_byte);
        }
        for (layer, _, at) in shards {
            synchronised[layer] = synchronised[layer].max(at);
        }
    }

    /// One resource of the pipeline: shards as they come, each with its layer, its bytes and when it is there; the same as they leave.
    fn stage(&self, shards: &[(usize, f64, f64)], seconds_a_byte: f64) -> Vec<(usize, f64, f64)> {
        let mut resource = Resource::default();
        let mut waiting = BinaryHeap::new();
        let (mut next, mut done) = (0, Vec::with_capacity(shards.len()));
        while done.len() < shards.len() {
            if waiting.is_empty() {
                resource.0 = resource.0.max(shards[next].2);
            }
            while let Some((layer, ..)) = shards.get(next).filter(|it| it.2 <= resource.0) {
                let rank = match self.order {
                    ShardOrder::FirstInFirstOut => 0,
                    ShardOrder::FirstLayersFirst => *layer,
                };
                waiting.push(Reverse((rank, next)));
                next += 1;
            }
            let Some(Reverse((_, at))) = waiting.pop() else { unreachable!("a shard that waits") };
            let (layer, bytes, from) = shards[at];
            done.push((layer, bytes, resource.take(from, self.latency_s + bytes * seconds_a_byte)));
        }
        done
    }

    /// The share of a hundred with which the step is shortest. The paper's formula lets the forward pass wait for all proxies; this knows that
    /// layers are there one after the other.
    #[must_use]
    pub fn best(&self) -> SplitPoint {
        let points = self.sweep(100).into_iter();
        let shorter = |one: SplitPoint, other: SplitPoint| {
            if other.seconds.step_s < one.seconds.step_s * (1.0 - 1e-9) { other } else { one }
        };
        points.reduce(shorter).unwrap_or_else(|| self.service(0.0))
    }

    /// The step at shares of the bytes from 0 to 1, so many steps apart.
    #[must_use]
    pub fn sweep(&self, steps: u32) -> Vec<SplitPoint> {
        (0..=steps)
            .map(|step| self.service(f64::from(step) / f64::from(steps) * self.bytes() as f64))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An embedding of 125 MB and 24 layers of 50 MB on four workers.
    fn job(order: ShardOrder, shard_bytes: u64) -> SyncJob {
        let gb = |rate: f64| Bandwidth::new(rate * 1e9);
        SyncJob {
            layers: std::iter::once(125_000_000).chain([50_000_000; 24]).collect(),
            workers: 4,
            forward_s: 0.04,
            backward_s: 0.08,
            worker: gb(12.0),
            proxies: None,
            proxy: gb(12.0),
            link: gb(24.0),
            latency_s: 0.0,
            shard_bytes,
            order,
        }
    }

    #[test]
    fn an_all_reduce_takes_its_formula_and_overlap_hides_what_comes_before_the_last_layer() {
        let job = job(ShardOrder::FirstInFirstOut, 0);
        let ring = 1.5 * 1.325e9 / 12e9;
        let blocking = job.all_reduce();
        assert!((blocking.blocked_s - ring).abs() < 1e-12 && (blocking.step_s - 0.12 - ring).abs() < 1e-12);
        let overlapped = job.overlapped();
        assert!(overlapped.step_s < blocking.step_s && overlapped.blocked_s > ring - 0.08);
        // The service with nothing on its proxies is the all-reduce.
        assert_eq!(job.service(0.0).seconds, blocking);
        let gb = Bandwidth::new(1e9);
        assert!((job.central(gb, gb).blocked_s - 2.0 * 4.0 * 1.325).abs() < 1e-9);
    }

    /// Nothing ends before the busiest resource can have carried all, and the paper's formula is that bound.
    #[test]
    fn the_service_is_never_faster_than_the_papers_formula_less_a_forward_pass_and_near_it_at_its_split() {
        for (shard, proxies) in [(0, None), (2_000_000, None), (2_000_000, Some(4)), (2_000_000, Some(1))] {
            let job = SyncJob { proxies, ..job(ShardOrder::FirstLayersFirst, shard) };
            let pace = job.pace();
            for point in job.sweep(10) {
                let bound = polder_place::sync::step_seconds(
                    job.bytes() as f64,
                    job.workers,
                    &pace,
                    point.proxied_bytes as f64,
                );
                assert!(point.seconds.step_s >= bound - 0.04 - 1e-9, "{point:?} {bound}");
            }
            let formula = job.service(job.split_bytes()).seconds.step_s;
            let best = job.best().seconds.step_s;
            assert!(best <= formula && formula <= 1.1 * best, "{formula} {best}");
        }
    }

    /// Shards fill the pipeline, and the first layers first let the forward pass begin.
    #[test]
    fn shards_and_priority_cut_what_blocks() {
        let all = 1.325e9;
        let step = |order, shard| job(order, shard).service(all).seconds.step_s;
        let [fifo, shards, first] = [
            step(ShardOrder::FirstInFirstOut, 0),
            step(ShardOrder::FirstInFirstOut, 2_000_000),
            step(ShardOrder::FirstLayersFirst, 2_000_000),
        ];
        assert!(fifo > shards && shards > first, "{fifo} {shards} {first}");
        assert!(first < 0.85 * fifo, "{fifo} {first}");
    }

    #[test]
    fn proxies_apart_take_what_their_devices_carry_of_every_worker() {
        let all = 1.325e9;
        let seconds = |proxies| {
            let job = SyncJob { proxies: Some(proxies), ..job(ShardOrder::FirstInFirstOut, 2_000_000) };
            job.service(all).seconds
        };
        // Four workers write all gradients to one device, and with four devices a quarter to each.
        assert!((seconds(1).step_s - (4.0 * all / 12e9 + 0.04)).abs() < 0.01, "{:?}", seconds(1));
        assert!(seconds(4).blocked_s < 0.15 * seconds(1).blocked_s, "{:?}", seconds(4));
        // A worker's link bounds any number of them.
        assert_eq!(seconds(8), seconds(64));
    }

    #[test]
    fn one_worker_waits_for_nothing_of_its_ring() {
        let alone = SyncJob { workers: 1, ..job(ShardOrder::FirstInFirstOut, 0) };
        assert!(alone.all_reduce().blocked_s < 1e-12);
    }
}
