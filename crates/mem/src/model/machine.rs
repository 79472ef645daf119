//! The hardware: store-and-flush buffers, one cache a host, writes on their way to memory.
//!
//! Nothing here chooses: whoever drives the machine (a random schedule, or the exhaustive walk of the litmus tests)
//! picks which eligible step happens next.

use crate::Coherence;
use crate::random::Random;

/// Words in a line.
pub(super) const WORDS: usize = 8;

const ABSENT: u8 = 0;
const CLEAN: u8 = 1;
const DIRTY: u8 = 2;

/// Writes that a host may have on their way before the oldest is forced out.
const QUEUE: usize = 64;

/// What waits in a thread's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Store,
    StoreNt,
    WriteBack,
    Invalidate,
    /// `clflush`: ordered with stores, and with itself.
    Flush,
    /// A `clflush` whose write is still on its way: holds back later stores.
    Flushing,
    Sfence,
}

/// One entry of a store-and-flush buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Entry {
    pub(super) kind: Kind,
    /// The bytes of the word that a store writes.
    bytes: u8,
    /// Index of the word; of the line's first word for a flush.
    pub(super) word: u32,
    pub(super) value: u64,
}

impl Entry {
    pub(super) fn store(word: u32, bytes: u8, value: u64) -> Self {
        Self { kind: Kind::Store, bytes, word, value }
    }

    pub(super) fn store_nt(word: u32, value: u64) -> Self {
        Self { kind: Kind::StoreNt, bytes: 0xff, word, value }
    }

    pub(super) fn on_line(kind: Kind, line: u32) -> Self {
        Self { kind, bytes: 0, word: line * WORDS as u32, value: 0 }
    }

    pub(super) fn sfence() -> Self {
        Self { kind: Kind::Sfence, bytes: 0, word: 0, value: 0 }
    }

    pub(super) fn line(&self) -> u32 {
        self.word / WORDS as u32
    }

    fn is_store(&self) -> bool {
        matches!(self.kind, Kind::Store | Kind::StoreNt)
    }
}

/// A write on its way from a host to memory; becomes visible word by word.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Write {
    pub(super) line: u32,
    /// The words that memory does not have yet.
    pub(super) left: u8,
    /// The threads whose fences wait for it.
    waiters: u64,
    words: [u64; WORDS],
}

/// A fill that has read some words of its line and not yet the others.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Early {
    line: u32,
    taken: u8,
    words: [u64; WORDS],
}

#[derive(Clone, Debug, Default)]
struct Host {
    /// Per line: absent, clean or dirty.
    state: Vec<u8>,
    words: Vec<u64>,
    /// The lines that are not absent, and where each stands in this list.
    resident: Vec<u32>,
    place: Vec<u32>,
    queue: Vec<Write>,
    early: Option<Early>,
}

#[derive(Clone, Debug, Default)]
struct Buffer {
    host: usize,
    entries: Vec<Entry>,
    /// Writes on their way that this thread's next fence waits for.
    outstanding: u32,
}

impl Host {
    fn grow(&mut self, lines: usize) {
        if self.state.len() < lines {
            self.state.resize(lines, ABSENT);
            self.words.resize(lines * WORDS, 0);
            self.place.resize(lines, 0);
        }
    }
}

/// What is open of memory that its device keeps coherent ([`Coherence::HdmDb`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackInvalidation {
    /// A dirty line goes to another host's cache without a write-back, as CXL0 allows, and is lost with whoever holds it last. Else the
    /// device has it written back first.
    pub keeps_dirty: bool,
    /// A line that was dirty in the cache of a dead host fails. Else memory has what it had.
    pub poisons: bool,
}

impl BackInvalidation {
    /// Every such machine.
    pub const ALL: [Self; 4] = [
        Self { keeps_dirty: false, poisons: false },
        Self { keeps_dirty: false, poisons: true },
        Self { keeps_dirty: true, poisons: false },
        Self { keeps_dirty: true, poisons: true },
    ];
}

