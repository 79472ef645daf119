//! The handle that protocols work on in the model.

use std::cell::RefMut;
use std::fmt;
use std::panic::Location;
use std::rc::Rc;

use super::machine::{Entry, Kind, WORDS};
use super::mutants::{Change, SiteKind};
use super::state::{Crash, Mode, State};
use super::world::Core;
use crate::{Bell, Coherence, Fault, LINE, Liveness, LocalWord, Memory, Nanos, Offset, ProcessSlot};

/// One process's access to a world: usable by every thread of that (host, slot), and by no other.
#[derive(Clone)]
pub struct ModelMemory {
    core: Rc<Core>,
    host: u16,
    slot: u16,
}

type Site = &'static Location<'static>;

impl ModelMemory {
    pub(super) fn new(core: Rc<Core>, host: u16, slot: u16) -> Self {
        Self { core, host, slot }
    }

    pub(super) fn core(&self) -> &Rc<Core> {
        &self.core
    }

    /// The host of this process.
    #[must_use]
    pub fn host(&self) -> u16 {
        self.host
    }

    /// Writes `text` into the trace of a failing schedule; costs nothing in the others.
    pub fn note(&self, text: impl FnOnce() -> String) {
        let mut state = self.core.state.borrow_mut();
        let me = state.current;
        if let Some(trace) = &mut state.trace {
            trace.note(me, text());
        }
    }

    /// Lets `crash` fall once the thread that calls this has made `operations` more memory operations, and no other of it: for a scene
    /// that knows when it comes to what it is about.
    pub fn crash_after(&self, crash: Crash, operations: u64) {
        let mut state = self.core.state.borrow_mut();
        let me = state.current;
        let at = state.threads[me].operations + operations;
        state.plan_crash_at(me, crash, at);
    }

