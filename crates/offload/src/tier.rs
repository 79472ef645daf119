//! A tier that is a file: read and written by direct I/O that overlaps with computation, never by page faults.
//!
//! An mmapped file, or one that is read without `O_DIRECT`, lies in the page cache, which is DRAM. So bytes go between
//! the device and a [`Buffer`] of the caller's, on a few threads of the tier's own; a [`PendingTransfer`] gives the buffer back.

use std::collections::VecDeque;
use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

use polder_mem::{forks, threads};

use crate::buffer::{Buffer, PAGE};
use crate::error::TierError;

/// Threads of a tier: enough for a disk to have several requests at once.
const THREADS: usize = 4;

/// Bytes of the stack of each.
const STACK: usize = 128 << 10;

/// Bytes that a transfer has at best: long enough that a disk streams.
pub const TRANSFER_BYTES: usize = 2 << 20;

/// A file without a name in a folder, of a fixed size; its space is the disk's again when the process ends.
#[derive(Debug)]
pub struct TierFile {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    /// Of the process that has the threads.
    forks: u32,
    file: File,
    folder: PathBuf,
    size: u64,
    /// Whether the disk had every byte of it from the beginning on.
    is_reserved: bool,
    queue: Mutex<Queue>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    requests: VecDeque<Request>,
    closed: bool,
}

#[derive(Debug)]
struct Request {
    write: bool,
    offset: u64,
    bytes: usize,
    buffer: Buffer,
    reply: Sender<Result<Buffer, TierError>>,
}

/// A read or a write on its way.
#[derive(Debug)]
pub struct PendingTransfer {
    /// A child of the process that began it leaves it as it is: what another thread was doing then never ends there.
    done: ManuallyDrop<Receiver<Result<Buffer, TierError>>>,
    shared: Arc<Shared>,
}

impl PendingTransfer {
    /// Waits for the end, and gives the buffer back.
    ///
    /// # Errors
    /// [`TierError`] when not all bytes went, and in a child of the process that began it.
    ///
    /// # Panics
    /// When the tier's thread has panicked.
    pub fn wait(self) -> Result<Buffer, TierError> {
        self.shared.check_process()?;
        self.done.recv().expect("a tier answers every request before it ends")
    }

    /// The buffer, when the transfer has ended; otherwise the transfer.
    ///
    /// # Errors
    /// As [`Self::wait`].
    pub fn poll(self) -> Result<Result<Buffer, Self>, TierError> {
        self.shared.check_process()?;
        match self.done.try_recv() {
            Ok(done) => done.map(Ok),
            Err(_) => Ok(Err(self)),
        }
    }
}

impl Drop for PendingTransfer {
    fn drop(&mut self) {
        if self.shared.is_own() {
            // SAFETY: nothing uses it after this.
            unsafe { ManuallyDrop::drop(&mut self.done) };
        }
    }
}

impl TierFile {
    /// Makes a tier of `size` bytes, rounded up to pages, in a folder. The disk's space is reserved at once.
    ///
    /// # Errors
    /// [`TierError`] when the folder lies in memory, takes no direct I/O or has no room.
    pub fn create(folder: &Path, size: u64) -> Result<Self, TierError> {
        let size = size.next_multiple_of(PAGE as u64);
        let file = open(folder)?;
        reserve(&file, folder, size)?;
        Self::over(file, folder, size)
    }

    pub(crate) fn over(file: File, folder: &Path, size: u64) -> Result<Self, TierError> {
        let (queue, wake) = (Mutex::default(), Condvar::new());
        let is_reserved = blocks(&file).is_some_and(|blocks| blocks >= size);
        let (forks, folder) = (forks(), folder.into());
        let shared = Arc::new(Shared { forks, file, folder, size, is_reserved, queue, wake });
        let serve = || {
            let shared = Arc::clone(&shared);
            // A stack counts as memory of this process, and these threads need next to none.
            threads::start(Builder::new().name("polder-tier".to_owned()).stack_size(STACK), move || {
                shared.serve()
            })
        };
        match (0..THREADS).map(|_| serve()).collect::<io::Result<_>>() {
            Ok(threads) => Ok(Self { shared, threads }),
            Err(source) => {
                // Those that run end when they find the tier closed.
                shared.lock().closed = true;
                shared.wake.notify_all();
                Err(TierError::NoMemory { bytes: THREADS * STACK, source })
            }
        }
    }

