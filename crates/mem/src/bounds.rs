//! What every implementation asserts of an offset: one outside the region is a mistake of the caller.

use crate::{LINE, LocalWord, Offset};

/// Asserts that `at` names an aligned word of a region of `bytes` bytes.
#[inline(always)]
#[track_caller]
pub(crate) fn word(bytes: u64, at: Offset) {
    if !at.0.is_multiple_of(8) || at.0 >= bytes {
        no_word(bytes, at);
    }
}

/// Asserts that `at` names a line of a region of `bytes` bytes.
#[inline(always)]
#[track_caller]
pub(crate) fn line(bytes: u64, at: Offset) {
    if !at.0.is_multiple_of(LINE) || at.0 >= bytes {
        no_line(bytes, at);
    }
}

/// Asserts that `[at, at + length)` lies in a region of `bytes` bytes.
#[inline(always)]
#[track_caller]
pub(crate) fn range(bytes: u64, at: Offset, length: u64) {
    if at.0 > bytes || length > bytes - at.0 {
        no_range(bytes, at, length);
    }
}

/// Asserts that `[at, at + length)` starts at a word of a region of `bytes` bytes and ends in it.
#[inline(always)]
#[track_caller]
pub(crate) fn words(bytes: u64, at: Offset, length: u64) {
    range(bytes, at, length);
    assert!(at.0.is_multiple_of(8), "offset {at} is no multiple of 8");
}

/// The index of a local word among `count`.
#[inline(always)]
#[track_caller]
pub(crate) fn local(count: usize, word: LocalWord) -> usize {
    let index = word.0 as usize;
    assert!(index < count, "local word {index} of {count}");
    index
}

#[cold]
#[inline(never)]
#[track_caller]
fn no_word(bytes: u64, at: Offset) -> ! {
    panic!("no word at offset {at} of a region of {bytes:#x} bytes");
}

#[cold]
#[inline(never)]
#[track_caller]
fn no_line(bytes: u64, at: Offset) -> ! {
    panic!("no line at offset {at} of a region of {bytes:#x} bytes");
}

#[cold]
#[inline(never)]
#[track_caller]
fn no_range(bytes: u64, at: Offset, length: u64) -> ! {
    panic!("range [{at}, +{length:#x}) ends past a region of {bytes:#x} bytes");
}
