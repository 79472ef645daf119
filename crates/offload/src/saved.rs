//! Tensors that a forward pass saves for the backward pass, in several tiers.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::buffer::{Buffer, PAGE};
use crate::error::TierError;
use crate::range::{Location, Range, located};
use crate::tier::{PendingTransfer, TRANSFER_BYTES, TierFile};

/// Tensors that a forward pass saves for the backward pass, each cut over tiers. What goes to disks is under way while
/// computation goes on.
///
/// A number stands for a tensor until it is freed. When the last one is, all tiers are empty, and numbers start again.
#[derive(Debug)]
pub struct Saved {
    /// The part of each tensor that stays in memory of the allocator.
    kept: f64,
    arenas: Vec<Arena>,
    files: Vec<SavedFile>,
    slots: Vec<Option<Slot>>,
    live: usize,
    memory: usize,
    most_memory: usize,
    writing: VecDeque<(usize, usize)>,
    idle: Vec<Buffer>,
    /// Buffers that there are, and the most that there were.
    buffers: usize,
    most_buffers: usize,
}

/// Memory of a tier, which tensors fill one after another until all are gone.
#[derive(Debug)]
struct Arena {
    /// The part of each tensor that lies here.
    part: f64,
    range: Arc<Mutex<Range>>,
    used: usize,
    most: usize,
}

impl Arena {
    fn range(&self) -> MutexGuard<'_, Range> {
        self.range.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A disk, which is filled in the same way.
#[derive(Debug)]
struct SavedFile {
    part: f64,
    file: TierFile,
    used: u64,
    most: u64,
}

#[derive(Debug, Default)]
struct Slot {
    bytes: usize,
    memory: Vec<u8>,
    /// Arena, place and bytes of each piece there.
    near: Vec<(usize, usize, usize)>,
    /// File, place and bytes of what goes to each disk.
    far: Vec<(usize, u64, usize)>,
    parts: Vec<Part>,
}

impl Slot {
    /// Bytes that go to disks.
    fn far_bytes(&self) -> usize {
        self.far.iter().map(|(.., bytes)| bytes).sum()
    }
}

/// A piece of a tensor on a disk.
#[derive(Debug)]
struct Part {
    file: usize,
    offset: u64,
    bytes: usize,
    state: Where,
}

#[derive(Debug)]
enum Where {
    Writing(PendingTransfer),
    /// A transfer failed, or is being waited for.
    Lost,
    OnDisk,
    Reading(PendingTransfer),
    Here(Buffer),
}

/// Room for a tensor that the caller copies.
#[derive(Debug)]
pub struct Reserved {
    /// The number of the tensor.
    pub slot: usize,
    /// The range, place and bytes of each piece in memory; they come first.
    pub near: Vec<(usize, usize, usize)>,
    /// How many bytes are left, for [`Saved::write`].
    pub far_bytes: usize,
}

/// The most bytes that there were at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MostSaved {
    /// In memory of the allocator.
    pub memory: usize,
    /// In each range.
    pub near: Vec<usize>,
    /// On each disk.
    pub far: Vec<u64>,
    /// In buffers between memory and disks.
    pub buffers: usize,
}

/// Bytes that a part of a tensor takes of a disk.
fn pages_of(bytes: usize) -> u64 {
    bytes.next_multiple_of(PAGE) as u64
}

/// Bytes of a cache line: tensors in an arena begin at one.
const LINE_BYTES: usize = 64;

/// Buffers of saved tensors that are written or read at once, at most.
const IN_FLIGHT: usize = 8;