/// Memory, caches, buffers, and what is on its way between them.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    coherence: Coherence,
    device: BackInvalidation,
    used_hosts: usize,
    used_lines: usize,
    memory: Vec<u64>,
    hosts: Vec<Host>,
    threads: Vec<Buffer>,
    /// The words of a line that the program uses: the exhaustive walk leaves out the others.
    live: u8,
    /// Threads whose buffers hold something.
    pub(super) buffered: u64,
    /// Hosts with writes on their way.
    pub(super) queued: u64,
    /// The lines that anything ever touched: all that a reset has to clear.
    touched: Vec<u32>,
    is_touched: Vec<bool>,
    /// The lines that a dead host has left to fail.
    poisoned: Vec<u32>,
    /// Counts the changes that another thread could see.
    pub(super) changes: u64,
}

impl Default for Machine {
    fn default() -> Self {
        Self {
            coherence: Coherence::Software,
            device: BackInvalidation::default(),
            used_hosts: 0,
            used_lines: 0,
            memory: Vec::new(),
            hosts: Vec::new(),
            threads: Vec::new(),
            live: 0,
            buffered: 0,
            queued: 0,
            touched: Vec::new(),
            is_touched: Vec::new(),
            poisoned: Vec::new(),
            changes: 0,
        }
    }
}

impl Machine {
    /// Makes this a fresh machine of zeros. Whatever was allocated is kept, so that suites may draw their sizes.
    pub(super) fn reset(
        &mut self,
        hosts: usize,
        lines: usize,
        coherence: Coherence,
        device: BackInvalidation,
    ) {
        self.clear();
        if self.is_touched.len() < lines {
            self.memory.resize(lines * WORDS, 0);
            self.is_touched.resize(lines, false);
        }
        if self.hosts.len() < hosts {
            self.hosts.resize_with(hosts, Host::default);
        }
        for host in &mut self.hosts[..hosts] {
            host.grow(lines);
        }
        (self.used_hosts, self.used_lines) = (hosts, lines);
        (self.coherence, self.device) = (coherence, device);
        self.live = 0xff;
    }

    fn clear(&mut self) {
        for &line in &self.touched {
            let at = line as usize * WORDS;
            self.memory[at..at + WORDS].fill(0);
            self.is_touched[line as usize] = false;
        }
        self.touched.clear();
        self.poisoned.clear();
        for host in 0..self.hosts.len() {
            self.forget_caches(host);
        }
        self.threads.clear();
        self.buffered = 0;
        self.queued = 0;
        self.changes = 0;
    }

    /// Says which words of a line the program uses: a walk over every state leaves out the others.
    pub(super) fn use_words(&mut self, live: u8) {
        self.live = live;
    }

    /// Writes down everything that the future depends on, for programs whose values fit a byte.
    pub(super) fn encode(&self, into: &mut Vec<u8>) {
        let live = |words: &[u64], into: &mut Vec<u8>| {
            into.extend(
                words.iter().enumerate().filter(|(i, _)| self.live & (1 << i) != 0).map(|(_, w)| *w as u8),
            );
        };
        for words in self.memory.chunks_exact(WORDS) {
            live(words, into);
        }
        into.extend(self.poisoned.iter().map(|line| *line as u8));
        for host in &self.hosts {
            for (state, words) in host.state.iter().zip(host.words.chunks_exact(WORDS)) {
                into.push(*state);
                if *state != ABSENT {
                    live(words, into);
                }
            }
            into.push(host.queue.len() as u8);
            for write in &host.queue {
                into.extend([write.line as u8, write.left, write.waiters as u8]);
                live(&write.words, into);
            }
            if let Some(early) = &host.early {
                into.extend([early.line as u8, early.taken]);
                live(&early.words, into);
            }
            into.push(u8::MAX);
        }
        for thread in &self.threads {
            into.push(thread.entries.len() as u8);
            for entry in &thread.entries {
                into.extend([entry.kind as u8, entry.bytes, entry.word as u8, entry.value as u8]);
            }
        }
    }

    pub(super) fn words(&self) -> usize {
        self.used_lines * WORDS
    }

    pub(super) fn coherence(&self) -> Coherence {
        self.coherence
    }

