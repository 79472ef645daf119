//! A window of MPI's whose memory lies in the pool.
//!
//! The library has a window over the same memory, for everything that is not done here: names, attributes, groups, handlers of
//! errors. What is done here is all that moves bytes, and all that orders it.
//!
//! A window over memory of the program's own has nothing but its order here. The library moves its bytes, in one epoch that lasts as
//! long as the window. So no lock and no flush waits for a target that computes.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use polder_attach::session::Session;
use polder_attach::settings::{TIMEOUT, in_terms_of};
use polder_border::Uncancelled;
use polder_mem::{AnyMemory, Coherence, Memory, Serial, SerialGuard};
use polder_pool::PoolError;
use polder_pool::window::Window as PoolWindow;
use polder_pool::window::{Access, LockPlace};

use crate::abi::{Abi, Aint, Count};
use crate::epoch::Epochs;
use crate::failure::{Failure, say};
use crate::layout::{Basic, Gaps, Layout, Run, copy_parts, gather, scatter};
use crate::library::Library;
use crate::memory::{ALIGNED, alignment};
use crate::view::View;

/// Bytes that are combined at once.
const CACHED: usize = 1 << 14;

/// Flushes after which the library may go on.
const FLUSHES: u32 = 64;

/// A rank's part of a window.
#[derive(Clone, Copy, Debug, Default)]
struct Target {
    /// Which segment it lies in, and from where.
    segment: u32,
    offset: u64,
    bytes: u64,
    /// The alignment that its segment has to have, where that is more than usual: it has as many bytes besides.
    alignment: u64,
    disp_unit: i64,
}

/// What changes.
struct State<H> {
    /// A predefined datatype without gaps that was put last, and its bytes.
    flat: Option<(H, usize)>,
    pooled: PoolWindow<AnyMemory>,
    /// The segments that the program loads from and stores to, by rank.
    views: Vec<(u32, View)>,
    epochs: Epochs,
    /// Flushes since the library went on.
    flushes: u32,
}

/// A window in the pool.
pub struct Window<A: Abi> {
    // Before the session: it lies in its pool.
    state: Serial<State<A::Handle>>,
    _session: Arc<Session>,
    library: &'static Library<A>,
    /// A communicator of its own.
    comm: A::Handle,
    rank: u32,
    targets: Vec<Target>,
    /// The library's window, where the memory is the program's own.
    library_data: Option<A::Handle>,
    /// What the program is told of it, by address.
    flavor: c_int,
    model: c_int,
}

/// A buffer of the program's: where, how many, of what.
pub type Buffer<P, H> = (P, Count, H);
/// Where in a window: the rank, from where, how many, of what.
pub type RmaTarget<H> = (c_int, Aint, Count, H);

/// Elements of a buffer or of a place.
struct Elements<H: Clone + 'static> {
    layout: Cow<'static, Layout<H>>,
    count: usize,
}

/// Elements of a window: in which segment, and from where.
struct Located<H: Clone + 'static> {
    elements: Elements<H>,
    segment: u32,
    at: i64,
}

/// A window, where this rank's part of it is, and the library's handle.
pub(crate) struct Made<A: Abi> {
    pub(crate) window: Window<A>,
    pub(crate) base: *mut u8,
    pub(crate) handle: A::Handle,
}

/// How a window is asked for.
pub struct WindowRequest<A: Abi> {
    /// Bytes of this rank.
    pub bytes: Aint,
    /// Bytes that a displacement counts.
    pub disp_unit: Count,
    /// Hints.
    pub info: A::Handle,
    /// Of which ranks.
    pub comm: A::Handle,
    /// Whether the program may load and store everywhere.
    pub is_shared: bool,
}

impl<A: Abi> Window<A> {
    /// Makes a window of all ranks of a communicator, and the library's own over it; nothing when one of them has no room for it.
    ///
    /// # Errors
    /// Those of the library.
    pub(crate) fn allocate(
        library: &'static Library<A>,
        session: Arc<Session>,
        request: &WindowRequest<A>,
        name: &str,
    ) -> Result<Option<Made<A>>, Failure> {
        let (rank, ranks) = library.place(request.comm)?;
        let targets = share_out(library, request, ranks)?;
        let numbers = &A::NUMBERS;
        let flavor = if request.is_shared { numbers.win_flavor_shared } else { numbers.win_flavor_allocate };
        let joined = Self::join(library, session, (request.comm, rank), name, targets, flavor)?;
        let Some(mut window) = joined else { return Ok(None) };
        window.align(request)?;
        let base = window.base(rank);
        let mut handle = library.handles.win_null;
        // SAFETY: the memory is there for as long as the window.
        let code = unsafe {
            (library.win_create)(
                base.cast(),
                request.bytes,
                request.disp_unit as c_int,
                request.info,
                window.comm,
                &raw mut handle,
            )
        };
        Library::<A>::check("MPI_Win_create", code)?;
        Ok(Some(Made { window, base, handle }))
    }

    /// Lets each segment begin where its rank has asked, if one has: where the segments lie is known only now.
    fn align(&mut self, request: &WindowRequest<A>) -> Result<(), Failure> {
        if self.targets.iter().all(|target| target.alignment == 0) {
            return Ok(());
        }
        let own = self.rank as usize;
        let mine = match self.targets[own].alignment {
            0 => 0,
            asked => (self.base(own).addr() as u64).wrapping_neg() % asked,
        };
        let mut all = vec![0_u64; self.targets.len()];
        self.library.gather_all(&mine, &mut all, request.comm)?;
        for target in &mut self.targets {
            target.offset += all[target.segment as usize];
        }
        Ok(())
    }

