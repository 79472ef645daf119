//! Writes down what each rank of a program sends, receives and waits for, when `POLDER_MPI_TRACE` names a folder: one file of each rank, which
//! `polder plan mpi` reads. docs/plan-programs.md describes the format.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::fmt::Arguments;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use crate::abi::{Abi, Count};
use crate::failure::say;
use crate::library::Library;

/// The variable that names the folder.
const VARIABLE: &str = "POLDER_MPI_TRACE";
/// The first line of a file.
const VERSION: &str = "polder-mpi-trace 1";

/// The trace of a process; nothing where none is asked for.
pub struct Tracer<A: Abi> {
    trace: OnceLock<Trace<A>>,
}

/// An ABI whose calls are written down.
pub trait Traced: Abi {
    /// The trace of this process.
    fn tracer() -> &'static Tracer<Self>;

    /// Begins it once MPI is initialised, where the environment asks for one.
    fn begin();
}

/// A trace that has begun.
pub struct Trace<A: Abi> {
    library: &'static Library<A>,
    /// When all ranks had begun.
    epoch: Instant,
    written: Mutex<Written<A>>,
}

struct Written<A: Abi> {
    file: BufWriter<File>,
    path: PathBuf,
    /// Whether no more is written: the trace has ended, or failed.
    closed: bool,
    /// The end of the last call, in nanoseconds.
    until: u64,
    comms: BTreeMap<A::Handle, Comm>,
    /// Libraries give several requests that are complete one handle.
    requests: BTreeMap<A::Handle, VecDeque<Request>>,
    next_comm: u32,
    next_request: u32,
}

#[derive(Clone)]
struct Comm {
    /// None where calls of all are not written: between two groups, and with processes that are not of MPI_COMM_WORLD.
    number: Option<u32>,
    /// Whom its messages go to and come from, as MPI_COMM_WORLD counts them: below 0 where it has no such process.
    ranks: Arc<[c_int]>,
}

struct Request {
    /// None of a message that a probe has received: its end is nothing new.
    number: Option<u32>,
    /// The ranks that may have sent it, of a receive.
    receive: Option<Arc<[c_int]>>,
}

/// A message as a call names it.
#[derive(Clone, Copy)]
pub struct Message<H> {
    /// Elements.
    pub count: Count,
    /// Of which type.
    pub kind: H,
    /// The other rank.
    pub rank: c_int,
    /// Its tag.
    pub tag: c_int,
    /// Where.
    pub comm: H,
}

impl<A: Abi> Default for Tracer<A> {
    fn default() -> Self {
        Self::new()
    }
}

impl<A: Abi> Tracer<A> {
    /// None.
    #[must_use]
    pub const fn new() -> Self {
        Self { trace: OnceLock::new() }
    }

    /// Begins, if the environment asks for it: once MPI is initialised, in all ranks.
    pub(crate) fn begin(&self, library: &'static Library<A>) {
        let Some(folder) = std::env::var_os(VARIABLE).filter(|it| !it.is_empty()) else { return };
        match Trace::begin(library, Path::new(&folder)) {
            Ok(trace) => drop(self.trace.set(trace)),
            Err(why) => say(&format!("{VARIABLE}: {why}; this rank is not traced")),
        }
    }

    /// Ends, before MPI does.
    pub(crate) fn end(&self) {
        let Some(trace) = self.trace.get() else { return };
        let now = trace.now();
        let mut written = trace.lock();
        written.line(format_args!("end {now}"));
        let flushed = written.file.flush();
        written.check(flushed);
        // Functions of the program that MPI_Finalize calls are no part of it.
        written.closed = true;
    }
}

/// The trace of this process.
pub(crate) fn of<A: Traced>() -> Option<&'static Trace<A>> {
    A::tracer().trace.get()
}

/// An empty file, new or of an earlier run. Whoever may write the folder could have put a link there, or a pipe that nobody reads.
fn created(path: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(path).map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP) => std::io::Error::other("it is a link, which is not followed"),
        _ => error,
    })?;
    if !file.metadata()?.is_file() {
        return Err(std::io::Error::other("it is no file"));
    }
    file.set_len(0)?;
    Ok(file)
}