    /// Whether hosts have caches that lose something: on coherent memory stores go to memory itself.
    pub(super) fn has_caches(&self) -> bool {
        self.coherence != Coherence::Coherent
    }

    pub(super) fn poison_lost_lines(&mut self) {
        self.device.poisons = true;
    }

    /// Whether a dead host has left any line to fail.
    pub(super) fn has_poison(&self) -> bool {
        !self.poisoned.is_empty()
    }

    /// Whether a dead host has left the line of `word` to fail.
    pub(super) fn is_poisoned(&self, word: u32) -> bool {
        self.poisoned.contains(&(word / WORDS as u32))
    }

    /// Adds a thread on `host` and returns its number.
    pub(super) fn add_thread(&mut self, host: usize) -> usize {
        self.threads.push(Buffer { host, ..Buffer::default() });
        self.threads.len() - 1
    }

    fn touch(&mut self, line: u32) {
        if !self.is_touched[line as usize] {
            self.is_touched[line as usize] = true;
            self.touched.push(line);
        }
    }

    // Memory itself, for what runs alone.

    pub(super) fn peek(&self, word: u32) -> u64 {
        self.memory[word as usize]
    }

    pub(super) fn poke(&mut self, word: u32, bytes: u8, value: u64) {
        self.touch(word / WORDS as u32);
        let old = &mut self.memory[word as usize];
        *old = merge(*old, bytes, value);
    }

    // What a thread does.

    pub(super) fn push(&mut self, thread: usize, entry: Entry) {
        self.threads[thread].entries.push(entry);
        self.buffered |= 1 << thread;
    }

    pub(super) fn entries(&self, thread: usize) -> &[Entry] {
        &self.threads[thread].entries
    }

    /// Whether an `mfence` of `thread` would return.
    pub(super) fn is_drained(&self, thread: usize) -> bool {
        let buffer = &self.threads[thread];
        buffer.entries.is_empty() && buffer.outstanding == 0
    }

    /// Whether everything that `thread` stored is at least in its host's cache.
    pub(super) fn has_stored(&self, thread: usize) -> bool {
        self.threads[thread].entries.iter().all(|entry| entry.kind != Kind::Store)
    }

    /// Loads a word: the thread's own buffer first, byte by byte, then its host's cache.
    pub(super) fn load(&mut self, thread: usize, word: u32) -> u64 {
        let buffer = &self.threads[thread];
        let (mut have, mut value) = (0u8, 0u64);
        for entry in buffer.entries.iter().rev() {
            if entry.word == word && entry.is_store() {
                value = merge(value, entry.bytes & !have, entry.value);
                have |= entry.bytes;
                if have == 0xff {
                    return value;
                }
            }
        }
        let below = if self.has_caches() {
            let host = buffer.host;
            self.fill(host, word / WORDS as u32);
            self.hosts[host].words[word as usize]
        } else {
            self.memory[word as usize]
        };
        merge(below, have, value)
    }

    // What the adversary may do with a buffer.

    /// Whether the entry at `index` of `thread`'s buffer may leave it now.
    pub(super) fn is_eligible(&self, thread: usize, index: usize) -> bool {
        let buffer = &self.threads[thread];
        let entry = buffer.entries[index];
        let mut older = buffer.entries[..index].iter();
        match entry.kind {
            Kind::Sfence | Kind::Flushing => index == 0 && buffer.outstanding == 0,
            Kind::Store => older.all(|o| match o.kind {
                Kind::WriteBack | Kind::Invalidate => true,
                Kind::StoreNt => o.word != entry.word,
                Kind::Store | Kind::Flush | Kind::Flushing | Kind::Sfence => false,
            }),
            Kind::StoreNt => older.all(|o| match o.kind {
                Kind::Store | Kind::StoreNt => o.word != entry.word,
                Kind::Sfence => false,
                _ => true,
            }),
            Kind::WriteBack | Kind::Invalidate => older.all(|o| match o.kind {
                Kind::Store | Kind::StoreNt => o.line() != entry.line(),
                Kind::Sfence => false,
                _ => true,
            }),
            Kind::Flush => older.all(|o| match o.kind {
                Kind::StoreNt => o.line() != entry.line(),
                Kind::WriteBack | Kind::Invalidate => true,
                Kind::Store | Kind::Flush | Kind::Flushing | Kind::Sfence => false,
            }),
        }
    }

