//! The view: who belongs to the pool, in the keeper's words.
//!
//! Nothing is elected in the pool. Each incarnation of the keeper was authorised from outside and writes its own
//! lines. The highest incarnation counts. Two rules make a newer keeper take over all that readers accepted:
//!
//! - A reader reads the words of an incarnation, and looks for higher ones *afterwards*. If none has announced itself, it
//!   accepts them. If a higher one starts, the reader keeps the view that it saw last until that one has published its
//!   view. Meanwhile hosts that the old keeper admits count as members too.
//! - A new incarnation announces itself before it reads the words of the older ones.
//!
//! A pool has places for some incarnations. A new one may take the place of an earlier one that is gone, unless that one's
//! view is still in force. So no reader needs the old view: a later keeper has published one, or the old keeper never did.
//! An operator's `--force` stands for the knowledge that the earlier one is gone, but never for the second condition. A slow
//! reader may still hold the old view and find the new one's grants in the place. It ignores those that are newer, because
//! their epoch is higher. Inherited grants are never newer than the view.
//!
//! # Words of a view line
//! | word | what |
//! |---|---|
//! | 0 | bits 0..16 the keeper's incarnation, bits 16..32 what the line says: 1 the keeper starts, 2 ids come from the launcher, 3 ids come from the keeper |
//! | 1 | epoch: incarnation * 1,000,000 + number of the change |
//! | 2 | members, one bit a host id (0 where ids come from the launcher) |
//! | 3 | fenced, one bit a host id: surely off, and its shard put right |
//! | 4 | evicted, one bit a host id: the grant line says which incarnations |
//! | 5, 6 | spare, 0 |
//!
//! # Words of a grant line
//! | word | what |
//! |---|---|
//! | 0 | nonce of the claim that was granted last, 0 if none |
//! | 1 | hash of the holder's boot id |
//! | 2 | the host's incarnation that holds the id |
//! | 3 | epoch of the grant |
//! | 4 | the highest incarnation of the host that was evicted |
//! | 5, 6 | spare, 0 |

use std::time::Duration;

use polder_mem::{Fault, LINE, Memory, Offset};

use crate::PoolError;
use crate::format::{Layout, SETTLE, read_settled};
use crate::line::{self, WORDS, Words};
use crate::membership::{HostLine, HostState};

/// Changes that one incarnation of the keeper can make.
pub(crate) const CHANGES: u64 = 1_000_000;

const EMPTY: Words = [0; WORDS];

/// Who says which host ids are in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IdSource {
    /// The launcher: a host with a live host line is a member unless it was evicted. So it is also before any keeper
    /// ran.
    Launcher,
    /// The keeper: a host is a member when it was admitted.
    Keeper,
}

/// Who belongs to the pool, as of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct View {
    /// Grows with every change; 0 before any keeper ran.
    pub epoch: u64,
    /// The incarnation of the keeper whose view this is; 0 before any keeper ran.
    pub keeper: u16,
    /// Who gives host ids.
    pub id_source: IdSource,
    /// The hosts that belong, one bit each.
    pub members: u64,
    /// The hosts that are surely off, one bit each.
    pub fenced: u64,
    /// The hosts of which an incarnation was evicted, one bit each.
    pub evicted: u64,
}

impl View {
    /// Before any keeper ran.
    pub(crate) const INITIAL: Self =
        Self { epoch: 0, keeper: 0, id_source: IdSource::Launcher, members: 0, fenced: 0, evicted: 0 };

    /// Whether `host` belongs to the pool.
    #[must_use]
    pub const fn has(&self, host: u16) -> bool {
        self.members >> host & 1 == 1
    }

    /// Whether `host` is confirmed to be off.
    #[must_use]
    pub const fn is_fenced(&self, host: u16) -> bool {
        self.fenced >> host & 1 == 1
    }

    pub(crate) const fn had_evicted(&self, host: u16) -> bool {
        self.evicted >> host & 1 == 1
    }

    pub(crate) fn encode(&self) -> Words {
        let says = match self.id_source {
            IdSource::Launcher => 2,
            IdSource::Keeper => 3,
        };
        [u64::from(self.keeper) | says << 16, self.epoch, self.members, self.fenced, self.evicted, 0, 0]
    }

    /// The line in which keeper incarnation `keeper` says that it starts.
    pub(crate) fn starting(keeper: u16) -> Words {
        [u64::from(keeper) | 1 << 16, u64::from(keeper) * CHANGES, 0, 0, 0, 0, 0]
    }

