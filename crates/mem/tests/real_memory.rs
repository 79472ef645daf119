//! The conformance suite on every implementation that runs on a CPU, with threads as the processes of two hosts.

use std::thread;

use polder_mem::conformance::{self, BELLS, BYTES, LOCAL_WORDS};
use polder_mem::testing::Scratch;
use polder_mem::{
    AnyMemory, Coherence, Cost, Cpu, FlushSite, Heap, HeapShape, HostError, HostPlan, LocalWord, Mapped,
    Memory, Offset, ProcessSlot, Region, Trigger, TriggerAction, Wrapped,
};

/// Three processes: two of host 0, one of host 1.
struct Processes<M> {
    one: M,
    sibling: M,
    other: M,
}

fn plan(scratch: &Scratch, host: u16) -> HostPlan {
    HostPlan { local_words: LOCAL_WORDS, bells: BELLS, ..scratch.plan(host) }
}

/// Each process has a mapping of its own.
fn processes<M>(
    scratch: &Scratch,
    attach: impl Fn(Region, &HostPlan) -> Result<M, HostError>,
) -> Processes<M> {
    let path = scratch.path().join("region");
    drop(Region::create(&path, BYTES).expect("a region"));
    let process = |host| {
        let region = Region::open(&path).expect("the region");
        attach(region, &plan(scratch, host)).expect("a slot")
    };
    Processes { one: process(0), sibling: process(0), other: process(1) }
}

fn mapped(scratch: &Scratch, coherence: Coherence, cpu: Cpu) -> Processes<Mapped> {
    processes(scratch, |region, plan| Mapped::new(region).with_coherence(coherence).using(cpu).attach(plan))
}

fn shadows(scratch: &Scratch) -> Processes<Wrapped> {
    processes(scratch, |region, plan| Wrapped::shadow(Mapped::coherent(region)).attach(plan))
}

fn heap() -> Processes<Heap> {
    let one =
        Heap::new(HeapShape { bytes: BYTES, hosts: 2, processes: 2, local_words: LOCAL_WORDS, bells: BELLS });
    Processes { sibling: one.process(0, ProcessSlot(1)), other: one.process(1, ProcessSlot(0)), one }
}

/// Under miri, which is a thousand times slower, a part of everything.
const SHARE: usize = if cfg!(miri) { 50 } else { 1 };

fn conforms<M: Memory + Send + Sync>(processes: &Processes<M>, bell_rounds: u64) {
    let Processes { one, sibling, other } = processes;
    let rounds = |rounds: u64| rounds / SHARE as u64;
    conformance::words(one);
    conformance::copies(one, (0..130).step_by(SHARE), (0..=300).step_by(SHARE));
    conformance::copies_past_caches(one, 0..18, (0..=300).step_by(SHARE));
    conformance::folds(one, 0..18, (0..=300).step_by(SHARE));
    conformance::bounds(one);
    conformance::local_words(one);
    conformance::deadlines(one);
    pair(|| conformance::publisher(one, rounds(2000)), || conformance::subscriber(other, rounds(2000)));
    pair(|| conformance::counter(one, rounds(20_000)), || conformance::counter(sibling, rounds(20_000)));
    assert_eq!(one.local_load(LocalWord(0)), rounds(40_000));
    assert_eq!(other.local_load(LocalWord(0)), 0, "the words of two hosts are apart");
    let turns = rounds(bell_rounds);
    pair(|| conformance::bells(one, 0, turns), || conformance::bells(other, 1, turns));
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
    conforms(&mapped(&scratch, Coherence::Coherent, Cpu::detect()), 100_000);
}

#[test]
fn a_software_coherent_region_conforms_and_loses_no_wake_up_in_100_000_rounds() {
    let scratch = Scratch::new();
    conforms(&mapped(&scratch, Coherence::Software, Cpu::detect()), 100_000);
}

#[test]
fn a_software_coherent_region_conforms_on_a_cpu_with_nothing_but_clflush_and_sse2() {
    let scratch = Scratch::new();
    conforms(&mapped(&scratch, Coherence::Software, Cpu::baseline()), 1000);
}

