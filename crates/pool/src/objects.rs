//! What a pool offers: named objects.

pub(crate) mod owned;
pub(crate) mod private;
mod together;

use std::ops::Range;
use std::time::Duration;

use polder_mem::Memory;

use crate::directory::Directory;
use crate::extents::Account;
use crate::list::ListedObject;
use crate::name::Name;
use crate::object::{InitialContents, Object};
use crate::site::Site;
use crate::{Pool, PoolError};

impl<M: Memory> Pool<M> {
    /// Creates an object of `bytes` zeros and holds it open. A process that learns its name after this returns can open it.
    ///
    /// # Errors
    /// [`PoolError::Evicted`] once a sign of life of this process has met the eviction; [`PoolError::Exists`];
    /// [`PoolError::Full`], [`PoolError::DirectoryFull`] and [`PoolError::Quota`], after which nothing is
    /// left of it; [`PoolError::TooManyOpen`]; [`PoolError::Name`]; [`PoolError::Timeout`] when another host claims the name
    /// and does not go on.
    pub fn create(&self, name: &str, bytes: u64) -> Result<Object, PoolError> {
        self.create_filled(name, bytes, InitialContents::Zeros)
    }

    /// As [`Pool::create`], with a note on what the object holds, which [`Object::note`] gives to everyone that opens it.
    ///
    /// # Errors
    /// Those of [`Pool::create`]; [`PoolError::Argument`] when the note is too long beside the name.
    pub fn create_noted(&self, name: &str, bytes: u64, note: &str) -> Result<Object, PoolError> {
        self.expect_member()?;
        let name = Name::parse(name)?.with_note(note)?;
        self.directory().create(&name, bytes, InitialContents::Zeros)
    }

    /// As [`Pool::create`], with `fill` in it.
    ///
    /// # Errors
    /// Those of [`Pool::create`].
    pub fn create_filled(&self, name: &str, bytes: u64, fill: InitialContents) -> Result<Object, PoolError> {
        self.expect_member()?;
        self.directory().create(&Name::parse(name)?, bytes, fill)
    }

    /// As [`Pool::open`]; nothing where no object has this name.
    ///
    /// # Errors
    /// The others of [`Pool::open`].
    pub(crate) fn open_if_there(&self, name: &str) -> Result<Option<Object>, PoolError> {
        match self.open(name) {
            Err(PoolError::NotFound { .. }) => Ok(None),
            opened => opened.map(Some),
        }
    }

    /// Opens an object and holds it open. What was published to it before is seen by reads that invalidate first, as
    /// [`Object::read_at`] does.
    ///
    /// # Errors
    /// [`PoolError::NotFound`], [`PoolError::TooManyOpen`], [`PoolError::Name`], and [`PoolError::Corrupt`] when its entry or header
    /// is damaged.
    pub fn open(&self, name: &str) -> Result<Object, PoolError> {
        self.expect_member()?;
        self.directory().open(&Name::parse(name)?)
    }

    /// Lets go of an object. What this process stored to another host's must have been written back, as [`Object::write_at`] does:
    /// its bytes may be another object's soon. What the owner's host stored is written back when the object is freed.
    pub fn close(&self, object: Object) {
        self.directory().close(&object);
    }

    /// Destroys the object of this name. Once this returns, no process finds it. A process that holds it open keeps it until it
    /// closes it. If two processes destroy one object at the same time, both may succeed.
    ///
    /// # Errors
    /// [`PoolError::NotFound`], [`PoolError::Name`]; [`PoolError::DirectoryFull`] when another host owns it and this host's
    /// directory has no slot to say so; [`PoolError::Corrupt`] when its entry is damaged, or was when the host started.
    pub fn destroy(&self, name: &str) -> Result<(), PoolError> {
        self.expect_member()?;
        self.directory().destroy(&Name::parse(name)?)
    }