    /// Which of the two lines holds this view: the older one is always overwritten.
    pub(crate) const fn line_of(epoch: u64) -> u16 {
        (epoch & 1) as u16
    }

    fn decode(words: &Words, keeper: u16, hosts: u16) -> Option<KeeperLines> {
        let epoch = words[1];
        let no_host = u64::MAX.checked_shl(hosts.into()).unwrap_or(0);
        let strangers = (words[2] | words[3] | words[4]) & no_host;
        if words[0] as u16 != keeper || epoch / CHANGES != u64::from(keeper) || strangers != 0 {
            return None;
        }
        let id_source = match words[0] >> 16 {
            1 => return Some(KeeperLines::Starting),
            2 => IdSource::Launcher,
            3 => IdSource::Keeper,
            _ => return None,
        };
        let [_, _, members, fenced, evicted, ..] = *words;
        Some(KeeperLines::View(Self { epoch, keeper, id_source, members, fenced, evicted }))
    }
}

/// Which incarnation of a host holds the host id, in the keeper's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(crate) struct Grant {
    pub(crate) nonce: u64,
    pub(crate) boot: u64,
    pub(crate) incarnation: u64,
    pub(crate) epoch: u64,
    pub(crate) evicted_through: u64,
}

impl Grant {
    pub(crate) const fn encode(&self) -> Words {
        [self.nonce, self.boot, self.incarnation, self.epoch, self.evicted_through, 0, 0]
    }

    const fn decode([nonce, boot, incarnation, epoch, evicted_through, ..]: Words) -> Self {
        Self { nonce, boot, incarnation, epoch, evicted_through }
    }

    /// Whether `view` says that the grant holds: a newer grant is not in force before a newer view.
    pub(crate) const fn stands_in(&self, view: &View, host: u16) -> bool {
        view.has(host) && self.epoch <= view.epoch
    }

    /// Reads what keeper incarnation `keeper` said of `host`.
    pub(crate) fn read<M: Memory>(
        memory: &M,
        layout: &Layout,
        keeper: u16,
        host: u16,
        patience: Duration,
    ) -> Result<Self, PoolError> {
        if keeper == 0 {
            return Ok(Self::default());
        }
        read_settled(memory, layout.grant_line(keeper, host), "grant line", patience).map(Self::decode)
    }
}

/// What one keeper's lines say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeeperLines {
    Nothing,
    Starting,
    View(View),
    /// Both lines stay torn or damaged.
    Unclear,
    /// A newer keeper has its place.
    Replaced,
}

/// What `keeper` says now, and which of its lines is torn or damaged. While one line is torn the other may change, and
/// neither is the newest by itself: it is when both looks before and after say the same.
pub(crate) fn read_keeper<M: Memory>(
    memory: &M,
    layout: &Layout,
    keeper: u16,
) -> Result<(KeeperLines, Option<Offset>), Fault> {
    const LOOKS: u32 = 64;
    let mut last = None;
    for _ in 0..LOOKS {
        let [first, second] = read_lines(memory, layout, keeper)?;
        let (view, torn) = match (first, second) {
            (Some(KeeperLines::Replaced), _) | (_, Some(KeeperLines::Replaced)) => {
                return Ok((KeeperLines::Replaced, None));
            }
            (Some(first), Some(second)) => return Ok((newer(first, second), None)),
            // Its first words.
            (None, Some(KeeperLines::Nothing)) => {
                return Ok((KeeperLines::Starting, Some(layout.view_line(keeper, 0))));
            }
            (None, Some(view)) => (view, layout.view_line(keeper, 0)),
            (Some(view), None) => (view, layout.view_line(keeper, 1)),
            (None, None) => continue,
        };
        if last == Some(view) {
            return Ok((view, Some(torn)));
        }
        last = Some(view);
    }
    Ok((KeeperLines::Unclear, Some(layout.view_line(keeper, 0))))
}

fn newer(first: KeeperLines, second: KeeperLines) -> KeeperLines {
    match (first, second) {
        (KeeperLines::View(one), KeeperLines::View(two)) if one.epoch > two.epoch => first,
        (_, KeeperLines::View(_)) => second,
        _ => first,
    }
}