impl Saved {
    /// `kept` is the part of each tensor that stays in memory of the allocator. `near` has the part in each range, and `files` the part on each
    /// disk with the disk's bytes and folder. Parts add up to 1.
    ///
    /// # Errors
    /// [`TierError`] for a folder that is no tier, or has no room.
    pub fn new(
        kept: f64,
        near: Vec<(f64, Arc<Mutex<Range>>)>,
        files: &[(f64, u64, PathBuf)],
    ) -> Result<Self, TierError> {
        let near = near.into_iter().filter(|it| it.0 > 0.0);
        let arenas = near.map(|(part, range)| Arena { part, range, used: 0, most: 0 }).collect();
        let files = files.iter().filter(|it| it.0 > 0.0).map(|(part, bytes, folder)| {
            TierFile::create(folder, *bytes).map(|file| SavedFile { part: *part, file, used: 0, most: 0 })
        });
        Ok(Self {
            kept,
            arenas,
            files: files.collect::<Result<_, _>>()?,
            slots: vec![],
            live: 0,
            memory: 0,
            most_memory: 0,
            writing: VecDeque::new(),
            idle: vec![],
            buffers: 0,
            most_buffers: 0,
        })
    }

    /// The most bytes at once in memory, in each other tier of memory and on each disk, and those of buffers between them.
    #[must_use]
    pub fn most(&self) -> MostSaved {
        MostSaved {
            memory: self.most_memory,
            near: self.arenas.iter().map(|it| it.most).collect(),
            far: self.files.iter().map(|it| it.most).collect(),
            buffers: self.most_buffers * TRANSFER_BYTES,
        }
    }

    /// Bytes of the buffers between memory and disks that a step fills. Two tensors, each with more than half as much on disks, need more.
    #[must_use]
    pub fn staging(&self) -> usize {
        if self.files.is_empty() { 0 } else { IN_FLIGHT * TRANSFER_BYTES }
    }