    /// Makes the order of a window whose memory is the program's own; nothing when one of its ranks has no room for it.
    ///
    /// # Errors
    /// Those of the library.
    pub(crate) fn order(
        library: &'static Library<A>,
        session: Arc<Session>,
        comm: A::Handle,
        name: &str,
    ) -> Result<Option<Self>, Failure> {
        let (rank, ranks) = library.place(comm)?;
        let targets = (0..ranks as u32).map(|segment| Target { segment, ..Target::default() }).collect();
        Self::join(library, session, (comm, rank), name, targets, 0)
    }

    /// Takes over the order of the library's window.
    ///
    /// # Errors
    /// Those of the library.
    pub(crate) fn take_over(&mut self, handle: A::Handle) -> Result<(), Failure> {
        // SAFETY: the library's window, of which the program has made no use yet.
        let code = unsafe { (self.library.win_lock_all)(A::NUMBERS.mode_nocheck, handle) };
        Library::<A>::check("MPI_Win_lock_all", code)?;
        self.library_data = Some(handle);
        Ok(())
    }

    /// Joins the segments of all ranks; nothing when one of them has no room for its own.
    fn join(
        library: &'static Library<A>,
        session: Arc<Session>,
        (comm, rank): (A::Handle, usize),
        name: &str,
        targets: Vec<Target>,
        flavor: c_int,
    ) -> Result<Option<Self>, Failure> {
        // The bytes of all in the segment of the first, or each in its own.
        let bytes = segment_bytes(&targets, rank as u32);
        let made =
            PoolWindow::create(Arc::clone(session.pool()), name, rank as u32, targets.len() as u32, bytes);
        let Some(mut pooled) = agree(library, comm, made)? else { return Ok(None) };
        let joined = pooled.join();
        let views =
            joined.and_then(|()| views(&pooled, &targets, rank, flavor == A::NUMBERS.win_flavor_shared));
        let Some(views) = agree(library, comm, views)? else { return Ok(None) };
        let mut own_comm = comm;
        // Not by MPI_Comm_dup, which calls the program's functions that copy attributes.
        // SAFETY: a collective call of all ranks.
        let code = unsafe { (library.comm_split)(comm, 0, rank as c_int, &raw mut own_comm) };
        Library::<A>::check("MPI_Comm_split", code)?;
        let model = if session.pool().memory().coherence() == Coherence::Coherent {
            A::NUMBERS.win_unified
        } else {
            A::NUMBERS.win_separate
        };
        let state =
            library.serial(State { flat: None, pooled, views, epochs: Epochs::default(), flushes: 0 });
        Ok(Some(Self {
            state,
            _session: session,
            library,
            comm: own_comm,
            rank: rank as u32,
            targets,
            library_data: None,
            flavor,
            model,
        }))
    }

    /// Whether its bytes are moved here, and not by the library.
    #[inline(always)]
    pub(crate) const fn moves_bytes(&self) -> bool {
        self.library_data.is_none()
    }

    /// Where the program sees the part of a rank; null where it does not.
    fn base(&self, rank: usize) -> *mut u8 {
        let target = self.targets[rank];
        let mut state = self.state();
        let view = state.views.iter_mut().find(|(segment, _)| *segment == target.segment);
        view.map_or(ptr::null_mut(), |(_, view)| view.base().wrapping_add(target.offset as usize))
    }

    #[inline]
    fn state(&self) -> SerialGuard<'_, State<A::Handle>> {
        self.state.take_turn()
    }

    /// A change of the epochs, or a question about them.
    #[inline(always)]
    fn in_order<T>(&self, change: impl FnOnce(&mut Epochs) -> Result<T, String>) -> Result<T, Failure> {
        change(&mut self.state().epochs).map_err(|why| Failure::new(A::NUMBERS.error.rma_sync, why))
    }

    /// A rank whose part is to be accessed: in an epoch that allows it, unless there is no such rank.
    ///
    /// # Errors
    /// When no epoch does.
    #[inline(always)]
    pub(crate) fn begin_access(&self, rank: c_int) -> Result<(), Failure> {
        // A negative number is that of no rank.
        if rank as u32 as usize >= self.targets.len() {
            return Ok(());
        }
        self.in_order(|epochs| epochs.access(rank as u32))
    }

    /// Lets other threads of this process, the library and other processes go on until `step` is done.
    fn until(
        &self,
        mut step: impl FnMut(&mut PoolWindow<AnyMemory>) -> Result<bool, PoolError>,
    ) -> Result<(), Failure> {
        let mut uncancelled = None;
        loop {
            let done = step(&mut self.state().pooled);
            if done.map_err(|error| Failure::pool::<A>(&error))? {
                return Ok(());
            }
            uncancelled.get_or_insert_with(Uncancelled::begin);
            self.library.progress(self.comm);
            polder_mem::give_up();
        }
    }

    /// Lets others get what this process has stored: in the segment of `target`, or in all that it sees.
    fn expose(&self, target: Option<u32>) -> Result<(), Failure> {
        self.sync_library()?;
        self.state().each_view(target, View::expose).map_err(|error| Failure::pool::<A>(&error))
    }

    /// The same of memory that is the program's own, and lets this process load what others have put there.
    fn sync_library(&self) -> Result<(), Failure> {
        self.library_data.map_or(Ok(()), |handle| {
            // SAFETY: the library's window.
            Library::<A>::check("MPI_Win_sync", unsafe { (self.library.win_sync)(handle) })
        })
    }

    /// Lets this process load what others have put.
    fn renew(&self, target: Option<u32>) -> Result<(), Failure> {
        self.sync_library()?;
        self.state().each_view(target, View::renew).map_err(|error| Failure::pool::<A>(&error))
    }
}