    /// An entry of `thread`'s buffer that may leave it now.
    pub(super) fn eligible(&self, thread: usize, random: &mut Random) -> Option<usize> {
        let entries = &self.threads[thread].entries;
        let (mut chosen, mut candidates) = (None, 0);
        let mut stored = false;
        for (index, entry) in entries.iter().enumerate() {
            // Most entries are decided without a look at the older ones.
            if entry.kind == Kind::Store && stored {
                continue;
            }
            stored |= entry.kind == Kind::Store;
            if self.is_eligible(thread, index) {
                candidates += 1;
                if candidates == 1 || random.below(candidates) == 0 {
                    chosen = Some(index);
                }
            }
            if entry.kind == Kind::Sfence {
                break;
            }
        }
        chosen
    }

    /// Lets the entry at `index` of `thread`'s buffer, which is eligible, take effect.
    pub(super) fn commit(&mut self, thread: usize, index: usize) -> Entry {
        let buffer = &mut self.threads[thread];
        let host = buffer.host;
        let entry = buffer.entries[index];
        if entry.kind == Kind::Flush {
            buffer.entries[index].kind = Kind::Flushing;
        } else {
            buffer.entries.remove(index);
            if buffer.entries.is_empty() {
                self.buffered &= !(1 << thread);
            }
        }
        match entry.kind {
            Kind::Store | Kind::StoreNt if !self.has_caches() => self.write_memory(entry.word, entry),
            Kind::Store => self.write_cache(host, entry),
            Kind::StoreNt => self.write_past_cache(thread, host, entry),
            Kind::WriteBack => self.write_back(thread, host, entry.line()),
            Kind::Invalidate | Kind::Flush => {
                self.write_back(thread, host, entry.line());
                self.drop_line(host, entry.line());
            }
            Kind::Flushing | Kind::Sfence => {}
        }
        entry
    }

    fn write_memory(&mut self, word: u32, entry: Entry) {
        let old = self.memory[word as usize];
        self.poke(word, entry.bytes, entry.value);
        self.changes += u64::from(self.memory[word as usize] != old);
    }

    fn write_cache(&mut self, host: usize, entry: Entry) {
        self.fill(host, entry.line());
        self.take_from_others(host, entry.line());
        let host = &mut self.hosts[host];
        let word = &mut host.words[entry.word as usize];
        let new = merge(*word, entry.bytes, entry.value);
        self.changes += u64::from(new != *word);
        *word = new;
        host.state[entry.line() as usize] = DIRTY;
    }

    fn write_past_cache(&mut self, thread: usize, host: usize, entry: Entry) {
        let line = entry.line();
        self.evict(host, line);
        if let Some(other) = self.other_holder(host, line) {
            self.save(other, line);
        }
        self.take_from_others(host, line);
        let mut words = [0; WORDS];
        words[entry.word as usize % WORDS] = entry.value;
        let waiters = 1 << thread;
        self.threads[thread].outstanding += 1;
        self.touch(line);
        self.enqueue(host, Write { line, left: 1 << (entry.word as usize % WORDS), waiters, words });
    }

    /// `clwb`: the line's writes that are on their way already count too.
    fn write_back(&mut self, thread: usize, host: usize, line: u32) {
        // Where dirty lines go from host to host, the instruction reaches each cache of the coherence domain.
        let other = self.other_holder(host, line).filter(|_| self.device.keeps_dirty);
        let host = other.unwrap_or(host);
        self.clean(host, line);
        for write in self.hosts[host].queue.iter_mut().filter(|write| write.line == line) {
            if write.waiters & (1 << thread) == 0 {
                write.waiters |= 1 << thread;
                self.threads[thread].outstanding += 1;
            }
        }
    }

    // What the adversary may do with a cache.

