//! Hostile peers of a group, driven by bytes: whatever they write, the victim's operations end, with a result or an error.
//!
//! The victim is one rank of three; the others' extents belong to the script. It writes there between the victim's
//! operations and while the victim waits: whole progress lines that look right, some that do not, single words, and bytes
//! of staging.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use polder_kernels::{Dtype, Op};
use polder_mem::{Bell, Heap, HeapShape, LINE, Memory, Offset, ProcessSlot};
use polder_schedule::Collective;

use super::join::{Identity, acknowledgement, mark_of, number_of};
use super::staging::first_bytes;
use super::{Group, GroupOptions, MAX_BYTES, RankPlace, Signature, extent_bytes, progress};
use crate::format::Geometry;
use crate::line::{self, WORDS, Words};
use crate::object::Object;
use crate::testing::formatted;
use crate::wait::Patience;
use crate::{Buffers, Operation, Pool, PoolError, script};

const RANKS: usize = 3;
const DATA: u64 = 1024;

/// Runs the script `bytes`.
///
/// # Panics
/// When the victim writes outside its own extent and data, or returns an error that is none of a group.
pub fn drive(bytes: &[u8]) {
    let mut script = Script { bytes: bytes.to_vec(), at: 0 };
    let victim = usize::from(script.byte()) % RANKS;
    let options = options(4096, Duration::from_micros(100));
    let hosts = [[0, 1, 2], [0, 0, 1], [0, 0, 0]][usize::from(script.byte()) % 3];
    let stage = Arc::new(Mutex::new(Stage::new(hosts, victim, options, script)));
    while !lock(&stage).script.is_empty() {
        play(&stage, options);
    }
}

fn options(staging_bytes: u64, timeout: Duration) -> GroupOptions {
    let patience = Patience { spins: 0, yields: 0, nap: Duration::ZERO };
    let (segment_bytes, direct_bytes) = (64, 64);
    let silence = Duration::ZERO;
    GroupOptions {
        staging_bytes,
        segment_bytes,
        direct_bytes,
        timeout,
        silence,
        patience,
        ..GroupOptions::default()
    }
}

/// One group, until it breaks or the script ends.
fn play(stage: &Arc<Mutex<Stage>>, options: GroupOptions) {
    let (memory, members, victim) = lock(stage).set();
    let mut group = Group::over_extents(memory, members, victim, options).expect("the members fit");
    let meanwhile = Arc::clone(stage);
    group.on_wait(Box::new(move || {
        lock(&meanwhile).write(4);
        false
    }));
    while !lock(stage).script.is_empty() {
        lock(stage).write(4);
        let (which, before, at) = lock(stage).begin();
        let outcome = call(&mut group, which, at);
        let stage = lock(stage);
        assert!(stage.touched || stage.theirs() == before, "the victim wrote outside its own lines");
        match outcome {
            Ok(()) | Err(PoolError::Argument { .. }) => {}
            Err(
                PoolError::PeerDead { .. }
                | PoolError::Timeout { .. }
                | PoolError::GaveUp { .. }
                | PoolError::Mismatch { .. }
                | PoolError::Corrupt { .. },
            ) => return,
            Err(error) => panic!("not an error of a hostile peer: {error}"),
        }
    }
}

