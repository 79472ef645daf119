//! How ranks find each other.
//!
//! 1. Each rank makes the object `NAME/RANK`, its extent. The first line is the rank's identity, written before another
//!    rank can find the object.
//! 2. Each rank acknowledges every extent that it has found.
//! 3. A rank has found all others when every rank has acknowledged the very extent that it made. So no rank uses an
//!    extent of an earlier group of the same name, and none leaves before a late rank has come.
//! 4. If a rank dies meanwhile, some ranks may have found it, and others its successor. So a barrier follows, in which
//!    ranks compare what they found. If that differs, the join fails with [`PoolError::GaveUp`], and the caller may join
//!    anew. So an extent belongs to one group at most.
//!
//! A process that joins as the same rank of the same name removes the extents of a rank that died.
//!
//! The acknowledgements lie where the first half of the staging will be, a word for each rank. The first operation stages in
//! the other half, and the second begins when all ranks are in the first (see invariants 2 and 3 of [`super`]).
//!
//! # Extent of a rank
//! | line | what |
//! |---|---|
//! | 0 | identity |
//! | 1 | spare, 0 |
//! | 2 | progress |
//! | 3 | spare, 0 |
//! | from 4 on | staging, in two halves: operation `k` has the half `k mod 2` |
//!
//! # Own words of an identity
//! | word | what |
//! |---|---|
//! | 4 | bits 0..16 how many ranks there are, bits 16..32 the rank, bits 32..64 lines of staging that the group may have |
//! | 5 | bytes of staging here |
//! | 6 | bits 0..32 bytes up to which a message goes in one exchange, bits 32..64 bytes of a segment |
//!
//! While ranks meet, word `r` of the staging acknowledges the extent of rank `r`: bits 0..56 are the generation of its
//! object, bits 56..64 its owner. During an operation, its schedule says what a half of the staging holds.

use std::collections::BTreeSet;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use polder_mem::{Bell, LINE, Liveness, Memory, Nanos, Offset};
use polder_platform::{quoted, sized};
use twox_hash::XxHash3_64;

use super::signature::MAX_RANKS;
use super::staging::first_bytes;
use super::{Group, GroupOptions, Interrupt, RankPlace, extent_bytes, staging_at};
use crate::line::{self, Words};
use crate::membership::Process;
use crate::object::Object;
use crate::owned::{self, Kind};
use crate::{Pool, PoolError};

/// Between two looks for a rank that has not come.
const NAP: Duration = Duration::from_millis(1);

/// A group over extents of its own. Dropping it leaves the group and gives them back.
pub struct JoinedGroup<M: Memory>(Group<M>);

#[cfg(feature = "model")]
impl<M: Memory> JoinedGroup<M> {
    /// What tells the extents of its ranks from all that there ever were, in no order of ranks.
    pub(crate) fn marks(&self) -> BTreeSet<u64> {
        self.seats.as_ref().map_or_else(BTreeSet::new, Seats::marks)
    }
}

impl<M: Memory> JoinedGroup<M> {
    /// Leaves the group, and compares the last operation with what the others called. The operation after it would have done
    /// so, and there is none. Of two ranks that called different ones, the later to leave is told.
    ///
    /// # Errors
    /// [`PoolError::Mismatch`] when another rank called something else last.
    pub fn leave(mut self) -> Result<(), PoolError> {
        self.0.leave();
        self.0.compare_last()
    }
}

impl<M: Memory> Drop for JoinedGroup<M> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl<M: Memory> Deref for JoinedGroup<M> {
    type Target = Group<M>;

    fn deref(&self) -> &Group<M> {
        &self.0
    }
}

impl<M: Memory> DerefMut for JoinedGroup<M> {
    fn deref_mut(&mut self) -> &mut Group<M> {
        &mut self.0
    }
}

