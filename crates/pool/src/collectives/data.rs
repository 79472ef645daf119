//! The caller's data, and how bytes enter the pool.

use std::ops::Range;

use polder_mem::{Fault, LINE, Memory, Offset};

/// Bytes that are copied out of the pool, combined and copied on at a time: they stay in the first-level cache.
const PIECE: u64 = 16 << 10;

/// The caller's data.
pub(crate) enum Data<'a> {
    /// Separate buffers.
    Apart { input: &'a [u8], output: &'a mut [u8] },
    /// One buffer, with the bytes at which the input and the output begin.
    Same { data: &'a mut [u8], input_at: u64, output_at: u64 },
    /// Separate buffers, each whole or in one for each chunk of `chunk` bytes, which may be shorter: it has no more bytes then.
    Lists { input: Vec<&'a [u8]>, output: Vec<&'a mut [u8]>, chunk: u64 },
    /// An extent of each rank in the pool, where peers read it. Rank `r`'s input begins `r` times `input_stride` after
    /// the start of its extent.
    Pool { at: &'a [Offset], input_stride: u64, output_stride: u64 },
}

impl<'a> Data<'a> {
    pub(crate) fn lists(input: &[&'a [u8]], output: &'a mut [&mut [u8]], chunk: usize) -> Self {
        let output = output.iter_mut().map(|part| &mut **part).collect();
        Self::Lists { input: input.to_vec(), output, chunk: chunk as u64 }
    }

    /// A part of the input in this process's memory.
    pub(crate) fn input(&self, part: &Range<u64>) -> &[u8] {
        match self {
            Self::Apart { input, .. } => &input[range(part, 0)],
            Self::Same { data, input_at, .. } => &data[range(part, *input_at)],
            Self::Lists { input, chunk, .. } => {
                let (index, within) = place(input.len(), part, *chunk);
                &input[index][clipped(within, input[index].len())]
            }
            Self::Pool { .. } => unreachable!("no slice points into the pool"),
        }
    }

    /// A part of the output in this process's memory.
    pub(crate) fn output(&mut self, part: &Range<u64>) -> &mut [u8] {
        match self {
            Self::Apart { output, .. } => &mut output[range(part, 0)],
            Self::Same { data, output_at, .. } => &mut data[range(part, *output_at)],
            Self::Lists { output, chunk, .. } => {
                let (index, within) = place(output.len(), part, *chunk);
                let within = clipped(within, output[index].len());
                &mut output[index][within]
            }
            Self::Pool { .. } => unreachable!("no slice points into the pool"),
        }
    }

    /// Copies a part of the input to the output, where it is not there already.
    pub(crate) fn keep(&mut self, from: &Range<u64>, to: &Range<u64>) {
        match self {
            Self::Apart { input, output } => output[range(to, 0)].copy_from_slice(&input[range(from, 0)]),
            Self::Lists { input, output, chunk } => {
                let (source, at) = place(input.len(), from, *chunk);
                let (target, into) = place(output.len(), to, *chunk);
                let (at, into) = (clipped(at, input[source].len()), clipped(into, output[target].len()));
                output[target][into].copy_from_slice(&input[source][at]);
            }
            Self::Same { data, input_at, output_at } => {
                let (from, to) = (range(from, *input_at), range(to, *output_at));
                if from != to {
                    data.copy_within(from, to.start);
                }
            }
            Self::Pool { .. } => unreachable!("no slice points into the pool"),
        }
    }
}

/// The buffer that a part lies in, and where, when there is one for each chunk: no part reaches over a chunk's end.
pub(crate) fn place(buffers: usize, part: &Range<u64>, chunk: u64) -> (usize, Range<usize>) {
    if buffers == 1 || part.is_empty() {
        return (0, if part.is_empty() { 0..0 } else { range(part, 0) });
    }
    let before = part.start / chunk * chunk;
    ((before / chunk) as usize, range(&(part.start - before..part.end - before), 0))
}

/// What a buffer of so many bytes has of a range.
fn clipped(range: Range<usize>, bytes: usize) -> Range<usize> {
    range.start.min(bytes)..range.end.min(bytes)
}

/// Memory of this process through which everything goes that is combined: no slice may point into the pool.
pub(crate) struct Scratch {
    sum: Box<[u8]>,
    pub(crate) part: Box<[u8]>,
}

impl Default for Scratch {
    fn default() -> Self {
        let piece = || vec![0; PIECE as usize].into_boxed_slice();
        Self { sum: piece(), part: piece() }
    }
}

impl Scratch {
    pub(crate) fn halves(&mut self, bytes: usize) -> (&mut [u8], &mut [u8]) {
        (&mut self.sum[..bytes], &mut self.part[..bytes])
    }
}

/// Cuts `bytes` into pieces that fit the scratch memory.
pub(crate) fn pieces(bytes: u64) -> impl Iterator<Item = Range<u64>> {
    (0..bytes.div_ceil(PIECE)).map(move |piece| piece * PIECE..bytes.min((piece + 1) * PIECE))
}

/// A part of a buffer that begins at `at`, as an index of slices.
pub(crate) fn range(part: &Range<u64>, at: u64) -> Range<usize> {
    (at + part.start) as usize..(at + part.end) as usize
}

pub(crate) fn length(part: &Range<u64>) -> usize {
    (part.end - part.start) as usize
}

/// Copies `bytes` into a block, past the caches or with ordinary stores. What goes past them reaches anyone with the next
/// `sfence`.
pub(crate) fn fill<M: Memory>(memory: &M, at: Offset, bytes: &[u8], streams: bool) -> Result<(), Fault> {
    if streams { memory.copy_in_nt(at, bytes) } else { memory.copy_in(at, bytes) }
}

/// Copies `bytes` into this rank's data in the pool, and leaves its neighbours alone. With `streams` it goes past the caches,
/// and reaches other hosts with the next `sfence`.
pub(crate) fn write<M: Memory>(memory: &M, at: Offset, bytes: &[u8], streams: bool) -> Result<(), Fault> {
    let words = if streams && at.0.is_multiple_of(8) { bytes.len() / 8 * 8 } else { 0 };
    let (words, rest) = bytes.split_at(words);
    if !words.is_empty() {
        memory.copy_in_nt(at, words)?;
    }
    if !rest.is_empty() {
        let at = at + words.len() as u64;
        memory.copy_in(at, rest)?;
        if streams {
            memory.write_back(at, rest.len() as u64);
        }
    }
    Ok(())
}

const _: () = assert!(PIECE.is_multiple_of(LINE), "a piece is a whole number of elements");