    /// Bytes of the tier.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.shared.size
    }

    /// Starts to write the first `bytes` bytes of `buffer` at `offset`, both whole pages.
    ///
    /// # Errors
    /// [`TierError::Range`] when they do not fit, [`TierError::Forked`] in a child of the process that made the tier.
    pub fn write(&self, offset: u64, bytes: usize, buffer: Buffer) -> Result<PendingTransfer, TierError> {
        self.submit(true, offset, bytes, buffer)
    }

    /// Starts to read `bytes` bytes at `offset`, both whole pages, into the beginning of `buffer`.
    ///
    /// # Errors
    /// [`TierError::Range`] when they are not there, and as [`Self::write`].
    pub fn read(&self, offset: u64, bytes: usize, buffer: Buffer) -> Result<PendingTransfer, TierError> {
        self.submit(false, offset, bytes, buffer)
    }

    /// Cuts the file, as nothing but a foreign program does.
    #[cfg(test)]
    pub(crate) fn cut(&self, ends: u64) {
        self.shared.file.set_len(ends).expect("cut");
    }

    fn submit(
        &self,
        write: bool,
        offset: u64,
        bytes: usize,
        buffer: Buffer,
    ) -> Result<PendingTransfer, TierError> {
        self.shared.check_process()?;
        let Shared { folder, size, .. } = &*self.shared;
        let is_inside =
            offset.checked_add(bytes as u64).is_some_and(|end| end <= *size) && bytes <= buffer.len();
        if !is_inside || !offset.is_multiple_of(PAGE as u64) || !bytes.is_multiple_of(PAGE) {
            return Err(TierError::Range { path: folder.clone(), offset, bytes, size: *size });
        }
        let (reply, done) = channel();
        self.shared.lock().requests.push_back(Request { write, offset, bytes, buffer, reply });
        self.shared.wake.notify_one();
        Ok(PendingTransfer { done: ManuallyDrop::new(done), shared: Arc::clone(&self.shared) })
    }
}