/// Moving bytes.
impl<A: Abi> Window<A> {
    fn elements(&self, count: Count, kind: A::Handle, gaps: Gaps) -> Result<Elements<A::Handle>, Failure> {
        let wrong = |why| Failure::new(A::NUMBERS.error.count, format!("a count is {count}; {why}"));
        let count = usize::try_from(count).map_err(|_| wrong("counts are not negative"))?;
        let layout = self.library.layout_of(kind, gaps)?;
        let bytes = layout.bytes(1).checked_mul(count).filter(|&bytes| isize::try_from(bytes).is_ok());
        bytes.ok_or_else(|| wrong("so many elements have more bytes than there are addresses"))?;
        Ok(Elements { layout, count })
    }

    /// The elements of a place, its segment, and the offset there of its first; nothing where nobody is.
    fn place(
        &self,
        (rank, disp, count, kind): RmaTarget<A::Handle>,
        gaps: Gaps,
    ) -> Result<Option<Located<A::Handle>>, Failure> {
        if rank == A::NUMBERS.proc_null {
            return Ok(None);
        }
        let elements = self.elements(count, kind, gaps)?;
        let target = usize::try_from(rank).ok().and_then(|rank| self.targets.get(rank));
        let target = target.ok_or_else(|| {
            Failure::new(A::NUMBERS.error.rank, format!("rank {rank} is none of {}", self.targets.len()))
        })?;
        // In numbers in which no product and no sum wraps round to a place inside.
        let at = disp as i128 * i128::from(target.disp_unit);
        let start = |run: &Run| at + run.at as i128;
        let is_outside =
            |run: &Run| start(run) < 0 || start(run) + run.bytes as i128 > i128::from(target.bytes);
        let outside = match elements.together() {
            Some(run) => Some(run).filter(is_outside),
            None => elements.layout.runs(elements.count).find(is_outside),
        };
        if let Some(run) = outside {
            let why = format!(
                "[{}, +{}) lies outside the {} bytes of rank {rank}; look at the displacement, its unit and the datatype",
                start(&run),
                run.bytes,
                target.bytes
            );
            return Err(Failure::new(A::NUMBERS.error.rma_range, why));
        }
        // Elements without bytes may be said to lie anywhere.
        let at = i64::try_from(at + i128::from(target.offset)).unwrap_or(0);
        Ok(Some(Located { elements, segment: target.segment, at }))
    }

    fn expect_same(ours: usize, theirs: usize) -> Result<(), Failure> {
        if ours == theirs {
            return Ok(());
        }
        let why =
            format!("{ours} bytes here and {theirs} in the window; counts and datatypes must make the same");
        Err(Failure::new(A::NUMBERS.error.arg, why))
    }

    /// MPI_Put.
    ///
    /// # Safety
    /// The elements of `origin` may be read.
    ///
    /// # Errors
    /// When a rank, a range or a type is wrong, or the memory fails.
    #[inline(always)]
    pub unsafe fn put(
        &self,
        (from, count, kind): Buffer<*const c_void, A::Handle>,
        place: RmaTarget<A::Handle>,
    ) -> Result<(), Failure> {
        let mut state = self.state();
        if let Some((target, at, bytes)) = self.flat(&state, count, kind, place) {
            // SAFETY: by this function's contract: elements without gaps.
            let bytes = unsafe { std::slice::from_raw_parts(from.cast(), bytes) };
            let done = state.pooled.put(target.segment, target.offset + at, bytes);
            self.before_unlock(&state);
            return done.map_err(|error| Failure::pool::<A>(&error));
        }
        drop(state);
        // SAFETY: the same contract.
        unsafe { self.put_any((from, count, kind), place) }
    }

    /// A put of whatever type.
    ///
    /// # Safety
    /// As [`Window::put`].
    #[inline(never)]
    unsafe fn put_any(
        &self,
        (from, count, kind): Buffer<*const c_void, A::Handle>,
        place: RmaTarget<A::Handle>,
    ) -> Result<(), Failure> {
        let Some(Located { elements: theirs, segment, at }) = self.place(place, Gaps::Left)? else {
            return Ok(());
        };
        let ours = self.elements(count, kind, Gaps::Left)?;
        Self::expect_same(ours.bytes(), theirs.bytes())?;
        // SAFETY: by this function's contract.
        let bytes = unsafe { ours.read(from) };
        let mut rest = &*bytes;
        let mut state = self.state();
        state.flat = ours.layout.flat(kind).map(|bytes| (kind, bytes)).or(state.flat);
        let mut put = |run: Run, part: &[u8]| {
            let offset = (at + run.at as i64).unsigned_abs();
            state.pooled.put(segment, offset, part).map_err(|error| Failure::pool::<A>(&error))
        };
        if let Some(run) = theirs.together() {
            put(run, rest)?;
        } else {
            for run in theirs.layout.runs(theirs.count) {
                let (part, behind) = rest.split_at(run.bytes);
                put(run, part)?;
                rest = behind;
            }
        }
        self.before_unlock(&state);
        Ok(())
    }

