//! Where the bytes of a datatype lie: runs of bytes.

use std::ffi::c_void;
use std::ops::Range;

use crate::abi::{Aint, Count};

/// Bytes that lie together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) at: Aint,
    pub(crate) bytes: usize,
}

/// What becomes of bytes of a predefined datatype between its parts, as `MPI_SHORT_INT` has: they are no part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Gaps {
    /// They stay as they are.
    Left,
    /// They are moved with the parts, so that an element is one run: what an update takes and gives back under its lock.
    Moved,
}

/// A predefined datatype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Basic<H> {
    pub(crate) kind: H,
    /// From its first byte to its last, and from one to the next.
    pub(crate) bytes: usize,
    pub(crate) extent: usize,
}

/// One element of a datatype.
#[derive(Clone, Debug)]
pub(crate) struct Layout<H> {
    pub(crate) runs: Vec<Run>,
    pub(crate) extent: Aint,
    /// Of what all its runs are; nothing when they differ.
    pub(crate) basic: Option<Basic<H>>,
}

impl<H: Copy + PartialEq> Layout<H> {
    pub(crate) fn empty() -> Self {
        Self { runs: vec![], extent: 0, basic: None }
    }

    /// The bytes of an element, if this is the layout of a predefined type without gaps, `kind`: a handle that is always that.
    pub(crate) fn flat(&self, kind: H) -> Option<usize> {
        let Basic { bytes, extent, .. } = self.basic.filter(|basic| basic.kind == kind)?;
        (bytes == extent && self.runs == [Run { at: 0, bytes }]).then_some(bytes)
    }

    /// Of what all its bytes are.
    pub(crate) const fn basic(&self) -> Option<Basic<H>> {
        self.basic
    }

    /// Bytes of so many elements, without gaps.
    pub(crate) fn bytes(&self, count: usize) -> usize {
        self.runs.iter().map(|run| run.bytes).sum::<usize>() * count
    }

    /// So many elements, where they lie together.
    #[inline]
    pub(crate) fn together(&self, count: usize) -> Option<Run> {
        match (&self.runs[..], count) {
            (&[run], 1) => Some(run),
            (&[run], 2..) if self.extent == run.bytes as Aint => {
                Some(Run { bytes: run.bytes * count, ..run })
            }
            _ => None,
        }
    }

    /// The runs of so many elements, each as long as it can be.
    pub(crate) fn runs(&self, count: usize) -> impl Iterator<Item = Run> {
        let one = self.together(count);
        let times = if one.is_some() { 0 } else { count };
        let all = (0..times as Aint).flat_map(move |index| {
            self.runs.iter().map(move |run| Run { at: run.at + index * self.extent, ..*run })
        });
        one.into_iter().chain(all)
    }

    /// Adds an element's run, to the last where it follows it.
    fn add(&mut self, run: Run) {
        match self.runs.last_mut() {
            Some(last) if last.at + last.bytes as Aint == run.at => last.bytes += run.bytes,
            _ if run.bytes == 0 => {}
            _ => self.runs.push(run),
        }
    }

    /// Adds so many elements of `other`, one after another from `at` on.
    pub(crate) fn append(&mut self, other: &Self, at: Aint, count: Count) {
        if count > 0 && !other.runs.is_empty() {
            let is_first = self.runs.is_empty();
            self.basic = if is_first || self.basic == other.basic { other.basic } else { None };
        }
        for run in other.runs(count.max(0) as usize) {
            self.add(Run { at: at + run.at, ..run });
        }
    }
}

/// The indices of one of so many ranks to whom `size` of them are dealt, `block` at a time.
pub(crate) fn blocks_of_rank(size: Count, block: Count, ranks: Count, mine: Count) -> Vec<Range<Count>> {
    let (block, round) = (block.max(1), (block * ranks).max(1));
    let starts = (0..).map(|turn| turn * round + mine * block).take_while(|&start| start < size);
    starts.map(|start| start..(start + block).min(size)).collect()
}

/// Adds the elements of a part of an array: its sizes, and the indices of each dimension that are kept.
pub(crate) fn array<H: Copy + PartialEq>(
    layout: &mut Layout<H>,
    part: &Layout<H>,
    (sizes, kept): (&[Count], Vec<Vec<Range<Count>>>),
    is_c: bool,
) {
    let mut axes: Vec<_> = sizes.iter().zip(kept).collect();
    if is_c {
        axes.reverse();
    }
    // Now from the dimension that lies together to the one that lies farthest apart.
    let mut next = 1;
    let mut stride_of = |size| {
        let stride = next;
        next *= size;
        stride
    };
    let axes: Vec<_> = axes.into_iter().map(|(size, kept)| (stride_of(size), kept)).collect();
    rows(layout, part, &axes, 0);
}

/// Adds the elements from `at` on: for each dimension, how far an index leads and which are kept.
fn rows<H: Copy + PartialEq>(
    layout: &mut Layout<H>,
    part: &Layout<H>,
    axes: &[(Count, Vec<Range<Count>>)],
    at: Count,
) {
    let Some(((stride, kept), nearer)) = axes.split_last() else { return };
    for range in kept {
        match nearer.is_empty() {
            true => layout.append(part, (at + range.start) as Aint * part.extent, range.end - range.start),
            false => range.clone().for_each(|index| rows(layout, part, nearer, at + index * stride)),
        }
    }
}

/// The bytes of so many elements at `base`, one after another without gaps.
///
/// # Safety
/// They may be read.
pub(crate) unsafe fn gather<H: Copy + PartialEq>(
    layout: &Layout<H>,
    base: *const c_void,
    count: usize,
) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(layout.bytes(count));
    for run in layout.runs(count) {
        // SAFETY: the run belongs to the elements.
        bytes.extend_from_slice(unsafe {
            std::slice::from_raw_parts(base.cast::<u8>().wrapping_offset(run.at), run.bytes)
        });
    }
    bytes
}

