//! Where the queues and the shards of a part lie.
//!
//! # Part of a client or a proxy
//! | line | what |
//! |---|---|
//! | 0 | identity |
//! | 1 | spare, 0 |
//! | 2 | state |
//! | 3 | spare, 0 |
//! | from 4 on | of a client, where proxies keep an optimizer's state: an order, of a line and one for each group of settings |
//! | then | queues: for each proxy that the part deals with whole lines, with a word for each of its shards |
//! | then | of a proxy that keeps an optimizer's state: a line with a word, and whole lines with a word for each shard of the exchange |
//! | then | buffers: for each of these proxies its shards, each from a whole line on; shards may share the lines of a window |
//! | then | of a proxy that keeps an optimizer's state: each moment of its shards, laid out as its buffer |
//! | then | of such a proxy: for each moment room for that of its largest shard, the log |
//!
//! A client deals with all proxies, a proxy with itself. The sums of a proxy that keeps an optimizer's state share no lines.
//!
//! # Words of a state line
//! | word | what |
//! |---|---|
//! | 0 | 0, or how the process ended, as word 3 of a group's progress line: of clients and proxies, counted on, instead of ranks |
//! | 1 | steps that it has done |
//! | 2 | of a proxy: shards that it has summed; of a client: nanoseconds that its last step was blocked |
//! | 3 | of a proxy: bytes of sums that it has written; of a client: bytes a step that the proxies sum |
//! | 4 | of a client: bytes of all gradients in a step |
//! | 5 | of a client: the size in bytes from which shards go to the proxies of higher latency and bandwidth |
//!
//! # Word of a queue
//! A checked word: bits 0..24 the shard, bits 24..56 the step, from 1. Word `i` is the `i`-th shard that was pushed in its step, or
//! summed.
//!
//! # Words of a step
//! Where a proxy keeps an optimizer's state, they say how far it is with a step, in the form of a queue's word. The first names the
//! shard whose moments, as they were before this step, are in the log. Each shard's own word says that the optimizer has done this step
//! with it. Before that, its moments are those of the log if the first word names it in this step. Otherwise they are those in place.

use polder_mem::{Coherence, LINE, Offset};
use polder_schedule::Exchange;

use crate::word;

/// Lines before the queues.
pub(super) const HEAD: u64 = 4;
const SHARD_BITS: u32 = 24;

const _: () = assert!(Exchange::MOST_SHARDS <= 1 << SHARD_BITS, "a shard's number fits into its bits");

/// The word that says that `shard` was pushed, or summed, in `step`.
pub(super) fn encode(step: u32, shard: u32) -> u64 {
    word::seal(u64::from(step) << SHARD_BITS | u64::from(shard))
}

/// The shard that a word of `step` says; nothing when it is still one of the step before.
pub(super) fn decode(word: u64, step: u32, coherence: Coherence) -> Result<Option<u32>, &'static str> {
    let said = word::open(word).ok_or("entry of a service's queue")?;
    let shard = (said & ((1 << SHARD_BITS) - 1)) as u32;
    match step.checked_sub((said >> SHARD_BITS) as u32) {
        Some(0) => Ok(Some(shard)),
        Some(1) => Ok(None),
        // The writer's host died with what this process had seen: its death ends the wait.
        Some(_) if coherence.takes_back() => Ok(None),
        _ => Err("step of a service's queue"),
    }
}

/// Where the order of a client lies.
pub(super) fn order_lines(client: Offset) -> Offset {
    client.lines(HEAD)
}

/// Where the state line of a part lies.
pub(super) fn state_line(part: Offset) -> Offset {
    part.lines(2)
}

/// The places in all parts.
#[derive(Clone, Debug)]
pub(super) struct Places {
    /// For each proxy: where a client's queue and buffer for it begin, and what its own take.
    proxies: Vec<Place>,
    client_bytes: u64,
    moments: u64,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    queue: u64,
    buffer: u64,
    queue_bytes: u64,
    /// What a proxy's words of a step take.
    words_bytes: u64,
    /// What a proxy's sums take.
    sums_bytes: u64,
    /// What one moment of the largest shard takes.
    log_bytes: u64,
}