/// A call of the library's, and what is written of it when it has succeeded.
#[inline]
pub fn traced<A: Traced>(real: impl FnOnce() -> c_int, written: impl FnOnce(&Trace<A>, Call)) -> c_int {
    let Some(trace) = of::<A>() else { return real() };
    let begin = trace.now();
    let code = real();
    if code == 0 {
        written(trace, Call { begin, end: trace.now() });
    }
    code
}

/// When a call began and ended, in nanoseconds.
#[derive(Clone, Copy)]
pub struct Call {
    begin: u64,
    end: u64,
}

impl<A: Abi> Trace<A> {
    fn begin(library: &'static Library<A>, folder: &Path) -> Result<Self, String> {
        let world = library.handles.comm_world;
        let (mut rank, mut size) = (0, 0);
        // SAFETY: MPI is initialised, and these are places for numbers.
        unsafe {
            (library.comm_rank)(world, &raw mut rank);
            (library.comm_size)(world, &raw mut size);
        }
        let path = folder.join(format!("rank-{rank}"));
        let file = std::fs::create_dir_all(folder).and_then(|()| created(&path));
        // SAFETY: all ranks make this call, also one whose file could not be made.
        unsafe { (library.barrier)(world) };
        let file = file.map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        let mut written = Written {
            file: BufWriter::new(file),
            path,
            closed: false,
            until: 0,
            comms: BTreeMap::new(),
            requests: BTreeMap::new(),
            next_comm: 0,
            next_request: 0,
        };
        written.line(format_args!("{VERSION}"));
        written.line(format_args!("rank {rank} {size} {}", host()));
        Ok(Self { library, epoch: Instant::now(), written: Mutex::new(written) })
    }

