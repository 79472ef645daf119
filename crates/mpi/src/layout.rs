//! Where the bytes of a datatype lie: runs of bytes, from what the library says of how the type was made.

use std::ffi::{c_int, c_void};
use std::iter;
use std::ops::Range;

use crate::abi::{Abi, Aint, Count};
use crate::failure::Failure;
use crate::library::Library;

/// Bytes that lie together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) at: Aint,
    pub(crate) bytes: usize,
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
    runs: Vec<Run>,
    extent: Aint,
    /// Of what all its runs are; nothing when they differ.
    basic: Option<Basic<H>>,
}

impl<H: Copy + PartialEq> Layout<H> {
    fn empty() -> Self {
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
    fn append(&mut self, other: &Self, at: Aint, count: Count) {
        if count > 0 && !other.runs.is_empty() {
            let is_first = self.runs.is_empty();
            self.basic = if is_first || self.basic == other.basic { other.basic } else { None };
        }
        for run in other.runs(count.max(0) as usize) {
            self.add(Run { at: at + run.at, ..run });
        }
    }
}

/// How a datatype was made, as the library says: all its numbers in one list, for the calls that make types with large counts
/// give them so.
struct Making<H> {
    combiner: c_int,
    numbers: Vec<Count>,
    kinds: Vec<H>,
    /// Whether the numbers came as large counts.
    large: bool,
}

impl<A: Abi> Library<A> {
    /// Where the bytes of `kind` lie.
    ///
    /// # Errors
    /// When it is made in a way that cannot be followed.
    ///
    /// Says too whether the type is predefined: then it is not to be freed, and is always this.
    pub(crate) fn layout(&self, kind: A::Handle) -> Result<(Layout<A::Handle>, bool), Failure> {
        let numbers = &A::NUMBERS;
        let names = &numbers.combiner;
        let making = self.making(kind)?;
        if [names.named, names.f90_real, names.f90_complex, names.f90_integer].contains(&making.combiner) {
            return Ok((self.predefined(kind)?, true));
        }
        let mut parts = vec![];
        for &part in &making.kinds {
            let (layout, is_predefined) = self.layout(part)?;
            if !is_predefined {
                let mut part = part;
                // SAFETY: the library gave a handle of our own.
                Self::check("MPI_Type_free", unsafe { (self.type_free)(&raw mut part) })?;
            }
            parts.push(layout);
        }
        let (_, extent) = self.extent(kind)?;
        let mut layout = Layout { extent, ..Layout::empty() };
        let wrong = || Failure::new(numbers.error.kind, "a datatype is not what MPI says that it is");
        let part = parts.first().ok_or_else(wrong)?;
        let said = &making.numbers;
        let number = |index: usize| said.get(index).copied().ok_or_else(wrong);
        let count = || number(0).map(|count| count.max(0) as usize);
        let combiner = making.combiner;
        if combiner == names.dup || combiner == names.resized {
            layout.append(part, 0, 1);
        } else if combiner == names.contiguous {
            layout.append(part, 0, number(0)?);
        } else if combiner == names.vector || combiner == names.hvector {
            let unit = if combiner == names.vector { part.extent } else { 1 };
            for block in 0..number(0)? {
                layout.append(part, (block * number(2)?) as Aint * unit, number(1)?);
            }
        } else if combiner == names.indexed || combiner == names.hindexed {
            let unit = if combiner == names.indexed { part.extent } else { 1 };
            for block in 0..count()? {
                layout.append(part, number(1 + count()? + block)? as Aint * unit, number(1 + block)?);
            }
        } else if combiner == names.indexed_block || combiner == names.hindexed_block {
            let unit = if combiner == names.indexed_block { part.extent } else { 1 };
            for block in 0..count()? {
                layout.append(part, number(2 + block)? as Aint * unit, number(1)?);
            }
        } else if combiner == names.structure {
            for block in 0..count()? {
                let part = parts.get(block).ok_or_else(wrong)?;
                layout.append(part, number(1 + count()? + block)? as Aint, number(1 + block)?);
            }
        } else if combiner == names.subarray {
            let dimensions = count()?;
            let (order, first) = if making.large { (1, 2) } else { (1 + 3 * dimensions, 1) };
            let axis = |part| axis(said, first + part * dimensions, dimensions).ok_or_else(wrong);
            let (sizes, subsizes, starts) = (axis(0)?, axis(1)?, axis(2)?);
            let kept = starts
                .iter()
                .zip(subsizes)
                .map(|(start, size)| iter::once(*start..start + size).collect())
                .collect();
            array(&mut layout, part, (sizes, kept), number(order)? == i64::from(numbers.order_c));
        } else if combiner == names.darray {
            let dimensions = usize::try_from(number(2)?).map_err(|_| wrong())?;
            // The sizes of the array come last where they are large.
            let (first, order) =
                if making.large { (3, 3 + 3 * dimensions) } else { (3 + dimensions, 3 + 4 * dimensions) };
            let sizes = if making.large { order + 1 } else { 3 };
            let axis = |from| axis(said, from, dimensions).ok_or_else(wrong);
            let ways = axis(first)?.iter().zip(axis(first + dimensions)?).zip(axis(first + 2 * dimensions)?);
            let sizes = axis(sizes)?;
            let mut rank = number(1)?;
            let mut kept: Vec<_> = sizes
                .iter()
                .zip(ways)
                .rev()
                .map(|(&size, ((&way, &block), &ranks))| {
                    let block = match block == i64::from(numbers.distribute.default) {
                        true if way == i64::from(numbers.distribute.cyclic) => 1,
                        true => (size + ranks - 1) / ranks,
                        false => block,
                    };
                    // The last dimension of the grid of ranks counts fastest.
                    let mine = rank % ranks;
                    rank /= ranks;
                    blocks_of_rank(size, block, ranks, mine)
                })
                .collect();
            kept.reverse();
            array(&mut layout, part, (sizes, kept), number(order)? == i64::from(numbers.order_c));
        } else {
            let why =
                format!("a datatype of combiner {combiner} cannot be put into a window; make it otherwise");
            return Err(Failure::new(numbers.error.kind, why));
        }
        Ok((layout, false))
    }

