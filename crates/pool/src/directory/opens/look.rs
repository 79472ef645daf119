//! Looks at announcements that only tell who holds what: nothing is freed by them.

use std::collections::BTreeSet;

use polder_mem::{Memory, ProcessSlot};

use super::{Announcement, Opens, PinnedSlot, WORDS_PER_LINE};
use crate::format::{Geometry, Layout};
use crate::{PoolError, word};

/// What processes have pinned, of all caches, as an inspection has just seen them: it has read these lines afresh.
pub(crate) fn pinned_slots<M: Memory>(
    memory: &M,
    layout: &Layout,
) -> Result<BTreeSet<PinnedSlot>, PoolError> {
    let Geometry { hosts, processes, opens, .. } = *layout.geometry();
    let all = (0..hosts).flat_map(|host| (0..processes).map(move |slot| (host, ProcessSlot(slot))));
    let mut pinned = BTreeSet::new();
    for (host, slot) in all {
        let lines = word::open(memory.load(layout.open_mark(host, slot))?).unwrap_or(u64::MAX);
        let words = lines.saturating_mul(WORDS_PER_LINE.into()).min(opens.into());
        let first = layout.announcement(host, slot, 0);
        for index in 0..words {
            let announced = word::open(memory.load(first.word(index))?).map(Announcement);
            pinned.extend(announced.and_then(Announcement::pinned));
        }
    }
    Ok(pinned)
}

impl<M: Memory> Opens<'_, M> {
    /// The processes of all hosts that announce `object`, as far as one look says.
    pub(crate) fn announcers(&self, object: Announcement) -> Result<Vec<(u16, ProcessSlot)>, PoolError> {
        let (site, memory, opens) = (self.0, self.0.memory, self.0.layout.geometry().opens);
        let mut announcers = vec![];
        for host in 0..site.layout.geometry().hosts {
            for slot in site.slots() {
                let first = site.layout.announcement(host, slot, 0);
                memory.invalidate(first, u64::from(opens) * 8);
                // SYNC: pairs with `announce`; an announcement that comes later is not of this look.
                memory.fence_invalidations();
                for index in 0..u64::from(opens) {
                    if word::open(memory.load(first.word(index))?) == Some(object.0) {
                        announcers.push((host, slot));
                        break;
                    }
                }
            }
        }
        Ok(announcers)
    }
}
