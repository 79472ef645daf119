//! What every [`Memory`] must do, as functions over any of them: the suite that all implementations pass.
//!
//! The first group runs in one thread. The roles of the second group run in a thread (or coroutine) each; two
//! processes of one host or of two.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crate::{BLOCK, Bell, Fold, LINE, LocalWord, Memory, Offset};

/// The bytes of a region that the suite writes, from 0 on.
pub const BYTES: u64 = 4096;

/// Local words that the suite uses.
pub const LOCAL_WORDS: u32 = 4;

/// Bells that the suite uses.
pub const BELLS: u32 = 2;

/// What lies around a copy, to be left alone.
const AROUND: u8 = 0xa5;

/// Words keep what was stored, past the caches too, and their neighbours what they had.
pub fn words<M: Memory>(memory: &M) {
    for index in 0..16 {
        memory.store(Offset(0).word(index), index + 1);
    }
    memory.store(Offset(0).word(3), u64::MAX);
    memory.write_back(Offset(0), 2 * LINE);
    memory.sfence();
    memory.store_nt(Offset(0).word(5), 0x1234_5678_9abc_def0);
    memory.mfence();
    for round in 0..2 {
        for index in 0..16 {
            let expected = match index {
                3 => u64::MAX,
                5 => 0x1234_5678_9abc_def0,
                _ => index + 1,
            };
            assert_eq!(memory.load(Offset(0).word(index)), Ok(expected), "word {index}, round {round}");
        }
        memory.invalidate(Offset(0), 2 * LINE);
        memory.fence_invalidations();
    }
    for byte in 0..LINE {
        memory.store_byte(Offset(LINE) + (byte * 5) % LINE, ((byte * 5) % LINE) as u8);
    }
    memory.write_back(Offset(LINE), 1);
    memory.mfence();
    memory.invalidate(Offset(LINE), 1);
    memory.fence_invalidations();
    for (index, word) in (0..).zip(memory.load_line(Offset(LINE)).expect("good memory")) {
        let bytes: [u8; 8] = std::array::from_fn(|byte| index * 8 + byte as u8);
        assert_eq!(word, u64::from_le_bytes(bytes), "bytes of word {index} of a line");
    }
    assert_eq!(memory.load(Offset(LINE - 8)), Ok(8), "the word before the bytes");
    assert_eq!(memory.load(Offset(2 * LINE)), memory.load_line(Offset(2 * LINE)).map(|words| words[0]));
    let last = Offset(memory.bytes() - 8);
    memory.store(last, 7);
    assert_eq!(memory.load(last), Ok(7));
    let line = Offset(LINE);
    let stored = [11, 12, 13, 14, 15, 16, 17, 18];
    memory.store_line(line, &stored);
    assert_eq!(memory.load_line(line), Ok(stored));
    for (index, word) in (0..).zip(stored) {
        assert_eq!(memory.load(line.word(index)), Ok(word), "word {index} of a line");
    }
    assert_eq!(memory.load(Offset(LINE - 8)), Ok(8), "the word before a line");
    assert_eq!(memory.load(line + LINE), memory.load_line(line + LINE).map(|words| words[0]));
}

/// Copies of these lengths to and from every one of these offsets move exactly their bytes.
pub fn copies<M: Memory>(
    memory: &M,
    offsets: impl Iterator<Item = u64> + Clone,
    lengths: impl Iterator<Item = usize>,
) {
    for length in lengths {
        let sent = pattern(length);
        for offset in offsets.clone() {
            let frame = surround(memory, offset, length);
            memory.copy_in(Offset(offset), &sent).expect("good memory");
            let mut back = vec![0; length];
            memory.copy_out(Offset(offset), &mut back).expect("good memory");
            assert_eq!(back, sent, "{length} bytes at {offset}");
            undisturbed(memory, frame, offset, length as u64);
        }
    }
}

/// Copies past the caches move exactly their bytes and fill the last word up with zeros.
pub fn copies_past_caches<M: Memory>(
    memory: &M,
    words: impl Iterator<Item = u64> + Clone,
    lengths: impl Iterator<Item = usize>,
) {
    for length in lengths {
        let sent = pattern(length);
        let whole = length.next_multiple_of(8);
        for offset in words.clone().map(|word| word * 8) {
            let frame = surround(memory, offset, whole);
            memory.write_back(Offset(frame.0), frame.1);
            memory.mfence();
            memory.copy_in_nt(Offset(offset), &sent).expect("good memory");
            memory.mfence();
            let mut back = vec![0; whole];
            memory.copy_out(Offset(offset), &mut back).expect("good memory");
            assert_eq!(back[..length], sent, "{length} bytes at {offset}");
            assert!(back[length..].iter().all(|byte| *byte == 0), "tail of {length} bytes at {offset}");
            undisturbed(memory, frame, offset, whole as u64);
        }
    }
}

/// A fold that depends on the order of the sources, and on what is finished.
#[derive(Clone, Copy)]
struct InvertedSum;

