//! One host's caches: its copy of the shared file, what that held when each line was last moved, and the true memory.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes of a line.
pub(crate) const LINE: u64 = 64;

type Line = [AtomicU64; 8];

/// What happens to a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Move {
    /// The host's stores go to memory, and the line stays: `clwb`.
    WriteBack,
    /// The host's stores go to memory, and the line is read again: `clflush`. The next load could read it no earlier than
    /// now, and a prefetcher may read it now.
    Flush,
    /// The line is read again where the host has stored nothing to it.
    Prefetch,
}

/// One reached site, as `polder rehearse` reads it from the file `sites`: 128 bytes.
#[repr(C)]
struct Record {
    count: AtomicU64,
    /// Of the text; 0 is a free record.
    hash: AtomicU64,
    /// UTF-8, padded with zeros.
    text: [AtomicU64; 14],
}

const _: () = assert!(size_of::<Record>() == 128);

/// A mapping of the file into this process.
#[derive(Clone, Copy, Default)]
struct Mapping {
    begin: u64,
    end: u64,
    offset: u64,
}

/// The mappings of the file, the first of them if there are more: no vector, because a signal handler fills it.
pub(crate) struct Mappings {
    of_file: [Mapping; 256],
    count: usize,
}

/// A host, as one of its processes sees it.
pub(crate) struct Host {
    /// What all hosts share.
    memory: &'static [Line],
    /// The host's caches: what its processes have mapped.
    copy: &'static [Line],
    /// What each line of the copy held when it was last moved: the line is dirty where the copy differs.
    base: &'static [Line],
    locks: &'static [AtomicU32],
    recent: &'static [AtomicU64],
    /// How many lines of the file the host's programs have moved, in the first word.
    moved: &'static [AtomicU64],
    sites: &'static [Record],
    /// Device and inode of the copy.
    file: (u64, u64),
    mappings: Mutex<Mappings>,
    are_mappings_stale: AtomicBool,
    /// State of the generator of random numbers.
    random: AtomicU64,
}

impl Host {
    /// The host whose folder this is, within that of all hosts.
    pub(crate) fn open(folder: &Path, seed: u64) -> io::Result<Self> {
        let shared = folder.parent().unwrap_or(folder);
        let copy = folder.join("copy");
        let of_copy = std::fs::metadata(&copy)?;
        Ok(Self {
            memory: map(&shared.join("memory"))?,
            copy: map(&copy)?,
            base: map(&folder.join("base"))?,
            locks: map(&shared.join("locks"))?,
            recent: map(&folder.join("recent"))?,
            moved: map(&folder.join("moved"))?,
            sites: map(&shared.join("sites"))?,
            file: (of_copy.dev(), of_copy.ino()),
            mappings: Mutex::new(Mappings { of_file: [Mapping::default(); 256], count: 0 }),
            are_mappings_stale: AtomicBool::new(true),
            random: AtomicU64::new(seed ^ u64::from(std::process::id()) << 32),
        })
    }

    /// Moves one line of the file.
    pub(crate) fn move_line(&self, line: u64, what: Move) {
        let Some(index) = self.index(line) else { return };
        self.locked(line, || {
            if what != Move::Prefetch {
                self.write_back(index);
            }
            if what != Move::WriteBack {
                self.fetch(index);
            }
        });
    }

    /// Notes a line that the program has moved, for the adversary.
    pub(crate) fn note(&self, line: u64) {
        self.count_move(line);
        let [count, lines @ ..] = self.recent else { return };
        lines[count.fetch_add(1, SeqCst) as usize % lines.len()].store(line, SeqCst);
    }

    /// A line that the program moved lately, or one behind it.
    pub(crate) fn likely_line(&self) -> Option<u64> {
        let [count, lines @ ..] = self.recent else { return None };
        let noted = count.load(SeqCst).min(lines.len() as u64);
        let line = lines[(self.random() % noted.max(1)) as usize].load(SeqCst);
        (noted > 0).then(|| line + self.random() % 3)
    }