    /// Bytes of ranges in each place, as the kernel says.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn locate(&self) -> Result<BTreeMap<Location, usize>, TierError> {
        let ranges: Vec<_> = self.arenas.iter().map(Arena::range).collect();
        located(ranges.iter().map(|it| &**it))
    }

    /// Bytes of a tensor in memory, in each arena and on each disk: whole pages, and the largest has the rest.
    fn cut(&self, bytes: usize) -> Vec<usize> {
        let parts: Vec<f64> = std::iter::once(self.kept)
            .chain(self.arenas.iter().map(|it| it.part))
            .chain(self.files.iter().map(|it| it.part))
            .collect();
        let mut cut: Vec<_> = parts.iter().map(|part| (bytes as f64 * part) as usize / PAGE * PAGE).collect();
        let largest =
            (0..parts.len()).max_by(|one, other| parts[*one].total_cmp(&parts[*other])).unwrap_or(0);
        cut[largest] += bytes - cut.iter().sum::<usize>().min(bytes);
        cut
    }

    /// Takes a copy of `bytes`, and returns the number by which they come back; none if a tier has no room.
    ///
    /// # Errors
    /// [`TierError`] when a tier fails; then nothing is kept.
    pub fn put(&mut self, bytes: &[u8]) -> Result<Option<usize>, TierError> {
        let Some(index) = self.slot_of(bytes.len())? else { return Ok(None) };
        match self.fill(index, bytes) {
            Ok(()) => Ok(Some(index)),
            Err(error) => {
                // Its number is returned to no caller, so its room goes back here.
                self.free(index);
                Err(error)
            }
        }
    }

    /// As [`Saved::put`], of bytes that the caller copies; none if a tier has no room.
    ///
    /// # Errors
    /// [`TierError`] when memory that is mapped is gone.
    ///
    /// # Panics
    /// When a part stays in memory of the allocator: a GPU copies from ranges.
    pub fn reserve(&mut self, bytes: usize) -> Result<Option<Reserved>, TierError> {
        let Some(slot) = self.slot_of(bytes)? else { return Ok(None) };
        let Some(Some(room)) = self.slots.get(slot) else { return Ok(None) };
        assert!(room.memory.is_empty(), "a GPU copies from ranges");
        Ok(Some(Reserved { slot, near: room.near.clone(), far_bytes: room.far_bytes() }))
    }

    /// A slot with room for so many bytes in every tier; none if one has no room.
    fn slot_of(&mut self, bytes: usize) -> Result<Option<usize>, TierError> {
        if self.live == 0 {
            // A device that has gone is found before its memory is used in this step.
            self.arenas.iter().try_for_each(|it| it.range().check())?;
        }
        let cut = self.cut(bytes);
        let (near, far) = cut[1..].split_at(self.arenas.len());
        let has_room = self.arenas.iter().zip(near).all(|(it, part)| it.used + part <= it.range().bytes())
            && self.files.iter().zip(far).all(|(it, part)| it.used + pages_of(*part) <= it.file.size());
        if !has_room {
            return Ok(None);
        }
        let mut slot = Slot { bytes, memory: vec![0; cut[0]], ..Slot::default() };
        self.memory += cut[0];
        self.most_memory = self.most_memory.max(self.memory);
        for (number, (arena, part)) in self.arenas.iter_mut().zip(near).enumerate() {
            slot.near.push((number, arena.used, *part));
            arena.used += part.next_multiple_of(LINE_BYTES);
            arena.most = arena.most.max(arena.used);
        }
        for (number, (saved, part)) in self.files.iter_mut().zip(far).enumerate() {
            slot.far.push((number, saved.used, *part));
            saved.used += pages_of(*part);
            saved.most = saved.most.max(saved.used);
        }
        self.live += 1;
        self.slots.push(Some(slot));
        Ok(Some(self.slots.len() - 1))
    }

    /// Copies a tensor into the places of its slot.
    fn fill(&mut self, index: usize, bytes: &[u8]) -> Result<(), TierError> {
        let Some(Some(slot)) = self.slots.get_mut(index) else { return Ok(()) };
        let (memory, mut rest) = bytes.split_at(slot.memory.len());
        slot.memory.copy_from_slice(memory);
        for (arena, begin, count) in &slot.near {
            let (part, after) = rest.split_at(*count);
            rest = after;
            self.arenas[*arena].range().copy_in(*begin, part);
        }
        self.write(index, rest)
    }

    /// Starts to write the bytes of a slot that go to disks.
    ///
    /// # Errors
    /// [`TierError`] when an earlier transfer failed, or this one cannot begin.
    ///
    /// # Panics
    /// When they are not as many as [`Saved::reserve`] said.
    pub fn write(&mut self, index: usize, bytes: &[u8]) -> Result<(), TierError> {
        let Some(Some(slot)) = self.slots.get(index) else { return Ok(()) };
        assert_eq!(slot.far_bytes(), bytes.len(), "as many bytes as go to disks");
        let mut rest = bytes;
        for (file, mut offset, count) in slot.far.clone() {
            let (far, after) = rest.split_at(count);
            rest = after;
            for part in far.chunks(TRANSFER_BYTES) {
                let mut buffer = self.buffer()?;
                buffer[..part.len()].copy_from_slice(part);
                let whole = part.len().next_multiple_of(PAGE);
                let Some(Some(slot)) = self.slots.get_mut(index) else { break };
                let transfer = self.files[file].file.write(offset, whole, buffer)?;
                self.writing.push_back((index, slot.parts.len()));
                slot.parts.push(Part { file, offset, bytes: part.len(), state: Where::Writing(transfer) });
                offset += whole as u64;
            }
        }
        Ok(())
    }

    /// A buffer for the next transfer: an idle one, a new one, or that of the oldest write.
    fn buffer(&mut self) -> Result<Buffer, TierError> {
        if let Some(buffer) = self.idle.pop() {
            return Ok(buffer);
        }
        while self.writing.len() >= IN_FLIGHT {
            let Some((slot, part)) = self.writing.pop_front() else { break };
            let Some(Some(slot)) = self.slots.get_mut(slot) else { continue };
            let Some(part) = slot.parts.get_mut(part) else { continue };
            match std::mem::replace(&mut part.state, Where::Lost) {
                Where::Writing(transfer) => {
                    let buffer = transfer.wait()?;
                    part.state = Where::OnDisk;
                    return Ok(buffer);
                }
                other => part.state = other,
            }
        }
        self.buffers += 1;
        self.most_buffers = self.most_buffers.max(self.buffers);
        Buffer::new(TRANSFER_BYTES)
    }

    /// Takes a buffer back, and keeps as many as are in flight at once.
    fn give(&mut self, buffer: Buffer) {
        match self.idle.len() < IN_FLIGHT {
            true => self.idle.push(buffer),
            false => self.buffers -= 1,
        }
    }

    /// Starts to read the bytes of a slot that are on disks.
    ///
    /// # Errors
    /// Those of [`Saved::write`].
    pub fn fetch(&mut self, index: usize) -> Result<(), TierError> {
        let count = match self.slots.get(index) {
            Some(Some(slot)) => slot.parts.len(),
            _ => return Ok(()),
        };
        for part in 0..count {
            let is_far = matches!(self.part(index, part), Some(Part { state: Where::OnDisk, .. }));
            if let Some(piece) = self.part(index, part)
                && matches!(piece.state, Where::Writing(_))
                && let Where::Writing(transfer) = std::mem::replace(&mut piece.state, Where::Lost)
            {
                // What was just written need not be read.
                piece.state = Where::Here(transfer.wait()?);
            } else if is_far {
                let buffer = self.buffer()?;
                let (file, offset, whole) = match self.part(index, part) {
                    Some(piece) => (piece.file, piece.offset, piece.bytes.next_multiple_of(PAGE)),
                    None => continue,
                };
                let transfer = self.files[file].file.read(offset, whole, buffer)?;
                if let Some(piece) = self.part(index, part) {
                    piece.state = Where::Reading(transfer);
                }
            }
        }
        Ok(())
    }

    fn part(&mut self, slot: usize, part: usize) -> Option<&mut Part> {
        self.slots.get_mut(slot)?.as_mut()?.parts.get_mut(part)
    }

    /// Copies what [`Saved::put`] took. The slot before it, which is needed next, is read meanwhile.
    ///
    /// # Errors
    /// [`TierError`] when a transfer fails, and [`TierError::Lost`] after that.
    ///
    /// # Panics
    /// When `bytes` has another length than what was put.
    pub fn take(&mut self, index: usize, bytes: &mut [u8]) -> Result<(), TierError> {
        self.fetch(index)?;
        if let Some(before) = (0..index).rev().find(|it| self.slots[*it].is_some()) {
            self.fetch(before)?;
        }
        let Some(Some(slot)) = self.slots.get(index) else { return Ok(()) };
        assert_eq!(slot.bytes, bytes.len(), "a saved tensor comes back as large as it went");
        let (memory, mut rest) = bytes.split_at_mut(slot.memory.len());
        memory.copy_from_slice(&slot.memory);
        for (arena, begin, count) in &slot.near {
            let (part, after) = rest.split_at_mut(*count);
            rest = after;
            self.arenas[*arena].range().copy_out(*begin, part);
        }
        self.read(index, rest)
    }

    /// Copies the bytes of a slot that are on disks.
    ///
    /// # Errors
    /// Those of [`Saved::take`].
    ///
    /// # Panics
    /// When they are not as many as [`Saved::reserve`] said.
    pub fn read(&mut self, index: usize, bytes: &mut [u8]) -> Result<(), TierError> {
        self.fetch(index)?;
        let Some(Some(slot)) = self.slots.get_mut(index) else { return Ok(()) };
        assert_eq!(slot.far_bytes(), bytes.len(), "as many bytes as are on disks");
        let mut at = 0;
        let mut done = vec![];
        for part in &mut slot.parts {
            let buffer = match std::mem::replace(&mut part.state, Where::Lost) {
                Where::Reading(transfer) | Where::Writing(transfer) => transfer.wait()?,
                Where::Here(buffer) => buffer,
                Where::OnDisk | Where::Lost => return Err(TierError::Lost),
            };
            part.state = Where::OnDisk;
            bytes[at..at + part.bytes].copy_from_slice(&buffer[..part.bytes]);
            at += part.bytes;
            done.push(buffer);
        }
        done.into_iter().for_each(|buffer| self.give(buffer));
        Ok(())
    }

    /// Gives the room of a slot back.
    pub fn free(&mut self, index: usize) {
        let Some(slot) = self.slots.get_mut(index).and_then(Option::take) else { return };
        self.memory -= slot.memory.len();
        for part in slot.parts {
            // The next write to this place must not overtake one that nobody needs any more.
            match part.state {
                Where::Writing(transfer) | Where::Reading(transfer) => {
                    // What failed is lost with the slot.
                    if let Ok(buffer) = transfer.wait() {
                        self.give(buffer);
                    }
                }
                Where::Here(buffer) => self.give(buffer),
                Where::OnDisk | Where::Lost => {}
            }
        }
        self.live -= 1;
        if self.live == 0 {
            self.slots.clear();
            self.writing.clear();
            self.arenas.iter_mut().for_each(|it| it.used = 0);
            self.files.iter_mut().for_each(|it| it.used = 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use polder_mem::testing::{Child, Ended};

    use super::*;
    use crate::testing::{disk, full, numbers};

    /// Tensors on one disk of so many bytes.
    fn on_disk(bytes: usize) -> Saved {
        Saved::new(0.0, vec![], &[(1.0, bytes as u64, disk())]).expect("a disk")
    }

    fn take(saved: &mut Saved, slot: usize, bytes: usize) -> Result<Vec<u8>, TierError> {
        let mut taken = vec![0; bytes];
        saved.take(slot, &mut taken).map(|()| taken)
    }

    #[test]
    fn tensors_that_are_freed_while_a_disk_writes_and_reads_them_leave_others_as_they_were() {
        let mut number = numbers();
        let range = || Arc::new(Mutex::new(Range::new(16 << 20).expect("a range")));
        let near = vec![(0.2, range()), (0.1, range())];
        let files = [(0.3, 32 << 20, disk()), (0.1, 32 << 20, disk())];
        let mut saved = Saved::new(0.3, near, &files).expect("tiers");
        for _ in 0..8 {
            let mut live = BTreeMap::new();
            for _ in 0..10 {
                let (bytes, seed) = ((1 << 12) + number(5 << 20), number(251));
                let tensor: Vec<u8> = (0..bytes).map(|at| (at / 7 + seed) as u8).collect();
                live.insert(saved.put(&tensor).expect("written").expect("room"), tensor);
                if number(5) == 0 {
                    let slot = *live.keys().nth(number(live.len())).expect("one of them");
                    live.remove(&slot);
                    saved.free(slot);
                }
            }
            // Backwards, as a backward pass, which reads one ahead. Some go before they are read, and some are read twice.
            for (slot, tensor) in live.iter().rev() {
                for _ in 0..number(3) {
                    assert!(take(&mut saved, *slot, tensor.len()).expect("read") == *tensor, "slot {slot}");
                }
                saved.free(*slot);
            }
            assert_eq!((saved.live, saved.memory, saved.slots.len()), (0, 0, 0));
        }
        let most = saved.most();
        assert!(most.memory > 0 && most.near[0] > most.near[1] && most.far[0] > most.far[1], "{most:?}");
        assert!(saved.idle.len() <= IN_FLIGHT && saved.buffers == saved.idle.len(), "buffers are given back");
    }

    #[test]
    fn a_tensor_without_room_is_not_taken_and_room_comes_back_with_the_last_one() {
        let mut saved = on_disk(3 * PAGE);
        let first = saved.put(&[1; 2 * PAGE]).expect("written").expect("room");
        assert_eq!(saved.put(&[2; PAGE + 1]).expect("no error"), None);
        let last = saved.put(&[3; 5]).expect("written").expect("the last page");
        saved.free(first);
        assert_eq!(saved.put(&[4; 5]).expect("no error"), None, "places go back with the last tensor");
        saved.free(last);
        assert_eq!(saved.put(&[5; 3 * PAGE]).expect("written"), Some(0));
        assert_eq!(take(&mut saved, 0, 3 * PAGE).expect("read"), [5; 3 * PAGE]);
    }

    #[test]
    fn a_tensor_whose_file_was_cut_is_an_error_and_then_is_lost_while_others_go_on() {
        let mut saved = on_disk(64 * PAGE);
        let slots = [1, 2].map(|value| saved.put(&[value; 2 * PAGE]).expect("written").expect("room"));
        // What was just written need not be read; the second time it is.
        assert_eq!(take(&mut saved, slots[1], 2 * PAGE).expect("written"), [2; 2 * PAGE]);
        assert_eq!(take(&mut saved, slots[0], 2 * PAGE).expect("written"), [1; 2 * PAGE]);
        saved.files[0].file.cut(PAGE as u64);
        let failed = take(&mut saved, slots[0], 2 * PAGE).expect_err("cut");
        assert!(matches!(failed, TierError::Truncated { .. }), "{failed}");
        assert!(matches!(take(&mut saved, slots[0], 2 * PAGE), Err(TierError::Lost)));
        slots.into_iter().for_each(|slot| saved.free(slot));
        let slot = saved.put(&[3; PAGE]).expect("written").expect("room");
        assert_eq!(take(&mut saved, slot, PAGE).expect("still in a buffer"), [3; PAGE]);
    }

    #[test]
    fn a_put_that_a_full_disk_refuses_gives_its_room_back() {
        let mut saved = on_disk(64 * TRANSFER_BYTES);
        saved.files[0].file = full(64 * TRANSFER_BYTES as u64);
        for _ in 0..3 {
            let failed = saved.put(&vec![1; 2 * IN_FLIGHT * TRANSFER_BYTES]).expect_err("full");
            assert!(matches!(failed, TierError::Full { .. }), "{failed}");
            assert_eq!((saved.live, saved.slots.len(), saved.files[0].used), (0, 0, 0));
        }
    }

    #[test]
    fn a_caller_that_copies_gets_places_in_ranges_and_writes_the_rest() {
        let range = Arc::new(Mutex::new(Range::new(8 * PAGE).expect("a range")));
        let mut saved =
            Saved::new(0.0, vec![(0.5, Arc::clone(&range))], &[(0.5, 64 << 10, disk())]).expect("tiers");
        let Reserved { slot, near, far_bytes } = saved.reserve(4 * PAGE).expect("asked").expect("room");
        assert_eq!((near.as_slice(), far_bytes), (&[(0, 0, 2 * PAGE)][..], 2 * PAGE));
        saved.write(slot, &[9; 2 * PAGE]).expect("written");
        let mut far = vec![0; far_bytes];
        for _ in 0..2 {
            saved.fetch(slot).expect("begun");
            saved.read(slot, &mut far).expect("read");
            assert_eq!(far, [9; 2 * PAGE]);
        }
        assert_eq!(saved.locate().expect("asked"), [(Location::Untouched, 8 * PAGE)].into());
        range.lock().expect("no panic").copy_in(0, &[1; PAGE]);
        assert_eq!(saved.locate().expect("asked").len(), 2);
        assert!(saved.reserve(16 * PAGE).expect("asked").is_none());
    }

    #[test]
    #[cfg_attr(miri, ignore = "forks")]
    fn a_forked_child_is_told_of_tensors_on_their_way_and_may_drop_them() {
        let mut saved = on_disk(32 * TRANSFER_BYTES);
        let slot = saved.put(&vec![7; 6 * TRANSFER_BYTES]).expect("written").expect("room");
        let mut child = Child::fork(|| {
            assert!(matches!(take(&mut saved, slot, 6 * TRANSFER_BYTES), Err(TierError::Forked { .. })));
            drop(saved);
        });
        assert_eq!(child.wait(), Ended::Exited(0));
    }
}
