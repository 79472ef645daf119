//! Storage: whole versions of named tensors, which outlive the process that wrote them.
//!
//! A store is a name. Each of its versions is an object `/version/STORE/NUMBER`: a head, a manifest, and the bytes of those tensors
//! that changed since the version before. The manifest says of every tensor in which version's object its bytes lie, and their
//! checksum. So a tensor that has not changed is not copied. Four invariants carry everything:
//!
//! 1. **The head comes last.** An object counts as a version once its head is published, after all it leads to is in memory. The head
//!    names the object's own generation, so that what an earlier object left there counts for nothing.
//! 2. **Nothing is written twice.** Only the process that made an object writes there, and after the head never again.
//! 3. **The new one first.** A writer removes older objects only after its own version is published. It keeps those that its version
//!    or the one before it refers to: two versions are whole at any time.
//! 4. **Held while read.** A reader opens every object of a version before it reads. What it has opened stays where it is, also when
//!    a writer removes it meanwhile. If one of them is gone already, a newer version has been published, and the reader looks again.
//!
//! A list of objects may miss what comes while it is made. So each host has a mark: the highest number that a writer of it has
//! published. A reader that finds an older version than any host's mark said when it began looks again.
//!
//! An [`Attempt`] is several processes that publish the same numbers, each in a store of its own. A version of it counts once all of
//! them have it, and none removes what counts before. Stores of processes that it has no more are cleared after that.
//!
//! A store may have an owner: an object of the process that alone publishes there. The next owner takes the place of a dead one.
//!
//! A number is never used again while an object of the store is there. A writer that died leaves an object without a head: the next
//! writer removes it.
//!
//! # Object of a version
//! | line | what |
//! |---|---|
//! | 0 | identity of the process that wrote it |
//! | 1 | head |
//! | from 2 on | manifest |
//! | then | tensors, each from a whole line on |
//!
//! # Object of marks
//! | line | what |
//! |---|---|
//! | `H` | word 0, a checked word: the highest version that a process of host `H` has published, else 0 |

mod attempt;
#[cfg(feature = "hostile")]
pub mod hostile;
mod manifest;
mod reader;
mod writer;

use std::sync::{Arc, Mutex};

use polder_mem::{LINE, Memory};
use twox_hash::XxHash3_128;

use crate::list::ListedObject;
use crate::object::Object;
use crate::{Pool, PoolError};

pub use attempt::Attempt;
pub use reader::{Kept, Version};
pub(crate) use writer::Plan;
pub use writer::Published;

use self::manifest::{Head, MANIFEST_LINE, Manifest};

/// What it is called when it is damaged.
const MANIFEST: &str = "manifest of a version";

/// Versions of named bytes in a pool. Any process reads; one at a time writes.
#[derive(Debug)]
pub struct Store<M: Memory> {
    pool: Arc<Pool<M>>,
    name: String,
}

/// What an object of a store turned out to be.
pub(crate) enum Found<M: Memory> {
    /// A version, all of whose objects are held open.
    Whole(Version<M>),
    /// It has no head: it is being written, or its writer died.
    Unpublished(Object),
    /// It, or what it refers to, was removed.
    Gone,
}