    fn now(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Written<A>> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bytes(&self, count: Count, kind: A::Handle) -> i64 {
        let mut size = 0;
        // SAFETY: the program's own type, and a place for a number.
        let code = unsafe { (self.library.type_size)(kind, &raw mut size) };
        if code == 0 { count * i64::from(size) } else { 0 }
    }

    /// The type of a byte.
    #[must_use]
    pub fn byte(&self) -> A::Handle {
        self.library.handles.byte
    }

    /// Whether this process has this rank of a communicator.
    #[must_use]
    pub fn is(&self, rank: c_int, comm: A::Handle) -> bool {
        let mut own = 0;
        // SAFETY: the program's own communicator, and a place for a number.
        unsafe { (self.library.comm_rank)(comm, &raw mut own) };
        own == rank
    }

    /// The ranks of a communicator, which is named when it is first seen. A message between two groups goes to the other one.
    fn comm(&self, written: &mut Written<A>, comm: A::Handle) -> Comm {
        if let Some(known) = written.comms.get(&comm) {
            return known.clone();
        }
        let library = self.library;
        let is_between_groups = library.is_between_groups(comm).unwrap_or(false);
        let find = if is_between_groups { library.comm_remote_group } else { library.comm_group };
        let mut group = comm;
        // SAFETY: the program's own communicator, and a place for its group, which is our own to free.
        let ranks = unsafe {
            find(comm, &raw mut group);
            let ranks = library.ranks(group, library.handles.comm_world).unwrap_or_default();
            (library.group_free)(&raw mut group);
            ranks
        };
        let is_named = !is_between_groups && ranks.iter().all(|rank| *rank >= 0);
        let named = Comm { number: is_named.then_some(written.next_comm), ranks: ranks.into() };
        if let Some(number) = named.number {
            written.next_comm += 1;
            let ranks: Vec<_> = named.ranks.iter().map(c_int::to_string).collect();
            written.line(format_args!("comm {number} {}", ranks.join(",")));
        }
        written.comms.insert(comm, named.clone());
        named
    }

    /// A send that the program waits for.
    pub fn send(&self, call: Call, it: Message<A::Handle>) {
        let bytes = self.bytes(it.count, it.kind);
        let mut written = self.lock();
        match world(&self.comm(&mut written, it.comm).ranks, it.rank) {
            Some(to) => written.call(call, format_args!("send {to} {} {bytes}", it.tag)),
            None => written.call(call, format_args!("other")),
        }
    }

    /// A send that has begun.
    pub fn begin_send(&self, call: Call, it: Message<A::Handle>, request: A::Handle) {
        let bytes = self.bytes(it.count, it.kind);
        let mut written = self.lock();
        let Some(to) = world(&self.comm(&mut written, it.comm).ranks, it.rank) else {
            return written.call(call, format_args!("other"));
        };
        let number = written.begun(request, None);
        written.call(call, format_args!("isend {to} {} {bytes} {number}", it.tag));
    }

    /// A message that has come.
    ///
    /// # Safety
    /// `status` is one of the library's, which it has filled in.
    pub unsafe fn receive(&self, call: Call, comm: A::Handle, status: *const c_void) {
        // SAFETY: by this function's contract.
        let (source, tag) = unsafe { sender::<A>(status, 0) };
        let mut written = self.lock();
        match world(&self.comm(&mut written, comm).ranks, source) {
            Some(from) => written.call(call, format_args!("receive {from} {tag}")),
            None => written.call(call, format_args!("other")),
        }
    }

    /// A receive that has begun.
    pub fn begin_receive(&self, call: Call, message: Message<A::Handle>, request: A::Handle) {
        let numbers = &A::NUMBERS;
        let mut written = self.lock();
        let comm = self.comm(&mut written, message.comm);
        if message.rank == numbers.proc_null {
            return written.call(call, format_args!("other"));
        }
        let from =
            if message.rank == numbers.any_source { Some(-1) } else { world(&comm.ranks, message.rank) };
        let Some(from) = from else {
            written.begun_unwritten(request);
            return written.call(call, format_args!("other"));
        };
        let tag = if message.tag == numbers.any_tag { -1 } else { message.tag };
        let number = written.begun(request, Some(comm.ranks));
        written.call(call, format_args!("ireceive {from} {tag} {number}"));
    }

    /// A receive of what a probe has received already; its request ends as others do.
    pub fn begin_matched(&self, call: Call, request: A::Handle) {
        let mut written = self.lock();
        written.begun_unwritten(request);
        written.call(call, format_args!("other"));
    }

    /// A request that nothing will wait for.
    pub fn free(&self, call: Call, request: A::Handle) {
        let mut written = self.lock();
        written.ended(request);
        written.call(call, format_args!("other"));
    }

    /// A send and a receive at once.
    ///
    /// # Safety
    /// As [`Trace::receive`].
    pub unsafe fn exchange(&self, call: Call, sent: Message<A::Handle>, status: *const c_void) {
        let bytes = self.bytes(sent.count, sent.kind);
        let at_once = Call { end: call.begin, ..call };
        {
            let mut written = self.lock();
            match world(&self.comm(&mut written, sent.comm).ranks, sent.rank) {
                Some(to) => written.call(at_once, format_args!("isend {to} {} {bytes} -1", sent.tag)),
                None => written.call(at_once, format_args!("other")),
            }
        }
        // SAFETY: by this function's contract.
        unsafe { self.receive(call, sent.comm, status) };
    }

    /// Requests that are complete: as they were before, each with its place among the statuses.
    ///
    /// # Safety
    /// `statuses` are the library's, which it has filled in for these places.
    pub unsafe fn wait(
        &self,
        call: Call,
        requests: impl IntoIterator<Item = (A::Handle, usize)>,
        statuses: *const c_void,
    ) {
        let mut written = self.lock();
        let mut call = call;
        let mut none = true;
        for (request, place) in requests {
            let Some(Request { number: Some(number), receive }) = written.ended(request) else { continue };
            none = false;
            // SAFETY: by this function's contract.
            let from = receive.map(|ranks| unsafe { (ranks, sender::<A>(statuses, place)) });
            match from.and_then(|(ranks, (source, tag))| Some((world(&ranks, source)?, tag))) {
                Some((from, tag)) => written.call(call, format_args!("wait {number} {from} {tag}")),
                None => written.call(call, format_args!("wait {number}")),
            }
            call.begin = call.end;
        }
        if none {
            written.call(call, format_args!("other"));
        }
    }

    /// A call of all ranks of a communicator; `bytes` are elements of a type.
    pub fn all(&self, call: Call, name: &str, bytes: (Count, A::Handle), root: c_int, comm: A::Handle) {
        let bytes = self.bytes(bytes.0, bytes.1);
        let mut written = self.lock();
        match self.comm(&mut written, comm).number {
            Some(comm) => written.call(call, format_args!("{name} {comm} {bytes} {root}")),
            None => written.call(call, format_args!("other")),
        }
    }

    /// A call of which only the time is known.
    pub fn other(&self, call: Call) {
        self.lock().call(call, format_args!("other"));
    }

    /// A communicator is gone: its handle may be another's next.
    pub fn forget(&self, comm: A::Handle) {
        self.lock().comms.remove(&comm);
    }
}

impl<A: Abi> Written<A> {
    fn line(&mut self, line: Arguments<'_>) {
        if !self.closed {
            let written = writeln!(self.file, "{line}");
            self.check(written);
        }
    }

