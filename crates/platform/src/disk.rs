//! What objects of a program on this machine can be placed in: other memory, and folders on disks.

use serde::{Deserialize, Serialize};

use crate::{Bandwidth, Bytes, Time};

/// A folder on a disk that objects can be placed in, by direct I/O.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// Where.
    pub folder: String,
    /// How much of it objects may take.
    pub capacity: Bytes,
    /// Reading, several transfers at once, past the page cache.
    pub read: Bandwidth,
    /// Writing, in the same way.
    pub write: Bandwidth,
}

/// Memory that objects can be placed in: a NUMA node, or a dax device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LocalTier {
    /// The node, or
    pub node: Option<u32>,
    /// the device, one of the two.
    pub device: Option<String>,
    /// How much.
    pub capacity: Bytes,
    /// Of a load, while nothing else goes on.
    pub latency: Time,
    /// What threads of one node reach of it, from the fewest to the most.
    pub threads: Vec<ThreadRates>,
}

/// What so many threads reach of a tier together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ThreadRates {
    /// How many.
    pub threads: u32,
    /// Reading.
    pub read: Bandwidth,
    /// Writing.
    pub write: Bandwidth,
}

impl LocalTier {
    /// Read and write rates of so many threads: of as many as were measured, or of the next fewer. Without a number, of
    /// the most.
    #[must_use]
    pub fn rates(&self, threads: Option<u32>) -> (Bandwidth, Bandwidth) {
        let fits = |it: &&ThreadRates| threads.is_none_or(|most| it.threads <= most);
        let found = self.threads.iter().rev().find(fits).unwrap_or(&self.threads[0]);
        (found.read, found.write)
    }

    pub(crate) fn check(&self) -> Result<(), (&'static str, String)> {
        if self.node.is_some() == self.device.is_some() {
            return Err(("node", "expected node or device, one of the two".into()));
        }
        if self.threads.is_empty() || !self.threads.is_sorted_by(|one, next| one.threads < next.threads) {
            return Err(("threads", "expected rates, of ever more threads".into()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tier(node: Option<u32>, device: Option<&str>, counts: &[u32]) -> LocalTier {
        let rates = |&threads: &u32| {
            let rate = Bandwidth::new(1e9 * f64::from(threads));
            ThreadRates { threads, read: rate, write: rate }
        };
        let threads = counts.iter().map(rates).collect();
        let (capacity, latency) = (Bytes::new(1e9), Time::new(1e-7));
        LocalTier { node, device: device.map(str::to_owned), capacity, latency, threads }
    }

    #[test]
    fn a_tier_is_a_node_or_a_device_with_rates_of_ever_more_threads() {
        assert_eq!(tier(Some(1), None, &[1, 8]).check(), Ok(()));
        assert_eq!(tier(None, Some("/dev/dax0.0"), &[1]).check(), Ok(()));
        for wrong in [tier(None, None, &[1]), tier(Some(1), Some("/dev/dax0.0"), &[1])] {
            assert_eq!(wrong.check().expect_err("wrong").0, "node");
        }
        for counts in [&[][..], &[8, 1], &[1, 1]] {
            assert_eq!(tier(Some(1), None, counts).check().expect_err("wrong").0, "threads");
        }
    }

    #[test]
    fn rates_are_those_of_as_many_threads_or_of_the_next_fewer() {
        let tier = tier(Some(1), None, &[2, 8]);
        let read = |threads| tier.rates(threads).0.value();
        assert_eq!([None, Some(1), Some(2), Some(7), Some(9)].map(read), [8e9, 2e9, 2e9, 2e9, 8e9]);
    }
}