    /// Everything that may happen before an operation. `visible` operations are those whose order with other threads'
    /// operations can be noticed: what only enters the thread's own buffer commutes with all of them.
    fn turn(&self, visible: bool) -> RefMut<'_, State> {
        let mut state = self.core.state.borrow_mut();
        match state.mode {
            Mode::Over => {
                state.count_after_the_end();
                return state;
            }
            Mode::Alone => {
                state.count_alone();
                return state;
            }
            Mode::Running => {}
        }
        if std::thread::panicking() {
            // A destructor of a thread that has failed the schedule.
            state.mode = Mode::Over;
            return state;
        }
        let me = state.current;
        let thread = &state.threads[me];
        assert!(
            (thread.host, thread.slot) == (self.host, self.slot),
            "a handle of host {} slot {} is used by a thread of host {} slot {}",
            self.host,
            self.slot,
            thread.host,
            thread.slot
        );
        state = self.tick(state);
        if visible && state.wants_switch() {
            return self.switch(state);
        }
        state
    }

    /// One more place where a crash may fall, and what the adversary does there.
    fn tick<'a>(&'a self, mut state: RefMut<'a, State>) -> RefMut<'a, State> {
        if state.mode != Mode::Running {
            return state;
        }
        state.adversary();
        if state.count() { state } else { self.switch(state) }
    }

    /// Lets the scheduler choose who goes on; returns when it is this thread again.
    fn switch<'a>(&'a self, mut state: RefMut<'a, State>) -> RefMut<'a, State> {
        let me = state.current;
        let next = state.choose();
        // A thread that has just crashed is never chosen again.
        if next == Some(me) {
            return state;
        }
        state.next = next;
        drop(state);
        self.core.suspend(me);
        self.core.state.borrow_mut()
    }

    fn flush(&self, at: Offset, bytes: u64, kind: Kind, site: Site) {
        if bytes == 0 {
            return;
        }
        let lines = self.lines(at, bytes);
        let mut state = self.turn(false);
        let coherence = state.shape.coherence;
        let is_made = match kind {
            Kind::WriteBack => coherence.needs_write_back(),
            _ => coherence.needs_invalidation(),
        };
        if state.mode != Mode::Running || !is_made {
            return;
        }
        let (what, site_kind) = match kind {
            Kind::WriteBack => ("write_back", SiteKind::WriteBack),
            _ => ("invalidate", SiteKind::Invalidate),
        };
        let me = state.current;
        state.record(me, what, Some(at.0), bytes, Some(site));
        let kind = match state.mutate(site_kind, site) {
            Some(Change::Drop) => return,
            Some(Change::Weaken) => Kind::WriteBack,
            None => kind,
        };
        for (index, line) in lines.enumerate() {
            if index > 0 {
                state = self.tick(state);
            }
            state.push(Entry::on_line(kind, line));
        }
    }

    fn lines(&self, at: Offset, bytes: u64) -> std::ops::RangeInclusive<u32> {
        self.check(at, bytes, "a flush");
        (at.0 / LINE) as u32..=((at.0 + bytes - 1) / LINE) as u32
    }

    fn check(&self, at: Offset, bytes: u64, what: &str) {
        let size = self.core.bytes.get();
        assert!(
            bytes <= size && at.0 <= size - bytes,
            "{what} of [{at}, +{bytes}) ends past the region of {size} bytes"
        );
    }

    fn fence(&self, kind: SiteKind, site: Site) {
        let mut state = self.turn(false);
        if state.mode != Mode::Running {
            return;
        }
        let me = state.current;
        if kind == SiteKind::FenceInvalidations && !state.shape.coherence.needs_invalidation() {
            return;
        }
        state.record(me, kind.name(), None, 0, Some(site));
        let weak = match state.mutate(kind, site) {
            Some(Change::Drop) => return,
            Some(Change::Weaken) => true,
            None => kind == SiteKind::Sfence,
        };
        if !weak {
            drop(self.drain(state));
        } else if !state.machine.is_drained(me) {
            state.push(Entry::sfence());
        }
    }

    /// Runs the current thread's buffer empty, with others in between.
    fn drain<'a>(&'a self, mut state: RefMut<'a, State>) -> RefMut<'a, State> {
        while state.mode == Mode::Running && !state.machine.is_drained(state.current) {
            state.drain_step();
            if state.wants_switch() {
                state = self.switch(state);
            }
        }
        state
    }

    /// Runs the current thread's stores into the cache, as a locked instruction does.
    fn drain_stores<'a>(&'a self, mut state: RefMut<'a, State>) -> RefMut<'a, State> {
        while state.mode == Mode::Running && !state.machine.has_stored(state.current) {
            state.drain_step();
        }
        state
    }

    fn store_word(state: &mut State, word: u32, bytes: u8, value: u64, past_cache: bool) {
        match state.mode {
            Mode::Over => {}
            Mode::Alone => state.machine.poke(word, bytes, value),
            Mode::Running => {
                state.use_line(State::line_of(word));
                state.push(if past_cache {
                    Entry::store_nt(word, value)
                } else {
                    Entry::store(word, bytes, value)
                });
            }
        }
    }

    fn load_word(state: &mut State, word: u32) -> u64 {
        match state.mode {
            Mode::Over => 0,
            Mode::Alone => state.machine.peek(word),
            Mode::Running => {
                state.use_line(State::line_of(word));
                let me = state.current;
                state.machine.load(me, word)
            }
        }
    }

    fn store_one(&self, at: Offset, value: u64, past_cache: bool, site: Site) {
        let what = if past_cache { "store_nt" } else { "store" };
        let mut state = self.turn(false);
        let word = state.word_index(at.0, what);
        let me = state.current;
        state.record(me, what, Some(at.0), value, Some(site));
        state.pass_aim(word);
        if !state.store_fault(word) {
            Self::store_word(&mut state, word, 0xff, value, past_cache);
        }
    }

    fn copy(&self, at: Offset, from: &[u8], past_cache: bool, site: Site) -> Result<(), Fault> {
        let what = if past_cache { "copy_in_nt" } else { "copy_in" };
        self.check(at, from.len() as u64, what);
        let mut state = self.turn(false);
        let me = state.current;
        state.record(me, what, Some(at.0), from.len() as u64, Some(site));
        let words = words_of(at, from.len());
        let backwards = state.mode == Mode::Running && state.runs_backwards();
        for index in 0..words.len() as u32 {
            let word = if backwards { words.end - 1 - index } else { words.start + index };
            let (mut bytes, value) = piece(at, from, word);
            if past_cache {
                bytes = 0xff;
            }
            if index > 0 {
                state = self.tick(state);
            }
            if state.store_fault(word) {
                // The copy reports it now, not the next load.
                state.load_fault(word);
                return Err(fault(at, word, backwards));
            }
            Self::store_word(&mut state, word, bytes, value, past_cache);
        }
        Ok(())
    }
}

/// A copy at `at` that failed at `word`; one that runs backwards has done nothing that counts.
fn fault(at: Offset, word: u32, backwards: bool) -> Fault {
    let offset = Offset((u64::from(word) * 8).max(at.0));
    Fault { offset, done: if backwards { 0 } else { offset.0 - at.0 } }
}

