//! Memory of MPI_Alloc_mem in the pool: a very long message that is sent from there is read in place.
//!
//! It belongs to this process alone, so plain loads and stores are right there, on coherent and on software-coherent memory.
//! What is sent is written back when it is offered. A forked child would store into it too, so it has nothing there. A shadow
//! maps nothing: there the program has a copy, and what it sends of it is stored in the pool first.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int};
use std::ops::Range;
use std::sync::Arc;

use polder_attach::session::Session;
use polder_attach::settings::{TIMEOUT, in_terms_of};
use polder_mem::{AnyMemory, Memory, Offset};
use polder_pool::PrivateMemory;

use crate::abi::{Abi, Aint};
use crate::library::Library;

/// Memory of no more bytes than this is the library's: a program may take many small pieces.
const SHORT: u64 = 64 << 10;

/// Bytes that memory in the pool is aligned to, at least.
pub(crate) const ALIGNED: u32 = 64;

/// Pages that a mapping may have: of a file, and of a dax device, whose mappings are cut between its own pages alone.
const PAGES: [usize; 3] = [4 << 10, 2 << 20, 1 << 30];

/// What a shadow's copies are made of.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line {
    _bytes: [u8; ALIGNED as usize],
}

/// A piece of memory that the program has.
struct Piece {
    // Before the session: it lies in its pool.
    held: PrivateMemory<AnyMemory>,
    session: Arc<Session>,
    /// What the program has in its place where nothing is mapped.
    _copy: Vec<Line>,
    is_copied: bool,
}

/// All pieces, by address.
#[derive(Default)]
pub(crate) struct Pieces {
    by_address: BTreeMap<usize, Piece>,
    taken: u64,
}

impl Pieces {
    pub(crate) const fn new() -> Self {
        Self { by_address: BTreeMap::new(), taken: 0 }
    }

    /// Takes memory from the pool.
    pub(crate) fn take(&mut self, session: Arc<Session>, bytes: u64) -> Result<*mut u8, String> {
        let held = PrivateMemory::take(Arc::clone(session.pool()), self.taken, bytes);
        let held = held.map_err(|error| in_terms_of(TIMEOUT, &error))?;
        self.taken += 1;
        let memory = session.pool().memory();
        let mapped = memory.address(held.at(), held.bytes());
        if let Some((piece, region)) = mapped.zip(memory.address(Offset(0), memory.bytes())) {
            let span = |at: *mut u8, bytes: u64| at.addr()..at.addr() + bytes as usize;
            keep_from_children(&span(piece, held.bytes()), &span(region, memory.bytes()))
                .map_err(|error| format!("forked children would share them: {error}"))?;
        }
        let lines = if mapped.is_none() { bytes.div_ceil(ALIGNED.into()) as usize } else { 0 };
        let mut copy = vec![Line { _bytes: [0; ALIGNED as usize] }; lines];
        let address = mapped.unwrap_or(copy.as_mut_ptr().cast());
        let piece = Piece { held, session, is_copied: mapped.is_none(), _copy: copy };
        self.by_address.insert(address.addr(), piece);
        Ok(address)
    }

    /// Gives a piece back; whether there was one at this address.
    pub(crate) fn free(&mut self, address: usize) -> bool {
        self.by_address.remove(&address).is_some()
    }

    /// Where in the pool the bytes of a send lie, if that is this pool and they lie there.
    ///
    /// # Safety
    /// The bytes may be read.
    pub(crate) unsafe fn place(&self, at: *const u8, bytes: usize, uuid: u128) -> Option<u64> {
        let (start, piece) = self.by_address.range(..=at.addr()).next_back()?;
        let skip = (at.addr() - start) as u64;
        let is_inside = skip.checked_add(bytes as u64).is_some_and(|end| end <= piece.held.bytes());
        if !is_inside || piece.session.pool().superblock().uuid.0 != uuid {
            return None;
        }
        let place = piece.held.at() + skip;
        if piece.is_copied {
            // SAFETY: by this function's contract.
            let ours = unsafe { std::slice::from_raw_parts(at, bytes) };
            piece.session.pool().memory().copy_in(place, ours).ok()?;
        }
        Some(place.0)
    }
}

/// Lets a child that is forked from here on map nothing of a piece of the region. It would store into this process's own, where a copy is
/// expected; so a load or a store there ends it. What else is in the same pages is no child's either: it opens the pool anew.
fn keep_from_children(piece: &Range<usize>, region: &Range<usize>) -> std::io::Result<()> {
    let kept = PAGES.into_iter().any(|page| {
        let begin = (piece.start / page * page).max(region.start);
        let end = piece.end.next_multiple_of(page).min(region.end);
        let at = std::ptr::with_exposed_provenance_mut(begin);
        // SAFETY: these pages are of the region's mapping alone, and stay as they are here.
        unsafe { libc::madvise(at, end - begin, libc::MADV_DONTFORK) == 0 }
    });
    if kept { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Whether memory of so many bytes is worth a place in the pool, which has one that is aligned as the program asks.
pub(crate) fn is_fit<A: Abi>(library: &Library<A>, bytes: Aint, info: A::Handle) -> bool {
    u64::try_from(bytes).is_ok_and(|bytes| bytes > SHORT) && alignment(library, info) <= ALIGNED
}

/// The alignment that the program asks for.
pub(crate) fn alignment<A: Abi>(library: &Library<A>, info: A::Handle) -> u32 {
    if info == library.handles.info_null {
        return 1;
    }
    let (mut value, mut flag) = ([0_u8; 12], 0);
    let (key, room) = (c"mpi_minimum_memory_alignment".as_ptr(), value.len() as c_int - 1);
    // SAFETY: a C string, and room for the answers.
    let code =
        unsafe { (library.info_get)(info, key, room, value.as_mut_ptr().cast::<c_char>(), &raw mut flag) };
    if code != 0 || flag == 0 {
        return 1;
    }
    let digits = value.iter().take_while(|byte| byte.is_ascii_digit());
    digits.fold(0, |number: u32, digit| number.saturating_mul(10).saturating_add(u32::from(digit - b'0')))
}