impl<M: Memory> Group<M> {
    /// Joins the group `name` of `size` ranks as `rank`, and returns when all have joined. Waits ask `interrupt` whether to
    /// give up.
    ///
    /// # Errors
    /// [`PoolError::RankTaken`] when a live process is this rank already; [`PoolError::Absent`] and [`PoolError::PeerDead`] when
    /// a rank does not come; [`PoolError::Argument`] when ranks disagree on size or options; those of [`Pool::create`].
    pub fn join(
        pool: Arc<Pool<M>>,
        name: &str,
        rank: usize,
        size: usize,
        options: GroupOptions,
        interrupt: Option<Interrupt>,
    ) -> Result<JoinedGroup<M>, PoolError> {
        check_place(rank, size, &options)?;
        let options = GroupOptions { epoch: pool.epoch()?, silence: pool.member().silence, ..options };
        let memory = pool.memory().clone();
        let mut search = Search {
            deadline: memory.now() + options.timeout,
            seats: Seats::new(pool, name, rank, size),
            found: vec![None; size],
            options,
            interrupt,
        };
        search.take_seat()?;
        let members = search.find_all()?;
        let first = GroupOptions { staging_bytes: first_bytes(&options, size), ..options };
        let deaths = search.seats.pool.deaths.clone();
        let mut group = Self::over_extents(memory, members, rank, first)?.sharing(deaths);
        group.options = options;
        if let Some(interrupt) = search.interrupt {
            group.on_wait(interrupt);
        }
        let number = number_of(&search.seats.marks());
        group.seats = Some(search.seats);
        match group.barrier_of(number) {
            // It has found one that died, and we the next in its place.
            Err(PoolError::Mismatch { peer, .. }) => {
                let (epoch, sequence) = (options.epoch, rank as u64);
                Err(PoolError::GaveUp { peer, what: "join of rank", epoch, sequence })
            }
            met => {
                met?;
                group.deaths.forget();
                Ok(JoinedGroup(group))
            }
        }
    }
}

fn check_place(rank: usize, size: usize, options: &GroupOptions) -> Result<(), PoolError> {
    let bad = |what, value, expected| Err(PoolError::Argument { what, value, expected });
    if size == 0 || size > MAX_RANKS {
        return bad("size", size.to_string(), "a group has 1 to 4096 ranks");
    }
    if rank >= size {
        return bad("rank", format!("{rank} of {size}"), "ranks count from 0 to one less than the size");
    }
    if size as u64 * 8 > options.staging_bytes / 2 || options.staging_bytes / LINE > u32::MAX.into() {
        let value = format!("{} for {size} ranks", sized(options.staging_bytes));
        return bad("staging", value, "16 bytes or more for each rank, and less than 256 GiB");
    }
    Ok(())
}

/// The extents that this rank holds open.
pub(super) struct Seats<M: Memory> {
    pool: Arc<Pool<M>>,
    pub(super) name: String,
    rank: usize,
    size: usize,
    own: Option<Object>,
    others: Vec<Object>,
    /// The extents with all the staging that are held, with their ranks.
    staging: Vec<(usize, Object)>,
    /// Whether the group has gone over to them, or will not, and why this rank cannot.
    pub(super) has_grown: bool,
    pub(super) refused: Option<PoolError>,
}

impl<M: Memory> Seats<M> {
    fn new(pool: Arc<Pool<M>>, name: &str, rank: usize, size: usize) -> Self {
        let name = name.to_owned();
        Self {
            pool,
            name,
            rank,
            size,
            own: None,
            others: vec![],
            staging: vec![],
            has_grown: false,
            refused: None,
        }
    }

    fn name_of(&self, rank: usize) -> String {
        format!("{}/{rank}", self.name)
    }

    fn staging_name_of(&self, rank: usize) -> String {
        format!("{}/staging/{rank}", self.name)
    }

    fn marks(&self) -> BTreeSet<u64> {
        self.own.iter().chain(&self.others).map(mark_of).collect()
    }

    fn identity(&self) -> Identity {
        Identity { rank: self.rank, size: self.size, process: self.pool.this_process() }
    }