    /// Where elements of the type that was put last go, if that is all inside the window: what most puts are, sooner.
    #[inline(always)]
    fn flat(
        &self,
        state: &State<A::Handle>,
        count: Count,
        kind: A::Handle,
        (rank, disp, their_count, their_kind): RmaTarget<A::Handle>,
    ) -> Option<(&Target, u64, usize)> {
        let (_, size) = state.flat.filter(|(flat, _)| *flat == kind && *flat == their_kind)?;
        let target = self.targets.get(usize::try_from(rank).ok()?)?;
        let at = u64::try_from((disp as i64).checked_mul(target.disp_unit)?).ok()?;
        let bytes = usize::try_from(count).ok()?.checked_mul(size)?;
        let is_inside = bytes as u64 <= target.bytes && at <= target.bytes - bytes as u64;
        (count == their_count && bytes > 0 && is_inside).then_some((target, at, bytes))
    }

    /// Not for the meaning: giving the lock back waits three times as long for part of a line that is on its way past the caches
    /// as a fence does.
    #[inline]
    fn before_unlock(&self, state: &State<A::Handle>) {
        if self.state.is_locked() {
            state.pooled.flush();
        }
    }

    /// MPI_Get.
    ///
    /// # Safety
    /// The elements of `origin` may be written, and nobody else touches them meanwhile.
    ///
    /// # Errors
    /// As [`Window::put`].
    pub unsafe fn get(
        &self,
        (into, count, kind): Buffer<*mut c_void, A::Handle>,
        place: RmaTarget<A::Handle>,
    ) -> Result<(), Failure> {
        let Some(Located { elements: theirs, segment, at }) = self.place(place, Gaps::Left)? else {
            return Ok(());
        };
        let ours = self.elements(count, kind, Gaps::Left)?;
        Self::expect_same(ours.bytes(), theirs.bytes())?;
        let state = self.state();
        let get = |bytes: &mut [u8]| {
            let mut rest = bytes;
            for run in theirs.layout.runs(theirs.count) {
                let (part, behind) = rest.split_at_mut(run.bytes);
                let offset = (at + run.at as i64).unsigned_abs();
                state.pooled.get(segment, offset, part).map_err(|error| Failure::pool::<A>(&error))?;
                rest = behind;
            }
            Ok(())
        };
        match ours.together() {
            // SAFETY: by this function's contract; the run is all that the elements are.
            Some(run) => get(unsafe {
                std::slice::from_raw_parts_mut(into.cast::<u8>().wrapping_offset(run.at), run.bytes)
            }),
            None => {
                let mut bytes = vec![0; ours.bytes()];
                get(&mut bytes)?;
                // SAFETY: by this function's contract.
                unsafe { scatter(&ours.layout, into, ours.count, &bytes) };
                Ok(())
            }
        }
    }

    /// MPI_Accumulate.
    ///
    /// # Safety
    /// The elements of `origin` may be read.
    ///
    /// # Errors
    /// As [`Window::put`], and when the types are not of one predefined type.
    pub unsafe fn accumulate(
        &self,
        origin: Buffer<*const c_void, A::Handle>,
        place: RmaTarget<A::Handle>,
        op: A::Handle,
    ) -> Result<(), Failure> {
        // SAFETY: by this function's contract.
        unsafe { self.combine(origin, None, place, op) }
    }

    /// MPI_Get_accumulate.
    ///
    /// # Safety
    /// The elements of `origin` may be read, unless the operation is MPI_NO_OP; those of `result` may be written, and nobody else
    /// touches them meanwhile.
    ///
    /// # Errors
    /// As [`Window::accumulate`].
    pub unsafe fn get_accumulate(
        &self,
        origin: Buffer<*const c_void, A::Handle>,
        result: Buffer<*mut c_void, A::Handle>,
        place: RmaTarget<A::Handle>,
        op: A::Handle,
    ) -> Result<(), Failure> {
        // SAFETY: by this function's contract.
        unsafe { self.combine(origin, Some(result), place, op) }
    }

    /// MPI_Compare_and_swap.
    ///
    /// # Safety
    /// One element of `kind` may be read at `origin` and `compare`, and written at `result`.
    ///
    /// # Errors
    /// As [`Window::put`].
    pub unsafe fn compare_and_swap(
        &self,
        [origin, compare]: [*const c_void; 2],
        result: *mut c_void,
        kind: A::Handle,
        target: c_int,
        disp: Aint,
    ) -> Result<(), Failure> {
        let place = self.place((target, disp, 1, kind), Gaps::Moved)?;
        let Some(Located { elements: theirs, segment, at }) = place else { return Ok(()) };
        // SAFETY: by this function's contract.
        let [origin, compare] = unsafe { [theirs.read(origin), theirs.read(compare)] };
        let mut before = vec![0; theirs.bytes()];
        let mut swap = |bytes: &mut [u8]| {
            before.copy_from_slice(bytes);
            let is_equal = *before == *compare;
            if is_equal {
                bytes.copy_from_slice(&origin);
            }
            is_equal
        };
        let (offset, bytes) = (at.unsigned_abs(), theirs.bytes() as u64);
        let updated = self.state().pooled.update(segment, offset, bytes, &mut swap);
        updated.map_err(|error| Failure::pool::<A>(&error))?;
        // SAFETY: by this function's contract.
        unsafe { scatter(&theirs.layout, result, 1, &before) };
        Ok(())
    }