    fn check(&mut self, written: std::io::Result<()>) {
        if let Err(error) = written
            && !std::mem::replace(&mut self.closed, true)
        {
            say(&format!(
                "{VARIABLE}: cannot write {}: {error}; the trace is not complete",
                self.path.display()
            ));
        }
    }

    fn call(&mut self, call: Call, what: Arguments<'_>) {
        // Calls of several threads overlap: the later one begins where the other has ended.
        let begin = call.begin.max(self.until);
        self.until = call.end.max(begin);
        let until = self.until;
        self.line(format_args!("{begin} {until} {what}"));
    }

    fn begun(&mut self, request: A::Handle, receive: Option<Arc<[c_int]>>) -> u32 {
        let number = self.next_request;
        self.next_request += 1;
        self.requests.entry(request).or_default().push_back(Request { number: Some(number), receive });
        number
    }

    /// A request whose end is nothing new.
    fn begun_unwritten(&mut self, request: A::Handle) {
        self.requests.entry(request).or_default().push_back(Request { number: None, receive: None });
    }

    fn ended(&mut self, request: A::Handle) -> Option<Request> {
        let all = self.requests.get_mut(&request)?;
        let found = all.pop_front();
        if all.is_empty() {
            self.requests.remove(&request);
        }
        found
    }
}

/// The rank of all of a rank of a communicator, where it has one.
fn world(ranks: &[c_int], rank: c_int) -> Option<c_int> {
    ranks.get(usize::try_from(rank).ok()?).copied().filter(|rank| *rank >= 0)
}

/// The source and the tag of a status.
///
/// # Safety
/// As many statuses of the library are there, and filled in.
unsafe fn sender<A: Abi>(statuses: *const c_void, place: usize) -> (c_int, c_int) {
    let at = place * A::STATUS.integers + A::STATUS.source;
    // SAFETY: by this function's contract; a status is so many integers.
    unsafe {
        let source = statuses.cast::<c_int>().add(at);
        (source.read(), source.add(1).read())
    }
}

/// Statuses of ours where the program wants none.
pub struct Statuses {
    own: Vec<c_int>,
    given: *mut c_void,
}

impl Statuses {
    /// The program's, or so many of ours while a trace needs them.
    #[must_use]
    pub fn new<A: Traced>(given: *mut c_void, count: usize) -> Self {
        let is_ignored = given.addr() == A::NUMBERS.status_ignore;
        let own = match is_ignored && of::<A>().is_some() {
            true => vec![0; count.max(1) * A::STATUS.integers],
            false => vec![],
        };
        Self { own, given }
    }

