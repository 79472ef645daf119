//! What belongs to a process: an object that says in its first line what it is and whose, before anybody can find it.
//!
//! Only its process writes there. A process that dies leaves its objects behind; the next one that makes an object of the
//! same name and kind takes the place of a dead one, and of no other.
//!
//! # Words of an identity
//! | word | what |
//! |---|---|
//! | 0 | kind: 1 endpoint, 2 ring, 3 segment of a window, 4 private memory, 5 extent of a rank, 6 receiver of a channel, 7 part of a service, 8 version of a store, 9 blocks of an endpoint |
//! | 1 | bits 0..32 process id, bits 32..48 slot, bits 48..64 host |
//! | 2 | incarnation of the process |
//! | 3 | incarnation of its host |
//! | 4..7 | the kind's own |

use polder_mem::Memory;

use crate::line::{self, Words};
use crate::membership::Process;
use crate::object::{InitialContents, Object};
use crate::{Pool, PoolError};

/// What an object is that belongs to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// An endpoint.
    Endpoint = 1,
    /// A ring, of the process that sends.
    Ring = 2,
    /// A rank's segment of a window.
    Segment = 3,
    /// Memory that one process has for itself.
    Private = 4,
    /// A rank's extent of a group.
    Rank = 5,
    /// What says that a process receives from a channel.
    Receiver = 6,
    /// A client's or a proxy's part of a parameter service.
    Part = 7,
    /// A version of a store.
    Version = 8,
    /// Blocks of an endpoint, for rings to its peers.
    Blocks = 9,
}

/// What the first line of such an object says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) kind: Kind,
    pub(crate) process: Process,
    /// The kind's own words.
    pub(crate) own: [u64; 3],
}

impl Kind {
    const ALL: [Self; 9] = [
        Self::Endpoint,
        Self::Ring,
        Self::Segment,
        Self::Private,
        Self::Rank,
        Self::Receiver,
        Self::Part,
        Self::Version,
        Self::Blocks,
    ];

    /// What these words say, if they are an identity.
    pub(crate) fn of(words: &Words) -> Option<Self> {
        Self::ALL.into_iter().find(|&kind| words[0] == kind as u64)
    }
}

impl Identity {
    pub(crate) fn encode(&self) -> Words {
        let [place, incarnation, host_incarnation] = self.process.identity();
        let [a, b, c] = self.own;
        [self.kind as u64, place, incarnation, host_incarnation, a, b, c]
    }

    /// What these words say, if they are of this kind.
    pub(crate) fn decode(words: &Words, kind: Kind) -> Option<Self> {
        let [word, place, incarnation, host_incarnation, a, b, c] = *words;
        let process = Process::from_identity([place, incarnation, host_incarnation]);
        (word == kind as u64).then_some(Self { kind, process, own: [a, b, c] })
    }

    /// The identity of an object; nothing when it is no object of this kind.
    ///
    /// # Errors
    /// [`PoolError::Memory`], and [`PoolError::Corrupt`] when its first line is damaged.
    pub(crate) fn find<M: Memory>(
        pool: &Pool<M>,
        object: &Object,
        kind: Kind,
    ) -> Result<Option<Self>, PoolError> {
        match line::read(pool.memory(), object.at())? {
            Some(words) => Ok(Self::decode(&words, kind)),
            None => Err(PoolError::Corrupt { offset: object.at(), what: "identity of a process" }),
        }
    }

    /// The identity of an object of this kind.
    ///
    /// # Errors
    /// [`PoolError::Memory`], and [`PoolError::Corrupt`] when it is of another kind, or damaged.
    pub(crate) fn read<M: Memory>(pool: &Pool<M>, object: &Object, kind: Kind) -> Result<Self, PoolError> {
        let corrupt = PoolError::Corrupt { offset: object.at(), what: "identity of a process" };
        Self::find(pool, object, kind)?.ok_or(corrupt)
    }
}

/// Makes the object `name` of this process, of `bytes` bytes with the identity in the first line and zeros behind it.
///
/// # Errors
/// Those of [`Pool::create`].
pub(crate) fn create_new<M: Memory>(
    pool: &Pool<M>,
    name: &str,
    bytes: u64,
    kind: Kind,
    own: [u64; 3],
) -> Result<Object, PoolError> {
    let identity = Identity { kind, process: pool.this_process(), own }.encode();
    pool.create_filled(name, bytes, InitialContents::Line(identity))
}

/// As [`create_new`], with whatever was there behind the identity.
///
/// # Errors
/// Those of [`Pool::create`].
pub(crate) fn create_unfilled<M: Memory>(
    pool: &Pool<M>,
    name: &str,
    bytes: u64,
    kind: Kind,
    own: [u64; 3],
) -> Result<Object, PoolError> {
    let identity = Identity { kind, process: pool.this_process(), own }.encode();
    pool.create_filled(name, bytes, InitialContents::LineOnly(identity))
}