impl Places {
    /// With room for the orders of so many groups of settings, and for so many moments of each parameter.
    pub(super) fn new(exchange: &Exchange, settings: usize, moments: u16) -> Self {
        let head = HEAD + if settings == 0 { 0 } else { 1 + settings as u64 };
        let queue_bytes = |proxy: u16| (exchange.of_proxy(proxy).len() as u64 * 8).next_multiple_of(LINE);
        let all = 0..exchange.proxies();
        let (mut queue, mut buffer) = (head * LINE, head * LINE + all.clone().map(queue_bytes).sum::<u64>());
        let mut proxies = vec![];
        for proxy in all {
            let (queue_bytes, window_bytes) = (queue_bytes(proxy), exchange.window_bytes(proxy));
            let sums_bytes = if settings == 0 { window_bytes } else { exchange.buffer_bytes(proxy) };
            let shards = exchange.shards();
            let words_bytes =
                if moments == 0 { 0 } else { LINE + (shards.len() as u64 * 8).next_multiple_of(LINE) };
            let largest = exchange.of_proxy(proxy).iter().map(|&shard| shards[shard as usize].bytes).max();
            let log_bytes = largest.unwrap_or(0).next_multiple_of(LINE);
            proxies.push(Place { queue, buffer, queue_bytes, words_bytes, sums_bytes, log_bytes });
            queue += queue_bytes;
            buffer += window_bytes;
        }
        Self { proxies, client_bytes: buffer, moments: moments.into() }
    }

    /// Bytes of the part of a proxy, or of a client.
    pub(super) fn bytes(&self, proxy: Option<u16>) -> u64 {
        proxy.map_or(self.client_bytes, |proxy| {
            let Place { queue_bytes, words_bytes, sums_bytes, log_bytes, .. } =
                self.proxies[usize::from(proxy)];
            HEAD * LINE + queue_bytes + words_bytes + sums_bytes + self.moments * (sums_bytes + log_bytes)
        })
    }

    /// A client's queue for a proxy.
    pub(super) fn queue_for(&self, client: Offset, proxy: u16) -> Offset {
        client + self.proxies[usize::from(proxy)].queue
    }

    /// A client's buffer for a proxy.
    pub(super) fn buffer_for(&self, client: Offset, proxy: u16) -> Offset {
        client + self.proxies[usize::from(proxy)].buffer
    }

    /// A proxy's queue of sums.
    pub(super) fn queue_of(proxy: Offset) -> Offset {
        proxy.lines(HEAD)
    }

    /// A proxy's buffer of sums.
    pub(super) fn buffer_of(&self, part: Offset, proxy: u16) -> Offset {
        self.log_word(part, proxy) + self.proxies[usize::from(proxy)].words_bytes
    }

    /// A proxy's buffer of a moment, counted from 0.
    pub(super) fn moment_of(&self, part: Offset, proxy: u16, moment: u64) -> Offset {
        self.buffer_of(part, proxy) + (1 + moment) * self.proxies[usize::from(proxy)].sums_bytes
    }

    /// Where a proxy's log of a moment lies.
    pub(super) fn log_of(&self, part: Offset, proxy: u16, moment: u64) -> Offset {
        self.moment_of(part, proxy, self.moments) + moment * self.proxies[usize::from(proxy)].log_bytes
    }

    /// The words that say what is in a proxy's log, and that the optimizer has done a step with a shard.
    pub(super) fn step_words(&self, part: Offset, proxy: u16, shard: u32) -> [Offset; 2] {
        let log = self.log_word(part, proxy);
        [log, log.lines(1).word(shard.into())]
    }

    fn log_word(&self, part: Offset, proxy: u16) -> Offset {
        part.lines(HEAD) + self.proxies[usize::from(proxy)].queue_bytes
    }
}

/// A queue of another process, as its reader goes through it in one step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queue {
    /// The number of its writer.
    pub(super) of: usize,
    at: Offset,
    entries: usize,
    /// How many entries of this step were taken.
    pub(super) taken: usize,
}

