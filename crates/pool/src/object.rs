//! Objects: named bytes in the pool.
//!
//! An object's extent begins with a header, written before the object goes live and never again; its data begins on the next
//! line.
//!
//! # Bytes of a header
//! | byte | size | what |
//! |---|---|---|
//! | 0 | 8 | XXH3-64 of the rest of the header |
//! | 8 | 8 | bits 0..56 generation, bits 56..64 owner |
//! | 16 | 8 | bytes of the object |
//! | 24 | 4 | directory slot of the entry |
//! | 28 | 1 | bytes of the name |
//! | 29 | 1 | bytes of the note, 0 for none |
//! | 30 | 2 | 0 |
//! | 32 | | the name, without control characters; the note; filled up with 0 to a whole line |
//!
//! The note is the creator's word on what the object holds. Programs that know nothing of it pass over it.

use polder_mem::{LINE, Memory, Offset};
use twox_hash::XxHash3_64;

use crate::PoolError;
use crate::deviation::Deviation;
use crate::line::{self, Words};
use crate::name::{MAX_NAME_BYTES, MAX_TEXT_BYTES, Name};

/// Bits of a generation.
pub(crate) const GENERATION_BITS: u32 = 56;
const FIXED_BYTES: usize = 32;
const MAX_HEADER_BYTES: usize = (FIXED_BYTES + MAX_NAME_BYTES).next_multiple_of(LINE as usize);
/// The lines of the longest header.
pub(crate) const MAX_HEADER_LINES: u8 = (MAX_HEADER_BYTES / LINE as usize) as u8;
const _: () =
    assert!(FIXED_BYTES + MAX_TEXT_BYTES == MAX_HEADER_BYTES, "a note takes no line that no name needs");

/// What a new object holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum InitialContents {
    /// Zeros. They are written past the caches, which costs what a copy of so many bytes costs.
    #[default]
    Zeros,
    /// Whatever was there, other jobs' bytes included; the lines are only dropped from this host's caches. For staging
    /// space that is written before it is read.
    Nothing,
    /// These words and their checksum in the first line, and zeros behind it, unless it has no bytes: the process that finds the
    /// object finds them there.
    Line(Words),
    /// These words and their checksum in the first line, and behind it whatever was there.
    LineOnly(Words),
}

/// An object that this process holds open. It stays where it is until it is given to `close`, also when it is destroyed
/// meanwhile.
#[derive(Debug)]
#[must_use = "an object that is not closed is held open until the process ends"]
pub struct Object {
    pub(crate) name: String,
    pub(crate) note: String,
    pub(crate) at: Offset,
    pub(crate) bytes: u64,
    pub(crate) generation: u64,
    pub(crate) owner: u16,
    /// Its entry's, in the directory of its owner.
    pub(crate) slot: u32,
    /// The announcement word that holds it open.
    pub(crate) held: u32,
}

impl Object {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What its creator says that it holds; empty where it said nothing.
    #[must_use]
    pub fn note(&self) -> &str {
        &self.note
    }

    /// Where its data begins: a multiple of 64.
    #[must_use]
    pub const fn at(&self) -> Offset {
        self.at
    }

    /// Its size in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Tells it from every other object that its owner ever had.
    #[must_use]
    pub const fn generation(&self) -> u64 {
        self.generation
    }

    /// The host that created it, and whose chunks hold it.
    #[must_use]
    pub const fn owner(&self) -> u16 {
        self.owner
    }

    /// Copies the bytes from `offset` on into `into`, afresh: all that was published before the call is seen.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when the range ends past the object, [`PoolError::Memory`] when the memory fails.
    pub fn read_at<M: Memory>(&self, memory: &M, offset: u64, into: &mut [u8]) -> Result<(), PoolError> {
        self.refresh(memory, offset, into.len() as u64)?;
        Ok(memory.copy_out(self.at + offset, into)?)
    }

    /// Copies `from` to the bytes from `offset` on and publishes them: once this returns, a [`Object::read_at`] anywhere sees
    /// them. Lines at the two ends are written whole, with what this host last saw in their other bytes: only one host at a
    /// time may write to a line.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when the range ends past the object, [`PoolError::Memory`] when the memory fails.
    pub fn write_at<M: Memory>(&self, memory: &M, offset: u64, from: &[u8]) -> Result<(), PoolError> {
        let (at, bytes) = (self.range(offset, from.len() as u64)?, from.len() as u64);
        // Another host may have written to the other bytes of the lines at the ends since they were cached.
        memory.invalidate(at, bytes.min(1));
        memory.invalidate(at + bytes.saturating_sub(1), bytes.min(1));
        // Only stores depend on it.
        // SYNC: pairs with `publish` of the host that wrote there last: what this host writes back beside its own is that.
        memory.sfence();
        memory.copy_in(at, from)?;
        self.publish(memory, offset, bytes)
    }