#[test]
fn a_region_whose_kind_is_said_at_run_time_conforms_and_is_of_that_kind() {
    for coherence in Coherence::ALL {
        let scratch = Scratch::new();
        let any = |region, plan: &_| AnyMemory::new(region).with_coherence(coherence).attach(plan);
        let all = processes(&scratch, any);
        assert_eq!(all.one.coherence(), coherence);
        conforms(&all, 20_000);
        let scratch = Scratch::new();
        let wrapped = |region, plan: &_| {
            AnyMemory::Wrapped(AnyMemory::new(region).with_coherence(coherence).wrapped(false)).attach(plan)
        };
        let all = processes(&scratch, wrapped);
        assert_eq!(all.one.coherence(), coherence);
        conforms(&all, 5_000);
    }
}

#[test]
fn a_coherent_bulk_copy_of_any_size_is_whole_once_its_sequence_is_seen() {
    let scratch = Scratch::new();
    let path = scratch.path().join("region");
    let memory = Mapped::coherent(Region::create(&path, 32 << 20).expect("a region"));
    for bytes in [(12 << 20) - 3, 12 << 20, (12 << 20) + 5, 24 << 20] {
        let sent: Vec<u8> = (0..bytes).map(|index: usize| (index % 251) as u8).collect();
        memory.copy_in_nt(Offset(8), &sent).expect("good memory");
        let mut received = vec![0; bytes.next_multiple_of(8)];
        memory.copy_out(Offset(8), &mut received).expect("good memory");
        assert!(
            received[..bytes] == sent && received[bytes..].iter().all(|byte| *byte == 0),
            "{bytes} bytes"
        );
    }
}

#[test]
fn coherent_and_software_handles_of_one_file_see_the_same_bytes() {
    let scratch = Scratch::new();
    let path = scratch.path().join("region");
    let software = Mapped::new(Region::create(&path, BYTES).expect("a region"));
    let coherent = Mapped::coherent(Region::open(&path).expect("the region"));
    software.store(Offset(8), 42);
    software.write_back(Offset(8), 8);
    software.mfence();
    assert_eq!(coherent.load(Offset(8)), Ok(42));
}

#[test]
fn wrapped_regions_conform() {
    let cost = Cost { latency_ns: 50, bytes_per_second: 20_000_000_000 };
    let scratch = Scratch::new();
    conforms(
        &processes(&scratch, |region, plan| Wrapped::from(Mapped::coherent(region)).attach(plan)),
        10_000,
    );
    let scratch = Scratch::new();
    let slow = |region, plan: &_| Wrapped::from(Mapped::new(region)).with_cost(cost).attach(plan);
    conforms(&processes(&scratch, slow), 10_000);
    let scratch = Scratch::new();
    let never = Trigger { operation: u64::MAX, action: TriggerAction::Kill };
    let armed = |region, plan: &_| Wrapped::from(Mapped::coherent(region)).with_trigger(never).attach(plan);
    conforms(&processes(&scratch, armed), 10_000);
}

#[test]
fn a_shadow_conforms_and_is_software_coherent() {
    let scratch = Scratch::new();
    let processes = shadows(&scratch);
    assert_eq!((processes.one.coherence(), processes.one.emulated()), (Coherence::Software, true));
    conforms(&processes, 10_000);
    drop(processes);
    assert_eq!(scratch.names(), ["region"]);
}

#[test]
fn in_a_shadow_nothing_passes_between_hosts_without_its_write_back_and_its_invalidation() {
    let scratch = Scratch::new();
    let Processes { one, sibling, other } = shadows(&scratch);
    let at = Offset(64);
    assert_eq!((one.load(at), other.load(at)), (Ok(0), Ok(0)));
    one.store(at, 1);
    one.mfence();
    assert_eq!(sibling.load(at), Ok(1), "the processes of one host share its cache");
    other.invalidate(at, 8);
    assert_eq!(other.load(at), Ok(0), "not written back");
    one.write_back(at, 8);
    assert_eq!(other.load(at), Ok(0), "not invalidated");
    other.invalidate(at, 8);
    assert_eq!(other.load(at), Ok(1));

    one.copy_in(Offset(100), &[7; 60]).expect("good memory");
    other.store(Offset(256), 5);
    other.write_back(Offset(256), 8);
    one.write_back(Offset(100), 28);
    let mut seen = [0; 60];
    other.copy_out(Offset(100), &mut seen).expect("good memory");
    assert_eq!(
        (&seen[..28], &seen[28..]),
        (&[0; 28][..], &[0; 32][..]),
        "the first line was cached by the load at 64"
    );
    other.invalidate(Offset(64), 128);
    other.copy_out(Offset(100), &mut seen).expect("good memory");
    assert_eq!(
        (&seen[..28], &seen[28..]),
        (&[7; 28][..], &[0; 32][..]),
        "the second line was not written back"
    );
}

