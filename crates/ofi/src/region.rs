//! Registered memory, by key.

use std::collections::BTreeSet;

/// What is registered in a domain.
#[derive(Default)]
pub(crate) struct Regions {
    keys: BTreeSet<u64>,
    /// The key that is tried next where the program chooses none.
    next: u64,
}

impl Regions {
    /// Takes a key, one of its own where none is wanted; `None` when it is taken.
    pub(crate) fn insert(&mut self, wanted: Option<u64>) -> Option<u64> {
        let key = wanted.unwrap_or_else(|| {
            self.next += 1;
            self.next
        });
        self.keys.insert(key).then_some(key)
    }

    pub(crate) fn remove(&mut self, key: u64) {
        self.keys.remove(&key);
    }

    pub(crate) fn len(&self) -> usize {
        self.keys.len()
    }
}
