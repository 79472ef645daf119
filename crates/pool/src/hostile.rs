//! Hostile hosts in a pool, driven by bytes: whatever they write, wherever, the victim's calls end with a result or an error.
//!
//! One victim is host 1 of three. It attaches, creates, opens, lists, destroys, cleans up and leaves. Another victim is the
//! keeper, and also asks a keeper for an id or an eviction. Between their calls a script of bytes writes what a peer can
//! write: any word of the region, also of the superblock, of the keeper's view and of the victim's own shard. It also writes
//! lines and words whose checks are right and whose contents are almost right.

use std::time::Duration;

use polder_mem::{Heap, HeapShape, Memory, Offset, ProcessSlot};

use crate::claim::{IdClaim, claim_host_id};
use crate::format::{Geometry, Layout, Overwrite, Uuid, format, read_superblock};
use crate::inspect::inspect;
use crate::keeper::{Keeper, KeeperTask, MembershipChange, change_membership, last_incarnation};
use crate::line::{self, Words};
use crate::local::LocalLayout;
use crate::name::Name;
use crate::object::{Header, InitialContents, Object};
use crate::pool::{Member, Pool};
use crate::script::Script;
use crate::view::{CHANGES, Grant, IdSource, View};
use crate::{PoolError, word};

const GEOMETRY: Geometry =
    Geometry { hosts: 3, processes: 2, names: 7, levels: 3, chunk_bytes: 1024, opens: 8, keepers: 2 };
const BYTES: u64 = 32 << 10;
const VICTIM: u16 = 1;
const NAMES: [&str; 6] = ["/a", "/b", "/c", "/d", "/e", "/a-name-that-needs-a-header-of-more-than-one-line"];
/// An object that is read whole.
const SHORT: u64 = 4096;

/// Runs the script `bytes`.
///
/// # Panics
/// When the victim does, or writes what belongs to another host.
pub fn drive(bytes: &[u8]) {
    let layout = Layout::new(&GEOMETRY, BYTES).expect("a geometry that fits");
    let mut script = Script(bytes);
    let mut stage = Stage::new(layout);
    while !script.0.is_empty() {
        for _ in 0..script.byte() % 4 {
            stage.write(&mut script);
        }
        let theirs = stage.theirs();
        stage.act(&mut script);
        assert!(stage.theirs() == theirs, "the victim wrote in another host's shard");
        if script.byte() < 64 {
            stage.keep(&mut script);
        }
        if stage.pool.is_none() && script.byte() % 2 == 0 {
            stage.attach(&mut script);
        }
    }
}

/// Reads `bytes` as the beginning of a region: whatever they are, a pool is found in them or an error.
///
/// # Panics
/// When a reader does.
pub fn read(bytes: &[u8]) {
    let heap = heap();
    let length = bytes.len().min(BYTES as usize);
    if bytes.first().is_some_and(|first| first % 2 == 0) {
        // Most damage is of a pool that once was whole.
        format(&heap, &GEOMETRY, Uuid(1), Overwrite::Force).expect("it fits");
        for flip in bytes[1..].chunks_exact(3) {
            let at = Offset((u64::from(flip[0]) << 8 | u64::from(flip[1])) % (BYTES / 8) * 8);
            let old = heap.load(at).expect("ordinary memory");
            heap.store(at, old ^ 1 << (flip[2] % 64));
        }
    } else {
        heap.copy_in(Offset(0), &bytes[..length]).expect("ordinary memory");
    }
    if let Ok(inspection) = inspect(&heap) {
        assert!(inspection.stat.bytes <= BYTES, "a pool larger than its region");
    }
    // A session maps as much for its host as the geometry needs; here that is made for one geometry.
    let fits = read_superblock(&heap).is_ok_and(|superblock| superblock.geometry == GEOMETRY);
    if let (true, Ok(pool)) = (fits, Pool::attach(heap.process(VICTIM, ProcessSlot(0)), member())) {
        let created = pool.create("/new", 100);
        drop(pool.list(""));
        drop(created.map(|object| pool.close(object)));
    }
}

fn heap() -> Heap {
    let local_words = LocalLayout::new(&Layout::new(&GEOMETRY, BYTES).expect("it fits")).words();
    let Geometry { hosts, processes, .. } = GEOMETRY;
    let bells = u32::from(hosts * processes);
    Heap::new(HeapShape { bytes: BYTES, hosts, processes, local_words, bells })
}

