//! Bytes of a fuzzer as what a hostile host does next.

use crate::line::{WORDS, Words};

/// What is left of the script; zeros follow it.
pub(crate) struct Script<'a>(pub(crate) &'a [u8]);

impl Script<'_> {
    pub(crate) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    pub(crate) fn word(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// Mostly near `usual`, sometimes anything.
    pub(crate) fn near(&mut self, usual: u64) -> u64 {
        match self.byte() {
            255 => self.word(),
            254 => u64::MAX,
            byte @ 224.. => usual.wrapping_add(u64::from(byte % 8)),
            byte @ 192.. => usual.wrapping_sub(u64::from(byte % 8)),
            _ => usual,
        }
    }

    /// Changes one of `words`.
    pub(crate) fn change(&mut self, words: &mut Words) {
        let changed = usize::from(self.byte()) % WORDS;
        words[changed] = self.near(words[changed]);
    }

    pub(crate) fn small(&mut self) -> u64 {
        u64::from(self.byte() % 8)
    }

    /// A set of hosts, sometimes with one that there is not.
    pub(crate) fn bits(&mut self) -> u64 {
        let usual = self.small();
        match self.byte() {
            byte @ 224.. => usual | 1 << (byte % 64),
            _ => usual,
        }
    }

    pub(crate) fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::from(self.byte()) % choices.len()]
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        (u64::from(self.byte()) << 8 | u64::from(self.byte())) % limit
    }
}
