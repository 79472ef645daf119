//! A mapped piece of memory that other hosts may write: a dax device, huge pages, tmpfs, or another file.

use std::ffi::CString;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use crate::kernel::Access;
use crate::{Coherence, LINE, fault};

/// What stands behind a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegionKind {
    /// A dax character device, as CXL memory shows up.
    DaxDevice,
    /// A file whose pages are the device's memory itself: fs-dax, famfs.
    DaxFile,
    /// Huge pages of this kernel (hugetlbfs).
    HugePages,
    /// Pages of this kernel (tmpfs).
    Tmpfs,
    /// Any other file, mapped through this kernel's page cache.
    File,
}

impl RegionKind {
    /// Who keeps caches in step unless someone knows better: of all these only dax memory can have a second host.
    #[must_use]
    pub const fn coherence(self) -> Coherence {
        match self {
            Self::DaxDevice | Self::DaxFile => Coherence::Software,
            Self::HugePages | Self::Tmpfs | Self::File => Coherence::Coherent,
        }
    }
}

/// Why a path could not be used as a region.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// Nothing there.
    #[error(
        "{path}: no such file or device; {}",
        match is_of_devices(path) {
            true => "list the dax devices with `daxctl list`",
            false => "check the path, or create a pool there with `polder pool format`",
        }
    )]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// Something is there already.
    #[error("{path} exists already; open it, or remove it first")]
    Exists {
        /// The path.
        path: PathBuf,
    },
    /// A file that would stand among devices, and be taken for one.
    #[error(
        "{path}: there is no such device, and a file is not made in /dev outside /dev/shm; list the dax devices with `daxctl list`"
    )]
    NoDevice {
        /// The path.
        path: PathBuf,
    },
    /// This user may not read and write it.
    #[error(
        "{path}: no permission to read and write it (mode {mode:04o}, owner {uid}, group {gid}, this user {user}); {remedy}"
    )]
    Permission {
        /// The path.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
        /// Its owner's user id.
        uid: u32,
        /// Its group id.
        gid: u32,
        /// The user id of this process.
        user: u32,
        /// What its owner can do.
        remedy: &'static str,
    },
    /// Not a thing that can be mapped and shared.
    #[error(
        "{} is {what}; name a dax device, or a file on tmpfs, hugetlbfs or a disk",
        if path.as_os_str().is_empty() { "\"\"".to_owned() } else { path.display().to_string() }
    )]
    NotMemory {
        /// The path.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// A size that cannot be mapped.
    #[error(
        "{path}: {bytes} bytes is no size for a region; it needs a positive multiple of {multiple} bytes"
    )]
    Size {
        /// The path.
        path: PathBuf,
        /// The size.
        bytes: u64,
        /// What it must be a multiple of.
        multiple: u64,
    },
    /// The kernel says too little about a device.
    #[error(
        "{path}: cannot read {attribute} of this dax device: {source}; is it in devdax mode (`daxctl list`)?"
    )]
    Dax {
        /// The path.
        path: PathBuf,
        /// The file in /sys.
        attribute: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The system refused.
    #[error("{path}: cannot {doing}: {source}{remedy}")]
    System {
        /// The path.
        path: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// What the kernel said.
        source: io::Error,
        /// What to do, as the end of the sentence; empty when the kernel's words say enough.
        remedy: &'static str,
    },
}

impl RegionError {
    /// Whether the path lies where devices do.
    #[must_use]
    pub fn is_of_device(&self) -> bool {
        matches!(self, Self::Missing { path } | Self::NoDevice { path } if is_of_devices(path))
    }
}

/// A mapping of a whole file or device, shared with all other processes that map it.
///
/// The memory is reached through [`crate::Mapped`] only: there is no slice of it.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    bytes: u64,
    kind: RegionKind,
    path: PathBuf,
    access: Access,
    file: File,
}

