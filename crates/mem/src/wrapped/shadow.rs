//! Each host's private copy in place of a cache, so that real programs fail where a flush is missing.

use std::fmt;
use std::panic::Location;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::host::{Host, HostError, HostPlan};
use crate::mapped::Mapped;
use crate::memory::forward;
use crate::shm::Shm;
use crate::{
    Bell, Coherence, Fault, LINE, Liveness, LocalWord, Memory, Nanos, Offset, ProcessSlot, Region, bounds,
};

/// Where in the source write-backs and invalidations are called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlushSite {
    /// How the path of the file ends.
    pub file: String,
    /// The line of the call.
    pub line: u32,
}

/// Words that name no place in the source.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no place in the source; write FILE:LINE, as in ring.rs:120")]
pub struct FlushSiteError(String);

impl FromStr for FlushSite {
    type Err = FlushSiteError;

    fn from_str(words: &str) -> Result<Self, Self::Err> {
        let error = || FlushSiteError(words.into());
        let (file, line) = words.rsplit_once(':').ok_or_else(error)?;
        Ok(Self { file: file.into(), line: line.parse().map_err(|_| error())? })
    }
}

impl FlushSite {
    fn is(&self, caller: &Location<'_>) -> bool {
        self.line == caller.line() && caller.file().ends_with(&self.file)
    }
}

/// Evaluates an expression with the region.
macro_rules! region {
    ($self:expr, $memory:ident => $body:expr) => {{
        let $memory = &$self.region;
        $body
    }};
}

/// A coherent region, and once attached, this host's cache before it.
#[derive(Clone)]
pub(super) struct Shadow {
    region: Mapped,
    left_out: Option<Arc<FlushSite>>,
}

/// A line is in the cache.
const PRESENT: u64 = 1;
/// A line in the cache was written since it was last written back.
const DIRTY: u64 = 2;
/// What stands above these bits: the process that works on the line.
const HOLDER: u32 = 2;

/// Words in a line.
const WORDS: usize = 8;

/// The cache: a copy of the words of the region, then a word of state for each line.
struct Cache<'a> {
    shm: &'a Shm,
    region: &'a Mapped,
}

/// A line of the cache that no other process of this host touches meanwhile.
struct Held<'a> {
    cache: &'a Cache<'a>,
    line: usize,
    state: u64,
}

/// Bytes of the cache of a region of `bytes` bytes.
fn cache_bytes(bytes: u64) -> usize {
    (bytes + bytes.div_ceil(LINE) * 8) as usize
}

impl Cache<'_> {
    fn state(&self, line: usize) -> &AtomicU64 {
        self.shm.word(self.region.bytes() as usize / 8 + line)
    }

    fn word(&self, line: usize, index: usize) -> &AtomicU64 {
        self.shm.word(line * WORDS + index)
    }

    fn hold(&self, line: usize) -> Held<'_> {
        let mine = u64::from(std::process::id()) << HOLDER;
        for spin in 1_u64.. {
            let state = self.state(line).load(Ordering::Relaxed);
            let free = state & (PRESENT | DIRTY);
            let takes = state == free || (spin.is_multiple_of(1 << 16) && is_gone(state >> HOLDER));
            let held = || {
                self.state(line).compare_exchange(state, free | mine, Ordering::Acquire, Ordering::Relaxed)
            };
            if takes && held().is_ok() {
                return Held { cache: self, line, state: free };
            }
            std::hint::spin_loop();
            if spin.is_multiple_of(64) {
                std::thread::yield_now();
            }
        }
        unreachable!("2^64 rounds")
    }

    /// Each line that holds a byte of `[at, at + bytes)`, with the offset and length of its part.
    fn parts(at: Offset, bytes: u64) -> impl Iterator<Item = (usize, Offset, usize)> {
        let mut here = at;
        std::iter::from_fn(move || {
            let length = (here.line().0 + LINE).min(at.0 + bytes).checked_sub(here.0).filter(|n| *n > 0)?;
            let part = ((here.0 / LINE) as usize, here, length as usize);
            here = here + length;
            Some(part)
        })
    }
}

