//! A hostile rank of a window, driven by bytes: whatever its segment says, the victim's calls end with what is there or an error,
//! and write where they should.

use std::sync::Arc;
use std::time::Duration;

use polder_mem::{Heap, LINE, Memory, Offset, ProcessSlot};

use super::place::{Segment, Word, object_bytes, own_words, segment_name};
use super::{Access, LockPlace, Window};
use crate::format::Geometry;
use crate::membership::Process;
use crate::object::InitialContents;
use crate::owned::{Identity, Kind};
use crate::script::Script;
use crate::testing::formatted;
use crate::{Member, Pool, word};

const GEOMETRY: Geometry =
    Geometry { hosts: 2, processes: 1, names: 31, levels: 3, chunk_bytes: 4096, opens: 16, keepers: 1 };
const BYTES: u64 = 64 << 10;
const RANKS: u32 = 2;
/// Bytes of a rank's data.
const ROOM: u64 = 200;

/// Runs the script `bytes`.
///
/// # Panics
/// When the victim does, or writes what belongs to the other rank alone.
pub fn drive(bytes: &[u8]) {
    let heap = formatted(&GEOMETRY, BYTES);
    let attach = |host: u16, memory| {
        let member = Member { timeout: Duration::ZERO, ..Member::new(host, 1) };
        Arc::new(Pool::attach(memory, member).expect("nobody is there yet"))
    };
    let pools = [attach(0, heap.clone()), attach(1, heap.process(1, ProcessSlot(0)))];
    let mut victim = Window::create(Arc::clone(&pools[0]), "w", 0, RANKS, ROOM).expect("there is room");
    let mut script = Script(bytes);
    let process = pools[1].this_process();
    let [place, incarnation, host_incarnation] = process.identity().map(|word| script.near(word));
    let said = Process::from_identity([place, incarnation, host_incarnation]);
    let (rank, ranks) = (script.near(1) as u32, script.near(RANKS.into()) as u32);
    let own = own_words(rank, ranks, script.near(ROOM));
    let identity = Identity { kind: Kind::Segment, process: said, own }.encode();
    let total = object_bytes(RANKS, ROOM).expect("a few bytes");
    let total = script.near(total).min(BYTES / 4);
    let object = pools[1].create_filled(&segment_name(0, "w", 1), total, InitialContents::Line(identity));
    let object = object.expect("there is room");
    if victim.join().is_ok() {
        let theirs = Segment::new(process, object.at(), RANKS, ROOM);
        converse(&mut victim, &heap, &theirs, object.at(), &mut script);
    }
    pools[1].close(object);
}

fn converse(victim: &mut Window<Heap>, heap: &Heap, theirs: &Segment, head: Offset, script: &mut Script<'_>) {
    while !script.0.is_empty() {
        say(heap, theirs, script);
        let lines = |heap: &Heap| {
            let mut bytes = vec![0; (theirs.at.0 - head.0) as usize];
            heap.copy_out(head, &mut bytes).expect("ordinary memory");
            bytes
        };
        let before = lines(heap);
        act(victim, script);
        assert!(lines(heap) == before, "the victim wrote what belongs to the other rank");
        assert!(theirs.at.0.is_multiple_of(LINE));
    }
}

/// Writes almost what a rank writes into one of its words.
fn say(heap: &Heap, theirs: &Segment, script: &mut Script<'_>) {
    let words = [Word::WindowLock, Word::UpdateLock, Word::Posts, Word::Completions];
    let at = theirs.word(words[usize::from(script.byte() % 4)], u32::from(script.byte() % 2));
    let value = u64::from(script.byte());
    let value = match script.byte() % 4 {
        0 => script.word(),
        1 => value,
        2 => word::seal(script.near(value) >> 8),
        _ => word::seal(value),
    };
    heap.store(at, value);
}

/// Lets the victim do something, whatever comes of it.
fn act(victim: &mut Window<Heap>, script: &mut Script<'_>) {
    let [usual, start, length] = [2, 255, 255].map(|sides| u64::from(script.byte()) % sides);
    let (target, offset, length) = (script.near(usual) as u32, script.near(start), length as usize);
    match script.byte() % 9 {
        0 => drop(victim.put(target, offset, &vec![7; length])),
        1 => drop(victim.get(target, offset, &mut vec![0; length])),
        2 => drop(victim.update(target, offset, script.near(8), &mut |bytes| {
            bytes.fill(9);
            true
        })),
        3 => {
            let access = if length % 2 == 0 { Access::Shared } else { Access::Exclusive };
            // Long enough that it asks whether the other lives.
            let mut place = LockPlace::default();
            drop((0..length).try_for_each(|_| victim.try_lock(target, access, &mut place).map(drop)));
            victim.leave(target, place);
        }
        4 => _ = victim.unlock(target),
        5 => drop(victim.post(&[target])),
        6 => drop(victim.start(&[target])),
        7 => {
            drop((0..length).try_for_each(|_| victim.try_start().map(drop)).and_then(|()| victim.complete()))
        }
        _ => drop((0..length).try_for_each(|_| victim.try_wait().map(drop))),
    }
    drop(
        victim
            .expose(target, offset, length as u64)
            .and_then(|()| victim.renew(target, offset, length as u64)),
    );
}
