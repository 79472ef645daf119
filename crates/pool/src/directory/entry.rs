//! The words of directory entries, and of the generation line.
//!
//! # Words of an entry
//! | word | of an object | of a tombstone |
//! |---|---|---|
//! | 0, 1 | XXH3-128 of the name, low half first | the same |
//! | 2 | bits 0..8 state, bits 8..64 generation | bits 0..8 are 9, bits 8..64 the generation of the entry that it destroys |
//! | 3 | offset of the object's header | 0 |
//! | 4 | bytes of the object, without its header | 0 |
//! | 5 | job id | 0 |
//! | 6 | bits 0..16 slot of the process that created it, bits 16..24 lines of the header | bits 0..16 owner, bits 16..48 slot of the entry |
//!
//! States are 0 free (all words are 0), 3 claimed, 5 live, 6 condemned, 9 tombstone: no damaged bit turns one into another.
//! An owner uses a generation once, so (owner, slot, generation) names one object for ever.
//!
//! A line whose checksum is wrong is torn or damaged. When a host starts, it frees what a dead writer may have left half
//! done. It keeps any other such line, with all bytes that the line may lead to.
//!
//! # Words of the generation line
//! | word | what |
//! |---|---|
//! | 0 | every generation that the host ever used is below this one |
//! | 1..7 | spare, 0 |

use polder_mem::{LINE, Offset, ProcessSlot};

use crate::line::{self, Words};
use crate::object::MAX_HEADER_LINES;

const CLAIMED: u8 = 3;
const LIVE: u8 = 5;
const CONDEMNED: u8 = 6;
const TOMBSTONE: u8 = 9;

/// What a directory slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// Nothing.
    Free,
    /// An object.
    Object(State, Record),
    /// A record that an object was destroyed.
    Tombstone(Tombstone),
}

/// How far an object's entry has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Its host asks for the name.
    Claimed,
    /// The name is the object's.
    Live,
    /// It was destroyed; some process may still hold it open.
    Condemned,
}

/// What an entry says of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) hash: u128,
    pub(crate) generation: u64,
    pub(crate) header: Offset,
    pub(crate) bytes: u64,
    pub(crate) job: u64,
    pub(crate) creator: ProcessSlot,
    /// Lines of the header: as many as its name needs.
    pub(crate) header_lines: u8,
}

impl Record {
    /// Bytes of header and object.
    pub(crate) const fn whole_bytes(&self) -> Option<u64> {
        self.bytes.checked_add(self.header_lines as u64 * LINE)
    }

    /// The first byte of the object.
    pub(crate) const fn data(&self) -> Offset {
        self.header.lines(self.header_lines as u64)
    }
}

/// A record in its destroyer's shard that the entry in `slot` of `owner` with this generation is no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tombstone {
    pub(crate) hash: u128,
    pub(crate) generation: u64,
    pub(crate) owner: u16,
    pub(crate) slot: u32,
}

impl Entry {
    pub(crate) const fn encode(&self) -> Words {
        match *self {
            Self::Free => [0; 7],
            Self::Object(state, record) => {
                let state = match state {
                    State::Claimed => CLAIMED,
                    State::Live => LIVE,
                    State::Condemned => CONDEMNED,
                };
                let Record { hash, generation, header, bytes, job, creator, header_lines } = record;
                let [low, high] = halves(hash);
                let tail = creator.0 as u64 | (header_lines as u64) << 16;
                [low, high, stamp(generation, state), header.0, bytes, job, tail]
            }
            Self::Tombstone(Tombstone { hash, generation, owner, slot }) => {
                let [low, high] = halves(hash);
                let target = owner as u64 | (slot as u64) << 16;
                [low, high, stamp(generation, TOMBSTONE), 0, 0, 0, target]
            }
        }
    }

    /// What the words of a whole line say; `None` when no correct writer left them.
    pub(crate) fn decode(words: &Words) -> Option<Self> {
        let [low, high, stamp, place, bytes, job, tail] = *words;
        let hash = u128::from(low) | u128::from(high) << 64;
        let generation = stamp >> 8;
        let state = match stamp as u8 {
            0 => return (*words == [0; 7]).then_some(Self::Free),
            CLAIMED => State::Claimed,
            LIVE => State::Live,
            CONDEMNED => State::Condemned,
            TOMBSTONE => {
                let slot = u32::try_from(tail >> 16).ok()?;
                return Some(Self::Tombstone(Tombstone { hash, generation, owner: tail as u16, slot }));
            }
            _ => return None,
        };
        let creator = ProcessSlot(tail as u16);
        let header_lines = u8::try_from(tail >> 16).ok()?;
        let header = Offset(place);
        let record = Record { hash, generation, header, bytes, job, creator, header_lines };
        (1..=MAX_HEADER_LINES).contains(&header_lines).then_some(Self::Object(state, record))
    }
}

