//! Where completions are written down, which addresses are known, and what is registered: each thing at a place of its own.

use crate::counter::Counter;
use crate::queue::Queue;
use crate::region::Regions;
use crate::vector::Vector;

/// Where completions are written down, who is called what, and what is registered.
#[derive(Default)]
pub(crate) struct Ledger {
    pub(crate) queues: Table<Queue>,
    pub(crate) counters: Table<Counter>,
    pub(crate) vectors: Table<Vector>,
    pub(crate) regions: Regions,
}

/// Things at places that stay theirs until they are removed.
pub(crate) struct Table<T>(Vec<Option<T>>);

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Table<T> {
    pub(crate) fn insert(&mut self, thing: T) -> usize {
        match self.0.iter().position(Option::is_none) {
            Some(free) => {
                self.0[free] = Some(thing);
                free
            }
            None => {
                self.0.push(Some(thing));
                self.0.len() - 1
            }
        }
    }

    pub(crate) fn remove(&mut self, at: usize) -> Option<T> {
        self.0.get_mut(at)?.take()
    }

    pub(crate) fn get(&self, at: usize) -> Option<&T> {
        self.0.get(at)?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, at: usize) -> Option<&mut T> {
        self.0.get_mut(at)?.as_mut()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.iter_mut().flatten()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.iter().flatten().count()
    }
}
