//! One range of virtual addresses for one object, whose pieces lie in different tiers: a tensor that is striped stays contiguous.
//!
//! A range takes as many bytes as it was asked for, up to the end of a page. A piece is bound to a NUMA node, or is memory of a
//! dax device that is mapped in its place. The kernel is asked where the pages lie.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use polder_mem::{MemoryFile, RegionKind, bind_memory};

use crate::buffer::{HUGE_PAGE, PAGE};
use crate::error::TierError;
use crate::numa;
use crate::tier::free;

/// Pages that belong to this range alone; unmapped when dropped. It begins at a huge page, so that it is made of them as far
/// as they go.
///
/// What uses the address decides when it is read and written.
#[derive(Debug)]
pub struct Range {
    at: NonNull<u8>,
    bytes: usize,
    /// In the order of where they begin.
    mapped: Vec<Mapped>,
}

/// Memory of a device, or of a file that lies in memory, in a piece of a range.
#[derive(Debug)]
struct Mapped {
    begin: usize,
    bytes: usize,
    path: PathBuf,
    file: MemoryFile,
    offset: u64,
}

/// A tier of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A NUMA node.
    Node(usize),
    /// A dax device, or a file in memory.
    Device(PathBuf),
}

/// Where pages lie.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Location {
    /// On a NUMA node.
    Node(usize),
    /// In a dax device, or a file in memory.
    Mapped(PathBuf),
    /// Nowhere: never touched.
    Untouched,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(node) => write!(f, "node {node}"),
            Self::Mapped(path) => path.display().fmt(f),
            Self::Untouched => f.write_str("not touched"),
        }
    }
}

// SAFETY: the pages belong to no thread, and a range hands out their address, and their words where it is borrowed alone.
unsafe impl Send for Range {}
// SAFETY: as above.
unsafe impl Sync for Range {}