    /// Combines elements with those of a place, and gives what was there.
    unsafe fn combine(
        &self,
        (from, count, kind): Buffer<*const c_void, A::Handle>,
        result: Option<Buffer<*mut c_void, A::Handle>>,
        place: RmaTarget<A::Handle>,
        op: A::Handle,
    ) -> Result<(), Failure> {
        let Some(Located { elements: theirs, segment, at }) = self.place(place, Gaps::Moved)? else {
            return Ok(());
        };
        let handles = &self.library.handles;
        if op == handles.no_op && result.is_none() {
            let why = "MPI_NO_OP changes nothing and gives nothing here; MPI_Get_accumulate and MPI_Fetch_and_op give what is there";
            return Err(Failure::new(A::NUMBERS.error.op, why));
        }
        let ours = match op == handles.no_op {
            true => None,
            // SAFETY: by the contract of those who call this.
            false => Some(unsafe { self.elements(count, kind, Gaps::Moved)?.read(from) }.into_owned()),
        };
        if let Some(ours) = &ours {
            Self::expect_same(ours.len(), theirs.bytes())?;
        }
        let result = result.map(|(into, count, kind)| {
            let elements = self.elements(count, kind, Gaps::Moved)?;
            Self::expect_same(elements.bytes(), theirs.bytes())?;
            Ok((into, elements))
        });
        let result = result.transpose()?;
        if theirs.bytes() == 0 {
            return Ok(());
        }
        let basic = theirs.layout.basic().filter(|basic| basic.bytes > 0);
        let basic = basic.ok_or_else(|| {
            Failure::new(
                A::NUMBERS.error.kind,
                "elements of several types cannot be combined; use one predefined type",
            )
        })?;
        let parts = &self.library.layout_of(basic.kind, Gaps::Left)?.runs;
        let mut before = vec![0; if result.is_some() { theirs.bytes() } else { 0 }];
        let (mut done, mut failed) = (0, 0);
        for run in theirs.layout.runs(theirs.count) {
            let offset = (at + run.at as i64).unsigned_abs();
            let range = done..done + run.bytes;
            let mut change = |bytes: &mut [u8]| {
                if let Some(before) = before.get_mut(range.clone()) {
                    before.copy_from_slice(bytes);
                }
                match &ours {
                    None => {}
                    Some(ours) if op == handles.replace => {
                        copy_parts(parts, basic, &ours[range.clone()], bytes)
                    }
                    Some(ours) => failed |= self.reduce(basic, &ours[range.clone()], bytes, op),
                }
                ours.is_some()
            };
            let updated = self.state().pooled.update(segment, offset, run.bytes as u64, &mut change);
            updated.map_err(|error| Failure::pool::<A>(&error))?;
            done += run.bytes;
        }
        Library::<A>::check("MPI_Reduce_local", failed)?;
        if let Some((into, elements)) = result {
            // SAFETY: by the contract of those who call this.
            unsafe {
                let mut all = gather(&elements.layout, into, elements.count);
                copy_parts(parts, basic, &before, &mut all);
                scatter(&elements.layout, into, elements.count, &all);
            }
        }
        Ok(())
    }

    /// Combines `ours` into `theirs`, elements of a predefined type, as the library does it.
    fn reduce(&self, basic: Basic<A::Handle>, ours: &[u8], theirs: &mut [u8], op: A::Handle) -> c_int {
        let Basic { kind, bytes, extent } = basic;
        // As many as a cache holds where one element follows another, or one by one.
        let piece = if bytes == extent { bytes * (CACHED / bytes).max(1) } else { bytes };
        let mut scratch = [(); 2].map(|()| vec![0_u128; piece.max(extent) / 16 + 1]);
        for (ours, theirs) in ours.chunks(piece).zip(theirs.chunks_mut(piece)) {
            let [from, into] = scratch.each_mut().map(|words| words.as_mut_ptr().cast::<u8>());
            // SAFETY: the scratch is aligned for every type, and as long as the elements; they do not overlap.
            let code = unsafe {
                from.copy_from_nonoverlapping(ours.as_ptr(), ours.len());
                into.copy_from_nonoverlapping(theirs.as_ptr(), theirs.len());
                let count = (ours.len() / bytes) as c_int;
                let code = (self.library.reduce_local)(from.cast(), into.cast(), count, kind, op);
                theirs.as_mut_ptr().copy_from_nonoverlapping(into, theirs.len());
                code
            };
            if code != 0 {
                return code;
            }
        }
        0
    }

    /// A request for what is done already.
    ///
    /// # Safety
    /// `request` may be written.
    ///
    /// # Errors
    /// Those of the library.
    pub unsafe fn done(&self, request: *mut A::Handle) -> Result<(), Failure> {
        // A request that is complete says that the origin's buffer is free, and of gets and updates that they are over.
        // SAFETY: by this function's contract.
        unsafe { self.library.done(self.comm, request) }
    }
}

