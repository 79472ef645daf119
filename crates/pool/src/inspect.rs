//! Looking at a whole pool from outside, without attaching: what is in it, and what in it is damaged.
//!
//! The inspection writes nothing, takes no lock and trusts no byte. A pool in use may change meanwhile. So a torn line is
//! read again before it is called damaged, and an object is skipped if its entry went away.

mod messages;

use std::collections::BTreeMap;
use std::fmt;

use polder_mem::{Coherence, LINE, Memory, Offset, ProcessSlot};
use serde::Serialize;

use crate::deviation::Deviation;
use crate::entry::{Entry, Record, State};
use crate::format::{CHUNKS_PER_WORD, Layout, Superblock, read_superblock};
use crate::line::{self, Words};
use crate::membership::{HostLine, HostState, Process, ProcessState};
use crate::name::Name;
use crate::object::Header;
use crate::view::{View, Views};
use crate::{PoolError, chunks, word};

pub use messages::{EndpointStat, PairStat, PairsStat};

/// What is in a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PoolStat {
    /// Bytes of the region that the pool uses.
    pub bytes: u64,
    /// Bytes of metadata in front of the chunks.
    pub metadata_bytes: u64,
    /// How all processes keep it coherent: `coherent`, `software`, `hdm-db`, or nothing where that is left to each.
    pub coherence: Option<&'static str>,
    /// Bytes in chunks that no host holds.
    pub unclaimed_bytes: u64,
    /// The epoch of the view, 0 before any keeper ran.
    pub epoch: u64,
    /// Live objects.
    pub objects: u64,
    /// Bytes of live objects, without their headers.
    pub object_bytes: u64,
    /// Bytes of the headers of live objects.
    pub header_bytes: u64,
    /// Directory slots of all hosts that are there.
    pub slots: u64,
    /// Names that some host is claiming.
    pub claimed: u64,
    /// Destroyed objects that somebody may still hold open.
    pub condemned: u64,
    /// Records that an object of another host was destroyed.
    pub tombstones: u64,
    /// Entries that are damaged, or lead to a header that is: their objects are neither counted nor listed.
    pub damaged: u64,
    /// The hosts that were ever here.
    pub hosts: Vec<HostStat>,
    /// Bytes that each job holds in live objects.
    pub jobs: BTreeMap<u64, u64>,
    /// Bytes of live objects by what they are for.
    pub uses: BTreeMap<&'static str, u64>,
    /// What each endpoint has, by its name.
    pub endpoints: BTreeMap<String, EndpointStat>,
    /// The pairs of endpoints that have talked.
    pub pairs: PairsStat,
}

/// What a host has in a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct HostStat {
    /// The host id.
    pub host: u16,
    /// `live`, `left`, `evicted` or `unknown`.
    pub state: &'static str,
    /// A hash of its boot id, 0 when it is unknown.
    #[serde(skip)]
    pub boot: u64,
    /// Processes whose lines say that they are here, those that were killed too.
    pub processes: Vec<u32>,
    /// Objects that it owns, of those that can be opened.
    pub objects: u64,
    /// Chunks that it holds.
    pub chunks: u64,
}

/// Something in a pool that no correct writer left there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Problem {
    /// Where.
    pub offset: u64,
    /// What is wrong with it.
    pub what: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}: {}", self.offset, self.what)
    }
}

/// An object, as an inspection found it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ObjectStat {
    /// Its name.
    pub name: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// The host that created it.
    pub owner: u16,
    /// The job on whose account it is.
    pub job: u64,
    /// Where its bytes begin in the pool.
    #[serde(skip)]
    pub at: Offset,
    /// Its entry in the directory, and what that said.
    #[serde(skip)]
    entry: Offset,
    #[serde(skip)]
    record: Record,
}

impl ObjectStat {
    /// Whether it is still there. As long as it is, its bytes are no other object's.
    pub(crate) fn stands<M: Memory>(&self, memory: &M) -> Result<bool, PoolError> {
        stands(memory, self.entry, &self.record)
    }
}