impl Range {
    /// Zeroed pages for `bytes` bytes: up to the end of the last page, and no more.
    ///
    /// # Errors
    /// [`TierError::NoMemory`] when the kernel maps no more.
    pub fn new(bytes: usize) -> Result<Self, TierError> {
        let no_memory = |source| TierError::NoMemory { bytes, source };
        let too_many = || no_memory(io::ErrorKind::OutOfMemory.into());
        let bytes = bytes.max(1).checked_next_multiple_of(PAGE).ok_or_else(too_many)?;
        // Longer by a huge page, and cut to begin at one: khugepaged makes none that begins before a mapping.
        let reserved = bytes.checked_add(HUGE_PAGE).ok_or_else(too_many)?;
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that is there.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), reserved, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(no_memory(io::Error::last_os_error()));
        }
        let before = start.addr().wrapping_neg() % HUGE_PAGE;
        let at = start.wrapping_byte_add(before);
        let after = reserved - before - bytes;
        // SAFETY: both ends belong to the mapping that was just made, and hold nothing.
        unsafe {
            if before > 0 {
                libc::munmap(start, before);
            }
            if after > 0 {
                libc::munmap(at.wrapping_byte_add(bytes), after);
            }
        }
        let at = NonNull::new(at.cast::<u8>()).expect("no mapping is at address 0");
        if bytes >= HUGE_PAGE {
            // SAFETY: advice on the mapping that was just made; a kernel that refuses it keeps small pages.
            unsafe { libc::madvise(at.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
        }
        Ok(Self { at, bytes, mapped: vec![] })
    }

    /// Where it begins.
    #[must_use]
    pub fn address(&self) -> *mut u8 {
        self.at.as_ptr()
    }

    /// Its words.
    pub fn words(&mut self) -> &mut [u64] {
        // SAFETY: the range's pages are aligned, are words of any bits, and are borrowed with it; no other range maps them.
        unsafe { std::slice::from_raw_parts_mut(self.address().cast::<u64>(), self.bytes / 8) }
    }

    /// Bytes of its pages.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Puts the pages of `[begin, begin + bytes)` on one NUMA node, at once: those that were touched move there with what they
    /// hold.
    ///
    /// # Errors
    /// [`TierError`]: no such node, one that this process may not use, or one with less room than that; and a piece that is
    /// no range of whole pages of this range, or that is mapped.
    pub fn bind(&mut self, begin: usize, bytes: usize, node: usize) -> Result<(), TierError> {
        let at = self.piece(begin, bytes, PAGE)?;
        if bytes == 0 {
            return Ok(());
        }
        let is_there = |it: &Option<usize>| *it == Some(node);
        let there = self.nodes(begin, bytes)?.iter().filter(|it| is_there(it)).count() * PAGE;
        // Asked for before, because the kernel kills a process for a page that a node does not have.
        if let Some(room) = numa::room(node)
            && ((bytes - there) as u64) > room
        {
            return Err(TierError::TooSmall { node, bytes: bytes - there, room });
        }
        // SAFETY: the piece lies in this range's mapping.
        unsafe { numa::bind(at, bytes, node)? };
        // SAFETY: as above; the advice changes no byte.
        let rc = unsafe { libc::madvise(at.as_ptr().cast(), bytes, libc::MADV_POPULATE_WRITE) };
        match io::Error::last_os_error() {
            // EINVAL: a kernel before 5.14. Each page gets there when it is touched.
            source if rc != 0 && source.raw_os_error() != Some(libc::EINVAL) => {
                Err(TierError::Node { node, source })
            }
            _ => Ok(()),
        }
    }

    /// Maps memory of a dax device, or of a file that lies in memory, in place of `[begin, begin + bytes)`: the first that no
    /// other range has, of this or any process. Both begin as zeros. Returns where in the device or file it is.
    ///
    /// A lock (`F_OFD_SETLK`) keeps it from others until this range is dropped, or its process ends.
    ///
    /// # Errors
    /// [`TierError`]: nothing that can be mapped there, one that has no room, and a piece that does not fit its pages.
    pub fn map(&mut self, begin: usize, bytes: usize, path: &Path) -> Result<u64, TierError> {
        let opened = MemoryFile::open(path).map_err(TierError::Memory)?;
        let MemoryFile { ref file, kind, bytes: size, multiple } = opened;
        if kind == RegionKind::File {
            return Err(TierError::NotInPlace { path: path.into() });
        }
        let at = self.piece(begin, bytes, multiple as usize)?;
        if bytes == 0 {
            return Ok(0);
        }
        let unmappable = |source| TierError::Unmappable { path: path.into(), bytes, source };
        let claimed = claim(file, bytes as u64, size, multiple).map_err(unmappable)?;
        let offset = claimed.ok_or_else(|| TierError::NoRoom { path: path.into(), bytes, size })?;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        let from = offset.cast_signed();
        if kind == RegionKind::Tmpfs {
            // A page that its file system has no room for ends the process when it is touched.
            // SAFETY: the descriptor is open; the call takes numbers only.
            let rc = unsafe { libc::fallocate(file.as_raw_fd(), 0, from, bytes as libc::off_t) };
            match io::Error::last_os_error() {
                source if rc != 0 && source.raw_os_error() == Some(libc::ENOSPC) => {
                    return Err(TierError::FullMemory { path: path.into(), bytes, free: free(path) });
                }
                source if rc != 0 => return Err(unmappable(source)),
                _ => {}
            }
        }
        // SAFETY: replaces pages of this range's own mapping, which nothing borrows.
        let rc = unsafe { libc::mmap(at.as_ptr().cast(), bytes, protection, flags, file.as_raw_fd(), from) };
        if rc == libc::MAP_FAILED {
            return Err(unmappable(io::Error::last_os_error()));
        }
        // SAFETY: as many bytes were just mapped there, and the lock keeps other ranges away.
        unsafe { at.as_ptr().write_bytes(0, bytes) };
        let index = self.mapped.partition_point(|it| it.begin < begin);
        self.mapped.insert(index, Mapped { begin, bytes, path: path.into(), file: opened, offset });
        Ok(offset)
    }

    /// Puts `[begin, begin + bytes)` into a tier of memory.
    ///
    /// # Errors
    /// Those of [`Range::bind`] and [`Range::map`].
    pub fn put(&mut self, begin: usize, bytes: usize, place: &Place) -> Result<(), TierError> {
        match place {
            Place::Node(node) => self.bind(begin, bytes, *node),
            Place::Device(path) => self.map(begin, bytes, path).map(drop),
        }
    }

    /// Copies bytes into the range.
    ///
    /// # Panics
    /// When they end past it.
    pub fn copy_in(&mut self, begin: usize, from: &[u8]) {
        assert!(begin.checked_add(from.len()).is_some_and(|end| end <= self.bytes), "past the range's end");
        // SAFETY: inside the range, which this borrow has alone; a slice of it there is none.
        unsafe { self.at.add(begin).copy_from_nonoverlapping(NonNull::from(from).cast(), from.len()) };
    }

    /// Copies bytes out of the range.
    ///
    /// # Panics
    /// When they end past it.
    pub fn copy_out(&self, begin: usize, into: &mut [u8]) {
        assert!(begin.checked_add(into.len()).is_some_and(|end| end <= self.bytes), "past the range's end");
        // SAFETY: as in `copy_in`.
        unsafe { self.at.add(begin).copy_to_nonoverlapping(NonNull::from(&mut *into).cast(), into.len()) };
    }

    /// Whether every device and file that is mapped still has its bytes.
    ///
    /// # Errors
    /// [`TierError::Gone`] for one that is unbound or cut: an access to what is missing ends the process by SIGBUS.
    pub fn check(&self) -> Result<(), TierError> {
        for Mapped { path, file, offset, bytes, .. } in &self.mapped {
            let needed = offset + *bytes as u64;
            let size = file.present_size(path);
            if size < needed {
                return Err(TierError::Gone { path: path.clone(), size, needed });
            }
        }
        Ok(())
    }

    /// Bytes in each place, by the kernel's word for what is on nodes.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn locate(&self) -> Result<BTreeMap<Location, usize>, TierError> {
        let mut found = BTreeMap::new();
        let mut begin = 0;
        for it in &self.mapped {
            self.add_nodes(begin, it.begin - begin, &mut found)?;
            *found.entry(Location::Mapped(it.path.clone())).or_insert(0) += it.bytes;
            begin = it.begin + it.bytes;
        }
        self.add_nodes(begin, self.bytes - begin, &mut found)?;
        Ok(found)
    }

    /// As [`Range::locate`], of one piece of whole pages that is not mapped.
    ///
    /// # Errors
    /// What the kernel said, and a piece that is no range of whole pages of this range, or that is mapped.
    pub fn locate_piece(&self, begin: usize, bytes: usize) -> Result<BTreeMap<Location, usize>, TierError> {
        self.piece(begin, bytes, PAGE)?;
        let mut found = BTreeMap::new();
        self.add_nodes(begin, bytes, &mut found)?;
        Ok(found)
    }

    /// Has the untouched pages of `[begin, begin + bytes)` come from one NUMA node. The kernel may move them afterwards, unlike those that
    /// are bound.
    ///
    /// # Errors
    /// Those of [`Range::bind`].
    pub fn place(&mut self, begin: usize, bytes: usize, node: usize) -> Result<(), TierError> {
        self.piece(begin, bytes, PAGE)?;
        let room = numa::room(node).ok_or(TierError::NoNode { node })?;
        // Asked for before, because the kernel kills a process for a page that a node does not have.
        if bytes as u64 > room {
            return Err(TierError::TooSmall { node, bytes, room });
        }
        let refused = |source| TierError::Node { node, source };
        let range = &*self;
        let touch = || {
            // Of this thread alone, so that the pages have no policy of their own.
            bind_memory(node).map_err(refused)?;
            for page in (begin..begin + bytes).step_by(PAGE) {
                // SAFETY: a page of this range, which the caller borrows alone; a touched one keeps what it holds.
                unsafe {
                    let word = range.at.add(page).cast::<u64>();
                    word.write_volatile(word.read_volatile());
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| scope.spawn(touch).join()).expect("touching pages does not panic")
    }

    /// Adds the bytes of a piece to those of the nodes that they lie on.
    fn add_nodes(
        &self,
        begin: usize,
        bytes: usize,
        found: &mut BTreeMap<Location, usize>,
    ) -> Result<(), TierError> {
        for node in self.nodes(begin, bytes)? {
            *found.entry(node.map_or(Location::Untouched, Location::Node)).or_insert(0) += PAGE;
        }
        Ok(())
    }

    fn nodes(&self, begin: usize, bytes: usize) -> Result<Vec<Option<usize>>, TierError> {
        // SAFETY: the caller's piece begins in the mapping, or at its end.
        let at = unsafe { self.at.add(begin) };
        // SAFETY: the caller's piece lies in the mapping, which is readable.
        unsafe { numa::nodes(at, bytes) }.map_err(TierError::Pages)
    }

    /// The address of a piece in whole pages of this range, none of them mapped.
    fn piece(&self, begin: usize, bytes: usize, multiple: usize) -> Result<NonNull<u8>, TierError> {
        let is_inside = begin.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        let is_whole = begin.is_multiple_of(multiple) && bytes.is_multiple_of(multiple);
        let is_mapped = |it: &Mapped| begin < it.begin + it.bytes && it.begin < begin + bytes;
        if !is_inside || !is_whole || self.mapped.iter().any(is_mapped) {
            return Err(TierError::Piece { begin, bytes, multiple, size: self.bytes });
        }
        // SAFETY: inside the mapping, or at its end.
        Ok(unsafe { self.at.add(begin) })
    }
}

/// Bytes of ranges in each place, as the kernel says.
///
/// # Errors
/// What the kernel said.
pub fn located<'a>(
    ranges: impl IntoIterator<Item = &'a Range>,
) -> Result<BTreeMap<Location, usize>, TierError> {
    let mut bytes = BTreeMap::new();
    for range in ranges {
        for (location, of) in range.locate()? {
            *bytes.entry(location).or_insert(0) += of;
        }
    }
    Ok(bytes)
}