#[test]
fn in_a_shadow_a_write_back_overwrites_the_whole_line_and_a_non_temporal_store_one_word() {
    let scratch = Scratch::new();
    let Processes { one, other, .. } = shadows(&scratch);
    let (first, second) = (Offset(0), Offset(8));
    one.store(first, 1);
    other.store_nt(second, 2);
    one.write_back(first, 8);
    other.invalidate(first, 8);
    assert_eq!(
        (other.load(first), other.load(second)),
        (Ok(1), Ok(0)),
        "two writers of one line: the second's word is lost"
    );
    other.store_nt(second, 3);
    assert_eq!(one.load(second), Ok(0), "still cached");
    one.store_nt(first, 4);
    assert_eq!((one.load(first), one.load(second)), (Ok(4), Ok(3)), "its own store dropped the line");
}

#[test]
fn a_seeded_missing_flush_is_left_out_at_its_place_alone() {
    let scratch = Scratch::new();
    let site = FlushSite { file: "tests/real_memory.rs".into(), line: line!() + 8 };
    let Processes { one, other, .. } = processes(&scratch, |region, plan| {
        Wrapped::shadow(Mapped::coherent(region)).without_flushes_at(site.clone()).attach(plan)
    });
    let seen = |at| {
        other.invalidate(at, 8);
        other.load(at)
    };
    let left_out = |at| one.write_back(at, 8);
    one.store(Offset(0), 1);
    left_out(Offset(0));
    assert_eq!(seen(Offset(0)), Ok(0));
    one.write_back(Offset(0), 8);
    assert_eq!(seen(Offset(0)), Ok(1));
    assert_eq!("ring.rs:120".parse(), Ok(FlushSite { file: "ring.rs".into(), line: 120 }));
    let error = "ring.rs".parse::<FlushSite>().expect_err("no line").to_string();
    assert_eq!(error, "\"ring.rs\" is no place in the source; write FILE:LINE, as in ring.rs:120");
}

#[test]
fn a_host_works_on_a_shadow_with_all_its_processes_or_with_none() {
    let scratch = Scratch::new();
    let processes = shadows(&scratch);
    let plain = Mapped::coherent(Region::open(scratch.path().join("region")).expect("it"));
    let error = plain.attach(&plan(&scratch, 1)).expect_err("its sibling has a shadow").to_string();
    assert!(
        error.contains("-1-shadow: its size as the host's shadow is 4608, this process has 0"),
        "{error}"
    );
    drop(processes);
}

#[test]
fn emulated_costs_add_up() {
    let scratch = Scratch::new();
    let region = Region::create(scratch.path().join("region"), 1 << 20).expect("a region");
    let cost = Cost { latency_ns: 1000, bytes_per_second: 1_000_000_000 };
    let memory = Wrapped::from(Mapped::new(region)).with_cost(cost);
    assert!(memory.emulated());
    let start = memory.now();
    memory.copy_in_nt(Offset(0), &vec![1; 1 << 20]).expect("good memory");
    let bulk = memory.now().0 - start.0;
    assert!(bulk >= (1 << 20) + 1000, "{bulk} ns for 2^20 bytes at 1 byte a ns");
    let start = memory.now();
    for line in 0..100 {
        memory.invalidate(Offset(0).lines(line), 8);
    }
    let lines = memory.now().0 - start.0;
    assert!(lines >= 100 * 1064, "{lines} ns for 100 lines of 1064 ns");
}
