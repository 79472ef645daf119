//! Hostile peers of a group, driven by bytes: whatever they write, the victim's operations end, with a result or an error.
//!
//! The victim is one rank of three; the others' extents belong to the script. It writes there between the victim's
//! operations and while the victim waits: whole progress lines that look right, some that do not, single words, and bytes
//! of staging.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use polder_kernels::{Dtype, Op};
use polder_mem::{Bell, Heap, HeapShape, LINE, Memory, Offset, ProcessSlot};

use super::{Group, Member, Options, extent_bytes, progress};
use crate::PoolError;
use crate::line::{self, WORDS};
use crate::wait::Patience;

const RANKS: usize = 3;
const DATA: u64 = 1024;

/// Runs the script `bytes`.
///
/// # Panics
/// When the victim writes outside its own extent and data, or returns an error that is none of a group.
pub fn drive(bytes: &[u8]) {
    let mut script = Script { bytes: bytes.to_vec(), at: 0 };
    let victim = usize::from(script.byte()) % RANKS;
    let options = Options {
        staging_bytes: 4096,
        segment_bytes: 64,
        direct_bytes: 64,
        timeout: Duration::from_micros(100),
        silence: Duration::ZERO,
        patience: Patience { spins: 0, yields: 0, nap: Duration::ZERO },
        ..Options::default()
    };
    let hosts = [[0, 1, 2], [0, 0, 1], [0, 0, 0]][usize::from(script.byte()) % 3];
    let stage = Arc::new(Mutex::new(Stage::new(hosts, victim, options, script)));
    while !lock(&stage).script.is_empty() {
        play(&stage, options);
    }
}

/// One group, until it breaks or the script ends.
fn play(stage: &Arc<Mutex<Stage>>, options: Options) {
    let (memory, members, victim) = lock(stage).set();
    let mut group = Group::over(memory, members, victim, options).expect("the members fit");
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
        5 => group.reduce(root, Op::Max, Dtype::F32, &mut data[..bytes]),
        6 => group.broadcast(root, &mut data[..bytes]),
        7 => group.reduce_scatter_in_place(Op::Sum, Dtype::U8, &mut data[..bytes / RANKS * RANKS]),
        8 => group.all_gather_in_place(&mut data[..bytes / RANKS * RANKS]),
        9 => group.gather(root, &[7; 64], &mut data[..64 * RANKS]),
        10 => group.scatter(root, &[7; 64 * RANKS], &mut data[..64]),
        11 => group.all_to_all(&[7; 96 * RANKS], &mut data[..96 * RANKS]),
        12 => group.all_gather_in_pool(at, 960),
        13 => group.broadcast_in_pool(root, at, bytes as u64),
        _ => group.all_reduce_in_pool(Op::Sum, Dtype::F32, at, bytes as u64),
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
    members: Vec<Member>,
    victim: usize,
    script: Script,
    /// Whether the script has written since the victim's call began.
    touched: bool,
}

impl Stage {
    fn new(hosts: [u16; RANKS], victim: usize, options: Options, script: Script) -> Self {
        let stride = extent_bytes(&options) + DATA;
        let shape = HeapShape {
            bytes: stride * RANKS as u64,
            hosts: 4,
            processes: 3,
            local_words: 0,
            bells: RANKS as u32,
        };
        let memory = Heap::new(shape);
        let member = |rank: usize| Member {
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
    fn set(&mut self) -> (Heap, Vec<Member>, usize) {
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

const _: () = assert!(DATA.is_multiple_of(LINE), "data of the ranks lie on lines of their own");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_peers_cause_errors_and_never_a_panic() {
        let mut state = 0x5eed_u64;
        for run in 0..2000 {
            let mut next = || {
                state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                (state >> 56) as u8
            };
            let length = 64 + usize::from(next()) * 8;
            let script: Vec<u8> = (0..length).map(|_| next()).collect();
            let outcome = std::panic::catch_unwind(|| drive(&script));
            assert!(outcome.is_ok(), "script {run} of seed 0x5eed: {script:?}");
        }
    }
}