    /// Makes this rank's extent with all the staging, and returns its mark.
    pub(super) fn make_staging(&mut self, options: &GroupOptions) -> Result<u64, PoolError> {
        let (name, bytes) = (self.staging_name_of(self.rank), extent_bytes(options));
        let words = self.identity().own(options, options.staging_bytes);
        let own = owned::create_unfilled(&self.pool, &name, bytes, Kind::Rank, words)?;
        let mark = mark_of(&own);
        self.staging.push((self.rank, own));
        Ok(mark)
    }

    /// Opens the extents of the others with all the staging, by their marks, and returns where the staging of each rank begins.
    pub(super) fn find_staging(
        &mut self,
        marks: &[u64],
        options: &GroupOptions,
    ) -> Result<Vec<Offset>, PoolError> {
        for rank in (0..self.size).filter(|&rank| rank != self.rank) {
            let object = self.pool.open(&self.staging_name_of(rank))?;
            let (offset, said) = (object.at(), (mark_of(&object), object.bytes()));
            self.staging.push((rank, object));
            if said != (marks[rank], extent_bytes(options)) {
                return Err(PoolError::Corrupt { offset, what: "staging of a rank" });
            }
        }
        self.staging.sort_by_key(|(rank, _)| *rank);
        Ok(self.staging.iter().map(|(_, object)| staging_at(object.at())).collect())
    }

    /// Says why the group goes on with the staging that it has, and what this rank tells the others of its own.
    pub(super) fn refuse(&mut self, error: PoolError) -> [u64; 2] {
        let name = quoted(&self.name);
        tracing::warn!(
            "group {name} goes on with little staging, so that long messages take longer: {error}"
        );
        self.refused = Some(error);
        [0, 0]
    }

    pub(super) fn give_staging_back(&mut self) {
        for (rank, object) in self.staging.drain(..) {
            match rank == self.rank {
                true => self.pool.abandon(object),
                false => self.pool.close(object),
            }
        }
    }
}

impl<M: Memory> Drop for Seats<M> {
    fn drop(&mut self) {
        self.give_staging_back();
        for other in self.others.drain(..) {
            self.pool.close(other);
        }
        if let Some(own) = self.own.take() {
            self.pool.abandon(own);
        }
    }
}

struct Search<M: Memory> {
    seats: Seats<M>,
    options: GroupOptions,
    /// The ranks that have been found and have found us.
    found: Vec<Option<RankPlace>>,
    deadline: Nanos,
    interrupt: Option<Interrupt>,
}

impl<M: Memory> Search<M> {
    /// Makes this rank's extent, which says from the beginning whose it is.
    fn take_seat(&mut self) -> Result<(), PoolError> {
        let (seats, first) = (&self.seats, self.first());
        let (pool, rank, identity) = (&seats.pool, seats.rank, seats.identity());
        let words = identity.own(&self.options, first.staging_bytes);
        // What a rank that died has left beside its first extent goes before it, so that nothing is left for ever.
        owned::remove_the_dead(pool, &seats.staging_name_of(rank), Kind::Rank)?;
        let own = owned::create(pool, &seats.name_of(rank), extent_bytes(&first), Kind::Rank, words);
        let own = own.map_err(|error| self.taken(error))?;
        let member = self.member(&own, &identity.process);
        self.seats.own = Some(own);
        self.found[rank] = Some(member?);
        Ok(())
    }

    /// The options, with the staging of first extents.
    fn first(&self) -> GroupOptions {
        GroupOptions { staging_bytes: first_bytes(&self.options, self.seats.size), ..self.options }
    }

    /// The error of a rank that could not make its extent: another process may be this rank already.
    fn taken(&self, error: PoolError) -> PoolError {
        let Seats { pool, rank, name: group, .. } = &self.seats;
        let PoolError::Exists { name } = &error else { return error };
        let Ok(found) = pool.open(name) else { return error };
        let holder = owned::Identity::find(pool, &found, Kind::Rank);
        pool.close(found);
        match holder {
            Ok(Some(holder)) => {
                PoolError::RankTaken { rank: *rank, group: group.clone(), peer: holder.process.peer() }
            }
            _ => error,
        }
    }