/// Ordering it.
impl<A: Abi> Window<A> {
    /// MPI_Win_fence.
    ///
    /// # Errors
    /// Those of the library, when an epoch of another kind is open, and when the memory fails.
    pub fn fence(&self, assert: c_int) -> Result<(), Failure> {
        self.in_order(|epochs| epochs.fence(assert & A::NUMBERS.mode_nosucceed != 0))?;
        self.settle(None)?;
        if assert & A::NUMBERS.mode_nostore == 0 {
            self.expose(None)?;
        }
        self.barrier()?;
        self.renew(None)
    }

    /// Ends what this process has begun, at one target or at all.
    fn settle(&self, rank: Option<c_int>) -> Result<(), Failure> {
        let Some(handle) = self.library_data else {
            self.state().pooled.flush();
            return Ok(());
        };
        let _uncancelled = Uncancelled::begin();
        let Library { win_flush, win_flush_all, .. } = self.library;
        // SAFETY: the library's window, in an epoch that lasts as long as the window.
        let code = unsafe { rank.map_or_else(|| win_flush_all(handle), |rank| win_flush(rank, handle)) };
        Library::<A>::check("MPI_Win_flush", code)
    }

    /// Waits for all ranks.
    fn barrier(&self) -> Result<(), Failure> {
        let _uncancelled = Uncancelled::begin();
        // SAFETY: a collective call of all ranks, on a communicator of the window's own.
        Library::<A>::check("MPI_Barrier", unsafe { (self.library.barrier)(self.comm) })
    }

    /// MPI_Win_post.
    ///
    /// # Errors
    /// Those of the library, and when the window is posted already.
    pub fn post(&self, group: A::Handle, assert: c_int) -> Result<(), Failure> {
        let ranks = self.ranks(group)?;
        self.in_order(Epochs::post)?;
        if assert & A::NUMBERS.mode_nostore == 0 {
            self.expose(None)?;
        }
        self.state().pooled.post(&ranks).map_err(|error| Failure::pool::<A>(&error))
    }

    /// MPI_Win_start.
    ///
    /// # Errors
    /// Those of the library, when accesses have begun already, and when a target died.
    pub fn start(&self, group: A::Handle) -> Result<(), Failure> {
        let ranks = self.ranks(group)?;
        self.in_order(|epochs| epochs.start(&ranks))?;
        let started = self.state().pooled.start(&ranks).map_err(|error| Failure::pool::<A>(&error));
        let started = started.and_then(|()| self.until(PoolWindow::try_start));
        started.inspect_err(|_| self.state().epochs.close())
    }

    /// MPI_Win_complete.
    ///
    /// # Errors
    /// When no accesses have begun.
    pub fn complete(&self) -> Result<(), Failure> {
        self.in_order(Epochs::complete)?;
        if self.library_data.is_some() {
            self.settle(None)?;
        }
        self.state().pooled.complete().map_err(|error| Failure::pool::<A>(&error))
    }

    /// MPI_Win_wait.
    ///
    /// # Errors
    /// When nothing is posted, and when an origin died.
    pub fn wait(&self) -> Result<(), Failure> {
        self.in_order(|epochs| epochs.is_posted())?;
        self.until(PoolWindow::try_wait)?;
        self.state().epochs.withdraw();
        self.renew(None)
    }

    /// MPI_Win_test.
    ///
    /// # Safety
    /// `flag` may be written.
    ///
    /// # Errors
    /// As [`Window::wait`].
    pub unsafe fn test(&self, flag: *mut c_int) -> Result<(), Failure> {
        self.in_order(|epochs| epochs.is_posted())?;
        let came = self.state().pooled.try_wait().map_err(|error| Failure::pool::<A>(&error))?;
        if came {
            self.state().epochs.withdraw();
            self.renew(None)?;
        } else {
            self.library.progress(self.comm);
        }
        // SAFETY: by this function's contract.
        unsafe { flag.write(c_int::from(came)) };
        Ok(())
    }

    /// The ranks of a group of the library's, as this window counts them.
    fn ranks(&self, group: A::Handle) -> Result<Vec<u32>, Failure> {
        // SAFETY: the communicator is the library's, and so is the group that the program gave.
        let ranks = unsafe { self.library.ranks(group, self.comm) }?;
        Ok(ranks.into_iter().map(|rank| rank as u32).collect())
    }

    /// MPI_Win_lock.
    ///
    /// # Errors
    /// When the rank is none or locked already, and when somebody in front died.
    pub fn lock(&self, kind: c_int, rank: c_int, assert: c_int) -> Result<(), Failure> {
        let numbers = &A::NUMBERS;
        if rank == numbers.proc_null {
            return Ok(());
        }
        let access = match kind {
            kind if kind == numbers.lock_exclusive => Access::Exclusive,
            kind if kind == numbers.lock_shared => Access::Shared,
            _ => return Err(Failure::new(numbers.error.locktype, format!("{kind} is no type of a lock"))),
        };
        let target = rank as u32;
        self.segment(target)?;
        self.in_order(|epochs| epochs.lock(target))?;
        self.acquire(target, access, assert).inspect_err(|_| self.state().epochs.unlock(target))
    }

    fn acquire(&self, target: u32, access: Access, assert: c_int) -> Result<(), Failure> {
        if assert & A::NUMBERS.mode_nocheck == 0 {
            let mut place = LockPlace::default();
            self.until(|pooled| pooled.try_lock(target, access, &mut place))?;
        }
        self.renew(Some(self.segment(target)?))
    }