    /// Stores bytes around the caches: the line is written back first if it is dirty, and leaves the cache. Write-combining
    /// buffers may drain at any time, so they drain at once.
    pub(crate) fn store(&self, mut offset: u64, mut bytes: &[u8]) {
        self.count_move(offset / LINE);
        while !bytes.is_empty() {
            let (line, at) = (offset / LINE, (offset % LINE) as usize);
            let (piece, rest) = bytes.split_at(bytes.len().min(LINE as usize - at));
            if let Some(index) = self.index(line) {
                self.locked(line, || {
                    self.write_back(index);
                    for words in [&self.memory[index], &self.base[index], &self.copy[index]] {
                        put(words, at, piece);
                    }
                    self.fetch(index);
                });
            }
            (offset, bytes) = (offset + piece.len() as u64, rest);
        }
    }

    /// Where in the file an address lies. `may_be_new`: whether an unknown address is worth a look at all mappings.
    pub(crate) fn offset_of(&self, address: u64, may_be_new: bool) -> Option<u64> {
        let mut mappings = self.mappings();
        if self.are_mappings_stale.swap(false, SeqCst) {
            return mappings.read(self.file, address);
        }
        let known = mappings.of_file[..mappings.count].iter().find_map(|mapping| mapping.offset_of(address));
        // The program may map by system calls of its own, and what found no room in the table is looked up each time.
        let may_be_there = may_be_new || mappings.count == mappings.of_file.len();
        known.or_else(|| may_be_there.then(|| mappings.read(self.file, address)).flatten())
    }

    /// What is known of the mappings. No other thread changes it before the guard is dropped.
    pub(crate) fn mappings(&self) -> MutexGuard<'_, Mappings> {
        self.mappings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the mappings read again before they are used.
    pub(crate) fn forget_mappings(&self) {
        self.are_mappings_stale.store(true, SeqCst);
    }

    /// Counts one more hit of a site. `place` is where its record is, once it has one.
    pub(crate) fn count(&self, place: &AtomicU32, text: impl FnOnce() -> Text) {
        if place.load(SeqCst) == 0 {
            place.store(self.record(&text()), SeqCst);
        }
        if let Some(record) = self.sites.get(place.load(SeqCst) as usize - 1) {
            record.count.fetch_add(1, SeqCst);
        }
    }

    /// The number of the record with a text, from 1 on. Past the last one where the table is full.
    fn record(&self, text: &Text) -> u32 {
        let words = text.words();
        let hash = words.iter().fold(1, |hash, word| splitmix(hash ^ word)) | 1;
        for probe in 0..self.sites.len() {
            let index = (hash as usize).wrapping_add(probe) % self.sites.len();
            let record = &self.sites[index];
            match record.hash.compare_exchange(0, hash, SeqCst, SeqCst) {
                Ok(_) => record.text.iter().zip(words).for_each(|(to, word)| to.store(word, SeqCst)),
                Err(other) if other != hash => continue,
                Err(_) => {}
            }
            return index as u32 + 1;
        }
        u32::MAX
    }

    /// A random number, from the seed.
    pub(crate) fn random(&self) -> u64 {
        splitmix(self.random.fetch_add(0x9e37_79b9_7f4a_7c15, SeqCst))
    }

    /// Counts what a program of the host moves, for `polder rehearse`.
    fn count_move(&self, line: u64) {
        if let ([moved, ..], Some(_)) = (self.moved, self.index(line)) {
            moved.fetch_add(1, SeqCst);
        }
    }

    fn index(&self, line: u64) -> Option<usize> {
        usize::try_from(line).ok().filter(|index| *index < self.copy.len())
    }

    /// Writes a line back if the host has stored to it: whole, as hardware does, with what other hosts have stored to it since.
    fn write_back(&self, index: usize) {
        let (copy, base) = (&self.copy[index], &self.base[index]);
        let read = || copy.each_ref().map(|word| word.load(SeqCst));
        // A line leaves a cache whole: two equal reads saw it as it was at one moment.
        let mut words = read();
        for _ in 0..1000 {
            let again = read();
            if again == words {
                break;
            }
            words = again;
        }
        if words.iter().zip(base).any(|(word, base)| *word != base.load(SeqCst)) {
            for (at, word) in words.into_iter().enumerate() {
                self.memory[index][at].store(word, SeqCst);
                base[at].store(word, SeqCst);
            }
        }
    }