    /// Waits until every rank has been found, and has found this one.
    fn find_all(&mut self) -> Result<Vec<RankPlace>, PoolError> {
        loop {
            let mut missing = None;
            for rank in (0..self.seats.size).filter(|&rank| self.found[rank].is_none()).collect::<Vec<_>>() {
                match self.find(rank) {
                    Ok(None) => missing = missing.or(Some((rank, None))),
                    Err(error @ PoolError::PeerDead { .. }) => missing = Some((rank, Some(error))),
                    found => self.found[rank] = found?,
                }
            }
            match missing {
                None => return Ok(self.found.iter().copied().flatten().collect()),
                Some((rank, error)) => self.nap(rank, error)?,
            }
        }
    }

    /// Looks for the extent of `rank`, acknowledges it, and keeps it when its rank has acknowledged ours.
    fn find(&mut self, rank: usize) -> Result<Option<RankPlace>, PoolError> {
        let pool = Arc::clone(&self.seats.pool);
        let object = match pool.open(&self.seats.name_of(rank)) {
            Err(PoolError::NotFound { .. }) => return Ok(None),
            opened => opened?,
        };
        match self.look(&object, rank).and_then(|member| self.acknowledge(&object, rank, member)) {
            Ok(Some(member)) => {
                self.seats.others.push(object);
                Ok(Some(member))
            }
            other => {
                pool.close(object);
                other
            }
        }
    }

    /// Writes down that we have found `object`; keeps `member` when its rank has written down that it has found ours.
    fn acknowledge(
        &self,
        object: &Object,
        rank: usize,
        member: RankPlace,
    ) -> Result<Option<RankPlace>, PoolError> {
        let (memory, Some(own)) = (self.seats.pool.memory(), &self.seats.own) else { return Ok(None) };
        let ours = acknowledgement(own, rank);
        if memory.load(ours)? != mark_of(object) {
            memory.store(ours, mark_of(object));
            memory.write_back(ours, 8);
        }
        let theirs = acknowledgement(object, self.seats.rank);
        memory.invalidate(theirs, 8);
        // HARMLESS(fence_invalidations -> sfence -> drop), one look at an acknowledgement: an older one means another look. One
        // that an earlier extent in this place held for ours means that we wait in the barrier instead.
        memory.fence_invalidations();
        Ok((memory.load(theirs)? == mark_of(own)).then_some(member))
    }

    /// Whose extent `object` is.
    fn look(&self, object: &Object, rank: usize) -> Result<RankPlace, PoolError> {
        let Seats { pool, size, .. } = &self.seats;
        let words = line::read(pool.memory(), object.at())?.unwrap_or_default();
        let corrupt = PoolError::Corrupt { offset: object.at(), what: "identity of a rank" };
        let identity = Identity::decode(&words).ok_or(corrupt)?;
        pool.expect_alive(&identity.process, "join of rank", rank as u64)?;
        let expected = Identity { rank, size: *size, process: identity.process };
        let first = self.first();
        let expected = expected.encode(&self.options, first.staging_bytes);
        if words != expected || object.bytes() != extent_bytes(&first) {
            let value = match identity.size == *size {
                true => format!("one of other options to {}", identity.process.peer().ranked(rank)),
                false => {
                    let peer = identity.process.peer().ranked(rank);
                    format!("one of {size} ranks here and of {} to {peer}", identity.size)
                }
            };
            let expected = "every rank must join with the same size and options";
            return Err(PoolError::Argument { what: "the group", value, expected });
        }
        self.member(object, &identity.process)
    }

    fn member(&self, object: &Object, process: &Process) -> Result<RankPlace, PoolError> {
        let pool = &self.seats.pool;
        let Process { host, slot, pid, .. } = *process;
        let same_kernel = pool.liveness(process)? != Liveness::Unknown;
        let line = pool.process(host, slot)?;
        if line.incarnation != process.incarnation {
            let (epoch, sequence) = (self.options.epoch, self.seats.rank as u64);
            return Err(PoolError::PeerDead { peer: process.peer(), what: "join of rank", epoch, sequence });
        }
        Ok(RankPlace {
            at: object.at(),
            bytes: object.bytes(),
            host,
            slot,
            pid,
            bell: same_kernel.then(|| self.bell(process)),
            heartbeat: Some(pool.layout().heartbeat_line(host, slot)),
            sign: Some((pool.layout().process_line(host, slot), line.encode())),
        })
    }