// SAFETY: the mapping belongs to no thread, and a Region itself reads and writes none of it: it hands out the
// address, and what uses that does so with atomic instructions.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Maps the file or device at `path`, whole.
    ///
    /// # Errors
    /// [`RegionError`], when there is nothing, or nothing that can be shared, or no permission.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, RegionError> {
        let path = path.as_ref();
        let MemoryFile { file, kind, bytes, multiple } = MemoryFile::open(path)?;
        let metadata = file.metadata().map_err(|e| system(path, "look at it", e))?;
        let usable = bytes - bytes % multiple;
        if usable == 0 {
            return Err(RegionError::Size { path: path.into(), bytes, multiple });
        }
        let base = map(path, &file, kind, usable)?;
        fault::install();
        Ok(Self { base, bytes: usable, kind, path: path.into(), access: access(&metadata), file })
    }

    /// Makes a new file of `bytes` zeros, which takes up no memory until it is written, and maps it. The file appears
    /// with its whole size at once.
    ///
    /// # Errors
    /// [`RegionError`], when something is there already, or the directory or the size will not do.
    pub fn create(path: impl AsRef<Path>, bytes: u64) -> Result<Self, RegionError> {
        let (region, draft) = Self::draft(path, bytes)?;
        draft.publish()?;
        Ok(region)
    }

    /// Makes and maps a new file as [`Region::create`] does. The file has no name before it is published: if its process dies
    /// before that, the file is gone.
    ///
    /// # Errors
    /// Those of [`Region::create`].
    pub fn draft(path: impl AsRef<Path>, bytes: u64) -> Result<(Self, DraftRegion), RegionError> {
        let path = path.as_ref();
        expect_named(path)?;
        if path.symlink_metadata().is_ok() {
            return Err(RegionError::Exists { path: path.into() });
        }
        let is_of_devices = is_of_devices(path);
        let file = unnamed(path).map_err(|error| match is_of_devices {
            true => RegionError::NoDevice { path: path.into() },
            false => error,
        })?;
        let metadata = file.metadata().map_err(|e| system(path, "look at it", e))?;
        let (kind, multiple) =
            page(&file, &metadata).map_err(|e| system(path, "look at its file system", e))?;
        // Huge pages are often mounted in /dev.
        if is_of_devices && kind != RegionKind::HugePages {
            return Err(RegionError::NoDevice { path: path.into() });
        }
        if bytes == 0 || !bytes.is_multiple_of(multiple) {
            return Err(RegionError::Size { path: path.into(), bytes, multiple });
        }
        file.set_len(bytes).map_err(|e| system(path, "set its size", e))?;
        let base = map(path, &file, kind, bytes)?;
        fault::install();
        let named = file.try_clone().map_err(|e| system(path, "open it twice", e))?;
        let region = Self { base, bytes, kind, path: path.into(), access: access(&metadata), file };
        Ok((region, DraftRegion { file: named, path: path.into() }))
    }

    /// Whether what is mapped is what `path` names: itself, or what a link there leads to if `follow` says so.
    ///
    /// # Errors
    /// When the path or the mapped file cannot be looked at.
    pub fn is_at(&self, path: impl AsRef<Path>, follow: bool) -> io::Result<bool> {
        let path = path.as_ref();
        let (named, mapped) =
            (if follow { path.metadata() } else { path.symlink_metadata() }?, self.file.metadata()?);
        Ok((named.dev(), named.ino()) == (mapped.dev(), mapped.ino()))
    }

    /// The size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What stands behind the path.
    #[must_use]
    pub fn kind(&self) -> RegionKind {
        self.kind
    }

    /// The path that was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Who may use the files beside it.
    pub(crate) fn access(&self) -> Access {
        self.access
    }

    /// What is mapped.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }
}

/// A new file that has no name yet.
#[derive(Debug)]
pub struct DraftRegion {
    file: File,
    path: PathBuf,
}