/// Whether an entry of the directory still says this of an object.
fn stands<M: Memory>(memory: &M, entry: Offset, record: &Record) -> Result<bool, PoolError> {
    if Deviation::JudgesOnce.is_on() {
        return Ok(true);
    }
    let words = line::read(memory, entry)?;
    Ok(words.and_then(|words| Entry::decode(&words)) == Some(Entry::Object(State::Live, *record)))
}

/// What an inspection found.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Inspection {
    /// The counters.
    pub stat: PoolStat,
    /// The live objects, by name.
    pub objects: Vec<ObjectStat>,
    /// What each pair of endpoints has that talked, by sender and receiver.
    pub pairs: BTreeMap<(String, String), PairStat>,
    /// What is damaged; empty in a pool that is whole.
    pub problems: Vec<Problem>,
    /// Bytes of the longest run of chunks that no host holds.
    pub longest_unclaimed_bytes: u64,
}

/// Looks at everything in the pool that lies in `memory`.
///
/// # Errors
/// Those of [`read_superblock`], behind which nothing can be found, and [`PoolError::Memory`] when the memory fails.
pub fn inspect<M: Memory>(memory: &M) -> Result<Inspection, PoolError> {
    let superblock = read_superblock(memory)?;
    let layout = superblock.layout()?;
    let mut inspector = Inspector::new(memory, &layout, &superblock);
    inspector.read_view();
    for host in 0..layout.geometry().hosts {
        inspector.read_host(host)?;
    }
    inspector.judge_objects()?;
    let pairs = inspector.count_messages()?;
    let chunk_bytes = layout.geometry().chunk_bytes;
    let runs = inspector.holders.split(Option::is_some).map(|run| run.len() as u64 * chunk_bytes);
    let longest_unclaimed_bytes = runs.clone().max().unwrap_or(0);
    inspector.stat.unclaimed_bytes = runs.sum();
    inspector.objects.sort_by(|one, other| one.name.cmp(&other.name));
    let Inspector { stat, objects, problems, .. } = inspector;
    Ok(Inspection { stat, objects, pairs, problems, longest_unclaimed_bytes })
}

struct Inspector<'a, M: Memory> {
    memory: &'a M,
    layout: &'a Layout,
    stat: PoolStat,
    view: Option<View>,
    objects: Vec<ObjectStat>,
    problems: Vec<Problem>,
    /// Which host holds each chunk.
    holders: Vec<Option<u16>>,
    live: Vec<(u16, u32, Record)>,
    /// Second looks at torn lines that are left.
    looks: u32,
    /// What tombstones name: owner, slot, generation.
    buried: Vec<(u16, u32, u64)>,
}

/// So many lines are invalidated behind one fence.
const BATCH: u32 = 64;

/// How often a line that is torn is looked at again before it is called damaged: its writer may have been taken off its
/// CPU. Where many are damaged, only the first are given so much time.
const LOOKS: u32 = 1000;
const LOOKS_AT_ALL: u32 = 4 * LOOKS;

impl<'a, M: Memory> Inspector<'a, M> {
    fn new(memory: &'a M, layout: &'a Layout, superblock: &Superblock) -> Self {
        let stat = PoolStat {
            bytes: superblock.bytes,
            metadata_bytes: layout.chunk_area().0,
            coherence: superblock.coherence.map(|coherence| match coherence {
                Coherence::Coherent => "coherent",
                Coherence::Software => "software",
                Coherence::HdmDb => "hdm-db",
            }),
            ..PoolStat::default()
        };
        let holders = vec![None; layout.chunks() as usize];
        Self {
            memory,
            layout,
            stat,
            view: None,
            objects: vec![],
            problems: vec![],
            holders,
            live: vec![],
            buried: vec![],
            looks: LOOKS_AT_ALL,
        }
    }

    fn problem(&mut self, at: Offset, what: impl Into<String>) {
        self.problems.push(Problem { offset: at.0, what: what.into() });
    }

    /// A problem for which an entry does not count.
    fn damaged(&mut self, at: Offset, what: impl Into<String>) {
        self.stat.damaged += 1;
        self.problem(at, what);
    }