/// As [`create_new`], and takes the place of an object of the same kind whose process died.
///
/// # Errors
/// [`PoolError::Exists`] when its process may still be there, or it is something else; [`PoolError::Corrupt`] when its identity is
/// damaged; those of [`Pool::create`] and [`Pool::destroy`].
pub(crate) fn create<M: Memory>(
    pool: &Pool<M>,
    name: &str,
    bytes: u64,
    kind: Kind,
    own: [u64; 3],
) -> Result<Object, PoolError> {
    create_after(pool, name, bytes, kind, own, || Ok(()))
}

/// As [`create`]; `tidy` runs once a dead process's object has been removed, before this one is made in its place.
///
/// # Errors
/// Those of [`create`] and of `tidy`.
pub(crate) fn create_after<M: Memory>(
    pool: &Pool<M>,
    name: &str,
    bytes: u64,
    kind: Kind,
    own: [u64; 3],
    tidy: impl FnOnce() -> Result<(), PoolError>,
) -> Result<Object, PoolError> {
    let make = || create_new(pool, name, bytes, kind, own);
    match make() {
        Err(PoolError::Exists { .. }) if remove_the_dead(pool, name, kind)? => {
            tidy()?;
            make()
        }
        made => made,
    }
}

/// Removes the object `name` if it is of this kind and its process died; whether there is none any more.
///
/// # Errors
/// [`PoolError::Corrupt`] when its identity is damaged; those of [`Pool::open`] and [`Pool::destroy`].
pub(crate) fn remove_the_dead<M: Memory>(pool: &Pool<M>, name: &str, kind: Kind) -> Result<bool, PoolError> {
    let object = match pool.open(name) {
        Err(PoolError::NotFound { .. }) => return Ok(true),
        object => object?,
    };
    match owner_is_dead(pool, &object, kind) {
        Ok(true) => match pool.discard(object) {
            Err(PoolError::NotFound { .. }) => Ok(true),
            removed => removed.map(|()| true),
        },
        held => {
            pool.close(object);
            held
        }
    }
}

fn owner_is_dead<M: Memory>(pool: &Pool<M>, object: &Object, kind: Kind) -> Result<bool, PoolError> {
    let Some(identity) = Identity::find(pool, object, kind)? else { return Ok(false) };
    match pool.expect_alive(&identity.process, "object", 0) {
        Err(PoolError::PeerDead { .. }) => Ok(true),
        alive => alive.map(|()| false),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use polder_mem::Heap;

    use super::*;
    use crate::Member;
    use crate::format::Geometry;
    use crate::testing::formatted;

    fn pool() -> Pool<Heap> {
        pool_within(Duration::from_secs(5))
    }

    /// A pool of two hosts, as the first process of host 0.
    pub(crate) fn pool_within(timeout: Duration) -> Pool<Heap> {
        pool_of(256 << 10, timeout)
    }

    pub(crate) fn pool_of(bytes: u64, timeout: Duration) -> Pool<Heap> {
        let geometry = Geometry {
            hosts: 2,
            processes: 2,
            names: 31,
            levels: 4,
            chunk_bytes: 16 << 10,
            opens: 40,
            keepers: 1,
        };
        let heap = formatted(&geometry, bytes);
        Pool::attach(heap, Member { timeout, ..Member::new(0, 7) }).unwrap()
    }

    #[test]
    fn an_object_of_a_process_is_replaced_when_that_is_dead_and_the_kind_is_the_same() {
        let pool = pool();
        let make = |kind| create(&pool, "/a", 128, kind, [1, 2, 3]);
        let object = make(Kind::Private).unwrap();
        let known = Identity { kind: Kind::Private, process: pool.this_process(), own: [1, 2, 3] };
        assert_eq!(
            Identity::find(&pool, &object, Kind::Private),
            Ok(Some(Identity { process: Process { job: 0, quota: 0, ..known.process }, ..known }))
        );
        assert_eq!(Identity::find(&pool, &object, Kind::Segment), Ok(None));
        let exists = Err(PoolError::Exists { name: "/a".into() });
        assert_eq!(make(Kind::Private).map(|_| ()), exists, "its process lives");
        let process = pool.this_process();
        let before = Process { incarnation: process.incarnation + 1, ..process };
        line::publish(pool.memory(), object.at(), &Identity { process: before, ..known }.encode());
        assert_eq!(make(Kind::Segment).map(|_| ()), exists, "it is something else");
        let tidied = std::cell::Cell::new(false);
        let tidy = || {
            assert!(pool.list("").unwrap().is_empty(), "it is removed before the next is made");
            tidied.set(true);
            Ok(())
        };
        let next = create_after(&pool, "/a", 128, Kind::Private, [4, 5, 6], tidy).unwrap();
        assert!(tidied.get());
        assert_eq!(Identity::read(&pool, &next, Kind::Private).unwrap().own, [4, 5, 6]);
        pool.memory().store(next.at(), 9);
        let corrupt = PoolError::Corrupt { offset: next.at(), what: "identity of a process" };
        assert_eq!(make(Kind::Private).map(|_| ()), Err(corrupt), "nobody knows whose it is");
    }
}