fn call(group: &mut Group<Heap>, which: u8, at: Offset) -> Result<(), PoolError> {
    let mut data = [1; 960];
    let (bytes, root) = ([0, 4, 64, 960][usize::from(which >> 6)], usize::from(which >> 4 & 3));
    match which & 15 {
        0 | 1 => group.barrier(),
        2..=4 => group.all_reduce(Op::Sum, Dtype::F32, &mut data[..bytes]),
        5 => {
            let max = Operation::reducing(Collective::Reduce, Op::Max, Dtype::F32).with_root(root);
            group.run(&max, Buffers::InPlace(&mut data[..bytes]))
        }
        6 => group.broadcast(root, Dtype::F32, &mut data[..bytes]),
        7 => {
            let sum = Operation::reducing(Collective::ReduceScatter, Op::Sum, Dtype::U8);
            group.run(&sum, Buffers::InPlace(&mut data[..bytes / RANKS * RANKS]))
        }
        8 => {
            let data = Buffers::InPlace(&mut data[..bytes / RANKS * RANKS]);
            group.run(&Operation::moving(Collective::AllGather, Dtype::U8), data)
        }
        9 => {
            let buffers = Buffers::Apart { input: &[7; 64], output: &mut data[..64 * RANKS] };
            group.run(&Operation::moving(Collective::Gather, Dtype::U8).with_root(root), buffers)
        }
        10 => {
            let buffers = Buffers::Apart { input: &[7; 64 * RANKS], output: &mut data[..64] };
            group.run(&Operation::moving(Collective::Scatter, Dtype::U8).with_root(root), buffers)
        }
        11 if bytes > 0 => {
            let mut output: Vec<&mut [u8]> = data.chunks_mut(96).take(RANKS).collect();
            let input: Vec<&[u8]> =
                (0..RANKS).map(|to| &[7; 96][..if to == root { 96 } else { 64 }]).collect();
            let buffers = Buffers::Lists { input: &input, output: &mut output };
            group.run(&Operation::moving(Collective::AllToAll, Dtype::U8), buffers)
        }
        11 => {
            let buffers = Buffers::Apart { input: &[7; 96 * RANKS], output: &mut data[..96 * RANKS] };
            group.run(&Operation::moving(Collective::AllToAll, Dtype::U8), buffers)
        }
        12 => {
            let gather = Operation::moving(Collective::AllGather, Dtype::F32);
            group.run(&gather, Buffers::Pool { at, bytes: 960 })
        }
        13 => {
            let copy = Operation::moving(Collective::Broadcast, Dtype::F32).with_root(root);
            group.run(&copy, Buffers::Pool { at, bytes: bytes as u64 })
        }
        _ => {
            let sum = Operation::reducing(Collective::AllReduce, Op::Sum, Dtype::F32);
            group.run(&sum, Buffers::Pool { at, bytes: bytes as u64 })
        }
    }
}

fn lock(stage: &Mutex<Stage>) -> std::sync::MutexGuard<'_, Stage> {
    stage.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is left of the script; zeros follow it.
struct Script {
    bytes: Vec<u8>,
    at: usize,
}

impl Script {
    fn is_empty(&self) -> bool {
        self.at >= self.bytes.len()
    }

    fn byte(&mut self) -> u8 {
        self.at += 1;
        self.bytes.get(self.at - 1).copied().unwrap_or(0)
    }

    fn word(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }
}

/// The region, and the hand that writes what belongs to the peers.
struct Stage {
    memory: Heap,
    peer: Heap,
    members: Vec<RankPlace>,
    victim: usize,
    script: Script,
    /// Whether the script has written since the victim's call began.
    touched: bool,
}

impl Stage {
    fn new(hosts: [u16; RANKS], victim: usize, options: GroupOptions, script: Script) -> Self {
        let stride = extent_bytes(&options) + DATA;
        let shape = HeapShape {
            bytes: stride * RANKS as u64,
            hosts: 4,
            processes: 3,
            local_words: 0,
            bells: RANKS as u32,
        };
        let memory = Heap::new(shape);
        let member = |rank: usize| RankPlace {
            at: Offset(stride * rank as u64),
            bytes: extent_bytes(&options),
            host: hosts[rank],
            slot: ProcessSlot(rank as u16),
            pid: rank as u32,
            bell: Some(Bell(rank as u32)),
            heartbeat: None,
            sign: None,
        };
        let peer = memory.process(3, ProcessSlot(0));
        Self { memory, peer, members: (0..RANKS).map(member).collect(), victim, script, touched: false }
    }

    /// Zeroes all lines for a new group.
    fn set(&mut self) -> (Heap, Vec<RankPlace>, usize) {
        for member in &self.members {
            (0..progress::LINES * 8).for_each(|word| self.peer.store(member.at.word(word), 0));
        }
        (self.memory.clone(), self.members.clone(), self.victim)
    }