/// The words that hold a byte of `[at, at + bytes)`.
fn words_of(at: Offset, bytes: usize) -> std::ops::Range<u32> {
    let end = at.0 + bytes as u64;
    (at.0 / 8) as u32..if bytes == 0 { (at.0 / 8) as u32 } else { end.div_ceil(8) as u32 }
}

/// The part of `from`, which goes to `at`, that falls into `word`: which bytes of the word, and their values.
fn piece(at: Offset, from: &[u8], word: u32) -> (u8, u64) {
    let start = u64::from(word) * 8;
    let (mut bytes, mut value) = (0, [0; 8]);
    for (index, byte) in value.iter_mut().enumerate() {
        let source = (start + index as u64).checked_sub(at.0).and_then(|source| from.get(source as usize));
        if let Some(source) = source {
            *byte = *source;
            bytes |= 1 << index;
        }
    }
    (bytes, u64::from_le_bytes(value))
}

impl Memory for ModelMemory {
    fn bytes(&self) -> u64 {
        self.core.bytes.get()
    }

    fn coherence(&self) -> Coherence {
        self.core.state.borrow().shape.coherence
    }

    #[track_caller]
    fn load(&self, at: Offset) -> Result<u64, Fault> {
        let site = Location::caller();
        let mut state = self.turn(true);
        let word = state.word_index(at.0, "load");
        if let Some(failed) = state.load_fault(word) {
            return Err(Fault { offset: Offset(u64::from(failed) * 8), done: 0 });
        }
        let value = Self::load_word(&mut state, word);
        let me = state.current;
        state.record(me, "load", Some(at.0), value, Some(site));
        Ok(value)
    }

    #[track_caller]
    fn store(&self, at: Offset, value: u64) {
        self.store_one(at, value, false, Location::caller());
    }

    #[track_caller]
    fn store_byte(&self, at: Offset, value: u8) {
        let mut state = self.turn(false);
        let word = state.word_index(at.0 & !7, "store_byte");
        let me = state.current;
        state.record(me, "store_byte", Some(at.0), value.into(), Some(Location::caller()));
        if !state.store_fault(word) {
            let byte = at.0 % 8;
            Self::store_word(&mut state, word, 1 << byte, u64::from(value) << (8 * byte), false);
        }
    }

    #[track_caller]
    fn store_nt(&self, at: Offset, value: u64) {
        self.store_one(at, value, true, Location::caller());
    }

    #[track_caller]
    fn copy_in(&self, at: Offset, from: &[u8]) -> Result<(), Fault> {
        self.copy(at, from, false, Location::caller())
    }

    #[track_caller]
    fn copy_in_nt(&self, at: Offset, from: &[u8]) -> Result<(), Fault> {
        assert!(at.0.is_multiple_of(8), "copy_in_nt at {at}: words lie at multiples of 8");
        self.copy(at, from, true, Location::caller())
    }

    #[track_caller]
    fn copy_out(&self, at: Offset, into: &mut [u8]) -> Result<(), Fault> {
        let site = Location::caller();
        self.check(at, into.len() as u64, "copy_out");
        let mut state = self.turn(true);
        let me = state.current;
        state.record(me, "copy_out", Some(at.0), into.len() as u64, Some(site));
        for word in words_of(at, into.len()) {
            if state.mode == Mode::Running
                && ((word as usize).is_multiple_of(WORDS) || state.random.below(8) == 0)
            {
                state.adversary();
                if state.wants_switch() {
                    state = self.switch(state);
                }
            }
            if state.load_fault(word).is_some() {
                return Err(fault(at, word, false));
            }
            let value = Self::load_word(&mut state, word).to_le_bytes();
            let start = u64::from(word) * 8;
            for (index, byte) in value.iter().enumerate() {
                let target = (start + index as u64).checked_sub(at.0);
                if let Some(target) = target.and_then(|target| into.get_mut(target as usize)) {
                    *target = *byte;
                }
            }
        }
        Ok(())
    }

    #[track_caller]
    fn write_back(&self, at: Offset, bytes: u64) {
        self.flush(at, bytes, Kind::WriteBack, Location::caller());
    }

    #[track_caller]
    fn invalidate(&self, at: Offset, bytes: u64) {
        self.flush(at, bytes, Kind::Invalidate, Location::caller());
    }