    fn bell(&self, process: &Process) -> Bell {
        let processes = self.seats.pool.layout().geometry().processes;
        Bell(u32::from(process.host) * u32::from(processes) + u32::from(process.slot.0))
    }

    /// Sleeps a little, unless the time is over: then `dead`, or that the rank did not come.
    fn nap(&self, rank: usize, dead: Option<PoolError>) -> Result<(), PoolError> {
        let memory = self.seats.pool.memory();
        if self.interrupt.as_ref().is_some_and(|asked| asked()) {
            return Err(PoolError::Interrupted { what: "join of rank", sequence: rank as u64 });
        }
        let now = memory.now();
        if now < self.deadline {
            let bell = self.bell(&self.seats.pool.this_process());
            let seen = memory.announce_sleep(bell);
            memory.sleep(bell, seen, now + NAP);
            return Ok(());
        }
        let waited_ms = u64::try_from(self.options.timeout.as_millis()).unwrap_or(u64::MAX);
        let group = self.seats.name.clone();
        Err(dead.unwrap_or(PoolError::Absent { rank, group, waited_ms }))
    }
}

/// Where the rank whose extent is `object` acknowledges that of `rank`.
pub(super) fn acknowledgement(object: &Object, rank: usize) -> Offset {
    staging_at(object.at()).word(rank as u64)
}

/// What tells an extent from every other that its host ever made.
pub(super) fn mark_of(object: &Object) -> u64 {
    u64::from(object.owner()) << 56 | object.generation()
}

/// A number for these extents, which all ranks of a group give: no rank has found others.
pub(super) fn number_of(marks: &BTreeSet<u64>) -> u64 {
    XxHash3_64::oneshot(&marks.iter().flat_map(|mark| mark.to_le_bytes()).collect::<Vec<_>>())
}

/// The process whose extent of a group `object` is; nothing when it is an object of another kind.
///
/// # Errors
/// [`PoolError::Memory`].
pub(crate) fn process_of<M: Memory>(pool: &Pool<M>, object: &Object) -> Result<Option<Process>, PoolError> {
    let Some(words) = line::read(pool.memory(), object.at())? else { return Ok(None) };
    let name = object.name().rsplit_once('/').and_then(|(_, rank)| rank.parse().ok());
    let is_extent = |identity: &Identity| {
        let bytes = staging_at(Offset(0)).0.checked_add(words[5]);
        (1..=MAX_RANKS).contains(&identity.size)
            && identity.rank < identity.size
            && (name, bytes) == (Some(identity.rank), Some(object.bytes()))
    };
    Ok(Identity::decode(&words).filter(is_extent).map(|identity| identity.process))
}

/// What the first line of an extent says.
pub(super) struct Identity {
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) process: Process,
}

impl Identity {
    /// The own words of the identity of an extent with so much staging.
    fn own(&self, options: &GroupOptions, staging_bytes: u64) -> [u64; 3] {
        [
            (options.staging_bytes / LINE) << 32 | (self.rank as u64) << 16 | self.size as u64,
            staging_bytes,
            options.segment_bytes << 32 | options.direct_bytes & 0xffff_ffff,
        ]
    }

    pub(super) fn encode(&self, options: &GroupOptions, staging_bytes: u64) -> Words {
        let own = self.own(options, staging_bytes);
        owned::Identity { kind: Kind::Rank, process: self.process, own }.encode()
    }

    fn decode(words: &Words) -> Option<Self> {
        let owned::Identity { process, own: [place, ..], .. } = owned::Identity::decode(words, Kind::Rank)?;
        Some(Self { rank: (place >> 16 & 0xffff) as usize, size: (place & 0xffff) as usize, process })
    }
}

#[cfg(test)]
mod tests {
    use polder_kernels::{Dtype, Op};
    use polder_mem::{Heap, ProcessSlot};
    use polder_schedule::Collective;

