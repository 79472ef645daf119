//! A completion queue as the domain keeps it: operations that have completed, oldest first.

use std::collections::VecDeque;
use std::ffi::{CString, c_void};

use crate::ffi::{CqTaggedEntry, Errno};

/// Bytes of the longest entry, which MPI libraries ask for.
pub(crate) const TAGGED_BYTES: usize = size_of::<CqTaggedEntry>();

/// Operations that have completed, oldest first.
pub(crate) struct Queue {
    /// Bytes of an entry in the format that was asked for.
    entry_bytes: usize,
    entries: VecDeque<Done>,
    /// Endpoints that report here.
    pub(crate) bound: usize,
    /// Whether somebody wants the waiting to end.
    pub(crate) signalled: bool,
    /// The text of the failure that was read last.
    pub(crate) failure_text: CString,
}

enum Done {
    Well(CqTaggedEntry, u64),
    Badly(Failure),
}

/// An operation that failed: its entry, why, how many bytes found no room, and why in words.
pub(crate) struct Failure {
    pub(crate) entry: CqTaggedEntry,
    pub(crate) errno: Errno,
    pub(crate) over: u64,
    pub(crate) text: String,
}

// SAFETY: the pointers in entries are the program's and carried, never followed.
unsafe impl Send for Queue {}

impl Queue {
    /// Takes the failure in front.
    pub(crate) fn take_failure(&mut self) -> Option<Failure> {
        match self.entries.pop_front()? {
            Done::Badly(failure) => Some(failure),
            well @ Done::Well(..) => {
                self.entries.push_front(well);
                None
            }
        }
    }

    pub(crate) fn new(entry_bytes: usize) -> Self {
        Self {
            entry_bytes,
            entries: VecDeque::new(),
            bound: 0,
            signalled: false,
            failure_text: CString::default(),
        }
    }

    pub(crate) fn push(&mut self, entry: CqTaggedEntry, from: u64) {
        self.entries.push_back(Done::Well(entry, from));
    }

    pub(crate) fn fail(&mut self, entry: CqTaggedEntry, errno: Errno, over: u64, text: &str) {
        self.entries.push_back(Done::Badly(Failure { entry, errno, over, text: text.to_owned() }));
    }

    /// Writes up to `count` entries that went well; a failure in front of them must be read first.
    ///
    /// # Safety
    /// `to` has room for `count` entries of this queue's format, and `from`, unless null, for as many addresses.
    pub(crate) unsafe fn take(
        &mut self,
        to: *mut c_void,
        count: usize,
        from: *mut u64,
    ) -> Result<usize, Errno> {
        let mut taken = 0;
        while taken < count
            && let Some(Done::Well(entry, source)) = self.entries.front()
        {
            // SAFETY: by this function's contract; a format is a beginning of the longest one.
            unsafe {
                let place = to.cast::<u8>().add(taken * self.entry_bytes);
                let entry = std::ptr::from_ref(entry).cast::<u8>();
                // A copy of a length that the compiler does not know is a call.
                match self.entry_bytes {
                    TAGGED_BYTES => place.copy_from_nonoverlapping(entry, TAGGED_BYTES),
                    bytes => place.copy_from_nonoverlapping(entry, bytes),
                }
                if !from.is_null() {
                    from.add(taken).write(*source);
                }
            }
            self.entries.pop_front();
            taken += 1;
        }
        match (taken, self.entries.front()) {
            (0, Some(Done::Badly(_))) => Err(Errno::AVAIL),
            (0, None) => Err(Errno::AGAIN),
            _ => Ok(taken),
        }
    }
}