    /// Whether the object of this name, of a host and a generation, has not been destroyed, as far as one look says.
    ///
    /// # Errors
    /// [`PoolError::Name`], [`PoolError::Memory`].
    pub(crate) fn is_live(&self, name: &str, owner: u16, generation: u64) -> Result<bool, PoolError> {
        self.directory().is_live(&Name::parse(name)?, owner, generation)
    }

    /// Whether the entry in this slot of `owner` is that of a live object of this generation, as far as one look at it says.
    ///
    /// # Errors
    /// [`PoolError::Memory`].
    pub(crate) fn stands(&self, owner: u16, slot: u32, generation: u64) -> Result<bool, PoolError> {
        self.directory().stands(owner, slot, generation)
    }

    /// Where the object of this generation lies whose entry is in this slot of `owner`; nothing once that host has condemned it. It is not
    /// held open.
    ///
    /// # Errors
    /// [`PoolError::Memory`].
    pub(crate) fn find_place(
        &self,
        owner: u16,
        slot: u32,
        generation: u64,
    ) -> Result<Option<Range<u64>>, PoolError> {
        self.directory().find_place(owner, slot, generation)
    }

    /// Lets go of an object and destroys it, unless its name is another's by now.
    ///
    /// # Errors
    /// Those of [`Pool::destroy`].
    pub(crate) fn discard(&self, object: Object) -> Result<(), PoolError> {
        self.directory().discard(&object)
    }

    /// As [`Pool::discard`], where nobody is left to be told that it failed.
    pub(crate) fn abandon(&self, object: Object) {
        let name = object.name().to_owned();
        match self.discard(object) {
            Ok(()) | Err(PoolError::NotFound { .. }) => {}
            Err(error) => tracing::warn!("{name} stays in the pool: {error}"),
        }
    }

    /// The live objects whose names begin with `prefix`, in no order. What comes or goes meanwhile may be missing, and what is
    /// damaged is: [`inspect`](crate::inspect()) counts it.
    ///
    /// # Errors
    /// [`PoolError::Memory`] when the memory fails.
    pub fn list(&self, prefix: &str) -> Result<Vec<ListedObject>, PoolError> {
        let (listed, unclear) = self.directory().list(prefix)?;
        for offset in unclear {
            tracing::warn!(%offset, "an entry that is damaged, or being written, is not listed");
        }
        Ok(listed)
    }

    /// Frees what can be freed of destroyed objects, this host's and those that other hosts destroyed, and puts right what
    /// processes of this host left that died. What other processes of this host, or threads of this one, were freeing is
    /// free when this returns. Calls that run short of room free by themselves.
    ///
    /// # Errors
    /// [`PoolError::Timeout`] when another process of this host does not let go of a lock.
    pub fn maintain(&self) -> Result<(), PoolError> {
        self.maintain_within(self.member.timeout)
    }

    /// [`Pool::maintain`] for a host's heartbeat, every now and then: it waits for a lock for `patience`, less than the silence
    /// that others take for death, and leaves what it cannot do to the next time.
    ///
    /// # Errors
    /// [`PoolError::Timeout`] when another process of this host does not let go of a lock.
    pub fn maintain_within(&self, patience: Duration) -> Result<(), PoolError> {
        self.sweep(patience)?;
        self.directory_within(patience).maintain().map(|_| ())
    }

    pub(crate) fn directory(&self) -> Directory<'_, M> {
        self.directory_within(self.member.timeout)
    }

    pub(crate) fn directory_within(&self, patience: Duration) -> Directory<'_, M> {
        let member = &self.member;
        let site = Site { memory: &self.memory, layout: &self.layout, me: &self.local, patience };
        Directory { site, account: Account { job: member.job, quota: member.quota } }
    }
}

#[cfg(test)]
mod tests {
    use polder_mem::{Heap, ProcessSlot};

    use super::*;
    use crate::Member;
    use crate::format::{Geometry, Layout};
    use crate::local::LocalLayout;
    use crate::testing::formatted;

