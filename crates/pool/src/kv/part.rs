//! A host's part of a cache: its control line, its log and its slabs, which its processes change under the host's lock.

use polder_mem::{LINE, Memory, Offset};

use super::wire::{Control, LogLine, MAX_SLABS, MAX_SLOTS, RECORDS, Record, SlabHead, Slot};
use super::{CLASSES, Cache, HEADER_BYTES};
use crate::object::{self, InitialContents, Object};
use crate::state::LockName;
use crate::{PoolError, line};

/// Blocks of a slab, where that many take more than a slab of the usual size.
const FEW_BLOCKS: u64 = 64;

/// A slab, whose object need not be held: whoever reads there looks twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slab {
    at: Offset,
    pub(super) head: SlabHead,
}

impl Slab {
    /// The line of a slot.
    pub(super) const fn entry(&self, index: u32) -> Offset {
        self.at.lines(1 + index as u64)
    }

    /// The bytes of a slot's block.
    pub(super) fn block(&self, index: u32) -> Offset {
        self.at.lines(1 + u64::from(self.head.slots)) + u64::from(index) * self.head.stride()
    }
}

/// What the slabs and the log of a host say.
#[derive(Debug, Default)]
pub(super) struct Survey {
    /// One more than the highest number of a slab.
    pub(super) slabs: u32,
    /// The sequence number after the highest in the log.
    pub(super) position: u64,
    /// Bytes of the slabs.
    claimed: u64,
    /// Names of slabs that were being made.
    half_made: Vec<String>,
}

impl<M: Memory> Cache<M> {
    /// What this host says of its part; nothing when it says nothing, or a dead process left the line half written.
    fn control(&self) -> Result<Option<Control>, PoolError> {
        let words = line::load(self.pool.memory(), self.control_at(self.pool.member().host))?;
        Ok(words.and_then(|words| Control::decode(&words)))
    }

    /// Stores what this host says of its part, for its own processes.
    fn store_control(&self, control: &Control) -> Offset {
        let at = self.control_at(self.pool.member().host);
        line::store(self.pool.memory(), at, &control.encode());
        at
    }

    /// Says to all hosts what this one says of its part.
    // SYNC: pairs with `control_of`.
    pub(super) fn publish_control(&self, control: &Control) {
        let at = self.store_control(control);
        self.pool.memory().write_back(at, LINE);
        self.pool.memory().mfence();
    }

    /// What another host says of its part.
    pub(super) fn control_of(&self, host: u16) -> Result<Option<Control>, PoolError> {
        let memory = self.pool.memory();
        memory.invalidate(self.control_at(host), LINE);
        // SYNC: pairs with `publish_control`.
        memory.fence_invalidations();
        let words = line::load(memory, self.control_at(host))?;
        Ok(words.and_then(|words| Control::decode(&words)))
    }

    /// Changes this host's part under the host's lock. Where `work` fails or its process dies, the next change begins anew with what
    /// the slabs and the log say.
    pub(super) fn change<R>(
        &self,
        work: impl FnOnce(&mut Control) -> Result<R, PoolError>,
    ) -> Result<R, PoolError> {
        self.pool.expect_member()?;
        let site = self.pool.directory().site;
        let mut guard = site.lock(LockName::Caches)?;
        // The lock is of all caches. What was left half done is told by this one's control line.
        guard.repaired();
        let mut control = match self.control()? {
            Some(known) if !known.busy && known.incarnation == self.pool.host_incarnation => known,
            _ => self.recover()?,
        };
        control.busy = true;
        self.store_control(&control);
        let done = work(&mut control)?;
        control.busy = false;
        self.store_control(&control);
        Ok(done)
    }