    /// Where the library writes them.
    pub const fn at(&mut self) -> *mut c_void {
        if self.own.is_empty() { self.given } else { self.own.as_mut_ptr().cast() }
    }
}

/// So many requests as they are before a call that ends some.
///
/// # Safety
/// `requests` has so many.
#[must_use]
pub unsafe fn before<A: Traced>(count: c_int, requests: *const A::Handle) -> Vec<A::Handle> {
    match (of::<A>().is_some(), usize::try_from(count)) {
        // SAFETY: by this function's contract.
        (true, Ok(count)) if count > 0 => unsafe { std::slice::from_raw_parts(requests, count) }.to_vec(),
        _ => vec![],
    }
}

/// What a rank's host is called: emulated hosts of one machine differ by their ids.
fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name: String = name.trim().chars().filter(|it| !it.is_whitespace()).collect();
    let mut host = if name.is_empty() { "localhost".to_owned() } else { name };
    if let Ok(id) = std::env::var("POLDER_HOST")
        && id.chars().all(|it| it.is_ascii_alphanumeric())
    {
        host.push('-');
        host.push_str(&id);
    }
    host
}

/// The calls that a trace is of, whatever counts are. They are the library's, and written down when a trace is asked for.
#[macro_export]
macro_rules! traced_calls {
    ($abi:ty) => {
        $crate::traced! { $abi;
            MPI_Init(argc: *mut c_int, argv: Sink) => begin;
            MPI_Init_thread(argc: *mut c_int, argv: Sink, required: c_int, provided: *mut c_int) => begin;
        }
        $crate::traced! { $abi;
            MPI_Barrier(comm: Handle) => |trace, call| {
                trace.all(call, "barrier", (0, trace.byte()), 0, comm)
            };
            MPI_Probe(source: c_int, tag: c_int, comm: Handle, status: Sink) => |trace, call| trace.other(call);
            MPI_Comm_free(comm: *mut Handle) where freed = {
                // SAFETY: by MPI's contract it is a communicator.
                unsafe { comm.read() }
            } => |trace, call| { trace.other(call); trace.forget(freed) };
            MPI_Comm_disconnect(comm: *mut Handle) where freed = {
                // SAFETY: by MPI's contract it is a communicator.
                unsafe { comm.read() }
            } => |trace, call| { trace.other(call); trace.forget(freed) };
            MPI_Mprobe(source: c_int, tag: c_int, comm: Handle, message: *mut Handle, status: Sink) statuses(status, 1) => |trace, call| {
                // SAFETY: the library has filled it in.
                unsafe { trace.receive(call, comm, status) }
            };
            MPI_Improbe(
                source: c_int, tag: c_int, comm: Handle, flag: *mut c_int, message: *mut Handle, status: Sink
            ) statuses(status, 1) => |trace, call| {
                // SAFETY: the library has filled both in, the status of a message alone.
                unsafe {
                    if flag.read() != 0 { trace.receive(call, comm, status) } else { trace.other(call) }
                }
            };
            MPI_Request_free(request: *mut Handle) where freed = {
                // SAFETY: by MPI's contract it is a request.
                unsafe { request.read() }
            } => |trace, call| trace.free(call, freed);
            MPI_Wait(request: *mut Handle, status: Sink) statuses(status, 1) before(1, request) => |trace, call| {
                // SAFETY: the library has filled it in.
                unsafe { trace.wait(call, before.iter().map(|it| (*it, 0)), status) }
            };
            MPI_Waitall(count: c_int, requests: *mut Handle, status: Sink) statuses(status, count) before(count, requests)
                => |trace, call| {
                // SAFETY: the library has filled them in.
                unsafe { trace.wait(call, before.iter().copied().zip(0..), status) }
            };
            MPI_Waitany(count: c_int, requests: *mut Handle, index: *mut c_int, status: Sink) statuses(status, 1) before(count, requests)
                => |trace, call| {
                // SAFETY: the library has filled both in.
                unsafe { trace.wait(call, $crate::trace::at(&before, index.read()).map(|it| (it, 0)), status) }
            };
            MPI_Waitsome(
                count: c_int, requests: *mut Handle, done: *mut c_int, indices: *mut c_int, status: Sink
            ) statuses(status, count) before(count, requests) => |trace, call| {
                // SAFETY: the library has filled all in, as many as it says.
                unsafe { trace.wait(call, $crate::trace::some(&before, done.read(), indices), status) }
            };
            MPI_Test(request: *mut Handle, flag: *mut c_int, status: Sink) statuses(status, 1) before(1, request)
                => |trace, call| {
                // SAFETY: the library has filled both in.
                unsafe {
                    let ended = if flag.read() != 0 { &before[..] } else { &[] };
                    trace.wait(call, ended.iter().map(|it| (*it, 0)), status)
                }
            };
            MPI_Testany(
                count: c_int, requests: *mut Handle, index: *mut c_int, flag: *mut c_int, status: Sink
            ) statuses(status, 1) before(count, requests) => |trace, call| {
                // SAFETY: the library has filled all in, the index and the status where one has ended.
                unsafe {
                    let ended = if flag.read() != 0 { $crate::trace::at(&before, index.read()) } else { None };
                    trace.wait(call, ended.map(|it| (it, 0)), status)
                }
            };
            MPI_Testsome(
                count: c_int, requests: *mut Handle, done: *mut c_int, indices: *mut c_int, status: Sink
            ) statuses(status, count) before(count, requests) => |trace, call| {
                // SAFETY: the library has filled all in, as many as it says.
                unsafe { trace.wait(call, $crate::trace::some(&before, done.read(), indices), status) }
            };
            MPI_Testall(count: c_int, requests: *mut Handle, flag: *mut c_int, status: Sink) statuses(status, count) before(count, requests)
                => |trace, call| {
                // SAFETY: the library has filled all in.
                unsafe {
                    let ended = if flag.read() != 0 { &before[..] } else { &[] };
                    trace.wait(call, ended.iter().copied().zip(0..), status)
                }
            };
        }
        $crate::traced_counts!($abi; c_int;
            MPI_Send MPI_Ssend MPI_Rsend MPI_Bsend MPI_Isend MPI_Issend MPI_Irsend MPI_Ibsend MPI_Recv MPI_Irecv MPI_Mrecv
            MPI_Imrecv MPI_Sendrecv MPI_Sendrecv_replace MPI_Bcast MPI_Reduce MPI_Allreduce MPI_Reduce_scatter_block MPI_Gather MPI_Scatter MPI_Allgather
            MPI_Alltoall);
    };
}