/// What each of the view lines of `keeper` says; `None` for one that is torn or damaged.
fn read_lines<M: Memory>(
    memory: &M,
    layout: &Layout,
    keeper: u16,
) -> Result<[Option<KeeperLines>; 2], Fault> {
    memory.invalidate(layout.view_line(keeper, 0), 2 * LINE);
    // Before both lines of the view.
    // SYNC: pairs with `Keeper::publish`.
    memory.fence_invalidations();
    let mut views = [None; 2];
    for (half, view) in (0..).zip(&mut views) {
        *view = match line::load(memory, layout.view_line(keeper, half))? {
            Some(EMPTY) => Some(KeeperLines::Nothing),
            // A line that this keeper has not written yet, or that is another's by now.
            Some(words) if holds(layout, keeper, words[0]) && words[0] as u16 != keeper => {
                Some(if (words[0] as u16) < keeper { KeeperLines::Nothing } else { KeeperLines::Replaced })
            }
            Some(words) => View::decode(&words, keeper, layout.geometry().hosts),
            None => None,
        };
    }
    Ok(views)
}

/// The highest incarnation above `keeper` that ever announced itself, and what it says. Its first line is written first
/// and never empty after: one word tells.
// SYNC: of a reader that accepts a view and then looks here, and a new keeper that announces itself and then reads the
// views of older ones, at least one sees the other.
pub(crate) fn newest_above<M: Memory>(
    memory: &M,
    layout: &Layout,
    keeper: u16,
) -> Result<Option<(u16, KeeperLines)>, Fault> {
    match announced(memory, layout)?.first() {
        Some(&newest) if newest > keeper => Ok(Some((newest, read_keeper(memory, layout, newest)?.0))),
        _ => Ok(None),
    }
}

/// The incarnations that announced themselves last in each place, the highest first.
pub(crate) fn announced<M: Memory>(memory: &M, layout: &Layout) -> Result<Vec<u16>, Fault> {
    let places = 1..=layout.geometry().keepers;
    for keeper in places.clone() {
        memory.invalidate(layout.view_line(keeper, 0), LINE);
    }
    // Before the first words of all higher keepers.
    // SYNC: pairs with the first line of a new keeper, as at `newest_above`.
    memory.fence_invalidations();
    let mut keepers = vec![];
    for place in places {
        let first = memory.load(layout.view_line(place, 0))?;
        if holds(layout, place, first) {
            keepers.push(first as u16);
        } else if first != 0 {
            // Damaged, unless the other line says whose it is: then the keeper for which the place was made.
            let second = line::read(memory, layout.view_line(place, 1))?.map_or(0, |words| words[0]);
            keepers.push(if holds(layout, place, second) { second as u16 } else { place });
        }
    }
    keepers.sort_unstable_by(|one, other| other.cmp(one));
    Ok(keepers)
}

/// Whether the first word of a view line in the place of `keeper` is that of a keeper which has this place.
fn holds(layout: &Layout, keeper: u16, first: u64) -> bool {
    let incarnation = first as u16;
    incarnation > 0 && incarnation % layout.geometry().keepers == keeper % layout.geometry().keepers
}

/// A reader's memory of the view, which never goes backwards.
#[derive(Clone, Debug)]
pub(crate) struct Views {
    best: Option<View>,
    patience: Duration,
}

impl Views {
    /// A reader that waits up to `patience` for a keeper that is in the middle of saying something.
    pub(crate) const fn new(patience: Duration) -> Self {
        Self { best: None, patience }
    }

    fn settle(&self) -> Duration {
        self.patience.min(SETTLE)
    }

    /// The newest view, together with what `also` reads of the same keeper's grants: both stood before any newer keeper
    /// was there. While a keeper starts, what was seen last goes on.
    ///
    /// # Errors
    /// Those of `also`; [`PoolError::Corrupt`] when the newest view stays torn, or a keeper died while it started and
    /// nothing was seen before.
    pub(crate) fn read<M: Memory, T>(
        &mut self,
        memory: &M,
        layout: &Layout,
        mut also: impl FnMut(&View) -> Result<T, PoolError>,
    ) -> Result<(View, T), PoolError> {
        let deadline = memory.now() + self.patience;
        let mut keeper = match self.best {
            Some(best) => best.keeper,
            None => newest_above(memory, layout, 0)?.map_or(0, |(keeper, _)| keeper),
        };
        loop {
            // Who was stopped beyond its deadline looks once more.
            let is_late = memory.now() >= deadline;
            let mut unclear = layout.view_line(keeper.max(1), 0);
            let view = self.acceptable(memory, layout, keeper)?;
            let extra = view.map(|view| also(&view));
            match (newest_above(memory, layout, keeper)?, view.zip(extra), self.best) {
                (Some((newer, KeeperLines::View(_))), ..) => {
                    keeper = newer;
                    continue;
                }
                (None, Some((view, extra)), _) => {
                    let extra = extra?;
                    self.best = Some(view);
                    return Ok((view, extra));
                }
                (Some(_), said, Some(best)) => {
                    let best =
                        in_transition(memory, layout, best, said.map(|(view, _)| view), self.settle())?;
                    return Ok((best, also(&best)?));
                }
                (Some((newer, _)), _, None) => unclear = layout.view_line(newer, 0),
                (None, None, _) => {}
            }
            if is_late {
                return Err(PoolError::Corrupt { offset: unclear, what: "view line" });
            }
            memory.pause();
        }
    }