impl Held<'_> {
    fn offset(&self, index: usize) -> Offset {
        Offset(self.line as u64 * LINE).word(index as u64)
    }

    /// Fills the line from the region unless it is there.
    fn fill(&mut self) -> Result<(), Fault> {
        if self.state & PRESENT == 0 {
            for index in 0..WORDS {
                let word = self.cache.region.load(self.offset(index))?;
                self.cache.word(self.line, index).store(word, Ordering::Relaxed);
            }
            self.state |= PRESENT;
        }
        Ok(())
    }

    /// Writes the line back, whole, if it is dirty.
    fn push(&mut self) {
        if self.state & DIRTY != 0 {
            for index in 0..WORDS {
                self.cache
                    .region
                    .store(self.offset(index), self.cache.word(self.line, index).load(Ordering::Relaxed));
            }
            self.state &= !DIRTY;
        }
    }

    /// Writes the line back if it is dirty, and drops it.
    fn drop_line(&mut self) {
        self.push();
        self.state = 0;
    }

    /// The word `index` with `change` made to it.
    fn change(&mut self, index: usize, change: impl FnOnce(u64) -> u64) {
        let word = self.cache.word(self.line, index);
        word.store(change(word.load(Ordering::Relaxed)), Ordering::Relaxed);
        self.state |= DIRTY;
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.cache.state(self.line).store(self.state, Ordering::Release);
    }
}

/// Whether the process that held a line is no more.
#[cold]
fn is_gone(pid: u64) -> bool {
    // SAFETY: signal 0 is never sent; the call only looks for the process.
    let rc = unsafe { libc::kill(pid as libc::pid_t, 0) };
    rc != 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH)
}

impl Shadow {
    pub(super) fn new(region: Mapped) -> Self {
        Self { region, left_out: None }
    }

    pub(super) fn leave_out(&mut self, site: FlushSite) {
        self.left_out = Some(Arc::new(site));
    }

    pub(super) fn attach(mut self, plan: &HostPlan) -> Result<Self, HostError> {
        let bytes = cache_bytes(self.region.bytes());
        self.region = self.region.attach_with(plan, bytes)?;
        Ok(self)
    }

    pub(super) fn region(&self) -> &Region {
        self.region.region()
    }

    pub(super) fn host_if_attached(&self) -> Option<&Host> {
        self.region.host_if_attached()
    }

    /// The cache; none before a host is attached, when the region itself is used.
    fn cache(&self) -> Option<Cache<'_>> {
        let shm = self.host_if_attached()?.shadow()?;
        Some(Cache { shm, region: &self.region })
    }

    fn is_left_out(&self, caller: &Location<'_>) -> bool {
        self.left_out.as_deref().is_some_and(|site| site.is(caller))
    }

    #[track_caller]
    fn flush(&self, at: Offset, bytes: u64, one: impl Fn(&mut Held<'_>)) {
        bounds::range(self.bytes(), at, bytes);
        if self.is_left_out(Location::caller()) {
            return;
        }
        if let Some(cache) = self.cache() {
            for (line, ..) in Cache::parts(at, bytes) {
                one(&mut cache.hold(line));
            }
        }
    }
}

impl Memory for Shadow {
    fn bytes(&self) -> u64 {
        self.region.bytes()
    }

    fn coherence(&self) -> Coherence {
        Coherence::Software
    }

    #[track_caller]
    fn load(&self, at: Offset) -> Result<u64, Fault> {
        bounds::word(self.bytes(), at);
        let Some(cache) = self.cache() else { return self.region.load(at) };
        let mut held = cache.hold((at.0 / LINE) as usize);
        held.fill()?;
        Ok(cache.word(held.line, (at.0 % LINE / 8) as usize).load(Ordering::Relaxed))
    }

    #[track_caller]
    fn store(&self, at: Offset, value: u64) {
        bounds::word(self.bytes(), at);
        let Some(cache) = self.cache() else { return self.region.store(at, value) };
        let mut held = cache.hold((at.0 / LINE) as usize);
        match held.fill() {
            Ok(()) => held.change((at.0 % LINE / 8) as usize, |_| value),
            // The region skips the store as well, and says so at the next load.
            Err(_) => self.region.store(at, value),
        }
    }

    #[track_caller]
    fn store_byte(&self, at: Offset, value: u8) {
        bounds::range(self.bytes(), at, 1);
        let Some(cache) = self.cache() else { return self.region.store_byte(at, value) };
        let mut held = cache.hold((at.0 / LINE) as usize);
        match held.fill() {
            Ok(()) => {
                let (index, skip) = ((at.0 % LINE / 8) as usize, (at.0 % LINE) as usize);
                held.change(index, |old| patched(old, index * 8, skip, &[value]));
            }
            // As above.
            Err(_) => self.region.store_byte(at, value),
        }
    }