    /// Begins anew with what the slabs and the log say, after the host or a process of it died. Slabs that were being made are removed.
    fn recover(&self) -> Result<Control, PoolError> {
        let (memory, host) = (self.pool.memory(), self.pool.member().host);
        // This machine may have had another host's id, and read these lines as another host's.
        memory.invalidate(self.control_at(host), LINE);
        // SYNC: pairs with `publish_control` of the host's boot before.
        memory.fence_invalidations();
        let known = self.control()?.unwrap_or_default();
        let Survey { slabs, position, claimed, half_made } = self.survey(host, &self.part)?;
        for name in half_made {
            match self.pool.destroy(&name) {
                Ok(()) | Err(PoolError::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        // What stands there may be older than the slots.
        for class in 0..CLASSES {
            line::store(memory, self.part.at().lines(class), &[0; line::WORDS]);
        }
        let control = Control {
            busy: true,
            incarnation: self.pool.host_incarnation,
            slabs,
            claimed,
            // Lines of the dead may be there behind one that is not: whoever took them up finds none of these numbers again.
            position: position.max(known.position).saturating_add(self.geometry.log_lines),
            ..known
        };
        self.publish_control(&control);
        Ok(control)
    }

    /// What the slabs and the log of a host say, whatever its control line does.
    pub(super) fn survey(&self, host: u16, part: &Object) -> Result<Survey, PoolError> {
        let memory = self.pool.memory();
        let mut survey = Survey::default();
        // The log comes first: what is put meanwhile is in a slab that is seen, or behind the position.
        memory.invalidate(part.at(), part.bytes());
        // SYNC: pairs with `log` of a boot before, or of a host that died.
        memory.fence_invalidations();
        for index in 0..self.geometry.log_lines {
            let words = line::load(memory, self.log_at(part, index))?;
            let sequence = words.map_or(0, |words| LogLine::decode(&words).sequence);
            survey.position = survey.position.max(sequence.saturating_add(1));
        }
        let prefix = format!("/kv/{}/slab/{host}/", self.name);
        for listed in self.pool.list(&prefix)? {
            let Ok(number) = listed.name[prefix.len()..].parse::<u32>() else { continue };
            match self.slab(host, number)? {
                Some(slab) => {
                    memory.invalidate(slab.entry(0), u64::from(slab.head.slots) * LINE);
                    survey.claimed += slab.head.bytes();
                }
                None => survey.half_made.push(listed.name),
            }
            survey.slabs = survey.slabs.max(number.saturating_add(1).min(MAX_SLABS));
        }
        Ok(survey)
    }

    /// A slab of a host; nothing when there is none, or it is being made.
    pub(super) fn slab(&self, host: u16, number: u32) -> Result<Option<Slab>, PoolError> {
        let Some(object) = self.pool.open_if_there(&self.slab_name(host, number))? else { return Ok(None) };
        let slab = self.slab_in(&object);
        self.pool.close(object);
        slab
    }

    fn slab_in(&self, object: &Object) -> Result<Option<Slab>, PoolError> {
        if object.bytes() < LINE {
            return Ok(None);
        }
        let memory = self.pool.memory();
        memory.invalidate(object.at(), LINE);
        // SYNC: pairs with `fill_slab`.
        memory.fence_invalidations();
        let words = line::load(memory, object.at())?;
        let head = words.and_then(|words| SlabHead::decode(&words, object.generation()));
        Ok(head.filter(|head| head.bytes() <= object.bytes()).map(|head| Slab { at: object.at(), head }))
    }

    /// A slab's object, held open for writing to it.
    pub(super) fn hold_slab(&self, number: u32) -> Result<Object, PoolError> {
        self.pool.open(&self.slab_name(self.pool.member().host, number))
    }

    /// What a new slab for this cache's blocks is like.
    fn new_head(&self) -> SlabHead {
        let one = LINE + u64::from(self.identity.block).next_multiple_of(LINE);
        let usual = self.geometry.slab_bytes.saturating_sub(HEADER_BYTES + LINE) / one;
        let few = FEW_BLOCKS.min(self.geometry.budget / 8 / one);
        SlabHead { block: self.identity.block, slots: usual.max(few).clamp(1, MAX_SLOTS) as u32 }
    }

    /// Makes a slab, unless the budget or the pool has no room for it. Two hosts that ask at once may both be refused, and never both
    /// be given the last room.
    pub(super) fn grow(&self, control: &mut Control) -> Result<Option<Slab>, PoolError> {
        let (head, host) = (self.new_head(), self.pool.member().host);
        if control.slabs == MAX_SLABS || head.bytes() > self.geometry.budget {
            return Ok(None);
        }
        if !self.pool.is_live(&self.root.name, self.root.owner, self.root.generation)? {
            return Err(PoolError::NotFound { name: self.root.name.clone() });
        }
        control.claimed += head.bytes();
        self.publish_control(control);
        let made = match self.has_room(control, head.bytes())? {
            true => self.pool.create_filled(
                &self.slab_name(host, control.slabs),
                head.bytes(),
                InitialContents::Nothing,
            ),
            false => Err(PoolError::Full { asked: head.bytes(), free: 0, largest: 0 }),
        };
        let slab = match made {
            Ok(object) => {
                control.slabs += 1;
                let filled = self.fill_slab(&object, head);
                let at = object.at();
                self.pool.close(object);
                filled.map(|()| Some(Slab { at, head }))?
            }
            Err(
                error @ (PoolError::Full { .. } | PoolError::DirectoryFull { .. } | PoolError::Quota { .. }),
            ) => {
                tracing::debug!("the cache {} gets no further slab: {error}", self.name);
                control.claimed -= head.bytes();
                None
            }
            Err(error) => return Err(error),
        };
        self.publish_control(control);
        Ok(slab)
    }

    /// Whether all hosts together claim no more than the budget. Each claims before it looks.
    fn has_room(&self, control: &Control, bytes: u64) -> Result<bool, PoolError> {
        let mut claimed = control.claimed;
        for host in (0..self.geometry.hosts).filter(|host| *host != self.pool.member().host) {
            claimed = match self.control_of(host)? {
                Some(other) => claimed.saturating_add(other.claimed),
                None if self.is_empty(host)? => claimed,
                // It is writing its line, or died while it did: it has claimed what it has, and one slab more at most.
                None => {
                    claimed.saturating_add(self.listed_bytes(host)? + self.geometry.slab_bytes.max(bytes))
                }
            };
        }
        Ok(claimed <= self.geometry.budget)
    }

    /// Bytes of all slabs of a host, those included that are being made.
    fn listed_bytes(&self, host: u16) -> Result<u64, PoolError> {
        let listed = self.pool.list(&format!("/kv/{}/slab/{host}/", self.name))?;
        Ok(listed.iter().fold(0, |sum, object| sum.saturating_add(object.bytes)))
    }

    /// Whether a host has never said anything, as was just read.
    pub(super) fn is_empty(&self, host: u16) -> Result<bool, PoolError> {
        Ok(line::load(self.pool.memory(), self.control_at(host))? == Some([0; line::WORDS]))
    }

    // SYNC: pairs with `slab_in`.
    fn fill_slab(&self, object: &Object, head: SlabHead) -> Result<(), PoolError> {
        let memory = self.pool.memory();
        let lines = (1 + u64::from(head.slots)) * LINE;
        object::fill(memory, object.at(), lines, InitialContents::Zeros)?;
        memory.write_back(object.at(), lines);
        // No line of an earlier object may be taken for one of a slot.
        memory.sfence();
        line::store(memory, object.at(), &head.encode(object.generation()));
        memory.write_back(object.at(), LINE);
        memory.sfence();
        Ok(())
    }

    /// Writes records to this host's log. Once this returns, every look-up of any host takes them up.
    // SYNC: pairs with `Cache::poll`.
    pub(super) fn log(&self, control: &mut Control, records: &[Record]) {
        let (memory, step) = (self.pool.memory(), (self.geometry.log_lines / 4).max(1));
        let before = control.position / step;
        for records in records.chunks(RECORDS) {
            let at = self.log_at(&self.part, control.position);
            line::store(memory, at, &LogLine::encode(control.position, records));
            memory.write_back(at, LINE);
            control.position += 1;
        }
        memory.mfence();
        if control.position / step != before {
            // A reader that has fallen behind goes on from here.
            self.publish_control(control);
        }
    }

    /// Where this host goes on among its slots for blocks of this size: the line that says so, and the slab and slot, unless nobody
    /// has said so yet or it was lost.
    pub(super) fn hand(&self) -> Result<(Offset, Option<Slot>), PoolError> {
        let (memory, block) = (self.pool.memory(), u64::from(self.identity.block));
        for class in 0..CLASSES {
            let at = self.part.at().lines(class);
            match line::load(memory, at)? {
                Some([found, slot, ..]) if found == block => return Ok((at, Some(Slot::of(slot as u32)))),
                // It is new, or a dead process or host left it half written.
                None | Some([0, ..]) => return Ok((at, None)),
                Some(_) => {}
            }
        }
        Err(PoolError::Argument {
            what: "the size of a block",
            value: format!("{block} bytes beside {CLASSES} other sizes in the cache {}", self.name),
            expected: "keep blocks of so many sizes in another cache",
        })
    }

    /// Notes where this host goes on; only where blocks are evicted depends on it.
    pub(super) fn set_hand(&self, at: Offset, slot: Slot) {
        let words = [self.identity.block.into(), slot.word().into(), 0, 0, 0, 0, 0];
        line::store(self.pool.memory(), at, &words);
    }
}