fn member() -> Member {
    // Nobody is waited for: every wait ends at its first look.
    Member { timeout: Duration::ZERO, silence: Duration::ZERO, pid: 7, ..Member::new(VICTIM, 7) }
}

/// The region, the victim and the hand that writes.
struct Stage {
    layout: Layout,
    victim: Heap,
    hand: Heap,
    pool: Option<Pool<Heap>>,
    held: Vec<Object>,
    keeper: Option<Keeper<Heap>>,
}

impl Stage {
    fn new(layout: Layout) -> Self {
        let hand = heap();
        format(&hand, &GEOMETRY, Uuid(1), Overwrite::Refuse).expect("it fits");
        let victim = hand.process(VICTIM, ProcessSlot(0));
        let pool = Pool::attach(victim.clone(), member()).ok();
        Self { layout, victim, hand, pool, held: Vec::new(), keeper: None }
    }

    /// The shards of the other hosts, which the victim may not write.
    fn theirs(&self) -> Vec<u64> {
        let shards = [0, 2].map(|host| self.layout.shard(host));
        let words = shards.into_iter().flat_map(|(at, bytes)| (0..bytes / 8).map(move |word| at.word(word)));
        words.map(|at| self.hand.load(at).expect("ordinary memory")).collect()
    }

    // The victim.

    fn act(&mut self, script: &mut Script<'_>) {
        let what = script.byte();
        let Some(pool) = &self.pool else { return };
        let name = script.of(&NAMES);
        match what % 12 {
            0 => {
                let bytes = script.of(&[0, 1, 100, 900, 1024, 3000, BYTES, u64::MAX]);
                let fill = script.of(&[InitialContents::Zeros, InitialContents::Nothing]);
                let created = pool.create_filled(name, bytes, fill);
                self.hold(created);
            }
            1 | 2 => {
                let opened = pool.open(name);
                self.hold(opened);
            }
            3 => drop(pool.destroy(name)),
            4 => {
                for listed in pool.list("").unwrap_or_default() {
                    assert!(inside(listed.at, listed.bytes), "{listed:?}");
                }
            }
            5 => drop(pool.maintain()),
            // Seldom: it looks at torn lines again and again.
            6 if script.byte() < 32 => drop(inspect(pool.memory())),
            7 => {
                drop((pool.beat(), pool.check_membership(), pool.hosts_present()));
                if let Ok(View { members, fenced, evicted, .. }) = pool.view() {
                    assert_eq!((members | fenced | evicted) >> GEOMETRY.hosts, 0, "a host that there is not");
                }
            }
            8 => {
                let slot = ProcessSlot(u16::from(script.byte() % 2));
                let host = u16::from(script.byte() % 3);
                let seen = pool.process(host, slot);
                drop((pool.peer_state(host, slot), seen.map(|seen| pool.expect_alive(&seen, "sign", 1))));
            }
            9 | 10 => {
                if let Some(object) = self.held.pop() {
                    pool.close(object);
                }
            }
            _ => {
                self.held.clear();
                self.pool = None;
            }
        }
    }

    /// Attaches again, as a process that has just started or one whose host lost its words.
    fn attach(&mut self, script: &mut Script<'_>) {
        if script.byte().is_multiple_of(4) {
            let words = LocalLayout::new(&self.layout).words();
            (0..words).for_each(|word| self.victim.local_store(polder_mem::LocalWord(word), 0));
        }
        let theirs = self.theirs();
        self.pool = Pool::attach(self.victim.clone(), member()).ok();
        assert!(self.theirs() == theirs, "the victim wrote in another host's shard when it attached");
        if self.pool.is_none() {
            // Nothing comes of a pool that cannot be attached any more: another one.
            self.keeper = None;
            format(&self.hand, &GEOMETRY, Uuid(1), Overwrite::Force).expect("it fits");
        }
    }