    use super::super::Signature;
    use super::*;
    use crate::Peer;
    use crate::format::Geometry;
    use crate::object::InitialContents;
    use crate::testing::formatted;

    const BYTES: u64 = 8 << 20;

    fn quick() -> GroupOptions {
        GroupOptions { staging_bytes: 4096, timeout: Duration::from_secs(5), ..GroupOptions::default() }
    }

    /// One process on each of `hosts` hosts.
    fn pools(hosts: u16) -> Vec<Arc<Pool<Heap>>> {
        let geometry = Geometry { hosts, processes: 2, ..Geometry::for_region(BYTES) };
        let heap = formatted(&geometry, BYTES);
        let attach = |host| {
            let memory = if host == 0 { heap.clone() } else { heap.process(host, ProcessSlot(0)) };
            Arc::new(Pool::attach(memory, crate::Member::new(host, 7)).unwrap())
        };
        (0..hosts).map(attach).collect()
    }

    fn in_ranks(pools: &[Arc<Pool<Heap>>], name: &str, body: impl Fn(&mut Group<Heap>) + Sync) {
        in_ranks_with(pools, name, quick(), body);
    }

    fn in_ranks_with(
        pools: &[Arc<Pool<Heap>>],
        name: &str,
        options: GroupOptions,
        body: impl Fn(&mut Group<Heap>) + Sync,
    ) {
        std::thread::scope(|scope| {
            for (rank, pool) in pools.iter().enumerate() {
                let body = &body;
                scope.spawn(move || {
                    let mut group =
                        Group::join(Arc::clone(pool), name, rank, pools.len(), options, None).unwrap();
                    body(&mut group);
                });
            }
        });
    }

    #[test]
    fn ranks_meet_by_name_compute_and_leave_nothing_behind() {
        let pools = pools(3);
        for _ in 0..3 {
            in_ranks(&pools, "/sums", |group| {
                let mut data = [1, 2, 3];
                group.all_reduce(Op::Sum, Dtype::U8, &mut data).unwrap();
                assert_eq!(data, [3, 6, 9]);
            });
            assert_eq!(pools[0].list("").unwrap(), []);
        }
    }

    /// Bytes of all objects in the pool, once every rank has come so far.
    fn bytes_in(pool: &Pool<Heap>, group: &mut Group<Heap>) -> u64 {
        group.barrier().unwrap();
        let bytes = pool.list("").unwrap().iter().map(|listed| listed.bytes).sum();
        group.barrier().unwrap();
        bytes
    }

    /// Where the ranks of a group meet with less staging than its options name.
    fn roomy() -> GroupOptions {
        GroupOptions { staging_bytes: 256 << 10, direct_bytes: 1 << 10, ..quick() }
    }

    #[test]
    fn a_group_takes_little_staging_until_a_message_gains_by_all_of_it() {
        let pools = pools(3);
        let least = GroupOptions { staging_bytes: 4096, ..roomy() };
        in_ranks_with(&pools, "/grows", roomy(), |group| {
            let pool = &pools[group.rank()];
            for (long, has) in [(8, least), (500, least), (9000, roomy()), (8, roomy()), (99_000, roomy())] {
                let mut data: Vec<u8> = (0..long).map(|index| (index + group.rank() as i32) as u8).collect();
                group.all_reduce(Op::Sum, Dtype::U8, &mut data).unwrap();
                let expected = (0..long).map(|index| (3 * index + 3) as u8);
                assert!(data.into_iter().eq(expected), "{long} bytes");
                let first = extent_bytes(&least) * 3;
                let all = if has == least { first } else { first + extent_bytes(&has) * 3 };
                assert_eq!(bytes_in(pool, group), all, "after {long} bytes");
            }
        });
        assert_eq!(pools[0].list("").unwrap(), []);
    }