    #[track_caller]
    fn sfence(&self) {
        self.fence(SiteKind::Sfence, Location::caller());
    }

    #[track_caller]
    fn mfence(&self) {
        self.fence(SiteKind::Mfence, Location::caller());
    }

    #[track_caller]
    fn fence_invalidations(&self) {
        self.fence(SiteKind::FenceInvalidations, Location::caller());
    }

    fn pause(&self) {
        let mut state = self.turn(false);
        match state.mode {
            Mode::Over => {}
            // Nobody else will do anything: whoever waits wants to see its deadline.
            Mode::Alone => state.now += 1000,
            Mode::Running => {
                state.wait();
                drop(self.switch(state));
            }
        }
    }

    fn yield_now(&self) {
        self.pause();
    }

    fn now(&self) -> Nanos {
        // Counted, so that a loop which only looks at the clock ends.
        let state = self.turn(false);
        // A destructor that waits for a deadline finds that it has come.
        Nanos(if state.mode == Mode::Over { u64::MAX } else { state.now + state.skew(self.host, self.slot) })
    }

    fn local_load(&self, word: LocalWord) -> u64 {
        let mut state = self.turn(true);
        let index = state.local_index(self.host, word.0);
        let value = if state.mode == Mode::Over { 0 } else { state.local[index] };
        let me = state.current;
        state.record(me, "local_load", Some(u64::from(word.0)), value, None);
        value
    }

    fn local_store(&self, word: LocalWord, value: u64) {
        let mut state = self.drain_stores(self.turn(true));
        let index = state.local_index(self.host, word.0);
        if state.mode != Mode::Over {
            let me = state.current;
            state.record(me, "local_store", Some(u64::from(word.0)), value, None);
            state.set_local(index, value);
        }
    }

    fn local_cas(&self, word: LocalWord, old: u64, new: u64) -> Result<(), u64> {
        let mut state = self.drain_stores(self.turn(true));
        let index = state.local_index(self.host, word.0);
        if state.mode == Mode::Over {
            return Ok(());
        }
        let (me, found) = (state.current, state.local[index]);
        state.record(me, "local_cas", Some(u64::from(word.0)), found, None);
        if found != old {
            return Err(found);
        }
        state.set_local(index, new);
        Ok(())
    }

    fn slot(&self) -> ProcessSlot {
        ProcessSlot(self.slot)
    }

    fn liveness(&self, host: u16, slot: ProcessSlot) -> Liveness {
        let mut state = self.turn(true);
        let liveness = state.liveness((self.host, self.slot), (host, slot.0));
        let me = state.current;
        state.record(me, "liveness", Some(u64::from(host)), u64::from(slot.0), None);
        liveness
    }

    fn announce_sleep(&self, bell: Bell) -> u32 {
        let mut state = self.drain_stores(self.turn(true));
        let me = state.current;
        state.record(me, "announce_sleep", None, u64::from(bell.0), None);
        if state.mode == Mode::Over { 0 } else { state.announce(self.host, bell.0) }
    }

    fn sleep(&self, bell: Bell, seen: u32, until: Nanos) {
        let mut state = self.turn(true);
        let me = state.current;
        state.record(me, "sleep", None, u64::from(bell.0), None);
        let skew = state.skew(self.host, self.slot);
        let until = if until.0 == u64::MAX { u64::MAX } else { until.0.saturating_sub(skew) };
        match state.mode {
            Mode::Over => return,
            Mode::Alone => state.now = state.now.max(until.min(state.now + 1_000_000_000)),
            Mode::Running => {
                if state.sleep(self.host, bell.0, seen, until) {
                    state = self.switch(state);
                }
            }
        }
        if state.mode != Mode::Over {
            state.withdraw(self.host, bell.0);
        }
    }

    fn cancel_sleep(&self, bell: Bell) {
        let mut state = self.turn(true);
        if state.mode != Mode::Over {
            state.withdraw(self.host, bell.0);
        }
    }

    fn wake(&self, bell: Bell) {
        let mut state = self.drain(self.turn(false));
        let me = state.current;
        state.record(me, "wake", None, u64::from(bell.0), None);
        if state.mode == Mode::Running && state.wants_switch() {
            state = self.switch(state);
        }
        if state.mode != Mode::Over {
            state.ring(self.host, bell.0);
        }
    }
}

impl fmt::Debug for ModelMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ModelMemory {{ host: {}, slot: {} }}", self.host, self.slot)
    }
}