/// Locks the first bytes of a file that nothing else has locked, and says where they begin.
fn claim(file: &File, bytes: u64, size: u64, multiple: u64) -> io::Result<Option<u64>> {
    let lock_of = |offset: u64| libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: offset.cast_signed(),
        l_len: bytes.cast_signed(),
        l_pid: 0,
    };
    let mut offset = 0_u64;
    while offset.checked_add(bytes).is_some_and(|end| end <= size) {
        let mut lock = lock_of(offset);
        // SAFETY: the descriptor is open, and the lock is live for the kernel to read and fill.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) } != 0 {
            return Err(io::Error::last_os_error());
        }
        if lock.l_type == libc::F_UNLCK as libc::c_short {
            let wanted = lock_of(offset);
            // SAFETY: as above.
            if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const wanted) } == 0 {
                return Ok(Some(offset));
            }
            match io::Error::last_os_error() {
                // Another was faster: looks again.
                error if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => continue,
                error => return Err(error),
            }
        }
        // A lock without a length goes up to the end.
        let end = (lock.l_start + lock.l_len).cast_unsigned().checked_next_multiple_of(multiple);
        match end {
            Some(end) if lock.l_len > 0 => offset = end,
            _ => return Ok(None),
        }
    }
    Ok(None)
}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: the pages are this range's; whatever uses their address keeps the range.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use polder_mem::testing::Scratch;

    use super::*;

    fn fill(range: &mut Range, begin: usize, bytes: usize, value: u8) {
        range.copy_in(begin, &vec![value; bytes]);
    }

    fn message(result: Result<(), TierError>) -> String {
        result.expect_err("refused").to_string()
    }

    #[test]
    fn a_range_has_the_pages_that_it_was_asked_for_and_no_more() {
        let asked = 3 * HUGE_PAGE + 5 * PAGE + 1;
        let mut range = Range::new(asked).expect("a range");
        assert_eq!(range.bytes(), 3 * HUGE_PAGE + 6 * PAGE);
        assert!(range.address().addr().is_multiple_of(HUGE_PAGE));
        assert_eq!(range.locate().expect("asked"), [(Location::Untouched, range.bytes())].into());
        range.bind(0, range.bytes(), 0).expect("every machine has node 0");
        assert_eq!(range.locate().expect("asked"), [(Location::Node(0), range.bytes())].into());
        let all = range.bytes();
        fill(&mut range, 0, all, 7);
        assert_eq!(range.locate().expect("asked"), [(Location::Node(0), range.bytes())].into());
    }

    #[test]
    fn a_striped_range_is_contiguous_over_a_node_and_memory_that_is_mapped() {
        let scratch = Scratch::new();
        let path = scratch.path().join("card");
        std::fs::write(&path, vec![0_u8; 8 * PAGE]).expect("a file");
        let mut range = Range::new(8 * PAGE).expect("a range");
        range.bind(0, 2 * PAGE, 0).expect("bound");
        assert_eq!(range.map(6 * PAGE, 2 * PAGE, &path).expect("mapped"), 0);
        assert_eq!(range.map(2 * PAGE, 3 * PAGE, &path).expect("mapped"), 2 * PAGE as u64);
        fill(&mut range, PAGE, 6 * PAGE, 9);
        let bytes = std::fs::read(&path).expect("read");
        let nines: Vec<bool> = bytes.chunks(PAGE).map(|page| page.iter().all(|it| *it == 9)).collect();
        assert_eq!(nines, [true, false, true, true, true, false, false, false]);
        let mut read = vec![0; 8 * PAGE];
        range.copy_out(0, &mut read);
        assert!(read.iter().enumerate().all(|(at, it)| (*it == 9) == (PAGE..7 * PAGE).contains(&at)));
        let expected = [(Location::Node(0), 3 * PAGE), (Location::Mapped(path.clone()), 5 * PAGE)];
        assert_eq!(range.locate().expect("asked"), expected.into());
        let over = message(range.bind(PAGE, 2 * PAGE, 0));
        assert!(over.contains("where nothing is mapped"), "{over}");
        range.check().expect("all there");
        File::options().write(true).open(&path).expect("it").set_len(4 * PAGE as u64).expect("cut");
        let refusal = message(range.check());
        assert!(refusal.contains(&format!("it has {} bytes left of {}", 4 * PAGE, 5 * PAGE)), "{refusal}");
    }

    #[test]
    fn pages_are_placed_where_they_are_touched_first_and_the_rest_stays_untouched() {
        let mut range = Range::new(8 * PAGE).expect("a range");
        range.place(2 * PAGE, 3 * PAGE, 0).expect("every machine has node 0");
        let placed = range.locate_piece(PAGE, 5 * PAGE).expect("asked");
        assert_eq!(placed, [(Location::Node(0), 3 * PAGE), (Location::Untouched, 2 * PAGE)].into());
        range.copy_out(PAGE, &mut [0; 8]);
        let read = range.locate_piece(PAGE, PAGE).expect("asked");
        assert_eq!(read, [(Location::Untouched, PAGE)].into(), "the page of zeros lies on no node");
        assert!(message(range.place(0, PAGE, 1000)).starts_with("NUMA node 1000: this machine has none"));
        assert!(message(range.place(1, PAGE, 0)).starts_with("[1, +4096) is no piece"));
    }

    #[test]
    fn what_cannot_hold_a_piece_is_named() {
        let mut range = Range::new(2 * PAGE).expect("a range");
        for node in [1000, usize::MAX] {
            let refusal = message(range.bind(0, PAGE, node));
            assert!(refusal.starts_with(&format!("NUMA node {node}: this machine has none")), "{refusal}");
        }
        for (begin, bytes) in [(0, 3 * PAGE), (1, PAGE), (0, 1), (usize::MAX - PAGE + 1, PAGE)] {
            let refusal = message(range.bind(begin, bytes, 0));
            assert!(refusal.starts_with(&format!("[{begin}, +{bytes}) is no piece")), "{refusal}");
        }
        // Nearly all that the machine has is never free. What is free now may grow before the bind, as other processes end.
        // SAFETY: a call on numbers.
        let all = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) } as usize * PAGE;
        let mut large = Range::new(all - HUGE_PAGE).expect("a range");
        let refusal = message(large.bind(0, large.bytes(), 0));
        assert!(refusal.contains(" bytes do not fit, "), "{refusal}");
        assert_eq!(large.locate().expect("asked"), [(Location::Untouched, large.bytes())].into());
        assert!(matches!(Range::new(usize::MAX), Err(TierError::NoMemory { .. })));
    }

    #[test]
    fn what_cannot_be_mapped_is_named() {
        let mut range = Range::new(4 * PAGE).expect("a range");
        let refusal = message(range.map(0, PAGE, Path::new("/dev/dax99.0")).map(drop));
        assert!(refusal.contains("/dev/dax99.0: no such file or device; list the dax devices"), "{refusal}");
        let refusal = message(range.map(0, PAGE, Path::new("/dev/null")).map(drop));
        assert!(refusal.contains("a character device other than dax"), "{refusal}");
        let here = std::env::current_exe().expect("a test has a file");
        let folder = here.parent().expect("in a folder").join(format!("range-{}", std::process::id()));
        std::fs::write(&folder, vec![0_u8; PAGE]).expect("a file on a disk");
        let refusal = message(range.map(0, PAGE, &folder).map(drop));
        std::fs::remove_file(&folder).expect("removed");
        assert!(refusal.contains("this file lies on a disk"), "{refusal}");
        let scratch = Scratch::new();
        let path = scratch.path().join("card");
        std::fs::write(&path, vec![7_u8; 3 * PAGE]).expect("a file");
        let mut other = Range::new(2 * PAGE).expect("a range");
        other.map(0, 2 * PAGE, &path).expect("mapped");
        let refusal = message(range.map(0, 2 * PAGE, &path).map(drop));
        assert!(refusal.contains("no 8192 bytes in a row are free of its 12288"), "{refusal}");
        assert_eq!(range.map(0, PAGE, &path).expect("the rest"), 2 * PAGE as u64);
        drop(other);
        assert_eq!(range.map(PAGE, 2 * PAGE, &path).expect("given back"), 0);
        assert_eq!(std::fs::read(&path).expect("read"), vec![0_u8; 3 * PAGE]);
        for (begin, bytes) in [(1, PAGE), (3 * PAGE, 1), (3 * PAGE, 2 * PAGE)] {
            let refusal = message(range.map(begin, bytes, &path).map(drop));
            assert!(refusal.starts_with(&format!("[{begin}, +{bytes}) is no piece")), "{refusal}");
        }
    }
}
