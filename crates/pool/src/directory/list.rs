//! Looking at everything: what objects there are, and how full the pool is.

use std::collections::BTreeSet;

use polder_mem::{LINE, Memory, Offset};

use crate::PoolError;
use crate::directory::{Directory, Sight};
use crate::entry::{Entry, State};
use crate::object::Header;

/// So many lines are invalidated behind one fence.
const BATCH: u32 = 64;

/// An object, as [`Pool::list`](crate::Pool::list) found it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListedObject {
    /// Its name.
    pub name: String,
    /// Where its data begins.
    pub at: Offset,
    /// Its size in bytes.
    pub bytes: u64,
    /// The host that created it.
    pub owner: u16,
    /// Tells it from every other object that its owner ever had.
    pub generation: u64,
    /// The job on whose account it is.
    pub job: u64,
}

/// What the directory holds.
#[derive(Debug, Default)]
pub(crate) struct Inventory {
    pub(crate) live: Vec<Sight>,
    pub(crate) claimed: u64,
    pub(crate) condemned: u64,
    pub(crate) tombstones: u64,
    /// Lines that are torn or damaged.
    pub(crate) unclear: Vec<Offset>,
}

impl<M: Memory> Directory<'_, M> {
    /// The live objects, and where entries lie that are damaged or being written.
    pub(crate) fn list(&self, prefix: &str) -> Result<(Vec<ListedObject>, Vec<Offset>), PoolError> {
        let (mut listed, inventory) = (vec![], self.inventory()?);
        for batch in inventory.live.chunks(BATCH as usize) {
            self.list_batch(batch, prefix, &mut listed)?;
        }
        Ok((listed, inventory.unclear))
    }

    /// Reads the headers that entries lead to, then the entries again: a header counts while its entry stands.
    fn list_batch(
        &self,
        batch: &[Sight],
        prefix: &str,
        listed: &mut Vec<ListedObject>,
    ) -> Result<(), PoolError> {
        let (layout, memory) = (self.site.layout, self.site.memory);
        let valid = || batch.iter().filter(|sight| self.extent_of(&sight.record).is_some());
        for sight in valid() {
            memory.invalidate(sight.record.header, u64::from(sight.record.header_lines) * LINE);
        }
        // SYNC: pairs with `Directory::claim`, which announces an entry after its header is written.
        memory.fence_invalidations();
        let mut headers = vec![];
        for sight in valid() {
            let header = Header::load(memory, sight.record.header, sight.record.header_lines)?;
            headers.push(header.filter(|header| sight.has(header) && header.name.starts_with(prefix)));
            memory.invalidate(layout.entry(sight.host, sight.slot), LINE);
        }
        // SYNC: pairs with `condemn`: bytes are used again only once their entry says so, and this reads it after its header.
        memory.fence_invalidations();
        for (sight, header) in valid().zip(headers) {
            let stands =
                self.load_entry(sight.host, sight.slot)? == Some(Entry::Object(State::Live, sight.record));
            if let (true, Some(Header { name, bytes, generation, owner, .. })) = (stands, header) {
                let (at, job) = (sight.record.data(), sight.record.job);
                listed.push(ListedObject { name, at, bytes, owner, generation, job });
            }
        }
        Ok(())
    }

    /// Reads every entry of every host that was ever in the pool.
    pub(crate) fn inventory(&self) -> Result<Inventory, PoolError> {
        let (mut inventory, mut buried) = (Inventory::default(), BTreeSet::new());
        let (layout, memory) = (self.site.layout, self.site.memory);
        for host in self.site.hosts(self.site.survey(|_| ())?) {
            for first in (0..layout.slots()).step_by(BATCH as usize) {
                let batch = first..(first + BATCH).min(layout.slots());
                if host != self.site.host() {
                    memory.invalidate(layout.entry(host, first), u64::from(batch.end - first) * LINE);
                    // SYNC: pairs with the `line::publish_and_fence` of an entry, as in `Directory::create_in`.
                    memory.fence_invalidations();
                }
                for slot in batch {
                    match self.load_entry(host, slot)? {
                        None => inventory.unclear.push(layout.entry(host, slot)),
                        Some(Entry::Free) => {}
                        Some(Entry::Tombstone(tombstone)) => {
                            inventory.tombstones += 1;
                            buried.insert((tombstone.owner, tombstone.slot, tombstone.generation));
                        }
                        Some(Entry::Object(State::Claimed, _)) => inventory.claimed += 1,
                        Some(Entry::Object(State::Condemned, _)) => inventory.condemned += 1,
                        Some(Entry::Object(State::Live, record)) => {
                            inventory.live.push(Sight { host, slot, record });
                        }
                    }
                }
            }
        }
        let is_buried = |sight: &Sight| buried.contains(&(sight.host, sight.slot, sight.record.generation));
        inventory.live.retain(|sight| !is_buried(sight));
        Ok(inventory)
    }
}