    /// The keeper is a victim as well.
    fn keep(&mut self, script: &mut Script<'_>) {
        let Some(keeper) = &mut self.keeper else {
            let incarnation = last_incarnation(&self.victim).unwrap_or(0).saturating_add(1);
            let id_source = script.of(&[None, Some(IdSource::Keeper), Some(IdSource::Launcher)]);
            let charge =
                KeeperTask { incarnation, id_source, evict_after: script.of(&[None, Some(Duration::ZERO)]) };
            self.keeper = Keeper::start(self.victim.clone(), charge).ok();
            return;
        };
        let host = u16::from(script.byte() % 4);
        let outcome = match script.byte() % 8 {
            0 => keeper.evict(host),
            1 => keeper.fence(host),
            2 => {
                let what = script.of(&[MembershipChange::Evict, MembershipChange::Fence]);
                change_membership(&self.victim, host, what, Duration::ZERO, Duration::ZERO).map(drop)
            }
            3 => {
                let nonce = 1 + u64::from(script.byte() % 4);
                let request = IdClaim {
                    host: script.of(&[None, Some(host)]),
                    boot: u64::from(script.byte() % 8),
                    nonce,
                    timeout: Duration::ZERO,
                    silence: Duration::ZERO,
                };
                drop(claim_host_id(&self.victim, &request));
                Ok(())
            }
            _ => keeper.tick(),
        };
        if outcome.is_err() {
            self.keeper = None;
        }
    }

    /// Keeps an object that the victim was given, and reads it.
    fn hold(&mut self, given: Result<Object, PoolError>) {
        let Ok(object) = given else { return };
        assert!(inside(object.at(), object.bytes()), "{object:?}");
        let mut read = vec![0; object.bytes().min(SHORT) as usize];
        object.read_at(&self.victim, 0, &mut read).expect("an object lies in the region");
        self.held.push(object);
    }

    // The hostile hand.

    fn write(&self, script: &mut Script<'_>) {
        match script.byte() % 10 {
            0 => {
                let at = Offset(script.below(BYTES / 8) * 8);
                self.hand.store(at, script.word());
            }
            1 => self.damage(script),
            2..=5 => self.write_entry(script),
            6 => self.write_word(script),
            7 => self.write_header(script),
            8 => self.write_member(script),
            _ => self.write_view(script),
        }
    }

    /// Flips a bit.
    fn damage(&self, script: &mut Script<'_>) {
        let at = Offset(script.below(BYTES / 8) * 8);
        let old = self.hand.load(at).expect("ordinary memory");
        self.hand.store(at, old ^ 1 << (script.byte() % 64));
    }

    fn host(script: &mut Script<'_>) -> u16 {
        script.of(&[0, 2, 0, 2, VICTIM])
    }

    /// Changes a word of `words` now and then, and publishes the line.
    fn publish(&self, script: &mut Script<'_>, at: Offset, mut words: Words) {
        if script.byte() < 48 {
            script.change(&mut words);
        }
        line::publish(&self.hand, at, &words);
    }

    /// The entry of a name where it may stand.
    fn write_entry(&self, script: &mut Script<'_>) {
        let hash = Name::parse(script.of(&NAMES)).expect("a name").hash();
        let slots: Vec<u32> = self.layout.candidates(hash).collect();
        let (host, slot) = (Self::host(script), script.of(&slots));
        let generation = script.near(1);
        let state = u64::from(script.byte() % 6);
        let header = self.some_header(script);
        let (place, bytes) = (script.near(header), script.near(100));
        let tail = match state {
            // A tombstone for an entry of some host.
            4 => u64::from(Self::host(script)) | u64::from(script.of(&slots)) << 16,
            _ => script.near(1 << 16),
        };
        let words = [hash as u64, (hash >> 64) as u64, generation << 8 | state, place, bytes, 0, tail];
        self.publish(script, self.layout.entry(host, slot), words);
    }

    /// Where a header may begin.
    fn some_header(&self, script: &mut Script<'_>) -> u64 {
        let lines = (BYTES - self.layout.chunk_area().0) / 64;
        self.layout.chunk_area().lines(script.below(lines)).0
    }

    /// A checked word: a chunk claim, an announcement, its mark or a burial.
    fn write_word(&self, script: &mut Script<'_>) {
        let (host, slot) = (Self::host(script), ProcessSlot(u16::from(script.byte() % 2)));
        let at = match script.byte() % 4 {
            0 => self.layout.chunk_word(host, 0),
            1 => self.layout.announcement(host, slot, u32::from(script.byte()) % GEOMETRY.opens),
            2 => self.layout.open_mark(host, slot),
            _ => self.layout.burial_count(host).word(u64::from(script.byte() % 8)),
        };
        let payload = match script.byte() % 3 {
            0 => script.word(),
            1 => script.byte().into(),
            _ => 0xaaaa_aaaa_aaaa_aaaa,
        };
        self.hand.store(at, word::seal(payload >> (u64::BITS - word::BITS)));
    }