/// Those with large counts, for a library that has them too.
#[macro_export]
macro_rules! traced_large_counts {
    ($abi:ty) => {
        $crate::traced_counts!($abi; Count;
            MPI_Send_c MPI_Ssend_c MPI_Rsend_c MPI_Bsend_c MPI_Isend_c MPI_Issend_c MPI_Irsend_c MPI_Ibsend_c MPI_Recv_c
            MPI_Irecv_c MPI_Mrecv_c MPI_Imrecv_c MPI_Sendrecv_c MPI_Sendrecv_replace_c MPI_Bcast_c MPI_Reduce_c
            MPI_Allreduce_c MPI_Reduce_scatter_block_c MPI_Gather_c MPI_Scatter_c MPI_Allgather_c MPI_Alltoall_c);
    };
}

/// The calls whose counts are of a type.
#[doc(hidden)]
#[macro_export]
macro_rules! traced_counts {
    ($abi:ty; $count:ty;
        $send:ident $ssend:ident $rsend:ident $bsend:ident $isend:ident $issend:ident $irsend:ident $ibsend:ident $recv:ident
        $irecv:ident $mrecv:ident $imrecv:ident $sendrecv:ident $sendrecv_replace:ident $bcast:ident $reduce:ident $allreduce:ident $reduce_scatter:ident
        $gather:ident $scatter:ident $allgather:ident $alltoall:ident) => {
        $crate::traced_sends!($abi; $count; $send $ssend $rsend $bsend; $isend $issend $irsend $ibsend);
        $crate::traced! { $abi;
            $recv(into: Sink, count: $count, kind: Handle, rank: c_int, tag: c_int, comm: Handle, status: Sink) statuses(status, 1)
                // SAFETY: the library has filled it in.
                => |trace, call| unsafe { trace.receive(call, comm, status) };
            $irecv(
                into: Sink, count: $count, kind: Handle, rank: c_int, tag: c_int, comm: Handle, request: *mut Handle
            ) => |trace, call| {
                let message = $crate::trace::Message { count: count.into(), kind, rank, tag, comm };
                // SAFETY: the library has written it.
                trace.begin_receive(call, message, unsafe { request.read() })
            };
            $mrecv(into: Sink, count: $count, kind: Handle, message: *mut Handle, status: Sink)
                => |trace, call| trace.other(call);
            $imrecv(into: Sink, count: $count, kind: Handle, message: *mut Handle, request: *mut Handle)
                // SAFETY: the library has written it.
                => |trace, call| trace.begin_matched(call, unsafe { request.read() });
            $sendrecv_replace(
                bytes: Sink, count: $count, kind: Handle, rank: c_int, tag: c_int, source: c_int, into_tag: c_int,
                comm: Handle, status: Sink
            ) statuses(status, 1) => |trace, call| {
                let message = $crate::trace::Message { count: count.into(), kind, rank, tag, comm };
                // SAFETY: the library has filled it in.
                unsafe { trace.exchange(call, message, status) }
            };
            $sendrecv(
                from: Source, count: $count, kind: Handle, rank: c_int, tag: c_int, into: Sink, into_count: $count,
                into_kind: Handle, source: c_int, into_tag: c_int, comm: Handle, status: Sink
            ) statuses(status, 1) => |trace, call| {
                let message = $crate::trace::Message { count: count.into(), kind, rank, tag, comm };
                // SAFETY: the library has filled it in.
                unsafe { trace.exchange(call, message, status) }
            };
            $bcast(bytes: Sink, count: $count, kind: Handle, root: c_int, comm: Handle)
                => |trace, call| trace.all(call, "broadcast", (count.into(), kind), root, comm);
            $reduce(from: Source, into: Sink, count: $count, kind: Handle, op: Handle, root: c_int, comm: Handle)
                => |trace, call| trace.all(call, "reduce", (count.into(), kind), root, comm);
            $allreduce(from: Source, into: Sink, count: $count, kind: Handle, op: Handle, comm: Handle)
                => |trace, call| trace.all(call, "all-reduce", (count.into(), kind), 0, comm);
            $reduce_scatter(from: Source, into: Sink, count: $count, kind: Handle, op: Handle, comm: Handle)
                => |trace, call| trace.all(call, "reduce-scatter", (count.into(), kind), 0, comm);
            $gather(
                from: Source, count: $count, kind: Handle, into: Sink, into_count: $count, into_kind: Handle,
                root: c_int, comm: Handle
            ) => |trace, call| {
                let own = if trace.is(root, comm) { (into_count.into(), into_kind) } else { (count.into(), kind) };
                trace.all(call, "gather", own, root, comm)
            };
            $scatter(
                from: Source, count: $count, kind: Handle, into: Sink, into_count: $count, into_kind: Handle,
                root: c_int, comm: Handle
            ) => |trace, call| {
                let own = if trace.is(root, comm) { (count.into(), kind) } else { (into_count.into(), into_kind) };
                trace.all(call, "scatter", own, root, comm)
            };
            $allgather(
                from: Source, count: $count, kind: Handle, into: Sink, into_count: $count, into_kind: Handle, comm: Handle
            ) => |trace, call| trace.all(call, "all-gather", (into_count.into(), into_kind), 0, comm);
            $alltoall(
                from: Source, count: $count, kind: Handle, into: Sink, into_count: $count, into_kind: Handle, comm: Handle
            ) => |trace, call| trace.all(call, "all-to-all", (into_count.into(), into_kind), 0, comm);
        }
    };
}

