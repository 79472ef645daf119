//! Rings that are known to be wrong, and their right twin: what each rule of the real one is for.

use polder_mem::model::{ModelMemory, Outcome, Shape, Suite, World};
use polder_mem::{LINE, Memory, Offset};

use crate::line;

/// Rings of which some schedule must fail, or the model is blind.
pub(in crate::verify) fn canaries() -> Vec<Suite> {
    let flawed = |name, about, flaw| Suite::new(name, about, move |seed| run(seed, Some(flaw)));
    vec![
        flawed("ring-not-written-back", "the payload stays in the producer's cache", Flaw::NotWrittenBack),
        flawed("ring-both-ends", "the sequence at both ends instead of a checksum", Flaw::BothEnds),
        flawed("ring-credit-in-header", "the consumer writes in the producer's line", Flaw::CreditInHeader),
        flawed(
            "ring-invalidated-after",
            "the payload is invalidated after the copy only",
            Flaw::InvalidatedAfter,
        ),
    ]
}

/// What a ring gets wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    /// The payload stays in the producer's cache.
    NotWrittenBack,
    /// A header counts when both its ends carry the sequence.
    BothEnds,
    /// The consumer returns its credit in the line of the header.
    CreditInHeader,
    /// The consumer drops the payload's lines when it has copied them out, to be fresh the next time.
    InvalidatedAfter,
}

const MESSAGES: u64 = 6;
const SLOTS: u64 = 2;
const CREDIT: Offset = Offset(0);
const HEADERS: Offset = Offset(64);
const CELLS: Offset = Offset(192);
/// The words of a header that carry the message, between the sequences and the checksum.
const INLINE_WORDS: u64 = 5;

fn run(seed: u64, flaw: Option<Flaw>) -> Outcome {
    let mut world = World::new(seed, Shape { bytes: 320, local_words: 1, ..Shape::default() });
    world.spawn(0, 0, move |memory| produce(&memory, flaw));
    world.spawn(1, 0, move |memory| consume(&memory, flaw));
    world.run()
}

fn header(message: u64) -> Offset {
    HEADERS.lines(message % SLOTS)
}

fn cell(message: u64) -> Offset {
    CELLS.lines(message % SLOTS)
}

fn credit(flaw: Option<Flaw>, message: u64) -> Offset {
    if flaw == Some(Flaw::CreditInHeader) { header(message).word(6) } else { CREDIT }
}

fn word(message: u64, index: u64) -> u64 {
    message * 1000 + index + 1
}

/// A checksum over the sequence and the words.
fn sum(message: u64, words: impl Iterator<Item = u64>) -> u64 {
    let mut all = [message + 1; line::WORDS];
    all[1..].iter_mut().zip(words).for_each(|(to, word)| *to = word);
    line::checksum(&all)
}

fn fresh(memory: &ModelMemory, at: Offset) -> u64 {
    memory.invalidate(at, LINE);
    memory.fence_invalidations();
    memory.load(at).expect("model memory")
}

fn publish(memory: &ModelMemory, line: Offset) {
    memory.write_back(line, LINE);
    memory.sfence();
}

fn produce(memory: &ModelMemory, flaw: Option<Flaw>) {
    for message in 0..MESSAGES {
        let before = message.saturating_sub(SLOTS);
        while message >= SLOTS && fresh(memory, credit(flaw, before)) < before + 1 {
            memory.pause();
        }
        (0..8).for_each(|index| memory.store(cell(message).word(index), word(message, index)));
        if flaw != Some(Flaw::NotWrittenBack) {
            publish(memory, cell(message));
        }
        let line = header(message);
        memory.store(line, message + 1);
        (0..INLINE_WORDS).for_each(|index| memory.store(line.word(1 + index), word(message, index)));
        // Word 6 is the checksum, or else the consumer's credit; word 7 the sequence again, or else the checksum.
        let sum = sum(message, (0..INLINE_WORDS).map(|index| word(message, index)));
        memory.store(line.word(7), if flaw == Some(Flaw::BothEnds) { message + 1 } else { sum });
        publish(memory, line);
    }
}

fn consume(memory: &ModelMemory, flaw: Option<Flaw>) {
    for message in 0..MESSAGES {
        while !is_whole(memory, flaw, message) {
            memory.pause();
        }
        let load = |at: Offset| memory.load(at).expect("model memory");
        let expected = |index| word(message, index);
        let line = header(message);
        let inline: Vec<u64> = (0..INLINE_WORDS).map(|index| load(line.word(1 + index))).collect();
        assert!(inline.iter().copied().eq((0..INLINE_WORDS).map(expected)), "message {message}: {inline:?}");
        if flaw != Some(Flaw::InvalidatedAfter) {
            memory.invalidate(cell(message), LINE);
            memory.fence_invalidations();
        }
        let payload: Vec<u64> = (0..8).map(|index| load(cell(message).word(index))).collect();
        assert!(payload.iter().copied().eq((0..8).map(expected)), "cell {message}: {payload:?}");
        if flaw == Some(Flaw::InvalidatedAfter) {
            memory.invalidate(cell(message), LINE);
            memory.fence_invalidations();
        }
        memory.store(credit(flaw, message), message + 1);
        publish(memory, credit(flaw, message));
    }
}

/// Whether the header of `message` has come, by this flaw's lights.
fn is_whole(memory: &ModelMemory, flaw: Option<Flaw>, message: u64) -> bool {
    let line = header(message);
    let load = |index| memory.load(line.word(index)).expect("model memory");
    let first = fresh(memory, line);
    first == message + 1
        && match flaw {
            Some(Flaw::BothEnds) => load(7) == message + 1,
            _ => load(7) == sum(message, (0..INLINE_WORDS).map(|index| load(1 + index))),
        }
}

#[cfg(test)]
mod tests {
    use polder_mem::model::explore;

    use super::*;

    #[test]
    fn the_ring_with_nothing_wrong_never_fails() {
        explore("naive ring", 20_000, 0, |seed| run(seed, None)).expect_none();
    }
}