impl Drop for TierFile {
    fn drop(&mut self) {
        if !self.shared.is_own() {
            // A child has no such threads, and one of them may have held the lock.
            std::mem::forget(std::mem::take(&mut self.threads));
            return;
        }
        self.shared.lock().closed = true;
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            // A panic there was told to the waiter.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Whether this process has the threads.
    fn is_own(&self) -> bool {
        self.forks == forks()
    }

    fn check_process(&self) -> Result<(), TierError> {
        match self.is_own() {
            true => Ok(()),
            false => Err(TierError::Forked { path: self.folder.clone() }),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What each thread does until the tier is dropped and its queue is empty.
    fn serve(&self) {
        loop {
            let mut queue = self.lock();
            let request = loop {
                match queue.requests.pop_front() {
                    Some(request) => break request,
                    None if queue.closed => return,
                    None => queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(queue);
            let Request { write, offset, bytes, mut buffer, reply } = request;
            let done = match write {
                true => self.write_all(offset, &buffer[..bytes]),
                false => self.read_all(offset, &mut buffer[..bytes]),
            };
            // A caller that has dropped the transfer wants no answer.
            let _ = reply.send(done.map(|()| buffer));
        }
    }

    fn write_all(&self, offset: u64, all: &[u8]) -> Result<(), TierError> {
        let mut done = 0;
        while done < all.len() {
            let source = match self.file.write_at(&all[done..], offset + done as u64) {
                Ok(0) => io::ErrorKind::WriteZero.into(),
                Ok(bytes) => {
                    done += bytes;
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => error,
            };
            let (path, offset, bytes) = (self.folder.clone(), offset + done as u64, all.len() - done);
            return Err(match source.raw_os_error() {
                Some(libc::ENOSPC | libc::EDQUOT) => {
                    TierError::Full { path, bytes: bytes as u64, free: free(&self.folder) }
                }
                _ => TierError::Write { path, offset, bytes, source },
            });
        }
        Ok(())
    }

    fn read_all(&self, offset: u64, all: &mut [u8]) -> Result<(), TierError> {
        let mut done = 0;
        while done < all.len() {
            let (path, at, bytes) = (|| self.folder.clone(), offset + done as u64, all.len() - done);
            match self.file.read_at(&mut all[done..], at) {
                Ok(0) => return Err(TierError::Truncated { path: path(), ends: at, bytes }),
                Ok(bytes) => done += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // A file cut inside a page makes the next read unaligned.
                Err(source) => {
                    let ends = self.file.metadata().map_or(u64::MAX, |it| it.len());
                    return Err(match ends < at + bytes as u64 {
                        true => TierError::Truncated { path: path(), ends, bytes },
                        false => TierError::Read { path: path(), offset: at, bytes, source },
                    });
                }
            }
        }
        // Looked at afterwards: what was cut and then written past reads as zeros.
        match blocks(&self.file) {
            Some(blocks) if self.is_reserved && blocks < self.size => {
                Err(TierError::Holes { path: self.folder.clone(), blocks, size: self.size })
            }
            _ => Ok(()),
        }
    }
}

/// Bytes that the disk has of a file.
fn blocks(file: &File) -> Option<u64> {
    file.metadata().ok().map(|it| it.blocks().saturating_mul(512))
}

/// A file without a name, so that a killed process leaves nothing.
fn open(folder: &Path) -> Result<File, TierError> {
    let wrong = |source: io::Error| TierError::Folder { path: folder.into(), source };
    if status(folder).map_err(wrong)?.1 == libc::TMPFS_MAGIC {
        return Err(TierError::InMemory { path: folder.into() });
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    match options.custom_flags(libc::O_TMPFILE | libc::O_DIRECT).open(folder) {
        Err(source) if source.raw_os_error() == Some(libc::EINVAL) => {
            Err(TierError::Indirect { path: folder.into(), source })
        }
        opened => opened.map_err(wrong),
    }
}

/// Reserves the file's space on its disk.
fn reserve(file: &File, folder: &Path, size: u64) -> Result<(), TierError> {
    // Asked for before, because a reservation that fails has taken the rest of the disk for a while.
    let free = free(folder);
    let full = || TierError::Full { path: folder.into(), bytes: size, free };
    if size > free {
        return Err(full());
    }
    // SAFETY: the descriptor is open; the call takes numbers only.
    let rc = unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, size.cast_signed()) };
    if rc == 0 || size == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => Err(full()),
        // Without reservations a full disk is found by the write that it refuses.
        Some(libc::EOPNOTSUPP) => {
            file.set_len(size).map_err(|source| TierError::Folder { path: folder.into(), source })
        }
        _ => Err(TierError::Folder { path: folder.into(), source: error }),
    }
}

/// Bytes that this user may still write in a folder.
pub(crate) fn free(folder: &Path) -> u64 {
    status(folder).map_or(0, |(free, _)| free)
}

/// The free bytes and the kind of a file system.
fn status(folder: &Path) -> io::Result<(u64, libc::c_long)> {
    let path = CString::new(folder.as_os_str().as_bytes()).map_err(io::Error::other)?;
    // SAFETY: an all-zero statfs is a valid value of the C struct.
    let mut status: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: `path` is a C string, and `status` is live for the kernel to fill.
    match unsafe { libc::statfs(path.as_ptr(), &raw mut status) } {
        0 => Ok((status.f_bavail.saturating_mul(status.f_bsize.cast_unsigned()), status.f_type)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// What a folder's disk has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DiskRates {
    /// Bytes that are free.
    pub free: u64,
    /// Bytes a second that are read.
    pub read: f64,
    /// Bytes a second that are written.
    pub write: f64,
}

/// What a folder's disk reads and writes a second by direct I/O, several transfers at once: medians of `rounds`.
///
/// # Errors
/// As [`TierFile::create`], and when a transfer fails.
pub fn disk_rates(folder: &Path, bytes: usize, rounds: usize) -> Result<DiskRates, TierError> {
    let count = bytes.div_ceil(TRANSFER_BYTES).max(1);
    let tier = TierFile::create(folder, (count * TRANSFER_BYTES) as u64)?;
    let mut idle: Vec<Buffer> =
        (0..2 * THREADS).map(|_| Buffer::new(TRANSFER_BYTES)).collect::<Result<_, _>>()?;
    // Pages that are zero everywhere may be stored as a note.
    for (index, buffer) in idle.iter_mut().enumerate() {
        buffer
            .iter_mut()
            .zip(0_u32..)
            .for_each(|(byte, at)| *byte = (at.wrapping_mul(2_654_435_761) >> 13) as u8 ^ index as u8);
    }
    let mut rates = [vec![], vec![]];
    for _ in 0..rounds.max(1) {
        for (rates, write) in rates.iter_mut().zip([false, true]).rev() {
            let begin = Instant::now();
            let mut under_way = VecDeque::new();
            for index in 0..count {
                let buffer = match idle.pop() {
                    Some(buffer) => buffer,
                    None => under_way
                        .pop_front()
                        .map(PendingTransfer::wait)
                        .expect("every buffer is under way")?,
                };
                under_way.push_back(tier.submit(
                    write,
                    (index * TRANSFER_BYTES) as u64,
                    TRANSFER_BYTES,
                    buffer,
                )?);
            }
            for transfer in under_way {
                idle.push(transfer.wait()?);
            }
            rates.push((count * TRANSFER_BYTES) as f64 / begin.elapsed().as_secs_f64());
        }
    }
    let [read, write] = rates.map(|mut rates| {
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    });
    drop(tier);
    Ok(DiskRates { free: self::free(folder), read, write })
}

#[cfg(test)]
mod tests {
    use polder_mem::testing::{Child, Ended};

    use super::*;
    use crate::testing::{disk, full};

    fn pattern(seed: u8) -> Buffer {
        let mut buffer = Buffer::new(2 * PAGE).expect("two pages");
        buffer.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at as u8).wrapping_mul(31) ^ seed);
        buffer
    }

    #[test]
    fn what_was_written_is_read_again_though_many_transfers_overlap() {
        let tier = TierFile::create(&disk(), 64 * 2 * PAGE as u64 - 1).expect("a tier");
        assert_eq!(tier.size(), 128 * PAGE as u64);
        let place = |index: u8| u64::from(index) * 2 * PAGE as u64;
        let written: Vec<_> = (0..64)
            .map(|index| tier.write(place(index), 2 * PAGE, pattern(index)).expect("inside"))
            .collect();
        for transfer in written {
            transfer.wait().expect("written");
        }
        let blank = || Buffer::new(2 * PAGE).expect("two pages");
        let read: Vec<_> = (0..64)
            .rev()
            .map(|index| (index, tier.read(place(index), 2 * PAGE, blank()).expect("inside")))
            .collect();
        for (index, transfer) in read {
            assert!(*transfer.wait().expect("read") == *pattern(index), "{index}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "reads /proc")]
    fn its_threads_take_none_of_the_signals_of_a_program() {
        let _tier = TierFile::create(&disk(), PAGE as u64).expect("a tier");
        let mut seen = 0;
        // A thread gives itself its name.
        while seen < THREADS {
            std::thread::yield_now();
            seen = 0;
            for task in std::fs::read_dir("/proc/self/task").expect("it") {
                // A thread of another test may have ended.
                let status = std::fs::read_to_string(task.expect("one").path().join("status"));
                let status = status.unwrap_or_default();
                if status.starts_with("Name:\tpolder-tier\n") {
                    let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:\t"));
                    let blocked = u64::from_str_radix(blocked.expect("a mask"), 16).expect("bits");
                    let asked = [libc::SIGTERM, libc::SIGUSR1, libc::SIGALRM];
                    assert!(asked.iter().all(|signal| blocked >> (signal - 1) & 1 == 1), "{blocked:x}");
                    seen += 1;
                }
            }
        }
    }

    #[test]
    fn a_transfer_outside_the_tier_or_its_buffer_is_refused() {
        let tier = TierFile::create(&disk(), 4 * PAGE as u64).expect("a tier");
        for (offset, bytes) in
            [(3 * PAGE, 2 * PAGE), (1, PAGE), (0, 7), (0, 3 * PAGE), (usize::MAX - PAGE + 1, PAGE)]
        {
            let said = tier.read(offset as u64, bytes, pattern(0)).expect_err("refused").to_string();
            assert!(said.starts_with(&format!("[{offset}, +{bytes}) is no range")), "{said}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "forks")]
    fn a_forked_child_is_told_of_transfers_of_its_parent_and_may_drop_them() {
        let tier = TierFile::create(&disk(), 128 * PAGE as u64).expect("a tier");
        let write = |index: u64| tier.write(index * 2 * PAGE as u64, 2 * PAGE, pattern(0)).expect("inside");
        let mut pending: Vec<_> = (0..64).map(write).collect();
        let mut child = Child::fork(|| {
            let said = pending.pop().expect("one").wait().expect_err("forked").to_string();
            assert!(
                said.ends_with("belongs to the process that forked this one; place anew in this process")
            );
            assert!(matches!(tier.write(0, PAGE, pattern(0)), Err(TierError::Forked { .. })));
            drop((pending, tier));
        });
        assert_eq!(child.wait(), Ended::Exited(0));
    }

    #[test]
    fn a_file_that_was_cut_is_said_to_be() {
        let tier = TierFile::create(&disk(), 4 * PAGE as u64).expect("a tier");
        for ends in [3 * PAGE as u64, 2 * PAGE as u64 + 100, 0] {
            tier.cut(ends);
            let said = tier.read(2 * PAGE as u64, 2 * PAGE, pattern(0)).expect("inside").wait();
            let said = said.expect_err("cut").to_string();
            assert!(said.contains("something has truncated it"), "{ends}: {said}");
        }
    }

    #[test]
    fn a_file_that_was_cut_and_written_past_is_said_to_have_holes() {
        let tier = TierFile::create(&disk(), 4 * PAGE as u64).expect("a tier");
        if !tier.shared.is_reserved {
            eprintln!("skipped: this file system does not say what it has of a file");
            return;
        }
        tier.write(0, 4 * PAGE, Buffer::new(4 * PAGE).expect("pages"))
            .expect("inside")
            .wait()
            .expect("written");
        tier.cut(0);
        tier.write(2 * PAGE as u64, 2 * PAGE, pattern(0)).expect("inside").wait().expect("written");
        let refusal =
            tier.read(0, 2 * PAGE, pattern(0)).expect("inside").wait().expect_err("zeros").to_string();
        assert!(
            refusal.contains("the disk has 8192 bytes of this file of 16384; something has truncated it"),
            "{refusal}"
        );
    }

    #[test]
    fn a_full_disk_is_said_to_be_full_before_and_while_it_is_written() {
        let said = TierFile::create(&disk(), 1 << 50).expect_err("a pebibyte").to_string();
        assert!(said.contains(&format!("{} bytes do not fit on this disk, ", 1_u64 << 50)), "{said}");
        let said = full(4 * PAGE as u64)
            .write(0, PAGE, pattern(0))
            .expect("inside")
            .wait()
            .expect_err("full")
            .to_string();
        assert!(said.contains("4096 bytes do not fit on this disk, "), "{said}");
    }

    #[test]
    fn memory_and_missing_folders_are_no_tiers() {
        let said = TierFile::create(Path::new("/dev/shm"), 1).expect_err("tmpfs").to_string();
        assert!(said.starts_with("/dev/shm: this folder lies in memory"), "{said}");
        let said = TierFile::create(Path::new("/nowhere/at/all"), 1).expect_err("missing").to_string();
        assert!(said.starts_with("/nowhere/at/all: no file can be made in this folder: "), "{said}");
    }

    #[test]
    fn a_disk_has_a_bandwidth() {
        let DiskRates { free, read, write } = disk_rates(&disk(), 8 << 20, 1).expect("measured");
        assert!(free > 0 && read > 0.0 && write > 0.0);
    }
}