    /// Whether `line` is in `host`'s cache.
    pub(super) fn holds(&self, host: usize, line: u32) -> bool {
        self.hosts[host].state[line as usize] != ABSENT
    }

    /// Whether `line` is dirty in `host`'s cache.
    pub(super) fn is_dirty(&self, host: usize, line: u32) -> bool {
        self.hosts[host].state[line as usize] == DIRTY
    }

    /// The lines in `host`'s cache.
    pub(super) fn resident(&self, host: usize) -> &[u32] {
        &self.hosts[host].resident
    }

    // What the device does, where it keeps caches coherent. At most one host has what memory lacks of a line, and all copies agree.

    /// Another host than `host` that has what memory lacks of `line`, in its cache or on the way.
    fn other_holder(&self, host: usize, line: u32) -> Option<usize> {
        if self.coherence != Coherence::HdmDb {
            return None;
        }
        (0..self.used_hosts).find(|other| *other != host && self.is_unsaved(*other, line))
    }

    fn is_unsaved(&self, host: usize, line: u32) -> bool {
        self.is_dirty(host, line) || self.hosts[host].queue.iter().any(|write| write.line == line)
    }

    /// Memory gets what `host` has of `line`.
    fn save(&mut self, host: usize, line: u32) {
        self.clean(host, line);
        self.deliver_all_of(host, line);
    }

    fn deliver_all_of(&mut self, host: usize, line: u32) {
        while let Some(index) = self.hosts[host].queue.iter().rposition(|write| write.line == line) {
            self.deliver_line(host, index);
        }
    }

    /// Back-invalidates the copies of other hosts before `host`, which has read `line`, changes it.
    fn take_from_others(&mut self, host: usize, line: u32) {
        if self.coherence != Coherence::HdmDb {
            return;
        }
        for other in (0..self.used_hosts).filter(|other| *other != host) {
            self.deliver_all_of(other, line);
            self.drop_line(other, line);
        }
    }

    /// What a host that has no copy of `line` reads.
    fn read_shared(&mut self, host: usize, line: u32) -> [u64; WORDS] {
        let Some(other) = self.other_holder(host, line) else { return self.read_line(host, line) };
        if !self.device.keeps_dirty {
            self.save(other, line);
        }
        if !self.holds(other, line) {
            return self.read_line(other, line);
        }
        let at = line as usize * WORDS;
        let mut words = [0; WORDS];
        words.copy_from_slice(&self.hosts[other].words[at..at + WORDS]);
        words
    }

    /// Brings `line` into `host`'s cache: memory, and over it the host's own writes that are on their way.
    pub(super) fn fill(&mut self, host: usize, line: u32) {
        if self.hosts[host].state[line as usize] != ABSENT {
            return;
        }
        self.touch(line);
        let mut words = self.read_shared(host, line);
        let host = &mut self.hosts[host];
        if let Some(early) = host.early.take_if(|early| early.line == line) {
            for (index, word) in words.iter_mut().enumerate() {
                if early.taken & (1 << index) != 0 {
                    *word = early.words[index];
                }
            }
        }
        let at = line as usize * WORDS;
        host.words[at..at + WORDS].copy_from_slice(&words);
        host.state[line as usize] = CLEAN;
        host.place[line as usize] = host.resident.len() as u32;
        host.resident.push(line);
    }

    fn read_line(&self, host: usize, line: u32) -> [u64; WORDS] {
        let at = line as usize * WORDS;
        let mut words = [0; WORDS];
        words.copy_from_slice(&self.memory[at..at + WORDS]);
        for write in self.hosts[host].queue.iter().filter(|write| write.line == line) {
            for (index, word) in words.iter_mut().enumerate() {
                if write.left & (1 << index) != 0 {
                    *word = write.words[index];
                }
            }
        }
        words
    }

    /// Reads only the words `taken` of an absent line now; the fill that follows takes the others.
    pub(super) fn begin_fill(&mut self, host: usize, line: u32, taken: u8) {
        if self.coherence == Coherence::Software && !self.holds(host, line) {
            let words = self.read_line(host, line);
            self.hosts[host].early = Some(Early { line, taken, words });
        }
    }