    /// What `keeper` says, unless that is older than what was seen, or is seen for the first time and not all clear.
    fn acceptable<M: Memory>(
        &self,
        memory: &M,
        layout: &Layout,
        keeper: u16,
    ) -> Result<Option<View>, PoolError> {
        if keeper == 0 {
            return with_launched(memory, layout, View::INITIAL, self.settle()).map(Some);
        }
        let (said, unclear) = read_keeper(memory, layout, keeper)?;
        match (said, self.best) {
            (KeeperLines::View(view), Some(best)) if view.epoch < best.epoch => Ok(None),
            (KeeperLines::View(_), None) if unclear.is_some() => Ok(None),
            (KeeperLines::View(view), _) => with_launched(memory, layout, view, self.settle()).map(Some),
            _ => Ok(None),
        }
    }
}

/// What goes on while a newer keeper starts: the view seen last. Whether what the old keeper says now was taken over is
/// not known yet, so that a host counts as a member by either.
fn in_transition<M: Memory>(
    memory: &M,
    layout: &Layout,
    best: View,
    announced: Option<View>,
    patience: Duration,
) -> Result<View, PoolError> {
    let best = with_launched(memory, layout, best, patience)?;
    Ok(View { members: best.members | announced.map_or(0, |view| view.members), ..best })
}

/// Adds the members where ids come from the launcher: hosts with a live host line that was not evicted.
pub(crate) fn with_launched<M: Memory>(
    memory: &M,
    layout: &Layout,
    view: View,
    patience: Duration,
) -> Result<View, PoolError> {
    if view.id_source == IdSource::Keeper {
        return Ok(view);
    }
    let mut members = 0;
    memory.invalidate(layout.host_line(0), u64::from(layout.geometry().hosts) * LINE);
    // Before all host lines.
    // SYNC: pairs with `arrive`, and with the keeper's last line of a fenced host.
    memory.fence_invalidations();
    for host in 0..layout.geometry().hosts {
        let at = layout.host_line(host);
        let lives = match line::load(memory, at)?.as_ref().and_then(HostLine::decode) {
            Some(line) if line.state != HostState::Live => false,
            // A line that cannot be read may be a member's, unless it shows one that was evicted.
            line if view.had_evicted(host) => {
                let incarnation =
                    line.map_or_else(|| memory.load(at.word(2)), |line| Ok(line.incarnation))?;
                incarnation > Grant::read(memory, layout, view.keeper, host, patience)?.evicted_through
            }
            _ => true,
        };
        members |= u64::from(lives) << host;
    }
    Ok(View { members, ..view })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_comes_back_from_its_words() {
        let view = View {
            epoch: 7 * CHANGES + 3,
            keeper: 7,
            id_source: IdSource::Keeper,
            members: 5,
            fenced: 8,
            evicted: 10,
        };
        assert_eq!(View::decode(&view.encode(), 7, 4), Some(KeeperLines::View(view)));
        assert_eq!(View::decode(&view.encode(), 6, 4), None, "another keeper's words");
        assert_eq!(View::decode(&view.encode(), 7, 3), None, "a host that there is not");
        assert_eq!(View::decode(&View::starting(7), 7, 4), Some(KeeperLines::Starting));
    }

    #[test]
    fn a_grant_comes_back_from_its_words() {
        let grant = Grant { nonce: 1, boot: 2, incarnation: 3, epoch: 4, evicted_through: 5 };
        assert_eq!(Grant::decode(grant.encode()), grant);
    }
}