/// Puts bytes that [`gather`] would give back to where they belong.
///
/// # Safety
/// The elements may be written, and nobody else touches them meanwhile.
pub(crate) unsafe fn scatter<H: Copy + PartialEq>(
    layout: &Layout<H>,
    base: *mut c_void,
    count: usize,
    bytes: &[u8],
) {
    let mut rest = bytes;
    for run in layout.runs(count) {
        let (part, behind) = rest.split_at(run.bytes.min(rest.len()));
        // SAFETY: the run belongs to the elements.
        unsafe {
            base.cast::<u8>().wrapping_offset(run.at).copy_from_nonoverlapping(part.as_ptr(), part.len())
        };
        rest = behind;
    }
}

/// Copies elements of a predefined type, and leaves the bytes between their `parts` alone.
pub(crate) fn copy_parts<H>(parts: &[Run], basic: Basic<H>, from: &[u8], into: &mut [u8]) {
    let [first, _, ..] = parts else { return into.copy_from_slice(from) };
    for (from, into) in from.chunks(basic.bytes).zip(into.chunks_mut(basic.bytes)) {
        for part in parts {
            let start = (part.at - first.at).unsigned_abs();
            into[start..start + part.bytes].copy_from_slice(&from[start..start + part.bytes]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn basic(bytes: usize) -> Layout<u8> {
        let basic = Basic { kind: 1, bytes, extent: bytes };
        Layout { runs: vec![Run { at: 0, bytes }], extent: bytes as Aint, basic: Some(basic) }
    }

    fn runs(layout: &Layout<u8>, count: usize) -> Vec<(Aint, usize)> {
        layout.runs(count).map(|run| (run.at, run.bytes)).collect()
    }

    #[test]
    fn elements_that_lie_together_are_one_run() {
        assert_eq!(runs(&basic(8), 5), [(0, 40)]);
        assert_eq!(runs(&basic(8), 0), []);
        let mut pairs = Layout { extent: 24, ..Layout::empty() };
        pairs.append(&basic(8), 0, 1);
        pairs.append(&basic(8), 8, 1);
        assert_eq!(runs(&pairs, 2), [(0, 16), (24, 16)]);
        assert_eq!(pairs.bytes(2), 32);
    }

    #[test]
    fn a_part_of_an_array_is_its_rows_in_either_order() {
        let (sizes, starts) = ([4, 5, 6], [1, 2, 0]);
        for (is_c, index) in [(true, [30, 6, 1]), (false, [1, 4, 20])] {
            let mut layout = Layout { extent: 4 * 5 * 6, ..Layout::empty() };
            let kept = [1..3, 2..3, 0..3].map(|range| vec![range]).to_vec();
            array(&mut layout, &basic(1), (&sizes, kept), is_c);
            let mut seen: Vec<Aint> = layout
                .runs(1)
                .flat_map(|run| (0..run.bytes as Aint).map(move |byte| run.at + byte))
                .collect();
            let cells = (0..6).map(|cell| {
                let at = [cell / 3, 0, cell % 3];
                (0..3).map(|axis| (starts[axis] as Aint + at[axis]) * index[axis]).sum::<Aint>()
            });
            let mut cells: Vec<Aint> = cells.collect();
            seen.sort_unstable();
            cells.sort_unstable();
            assert_eq!(seen, cells);
        }
    }

    #[test]
    fn each_index_is_dealt_to_one_rank() {
        assert_eq!(blocks_of_rank(10, 2, 2, 1), [2..4, 6..8]);
        assert_eq!(blocks_of_rank(10, 4, 3, 2), std::slice::from_ref(&(8..10)));
        assert_eq!(blocks_of_rank(3, 1, 4, 3), []);
        for (size, block, ranks) in [(10, 3, 2), (7, 7, 1), (1, 2, 3)] {
            let dealt =
                (0..ranks).flat_map(|mine| blocks_of_rank(size, block, ranks, mine).into_iter().flatten());
            let mut indices: Vec<Count> = dealt.collect();
            indices.sort_unstable();
            assert_eq!(indices, (0..size).collect::<Vec<_>>());
        }
    }

    #[test]
    fn bytes_between_parts_are_not_copied() {
        let parts = [Run { at: 0, bytes: 2 }, Run { at: 4, bytes: 4 }];
        let basic = Basic { kind: 1, bytes: 8, extent: 8 };
        let (from, mut into) = (vec![1_u8; 16], vec![0_u8; 16]);
        copy_parts(&parts, basic, &from, &mut into);
        assert_eq!(into, [1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1]);
        copy_parts(&parts[..1], basic, &from, &mut into);
        assert_eq!(into, from);
    }

    #[test]
    fn what_is_gathered_is_scattered_back() {
        let mut layout = Layout { extent: 6, ..Layout::empty() };
        layout.append(&basic(1), 1, 2);
        layout.append(&basic(1), 5, 1);
        let array: Vec<u8> = (0..12).collect();
        // SAFETY: two elements of six bytes.
        let gathered = unsafe { gather(&layout, array.as_ptr().cast(), 2) };
        assert_eq!(gathered, [1, 2, 5, 7, 8, 11]);
        let mut back = [0_u8; 12];
        // SAFETY: as above.
        unsafe { scatter(&layout, back.as_mut_ptr().cast(), 2, &gathered) };
        assert_eq!(back, [0, 1, 2, 0, 0, 5, 0, 7, 8, 0, 0, 11]);
    }
}