    #[test]
    fn a_group_with_no_room_for_all_its_staging_goes_on_with_what_it_has() {
        for refused in 0..3 {
            let mut pools = pools(3);
            let poor = Arc::into_inner(pools.remove(refused)).unwrap();
            let (memory, member) = (poor.memory().clone(), *poor.member());
            drop(poor);
            let poor = Pool::attach(memory, crate::Member { quota: 16384, ..member }).unwrap();
            pools.insert(refused, Arc::new(poor));
            in_ranks_with(&pools, "/poor", roomy(), |group| {
                for long in [9000, 99_000] {
                    let mut data = vec![group.rank() as u8; long];
                    group.all_reduce(Op::Sum, Dtype::U8, &mut data).unwrap();
                    assert!(data.iter().all(|&sum| sum == 3), "{long} bytes");
                }
                let least = GroupOptions { staging_bytes: 4096, ..roomy() };
                assert_eq!(bytes_in(&pools[group.rank()], group), extent_bytes(&least) * 3);
            });
            assert_eq!(pools[0].list("").unwrap(), []);
        }
    }

    #[test]
    fn a_rank_that_leaves_at_once_has_joined_for_the_others() {
        let pools = pools(2);
        for _ in 0..20 {
            in_ranks(&pools, "/brief", |_| {});
        }
    }