    /// MPI_Win_unlock.
    ///
    /// # Errors
    /// When the lock is not held.
    pub fn unlock(&self, rank: c_int) -> Result<(), Failure> {
        if rank == A::NUMBERS.proc_null {
            return Ok(());
        }
        let target = rank as u32;
        self.segment(target)?;
        self.in_order(|epochs| epochs.is_locked(target))?;
        self.release(target)?;
        self.state().epochs.unlock(target);
        Ok(())
    }

    fn release(&self, target: u32) -> Result<(), Failure> {
        self.expose(Some(self.segment(target)?))?;
        self.settle(Some(target as c_int))?;
        self.state().pooled.unlock(target);
        Ok(())
    }

    /// The segment that a rank's part lies in.
    fn segment(&self, rank: u32) -> Result<u32, Failure> {
        let target = self.targets.get(rank as usize).map(|target| target.segment);
        target
            .ok_or_else(|| Failure::new(A::NUMBERS.error.rank, format!("there is no rank {}", rank as c_int)))
    }

    /// MPI_Win_lock_all.
    ///
    /// # Errors
    /// As [`Window::lock`].
    pub fn lock_all(&self, assert: c_int) -> Result<(), Failure> {
        self.in_order(Epochs::lock_all)?;
        let targets = 0..self.targets.len() as u32;
        let locked = targets.clone().try_for_each(|target| self.acquire(target, Access::Shared, assert));
        locked.inspect_err(|_| {
            let mut state = self.state();
            targets.for_each(|target| _ = state.pooled.unlock(target));
            state.epochs.close();
        })
    }

    /// MPI_Win_unlock_all.
    ///
    /// # Errors
    /// As [`Window::unlock`].
    pub fn unlock_all(&self) -> Result<(), Failure> {
        self.in_order(|epochs| epochs.is_all_locked())?;
        (0..self.targets.len() as u32).try_for_each(|target| self.release(target))?;
        self.state().epochs.close();
        Ok(())
    }

    /// MPI_Win_flush and all that is like it, of one target or of all. In the pool, puts are there when they are flushed, to
    /// whomever; gets and updates were there at once, and buffers are free.
    ///
    /// # Errors
    /// When no lock is held, and those of the library.
    #[inline(always)]
    pub fn flush(&self, rank: Option<c_int>) -> Result<(), Failure> {
        let target = match rank {
            Some(rank) if rank == A::NUMBERS.proc_null => return Ok(()),
            Some(rank) => self.segment(rank as u32).map(|_| Some(rank as u32))?,
            None => None,
        };
        self.in_order(|epochs| epochs.flush(target))?;
        if self.library_data.is_some() {
            return self.settle(rank);
        }
        let mut state = self.state();
        state.pooled.flush();
        state.flushes += 1;
        // For others, in case the program does nothing but flush: it costs more than a flush.
        if state.flushes >= FLUSHES {
            state.flushes = 0;
            drop(state);
            self.library.progress(self.comm);
        }
        Ok(())
    }

    /// MPI_Win_sync: what this process stored is there for others, and what others put is there for it.
    ///
    /// # Errors
    /// When no lock is held, or the memory fails.
    pub fn sync(&self) -> Result<(), Failure> {
        self.in_order(|epochs| epochs.flush(None))?;
        self.expose(None)?;
        self.renew(None)
    }
}

/// Answering.
impl<A: Abi> Window<A> {
    /// MPI_Win_get_attr, of those attributes that the library would answer wrongly.
    ///
    /// # Safety
    /// `value` has room for an address, and `flag` for a number.
    pub unsafe fn attribute(&self, key: c_int, value: *mut c_void, flag: *mut c_int) -> bool {
        let numbers = &A::NUMBERS;
        let answer = match key {
            _ if self.library_data.is_some() => return false,
            key if key == numbers.win_create_flavor => &raw const self.flavor,
            key if key == numbers.win_model => &raw const self.model,
            _ => return false,
        };
        // SAFETY: by this function's contract; the window stands still as long as the program has it.
        unsafe {
            value.cast::<*const c_int>().write(answer);
            flag.write(1);
        }
        true
    }

    /// MPI_Win_shared_query; false where the memory is not shared.
    ///
    /// # Safety
    /// There is room for the answers.
    ///
    /// # Errors
    /// When the rank is none.
    pub unsafe fn shared_query(
        &self,
        rank: c_int,
        bytes: *mut Aint,
        disp_unit: *mut Count,
        base: *mut c_void,
    ) -> Result<bool, Failure> {
        if self.flavor != A::NUMBERS.win_flavor_shared {
            return Ok(false);
        }
        let index = match rank == A::NUMBERS.proc_null {
            true => self.targets.iter().position(|target| target.bytes > 0).unwrap_or(0),
            false => rank as usize,
        };
        let target = self.targets.get(index).copied();
        let target =
            target.ok_or_else(|| Failure::new(A::NUMBERS.error.rank, format!("there is no rank {rank}")))?;
        // SAFETY: by this function's contract.
        unsafe {
            bytes.write(target.bytes as Aint);
            disp_unit.write(target.disp_unit);
            base.cast::<*mut u8>().write(self.base(index));
        }
        Ok(true)
    }