    /// The words of a line, or a problem where it stays torn.
    fn line(&mut self, at: Offset, what: &str) -> Result<Option<Words>, PoolError> {
        for look in 0..LOOKS {
            if let Some(words) = line::read(self.memory, at)? {
                return Ok(Some(words));
            }
            if look > 0 && self.looks == 0 {
                break;
            }
            self.looks = self.looks.saturating_sub(1);
            self.memory.yield_now();
        }
        self.problem(at, format!("{what} has a wrong checksum"));
        Ok(None)
    }

    fn read_view(&mut self) {
        let patience = std::time::Duration::from_millis(100);
        match Views::new(patience).read(self.memory, self.layout, |_| Ok(())) {
            Ok((view, ())) => {
                self.stat.epoch = view.epoch;
                self.view = Some(view);
            }
            Err(PoolError::Corrupt { offset, what }) => self.problem(offset, format!("{what} is damaged")),
            Err(error) => self.problem(self.layout.view_line(1, 0), error.to_string()),
        }
    }

    fn read_host(&mut self, host: u16) -> Result<(), PoolError> {
        let at = self.layout.host_line(host);
        let words = self.line(at, "host line")?;
        let line = words.as_ref().and_then(HostLine::decode);
        if words.is_some() && line.is_none() {
            self.problem(at, format!("the host line of host {host} has a state that is none"));
        }
        let is_out = self.view.is_some_and(|view| !view.has(host));
        let state = match line.map(|line| line.state) {
            Some(HostState::Free) => return Ok(()),
            Some(HostState::Live) if is_out => "evicted",
            Some(HostState::Live) => "live",
            Some(HostState::Left) => "left",
            None => "unknown",
        };
        let processes = self.read_processes(host)?;
        let chunks = self.read_chunks(host)?;
        self.read_entries(host)?;
        self.stat.slots += u64::from(self.layout.slots());
        let boot = line.map_or(0, |line| line.boot);
        self.stat.hosts.push(HostStat { host, state, boot, processes, objects: 0, chunks });
        Ok(())
    }

    fn read_processes(&mut self, host: u16) -> Result<Vec<u32>, PoolError> {
        let mut live = vec![];
        for slot in (0..self.layout.geometry().processes).map(ProcessSlot) {
            let at = self.layout.process_line(host, slot);
            if let Some(words) = self.line(at, "process line")? {
                match Process::decode(&words, host, slot) {
                    Some(Process { state: ProcessState::Live, pid, .. }) => live.push(pid),
                    Some(_) => {}
                    None => self
                        .problem(at, format!("the line of process {} of host {host} makes no sense", slot.0)),
                }
            }
            let beat = self.layout.heartbeat_line(host, slot);
            self.line(beat, "heartbeat line")?;
            self.read_words(self.layout.open_mark(host, slot), 1, "mark of announcements")?;
            let opens = self.layout.geometry().opens;
            self.read_words(self.layout.announcement(host, slot, 0), opens, "announcement")?;
        }
        self.line(self.layout.generation_line(host), "generation line")?;
        self.read_words(self.layout.burial_count(host), 1 + self.layout.burials(), "burial")?;
        Ok(live)
    }

    /// Looks at `count` checked words from `at` on.
    fn read_words(&mut self, at: Offset, count: u32, what: &str) -> Result<(), PoolError> {
        self.memory.invalidate(at, u64::from(count) * 8);
        // SYNC: pairs with what writes these words, such as `Opens::announce`; each is whole at any time.
        self.memory.fence_invalidations();
        for index in 0..u64::from(count) {
            if word::open(self.memory.load(at.word(index))?).is_none() {
                self.problem(at.word(index), format!("{what} has a wrong check"));
            }
        }
        Ok(())
    }

