//! A hostile host that writes what it likes into a cache, driven by bytes: the victim's calls end, and write into no object that is not
//! the victim's own.
//!
//! The victim and the peer are processes of hosts of their own. The peer puts and gets as it should, writes lines that are almost right
//! with checksums that are right, writes any word of the cache's objects, and removes any of them.

use std::sync::Arc;
use std::time::Duration;

use polder_mem::{Heap, HeapShape, LINE, Memory, ProcessSlot};

use super::wire::{Control, Entry, LogLine, Record, Root, SEQUENCES, SlabHead, Slot, State};
use super::{Cache, GonePart, Identity, Key, Options};
use crate::format::{Geometry, Layout, Overwrite, Uuid, format};
use crate::local::LocalLayout;
use crate::script::Script;
use crate::view::{CHANGES, View};
use crate::{Member, Pool, line};

const GEOMETRY: Geometry =
    Geometry { hosts: 2, processes: 1, names: 31, levels: 3, chunk_bytes: 1024, opens: 12, keepers: 1 };
const BYTES: u64 = 64 << 10;
const NAME: &str = "c";
const BLOCK: u32 = 72;
const VICTIM: u16 = 0;
const ROOT: Root = Root { slab_bytes: 1024, log_lines: 4, budget: 4096, hosts: 2 };
/// What is at the ends of words and counters.
const NUMBERS: [u64; 8] = [0, 1, 3, 5, SEQUENCES - 1, SEQUENCES + 4, u64::MAX - 1, u64::MAX];

/// Runs the script `bytes`.
///
/// # Panics
/// When the victim does, or writes into an object that is another's.
pub fn drive(bytes: &[u8]) {
    let mut script = Script(bytes);
    let memory = heap();
    let peer = attach(&memory, 1);
    let victim = attach(&memory, VICTIM);
    let Some(theirs) = open(&peer) else { return };
    // What stands outside the cache, and is nobody's to write.
    let other = peer.create("/other", 256).expect("there is room");
    let is_untouched = || {
        let mut bytes = [1; 256];
        other.read_at(&memory, 0, &mut bytes).is_ok() && bytes == [0; 256]
    };
    let mut ours = open(&victim);
    while !script.0.is_empty() {
        for _ in 0..script.byte() % 4 {
            hurt(&mut script, &peer);
        }
        if script.byte() % 3 == 0 {
            act(&mut script, &theirs);
        }
        match &ours {
            Some(cache) if script.byte() % 8 != 0 => act(&mut script, cache),
            _ => {
                ours = None;
                ours = ours.or_else(|| open(&victim));
            }
        }
        let _ = super::inspect(&memory);
        let _ = super::wanted_parts(&memory);
        let _ = super::check(&memory);
        assert!(is_untouched(), "an object of no cache was written");
    }
    peer.close(other);
}

fn heap() -> Heap {
    let layout = Layout::new(&GEOMETRY, BYTES).expect("a geometry that fits");
    let local_words = LocalLayout::new(&layout).words();
    let memory = Heap::new(HeapShape { bytes: BYTES, hosts: 2, processes: 1, local_words, bells: 2 });
    format(&memory, &GEOMETRY, Uuid(1), Overwrite::Refuse).expect("it is empty");
    // Whoever was here before them was evicted: so what a control line says of its host's end counts.
    line::publish_and_fence(&memory, layout.view_line(1, 0), &View::starting(1));
    let view = View { epoch: CHANGES + 1, keeper: 1, evicted: 3, ..View::INITIAL };
    line::publish_and_fence(&memory, layout.view_line(1, View::line_of(view.epoch)), &view.encode());
    memory
}

fn attach(memory: &Heap, host: u16) -> Arc<Pool<Heap>> {
    let memory = if host == 0 { memory.clone() } else { memory.process(host, ProcessSlot(0)) };
    let patience = Duration::from_millis(1);
    let member = Member { timeout: patience, silence: patience, ..Member::new(host, 7) };
    Arc::new(Pool::attach(memory, member).expect("nobody has the host"))
}

