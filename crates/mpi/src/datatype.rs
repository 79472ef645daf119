//! How a datatype was made, as the library says, and the layout of its bytes that follows.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::iter;

use crate::abi::{Abi, Aint, Count};
use crate::failure::Failure;
use crate::layout::{Basic, Gaps, Layout, Run, array, blocks_of_rank};
use crate::library::Library;

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
    /// Where the bytes of a datatype lie.
    ///
    /// # Errors
    /// Those of [`Library::layout`].
    #[inline]
    pub(crate) fn layout_of(
        &self,
        kind: A::Handle,
        gaps: Gaps,
    ) -> Result<Cow<'static, Layout<A::Handle>>, Failure> {
        let known = self.known.get_or_init(|| self.serial(BTreeMap::new()));
        if let Some(layout) = known.take_turn().get(&(kind, gaps)) {
            return Ok(Cow::Borrowed(layout));
        }
        let (layout, is_predefined) = self.layout(kind, gaps)?;
        Ok(match is_predefined {
            // There are not many.
            true => {
                let mut known = known.take_turn();
                Cow::Borrowed(known.entry((kind, gaps)).or_insert_with(|| Box::leak(Box::new(layout))))
            }
            false => Cow::Owned(layout),
        })
    }

    /// Where the bytes of `kind` lie.
    ///
    /// # Errors
    /// When it is made in a way that cannot be followed.
    ///
    /// Says too whether the type is predefined: then it is not to be freed, and is always this.
    pub(crate) fn layout(&self, kind: A::Handle, gaps: Gaps) -> Result<(Layout<A::Handle>, bool), Failure> {
        let numbers = &A::NUMBERS;
        let names = &numbers.combiner;
        let making = self.making(kind)?;
        if [names.named, names.f90_real, names.f90_complex, names.f90_integer].contains(&making.combiner) {
            return Ok((self.predefined(kind, gaps)?, true));
        }
        let mut parts = vec![];
        for &part in &making.kinds {
            let (layout, is_predefined) = self.layout(part, gaps)?;
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
        // A structure of no blocks.
        let Some(part) = parts.first() else { return Ok((layout, false)) };
        let integers = &making.numbers;
        let number = |index: usize| integers.get(index).copied().ok_or_else(wrong);
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
            let axis = |part| axis(integers, first + part * dimensions, dimensions).ok_or_else(wrong);
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
            let axis = |from| axis(integers, from, dimensions).ok_or_else(wrong);
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

    fn predefined(&self, kind: A::Handle, gaps: Gaps) -> Result<Layout<A::Handle>, Failure> {
        let (_, extent) = self.extent(kind)?;
        let (mut at, mut bytes, mut size) = (0, 0, 0);
        // SAFETY: places for two numbers.
        let code = unsafe { (self.type_get_true_extent)(kind, &raw mut at, &raw mut bytes) };
        Self::check("MPI_Type_get_true_extent", code)?;
        // SAFETY: a place for a number.
        Self::check("MPI_Type_size", unsafe { (self.type_size)(kind, &raw mut size) })?;
        let bytes = bytes.unsigned_abs();
        let size = size.unsigned_abs() as usize;
        let basic = Basic { kind, bytes, extent: extent.unsigned_abs() };
        let index = size_of::<c_int>();
        let runs = match size < bytes && size > index && gaps == Gaps::Left {
            // A value and, after a gap, an index of the type `int`: MPI knows no other such types.
            true => {
                vec![Run { at, bytes: size - index }, Run { at: at + (bytes - index) as Aint, bytes: index }]
            }
            false => vec![Run { at, bytes }],
        };
        Ok(Layout { runs, extent, basic: Some(basic) })
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
