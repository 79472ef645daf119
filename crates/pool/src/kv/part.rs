//! A host's part of a cache: its control line and its log, which its processes change under the host's lock.

use polder_mem::{LINE, Memory, Offset};

use super::wire::{Control, LogLine, MAX_SLABS, RECORDS, Record, SEQUENCES, Slot, Turns};
use super::{CLASSES, Cache};
use crate::object::Object;
use crate::state::LockName;
use crate::{PoolError, line};

/// What the log and the slabs of a host say.
#[derive(Debug, Default)]
pub(super) struct Survey {
    /// The sequence number after the highest in the log.
    pub(super) position: u64,
    /// One more than the highest number of a slab.
    pub(super) slabs: u32,
    /// Bytes of the slabs.
    claimed: u64,
    /// Names of slabs that were being made, or removed.
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

    /// Says to all hosts what this one says of its part, before it looks at what they say.
    // SYNC: pairs with `control_of`, in both directions: of two hosts that claim room and then look, at least one sees the other.
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

    /// Whether a host has never said anything, as was just read.
    pub(super) fn is_empty(&self, host: u16) -> Result<bool, PoolError> {
        Ok(line::load(self.pool.memory(), self.control_at(host))? == Some([0; line::WORDS]))
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
        let at = self.store_control(&control);
        let done = work(&mut control);
        if done.is_ok() {
            control.busy = false;
            self.store_control(&control);
        }
        // No other host can read a line of which memory has a part. And this machine's caches must not write over what another says as
        // this host later.
        self.pool.memory().write_back(at, LINE);
        done
    }

    /// Begins anew with what the log and the slabs say, after the host or a process of it died. Slabs that were being made are removed.
    fn recover(&self) -> Result<Control, PoolError> {
        // What stands under its names may be of another cache by now.
        self.expect_there()?;
        let host = self.pool.member().host;
        self.refresh_own()?;
        let known = match self.control()? {
            Some(known) => known,
            // What stood there is lost: others of this host may have pinned blocks.
            None => Control { pins: !self.is_empty(host)?, ..Control::default() },
        };
        let Survey { slabs, position, claimed, half_made } = self.survey(host, &self.part)?;
        for name in half_made {
            self.remove_object(&name)?;
        }
        // What stands there may be older than the slots.
        for class in 0..CLASSES {
            line::store(self.pool.memory(), self.part.at().lines(class), &[0; line::WORDS]);
        }
        // HARMLESS(write_back -> drop): where a host goes on, which no protocol goes by. Zeros of one that stands in would come late.
        self.pool.memory().write_back(self.part.at(), CLASSES * LINE);
        // Lines of the dead may be there behind one that is not: whoever took them up finds none of these numbers again.
        let position = position.max(known.position).saturating_add(self.geometry.log_lines);
        let control = Control {
            busy: true,
            incarnation: self.pool.host_incarnation,
            slabs,
            // Only a hint to whoever has seen the slabs before.
            changes: known.changes.wrapping_add(position as u32),
            claimed,
            position,
            // With the incarnation, by which nobody could tell any more that the host is gone.
            gone: known.gone | self.stands_in,
            ..known
        };
        self.publish_control(&control);
        Ok(control)
    }

    /// Drops this host's own lines from its caches: its machine may have had another host's id, and read them as another host's.
    fn refresh_own(&self) -> Result<(), PoolError> {
        let (memory, host) = (self.pool.memory(), self.pool.member().host);
        // HARMLESS(invalidate -> write_back -> drop) in the model, where a machine keeps its host id: the control line of its own.
        memory.invalidate(self.control_at(host), LINE);
        // HARMLESS(invalidate -> write_back -> drop) as above: the log of its own.
        memory.invalidate(self.part.at(), self.part.bytes());
        for listed in self.pool.list(&self.slab_prefix(host))? {
            // HARMLESS(invalidate -> write_back -> drop) as above: the slabs of its own.
            memory.invalidate(listed.at, listed.bytes);
        }
        // HARMLESS(fence_invalidations -> sfence -> drop) as above: all of its own.
        // SYNC: pairs with `publish_control`, `log` and `Cache::publish` of the host's boot before.
        memory.fence_invalidations();
        Ok(())
    }

    /// What the log and the slabs of a host say, whatever its control line does. Lines of the log that another host's caches hold from
    /// before make the position too low at worst: then the lines that follow are taken up once more.
    pub(super) fn survey(&self, host: u16, part: &Object) -> Result<Survey, PoolError> {
        let mut survey = Survey::default();
        // The log comes first: what is put meanwhile is in a slab that is seen, or behind the position.
        for index in 0..self.geometry.log_lines {
            let words = line::load(self.pool.memory(), self.log_at(part, index))?;
            let sequence = words.map_or(0, |words| LogLine::decode(&words).sequence);
            let is_damaged = sequence >= SEQUENCES;
            survey.position = survey.position.max(if is_damaged { 0 } else { sequence + 1 });
        }
        let prefix = self.slab_prefix(host);
        for listed in self.pool.list(&prefix)? {
            let Ok(number) = listed.name[prefix.len()..].parse::<u32>() else { continue };
            match self.slab(host, number)? {
                Some(slab) => survey.claimed += slab.head.bytes(),
                None => survey.half_made.push(listed.name),
            }
            survey.slabs = survey.slabs.max(number.saturating_add(1).min(MAX_SLABS));
        }
        Ok(survey)
    }

    /// Writes records to this host's log. Behind the caller's next fence every look-up of any host takes them up.
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
        if control.position / step != before {
            // A reader that has fallen behind goes on from here.
            self.publish_control(control);
        }
    }

    /// Where this host goes on among its slots for blocks of this size: the line that says so, and the slot and when its turns began,
    /// unless nobody has said so yet or it was lost.
    pub(super) fn hand(&self) -> Result<(Offset, Option<(Slot, Turns)>), PoolError> {
        let (memory, block) = (self.pool.memory(), u64::from(self.identity.block));
        for class in 0..CLASSES {
            let at = self.part.at().lines(class);
            match line::load(memory, at)? {
                Some([found, slot, turns, ..]) if found == block => {
                    return Ok((at, Some((Slot::of(slot as u32), Turns::of(turns)))));
                }
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
    pub(super) fn set_hand(&self, at: Offset, slot: Slot, turns: Turns) {
        let words = [self.identity.block.into(), slot.word().into(), turns.word(), 0, 0, 0, 0];
        line::store(self.pool.memory(), at, &words);
    }

    /// Removes an object that may be gone already.
    pub(super) fn remove_object(&self, name: &str) -> Result<(), PoolError> {
        match self.pool.destroy(name) {
            Err(PoolError::NotFound { .. }) => Ok(()),
            removed => removed,
        }
    }
}