impl DraftRegion {
    /// Gives the file its name.
    ///
    /// # Errors
    /// [`RegionError::Exists`] when somebody else was faster.
    pub fn publish(self) -> Result<(), RegionError> {
        let from = CString::new(format!("/proc/self/fd/{}", self.file.as_raw_fd())).expect("no zero in it");
        let to = CString::new(self.path.as_os_str().as_bytes())
            .map_err(|error| system(&self.path, "give it its name", error.into()))?;
        // SAFETY: both are strings that end with a zero.
        let rc = unsafe {
            libc::linkat(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), libc::AT_SYMLINK_FOLLOW)
        };
        match io::Error::last_os_error() {
            _ if rc == 0 => Ok(()),
            error if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(RegionError::Exists { path: self.path })
            }
            source => {
                // Its directory may have gone meanwhile as well.
                let remedy = match Path::new("/proc/self/fd").exists() {
                    true => "",
                    false => {
                        "; a new file gets its name by way of /proc, which is not mounted: mount -t proc proc /proc"
                    }
                };
                Err(RegionError::System { path: self.path, doing: "give it its name", source, remedy })
            }
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        fault::forget(self.base.as_ptr().addr());
        // SAFETY: maps exactly what `map` mapped; handles keep the Region alive, so none can use it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes as usize) };
    }
}

/// Whether `path` lies where devices do: in /dev, and not in /dev/shm.
fn is_of_devices(path: &Path) -> bool {
    let directory = directory(path).canonicalize().unwrap_or_else(|_| directory(path).into());
    directory.starts_with("/dev") && !directory.starts_with("/dev/shm")
}

fn directory(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Makes a file in the directory of `path`.
fn unnamed(path: &Path) -> Result<File, RegionError> {
    let directory = directory(path);
    // Where no other user can enter, none is let in.
    let is_private = directory.metadata().is_ok_and(|found| found.mode() & 0o077 == 0);
    let mode = if is_private { 0o600 } else { 0o660 };
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).custom_flags(libc::O_TMPFILE).mode(mode).open(directory);
    file.map_err(|source| {
        let remedy = match source.kind() {
            io::ErrorKind::PermissionDenied => match directory.metadata() {
                Ok(folder) => return denied(directory, &folder),
                Err(_) => "",
            },
            io::ErrorKind::NotFound if !directory.exists() => "; make its directory first",
            io::ErrorKind::NotFound | io::ErrorKind::Unsupported | io::ErrorKind::IsADirectory => {
                "; its file system has no files without a name, so make it on another, such as /dev/shm"
            }
            _ => "",
        };
        RegionError::System { path: path.into(), doing: "make it", source, remedy }
    })
}

/// A file or device that is open, and not mapped.
#[derive(Debug)]
pub struct MemoryFile {
    /// Open for reading and writing.
    pub file: File,
    /// What it is.
    pub kind: RegionKind,
    /// Its size.
    pub bytes: u64,
    /// Bytes that what is mapped of it must be a multiple of.
    pub multiple: u64,
}

impl MemoryFile {
    /// Opens the file or device at `path`.
    ///
    /// # Errors
    /// [`RegionError`], when there is nothing, or nothing that can be shared, or no permission.
    pub fn open(path: &Path) -> Result<Self, RegionError> {
        expect_named(path)?;
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(|e| refused(path, e))?;
        let metadata = file.metadata().map_err(|e| system(path, "look at it", e))?;
        let (kind, bytes, multiple) = measure(path, &file, &metadata)?;
        Ok(Self { file, kind, bytes, multiple })
    }

    /// The size that it has now, at `path` where it was opened; 0 for a device that is gone.
    #[must_use]
    pub fn present_size(&self, path: &Path) -> u64 {
        let now = self.file.metadata().map_err(|e| system(path, "look at it", e));
        now.and_then(|metadata| measure(path, &self.file, &metadata)).map_or(0, |(_, bytes, _)| bytes)
    }
}

/// Refuses a path without a letter, of which every error would say nothing.
fn expect_named(path: &Path) -> Result<(), RegionError> {
    match path.as_os_str().is_empty() {
        true => Err(RegionError::NotMemory { path: path.into(), what: "an empty path" }),
        false => Ok(()),
    }
}

/// What the file is, its size, and what a region's size must be a multiple of.
fn measure(path: &Path, file: &File, metadata: &Metadata) -> Result<(RegionKind, u64, u64), RegionError> {
    let kind = metadata.file_type();
    if kind.is_char_device() {
        let (major, minor) = (libc::major(metadata.rdev()), libc::minor(metadata.rdev()));
        let (bytes, align) = dax_size(path, &PathBuf::from(format!("/sys/dev/char/{major}:{minor}")))?;
        return Ok((RegionKind::DaxDevice, bytes, align));
    }
    if !kind.is_file() {
        let what = if kind.is_dir() { "a directory" } else { "neither a file nor a character device" };
        return Err(RegionError::NotMemory { path: path.into(), what });
    }
    let (kind, multiple) = page(file, metadata).map_err(|e| system(path, "look at its file system", e))?;
    Ok((kind, metadata.len(), multiple))
}