    fn read_chunks(&mut self, host: u16) -> Result<u64, PoolError> {
        let words = self.layout.chunk_words();
        let first = self.layout.chunk_word(host, 0);
        self.memory.invalidate(first, u64::from(words) * 8);
        // SYNC: pairs with `Chunks::publish`.
        self.memory.fence_invalidations();
        let mut held = 0;
        for index in 0..words {
            let at = self.layout.chunk_word(host, index);
            let Some(states) = word::open(self.memory.load(at)?) else {
                self.problem(at, format!("chunk claims of host {host} have a wrong check"));
                continue;
            };
            for chunk in chunks::held(states, index, self.layout.chunks()) {
                held += 1;
                let other = self.holders[chunk as usize].replace(host);
                if let Some(other) = other
                    && self.both_hold(chunk, [other, host])?
                {
                    self.problem(at, format!("chunk {chunk} is held by host {other} and by host {host}"));
                }
            }
        }
        Ok(held)
    }

    /// Whether two hosts hold a chunk at once: it may have gone from one to the other between two looks.
    fn both_hold(&self, chunk: u32, hosts: [u16; 2]) -> Result<bool, PoolError> {
        let looks = if Deviation::CountsOnce.is_on() { 0 } else { 6 };
        for host in hosts.into_iter().cycle().take(looks) {
            if !self.holds(host, chunk)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether a host holds a chunk by now. A damaged word is a problem of its own.
    fn holds(&self, host: u16, chunk: u32) -> Result<bool, PoolError> {
        let index = chunk / CHUNKS_PER_WORD;
        let at = self.layout.chunk_word(host, index);
        self.memory.invalidate(at, 8);
        // SYNC: pairs with `Chunks::publish`.
        self.memory.fence_invalidations();
        let states = word::open(self.memory.load(at)?);
        Ok(states.is_some_and(|states| {
            chunks::held(states, index, self.layout.chunks()).any(|held| held == chunk)
        }))
    }

    fn read_entries(&mut self, host: u16) -> Result<(), PoolError> {
        for first in (0..self.layout.slots()).step_by(BATCH as usize) {
            let batch = first..(first + BATCH).min(self.layout.slots());
            self.memory.invalidate(self.layout.entry(host, first), u64::from(batch.end - first) * LINE);
            // SYNC: pairs with the `line::publish_and_fence` of entries.
            self.memory.fence_invalidations();
            for slot in batch {
                self.read_entry(host, slot)?;
            }
        }
        Ok(())
    }

    fn read_entry(&mut self, host: u16, slot: u32) -> Result<(), PoolError> {
        let at = self.layout.entry(host, slot);
        let words = match line::load(self.memory, at)? {
            Some(words) => Some(words),
            None => self.line(at, "directory entry")?,
        };
        let Some(words) = words else {
            self.stat.damaged += 1;
            return Ok(());
        };
        match Entry::decode(&words) {
            None => self.damaged(at, format!("directory entry {slot} of host {host} makes no sense")),
            Some(Entry::Free) => {}
            Some(Entry::Tombstone(tombstone)) => {
                self.stat.tombstones += 1;
                self.buried.push((tombstone.owner, tombstone.slot, tombstone.generation));
            }
            Some(Entry::Object(State::Claimed, _)) => self.stat.claimed += 1,
            Some(Entry::Object(State::Condemned, _)) => self.stat.condemned += 1,
            Some(Entry::Object(State::Live, record)) => self.live.push((host, slot, record)),
        }
        Ok(())
    }

    /// Holds the live entries against their extents, headers and chunks, and against each other.
    fn judge_objects(&mut self) -> Result<(), PoolError> {
        self.buried.sort_unstable();
        let mut live = std::mem::take(&mut self.live);
        live.retain(|(host, slot, record)| {
            self.buried.binary_search(&(*host, *slot, record.generation)).is_err()
        });
        live.sort_by_key(|(_, _, record)| record.header);
        // Where the objects before end, and the entry of the one that does there.
        let mut last: Option<(Offset, Offset, Record)> = None;
        for (host, slot, record) in live {
            let at = self.layout.entry(host, slot);
            let Some(bytes) = self.extent_bytes(&record) else {
                self.damaged(at, "an object whose extent lies outside the chunks");
                continue;
            };
            match self.header(&record, host, slot)? {
                Some(header) => self.count(header, &record, host, at),
                None if stands(self.memory, at, &record)? => {
                    self.damaged(record.header, "the header of a live object is damaged, or another's");
                }
                None => continue,
            }
            let end = record.header + bytes;
            match last {
                // Both are there at once, or one made room for the other.
                Some((before, entry, other))
                    if record.header < before
                        && stands(self.memory, entry, &other)?
                        && stands(self.memory, at, &record)? =>
                {
                    self.problem(at, "an object that overlaps another");
                }
                _ => {}
            }
            if last.is_none_or(|(before, ..)| before < end) {
                last = Some((end, at, record));
            }
            self.judge_chunks(at, host, &record, bytes)?;
        }
        Ok(())
    }

    fn extent_bytes(&self, record: &Record) -> Option<u64> {
        let area = self.layout.chunk_area();
        let limit = area.0 + u64::from(self.layout.chunks()) * self.layout.geometry().chunk_bytes;
        let bytes = record.whole_bytes()?;
        let end = record.header.0.checked_add(bytes)?;
        (record.header >= area && record.header == record.header.line() && end <= limit).then_some(bytes)
    }

    fn header(&self, record: &Record, host: u16, slot: u32) -> Result<Option<Header>, PoolError> {
        self.memory.invalidate(record.header, u64::from(record.header_lines) * LINE);
        // SYNC: pairs with the `line::publish_and_fence` of the entry that leads here, which came after the header.
        self.memory.fence_invalidations();
        let header = Header::load(self.memory, record.header, record.header_lines)?;
        Ok(header.filter(|header| {
            let same = (header.generation, header.owner, header.slot, header.bytes)
                == (record.generation, host, slot, record.bytes);
            same && Name::parse(&header.name).is_ok_and(|name| name.hash() == record.hash)
        }))
    }

    fn count(&mut self, header: Header, record: &Record, host: u16, entry: Offset) {
        self.stat.objects += 1;
        self.stat.hosts.iter_mut().filter(|of| of.host == host).for_each(|of| of.objects += 1);
        self.stat.object_bytes += record.bytes;
        self.stat.header_bytes += u64::from(record.header_lines) * LINE;
        *self.stat.jobs.entry(record.job).or_default() += record.bytes;
        self.objects.push(ObjectStat {
            name: header.name,
            bytes: record.bytes,
            owner: host,
            job: record.job,
            at: record.data(),
            entry,
            record: *record,
        });
    }

    /// Holds the chunks of an object against those that were its host's when they were read, and what differs against those of now.
    fn judge_chunks(
        &mut self,
        entry: Offset,
        host: u16,
        record: &Record,
        bytes: u64,
    ) -> Result<(), PoolError> {
        let (area, size) = (self.layout.chunk_area().0, self.layout.geometry().chunk_bytes);
        let first = (record.header.0 - area) / size;
        let last = (record.header.0 + bytes - 1 - area) / size;
        for chunk in first..=last {
            let is_held = self.holders[chunk as usize] == Some(host);
            let holds = is_held || !Deviation::CountsOnce.is_on() && self.holds(host, chunk as u32)?;
            if !holds && stands(self.memory, entry, record)? {
                self.problem(
                    entry,
                    format!("an object of host {host} lies in chunk {chunk}, which that host does not hold"),
                );
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use super::*;
    use crate::testing::formatted;
    use crate::{Geometry, Member, Pool};

    const BYTES: u64 = 1 << 20;
    const LOOKS_BESIDE: u32 = 50_000;
    const GEOMETRY: Geometry =
        Geometry { hosts: 2, processes: 2, names: 31, levels: 2, chunk_bytes: 4096, opens: 8, keepers: 2 };

    #[test]
    fn a_pool_in_use_is_whole_and_its_objects_are_counted() {
        let heap = formatted(&GEOMETRY, BYTES);
        let pools = [0, 1]
            .map(|host| Pool::attach(heap.process(host, ProcessSlot(1)), Member::new(host, 1)).unwrap());
        for (number, pool) in pools.iter().enumerate() {
            pool.close(pool.create(&format!("/one/{number}"), 100).unwrap());
            pool.close(pool.create(&format!("/two/{number}"), 10_000).unwrap());
        }
        pools[0].destroy("/one/1").unwrap();
        let Inspection { stat, objects, problems, .. } = inspect(&heap).unwrap();
        assert_eq!(problems, []);
        let names: Vec<_> = objects.iter().map(|object| object.name.as_str()).collect();
        assert_eq!(names, ["/one/0", "/two/0", "/two/1"]);
        assert_eq!((stat.objects, stat.object_bytes, stat.jobs[&0]), (3, 20_100, 20_100));
        // One that was destroyed by another host, and that its owner has not freed, is no object any more.
        assert_eq!(
            stat.hosts.iter().map(|host| (host.host, host.objects)).collect::<Vec<_>>(),
            [(0, 2), (1, 1)]
        );
        assert_eq!(stat.hosts.iter().map(|host| host.processes.len()).sum::<usize>(), 2);
    }

    #[test]
    fn nothing_is_called_damaged_while_objects_come_and_go() {
        let heap = formatted(&GEOMETRY, BYTES);
        let is_over = OnceLock::new();
        let looks = std::thread::scope(|scope| {
            for host in 0..2_u16 {
                let (memory, is_over) = (heap.process(host, ProcessSlot(1)), &is_over);
                scope.spawn(move || {
                    let pool = Pool::attach(memory, Member::new(host, 1)).unwrap();
                    for round in 0.. {
                        if is_over.get().is_some() {
                            break;
                        }
                        let names =
                            [3000, 20_000, 100].map(|bytes| (format!("/{host}/{round}/{bytes}"), bytes));
                        for (name, bytes) in &names {
                            match pool.create(name, *bytes) {
                                Ok(object) => pool.close(object),
                                // What was removed before is still being cleared away.
                                Err(PoolError::Full { .. } | PoolError::DirectoryFull { .. }) => {}
                                Err(error) => panic!("{error}"),
                            }
                        }
                        for (name, _) in &names {
                            match pool.destroy(name) {
                                Ok(()) | Err(PoolError::NotFound { .. }) => {}
                                Err(error) => panic!("{error}"),
                            }
                        }
                        pool.maintain().unwrap();
                        pool.directory().give_back_all().unwrap();
                    }
                });
            }
            // A line stays torn while its writer is off its CPU.
            let is_torn = |problem: &Problem| problem.what.ends_with("has a wrong checksum");
            let look = || inspect(&heap).unwrap().problems.into_iter().filter(|it| !is_torn(it)).collect();
            let problems = (0..LOOKS_BESIDE).map(|_| -> Vec<Problem> { look() });
            let wrong: Vec<_> = problems.filter(|problems| !problems.is_empty()).collect();
            is_over.set(()).unwrap();
            wrong
        });
        assert!(looks.is_empty(), "{} of {LOOKS_BESIDE} looks: {:?}", looks.len(), looks[0]);
    }

    #[test]
    fn any_flipped_bit_of_a_live_entry_or_header_is_a_problem_with_its_offset() {
        let heap = formatted(&GEOMETRY, BYTES);
        let memory = heap.clone();
        let pool = Pool::attach(heap.process(0, ProcessSlot(1)), Member::new(0, 1)).unwrap();
        let object = pool.create("/one", 100).unwrap();
        let layout = pool.layout().clone();
        let entry =
            (0..layout.slots()).map(|slot| layout.entry(0, slot)).find(|&at| memory.load(at).unwrap() != 0);
        let header = Offset(object.at().0 - LINE);
        for at in [entry.unwrap(), header] {
            for bit in 0..512 {
                let word = at.word(bit / 64);
                let flipped = memory.load(word).unwrap() ^ 1 << (bit % 64);
                memory.store(word, flipped);
                let Inspection { stat, objects, problems, .. } = inspect(&memory).unwrap();
                memory.store(word, flipped ^ 1 << (bit % 64));
                assert!(
                    problems.iter().any(|problem| problem.offset == at.0),
                    "bit {bit} at {at}: {problems:?}"
                );
                assert_eq!((stat.damaged, stat.objects, objects), (1, 0, vec![]), "bit {bit} at {at}");
            }
        }
        pool.close(object);
    }
}