/// Sends of every mode.
#[doc(hidden)]
#[macro_export]
macro_rules! traced_sends {
    ($abi:ty; $count:ty; $($send:ident)*; $($isend:ident)*) => {
        $crate::traced! { $abi;
            $($send(from: Source, count: $count, kind: Handle, rank: c_int, tag: c_int, comm: Handle) => |trace, call| {
                trace.send(call, $crate::trace::Message { count: count.into(), kind, rank, tag, comm })
            };)*
            $($isend(
                from: Source, count: $count, kind: Handle, rank: c_int, tag: c_int, comm: Handle, request: *mut Handle
            ) => |trace, call| {
                let message = $crate::trace::Message { count: count.into(), kind, rank, tag, comm };
                // SAFETY: the library has written it.
                trace.begin_send(call, message, unsafe { request.read() })
            };)*
        }
    };
}

/// Calls of the library's that are written down.
#[doc(hidden)]
#[macro_export]
macro_rules! traced {
    ($abi:ty;) => {};
    ($abi:ty; $call:ident($($argument:ident: $kind:ty),* $(,)?) => begin; $($rest:tt)*) => {
        /// The library's own; a trace begins with it.
        #[unsafe(no_mangle)]
        #[expect(non_snake_case, reason = "MPI's own name")]
        pub(crate) unsafe extern "C" fn $call($($argument: $kind),*) -> c_int {
            let code = $crate::real!($call($($argument: $kind),*))();
            if code == 0 {
                <$abi as $crate::trace::Traced>::begin();
            }
            code
        }
        $crate::traced! { $abi; $($rest)* }
    };
    ($abi:ty; $call:ident($($argument:ident: $kind:ty),* $(,)?)
        $(where $before:ident = $value:block)? => |$trace:ident, $at:ident| $body:expr; $($rest:tt)*) => {
        /// The library's own, written down.
        #[unsafe(no_mangle)]
        #[expect(non_snake_case, reason = "MPI's own name")]
        pub(crate) unsafe extern "C" fn $call($($argument: $kind),*) -> c_int {
            $(let $before = $value;)?
            let real = $crate::real!($call($($argument: $kind),*));
            $crate::trace::traced::<$abi>(real, |$trace, $at| $body)
        }
        $crate::traced! { $abi; $($rest)* }
    };
    ($abi:ty; $call:ident($($argument:ident: $kind:ty),* $(,)?) statuses($status:ident, $count:tt)
        $($before:ident($number:tt, $requests:ident))? => |$trace:ident, $at:ident| $body:expr; $($rest:tt)*) => {
        /// The library's own, written down.
        #[unsafe(no_mangle)]
        #[expect(non_snake_case, reason = "MPI's own name")]
        pub(crate) unsafe extern "C" fn $call($($argument: $kind),*) -> c_int {
            // SAFETY: by MPI's contract there are so many requests.
            $(let $before = unsafe { $crate::trace::before::<$abi>($number, $requests) };)?
            let mut own = $crate::trace::Statuses::new::<$abi>($status, usize::try_from($count).unwrap_or(0));
            let $status = own.at();
            let real = $crate::real!($call($($argument: $kind),*));
            $crate::trace::traced::<$abi>(real, |$trace, $at| $body)
        }
        $crate::traced! { $abi; $($rest)* }
    };
}

