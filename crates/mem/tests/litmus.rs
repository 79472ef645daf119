//! The litmus tests on memory that this machine has: whatever is seen must be allowed.

use std::thread;
use std::time::Duration;

use polder_mem::litmus::{LITMUS_BYTES, Tally, run_host};
use polder_mem::testing::Scratch;
use polder_mem::{
    AnyMemory, Coherence, Heap, HeapShape, Mapped, Memory, Offset, ProcessSlot, Region, Wrapped,
};

const ROUNDS: u64 = 100;
const GAMES: u32 = 100;
const PATIENCE: Duration = Duration::from_secs(60);
const BASE: Offset = Offset(64);
const BYTES: u64 = 4096;

fn regions(scratch: &Scratch) -> [Region; 2] {
    let path = scratch.path().join("region");
    drop(Region::create(&path, BYTES).expect("a region"));
    [0, 1].map(|_| Region::open(&path).expect("the region"))
}

/// Runs both roles, and holds what they saw against the model.
fn allowed<M: Memory + Send>([one, other]: [M; 2]) -> Vec<Tally> {
    const { assert!(BASE.0 + LITMUS_BYTES <= BYTES) };
    let play =
        |memory: M, role| run_host(&memory, BASE, role, ROUNDS, PATIENCE, &|_, _| {}).expect("a partner");
    let (tallies, others) = thread::scope(|scope| {
        let other = scope.spawn(move || play(other, 1));
        (play(one, 0), other.join().expect("the other role"))
    });
    for (tally, other) in tallies.iter().zip(&others) {
        assert_eq!(tally.forbidden, 0, "{}: {:?}", tally.test.name, tally.outcomes);
        assert_eq!(tally.outcomes, other.outcomes, "{}: both roles count the same", tally.test.name);
        assert_eq!(tally.outcomes.values().sum::<u64>(), ROUNDS);
    }
    tallies
}

#[test]
fn ordinary_memory_shows_only_what_is_allowed() {
    let one = Heap::new(HeapShape { bytes: BYTES, hosts: 2, processes: 1, local_words: 1, bells: 1 });
    allowed([one.process(1, ProcessSlot(0)), one]);
}

#[test]
fn regions_of_each_kind_show_only_what_is_allowed() {
    let scratch = Scratch::new();
    let [a, b] = regions(&scratch);
    let attach = |region, host| Mapped::coherent(region).attach(&scratch.plan(host)).expect("a slot");
    allowed([attach(a, 0), attach(b, 1)]);
    let scratch = Scratch::new();
    let [a, b] = regions(&scratch);
    let attach = |region, host| Mapped::new(region).attach(&scratch.plan(host)).expect("a slot");
    allowed([attach(a, 0), attach(b, 1)]);
    let scratch = Scratch::new();
    let [a, b] = regions(&scratch);
    let attach = |region, host| {
        let memory = AnyMemory::new(region).with_coherence(Coherence::HdmDb);
        memory.attach(&scratch.plan(host)).expect("a slot")
    };
    allowed([attach(a, 0), attach(b, 1)]);
}

#[test]
fn a_shadow_shows_what_a_missing_flush_does_and_nothing_that_is_forbidden() {
    let mut awaited = vec!["the payload is not written back", "the payload is not invalidated"];
    // On a busy machine one role may be over before the other begins, round after round.
    for _ in 0..GAMES {
        let scratch = Scratch::new();
        let [a, b] = regions(&scratch);
        let attach = |region, host| {
            Wrapped::shadow(Mapped::coherent(region)).attach(&scratch.plan(host)).expect("a slot")
        };
        for Tally { test, outcomes, .. } in allowed([attach(a, 0), attach(b, 1)]) {
            awaited.retain(|name| !(test.name.contains(name) && outcomes.contains_key(test.feared)));
        }
        if awaited.is_empty() {
            return;
        }
    }
    panic!("not seen in {GAMES} games of {ROUNDS} rounds: {awaited:?}");
}
