//! The MPI library of this process: what the shim itself calls of it, under the names that no shim takes.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use polder_border::Uncancelled;
use polder_mem::Serial;

use crate::abi::{Abi, Aint, Count, Handles};
use crate::failure::Failure;
use crate::layout::{Gaps, Layout};

/// The function called `name` in a library.
///
/// # Safety
/// `F` is a function pointer of the type that the function has.
unsafe fn symbol<F: Copy>(library: *mut c_void, name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: `library` is a handle of dlopen's or one of its constants, `name` a C string.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    if address.is_null() {
        return None;
    }
    // SAFETY: not null, and of this type by the contract.
    Some(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&address) })
}

/// Every program with MPI has it.
const KNOWN: &CStr = c"PMPI_Win_create";

/// The paths of the loaded libraries whose names say that they are MPI.
fn paths() -> Vec<CString> {
    unsafe extern "C" fn look(library: *mut libc::dl_phdr_info, _: usize, list: *mut c_void) -> c_int {
        // SAFETY: dl_iterate_phdr gives a valid entry, whose name is a C string or null.
        let path = unsafe { (*library).dlpi_name };
        if path.is_null() {
            return 0;
        }
        // SAFETY: not null, and alive for the length of this call.
        let path = unsafe { CStr::from_ptr(path) };
        let name = path.to_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        if name.starts_with(b"libmpi") {
            // SAFETY: `list` is the one that the caller below waits for.
            unsafe { (*list.cast::<Vec<CString>>()).push(path.to_owned()) };
        }
        0
    }
    let mut paths: Vec<CString> = vec![];
    // SAFETY: `look` has the type that is asked for, and `paths` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut paths).cast()) };
    paths
}

/// Whether the program has the library of the standard ABI, which is called so by the standard.
fn has_standard() -> bool {
    paths().iter().any(|path| path.to_string_lossy().rsplit('/').next().is_some_and(is_standard))
}

fn is_standard(name: &str) -> bool {
    name.starts_with("libmpi_abi.")
}

/// The first of them that is MPI: Python loads MPI so that its symbols are not everybody's.
fn loaded() -> Option<*mut c_void> {
    paths().into_iter().find_map(|path| {
        // SAFETY: the name of a library that is loaded; it called us, so that it stays loaded.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        // SAFETY: a pointer to anything.
        let is_mpi = !library.is_null() && unsafe { symbol::<*const c_void>(library, KNOWN) }.is_some();
        is_mpi.then_some(library)
    })
}

/// Where the library's symbols are found.
fn library() -> *mut c_void {
    // SAFETY: a pointer to anything.
    let is_everybodys = unsafe { symbol::<*const c_void>(libc::RTLD_DEFAULT, KNOWN) }.is_some();
    match is_everybodys {
        true => libc::RTLD_DEFAULT,
        false => loaded().unwrap_or(libc::RTLD_DEFAULT),
    }
}

/// Where a symbol of this name lies, of the library or of the program.
#[must_use]
pub fn symbol_at(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: an address, of which nothing is asked.
    unsafe { symbol(libc::RTLD_DEFAULT, name).or_else(|| symbol(library(), name)) }
}

/// The library's own function of this name, which begins with PMPI.
///
/// # Panics
/// When it has none: then a program calls what its library does not have.
///
/// # Safety
/// `F` is a function pointer of the type that the function has.
#[must_use]
pub unsafe fn real<F: Copy>(name: &str) -> F {
    let name = CString::new(name).expect("a name");
    // SAFETY: by this function's contract.
    let found = unsafe { symbol(library(), &name) };
    found.unwrap_or_else(|| panic!("no {name:?} in this process: is an MPI library loaded?"))
}

macro_rules! library {
    (
        always { $($name:ident = $symbol:literal ($($kind:ty),* $(,)?);)* }
        maybe { $($maybe:ident = $maybe_symbol:literal ($($maybe_kind:ty),* $(,)?);)* }
    ) => {
        /// The library's functions that the shim calls.
        pub(crate) struct Library<A: Abi> {
            pub(crate) handles: Handles<A::Handle>,
            /// Predefined datatypes that were met.
            pub(crate) known: OnceLock<Serial<BTreeMap<(A::Handle, Gaps), &'static Layout<A::Handle>>>>,
            hides_handled: OnceLock<bool>,
            $(pub(crate) $name: unsafe extern "C" fn($($kind),*) -> c_int,)*
            $(pub(crate) $maybe: Option<unsafe extern "C" fn($($maybe_kind),*) -> c_int>,)*
        }

        impl<A: Abi> Library<A> {
            /// Finds them; `None` when this is no library of this ABI.
            pub(crate) fn find() -> Option<Self> {
                if A::IS_STANDARD != has_standard() {
                    return None;
                }
                let library = library();
                // SAFETY: the types are those of MPI's standard.
                unsafe {
                    Some(Self {
                        handles: A::handles(|name| symbol(library, name))?,
                        known: OnceLock::new(),
                        hides_handled: OnceLock::new(),
                        $($name: symbol(library, $symbol)?,)*
                        $($maybe: symbol(library, $maybe_symbol),)*
                    })
                }
            }
        }
    };
}