/// The request at an index, which libraries give as a number below 0 when there is none.
#[doc(hidden)]
#[must_use]
pub fn at<H: Copy>(before: &[H], index: c_int) -> Option<H> {
    before.get(usize::try_from(index).ok()?).copied()
}

/// The requests that have ended, of so many indices, each with its place among them.
///
/// # Safety
/// `indices` has so many, where it is a number above 0.
#[doc(hidden)]
pub unsafe fn some<H: Copy>(
    before: &[H],
    done: c_int,
    indices: *const c_int,
) -> impl Iterator<Item = (H, usize)> {
    let ended = move |place: usize| {
        // SAFETY: by this function's contract.
        let index = unsafe { indices.add(place).read() };
        Some((at(before, index)?, place))
    };
    (0..done.max(0) as usize).filter_map(ended)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_written_into_a_file_and_through_no_link() {
        let folder = std::env::temp_dir().join(format!("polder-trace-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let (file, link) = (folder.join("rank-0"), folder.join("rank-1"));
        std::fs::write(&file, "of an earlier run").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let refused = created(&link).unwrap_err().to_string();
        let kept = std::fs::read(&file).unwrap();
        let emptied = created(&file).and_then(|file| file.metadata()).map(|it| it.len());
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(
            (refused.as_str(), kept.as_slice()),
            ("it is a link, which is not followed", &b"of an earlier run"[..])
        );
        assert_eq!(emptied.unwrap(), 0);
    }
}
