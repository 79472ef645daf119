//! Accesses survive SIGBUS: here from a file that was truncated below its mapping.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::sync::Barrier;

use polder_mem::{BLOCK, Coherence, Cpu, Fault, Fold, LINE, Mapped, Memory, Offset, Region};

const BYTES: u64 = 8 * 4096;
/// What is left of the file: accesses from here on fail.
const LEFT: u64 = 3 * 4096;

/// A mapped file that loses all but its first three pages.
fn truncated(name: &str, coherence: Coherence, cpu: Cpu) -> Mapped {
    let path = PathBuf::from(format!("/dev/shm/polder-faults-{}-{name}", std::process::id()));
    let memory =
        Mapped::new(Region::create(&path, BYTES).expect("a region")).with_coherence(coherence).using(cpu);
    memory.copy_in(Offset(0), &[1; BYTES as usize]).expect("still whole");
    truncate(&path, LEFT);
    std::fs::remove_file(&path).expect("removed while it is mapped");
    memory
}

fn truncate(path: &Path, bytes: u64) {
    let file = OpenOptions::new().write(true).open(path).expect("the file");
    file.set_len(bytes).expect("truncated");
}

/// Runs a check on every implementation, and on every set of copy routines.
macro_rules! everywhere {
    ($name:literal, |$memory:ident| $check:block) => {
        let $memory = truncated(concat!($name, "-coherent"), Coherence::Coherent, Cpu::detect());
        $check
        for cpu in Cpu::detect().levels() {
            let $memory = truncated(concat!($name, "-software"), Coherence::Software, cpu);
            $check
        }
    };
}

/// Eight good bytes.
const GOOD: Result<u64, Fault> = Ok(0x0101_0101_0101_0101);

fn fault(offset: u64, done: u64) -> Result<(), Fault> {
    Err(Fault { offset: Offset(offset), done })
}

#[test]
fn a_load_of_lost_memory_is_an_error_and_the_rest_stays_readable() {
    everywhere!("load", |memory| {
        assert_eq!(memory.load(Offset(LEFT)), Err(Fault { offset: Offset(LEFT), done: 0 }));
        assert_eq!(memory.load(Offset(BYTES - 8)), Err(Fault { offset: Offset(BYTES - 8), done: 0 }));
        assert_eq!(memory.load(Offset(LEFT - 8)), GOOD);
        assert_eq!(memory.load_line(Offset(LEFT)), Err(Fault { offset: Offset(LEFT), done: 0 }));
        assert_eq!(memory.load_line(Offset(LEFT - LINE)).map(|words| words[7]), GOOD);
    });
}

#[test]
fn a_copy_out_says_at_which_byte_memory_ended() {
    everywhere!("out", |memory| {
        for length in (1..200).chain([255, 256, 300, 511, 777, 4000]) {
            for before in (0..length).step_by(1 + length as usize / 40) {
                let mut into = vec![0; length as usize];
                let at = LEFT - before;
                assert_eq!(
                    memory.copy_out(Offset(at), &mut into),
                    fault(LEFT, before),
                    "{length} bytes, {before} good"
                );
                assert!(into[..before as usize].iter().all(|byte| *byte == 1));
            }
        }
    });
}

#[test]
fn a_copy_in_says_at_which_byte_memory_ended_and_wrote_all_before_it() {
    everywhere!("in", |memory| {
        for length in (1..200).chain([255, 256, 300, 511, 777, 4000]) {
            for before in (0..length).step_by(1 + length as usize / 40) {
                let at = LEFT - before;
                let from = vec![length as u8; length as usize];
                assert_eq!(
                    memory.copy_in(Offset(at), &from),
                    fault(LEFT, before),
                    "{length} bytes, {before} good"
                );
                let mut back = vec![0; before as usize];
                assert_eq!(memory.copy_out(Offset(at), &mut back), Ok(()));
                assert!(back.iter().all(|byte| *byte == length as u8));
            }
        }
    });
}