/// The object whose live entry was being condemned when its writer died: it is condemned, as others may have passed over the
/// line since, once the host was fenced. Or the object of an entry whose state is damaged, in the state that the line's
/// checksum fits. A claim that was becoming live is none: nobody was told of it.
pub(crate) fn half_condemned(words: &Words, sum: u64) -> Option<(State, Record)> {
    let entry = [LIVE, CONDEMNED].into_iter().find_map(|state| {
        let words = in_state(words, state);
        (line::checksum(&words) == sum).then(|| Entry::decode(&words))?
    });
    match (words[2] as u8, entry) {
        (LIVE | CONDEMNED, Some(Entry::Object(_, record))) => Some((State::Condemned, record)),
        (state, Some(Entry::Object(fits, record))) if state != CLAIMED => Some((fits, record)),
        _ => None,
    }
}

/// Whether a writer that died may have left these words in a line that is not whole. If not, it is damaged: whatever it says
/// may have been live. Of a live entry only the state was changed, when it was whole, and a slot that was free has one word at
/// most that is not 0.
pub(crate) fn may_be_torn(words: &Words, sum: u64) -> bool {
    let was_free = words.iter().chain([&sum]).filter(|word| **word != 0).count() <= 1;
    was_free
        || match words[2] as u8 {
            CLAIMED | CONDEMNED | TOMBSTONE => true,
            LIVE => line::checksum(&in_state(words, CLAIMED)) == sum,
            _ => words[2] == 0,
        }
}

/// What a line holds that a writer has left half written, for a reader that does not know whether the writer goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HalfWritten {
    /// A claim, or an entry that goes live: its creator has not been told that the name is its own.
    Claim,
    /// No live entry, and none will come of it: it is condemned, freed or buried. Or the first words of a claim, whose owner will
    /// look at the others once all of them are in memory.
    Gone,
}

/// What a line that is not whole holds; `None` when no writer leaves it so: it may have been live before it was damaged, or it
/// changed while it was read.
pub(crate) fn half_written(words: &Words, sum: u64) -> Option<HalfWritten> {
    if let Some((State::Condemned, _)) = half_condemned(words, sum) {
        return Some(HalfWritten::Gone);
    }
    may_be_torn(words, sum).then_some(match words[2] as u8 {
        CLAIMED | LIVE => HalfWritten::Claim,
        _ => HalfWritten::Gone,
    })
}

fn in_state(words: &Words, state: u8) -> Words {
    let mut words = *words;
    words[2] = stamp(words[2] >> 8, state);
    words
}

/// The first word of every entry for a name: a scan passes over lines with another one.
pub(crate) const fn first_word(hash: u128) -> u64 {
    halves(hash)[0]
}

/// A hash, or a checksum, as the two words that a line holds.
pub(crate) const fn halves(hash: u128) -> [u64; 2] {
    [hash as u64, (hash >> 64) as u64]
}