    /// Waits until no rank accesses the window any more, and ends the epoch of the library's before that is freed.
    ///
    /// # Errors
    /// When an epoch is open, and those of the library.
    pub(crate) fn end(&self) -> Result<(), Failure> {
        self.in_order(|epochs| epochs.is_over())?;
        self.barrier()?;
        self.library_data.map_or(Ok(()), |handle| {
            // SAFETY: the library's window, all of whose ranks have ended their accesses.
            Library::<A>::check("MPI_Win_unlock_all", unsafe { (self.library.win_unlock_all)(handle) })
        })
    }

    /// Frees what the library has of it.
    pub(crate) fn free(&self) -> Result<(), Failure> {
        let mut comm = self.comm;
        // SAFETY: the communicator is the window's own, and nobody uses it any more.
        Library::<A>::check("MPI_Comm_free", unsafe { (self.library.comm_free)(&raw mut comm) })
    }

    /// Which rank this process is.
    pub(crate) const fn rank(&self) -> u32 {
        self.rank
    }
}

impl<H> State<H> {
    fn each_view(
        &mut self,
        target: Option<u32>,
        change: impl Fn(&mut View, &mut PoolWindow<AnyMemory>, u32) -> Result<(), PoolError>,
    ) -> Result<(), PoolError> {
        let views =
            self.views.iter_mut().filter(|(segment, _)| target.is_none_or(|target| target == *segment));
        for (segment, view) in views {
            change(view, &mut self.pooled, *segment)?;
        }
        Ok(())
    }
}

impl<H: Copy + PartialEq + 'static> Elements<H> {
    fn bytes(&self) -> usize {
        self.layout.bytes(self.count)
    }

    /// All of them, where they lie together.
    fn together(&self) -> Option<Run> {
        self.layout.together(self.count)
    }

    /// Their bytes, without gaps.
    ///
    /// # Safety
    /// They may be read while the bytes live.
    unsafe fn read<'a>(&self, from: *const c_void) -> std::borrow::Cow<'a, [u8]> {
        match self.together() {
            // SAFETY: by this function's contract; the run is all that the elements are.
            Some(run) => unsafe {
                std::slice::from_raw_parts(from.cast::<u8>().wrapping_offset(run.at), run.bytes).into()
            },
            // SAFETY: by this function's contract.
            None => unsafe { gather(&self.layout, from, self.count) }.into(),
        }
    }
}

/// What each rank wishes, and where its part lies.
fn share_out<A: Abi>(
    library: &Library<A>,
    request: &WindowRequest<A>,
    ranks: usize,
) -> Result<Vec<Target>, Failure> {
    let asked = Some(alignment(library, request.info)).filter(|&asked| asked > ALIGNED);
    let mine = [request.bytes as i64, request.disp_unit, asked.unwrap_or(0).into()];
    let mut all = vec![[0_i64; 3]; ranks];
    library.gather_all(&mine, &mut all, request.comm)?;
    let together = request.is_shared && !is_hinted(library, request.info, c"alloc_shared_noncontig");
    let mut end = 0;
    let parts = all.iter().zip(0..).map(|(&[bytes, disp_unit, asked], rank)| {
        let (segment, offset) = if together { (0, end) } else { (rank, 0) };
        end += bytes as u64;
        // Those behind the first lie where it ends.
        let alignment = if segment == rank { asked as u64 } else { 0 };
        Target { segment, offset, bytes: bytes as u64, alignment, disp_unit }
    });
    Ok(parts.collect())
}

/// Whether a hint says true.
pub(crate) fn is_hinted<A: Abi>(library: &Library<A>, info: A::Handle, key: &CStr) -> bool {
    if info == library.handles.info_null {
        return false;
    }
    let (mut value, mut flag) = ([0; 8], 0);
    let room = value.len() as c_int - 1;
    // SAFETY: a C string, and room for the answers.
    let code = unsafe { (library.info_get)(info, key.as_ptr(), room, value.as_mut_ptr(), &raw mut flag) };
    code == 0 && flag != 0 && value.iter().zip(b"true\0").all(|(&said, &want)| said == want as c_char)
}

/// What this process made, if all ranks made theirs.
fn agree<A: Abi, T>(
    library: &Library<A>,
    comm: A::Handle,
    made: Result<T, PoolError>,
) -> Result<Option<T>, Failure> {
    if let Err(error) = &made {
        say(&format!("a window stays with the MPI library: {}", in_terms_of(TIMEOUT, error)));
    }
    let all = library.all(comm, made.is_ok())?;
    Ok(made.ok().filter(|_| all))
}

/// What a segment has.
fn segment_bytes(targets: &[Target], segment: u32) -> u64 {
    let parts = targets.iter().filter(|target| target.segment == segment);
    parts.map(|target| target.bytes.saturating_add(target.alignment)).fold(0, u64::saturating_add)
}

/// The segments that the program may load from and store to.
fn views(
    pooled: &PoolWindow<AnyMemory>,
    targets: &[Target],
    rank: usize,
    is_shared: bool,
) -> Result<Vec<(u32, View)>, PoolError> {
    let seen = |index: usize| is_shared || index == rank;
    let segments: BTreeSet<u32> =
        (0..targets.len()).filter(|&index| seen(index)).map(|index| targets[index].segment).collect();
    let views = segments.into_iter().map(|segment| {
        let bytes = segment_bytes(targets, segment) as usize;
        Ok((segment, View::new(pooled.address(segment)?, bytes)))
    });
    views.collect()
}