#[test]
fn a_copy_past_the_caches_says_at_which_byte_memory_ended() {
    everywhere!("nt", |memory| {
        for length in (1..200).chain([255, 256, 300, 511, 777, 4000]) {
            for before in (0..length).step_by(8 * (1 + length as usize / 200)) {
                let from = vec![7; length as usize];
                assert_eq!(
                    memory.copy_in_nt(Offset(LEFT - before), &from),
                    fault(LEFT, before),
                    "{length}, {before} good"
                );
            }
        }
    });
}

#[derive(Clone, Copy)]
struct Sum;

impl Fold for Sum {
    fn combine(self, so_far: [u8; BLOCK], block: [u8; BLOCK]) -> [u8; BLOCK] {
        std::array::from_fn(|at| so_far[at].wrapping_add(block[at]))
    }

    fn finish(self, combined: [u8; BLOCK]) -> [u8; BLOCK] {
        combined
    }
}

#[test]
fn a_fold_says_at_which_byte_of_which_range_memory_ended() {
    everywhere!("fold", |memory| {
        for length in [1, 63, 64, 65, 200, 256, 777, 4000, 5000] {
            for before in (0..length).step_by(8 * (1 + length as usize / 100)) {
                let (lost, good) = (Offset(LEFT - before), Offset(0));
                for past_caches in [false, true] {
                    let fold =
                        |into, sources: &[Offset]| memory.fold(into, sources, length, past_caches, Sum);
                    let what = format!("{length} bytes, {before} good, past the caches: {past_caches}");
                    assert_eq!(fold(good, &[lost, good]), fault(LEFT, before), "first of {what}");
                    assert_eq!(fold(good, &[good, lost]), fault(LEFT, before), "second of {what}");
                    assert_eq!(fold(lost, &[good]), fault(LEFT, before), "into {what}");
                }
            }
        }
    });
}

#[test]
fn a_store_that_was_skipped_is_reported_once_by_the_next_load_wherever_that_is() {
    everywhere!("store", |memory| {
        let lost = Err(Fault { offset: Offset(LEFT + 64), done: 0 });
        memory.store(Offset(LEFT + 64), 9);
        assert_eq!(memory.load(Offset(0)), lost);
        assert_eq!(memory.load(Offset(0)), GOOD);
        memory.store_line(Offset(LEFT + 64), &[9; 8]);
        assert_eq!(memory.load_line(Offset(0)).as_ref().err(), lost.as_ref().err());
        assert_eq!(memory.load(Offset(0)), GOOD);
        memory.store_nt(Offset(LEFT + 64), 9);
        assert_eq!(memory.load(Offset(0)), lost);
        assert_eq!(memory.load(Offset(0)), GOOD);
    });
}

#[test]
fn a_skipped_store_of_another_thread_is_not_this_threads_error() {
    let memory = truncated("threads", Coherence::Software, Cpu::detect());
    let stored = Barrier::new(2);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            memory.store(Offset(LEFT), 1);
            stored.wait();
            stored.wait();
            memory.load(Offset(0))
        });
        stored.wait();
        assert_eq!(memory.load(Offset(0)), GOOD);
        stored.wait();
        assert_eq!(other.join().expect("no panic"), Err(Fault { offset: Offset(LEFT), done: 0 }));
    });
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "flushes of qemu-user do nothing, so none fails")]
fn flushes_of_lost_memory_are_skipped_line_by_line_and_reported() {
    let memory = truncated("flush", Coherence::Software, Cpu::detect());
    memory.write_back(Offset(LEFT - 4000), 4000 + 3 * LINE);
    memory.mfence();
    assert_eq!(memory.load(Offset(0)), Err(Fault { offset: Offset(LEFT), done: 0 }));
    memory.invalidate(Offset(LEFT + 7), 1);
    memory.mfence();
    assert_eq!(memory.load(Offset(0)), Err(Fault { offset: Offset(LEFT + 7), done: 0 }));
    assert_eq!(memory.load(Offset(0)), GOOD);
    let coherent = truncated("no-flush", Coherence::Coherent, Cpu::detect());
    coherent.write_back(Offset(LEFT), 4096);
    assert_eq!(coherent.load(Offset(0)), GOOD);
}
