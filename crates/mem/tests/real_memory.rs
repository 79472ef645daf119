//! The conformance suite on every implementation that runs on a CPU, with threads as the processes of two hosts.

use std::thread;

use polder_mem::conformance::{self, BELLS, BYTES, LOCAL_WORDS};
use polder_mem::testing::Scratch;
use polder_mem::{
    Coherent, Cpu, Heap, HeapShape, HostPlan, Lines, LocalWord, Mapped, Memory, Offset, ProcessSlot, Region,
    Software,
};

/// Three processes: two of host 0, one of host 1.
struct Processes<M> {
    one: M,
    sibling: M,
    other: M,
}

fn plan(scratch: &Scratch, host: u16) -> HostPlan {
    let directory = scratch.path().into();
    HostPlan { pool: 1, host, hosts: 2, processes: 2, local_words: LOCAL_WORDS, bells: BELLS, directory }
}

/// Each process has a mapping of its own.
fn mapped<L: Lines>(scratch: &Scratch, cpu: Cpu) -> Processes<Mapped<L>> {
    let path = scratch.path().join("region");
    drop(Region::create(&path, BYTES).expect("a region"));
    let process = |host| {
        let region = Region::open(&path).expect("the region");
        Mapped::with_cpu(region, cpu).attach(&plan(scratch, host)).expect("a slot")
    };
    Processes { one: process(0), sibling: process(0), other: process(1) }
}

fn heap() -> Processes<Heap> {
    let one =
        Heap::new(HeapShape { bytes: BYTES, hosts: 2, processes: 2, local_words: LOCAL_WORDS, bells: BELLS });
    Processes { sibling: one.process(0, ProcessSlot(1)), other: one.process(1, ProcessSlot(0)), one }
}

fn conforms<M: Memory + Send + Sync>(processes: &Processes<M>, bell_rounds: u64) {
    let Processes { one, sibling, other } = processes;
    conformance::words(one);
    conformance::copies(one, 0..130, 0..=300);
    conformance::copies_past_caches(one, 0..18, 0..=300);
    conformance::bounds(one);
    conformance::local_words(one);
    conformance::deadlines(one);
    pair(|| conformance::publisher(one, 2000), || conformance::subscriber(other, 2000));
    pair(|| conformance::counter(one, 20_000), || conformance::counter(sibling, 20_000));
    assert_eq!(one.local_load(LocalWord(0)), 40_000);
    assert_eq!(other.local_load(LocalWord(0)), 0, "the words of two hosts are apart");
    pair(|| conformance::bells(one, 0, bell_rounds), || conformance::bells(other, 1, bell_rounds));
}

fn pair(one: impl FnOnce() + Send, other: impl FnOnce() + Send) {
    thread::scope(|scope| {
        scope.spawn(one);
        scope.spawn(other);
    });
}

#[test]
fn a_heap_region_conforms() {
    conforms(&heap(), 20_000);
}

#[test]
fn a_coherent_region_conforms_and_loses_no_wake_up_in_100_000_rounds() {
    let scratch = Scratch::new();
    conforms(&mapped::<polder_mem::HardwareLines>(&scratch, Cpu::detect()), 100_000);
}

#[test]
fn a_software_coherent_region_conforms_and_loses_no_wake_up_in_100_000_rounds() {
    let scratch = Scratch::new();
    conforms(&mapped::<polder_mem::FlushedLines>(&scratch, Cpu::detect()), 100_000);
}

#[test]
fn a_software_coherent_region_conforms_on_a_cpu_with_nothing_but_clflush_and_sse2() {
    let scratch = Scratch::new();
    conforms(&mapped::<polder_mem::FlushedLines>(&scratch, Cpu::baseline()), 1000);
}

#[test]
fn coherent_and_software_handles_of_one_file_see_the_same_bytes() {
    let scratch = Scratch::new();
    let path = scratch.path().join("region");
    let software = Software::new(Region::create(&path, BYTES).expect("a region"));
    let coherent = Coherent::new(Region::open(&path).expect("the region"));
    software.store(Offset(8), 42);
    software.write_back(Offset(8), 8);
    software.mfence();
    assert_eq!(coherent.load(Offset(8)), Ok(42));
}