    /// Publishes what this host stored where the bytes are mapped: once this returns, a [`Object::refresh`] anywhere makes it
    /// seen. Whole lines go out.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when the range ends past the object.
    pub fn publish<M: Memory>(&self, memory: &M, offset: u64, bytes: u64) -> Result<(), PoolError> {
        memory.write_back(self.range(offset, bytes)?, bytes);
        // SYNC: pairs with `refresh`.
        memory.mfence();
        Ok(())
    }

    /// Drops the range from this host's caches, once what was stored in it is written back: later loads see what was published
    /// before the call.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when the range ends past the object.
    pub fn refresh<M: Memory>(&self, memory: &M, offset: u64, bytes: u64) -> Result<(), PoolError> {
        memory.invalidate(self.range(offset, bytes)?, bytes);
        // SYNC: pairs with `publish`.
        memory.fence_invalidations();
        Ok(())
    }

    fn range(&self, offset: u64, bytes: u64) -> Result<Offset, PoolError> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(self.at + offset),
            _ => Err(PoolError::Argument {
                what: "the range",
                value: format!("[{offset}, +{bytes}) of {} ({} bytes)", self.name, self.bytes),
                expected: "it must end inside the object; open a larger one",
            }),
        }
    }
}

/// What stands in front of an object's data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) name: String,
    pub(crate) note: String,
    pub(crate) bytes: u64,
    pub(crate) generation: u64,
    pub(crate) owner: u16,
    pub(crate) slot: u32,
}

/// Lines of the header of an object of this name, with its note.
pub(crate) const fn header_lines(name: &Name<'_>) -> u8 {
    (FIXED_BYTES + name.as_str().len() + name.note().len()).div_ceil(LINE as usize) as u8
}