    /// Reads a clean line from memory. A word that another thread of the host stores meanwhile stays, and is dirty.
    fn fetch(&self, index: usize) {
        let (copy, base) = (&self.copy[index], &self.base[index]);
        if copy.iter().zip(base).any(|(copy, base)| copy.load(SeqCst) != base.load(SeqCst)) {
            return;
        }
        for (at, word) in self.memory[index].iter().enumerate() {
            let (old, new) = (base[at].load(SeqCst), word.load(SeqCst));
            if copy[at].compare_exchange(old, new, SeqCst, SeqCst).is_ok() {
                base[at].store(new, SeqCst);
            }
        }
    }

    /// Does something while no other thread, process or host moves the line. A lock whose holder has died is taken over.
    fn locked(&self, line: u64, act: impl FnOnce()) {
        let lock = &self.locks[splitmix(line) as usize % self.locks.len()];
        let own = std::process::id();
        let mut tries = 0_u32;
        while let Err(holder) = lock.compare_exchange(0, own, SeqCst, SeqCst) {
            tries += 1;
            if tries.is_multiple_of(4096) {
                // SAFETY: signal 0 only asks whether the process is there.
                let is_gone = unsafe { libc::kill(holder as i32, 0) } != 0
                    && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
                if is_gone {
                    let _ = lock.compare_exchange(holder, 0, SeqCst, SeqCst);
                }
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
        act();
        lock.store(0, SeqCst);
    }
}

impl Mapping {
    /// Where in the file an address lies.
    fn offset_of(&self, address: u64) -> Option<u64> {
        (self.begin..self.end).contains(&address).then(|| address - self.begin + self.offset)
    }
}

impl Mappings {
    /// Reads which addresses of this process are mappings of the file, without allocating memory, and where in it `address` lies.
    fn read(&mut self, file: (u64, u64), address: u64) -> Option<u64> {
        self.count = 0;
        let mut found = None;
        let mut maps = File::open("/proc/self/maps").ok()?;
        // What counts stands at the beginning of each row, before a path of any length.
        let (mut chunk, mut row, mut length) = ([0_u8; 4096], [0_u8; 128], 0);
        while let Ok(count @ 1..) = maps.read(&mut chunk) {
            for &byte in &chunk[..count] {
                if byte == b'\n' {
                    if let Some(mapping) = mapping_of(&row[..length], file) {
                        found = found.or(mapping.offset_of(address));
                        if let Some(place) = self.of_file.get_mut(self.count) {
                            *place = mapping;
                            self.count += 1;
                        }
                    }
                    length = 0;
                } else if length < row.len() {
                    row[length] = byte;
                    length += 1;
                }
            }
        }
        found
    }
}

/// The mapping that a row of `/proc/self/maps` describes, if it is one of the file.
fn mapping_of(row: &[u8], (device, inode): (u64, u64)) -> Option<Mapping> {
    // The path may end within a letter.
    let row = row.get(..row.len().min(120)).unwrap_or(row);
    let end = row.iter().position(|byte| *byte == b'/').unwrap_or(row.len());
    let mut words = std::str::from_utf8(&row[..end]).ok()?.split_ascii_whitespace();
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let (begin, end) = words.next()?.split_once('-')?;
    let (offset, on) = (words.nth(1)?, words.next()?.split_once(':')?);
    let on = libc::makedev(hex(on.0)? as u32, hex(on.1)? as u32);
    let is_of_file = on == device && words.next()?.parse() == Ok(inode);
    is_of_file.then_some(Mapping { begin: hex(begin)?, end: hex(end)?, offset: hex(offset)? })
}

/// A short text, made without allocating memory.
pub(crate) struct Text {
    bytes: [u8; 112],
    length: usize,
}

impl Text {
    pub(crate) fn new(text: std::fmt::Arguments<'_>) -> Self {
        let mut made = Self { bytes: [0; 112], length: 0 };
        // What does not fit is cut off.
        let _ = std::fmt::write(&mut made, text);
        made
    }

    fn words(&self) -> [u64; 14] {
        let (words, _) = self.bytes.as_chunks();
        std::array::from_fn(|at| u64::from_le_bytes(words[at]))
    }
}

impl std::fmt::Write for Text {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let room = &mut self.bytes[self.length..];
        let count = room.len().min(text.len());
        room[..count].copy_from_slice(&text.as_bytes()[..count]);
        self.length += count;
        Ok(())
    }
}

/// Puts bytes into words from a byte on.
fn put(words: &Line, at: usize, bytes: &[u8]) {
    let (mut mask, mut value) = ([0_u8; LINE as usize], [0_u8; LINE as usize]);
    mask[at..at + bytes.len()].fill(0xff);
    value[at..at + bytes.len()].copy_from_slice(bytes);
    let (masks, values) = (mask.as_chunks().0, value.as_chunks().0);
    for (word, (mask, value)) in words.iter().zip(masks.iter().zip(values)) {
        let (mask, value) = (u64::from_le_bytes(*mask), u64::from_le_bytes(*value));
        if mask != 0 {
            let _ = word.fetch_update(SeqCst, SeqCst, |old| Some(old & !mask | value));
        }
    }
}

/// The generator splitmix64, which is public domain.
const fn splitmix(state: u64) -> u64 {
    let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

/// A file that this process shares with others, for as long as it runs.
fn map<T>(path: &Path) -> io::Result<&'static [T]> {
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    let file = OpenOptions::new().read(true).write(true).open(path).map_err(named)?;
    // The rest of the last page is there too.
    let bytes = file.metadata()?.len().next_multiple_of(4096) as usize;
    let (access, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: a new mapping, by the arguments of mmap.
    let at =
        unsafe { libc::syscall(libc::SYS_mmap, 0_usize, bytes, access, shared, file.as_raw_fd(), 0_usize) };
    if at == -1 {
        return Err(named(io::Error::last_os_error()));
    }
    // SAFETY: the mapping is never removed and begins a page; T is made of atomics, so that others may write to it.
    Ok(unsafe { std::slice::from_raw_parts(at as *const T, bytes / size_of::<T>()) })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// Two hosts of one memory of four lines.
    struct Rack(PathBuf);

    impl Rack {
        fn new(name: &str) -> (Self, [Host; 2]) {
            let folder = std::env::temp_dir().join(format!("rehearse-{name}-{}", std::process::id()));
            let sized = |path: &str, bytes| {
                std::fs::create_dir_all(folder.join(path).parent().unwrap()).unwrap();
                File::create(folder.join(path)).unwrap().set_len(bytes).unwrap();
            };
            for (path, bytes) in [("memory", 4096), ("locks", 4096), ("sites", 4096)] {
                sized(path, bytes);
            }
            let hosts = ["0", "1"].map(|host| {
                for file in ["copy", "base", "recent", "moved"] {
                    sized(&format!("{host}/{file}"), 4096);
                }
                Host::open(&folder.join(host), 7).unwrap()
            });
            (Self(folder), hosts)
        }
    }

    impl Drop for Rack {
        fn drop(&mut self) {
            drop(std::fs::remove_dir_all(&self.0));
        }
    }

    fn store(host: &Host, word: usize, value: u64) {
        host.copy[word / 8][word % 8].store(value, SeqCst);
    }

    fn load(host: &Host, word: usize) -> u64 {
        host.copy[word / 8][word % 8].load(SeqCst)
    }

    #[test]
    fn a_store_reaches_the_other_host_once_both_have_flushed_the_line() {
        let (_rack, [writer, reader]) = Rack::new("flush");
        store(&writer, 3, 5);
        reader.move_line(0, Move::Flush);
        assert_eq!(load(&reader, 3), 0);
        writer.move_line(0, Move::WriteBack);
        assert_eq!(load(&reader, 3), 0);
        reader.move_line(0, Move::Flush);
        assert_eq!(load(&reader, 3), 5);
    }

    #[test]
    fn a_write_back_takes_the_whole_line_with_what_others_have_stored_to_it() {
        let (_rack, [one, other]) = Rack::new("sharing");
        store(&one, 0, 1);
        store(&other, 1, 2);
        one.move_line(0, Move::Flush);
        other.move_line(0, Move::Flush);
        one.move_line(0, Move::Flush);
        assert_eq!([load(&one, 0), load(&one, 1)], [0, 2]);
    }

    #[test]
    fn a_prefetch_leaves_a_dirty_line_alone() {
        let (_rack, [one, other]) = Rack::new("prefetch");
        store(&one, 0, 1);
        store(&other, 1, 2);
        other.move_line(0, Move::WriteBack);
        one.move_line(0, Move::Prefetch);
        assert_eq!([load(&one, 0), load(&one, 1)], [1, 0]);
    }

    #[test]
    fn bytes_stored_around_the_cache_leave_the_others_of_their_lines() {
        let (_rack, [one, other]) = Rack::new("around");
        store(&one, 7, 0x1111_1111_1111_1111);
        one.store(60, &[2; 8]);
        assert_eq!([load(&one, 7), load(&one, 8)], [0x0202_0202_1111_1111, 0x0202_0202]);
        (0..2).for_each(|line| other.move_line(line, Move::Flush));
        assert_eq!([load(&other, 7), load(&other, 8)], [0x0202_0202_1111_1111, 0x0202_0202]);
    }

    #[test]
    fn an_address_is_found_by_the_mapping_of_the_file() {
        let (_rack, [host, _]) = Rack::new("maps");
        let at = |line: usize| std::ptr::from_ref(&host.copy[line]) as u64;
        assert_eq!(host.offset_of(at(3), true), Some(192));
        assert_eq!(host.offset_of(std::ptr::from_ref(&host) as u64, true), None);
    }

    #[test]
    fn an_address_is_found_behind_more_mappings_than_the_table_has() {
        let (rack, [host, _]) = Rack::new("many-maps");
        let copy = File::open(rack.0.join("0/copy")).unwrap();
        let mapped = || {
            let (access, shared) = (libc::PROT_READ, libc::MAP_SHARED);
            // SAFETY: a new mapping, whose arguments are those of mmap.
            unsafe { libc::syscall(libc::SYS_mmap, 0_usize, 4096, access, shared, copy.as_raw_fd(), 0_usize) }
        };
        let addresses: Vec<_> = (0..600).map(|_| mapped() as u64).collect();
        for may_be_new in [true, false] {
            let found = addresses.iter().filter(|at| host.offset_of(**at + 64, may_be_new) == Some(64));
            assert_eq!(found.count(), 600, "{may_be_new}");
        }
        for at in addresses {
            // SAFETY: mapped above, and not used any more.
            unsafe { libc::syscall(libc::SYS_munmap, at, 4096) };
        }
    }

    #[test]
    fn what_a_program_moves_of_the_file_is_counted_for_its_host() {
        let (_rack, [host, other]) = Rack::new("moved");
        host.note(1);
        host.store(128, &[1; 8]);
        // Past the end of the file.
        host.note(64);
        host.store(4096, &[1; 8]);
        assert_eq!([&host, &other].map(|host| host.moved[0].load(SeqCst)), [2, 0]);
    }

    #[test]
    fn hits_are_counted_by_the_text_of_their_site() {
        let (_rack, [host, other]) = Rack::new("sites");
        let (first, second) = (AtomicU32::new(0), AtomicU32::new(0));
        host.count(&first, || Text::new(format_args!("a+0x1")));
        other.count(&second, || Text::new(format_args!("a+0x1")));
        host.count(&AtomicU32::new(0), || Text::new(format_args!("a+0x2")));
        let counts = host.sites.iter().map(|record| record.count.load(SeqCst)).filter(|count| *count > 0);
        let mut counts: Vec<_> = counts.collect();
        counts.sort_unstable();
        assert_eq!(counts, [1, 2]);
    }
}