    /// Sends a dirty line on its way to memory; it stays cached.
    pub(super) fn clean(&mut self, host: usize, line: u32) {
        if !self.is_dirty(host, line) {
            return;
        }
        let at = line as usize * WORDS;
        let mut words = [0; WORDS];
        words.copy_from_slice(&self.hosts[host].words[at..at + WORDS]);
        self.hosts[host].state[line as usize] = CLEAN;
        self.enqueue(host, Write { line, left: self.live, waiters: 0, words });
    }

    /// Writes back if dirty, and drops.
    pub(super) fn evict(&mut self, host: usize, line: u32) {
        self.clean(host, line);
        self.drop_line(host, line);
    }

    fn drop_line(&mut self, host: usize, line: u32) {
        let host = &mut self.hosts[host];
        host.early.take_if(|early| early.line == line);
        if host.state[line as usize] == ABSENT {
            return;
        }
        host.state[line as usize] = ABSENT;
        let place = host.place[line as usize];
        host.resident.swap_remove(place as usize);
        if let Some(&moved) = host.resident.get(place as usize) {
            host.place[moved as usize] = place;
        }
    }

    /// Whether a fill of `host` has read some words and not yet the others.
    pub(super) fn is_filling(&self, host: usize) -> bool {
        self.hosts[host].early.is_some()
    }

    pub(super) fn hosts(&self) -> usize {
        self.used_hosts
    }

    /// Whether memory has everything.
    pub(super) fn is_settled(&self) -> bool {
        self.buffered == 0 && self.queued == 0 && self.hosts.iter().all(|host| !host.state.contains(&DIRTY))
    }

    // Writes on their way.

    fn enqueue(&mut self, host: usize, write: Write) {
        if self.hosts[host].queue.len() >= QUEUE {
            self.deliver_line(host, 0);
        }
        self.hosts[host].queue.push(write);
        self.queued |= 1 << host;
    }

    pub(super) fn queue(&self, host: usize) -> &[Write] {
        &self.hosts[host].queue
    }

    /// Whether `word` of the write at `index` may reach memory: older writes of the same host to it have.
    pub(super) fn is_deliverable(&self, host: usize, index: usize, word: usize) -> bool {
        let queue = &self.hosts[host].queue;
        let (line, bit) = (queue[index].line, 1 << word);
        queue[index].left & bit != 0
            && queue[..index].iter().all(|older| older.line != line || older.left & bit == 0)
    }

    /// Makes one word of a write, which is deliverable, visible in memory; says which line it was.
    pub(super) fn deliver(&mut self, host: usize, index: usize, word: usize) -> u32 {
        let write = &mut self.hosts[host].queue[index];
        let line = write.line;
        write.left &= !(1 << word);
        let at = line as usize * WORDS + word;
        self.changes += u64::from(self.memory[at] != write.words[word]);
        self.memory[at] = write.words[word];
        if write.left == 0 {
            let write = self.hosts[host].queue.remove(index);
            self.release(write.waiters);
            if self.hosts[host].queue.is_empty() {
                self.queued &= !(1 << host);
            }
        }
        line
    }

    fn release(&mut self, mut waiters: u64) {
        while waiters != 0 {
            self.threads[waiters.trailing_zeros() as usize].outstanding -= 1;
            waiters &= waiters - 1;
        }
    }

    /// Makes all words of the write at `index`, and of older ones to its line, visible.
    pub(super) fn deliver_line(&mut self, host: usize, index: usize) {
        let line = self.hosts[host].queue[index].line;
        let mut left = index + 1;
        let mut at = 0;
        while left > 0 {
            left -= 1;
            let write = &self.hosts[host].queue[at];
            if write.line != line {
                at += 1;
                continue;
            }
            let mut words = write.left;
            while words != 0 {
                self.deliver(host, at, words.trailing_zeros() as usize);
                words &= words - 1;
            }
        }
    }

    pub(super) fn host_of(&self, thread: usize) -> usize {
        self.threads[thread].host
    }

    // Crashes.