    fn predefined(&self, kind: A::Handle) -> Result<Layout<A::Handle>, Failure> {
        let (_, extent) = self.extent(kind)?;
        let (mut at, mut bytes) = (0, 0);
        // SAFETY: places for two numbers.
        let code = unsafe { (self.type_get_true_extent)(kind, &raw mut at, &raw mut bytes) };
        Self::check("MPI_Type_get_true_extent", code)?;
        let bytes = bytes.unsigned_abs();
        let basic = Basic { kind, bytes, extent: extent.unsigned_abs() };
        Ok(Layout { runs: vec![Run { at, bytes }], extent, basic: Some(basic) })
    }

    fn extent(&self, kind: A::Handle) -> Result<(Aint, Aint), Failure> {
        let (mut lower, mut extent) = (0, 0);
        // SAFETY: places for two numbers.
        let code = unsafe { (self.type_get_extent)(kind, &raw mut lower, &raw mut extent) };
        Self::check("MPI_Type_get_extent", code)?;
        Ok((lower, extent))
    }

    fn making(&self, kind: A::Handle) -> Result<Making<A::Handle>, Failure> {
        match (self.type_get_envelope_c, self.type_get_contents_c) {
            (Some(envelope), Some(contents)) => {
                let (mut counts, mut combiner) = ([0; 4], 0);
                let [ints, addresses, large, kinds] = &mut counts;
                // SAFETY: places for five numbers.
                let code = unsafe { envelope(kind, ints, addresses, large, kinds, &raw mut combiner) };
                Self::check("MPI_Type_get_envelope_c", code)?;
                let [ints, addresses, large, kinds] = counts.map(|count| count as usize);
                let mut lists =
                    (vec![0; ints], vec![0; addresses], vec![0; large], vec![self.handles.byte; kinds]);
                if kinds > 0 {
                    let [ints, addresses, large, kinds] = counts;
                    let (a, b, c, d) = (&mut lists.0, &mut lists.1, &mut lists.2, &mut lists.3);
                    // SAFETY: each list is as long as is said.
                    let code = unsafe {
                        let lists = (a.as_mut_ptr(), b.as_mut_ptr(), c.as_mut_ptr(), d.as_mut_ptr());
                        contents(kind, ints, addresses, large, kinds, lists.0, lists.1, lists.2, lists.3)
                    };
                    Self::check("MPI_Type_get_contents_c", code)?;
                }
                Ok(Making::new(combiner, lists))
            }
            _ => {
                let (mut counts, mut combiner) = ([0; 3], 0);
                let [ints, addresses, kinds] = &mut counts;
                // SAFETY: places for four numbers.
                let code =
                    unsafe { (self.type_get_envelope)(kind, ints, addresses, kinds, &raw mut combiner) };
                Self::check("MPI_Type_get_envelope", code)?;
                let [ints, addresses, kinds] = counts.map(|count| count as usize);
                let mut lists = (vec![0; ints], vec![0; addresses], vec![], vec![self.handles.byte; kinds]);
                if kinds > 0 {
                    let [ints, addresses, kinds] = counts;
                    let (a, b, d) = (&mut lists.0, &mut lists.1, &mut lists.3);
                    // SAFETY: each list is as long as is said.
                    let code = unsafe {
                        let lists = (a.as_mut_ptr(), b.as_mut_ptr(), d.as_mut_ptr());
                        (self.type_get_contents)(kind, ints, addresses, kinds, lists.0, lists.1, lists.2)
                    };
                    Self::check("MPI_Type_get_contents", code)?;
                }
                Ok(Making::new(combiner, lists))
            }
        }
    }
}

impl<H> Making<H> {
    fn new(
        combiner: c_int,
        (ints, addresses, large, kinds): (Vec<c_int>, Vec<Aint>, Vec<Count>, Vec<H>),
    ) -> Self {
        let is_large = !large.is_empty();
        let addresses = addresses.into_iter().map(|address| address as Count);
        let numbers = ints.into_iter().map(Count::from).chain(addresses).chain(large).collect();
        Self { combiner, numbers, kinds, large: is_large }
    }
}

/// The numbers of each dimension of an array, of all that were said.
fn axis(said: &[Count], from: usize, dimensions: usize) -> Option<&[Count]> {
    said.get(from..from.checked_add(dimensions)?)
}

/// The indices of one of so many ranks to whom `size` of them are dealt, `block` at a time.
fn blocks_of_rank(size: Count, block: Count, ranks: Count, mine: Count) -> Vec<Range<Count>> {
    let (block, round) = (block.max(1), (block * ranks).max(1));
    let starts = (0..).map(|turn| turn * round + mine * block).take_while(|&start| start < size);
    starts.map(|start| start..(start + block).min(size)).collect()
}

/// Adds the elements of a part of an array: its sizes, and the indices of each dimension that are kept.
fn array<H: Copy + PartialEq>(
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