library! {
    always {

    initialized = c"PMPI_Initialized" (*mut c_int);
    finalized = c"PMPI_Finalized" (*mut c_int);
    query_thread = c"PMPI_Query_thread" (*mut c_int);
    comm_rank = c"PMPI_Comm_rank" (A::Handle, *mut c_int);
    comm_size = c"PMPI_Comm_size" (A::Handle, *mut c_int);
    comm_test_inter = c"PMPI_Comm_test_inter" (A::Handle, *mut c_int);
    comm_split = c"PMPI_Comm_split" (A::Handle, c_int, c_int, *mut A::Handle);
    comm_free = c"PMPI_Comm_free" (*mut A::Handle);
    comm_group = c"PMPI_Comm_group" (A::Handle, *mut A::Handle);
    comm_remote_group = c"PMPI_Comm_remote_group" (A::Handle, *mut A::Handle);
    comm_call_errhandler = c"PMPI_Comm_call_errhandler" (A::Handle, c_int);
    comm_get_errhandler = c"PMPI_Comm_get_errhandler" (A::Handle, *mut A::Handle);
    comm_create_errhandler = c"PMPI_Comm_create_errhandler" (
        unsafe extern "C" fn(*mut c_void, *mut c_int), *mut A::Handle,
    );
    comm_set_errhandler = c"PMPI_Comm_set_errhandler" (A::Handle, A::Handle);
    errhandler_free = c"PMPI_Errhandler_free" (*mut A::Handle);
    group_size = c"PMPI_Group_size" (A::Handle, *mut c_int);
    group_translate_ranks = c"PMPI_Group_translate_ranks" (A::Handle, c_int, *const c_int, A::Handle, *mut c_int);
    group_free = c"PMPI_Group_free" (*mut A::Handle);
    barrier = c"PMPI_Barrier" (A::Handle);
    bcast = c"PMPI_Bcast" (*mut c_void, c_int, A::Handle, c_int, A::Handle);
    allgather = c"PMPI_Allgather" (*const c_void, c_int, A::Handle, *mut c_void, c_int, A::Handle, A::Handle);
    allreduce = c"PMPI_Allreduce" (*const c_void, *mut c_void, c_int, A::Handle, A::Handle, A::Handle);
    iprobe = c"PMPI_Iprobe" (c_int, c_int, A::Handle, *mut c_int, *mut c_void);
    isend = c"PMPI_Isend" (*const c_void, c_int, A::Handle, c_int, c_int, A::Handle, *mut A::Handle);
    reduce_local = c"PMPI_Reduce_local" (*const c_void, *mut c_void, c_int, A::Handle, A::Handle);
    info_get = c"PMPI_Info_get" (A::Handle, *const c_char, c_int, *mut c_char, *mut c_int);
    type_size = c"PMPI_Type_size" (A::Handle, *mut c_int);
    type_get_extent = c"PMPI_Type_get_extent" (A::Handle, *mut Aint, *mut Aint);
    type_get_true_extent = c"PMPI_Type_get_true_extent" (A::Handle, *mut Aint, *mut Aint);
    type_get_envelope = c"PMPI_Type_get_envelope" (A::Handle, *mut c_int, *mut c_int, *mut c_int, *mut c_int);
    type_get_contents = c"PMPI_Type_get_contents" (
        A::Handle, c_int, c_int, c_int, *mut c_int, *mut Aint, *mut A::Handle,
    );
    type_free = c"PMPI_Type_free" (*mut A::Handle);
    win_create = c"PMPI_Win_create" (*mut c_void, Aint, c_int, A::Handle, A::Handle, *mut A::Handle);
    win_call_errhandler = c"PMPI_Win_call_errhandler" (A::Handle, c_int);
    win_get_errhandler = c"PMPI_Win_get_errhandler" (A::Handle, *mut A::Handle);
    win_flush = c"PMPI_Win_flush" (c_int, A::Handle);
    win_flush_all = c"PMPI_Win_flush_all" (A::Handle);
    win_lock_all = c"PMPI_Win_lock_all" (c_int, A::Handle);
    win_unlock_all = c"PMPI_Win_unlock_all" (A::Handle);
    win_sync = c"PMPI_Win_sync" (A::Handle);
    }
    maybe {
    type_get_envelope_c = c"PMPI_Type_get_envelope_c" (
        A::Handle, *mut Count, *mut Count, *mut Count, *mut Count, *mut c_int,
    );
    type_get_contents_c = c"PMPI_Type_get_contents_c" (
        A::Handle, Count, Count, Count, Count, *mut c_int, *mut Aint, *mut Count, *mut A::Handle,
    );
    }
}