const fn stamp(generation: u64, state: u8) -> u64 {
    generation << 8 | state as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORD: Record = Record {
        hash: 7 << 64 | 5,
        generation: 3,
        header: Offset(4096),
        bytes: 100,
        job: 9,
        creator: ProcessSlot(2),
        header_lines: 5,
    };

    #[test]
    fn entries_come_back_from_their_words() {
        let tombstone = Tombstone { hash: 1 << 100, generation: 8, owner: 63, slot: 1 << 20 };
        let states = [State::Claimed, State::Live, State::Condemned];
        let mut entries = vec![Entry::Free, Entry::Tombstone(tombstone)];
        entries.extend(states.map(|state| Entry::Object(state, RECORD)));
        for entry in entries {
            assert_eq!(Entry::decode(&entry.encode()), Some(entry));
        }
    }

    #[test]
    fn an_entry_that_was_being_condemned_is_recognised() {
        let [live, condemned] =
            [State::Live, State::Condemned].map(|state| Entry::Object(state, RECORD).encode());
        for (words, sum) in [(live, condemned), (condemned, live)] {
            assert_eq!(half_condemned(&words, line::checksum(&sum)), Some((State::Condemned, RECORD)));
        }
        let claimed = Entry::Object(State::Claimed, RECORD).encode();
        assert_eq!(half_condemned(&live, line::checksum(&claimed)), None);
        assert_eq!(half_condemned(&claimed, line::checksum(&claimed)), None);
    }

    #[test]
    fn a_live_entry_that_is_damaged_is_told_from_one_that_was_never_whole() {
        let [claimed, live] =
            [State::Claimed, State::Live].map(|state| Entry::Object(state, RECORD).encode());
        let sum = line::checksum(&live);
        for bit in 0..448 {
            let mut words = live;
            words[bit / 64] ^= 1 << (bit % 64);
            let mended = (128..136).contains(&bit).then_some((State::Live, RECORD));
            assert_eq!(half_condemned(&words, sum), mended, "bit {bit}");
            assert!(mended.is_some() || !may_be_torn(&words, sum), "bit {bit}");
        }
        for bit in 0..64 {
            assert!(!may_be_torn(&live, sum ^ 1 << bit), "bit {bit} of the checksum");
        }
        // Any words of a claim may have arrived, and then that it is live.
        for arrived in 0..128 {
            let words = std::array::from_fn(|word| if arrived >> word & 1 == 1 { claimed[word] } else { 0 });
            assert!([0, line::checksum(&claimed)].iter().all(|sum| may_be_torn(&words, *sum)));
        }
        assert!(may_be_torn(&live, line::checksum(&claimed)) && may_be_torn(&claimed, sum));
        assert_eq!(half_condemned(&claimed, sum), None);
    }

    #[test]
    fn a_half_written_line_tells_what_may_come_of_it() {
        let states = [State::Claimed, State::Live, State::Condemned];
        let [claimed, live, condemned] = states.map(|state| Entry::Object(state, RECORD).encode());
        let tombstone = Entry::Tombstone(Tombstone { hash: RECORD.hash, generation: 3, owner: 1, slot: 9 });
        let (free, buried) = ([0; 7], tombstone.encode());
        let whole = |words: &Words| {
            let mut line = [0; 8];
            line[..7].copy_from_slice(words);
            line[7] = line::checksum(words);
            line
        };
        for (old, new, held) in [
            (claimed, live, HalfWritten::Claim),
            (live, condemned, HalfWritten::Gone),
            (condemned, free, HalfWritten::Gone),
            (free, buried, HalfWritten::Gone),
            (buried, free, HalfWritten::Gone),
        ] {
            let (old, new) = (whole(&old), whole(&new));
            for arrived in 0..256 {
                let words: [u64; 8] =
                    std::array::from_fn(|word| if arrived >> word & 1 == 1 { new[word] } else { old[word] });
                if words == old || words == new {
                    continue;
                }
                let words_held = half_written(words.first_chunk().expect("seven of eight"), words[7]);
                assert_eq!(words_held, Some(held), "{words:x?}");
            }
        }
        // The state is there with the other words of a claim, or is not yet.
        let (old, new) = (whole(&free), whole(&claimed));
        for arrived in 1..255_u32 {
            let words: [u64; 8] =
                std::array::from_fn(|word| if arrived >> word & 1 == 1 { new[word] } else { old[word] });
            let held = if words[2] == 0 { HalfWritten::Gone } else { HalfWritten::Claim };
            // A claim's header, bytes and job may be 0, but not its checksum.
            if words != new {
                assert_eq!(half_written(words.first_chunk().expect("seven of eight"), words[7]), Some(held));
            }
        }
        let mut damaged = live;
        damaged[4] ^= 1;
        assert_eq!(half_written(&damaged, line::checksum(&live)), None);
    }

    #[test]
    fn no_damaged_bit_makes_one_state_of_another() {
        let states = [0, CLAIMED, LIVE, CONDEMNED, TOMBSTONE];
        for (index, one) in states.iter().enumerate() {
            for other in &states[..index] {
                assert!((one ^ other).count_ones() > 1, "{one} and {other}");
            }
        }
    }

    #[test]
    fn words_that_nobody_writes_are_no_entry() {
        let mut words = Entry::Object(State::Live, RECORD).encode();
        words[2] = stamp(3, 8);
        assert_eq!(Entry::decode(&words), None);
        words[2] = 0;
        assert_eq!(Entry::decode(&words), None, "free, with something in it");
        words[2] = stamp(3, LIVE);
        words[6] = 6 << 16;
        assert_eq!(Entry::decode(&words), None, "a header that is too long");
    }
}
