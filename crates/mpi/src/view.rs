//! A segment as the program sees it: where it is mapped, or, where it is not, as in a shadow, a copy.

use polder_mem::AnyMemory;
use polder_pool::PoolError;
use polder_pool::window::Window as PoolWindow;

/// Bytes of a word: what is put at once of a copy.
const WORD: usize = 8;

/// A segment that the program loads from and stores to.
pub(crate) enum View {
    /// It lies in the pool.
    Mapped { base: *mut u8, bytes: usize },
    /// The program's copy, aligned, and what of it the pool has had.
    Copied { ours: Vec<u128>, theirs: Vec<u8> },
}

// SAFETY: a view points to memory that belongs to no thread, and hands out no reference to it.
unsafe impl Send for View {}

impl View {
    pub(crate) fn new(address: Option<*mut u8>, bytes: usize) -> Self {
        match address {
            Some(base) => Self::Mapped { base, bytes },
            // At least one element, so that an empty segment has an address too.
            None => Self::Copied { ours: vec![0; bytes / 16 + 1], theirs: vec![0; bytes] },
        }
    }

    pub(crate) fn base(&mut self) -> *mut u8 {
        match self {
            Self::Mapped { base, .. } => *base,
            Self::Copied { ours, .. } => ours.as_mut_ptr().cast(),
        }
    }

    /// Lets others get what the program has stored in the segment of rank `target`.
    pub(crate) fn expose(
        &mut self,
        window: &mut PoolWindow<AnyMemory>,
        target: u32,
    ) -> Result<(), PoolError> {
        match self {
            Self::Mapped { bytes, .. } => window.expose(target, 0, *bytes as u64),
            Self::Copied { ours, theirs } => {
                // SAFETY: the copy has these bytes, and the program stores to none during a call of MPI that ends an epoch.
                let ours = unsafe { std::slice::from_raw_parts(ours.as_ptr().cast::<u8>(), theirs.len()) };
                for (index, (ours, theirs)) in ours.chunks(WORD).zip(theirs.chunks_mut(WORD)).enumerate() {
                    if ours != theirs {
                        window.put(target, (index * WORD) as u64, ours)?;
                        theirs.copy_from_slice(ours);
                    }
                }
                window.flush();
                Ok(())
            }
        }
    }

    /// Lets the program load what others have put into the segment of rank `target`. What it has stored is not lost: a line
    /// that is dropped is written back first.
    pub(crate) fn renew(&mut self, window: &mut PoolWindow<AnyMemory>, target: u32) -> Result<(), PoolError> {
        if matches!(self, Self::Copied { .. }) {
            self.expose(window, target)?;
        }
        match self {
            Self::Mapped { bytes, .. } => window.renew(target, 0, *bytes as u64),
            Self::Copied { ours, theirs } => {
                window.get(target, 0, theirs)?;
                // SAFETY: as above.
                unsafe {
                    ours.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(theirs.as_ptr(), theirs.len())
                };
                Ok(())
            }
        }
    }
}