impl<A: Abi> Library<A> {
    /// What a call of the library's came to.
    ///
    /// # Errors
    /// Its own, with the name of the call.
    pub(crate) fn check(what: &str, code: c_int) -> Result<(), Failure> {
        match code {
            0 => Ok(()),
            code => Err(Failure::new(code, format!("{what} failed with {code}"))),
        }
    }

    /// Calls the handler of errors of a window, and gives what the failed call returns then.
    ///
    /// # Safety
    /// It is the program's window.
    pub(crate) unsafe fn handle_of_window(&self, window: A::Handle, code: c_int) -> c_int {
        // SAFETY: by this function's contract.
        unsafe { self.handle(self.win_call_errhandler, self.win_get_errhandler, window, code) }
    }

    /// The same of a communicator.
    ///
    /// # Safety
    /// It is the program's communicator.
    pub(crate) unsafe fn handle_of_comm(&self, comm: A::Handle, code: c_int) -> c_int {
        // SAFETY: by this function's contract.
        unsafe { self.handle(self.comm_call_errhandler, self.comm_get_errhandler, comm, code) }
    }

    /// # Safety
    /// The functions are those for an object of this kind.
    unsafe fn handle(
        &self,
        call: unsafe extern "C" fn(A::Handle, c_int) -> c_int,
        find: unsafe extern "C" fn(A::Handle, *mut A::Handle) -> c_int,
        object: A::Handle,
        code: c_int,
    ) -> c_int {
        let mut handler = self.handles.errors_return;
        // SAFETY: by this function's contract, with a place for the answer; a handler that was found is this process's to free. It is
        // asked for before it is called, and may set another.
        unsafe {
            let is_own = find(object, &raw mut handler) == 0 && handler != self.handles.errors_return;
            call(object, code);
            if !is_own {
                return code;
            }
            (self.errhandler_free)(&raw mut handler);
            if self.hides_handled() { 0 } else { code }
        }
    }

    /// Whether a call of the library's returns success once a program's own handler of errors has returned. By the standard it returns the
    /// error, and MPICH 5.0 does not. It is tried once, by a send that is wrong and goes to nobody.
    fn hides_handled(&self) -> bool {
        static CALLED: OnceLock<()> = OnceLock::new();
        unsafe extern "C" fn note(_object: *mut c_void, _code: *mut c_int) {
            CALLED.get_or_init(|| ());
        }
        *self.hides_handled.get_or_init(|| {
            let Handles { comm_self, errors_return, byte, .. } = self.handles;
            let (mut comm, mut handler, mut request) = (comm_self, errors_return, byte);
            let nobody = A::NUMBERS.proc_null;
            // SAFETY: places for the answers; the communicator and the handler are our own.
            unsafe {
                let is_made = (self.comm_split)(comm_self, 0, 0, &raw mut comm) == 0
                    && (self.comm_create_errhandler)(note, &raw mut handler) == 0
                    && (self.comm_set_errhandler)(comm, handler) == 0;
                if !is_made {
                    return false;
                }
                let code = (self.isend)(ptr::null(), -1, byte, nobody, 0, comm, &raw mut request);
                (self.errhandler_free)(&raw mut handler);
                (self.comm_free)(&raw mut comm);
                code == 0 && CALLED.get().is_some()
            }
        })
    }

    /// The rank of this process in a communicator, and how many there are.
    ///
    /// # Errors
    /// The library's own.
    pub(crate) fn place(&self, comm: A::Handle) -> Result<(usize, usize), Failure> {
        let (mut rank, mut ranks) = (0, 0);
        // SAFETY: places for what is asked.
        unsafe {
            Self::check("MPI_Comm_rank", (self.comm_rank)(comm, &raw mut rank))?;
            Self::check("MPI_Comm_size", (self.comm_size)(comm, &raw mut ranks))?;
        }
        Ok((rank as usize, ranks as usize))
    }

    /// Whether a communicator joins two groups: ranks of the one then hear in a collective call what those of the other say.
    ///
    /// # Errors
    /// The library's own.
    pub(crate) fn is_between_groups(&self, comm: A::Handle) -> Result<bool, Failure> {
        let mut is_inter = 0;
        // SAFETY: a place for what is asked.
        let code = unsafe { (self.comm_test_inter)(comm, &raw mut is_inter) };
        Self::check("MPI_Comm_test_inter", code)?;
        Ok(is_inter != 0)
    }