    /// What the victim calls next, what it must not change meanwhile, and where its data in the pool lies.
    fn begin(&mut self) -> (u8, Vec<u8>, Offset) {
        self.touched = false;
        let member = &self.members[self.victim];
        (self.script.byte(), self.theirs(), member.at + member.bytes)
    }

    /// All bytes that the victim must not write.
    fn theirs(&self) -> Vec<u8> {
        let peers = (0..RANKS).filter(|&rank| rank != self.victim);
        let bytes = |rank: usize| {
            let mut bytes = vec![0; (self.members[rank].bytes + DATA) as usize];
            self.peer.copy_out(self.members[rank].at, &mut bytes).expect("the heap has no faults");
            bytes
        };
        peers.flat_map(bytes).collect()
    }

    /// Writes up to `most` things.
    fn write(&mut self, most: u8) {
        for _ in 0..self.script.byte() % (most + 1) {
            self.touched = true;
            let rank = (self.victim + 1 + usize::from(self.script.byte()) % (RANKS - 1)) % RANKS;
            match self.script.byte() % 8 {
                0 => self.write_word(rank),
                1 => self.write_staging(rank),
                _ => self.write_progress(rank),
            }
        }
    }

    fn write_word(&mut self, rank: usize) {
        let words = (self.members[rank].bytes + DATA) / 8;
        let at = self.members[rank].at.word(self.script.word() % words);
        let word = self.script.word();
        self.peer.store(at, word);
    }

    fn write_staging(&mut self, rank: usize) {
        let at = progress::staging_at(self.members[rank].at) + u64::from(self.script.byte()) * 8;
        let bytes: Vec<u8> = (0..self.script.byte()).map(|_| self.script.byte()).collect();
        self.peer.copy_in(at, &bytes).expect("the heap has no faults");
    }

    /// A whole line: the victim's own, as a correct rank's would be, with some words changed.
    fn write_progress(&mut self, rank: usize) {
        let own = progress::line_at(self.members[self.victim].at);
        let known = line::load(&self.peer, own).expect("the heap has no faults");
        let mut words = known.unwrap_or_default();
        words[0] = words[0].wrapping_add(u64::from(self.script.byte() % 32));
        words[5] = self.members[rank].at.0 + self.members[rank].bytes;
        if self.script.byte() < 64 {
            words[0] = words[0].wrapping_add(1 << 24);
            words[2] = words[1];
        }
        if self.script.byte() < 32 {
            let changed = usize::from(self.script.byte()) % WORDS;
            words[changed] = self.script.word();
        }
        if self.script.byte() < 16 {
            words[3] = u64::from(self.script.byte() % 8) << 32 | u64::from(self.script.byte() % 5);
        }
        line::store(&self.peer, progress::line_at(self.members[rank].at), &words);
    }
}

/// Runs the script `bytes` against ranks that look for each other: the victim joins as rank 0 of two, the peer owns the
/// extents of rank 1 and writes there who it says that it is, what it acknowledges, how far it is and whether it has more staging.
///
/// # Panics
/// When the victim does, or writes in the peer's extent.
pub fn meet(bytes: &[u8]) {
    let mut script = script::Script(bytes);
    let options = GroupOptions { segment_bytes: 512, ..options(1024, Duration::ZERO) };
    let first = GroupOptions { staging_bytes: first_bytes(&options, 2), ..options };
    let (victim, peer) = pools();
    let seat = peer.create("/g/1", extent_bytes(&first)).expect("an empty pool has room");
    let bytes = extent_bytes(&options) - u64::from(script.byte() < 32) * LINE;
    let staging = mark_of(&peer.create("/g/staging/1", bytes).expect("an empty pool has room"));
    while !script.0.is_empty() {
        let Ok(next) = victim.create("/g/0", 0) else { return };
        let mark = mark_of(&next) + 1;
        victim.close(next);
        victim.destroy("/g/0").expect("its own object");
        for _ in 0..1 + script.byte() % 4 {
            write_seat(&peer, &seat, mark, &options, &mut script);
        }
        let before = contents(&peer, &seat);
        let joined = Group::join(Arc::clone(&victim), "/g", 0, 2, options, None);
        assert_eq!(contents(&peer, &seat), before, "the victim wrote in the peer's extent");
        if let Ok(mut group) = joined {
            let mut words = ahead(staging);
            script.change(&mut words);
            line::publish(peer.memory(), progress::line_at(seat.at()), &words);
            let error =
                group.all_reduce(Op::Sum, Dtype::U8, &mut [1; LONG]).expect_err("the peer goes no further");
            assert!(!matches!(error, PoolError::Memory(_)), "{error}");
        }
    }
}