impl Fold for InvertedSum {
    fn combine(self, so_far: [u8; BLOCK], block: [u8; BLOCK]) -> [u8; BLOCK] {
        std::array::from_fn(|at| so_far[at].wrapping_mul(3).wrapping_add(block[at]))
    }

    fn finish(self, combined: [u8; BLOCK]) -> [u8; BLOCK] {
        combined.map(|byte| !byte)
    }
}

/// Folds of these lengths, of one to three sources at odd places, write exactly their bytes, at any word and past the caches too.
pub fn folds<M: Memory>(
    memory: &M,
    words: impl Iterator<Item = u64> + Clone,
    lengths: impl Iterator<Item = usize>,
) {
    // Behind the frame of what is written.
    let sources = [1501, 2306, 3008].map(Offset);
    for (source, at) in sources.into_iter().enumerate() {
        let sent: Vec<u8> = pattern(700).iter().map(|byte| byte.wrapping_add(source as u8)).collect();
        memory.copy_in(at, &sent).expect("good memory");
    }
    for length in lengths {
        for (offset, past_caches) in words.clone().flat_map(|word| [(word * 8, false), (word * 8, true)]) {
            let whole = if past_caches { length.next_multiple_of(8) } else { length };
            let frame = surround(memory, offset, whole);
            memory.write_back(Offset(frame.0), frame.1);
            memory.mfence();
            let sources = &sources[..1 + length % 3];
            memory
                .fold(Offset(offset), sources, length as u64, past_caches, InvertedSum)
                .expect("good memory");
            memory.mfence();
            let mut expected = vec![0; length];
            for (index, source) in sources.iter().enumerate() {
                let mut part = vec![0; length];
                memory.copy_out(*source, &mut part).expect("good memory");
                let fold = |sum: &u8, part: &u8| {
                    if index == 0 { *part } else { sum.wrapping_mul(3).wrapping_add(*part) }
                };
                expected = expected.iter().zip(&part).map(|(sum, part)| fold(sum, part)).collect();
            }
            expected.iter_mut().for_each(|byte| *byte = !*byte);
            let mut back = vec![0; whole];
            memory.copy_out(Offset(offset), &mut back).expect("good memory");
            assert_eq!(
                back[..length],
                expected,
                "{length} bytes at {offset}, past the caches: {past_caches}"
            );
            assert!(back[length..].iter().all(|byte| *byte == 0), "tail of {length} bytes at {offset}");
            undisturbed(memory, frame, offset, whole as u64);
        }
    }
}

/// Offsets outside the region, and words that are not aligned, are the caller's mistake.
pub fn bounds<M: Memory>(memory: &M) {
    let end = memory.bytes();
    let panics = |what: &dyn Fn()| catch_unwind(AssertUnwindSafe(what)).is_err();
    assert!(panics(&|| _ = memory.load(Offset(end))));
    assert!(panics(&|| _ = memory.load(Offset(4))));
    assert!(panics(&|| memory.store(Offset(u64::MAX - 7), 1)));
    assert!(panics(&|| memory.store_nt(Offset(end), 1)));
    assert!(panics(&|| _ = memory.copy_in(Offset(end - 8), &[0; 9])));
    assert!(panics(&|| _ = memory.copy_in_nt(Offset(4), &[0; 8])));
    assert!(panics(&|| _ = memory.copy_in_nt(Offset(end - 8), &[0; 9])));
    assert!(panics(&|| _ = memory.copy_out(Offset(u64::MAX), &mut [0; 2])));
    assert!(panics(&|| _ = memory.fold(Offset(0), &[Offset(end - 8)], 9, false, InvertedSum)));
    assert!(panics(&|| _ = memory.fold(Offset(end - 8), &[Offset(0)], 9, true, InvertedSum)));
    assert!(panics(&|| _ = memory.fold(Offset(4), &[Offset(0)], 8, true, InvertedSum)));
    assert!(panics(&|| memory.write_back(Offset(end - 8), 9)));
    assert!(panics(&|| memory.invalidate(Offset(end), 1)));
    memory.copy_in(Offset(end), &[]).expect("nothing fits everywhere");
    memory.write_back(Offset(end), 0);
}

/// Local words keep what was stored, and a compare-and-swap says what it found.
pub fn local_words<M: Memory>(memory: &M) {
    let word = LocalWord(1);
    memory.local_store(word, 5);
    assert_eq!(memory.local_cas(word, 4, 6), Err(5));
    assert_eq!(memory.local_cas(word, 5, 6), Ok(()));
    assert_eq!(memory.local_load(word), 6);
    memory.local_store(word, 0);
}

/// A sleep ends at its deadline, or at once when the bell rang after the announcement; time does not go back.
pub fn deadlines<M: Memory>(memory: &M) {
    let start = memory.now();
    let until = start + Duration::from_millis(2);
    while memory.now() < until {
        let seen = memory.announce_sleep(Bell(0));
        memory.sleep(Bell(0), seen, until);
    }
    let seen = memory.announce_sleep(Bell(0));
    memory.wake(Bell(0));
    let before = memory.now();
    memory.sleep(Bell(0), seen, before + Duration::from_secs(3600));
    assert!(memory.now() < before + Duration::from_secs(1800), "the bell rang before the sleep");
    memory.announce_sleep(Bell(0));
    memory.cancel_sleep(Bell(0));
    memory.wake(Bell(0));
}