impl Header {
    fn encode(&self) -> Vec<u8> {
        let (name, note) = (self.name.as_bytes(), self.note.as_bytes());
        let mut bytes = Vec::with_capacity(MAX_HEADER_BYTES);
        bytes.extend([0; 8]);
        bytes.extend((self.generation | u64::from(self.owner) << GENERATION_BITS).to_le_bytes());
        bytes.extend(self.bytes.to_le_bytes());
        bytes.extend(self.slot.to_le_bytes());
        bytes.extend([name.len() as u8, note.len() as u8, 0, 0]);
        bytes.extend(name);
        bytes.extend(note);
        bytes.resize(bytes.len().next_multiple_of(LINE as usize), 0);
        let sum = XxHash3_64::oneshot(&bytes[8..]);
        bytes[..8].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Writes it at `at` and writes its lines back; a fence of the caller follows.
    pub(crate) fn write<M: Memory>(&self, memory: &M, at: Offset) -> Result<(), PoolError> {
        let bytes = self.encode();
        memory.copy_in(at, &bytes)?;
        let written = if Deviation::WritesBackOneLine.is_on() { LINE } else { bytes.len() as u64 };
        memory.write_back(at, written);
        Ok(())
    }

    /// Loads the header of `lines` lines at `at`, which the caller has invalidated; `None` when there is none, or it is being
    /// written.
    pub(crate) fn load<M: Memory>(memory: &M, at: Offset, lines: u8) -> Result<Option<Self>, PoolError> {
        let mut bytes = [0; MAX_HEADER_BYTES];
        let bytes = &mut bytes[..usize::from(lines.min(MAX_HEADER_LINES)) * LINE as usize];
        memory.copy_out(at, bytes)?;
        Ok(Self::decode(bytes))
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        if word(0)? != XxHash3_64::oneshot(&bytes[8..]) {
            return None;
        }
        let (stamp, place) = (word(8)?, word(24)?);
        let (name, note) = (usize::from((place >> 32) as u8), usize::from((place >> 40) as u8));
        let text = bytes.get(FIXED_BYTES..FIXED_BYTES + name + note)?;
        let (name, note) = text.split_at(name);
        Some(Self {
            name: String::from_utf8(name.to_vec()).ok()?,
            note: String::from_utf8(note.to_vec()).ok()?,
            bytes: word(16)?,
            generation: stamp & ((1 << GENERATION_BITS) - 1),
            owner: (stamp >> GENERATION_BITS) as u16,
            slot: place as u32,
        })
    }
}

/// Fills `[at, at + bytes)`, both whole lines; a fence of the caller follows.
pub(crate) fn fill<M: Memory>(
    memory: &M,
    at: Offset,
    bytes: u64,
    fill: InitialContents,
) -> Result<(), PoolError> {
    const ZEROS: [u8; 1 << 14] = [0; 1 << 14];
    // Below this the next reader finds the lines in the cache, and bulk stores gain nothing.
    const SMALL: u64 = 1 << 12;
    let (at, bytes) = match fill {
        InitialContents::Nothing => {
            memory.invalidate(at, bytes);
            return Ok(());
        }
        InitialContents::Line(words) | InitialContents::LineOnly(words) if bytes != 0 => {
            line::store(memory, at, &words);
            memory.write_back(at, LINE);
            if matches!(fill, InitialContents::LineOnly(_)) {
                // HARMLESS(invalidate -> write_back -> drop), bytes that nobody fills: this host has written back what it freed there, and
                // a reader on another host invalidates what it reads.
                memory.invalidate(at + LINE, bytes - LINE);
                return Ok(());
            }
            (at + LINE, bytes - LINE)
        }
        InitialContents::Zeros | InitialContents::Line(_) | InitialContents::LineOnly(_) => (at, bytes),
    };
    for done in (0..bytes).step_by(ZEROS.len()) {
        let piece = &ZEROS[..(bytes - done).min(ZEROS.len() as u64) as usize];
        if !memory.coherence().needs_write_back() && bytes <= SMALL {
            memory.copy_in(at + done, piece)?;
        } else {
            memory.copy_in_nt(at + done, piece)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use polder_mem::{Heap, HeapShape};

    use super::*;

    fn heap() -> Heap {
        Heap::new(HeapShape { bytes: 4096, hosts: 1, processes: 1, local_words: 1, bells: 1 })
    }

    fn header(name: &str) -> Header {
        Header { name: name.into(), note: String::new(), bytes: 100, generation: 7, owner: 63, slot: 9 }
    }

    #[test]
    fn headers_come_back_and_take_as_many_lines_as_they_need() {
        let memory = heap();
        for (length, lines) in [(2, 1), (32, 1), (33, 2), (255, 5)] {
            let text = format!("/{}", "n".repeat(length - 1));
            header(&text).write(&memory, Offset(128)).unwrap();
            assert_eq!(header_lines(&Name::parse(&text).unwrap()), lines);
            assert_eq!(Header::load(&memory, Offset(128), lines).unwrap(), Some(header(&text)));
            assert_eq!(Header::load(&memory, Offset(128), lines - 1).unwrap(), None);
        }
    }

    #[test]
    fn a_note_stands_behind_the_name_and_takes_no_line_that_no_name_needs() {
        let memory = heap();
        for (length, noted, lines) in
            [(2, 30, 1), (2, 31, 2), (255, 33, MAX_HEADER_LINES), (33, 255, MAX_HEADER_LINES)]
        {
            let (text, note) = (format!("/{}", "n".repeat(length - 1)), "o".repeat(noted));
            let name = Name::parse(&text).unwrap().with_note(&note).unwrap();
            assert_eq!(header_lines(&name), lines);
            let header = Header { note: note.clone(), ..header(&text) };
            header.write(&memory, Offset(128)).unwrap();
            assert_eq!(Header::load(&memory, Offset(128), lines).unwrap(), Some(header));
            let longer = format!("{note}o");
            let refused = Name::parse(&text).unwrap().with_note(&longer);
            assert_eq!(refused.is_err(), length + noted == MAX_TEXT_BYTES, "{refused:?}");
        }
    }

    #[test]
    fn a_header_with_any_flipped_bit_is_none() {
        let bytes = header("/name").encode();
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let memory = heap();
            memory.copy_in(Offset(0), &damaged).unwrap();
            assert_eq!(Header::load(&memory, Offset(0), 1).unwrap(), None, "bit {bit}");
        }
    }

    #[test]
    fn a_range_past_the_end_names_the_object_and_its_size() {
        let object = Object {
            name: "/a".into(),
            note: String::new(),
            at: Offset(64),
            bytes: 10,
            generation: 1,
            owner: 0,
            slot: 0,
            held: 0,
        };
        let refused = object.read_at(&heap(), 4, &mut [0; 7]).unwrap_err().to_string();
        assert_eq!(
            refused,
            "the range is [4, +7) of /a (10 bytes); it must end inside the object; open a larger one"
        );
        object.write_at(&heap(), u64::MAX, &[1]).unwrap_err();
        let memory = heap();
        object.write_at(&memory, 3, b"seven").unwrap();
        let mut read = [0; 10];
        object.read_at(&memory, 0, &mut read).unwrap();
        assert_eq!(&read, b"\0\0\0seven\0\0");
    }
}