/// Bytes of a message that more staging is taken for.
const LONG: usize = 960;

/// The line of a peer that has made its staging, of this mark, and has found that of the victim.
fn ahead(staging: u64) -> Words {
    let long = Signature::new(Collective::AllReduce, 0, LONG as u64).of(Dtype::U8).reducing(Op::Sum);
    [progress::at(2, 2), long.word(), 0, 0, 0, 3, staging]
}

/// The line of a peer in the first barrier of the group of these extents.
fn met(seat: &Object, mark: u64) -> Words {
    let number = number_of(&BTreeSet::from([mark, mark_of(seat)])) & MAX_BYTES;
    [progress::at(1, 1), Signature::new(Collective::Barrier, 0, number).word(), 0, 0, 0, 0, 0]
}

/// The pools of the victim and of its peer, on hosts of their own.
fn pools() -> (Arc<Pool<Heap>>, Pool<Heap>) {
    const BYTES: u64 = 64 << 10;
    let geometry =
        Geometry { hosts: 2, processes: 1, names: 13, levels: 2, chunk_bytes: 4096, opens: 5, keepers: 1 };
    let heap = formatted(&geometry, BYTES);
    let member = |host| crate::Member {
        timeout: Duration::ZERO,
        silence: Duration::ZERO,
        ..crate::Member::new(host, u64::from(host) + 1)
    };
    let peer = Pool::attach(heap.process(1, ProcessSlot(0)), member(1)).expect("a new pool");
    (Arc::new(Pool::attach(heap, member(0)).expect("a new pool")), peer)
}

fn contents(pool: &Pool<Heap>, object: &Object) -> Vec<u8> {
    let mut bytes = vec![0; object.bytes() as usize];
    object.read_at(pool.memory(), 0, &mut bytes).expect("the heap has no faults");
    bytes
}

/// Writes one thing: an identity, an acknowledgement, a progress line, a process line, or any word of the extent.
fn write_seat(
    peer: &Pool<Heap>,
    seat: &Object,
    mark: u64,
    options: &GroupOptions,
    script: &mut script::Script<'_>,
) {
    let memory = peer.memory();
    match script.byte() % 8 {
        0 => {
            let word = script.word() % (seat.bytes() / 8);
            memory.store(seat.at().word(word), script.word());
        }
        1..4 => {
            let said = Identity { rank: 1, size: 2, process: peer.this_process() };
            let mut words = said.encode(options, first_bytes(options, 2));
            if script.byte() < 128 {
                script.change(&mut words);
            }
            line::publish(memory, seat.at(), &words);
        }
        4 | 5 => memory.store(acknowledgement(seat, 0), script.near(mark)),
        6 => {
            let mut words = met(seat, mark);
            if script.byte() < 128 {
                script.change(&mut words);
            }
            line::publish(memory, progress::line_at(seat.at()), &words);
        }
        _ => {
            let at = peer.layout().process_line(1, ProcessSlot(0));
            let mut words = line::load(memory, at).expect("ordinary memory").unwrap_or_default();
            script.change(&mut words);
            line::publish(memory, at, &words);
        }
    }
}

const _: () = assert!(DATA.is_multiple_of(LINE), "data of the ranks lie on lines of their own");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hostile::tests::play;

    #[test]
    fn hostile_peers_cause_errors_and_never_a_panic() {
        play(2000, 2000, drive);
    }

    #[test]
    fn whoever_comes_as_a_rank_is_met_or_refused() {
        play(2000, 200, meet);
    }
}