    /// The ranks of a group, as a communicator counts them.
    ///
    /// # Errors
    /// The library's own.
    ///
    /// # Safety
    /// Both are the library's, or the program's own.
    pub(crate) unsafe fn ranks(&self, group: A::Handle, comm: A::Handle) -> Result<Vec<c_int>, Failure> {
        let (mut count, mut all) = (0, group);
        // SAFETY: places for what is asked, lists as long as is said; the group of the communicator is our own to free.
        unsafe {
            Self::check("MPI_Group_size", (self.group_size)(group, &raw mut count))?;
            let ours: Vec<c_int> = (0..count).collect();
            let mut theirs = vec![0; ours.len()];
            Self::check("MPI_Comm_group", (self.comm_group)(comm, &raw mut all))?;
            let code = (self.group_translate_ranks)(group, count, ours.as_ptr(), all, theirs.as_mut_ptr());
            (self.group_free)(&raw mut all);
            Self::check("MPI_Group_translate_ranks", code)?;
            Ok(theirs)
        }
    }

    /// A value that threads take turns at: by a lock, unless the program has said that one thread calls MPI. Where another may go
    /// on with what one has put past its caches, a lock with a fence before it is what brings that out.
    pub(crate) fn serial<T>(&self, value: T) -> Serial<T> {
        let (mut is_initialized, mut is_over, mut level) = (0, 0, A::NUMBERS.thread_serialized);
        // SAFETY: places for what is asked; a program with sessions alone has no level to ask for.
        let codes = unsafe {
            let codes = [(self.initialized)(&raw mut is_initialized), (self.finalized)(&raw mut is_over)];
            let asks = codes == [0, 0] && is_initialized != 0 && is_over == 0;
            [codes[0], codes[1], if asks { (self.query_thread)(&raw mut level) } else { 0 }]
        };
        match codes == [0; 3] && level < A::NUMBERS.thread_serialized {
            // SAFETY: what every level below says of a program's calls, and nothing else uses the value.
            true => unsafe { Serial::promised(value) },
            false => Serial::locked(value),
        }
    }

    /// Gives every rank what each says: as many bytes of all.
    ///
    /// # Errors
    /// The library's own.
    pub(crate) fn gather_all<T: Copy>(&self, own: &T, all: &mut [T], comm: A::Handle) -> Result<(), Failure> {
        let (bytes, byte) = (size_of::<T>() as c_int, self.handles.byte);
        // SAFETY: a collective call of all ranks, with a place for what each says.
        let code = unsafe {
            let into = all.as_mut_ptr().cast();
            (self.allgather)(ptr::from_ref(own).cast(), bytes, byte, into, bytes, byte, comm)
        };
        Self::check("MPI_Allgather", code)
    }

    /// The least of what all ranks of `comm` say: whether all can.
    pub(crate) fn all(&self, comm: A::Handle, can: bool) -> Result<bool, Failure> {
        let (ours, mut least) = (c_int::from(can), 0);
        let Handles { int, min, .. } = self.handles;
        // SAFETY: a collective call of all ranks, with places for one number.
        let code =
            unsafe { (self.allreduce)((&raw const ours).cast(), (&raw mut least).cast(), 1, int, min, comm) };
        Self::check("MPI_Allreduce", code)?;
        Ok(least == 1)
    }

    /// Lets the library go on with what it has to do, which other ranks may wait for.
    pub(crate) fn progress(&self, comm: A::Handle) {
        let _uncancelled = Uncancelled::begin();
        let mut found = 0;
        let numbers = &A::NUMBERS;
        let ignore = ptr::without_provenance_mut(numbers.status_ignore);
        // SAFETY: a probe of a communicator on which nothing is sent.
        let code =
            unsafe { (self.iprobe)(numbers.any_source, numbers.any_tag, comm, &raw mut found, ignore) };
        debug_assert_eq!(code, 0);
    }

    /// A request of a communicator that is complete.
    ///
    /// # Safety
    /// `request` may be written.
    pub(crate) unsafe fn done(&self, comm: A::Handle, request: *mut A::Handle) -> Result<(), Failure> {
        let byte = self.handles.byte;
        // SAFETY: nothing is sent to nobody; `request` by this function's contract.
        let code = unsafe { (self.isend)(ptr::null(), 0, byte, A::NUMBERS.proc_null, 0, comm, request) };
        Self::check("MPI_Isend", code)
    }
}