    /// Empties `thread`'s buffer into its host's cache and queue, as a CPU does whose program was killed.
    pub(super) fn drain(&mut self, thread: usize, random: &mut Random) {
        while self.buffered & (1 << thread) != 0 {
            match self.eligible(thread, random) {
                Some(index) => drop(self.commit(thread, index)),
                None => _ = self.deliver_awaited(thread),
            }
        }
    }

    /// Makes visible the first write on its way that a fence of `thread` waits for, and says which line it was.
    pub(super) fn deliver_awaited(&mut self, thread: usize) -> Option<u32> {
        let awaited = |write: &Write| write.waiters & (1 << thread) != 0;
        let first = |host: usize| Some((host, self.hosts[host].queue.iter().position(awaited)?));
        let own = self.threads[thread].host;
        let (host, index) = first(own).or_else(|| (0..self.used_hosts).find_map(first))?;
        let line = self.hosts[host].queue[index].line;
        self.deliver_line(host, index);
        Some(line)
    }

    /// Loses what `host` had in buffers, caches and on the way.
    pub(super) fn lose(&mut self, host: usize) {
        if self.coherence == Coherence::HdmDb {
            self.lose_shared(host);
        }
        for (number, thread) in self.threads.iter_mut().enumerate().filter(|(_, t)| t.host == host) {
            thread.entries.clear();
            thread.outstanding = 0;
            self.buffered &= !(1 << number);
        }
        self.forget_caches(host);
        self.queued &= !(1 << host);
    }

    /// Memory lacks what `host` has of these lines: no copy is left of it, and no fence waits for it.
    fn lose_shared(&mut self, host: usize) {
        let mut lost: Vec<u32> = self.hosts[host].queue.iter().map(|write| write.line).collect();
        lost.extend(self.hosts[host].resident.iter().filter(|line| self.is_dirty(host, **line)));
        lost.sort_unstable();
        lost.dedup();
        for line in lost {
            for other in (0..self.used_hosts).filter(|other| *other != host) {
                self.drop_line(other, line);
            }
            if self.device.poisons && !self.poisoned.contains(&line) {
                self.poisoned.push(line);
            }
        }
        let waiters: Vec<u64> = self.hosts[host].queue.drain(..).map(|write| write.waiters).collect();
        waiters.into_iter().for_each(|waiters| self.release(waiters));
        let dead = self.threads.iter().enumerate().filter(|(_, thread)| thread.host == host);
        let dead = dead.fold(0, |dead, (number, _)| dead | 1 << number);
        for write in self.hosts.iter_mut().flat_map(|host| &mut host.queue) {
            write.waiters &= !dead;
        }
    }

    fn forget_caches(&mut self, host: usize) {
        let host = &mut self.hosts[host];
        for line in host.resident.drain(..) {
            host.state[line as usize] = ABSENT;
        }
        host.queue.clear();
        host.early = None;
    }

    /// Everything that is anywhere reaches memory, in any order, and the caches are dropped.
    pub(super) fn settle(&mut self, random: &mut Random) {
        while self.buffered != 0 {
            let thread = random.bit(self.buffered);
            self.drain(thread, random);
        }
        loop {
            let cached = (0..self.used_hosts).filter(|host| !self.hosts[*host].resident.is_empty());
            let cached = cached.fold(0, |hosts, host| hosts | 1 << host);
            if cached | self.queued == 0 {
                return;
            }
            let host = random.bit(cached | self.queued);
            let (lines, writes) = (self.hosts[host].resident.len(), self.hosts[host].queue.len());
            let choice = random.below(lines + writes);
            if choice < lines {
                self.evict(host, self.hosts[host].resident[choice]);
            } else {
                self.deliver_line(host, choice - lines);
            }
        }
    }
}

/// `new`'s `bytes` over `old`.
fn merge(old: u64, bytes: u8, new: u64) -> u64 {
    if bytes == 0xff {
        return new;
    }
    let mask = (0..8).filter(|byte| bytes & (1 << byte) != 0).fold(0, |mask, byte| mask | 0xff << (byte * 8));
    (old & !mask) | (new & mask)
}
