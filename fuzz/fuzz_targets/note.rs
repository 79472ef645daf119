//! A peer asks for registered memory with whatever bytes it likes: what is asked for is said in one way only, lies within what is
//! registered for it, and stays as long as it was.
#![no_main]
#![expect(dead_code, reason = "the provider asks too, and here nobody does")]

#[path = "../../crates/ofi/src/arithmetic.rs"]
mod arithmetic;
#[path = "../../crates/ofi/src/note.rs"]
mod note;
#[path = "../../crates/ofi/src/region.rs"]
mod region;

use note::{Act, Note};
use region::{READ, Region, Regions, WRITE};

const BYTES: usize = 4096;

fn ask(bytes: &[u8]) {
    let Some(note) = Note::decode(bytes) else { return };
    assert_eq!(note.encode(), bytes);
    let mut regions = Regions::default();
    let whole = Region { at: 1 << 40, bytes: BYTES, first: 0, access: READ | WRITE, counters: vec![] };
    let part =
        Region { at: whole.at + 100, bytes: 50, first: whole.at as u64 + 100, access: READ, ..whole.clone() };
    let (start, end) = (whole.at, whole.at + BYTES);
    regions.insert(Some(0), whole);
    regions.insert(Some(1), part);
    for access in [READ, WRITE, READ | WRITE] {
        let Ok(at) = regions.find(note.key, note.address, note.bytes, access) else { continue };
        assert!(start <= at && at as u64 + note.bytes <= end as u64, "outside of what is registered");
        assert!(
            note.key != 1
                || access == READ && at >= start + 100 && at as u64 + note.bytes <= start as u64 + 150
        );
    }
    if let Act::Atomic(_, op, datatype) = note.act {
        let before = vec![1; note.bytes as usize];
        let (operand, compare) = note.carried.split_at(before.len().min(note.carried.len()));
        assert_eq!(datatype.apply(op, &before, operand, compare).len(), before.len());
    }
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ask(bytes));