/// Who may use the file; its maker always may use what he makes.
fn access(metadata: &Metadata) -> Access {
    Access { mode: metadata.mode() & 0o666 | 0o600, owner: metadata.uid(), group: metadata.gid() }
}

/// Size and alignment of the dax device that sysfs shows at `device`.
fn dax_size(path: &Path, device: &Path) -> Result<(u64, u64), RegionError> {
    let subsystem = device.join("subsystem").canonicalize().unwrap_or_default();
    if subsystem.file_name().is_none_or(|name| name != "dax") {
        return Err(RegionError::NotMemory { path: path.into(), what: "a character device other than dax" });
    }
    // The kernel keeps a device that is unbound in /sys, with its size. Before 5.19 some were a class, whose driver stands elsewhere.
    let is_on_bus = subsystem.parent().and_then(Path::file_name).is_some_and(|name| name == "bus");
    if is_on_bus {
        let attribute = device.join("driver");
        let driver = attribute.canonicalize().unwrap_or_default();
        let why = match driver.file_name().map(|name| name.to_string_lossy()) {
            Some(name) if name == "device_dax" => None,
            Some(other) => Some(format!("expected device_dax, found {other}")),
            None => Some("it is unbound".into()),
        };
        if let Some(why) = why {
            let source = io::Error::other(why);
            return Err(RegionError::Dax { path: path.into(), attribute, source });
        }
    }
    let bytes = dax_number(path, &device.join("size"))?;
    // Kernels before 5.10 have no `align` here; their devices come in steps of 2 MiB.
    let align = match dax_number(path, &device.join("align")) {
        Err(RegionError::Dax { source, .. }) if source.kind() == io::ErrorKind::NotFound => 2 << 20,
        align => align?.max(4096),
    };
    Ok((bytes, align))
}

fn dax_number(path: &Path, attribute: &Path) -> Result<u64, RegionError> {
    let dax = |source| RegionError::Dax { path: path.into(), attribute: attribute.into(), source };
    let text = std::fs::read_to_string(attribute).map_err(dax)?;
    text.trim().parse().map_err(|_| {
        dax(io::Error::new(io::ErrorKind::InvalidData, format!("{:?} is no number", text.trim())))
    })
}

/// The kind of a regular file, and the size of its pages.
fn page(file: &File, metadata: &Metadata) -> io::Result<(RegionKind, u64)> {
    // SAFETY: an all-zero statfs is a valid value of the C struct.
    let mut fs: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, and `fs` is a live struct that the call fills.
    if unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut fs) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let base_page = LINE.max(4096);
    Ok(match fs.f_type {
        libc::HUGETLBFS_MAGIC => (RegionKind::HugePages, metadata.blksize().max(base_page)),
        libc::TMPFS_MAGIC => (RegionKind::Tmpfs, base_page),
        _ if is_dax_file(file) => (RegionKind::DaxFile, base_page),
        _ => (RegionKind::File, base_page),
    })
}

/// Whether the file's pages are the device's memory itself; false on kernels that cannot say.
fn is_dax_file(file: &File) -> bool {
    // SAFETY: an all-zero statx is a valid value of the C struct.
    let mut facts: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, the path is an empty C string, and `facts` is a live struct.
    let rc = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_BASIC_STATS,
            &raw mut facts,
        )
    };
    rc == 0 && facts.stx_attributes & libc::STATX_ATTR_DAX as u64 != 0
}