impl Queue {
    pub(super) const fn new(of: usize, at: Offset, entries: usize) -> Self {
        Self { of, at, entries, taken: 0 }
    }

    /// Whether entries of this step are to come.
    pub(super) const fn is_open(&self) -> bool {
        self.taken < self.entries
    }

    /// Where the next entry will stand.
    pub(super) fn next(&self) -> Offset {
        self.at.word(self.taken as u64)
    }
}

#[cfg(test)]
mod tests {
    use polder_schedule::Shard;

    use super::*;

    #[test]
    fn queues_and_buffers_lie_side_by_side_and_on_lines_of_their_own() {
        let shard = |tensor, proxy| Shard { tensor, start: 0, bytes: 72, proxy };
        let shards = (0..9).map(|tensor| shard(tensor, 0)).chain([shard(9, 2)]).collect();
        let exchange = Exchange::new(shards, 3).unwrap();
        let places = Places::new(&exchange, 0, 0);
        let part = Offset(6400);
        let queues = [0, 1, 2].map(|proxy| places.queue_for(part, proxy).0 - 6400);
        assert_eq!(queues, [256, 384, 384], "nine words take two lines");
        let buffers = [0, 1, 2].map(|proxy| places.buffer_for(part, proxy).0 - 6400);
        assert_eq!(buffers, [448, 448 + 9 * 128, 448 + 9 * 128]);
        assert_eq!(places.bytes(None), 448 + 10 * 128);
        assert_eq!(
            [0, 1, 2].map(|proxy| places.bytes(Some(proxy))),
            [256 + 128 + 9 * 128, 256, 256 + 64 + 128]
        );
        assert_eq!(places.buffer_of(part, 0), part + 384);
        let ordered = Places::new(&exchange, 2, 0);
        assert_eq!(ordered.queue_for(part, 0), order_lines(part).lines(3), "a line, and one a group");
        assert_eq!(ordered.bytes(None), places.bytes(None) + 3 * LINE);
        assert_eq!(ordered.bytes(Some(0)), places.bytes(Some(0)));
        let kept = Places::new(&exchange, 2, 2);
        assert_eq!(kept.bytes(None), ordered.bytes(None));
        let [words, sums, log] = [64 + 128, 9 * 128, 128];
        assert_eq!(kept.bytes(Some(0)), ordered.bytes(Some(0)) + words + 2 * (sums + log));
        let words_of = |shard| kept.step_words(part, 0, shard).map(|word| word.0 - 6400);
        assert_eq!([0, 9].map(words_of), [[384, 448], [384, 448 + 72]]);
        assert_eq!(kept.buffer_of(part, 0), part + 384 + words);
        assert_eq!(
            [0, 1].map(|of| kept.moment_of(part, 0, of)),
            [1, 2].map(|of| part + 384 + words + of * sums)
        );
        assert_eq!(kept.log_of(part, 0, 1) + log, part + kept.bytes(Some(0)));
        let exchange = exchange.windowed(256);
        let [reused, stays] = [0, 1].map(|settings| Places::new(&exchange, settings, 0));
        assert_eq!(reused.bytes(None), 448 + 256 + 128, "a window of proxy 0, and the one shard of proxy 2");
        assert_eq!([&reused, &stays].map(|it| it.bytes(Some(0))), [256 + 128 + 256, 256 + 128 + 9 * 128]);
    }

    #[test]
    fn a_word_says_its_shard_in_its_own_step_alone() {
        for coherence in Coherence::ALL {
            let decode = |word| decode(word, 7, coherence);
            assert_eq!(super::decode(0, 1, coherence), Ok(None), "nothing was ever pushed");
            assert_eq!(decode(encode(7, 5)), Ok(Some(5)));
            assert_eq!(decode(encode(6, 5)), Ok(None));
            let taken_back = [encode(5, 5), 0];
            assert!(taken_back.iter().all(|&word| decode(word).is_ok() == coherence.takes_back()));
            for strange in [encode(8, 5), encode(u32::MAX, 5), encode(7, 5) ^ 1] {
                assert!(decode(strange).is_err(), "{strange:#x}");
            }
        }
    }
}