    fn write_header(&self, script: &mut Script<'_>) {
        let name = script.of(&NAMES);
        let hash = Name::parse(name).expect("a name").hash();
        let slots: Vec<u32> = self.layout.candidates(hash).collect();
        let header = Header {
            name: name.into(),
            note: ["", "('<f4', (25,))", "note"][script.below(3) as usize].into(),
            bytes: script.near(100),
            generation: script.near(1) & ((1 << 56) - 1),
            owner: Self::host(script),
            slot: script.of(&slots),
        };
        let at = Offset(self.some_header(script));
        // At the very end of the region it does not fit.
        if at.0 + 256 <= BYTES {
            header.write(&self.hand, at).expect("ordinary memory");
        }
    }

    /// A host line, a process line, a heartbeat, a generation line or a claim.
    fn write_member(&self, script: &mut Script<'_>) {
        let (host, slot) = (Self::host(script), ProcessSlot(u16::from(script.byte() % 2)));
        let at = match script.byte() % 5 {
            0 => self.layout.host_line(host),
            1 => self.layout.process_line(host, slot),
            2 => self.layout.heartbeat_line(host, slot),
            3 => self.layout.generation_line(host),
            _ => self.layout.claim_line(host),
        };
        let known = line::load(&self.hand, at).expect("ordinary memory").unwrap_or_default();
        let mut words = known.map(|word| script.near(word));
        let state = u64::from(script.byte() % 4);
        words[0] = script.near(state);
        self.publish(script, at, words);
    }

    fn write_view(&self, script: &mut Script<'_>) {
        let keeper = 1 + u16::from(script.byte() % GEOMETRY.keepers as u8);
        let usual = u64::from(keeper) * CHANGES + u64::from(script.byte() % 8);
        let epoch = script.near(usual);
        let (at, words) = match script.small() {
            0..4 => {
                let id_source = script.of(&[IdSource::Launcher, IdSource::Keeper]);
                let [members, fenced, evicted] = std::array::from_fn(|_| script.bits());
                let view = View { epoch, keeper, id_source, members, fenced, evicted };
                (self.layout.view_line(keeper, View::line_of(usual)), view.encode())
            }
            4 => (self.layout.view_line(keeper, 0), View::starting(keeper)),
            5 | 6 => {
                let [nonce, boot, incarnation, evicted_through] = std::array::from_fn(|_| script.small());
                let grant = Grant { nonce, boot, incarnation, epoch, evicted_through };
                (self.layout.grant_line(keeper, Self::host(script)), grant.encode())
            }
            _ => (self.layout.keeper_heartbeat_line(keeper), [script.small(), 0, 0, 0, 0, 0, 0]),
        };
        self.publish(script, at, words);
    }
}

fn inside(at: Offset, bytes: u64) -> bool {
    at.0.checked_add(bytes).is_some_and(|end| end <= BYTES)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    #[test]
    fn hostile_hosts_cause_errors_and_never_a_panic() {
        play(2000, 600, drive);
    }

    #[test]
    fn whatever_stands_in_a_region_is_a_pool_or_an_error() {
        play(1000, 60, read);
    }

    /// Plays scripts of up to `longest` bytes, of one seed each, and says whose it was that failed.
    pub(crate) fn play(seeds: u64, longest: u64, drive: fn(&[u8])) {
        for seed in 0..seeds {
            let script = bytes(seed, longest);
            let run = std::panic::catch_unwind(|| drive(&script));
            assert!(run.is_ok(), "seed {seed}: {script:?}");
        }
    }

    /// Bytes drawn from a seed (SplitMix64), up to `most` of them.
    fn bytes(seed: u64, most: u64) -> Vec<u8> {
        let mut state = seed;
        let mut draw = move || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ mixed >> 31
        };
        let length = draw() % most;
        (0..length).map(|_| draw() as u8).collect()
    }
}