fn open(pool: &Arc<Pool<Heap>>) -> Option<Cache<Heap>> {
    let identity = Identity { hash: [9; 32], text: "hostile".to_owned(), block: BLOCK };
    let options = Options { budget: None, verify: true };
    Cache::open_with(Arc::clone(pool), NAME, identity, options, ROOT).ok()
}

/// Puts, looks up, gets or pins some blocks, or gives all of its host up.
fn act(script: &mut Script<'_>, cache: &Cache<Heap>) {
    let keys: Vec<Key> = (0..1 + script.byte() % 5).map(|_| [script.byte() % 9; 16]).collect();
    match script.byte() % 6 {
        0 => _ = cache.lookup(&keys),
        1 => {
            let mut buffers = vec![[0; BLOCK as usize]; keys.len()];
            let mut into: Vec<&mut [u8]> =
                buffers.iter_mut().map(<[u8; BLOCK as usize]>::as_mut_slice).collect();
            _ = cache.get(&keys, &mut into);
        }
        2 => _ = cache.stat(),
        3 => drop(cache.pin(&keys)),
        4 if script.byte().is_multiple_of(2) => {
            let (host, bytes) = (cache.pool().member().host, script.byte().into());
            let part = GonePart { cache: NAME.to_owned(), host, bytes };
            _ = Cache::give_to_living(cache.pool(), &part);
        }
        4 => _ = Cache::give_up_part(cache.pool(), NAME),
        _ => {
            let blocks: Vec<_> = keys.iter().map(|key| [key[0]; BLOCK as usize]).collect();
            let blocks: Vec<&[u8]> = blocks.iter().map(<[u8; BLOCK as usize]>::as_slice).collect();
            _ = cache.put(&keys, &blocks);
        }
    }
}

/// Writes something wrong into an object of the cache, or removes it.
fn hurt(script: &mut Script<'_>, pool: &Pool<Heap>) {
    let Ok(mut objects) = pool.list("/kv/") else { return };
    objects.sort_by(|one, other| one.name.cmp(&other.name));
    if objects.is_empty() {
        return;
    }
    let listed = &objects[usize::from(script.byte()) % objects.len()];
    let (lines, memory) = (listed.bytes / LINE, pool.memory());
    let at = listed.at.lines(u64::from(script.byte()) % lines.max(1));
    let mut number = || match script.byte() {
        small @ 0..128 => u64::from(small % 16),
        large => NUMBERS[usize::from(large) % NUMBERS.len()],
    };
    let slot = Slot::of(number() as u32);
    let words = match number() % 7 {
        0 => Root { slab_bytes: number(), log_lines: number(), budget: number(), hosts: 2 }.encode(),
        1 => Control {
            position: number(),
            slabs: number() as u32,
            changes: number() as u32,
            claimed: number(),
            incarnation: number(),
            busy: number() % 2 == 0,
            wants: number() % 2 == 0,
            pins: number() % 2 == 0,
            asked: number() % 2 * (number() >> 8),
            gone: number() % 2 == 0,
            puts: number(),
            evictions: number(),
        }
        .encode(),
        2 => {
            let record = Record { key: number().into(), slot, generation: number() as u32 };
            LogLine::encode(number(), &[record, record])
        }
        3 => SlabHead {
            block: [BLOCK, number() as u32][number() as usize % 2],
            slots: number() as u32,
            first_count: number() as u32,
        }
        .encode([listed.generation, number()][number() as usize % 2], [1, number()][number() as usize % 2]),
        4 => Entry {
            key: number().into(),
            generation: number() >> 8,
            state: [State::Free, State::Reserved, State::Live][number() as usize % 3],
            identity: number() as u32,
            puts: number() as u32,
            bytes: [BLOCK, number() as u32][number() as usize % 2],
            host: number() as u16 % 4,
            slab: number() as u32 % 8,
            sum: number(),
            holder: number(),
            second: number(),
        }
        .encode(),
        5 => {
            memory.store(at.word(number() % 8), number());
            return;
        }
        _ => {
            if number() == 7 {
                _ = pool.destroy(&listed.name);
            }
            return;
        }
    };
    if lines > 0 {
        line::store(memory, at, &words);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hostile::tests::play;

    #[test]
    fn hostile_hosts_cause_errors_and_misses_and_never_a_panic() {
        play(2000, 600, drive);
    }
}