fn map(path: &Path, file: &File, kind: RegionKind, bytes: u64) -> Result<NonNull<u8>, RegionError> {
    // Without MAP_SYNC the metadata of a dax file might not outlive a power failure that its bytes outlive.
    let tries: &[libc::c_int] = match kind {
        RegionKind::DaxFile => &[libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC, libc::MAP_SHARED],
        _ => &[libc::MAP_SHARED],
    };
    for flags in tries {
        // SAFETY: a new mapping at an address that the kernel picks; it replaces nothing.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                *flags,
                file.as_raw_fd(),
                0,
            )
        };
        if base != libc::MAP_FAILED {
            return Ok(NonNull::new(base.cast()).expect("a mapping is never at address 0"));
        }
    }
    let source = io::Error::last_os_error();
    let remedy = match kind {
        RegionKind::HugePages => "; reserve more huge pages: /proc/sys/vm/nr_hugepages",
        _ => "; its size may be more than a process can map",
    };
    Err(RegionError::System { path: path.into(), doing: "map it", source, remedy })
}

/// The error for a path that could not be opened.
fn refused(path: &Path, error: io::Error) -> RegionError {
    match (error.kind(), path.metadata()) {
        // Whatever the kernel says of a directory: it is no pool with more rights either.
        (_, Ok(metadata)) if metadata.is_dir() => {
            RegionError::NotMemory { path: path.into(), what: "a directory" }
        }
        (io::ErrorKind::NotFound, _) => RegionError::Missing { path: path.into() },
        (io::ErrorKind::PermissionDenied, Ok(metadata)) => denied(path, &metadata),
        _ => system(path, "open it for reading and writing", error),
    }
}

/// The error for a file that this user may not use, or a folder in which it may make none.
fn denied(path: &Path, metadata: &Metadata) -> RegionError {
    RegionError::Permission {
        path: path.into(),
        mode: metadata.mode() & 0o7777,
        uid: metadata.uid(),
        gid: metadata.gid(),
        // SAFETY: reads a number of this process and cannot fail.
        user: unsafe { libc::geteuid() },
        remedy: remedy(metadata),
    }
}

fn remedy(metadata: &Metadata) -> &'static str {
    if metadata.file_type().is_char_device() {
        "let root give a group access with a udev rule: SUBSYSTEM==\"dax\", GROUP=\"...\", MODE=\"0660\""
    } else if metadata.is_dir() {
        "it is a directory; name a pool in one where this user may make files, such as /dev/shm"
    } else {
        "let its owner run `chmod g+rw` and put this user into its group"
    }
}