    #[test]
    fn a_rank_that_joins_again_at_once_does_not_meet_the_extent_of_a_slow_one_from_before() {
        let pools = pools(2);
        let slow = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            for (rank, pool) in pools.iter().enumerate() {
                let slow = &slow;
                scope.spawn(move || {
                    let join = || Group::join(Arc::clone(pool), "/again", rank, 2, quick(), None).unwrap();
                    let mut group = join();
                    group.barrier().unwrap();
                    if rank == 1 {
                        slow.wait();
                        // Rank 0 is looking for us by now, and finds what we had before.
                        std::thread::sleep(Duration::from_millis(30));
                    }
                    drop(group);
                    if rank == 0 {
                        slow.wait();
                    }
                    join().barrier().unwrap();
                });
            }
        });
        assert_eq!(pools[0].list("").unwrap(), []);
    }

    #[test]
    fn a_rank_that_left_is_named_at_once_by_whoever_expects_more_of_it() {
        let pools = pools(2);
        let left = std::sync::Barrier::new(2);
        in_ranks(&pools, "/left", |group| {
            if group.rank() == 0 {
                group.leave();
                left.wait();
            } else {
                left.wait();
                let error = group.barrier().unwrap_err();
                assert!(matches!(error, PoolError::GaveUp { peer: Peer { host: 0, .. }, .. }), "{error}");
            }
        });
    }

    #[test]
    fn a_rank_that_ends_after_a_death_elsewhere_names_the_dead_until_it_has_joined_a_group() {
        let pools = pools(2);
        let (met, ended) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        for (name, gives_up, names) in
            [("/left", false, true), ("/ended", true, true), ("/anew", false, false)]
        {
            in_ranks(&pools, name, |group| {
                let (what, sequence) = ("barrier", 2);
                let dead = Peer::new(9, 99);
                met.wait();
                if group.rank() == 0 {
                    let dead = PoolError::PeerDead { peer: dead, what, epoch: 0, sequence };
                    pools[0].deaths.note(&dead);
                    if !names {
                        drop(Group::join(Arc::clone(&pools[0]), "/alone", 0, 1, quick(), None).unwrap());
                    }
                    match gives_up {
                        true => group.give_up(),
                        false => group.leave(),
                    }
                    ended.wait();
                } else {
                    ended.wait();
                    let error = group.barrier().unwrap_err();
                    let expected = match names {
                        true => PoolError::PeerDead { peer: dead, what, epoch: 0, sequence },
                        false => PoolError::GaveUp { peer: group.peer(0), what, epoch: 0, sequence },
                    };
                    assert_eq!(error, expected);
                    assert_eq!(pools[1].deaths.first(), names.then_some(dead), "for this one's groups");
                }
            });
        }
    }

    /// An operation that ends without a look at its peer, which a short broadcast is at its root, during which the peer calls
    /// another one.
    #[test]
    fn ranks_that_differ_in_their_last_operation_are_told_when_they_leave() {
        for differ in [true, false] {
            let pools = pools(2);
            let join = |rank: usize| Group::join(Arc::clone(&pools[rank]), "/last", rank, 2, quick(), None);
            let (mut first, mut second) = std::thread::scope(|scope| {
                let second = scope.spawn(|| join(1).unwrap());
                (join(0).unwrap(), second.join().unwrap())
            });
            let signature = Signature::new(Collective::Broadcast, 1, 8).of(Dtype::U8);
            let ours = if differ { signature.in_pool() } else { signature };
            let outcome = first.operation(ours, |group| {
                group.pass_window()?;
                assert_eq!(second.broadcast(1, Dtype::U8, &mut [0; 8]), Ok(()));
                group.publish_step(1);
                Ok(())
            });
            assert_eq!(outcome, Ok(()));
            for left in [first.leave(), second.leave()] {
                assert_eq!(matches!(left, Err(PoolError::Mismatch { .. })), differ, "{left:?}");
                assert_eq!(left.is_err(), differ);
            }
            assert_eq!(pools[0].list("").unwrap(), []);
        }
    }

    #[test]
    fn a_rank_that_does_not_come_is_an_error_and_leaves_nothing_behind() {
        let pools = pools(2);
        let options = GroupOptions { timeout: Duration::from_millis(50), ..quick() };
        let error = Group::join(Arc::clone(&pools[0]), "/alone", 0, 2, options, None).err().unwrap();
        let text = "rank 1 has not come to group /alone within 50 ms; look whether it was started, or raise timeout= or POLDER_TIMEOUT";
        assert_eq!(error.to_string(), text);
        let stop: Interrupt = Box::new(|| true);
        let error = Group::join(Arc::clone(&pools[0]), "/alone", 0, 2, quick(), Some(stop)).err().unwrap();
        assert!(matches!(error, PoolError::Interrupted { .. }), "{error}");
        assert_eq!(pools[0].list("").unwrap(), []);
    }

    #[test]
    fn a_rank_is_taken_by_one_process_and_given_to_the_next_when_that_dies() {
        let pools = pools(2);
        let process = pools[1].this_process();
        let first = GroupOptions { staging_bytes: first_bytes(&quick(), 1), ..quick() };
        let identity = Identity { rank: 0, size: 1, process }.encode(&quick(), first.staging_bytes);
        let bytes = extent_bytes(&first);
        let object = pools[1].create_filled("/taken/0", bytes, InitialContents::Line(identity)).unwrap();
        let taken = Group::join(Arc::clone(&pools[0]), "/taken", 0, 1, quick(), None).err();
        let group = "/taken".to_owned();
        assert_eq!(taken, Some(PoolError::RankTaken { rank: 0, group, peer: process.peer() }));
        let before = Process { incarnation: process.incarnation + 1, ..process };
        let identity = Identity { rank: 0, size: 1, process: before };
        line::publish(pools[1].memory(), object.at(), &identity.encode(&quick(), first.staging_bytes));
        pools[1].close(object);
        drop(Group::join(Arc::clone(&pools[0]), "/taken", 0, 1, quick(), None).unwrap());
        assert_eq!(pools[0].list("").unwrap(), []);
    }

    #[test]
    fn ranks_that_disagree_do_not_join_and_one_says_why() {
        let pools = pools(2);
        let options = GroupOptions { timeout: Duration::from_millis(300), ..quick() };
        let errors: Vec<_> = std::thread::scope(|scope| {
            let join = |rank: usize, pool: &Arc<Pool<Heap>>| {
                Group::join(Arc::clone(pool), "/sizes", rank, 2 + rank, options, None).err().unwrap()
            };
            let ranks = pools.iter().enumerate().map(|(rank, pool)| scope.spawn(move || join(rank, pool)));
            ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let told = |error: &PoolError| {
            error.to_string().starts_with("the group is one of 2 ranks here and of 3 to rank 1 (host 1")
        };
        let other = |error: &PoolError| {
            error.to_string().starts_with("the group is one of 3 ranks here and of 2 to rank 0 (host 0")
        };
        assert!(errors.iter().any(|error| told(error) || other(error)), "{errors:?}");
    }
}