impl<M: Memory> Store<M> {
    /// The store of this name, whether anything is in it or not.
    ///
    /// # Errors
    /// [`PoolError::Name`] when the name is empty, begins with `/`, or is too long.
    pub fn new(pool: Arc<Pool<M>>, name: &str) -> Result<Self, PoolError> {
        let store = Self { pool, name: name.to_owned() };
        if name.is_empty() || name.starts_with('/') {
            return Err(PoolError::Name { name: name.to_owned(), why: "is empty or begins with /" });
        }
        crate::name::Name::parse(&store.object_name(u64::MAX)).map_err(|error| match error {
            PoolError::Name { why, .. } => PoolError::Name { name: name.chars().take(300).collect(), why },
            other => other,
        })?;
        Ok(store)
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The pool that it is in.
    #[must_use]
    pub const fn pool(&self) -> &Arc<Pool<M>> {
        &self.pool
    }

    pub(crate) fn object_name(&self, version: u64) -> String {
        format!("/version/{}/{version}", self.name)
    }

    fn marks_name(&self) -> String {
        format!("/version/{}/marks", self.name)
    }

    /// The marks of the store, if there are any.
    pub(crate) fn marks(&self) -> Result<Option<Object>, PoolError> {
        let Some(marks) = self.pool.open_if_there(&self.marks_name())? else { return Ok(None) };
        if marks.bytes() >= self.marks_bytes() {
            return Ok(Some(marks));
        }
        let offset = marks.at();
        self.pool.close(marks);
        Err(PoolError::Corrupt { offset, what: "marks of a store" })
    }

    /// A line for each host.
    pub(crate) fn marks_bytes(&self) -> u64 {
        u64::from(self.pool.layout().geometry().hosts) * LINE
    }

    /// The objects of this store and their numbers, the newest first.
    pub(crate) fn listed(&self) -> Result<Vec<(u64, ListedObject)>, PoolError> {
        let prefix = format!("/version/{}/", self.name);
        let number = |object: ListedObject| {
            let number = object.name[prefix.len()..].parse().ok()?;
            Some((number, object)).filter(|(number, object)| self.object_name(*number) == object.name)
        };
        let mut listed: Vec<_> = self.pool.list(&prefix)?.into_iter().filter_map(number).collect();
        listed.sort_by_key(|(number, _)| std::cmp::Reverse(*number));
        Ok(listed)
    }

    /// Opens what was listed, unless it is another object by now.
    pub(crate) fn open_listed(&self, listed: &ListedObject) -> Result<Option<Object>, PoolError> {
        let Some(object) = self.pool.open_if_there(&listed.name)? else { return Ok(None) };
        if (object.owner(), object.generation()) == (listed.owner, listed.generation) {
            return Ok(Some(object));
        }
        self.pool.close(object);
        Ok(None)
    }

    /// Looks at an object that this process holds open, and opens what it refers to.
    pub(crate) fn find(&self, number: u64, object: Object) -> Result<Found<M>, PoolError> {
        let head = match Head::read(self.pool.memory(), &object, number) {
            Ok(Some(head)) => head,
            Ok(None) => return Ok(Found::Unpublished(object)),
            Err(error) => {
                self.pool.close(object);
                return Err(error);
            }
        };
        let pool = Arc::clone(&self.pool);
        let (attempt, held) = (head.attempt, vec![object]);
        let (manifest, checked) = (Manifest::default(), Mutex::default());
        let mut version = Version { pool, number, attempt, own_bytes: 0, held, manifest, checked };
        version.manifest = self.load_manifest(&version.held[0], &head)?;
        version.own_bytes = version.held[0].bytes().saturating_sub(manifest::start(head.manifest_bytes));
        for index in 0..version.manifest.others.len() {
            let known = version.manifest.others[index];
            let name = self.object_name(known.number);
            let Some(other) = self.pool.open_if_there(&name)? else { return Ok(Found::Gone) };
            let is_it = manifest::stamp(&other) == known.stamp;
            version.held.push(other);
            if !is_it {
                return Ok(Found::Gone);
            }
        }
        version.check()?;
        Ok(Found::Whole(version))
    }

    /// Reads the manifest that a head leads to.
    // SYNC: pairs with `write`: what the head leads to was in memory before it.
    fn load_manifest(&self, object: &Object, head: &Head) -> Result<Manifest, PoolError> {
        let (memory, at) = (self.pool.memory(), object.at().lines(MANIFEST_LINE));
        let corrupt = PoolError::Corrupt { offset: at, what: MANIFEST };
        if head.manifest_bytes > object.bytes() - MANIFEST_LINE * LINE {
            return Err(corrupt);
        }
        let mut bytes = vec![0; head.manifest_bytes as usize];
        // What this host saw of the object that lay there before.
        memory.invalidate(at, head.manifest_bytes);
        // SYNC: pairs with `write`, as above.
        memory.fence_invalidations();
        memory.copy_out(at, &mut bytes)?;
        if XxHash3_128::oneshot(&bytes) != head.sum {
            return Err(corrupt);
        }
        Manifest::decode(&bytes).ok_or(corrupt)
    }

    /// Removes every version, also one that another process is writing. Those that are read meanwhile stay until they are dropped.
    ///
    /// # Errors
    /// Those of [`Pool::list`] and [`Pool::destroy`].
    pub fn remove(&self) -> Result<(), PoolError> {
        if let Some(marks) = self.marks()? {
            self.discard(marks)?;
        }
        for (_, listed) in self.listed()? {
            if let Some(object) = self.open_listed(&listed)? {
                self.discard(object)?;
            }
        }
        self.disown();
        Ok(())
    }

    fn discard(&self, object: Object) -> Result<(), PoolError> {
        match self.pool.discard(object) {
            Err(PoolError::NotFound { .. }) => Ok(()),
            discarded => discarded,
        }
    }

    fn no_version(&self, version: Option<u64>) -> PoolError {
        let kept = self.versions().unwrap_or_default();
        PoolError::NoVersion { name: self.name.clone(), version, kept }
    }

    /// The versions that are whole now, the oldest first.
    ///
    /// # Errors
    /// Those of [`Pool::list`] and [`Pool::open`].
    pub fn versions(&self) -> Result<Vec<u64>, PoolError> {
        let mut versions = vec![];
        for (number, listed) in self.listed()? {
            let Some(object) = self.open_listed(&listed)? else { continue };
            match self.find(number, object) {
                Ok(Found::Whole(version)) => versions.push(version.number()),
                Ok(Found::Unpublished(object)) => self.pool.close(object),
                Ok(Found::Gone) | Err(PoolError::Corrupt { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        versions.reverse();
        Ok(versions)
    }
}

#[cfg(test)]
mod tests;