fn system(path: &Path, doing: &'static str, source: io::Error) -> RegionError {
    RegionError::System { path: path.into(), doing, source, remedy: "" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Child, Ended, Scratch};

    fn message(result: Result<impl std::fmt::Debug, RegionError>) -> String {
        result.expect_err("an error").to_string()
    }

    #[test]
    fn a_created_region_is_sparse_zeroed_and_opens_again_with_its_size() {
        let scratch = Scratch::new();
        let path = scratch.path().join("pool");
        let region = Region::create(&path, 1 << 30).expect("a region");
        assert_eq!((region.bytes(), region.kind()), (1 << 30, RegionKind::Tmpfs));
        assert_eq!(region.kind().coherence(), Coherence::Coherent);
        assert_eq!(
            std::fs::metadata(&path).expect("it").blocks(),
            0,
            "no page is there before it is written"
        );
        assert_eq!(Region::open(&path).expect("it").bytes(), 1 << 30);
        assert_eq!(scratch.names(), ["pool"]);
    }

    #[test]
    fn a_draft_has_no_name_before_it_is_published_and_only_the_first_gets_it() {
        let scratch = Scratch::new();
        let path = scratch.path().join("pool");
        let (_, first) = Region::draft(&path, 4096).expect("a draft");
        let (_, second) = Region::draft(&path, 4096).expect("a draft");
        assert!(scratch.names().is_empty());
        first.publish().expect("it");
        assert!(matches!(second.publish(), Err(RegionError::Exists { .. })));
        assert_eq!(scratch.names(), ["pool"]);
    }

    #[test]
    fn a_file_is_not_made_among_devices_behind_a_link_or_not_and_is_in_shared_memory() {
        let scratch = Scratch::new();
        let link = scratch.path().join("link");
        std::os::unix::fs::symlink("/dev", &link).expect("a link");
        for path in [PathBuf::from("/dev/dax0.77"), "/dev/cxl/dax0.77".into(), link.join("dax0.77")] {
            let words =
                format!("{}: there is no such device, and a file is not made in /dev", path.display());
            let refused = message(Region::draft(&path, 4096));
            assert!(refused.starts_with(&words) && refused.ends_with("`daxctl list`"), "{refused}");
            assert!(message(Region::open(&path)).ends_with("list the dax devices with `daxctl list`"));
        }
        assert!(!is_of_devices(Path::new("/dev/shm/pool")) && !is_of_devices(Path::new("pool")));
        assert!(!is_of_devices(Path::new("/development/pool")));
    }

    #[test]
    fn a_region_is_not_created_over_anything() {
        let scratch = Scratch::new();
        let path = scratch.path().join("pool");
        std::fs::write(&path, "precious").expect("a file");
        assert_eq!(
            message(Region::create(&path, 4096)),
            format!("{} exists already; open it, or remove it first", path.display())
        );
        assert_eq!(std::fs::read(&path).expect("it"), b"precious");
    }

    #[test]
    fn sizes_that_cannot_be_mapped_are_refused_and_leave_no_file() {
        let scratch = Scratch::new();
        let path = scratch.path().join("pool");
        for bytes in [0, 4095, 4097] {
            let words = format!(
                "{}: {bytes} bytes is no size for a region; it needs a positive multiple of 4096 bytes",
                path.display()
            );
            assert_eq!(message(Region::create(&path, bytes)), words);
        }
        assert!(scratch.names().is_empty());
        std::fs::write(&path, [0; 4095]).expect("a file");
        assert!(message(Region::open(&path)).contains("4095 bytes is no size"));
        std::fs::write(&path, [0; 4097]).expect("a file");
        assert_eq!(Region::open(&path).expect("a page and a bit").bytes(), 4096);
    }

    #[test]
    fn what_is_no_memory_is_named() {
        let scratch = Scratch::new();
        let missing = scratch.path().join("none");
        assert!(message(Region::open(&missing)).ends_with(
            "none: no such file or device; check the path, or create a pool there with `polder pool format`"
        ));
        assert!(message(Region::open(scratch.path())).contains(" is a directory; name a dax device"));
        let nameless = "\"\" is an empty path; name a dax device, or a file on tmpfs, hugetlbfs or a disk";
        assert_eq!([message(Region::open("")), message(Region::create("", 4096))], [nameless, nameless]);
        assert_eq!(
            message(Region::open("/dev/null")),
            "/dev/null is a character device other than dax; name a dax device, or a file on tmpfs, hugetlbfs or a disk"
        );
    }

    #[test]
    fn a_refused_path_says_whose_it_is_and_what_to_do() {
        let scratch = Scratch::new();
        let path = scratch.path().join("pool");
        drop(Region::create(&path, 4096).expect("a region"));
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o400)).expect("chmod");
        let mut child = Child::fork(|| {
            // SAFETY: a call on numbers; root becomes nobody, others stay who they are.
            unsafe { libc::setuid(65534) };
            let words = message(Region::open(&path));
            assert!(words.contains("pool: no permission to read and write it (mode 0400, owner "), "{words}");
            assert!(
                words.ends_with("; let its owner run `chmod g+rw` and put this user into its group"),
                "{words}"
            );
        });
        assert_eq!(child.wait(), Ended::Exited(0));
    }

    #[test]
    fn a_directory_is_never_to_be_opened_to_a_group() {
        let scratch = Scratch::new();
        let directory = scratch.path().join("usr");
        std::fs::create_dir(&directory).expect("a directory");
        std::fs::set_permissions(&directory, std::os::unix::fs::PermissionsExt::from_mode(0o555))
            .expect("chmod");
        let mut child = Child::fork(|| {
            // SAFETY: a call on numbers; root becomes nobody, others stay who they are.
            unsafe { libc::setuid(65534) };
            let words = message(Region::open(&directory));
            assert!(words.contains("usr is a directory; name a dax device"), "{words}");
            let words = message(Region::create(directory.join("pool"), 4096));
            assert!(words.contains("usr: no permission to read and write it (mode 0555, "), "{words}");
            assert!(words.ends_with("name a pool in one where this user may make files, such as /dev/shm"));
        });
        assert_eq!(child.wait(), Ended::Exited(0));
    }

    #[test]
    #[ignore = "needs hugetlbfs and two free pages; scripts/test.sh runs it where that is mounted"]
    fn huge_pages_are_mapped_whole_and_a_size_between_them_is_refused() {
        let mounts = std::fs::read_to_string("/proc/self/mounts").expect("mounts");
        let mount = mounts.lines().find(|line| line.split(' ').nth(2) == Some("hugetlbfs"));
        let mount = mount.expect("hugetlbfs is mounted");
        let directory = Path::new(mount.split(' ').nth(1).expect("a mount point"));
        let page = std::fs::metadata(directory).expect("it").blksize();
        let path = directory.join(format!("polder-test-{}", std::process::id()));
        let words = message(Region::create(&path, page + 4096));
        assert!(words.contains(&format!("multiple of {page} bytes")), "{words}");
        match Region::create(&path, 2 * page) {
            Ok(region) => {
                assert_eq!((region.kind(), region.bytes()), (RegionKind::HugePages, 2 * page));
                let memory = crate::Mapped::new(region);
                crate::Memory::store(&memory, crate::Offset(page), 1);
                assert_eq!(crate::Memory::load(&memory, crate::Offset(page)), Ok(1));
            }
            Err(error) => println!("only the refusals are tested: {error}"),
        }
        let _ = std::fs::remove_file(&path);
        let words = message(Region::create(&path, page << 16));
        assert!(words.ends_with("; reserve more huge pages: /proc/sys/vm/nr_hugepages"), "{words}");
        assert!(!path.exists());
    }

    /// What sysfs shows of a device.
    fn sysfs(scratch: &Scratch, subsystem: &str, size: &str, align: Option<&str>) -> PathBuf {
        let device = scratch.path().join("252:0");
        let class = scratch.path().join(subsystem);
        std::fs::create_dir_all(&class).and_then(|()| std::fs::create_dir_all(&device)).expect("directories");
        let _ = std::fs::remove_file(device.join("subsystem"));
        std::os::unix::fs::symlink(&class, device.join("subsystem")).expect("a link");
        std::fs::write(device.join("size"), size).expect("a file");
        if let Some(align) = align {
            std::fs::write(device.join("align"), align).expect("a file");
        }
        device
    }

    #[test]
    fn a_dax_device_has_the_size_and_alignment_that_sysfs_shows() {
        let path = Path::new("/dev/dax0.0");
        let scratch = Scratch::new();
        let old_kernel = sysfs(&scratch, "dax", "4294967296\n", None);
        assert_eq!(dax_size(path, &old_kernel).expect("a size"), (4 << 30, 2 << 20));
        let device = sysfs(&scratch, "dax", "4294967296\n", Some("1073741824\n"));
        assert_eq!(dax_size(path, &device).expect("a size"), (4 << 30, 1 << 30));
        let words = message(dax_size(path, &sysfs(&scratch, "dax", "plenty\n", None)));
        assert!(
            words.starts_with("/dev/dax0.0: cannot read ")
                && words.contains("size of this dax device: \"plenty\" is no number"),
            "{words}"
        );
        let bound = sysfs(&scratch, "bus/dax", "4294967296\n", Some("2097152\n"));
        let words = message(dax_size(path, &bound));
        assert!(words.contains("driver of this dax device: it is unbound; is it in devdax mode"), "{words}");
        for (driver, is_ours) in [("kmem", false), ("device_dax", true)] {
            let folder = scratch.path().join(driver);
            std::fs::create_dir(&folder).expect("a directory");
            let _ = std::fs::remove_file(bound.join("driver"));
            std::os::unix::fs::symlink(&folder, bound.join("driver")).expect("a link");
            assert_eq!(dax_size(path, &bound).is_ok(), is_ours, "{driver}");
        }
        let words = message(dax_size(path, &sysfs(&scratch, "mem", "1\n", None)));
        assert!(words.contains("a character device other than dax"), "{words}");
    }
}