/// Where the messages of [`publisher`] lie: three lines of payload, the publisher's sequence, the subscriber's answer.
const PAYLOAD: Offset = Offset(1024);
const SEQUENCE: Offset = Offset(1024 + 3 * LINE);
const ANSWER: Offset = Offset(1024 + 4 * LINE);
const MESSAGE: usize = 150;

/// Publishes `rounds` messages by rule 2, ordinary and non-temporal stores in turn, each after the last was answered.
pub fn publisher<M: Memory>(memory: &M, rounds: u64) {
    for round in 1..=rounds {
        let message = vec![round as u8; MESSAGE];
        if round % 2 == 0 {
            memory.copy_in(PAYLOAD, &message).expect("good memory");
            memory.write_back(PAYLOAD, MESSAGE as u64);
            memory.sfence();
            memory.store(SEQUENCE, round);
            memory.write_back(SEQUENCE, 8);
        } else {
            memory.copy_in_nt(PAYLOAD, &message).expect("good memory");
            memory.sfence();
            memory.store_nt(SEQUENCE, round);
        }
        memory.sfence();
        await_word(memory, ANSWER, round);
    }
}

/// Consumes what [`publisher`] publishes, by rule 3, and finds each message whole.
pub fn subscriber<M: Memory>(memory: &M, rounds: u64) {
    let mut message = [0; MESSAGE];
    for round in 1..=rounds {
        await_word(memory, SEQUENCE, round);
        memory.invalidate(PAYLOAD, MESSAGE as u64);
        memory.fence_invalidations();
        memory.copy_out(PAYLOAD, &mut message).expect("good memory");
        assert_eq!(message, [round as u8; MESSAGE], "message {round}");
        memory.store(ANSWER, round);
        memory.write_back(ANSWER, 8);
        memory.sfence();
    }
}

/// Adds 1 to a local word, `rounds` times, by compare-and-swap among the processes of one host.
pub fn counter<M: Memory>(memory: &M, rounds: u64) {
    for _ in 0..rounds {
        let mut old = memory.local_load(LocalWord(0));
        while let Err(now) = memory.local_cas(LocalWord(0), old, old + 1) {
            old = now;
            memory.pause();
        }
    }
}

/// Where the two players of [`bells`] say which turn they made.
const TURNS: [Offset; 2] = [Offset(2048), Offset(2048 + LINE)];

/// One of two players (0 and 1) who each wait for the other's turn asleep, so that a wake-up that got lost would be
/// a very long sleep.
pub fn bells<M: Memory>(memory: &M, player: usize, rounds: u64) {
    let (mine, other) = (player, 1 - player);
    let long = Duration::from_secs(20);
    for round in 1..=rounds {
        let until = memory.now() + long;
        // Player 0 moves first; player 1 answers with the same number.
        while fresh(memory, TURNS[other]) < round - (1 - player as u64) {
            let seen = memory.announce_sleep(Bell(mine as u32));
            if fresh(memory, TURNS[other]) < round - (1 - player as u64) {
                memory.sleep(Bell(mine as u32), seen, until);
            } else {
                memory.cancel_sleep(Bell(mine as u32));
            }
            assert!(memory.now() < until, "player {player} slept through the wake-up of round {round}");
        }
        memory.store(TURNS[mine], round);
        memory.write_back(TURNS[mine], 8);
        memory.sfence();
        memory.wake(Bell(other as u32));
    }
}

fn fresh<M: Memory>(memory: &M, at: Offset) -> u64 {
    memory.invalidate(at, 8);
    memory.fence_invalidations();
    memory.load(at).expect("good memory")
}

fn await_word<M: Memory>(memory: &M, at: Offset, value: u64) {
    let mut looks = 0_u32;
    while fresh(memory, at) != value {
        looks += 1;
        if looks.is_multiple_of(64) { memory.yield_now() } else { memory.pause() }
    }
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|index| (index as u8).wrapping_mul(37) ^ length as u8 | 1).collect()
}

/// Writes [`AROUND`] over the lines that hold `[offset, offset + length)`, and one line on each side.
fn surround<M: Memory>(memory: &M, offset: u64, length: usize) -> (u64, u64) {
    let start = Offset(offset).line().0.saturating_sub(LINE);
    let end = ((offset + length as u64).next_multiple_of(LINE) + LINE).min(memory.bytes());
    memory.copy_in(Offset(start), &vec![AROUND; (end - start) as usize]).expect("good memory");
    (start, end - start)
}

fn undisturbed<M: Memory>(memory: &M, (start, bytes): (u64, u64), offset: u64, length: u64) {
    let mut all = vec![0; bytes as usize];
    memory.copy_out(Offset(start), &mut all).expect("good memory");
    for (at, byte) in (start..).zip(all) {
        assert!(
            byte == AROUND || (offset..offset + length).contains(&at),
            "byte {at} beside {length} at {offset}"
        );
    }
}