    #[track_caller]
    fn store_nt(&self, at: Offset, value: u64) {
        bounds::word(self.bytes(), at);
        if let Some(cache) = self.cache() {
            cache.hold((at.0 / LINE) as usize).drop_line();
        }
        self.region.store(at, value);
    }

    #[track_caller]
    fn copy_in(&self, at: Offset, from: &[u8]) -> Result<(), Fault> {
        bounds::range(self.bytes(), at, from.len() as u64);
        let Some(cache) = self.cache() else { return self.region.copy_in(at, from) };
        for (line, here, length) in Cache::parts(at, from.len() as u64) {
            let done = here.0 - at.0;
            let mut held = cache.hold(line);
            held.fill().map_err(|_| Fault { offset: here, done })?;
            let piece = &from[done as usize..][..length];
            let skip = (here.0 % LINE) as usize;
            for index in skip / 8..(skip + length).div_ceil(8) {
                held.change(index, |old| patched(old, index * 8, skip, piece));
            }
        }
        Ok(())
    }

    #[track_caller]
    fn copy_in_nt(&self, at: Offset, from: &[u8]) -> Result<(), Fault> {
        let bytes = (from.len() as u64).next_multiple_of(8);
        bounds::words(self.bytes(), at, bytes);
        if let Some(cache) = self.cache() {
            for (line, ..) in Cache::parts(at, bytes) {
                cache.hold(line).drop_line();
            }
        }
        self.region.copy_in_nt(at, from)
    }

    #[track_caller]
    fn copy_out(&self, at: Offset, into: &mut [u8]) -> Result<(), Fault> {
        bounds::range(self.bytes(), at, into.len() as u64);
        let Some(cache) = self.cache() else { return self.region.copy_out(at, into) };
        for (line, here, length) in Cache::parts(at, into.len() as u64) {
            let done = here.0 - at.0;
            let mut held = cache.hold(line);
            held.fill().map_err(|_| Fault { offset: here, done })?;
            let mut bytes = [0; LINE as usize];
            for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
                word.copy_from_slice(&cache.word(line, index).load(Ordering::Relaxed).to_le_bytes());
            }
            let skip = (here.0 % LINE) as usize;
            into[done as usize..][..length].copy_from_slice(&bytes[skip..skip + length]);
        }
        Ok(())
    }

    #[track_caller]
    fn write_back(&self, at: Offset, bytes: u64) {
        self.flush(at, bytes, |held| held.push());
    }

    #[track_caller]
    fn invalidate(&self, at: Offset, bytes: u64) {
        self.flush(at, bytes, |held| held.drop_line());
    }

    fn fence_invalidations(&self) {
        self.region.mfence();
    }

    forward! { region {}
        fn sfence(&self);
        fn mfence(&self);
        fn now(&self) -> Nanos;
        fn local_load(&self, word: LocalWord) -> u64;
        fn local_store(&self, word: LocalWord, value: u64);
        fn local_cas(&self, word: LocalWord, old: u64, new: u64) -> Result<(), u64>;
        fn slot(&self) -> ProcessSlot;
        fn liveness(&self, host: u16, slot: ProcessSlot) -> Liveness;
        fn host_is_held(&self, host: u16) -> Option<bool>;
        fn announce_sleep(&self, bell: Bell) -> u32;
        fn sleep(&self, bell: Bell, seen: u32, until: Nanos);
        fn cancel_sleep(&self, bell: Bell);
        fn wake(&self, bell: Bell);
    }
}

/// `old`, the word at byte `start` of a line, with those bytes of `piece`, which begins at byte `skip`, that fall in it.
fn patched(old: u64, start: usize, skip: usize, piece: &[u8]) -> u64 {
    let mut bytes = old.to_le_bytes();
    for (at, byte) in (start..).zip(&mut bytes) {
        if let Some(new) = at.checked_sub(skip).and_then(|index| piece.get(index)) {
            *byte = *new;
        }
    }
    u64::from_le_bytes(bytes)
}

impl fmt::Debug for Shadow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} without {:?}", self.region, self.left_out)
    }
}
