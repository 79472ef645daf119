//! Registered memory: where it is, and what a peer may do with how much of it.

use std::collections::BTreeMap;

/// What peers may do, in libfabric's numbers.
pub(crate) const READ: u64 = 1 << 12;
pub(crate) const WRITE: u64 = 1 << 13;

/// A registration.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    pub(crate) at: usize,
    pub(crate) bytes: usize,
    /// What peers call its first byte.
    pub(crate) first: u64,
    pub(crate) access: u64,
    /// Counters of what peers do here, each with what it counts.
    pub(crate) counters: Vec<(usize, u64)>,
}

/// Why a peer may not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    NoKey,
    NoAccess,
}

/// What is registered in a domain, by key.
#[derive(Default)]
pub(crate) struct Regions {
    by_key: BTreeMap<u64, Region>,
    /// The key that was made last where the program chose none.
    made: u64,
}

impl Regions {
    /// Keeps a region under the key that is wanted, or one of its own; `None` when it is taken.
    pub(crate) fn insert(&mut self, wanted: Option<u64>, region: Region) -> Option<u64> {
        let key = wanted.unwrap_or_else(|| {
            self.made += 1;
            self.made
        });
        let is_free = !self.by_key.contains_key(&key);
        is_free.then(|| {
            self.by_key.insert(key, region);
            key
        })
    }

    pub(crate) fn get_mut(&mut self, key: u64) -> Option<&mut Region> {
        self.by_key.get_mut(&key)
    }

    pub(crate) fn remove(&mut self, key: u64) -> Option<Region> {
        self.by_key.remove(&key)
    }

    pub(crate) fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Whether peers may reach any of it.
    pub(crate) fn any_for_peers(&self) -> bool {
        self.by_key.values().any(|region| region.access & (READ | WRITE) != 0)
    }

    /// Where in this process the memory is that a peer asks for; all of it is registered for that.
    pub(crate) fn find(&self, key: u64, address: u64, bytes: u64, access: u64) -> Result<usize, Refusal> {
        let region = self.by_key.get(&key).ok_or(Refusal::NoKey)?;
        let offset = address.checked_sub(region.first);
        let within =
            offset.filter(|offset| offset.checked_add(bytes).is_some_and(|end| end <= region.bytes as u64));
        let at = within.and_then(|offset| region.at.checked_add(usize::try_from(offset).ok()?));
        // Where a program registers all that it has, nothing is at zero still.
        let at = at.filter(|&at| at != 0 || bytes == 0).ok_or(Refusal::NoAccess)?;
        if region.access & access == access { Ok(at) } else { Err(Refusal::NoAccess) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_reaches_what_is_registered_for_it_and_nothing_else() {
        let mut regions = Regions::default();
        let region = Region { at: 4096, bytes: 100, first: 1000, access: READ, counters: vec![] };
        assert_eq!(regions.insert(Some(5), region.clone()), Some(5));
        assert_eq!(regions.insert(Some(5), region.clone()), None);
        let all = Region { at: 0, bytes: usize::MAX, first: 0, access: READ | WRITE, ..region };
        assert_eq!(regions.insert(None, all), Some(1));
        assert_eq!(regions.find(5, 1010, 90, READ), Ok(4106));
        assert_eq!(regions.find(5, 1100, 0, READ), Ok(4196));
        for (address, bytes) in [(1010, 91), (999, 1), (1101, 0), (1010, u64::MAX), (u64::MAX, 2)] {
            assert_eq!(regions.find(5, address, bytes, READ), Err(Refusal::NoAccess), "{address} {bytes}");
        }
        assert_eq!(regions.find(5, 1010, 1, WRITE), Err(Refusal::NoAccess));
        assert_eq!(regions.find(6, 1010, 1, READ), Err(Refusal::NoKey));
        assert_eq!(regions.find(1, 0, 1, WRITE), Err(Refusal::NoAccess));
        assert_eq!(regions.find(1, 77, 1, WRITE), Ok(77));
        assert_eq!(regions.find(1, u64::MAX, 1, WRITE), Err(Refusal::NoAccess));
    }
}