    const BYTES: u64 = 256 << 10;
    /// Large enough that no host keeps an empty one.
    const CHUNK: u64 = 16 << 10;
    const SMALL: Geometry =
        Geometry { hosts: 3, processes: 2, names: 31, levels: 4, chunk_bytes: CHUNK, opens: 40, keepers: 1 };

    fn attach(memory: Heap, host: u16) -> Pool<Heap> {
        let timeout = Duration::from_secs(5);
        Pool::attach(memory, Member { timeout, ..Member::new(host, 7) }).unwrap()
    }

    /// One process on each of three hosts.
    fn pools() -> [Pool<Heap>; 3] {
        let heap = formatted(&SMALL, BYTES);
        let [one, two] = [1, 2].map(|host| heap.process(host, ProcessSlot(0)));
        [attach(heap, 0), attach(one, 1), attach(two, 2)]
    }

    fn free_bytes(pool: &Pool<Heap>) -> u64 {
        pool.maintain().unwrap();
        match pool.create("/probe", u64::MAX / 4) {
            Err(PoolError::Full { free, .. }) => free,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_one_host_creates_every_host_opens_lists_and_destroys() {
        let [a, b, c] = pools();
        let object = a.create("/weights", 1000).unwrap();
        object.write_at(a.memory(), 0, b"hello").unwrap();
        let seen = c.open("/weights").unwrap();
        let mut read = [0; 6];
        seen.read_at(c.memory(), 0, &mut read).unwrap();
        assert_eq!(&read, b"hello\0");
        assert_eq!((seen.at(), seen.bytes(), seen.generation(), seen.owner()), (object.at(), 1000, 1, 0));
        assert_eq!(b.create("/weights", 1).unwrap_err(), PoolError::Exists { name: "/weights".into() });
        assert_eq!(a.create("/weights", 1).unwrap_err(), PoolError::Exists { name: "/weights".into() });
        let names = |pool: &Pool<Heap>, prefix| -> Vec<String> {
            pool.list(prefix).unwrap().into_iter().map(|listed| listed.name).collect()
        };
        assert_eq!(names(&b, "/w"), ["/weights"]);
        assert_eq!(names(&b, "/x"), [""; 0]);
        b.destroy("/weights").unwrap();
        for pool in [&a, &b, &c] {
            assert_eq!(pool.open("/weights").unwrap_err(), PoolError::NotFound { name: "/weights".into() });
            pool.destroy("/weights").unwrap_err();
            assert_eq!(names(pool, ""), [""; 0]);
        }
        c.close(seen);
        a.close(object);
    }

    #[test]
    fn what_a_creator_notes_of_an_object_everyone_reads_that_opens_it() {
        let [a, b, _c] = pools();
        a.close(a.create_noted("/noted", 24, "<f8 (3,)").unwrap());
        a.close(a.create("/bare", 24).unwrap());
        for (name, note) in [("/noted", "<f8 (3,)"), ("/bare", "")] {
            for pool in [&a, &b] {
                let object = pool.open(name).unwrap();
                assert_eq!((object.name(), object.note(), object.bytes()), (name, note, 24));
                pool.close(object);
            }
        }
        let long = b.create_noted("/long", 24, &"x".repeat(256)).unwrap_err().to_string();
        assert!(long.contains("256 bytes beside a name of 5"), "{long}");
        let mut names: Vec<_> = b.list("").unwrap().into_iter().map(|listed| listed.name).collect();
        names.sort();
        assert_eq!(names, ["/bare", "/noted"]);
        assert_eq!(crate::inspect(a.memory()).unwrap().problems, []);
    }

    #[test]
    fn an_object_is_found_with_its_first_line_and_discarded_unless_another_has_its_name() {
        let [a, b, _c] = pools();
        let words = [1, 2, 3, 4, 5, 6, 7];
        let first = a.create_filled("/line", 128, InitialContents::Line(words)).unwrap();
        let seen = b.open("/line").unwrap();
        assert_eq!(crate::line::read(b.memory(), seen.at()), Ok(Some(words)));
        assert_eq!(crate::line::read(b.memory(), seen.at().lines(1)), Ok(Some([0; 7])));
        b.discard(seen).unwrap();
        let second = b.create_filled("/line", 0, InitialContents::Line(words)).unwrap();
        assert_eq!(a.discard(first), Err(PoolError::NotFound { name: "/line".into() }));
        a.close(a.open("/line").unwrap());
        b.discard(second).unwrap();
        assert_eq!(a.list(""), Ok(vec![]));
    }

    #[test]
    fn a_destroyed_object_stays_until_its_last_holder_closes_it() {
        let [a, b, c] = pools();
        let full = free_bytes(&a);
        let object = a.create("/a", 500).unwrap();
        let seen = b.open("/a").unwrap();
        a.close(object);
        c.destroy("/a").unwrap();
        a.maintain().unwrap();
        let again = c.create("/a", 500).unwrap();
        assert_ne!(again.at(), seen.at());
        assert!(free_bytes(&a) < full);
        assert!(c.open("/a").unwrap().generation() == again.generation());
        b.close(seen);
        c.destroy("/a").unwrap();
        c.close(again);
        c.maintain().unwrap();
        a.maintain().unwrap();
        // The holder that never closed keeps its object.
        assert!(free_bytes(&a) < full);
        drop(c);
        a.maintain().unwrap();
        let c = attach(a.memory().process(2, ProcessSlot(0)), 2);
        c.maintain().unwrap();
        assert_eq!(free_bytes(&a), full, "everything has come back");
    }

    #[test]
    fn a_pool_that_is_full_says_so_and_loses_nothing() {
        let [a, b, _c] = pools();
        let all = free_bytes(&a);
        let mut names = vec![];
        let full = loop {
            let name = format!("/{}", names.len());
            match [&a, &b][names.len() % 2].create(&name, 12000) {
                Ok(object) => [&a, &b][names.len() % 2].close(object),
                Err(error) => break error,
            }
            names.push(name);
        };
        assert!(matches!(full, PoolError::Full { asked: 12096, .. }), "{full}");
        assert!(names.len() as u64 >= all / CHUNK);
        let PoolError::Full { free, largest, .. } = full else { unreachable!() };
        assert!(largest < 12096 && largest <= free, "{largest} of {free}");
        let last = [&a, &b][names.len() % 2];
        let more = last.create("/more", largest).unwrap_err();
        assert!(matches!(more, PoolError::Full { .. }), "its header has no room: {more}");
        last.close(last.create("/most", largest - 64).unwrap());
        names.push("/most".to_owned());
        for name in &names {
            b.destroy(name).unwrap();
        }
        a.maintain().unwrap();
        b.maintain().unwrap();
        assert_eq!(free_bytes(&a), all);
    }

    #[test]
    fn objects_of_any_size_lie_side_by_side_until_none_fits_any_more() {
        for bytes in [CHUNK / 4, CHUNK / 2, CHUNK / 2 + 64, CHUNK - 64, CHUNK, CHUNK + 64, 2 * CHUNK] {
            let heap = formatted(&Geometry { names: 127, ..SMALL }, BYTES);
            let [a, b] = [attach(heap.clone(), 0), attach(heap.process(1, ProcessSlot(0)), 1)];
            drop(heap);
            let (whole, all) = (bytes + 64, free_bytes(&b));
            let full = (0..)
                .find_map(|index| a.create(&format!("/{index}"), bytes).map(|object| a.close(object)).err());
            let Some(PoolError::Full { asked, free, largest }) = full else { panic!("{full:?}") };
            assert_eq!((asked, largest), (whole, free), "{bytes} bytes: what is free is in one piece");
            assert!(free < whole && (all - free).is_multiple_of(whole), "{free} of {all} are left");
            let names: Vec<_> = a.list("").unwrap().into_iter().map(|listed| listed.name).collect();
            assert_eq!(names.len() as u64, all / whole);
            names.iter().for_each(|name| b.destroy(name).unwrap());
            a.maintain().unwrap();
            assert_eq!(free_bytes(&b), all);
        }
    }

    #[test]
    fn large_objects_take_whole_chunks_in_a_row_and_leave_the_rest_of_the_last() {
        let [a, b, _c] = pools();
        let all = free_bytes(&a);
        let large = a.create("/large", 3 * CHUNK).unwrap();
        let small = a.create("/small", 1000).unwrap();
        assert!(small.at() > large.at() && small.at().0 < large.at().0 + 4 * CHUNK, "in its last chunk");
        assert_eq!(free_bytes(&b), all - 4 * CHUNK);
        a.destroy("/large").unwrap();
        a.destroy("/small").unwrap();
        a.close(large);
        a.close(small);
        assert_eq!(free_bytes(&a), all);
        let whole = a.create("/whole", all - 64).unwrap();
        a.close(whole);
        assert!(matches!(b.create("/b", 0), Err(PoolError::Full { asked: 64, free: 0, largest: 0 })));
        a.destroy("/whole").unwrap();
        a.maintain().unwrap();
        b.close(b.create("/b", 0).unwrap());
    }

    #[test]
    fn a_full_directory_knows_its_names_and_can_be_emptied_from_another_host() {
        let geometry = Geometry { names: 11, ..SMALL };
        let heap = formatted(&geometry, BYTES);
        let other = heap.process(1, ProcessSlot(0));
        let [a, b] = [attach(heap, 0), attach(other, 1)];
        let mut names = vec![];
        for pool in [&a, &b] {
            let full = (0..).find_map(|index| {
                let name = format!("/{}/{index}", pool.member().host);
                match pool.create(&name, 0) {
                    Ok(object) => pool.close(object),
                    Err(error) => return Some(error),
                }
                names.push(name);
                None
            });
            assert!(matches!(full, Some(PoolError::DirectoryFull { .. })), "{full:?}");
        }
        assert!(names.len() >= 2 * 12, "{} of 2 * 23 slots in use", names.len());
        for name in &names {
            let exists = Err(PoolError::Exists { name: name.clone() });
            assert_eq!(
                [&a, &b].map(|pool| pool.create(name, 0).map(|object| pool.close(object))),
                [exists.clone(), exists]
            );
        }
        for name in &names {
            a.destroy(name).unwrap();
            b.maintain().unwrap();
            a.maintain().unwrap();
        }
        assert_eq!(b.directory().inventory().unwrap().tombstones, 0);
        for name in names.iter().filter(|name| name.starts_with("/1/")) {
            b.close(b.create(name, 0).unwrap());
        }
    }

    #[test]
    fn a_quota_holds_for_a_job_on_a_host_and_comes_back() {
        let heap = formatted(&SMALL, BYTES);
        let other = heap.process(0, ProcessSlot(1));
        let a = Pool::attach(heap, Member { job: 5, quota: 1024, ..Member::new(0, 7) }).unwrap();
        let b = Pool::attach(other, Member { job: 6, quota: 1 << 20, ..Member::new(0, 7) }).unwrap();
        a.close(a.create("/1", 700).unwrap());
        let refused = a.create("/2", 300).unwrap_err();
        assert_eq!(refused, PoolError::Quota { job: 5, quota: 1024, held: 768, asked: 384 });
        b.close(b.create("/2", 300).unwrap());
        b.destroy("/1").unwrap();
        a.close(a.create("/3", 300).unwrap());
    }

    #[test]
    fn more_jobs_than_are_counted_have_objects_when_they_have_no_quota() {
        let heap = formatted(&Geometry { names: 127, ..SMALL }, BYTES);
        let first = attach(heap.clone(), 0);
        for job in 0..70 {
            let member = Member { job, ..Member::new(0, 7) };
            let pool = Pool::attach(heap.process(0, ProcessSlot(1)), member).unwrap();
            pool.close(pool.create(&format!("/{job}"), 8).unwrap());
        }
        let member = Member { job: 70, quota: 1024, ..Member::new(0, 7) };
        let last = Pool::attach(heap.process(0, ProcessSlot(1)), member).unwrap();
        let refused = last.create("/70", 8).unwrap_err();
        assert!(matches!(refused, PoolError::Quota { job: 70, .. }), "{refused}");
        (0..70).for_each(|job| first.destroy(&format!("/{job}")).unwrap());
        last.close(last.create("/70", 8).unwrap());
    }

    #[test]
    fn a_process_may_hold_so_many_objects_open_and_no_more() {
        let [a, b, _c] = pools();
        let mut held: Vec<_> = (0..20).map(|index| a.create(&format!("/{index}"), 0).unwrap()).collect();
        held.extend((0..20).map(|index| a.open(&format!("/{index}")).unwrap()));
        assert_eq!(a.open("/1").unwrap_err(), PoolError::TooManyOpen { limit: 40 });
        assert_eq!(a.create("/new", 0).unwrap_err(), PoolError::TooManyOpen { limit: 40 });
        b.close(b.open("/1").unwrap());
        a.close(held.pop().unwrap());
        a.close(a.open("/1").unwrap());
    }

    #[test]
    fn opens_that_fail_before_they_are_announced_take_no_place() {
        let heap = formatted(&SMALL, BYTES);
        let sibling = heap.process(0, ProcessSlot(1));
        let hasty = Member { timeout: Duration::from_millis(2), ..Member::new(0, 7) };
        let [a, b] = [Pool::attach(heap, hasty).unwrap(), attach(sibling, 0)];
        b.close(b.create("/a", 0).unwrap());
        // A sibling that stands still under the lock for marks.
        let held = b.directory().site.lock(crate::state::LockName::Announcements).unwrap();
        for _ in 0..SMALL.opens {
            let late = a.open("/a").unwrap_err();
            assert!(matches!(late, PoolError::Timeout { .. }), "{late}");
        }
        drop(held);
        a.close(a.open("/a").unwrap());
    }

    #[test]
    fn chunks_that_were_won_and_could_not_be_taken_up_are_anybodys_again() {
        let heap = formatted(&SMALL, BYTES);
        let [sibling, other] = [heap.process(0, ProcessSlot(1)), heap.process(1, ProcessSlot(0))];
        let hasty = Member { timeout: Duration::from_millis(5), ..Member::new(0, 7) };
        let [a, b, c] = [Pool::attach(heap, hasty).unwrap(), attach(sibling, 0), attach(other, 1)];
        let all = free_bytes(&c);
        // A sibling that stands still under the allocator's lock.
        let held = b.directory().site.lock(crate::state::LockName::Allocator).unwrap();
        let late = a.create("/large", 3 * CHUNK).unwrap_err();
        assert!(matches!(late, PoolError::Timeout { .. }), "{late}");
        drop(held);
        for bytes in [u64::MAX / 4, u64::MAX - 200, u64::MAX] {
            let PoolError::Full { asked, free, largest } = a.create("/other", bytes).unwrap_err() else {
                panic!("there is room")
            };
            assert!(asked > u64::MAX / 5 && free > 0 && largest > 0, "{asked} {free} {largest}");
        }
        assert_eq!(free_bytes(&c), all, "chunks that nobody holds are claimed");
        a.close(a.create("/large", all - 64).unwrap());
    }

    #[test]
    fn a_generation_line_that_a_dead_process_left_torn_is_whole_again() {
        for words_are_lost in [false, true] {
            let heap = formatted(&SMALL, BYTES);
            let sibling = heap.process(0, ProcessSlot(1));
            let victim = attach(heap.clone(), 0);
            victim.close(victim.create("/a", 0).unwrap());
            let at = victim.layout.generation_line(0);
            // As if it had died in the middle of raising the limit, under the lock for it.
            std::mem::forget(victim.directory().site.lock(crate::state::LockName::Allocator).unwrap());
            heap.store(at, 1 << 20);
            victim.die();
            drop(heap);
            assert_eq!(crate::inspect(&sibling).unwrap().problems.len(), 1);
            if words_are_lost {
                let words = LocalLayout::new(&Layout::new(&SMALL, BYTES).unwrap()).words();
                (0..words).for_each(|word| sibling.local_store(polder_mem::LocalWord(word), 0));
            }
            let next = attach(sibling, 0);
            assert_eq!(crate::inspect(next.memory()).unwrap().problems, []);
            next.close(next.create("/b", 0).unwrap());
        }
    }

    #[test]
    fn who_maintains_waits_for_whoever_is_freeing_no_longer_than_it_may() {
        let a = attach(formatted(&SMALL, BYTES), 0);
        let directory = a.directory();
        let held = directory.lock(0).unwrap();
        directory.set_intent(0, crate::directory::Intent::Reclaim(0));
        let refused = a.maintain_within(Duration::from_millis(3)).unwrap_err();
        assert!(matches!(refused, PoolError::Timeout { waited_ms: 3, .. }), "{refused}");
        directory.clear_intent(0);
        drop(held);
        a.maintain_within(Duration::ZERO).unwrap();
    }

    #[test]
    fn a_heartbeat_that_a_dead_process_left_torn_is_whole_again() {
        let heap = formatted(&SMALL, BYTES);
        let sibling = heap.process(0, ProcessSlot(1));
        let (victim, other) = (attach(heap.clone(), 0), attach(sibling, 0));
        let at = victim.layout.heartbeat_line(0, ProcessSlot(0));
        drop(victim);
        // As if the next in its place had died in its first sign of life, before its line said that it lives.
        heap.store(at, 1 << 20);
        drop(heap);
        assert_eq!(crate::inspect(other.memory()).unwrap().problems.len(), 1);
        other.maintain().unwrap();
        assert_eq!(crate::inspect(other.memory()).unwrap().problems, []);
    }

    #[test]
    fn a_host_that_comes_back_with_new_words_finds_what_it_had() {
        let geometry = SMALL;
        let heap = formatted(&geometry, BYTES);
        let other = heap.process(1, ProcessSlot(0));
        let [a, b] = [attach(heap, 0), attach(other, 1)];
        let all = free_bytes(&b);
        for (name, bytes) in [("/large", 40000), ("/small", 100), ("/open", 200), ("/gone", 300)] {
            a.close(a.create(name, bytes).unwrap());
        }
        b.close(b.create("/theirs", 10).unwrap());
        let held = b.open("/open").unwrap();
        a.destroy("/open").unwrap();
        a.destroy("/gone").unwrap();
        a.destroy("/theirs").unwrap();
        let before = free_bytes(&b);
        let memory = a.memory().clone();
        drop(a);
        let words = LocalLayout::new(&Layout::new(&geometry, BYTES).unwrap()).words();
        for word in 0..words {
            memory.local_store(polder_mem::LocalWord(word), 0);
        }
        let a = attach(memory, 0);
        let mut names: Vec<_> = a.list("").unwrap().into_iter().map(|listed| listed.name).collect();
        names.sort();
        assert_eq!(names, ["/large", "/small"]);
        b.maintain().unwrap();
        a.maintain().unwrap();
        assert!(free_bytes(&b) >= before);
        let new = a.create("/new", 100).unwrap();
        assert!(new.generation() > 4, "generations are used once");
        a.close(new);
        for name in ["/large", "/small", "/new"] {
            b.destroy(name).unwrap();
        }
        b.close(held);
        a.maintain().unwrap();
        b.maintain().unwrap();
        a.maintain().unwrap();
        assert_eq!(free_bytes(&b), all);
    }
}
