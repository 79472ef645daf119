//! Windows between ranks that are threads on two hosts, and between ranks that are processes on real memory.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use polder_attach::session::{self, Session};
use polder_attach::settings::Settings;
use polder_mem::testing::{Child, Ended, Scratch};
use polder_mem::{Heap, Memory, ProcessSlot};
use polder_pool::testing::formatted;
use polder_pool::window::{Access, LockPlace, Window};
use polder_pool::{Geometry, Member, Pool, PoolError};

const BYTES: u64 = 4 << 20;
const RANKS: u32 = 3;

fn geometry() -> Geometry {
    Geometry { hosts: 2, processes: 2, ..Geometry::for_region(BYTES) }
}

/// Pools of three processes on two hosts.
fn pools() -> Vec<Arc<Pool<Heap>>> {
    let geometry = geometry();
    let heap = formatted(&geometry, BYTES);
    let attach = |(host, slot)| {
        let memory =
            if (host, slot) == (0, 0) { heap.clone() } else { heap.process(host, ProcessSlot(slot)) };
        let timeout = Duration::from_secs(1);
        Arc::new(Pool::attach(memory, Member { timeout, ..Member::new(host, 1) }).unwrap())
    };
    [(0, 0), (1, 0), (1, 1)].map(attach).into()
}

/// The ranks of a window with these bytes of data each.
fn windows(pools: &[Arc<Pool<Heap>>], bytes: [u64; 3]) -> Vec<Window<Heap>> {
    let make = |(rank, bytes): (usize, u64)| {
        Window::create(Arc::clone(&pools[rank]), "w", rank as u32, RANKS, bytes).unwrap()
    };
    let mut windows: Vec<_> = bytes.into_iter().enumerate().map(make).collect();
    windows.iter_mut().for_each(|window| window.join().unwrap());
    windows
}

fn got<M: Memory>(window: &Window<M>, target: u32, offset: u64, bytes: usize) -> Vec<u8> {
    let mut got = vec![0xee; bytes];
    window.get(target, offset, &mut got).unwrap();
    got
}

#[test]
fn puts_of_every_alignment_and_length_write_their_bytes_and_no_others() {
    let pools = pools();
    let mut ranks = windows(&pools, [100; 3]);
    let mut oracle = vec![0; 100];
    for offset in 0..26_u64 {
        for length in (0..30).chain([64, 74]) {
            let bytes: Vec<u8> = (0..length).map(|byte| (offset as u8) ^ byte | 0x80).collect();
            oracle[offset as usize..][..bytes.len()].copy_from_slice(&bytes);
            ranks[0].put(2, offset, &bytes).unwrap();
            ranks[0].flush();
            assert_eq!(got(&ranks[1], 2, 0, 100), oracle, "{length} bytes at {offset}");
        }
    }
    assert_eq!(got(&ranks[1], 1, 0, 100), [0; 100]);
}

#[test]
fn a_range_past_a_segment_and_a_rank_that_is_not_there_are_refused() {
    let pools = pools();
    let mut ranks = windows(&pools, [16, 0, 100]);
    let refused = ranks[0].put(1, 0, &[1]).unwrap_err().to_string();
    let expected = "the range is [0, +1) of rank 1 in window w (0 bytes); it must end inside the segment";
    assert_eq!(refused, expected);
    for (target, offset, bytes) in [(0, 9, 8), (2, u64::MAX, 2), (1, 1, 0), (3, 0, 0)] {
        let refused = ranks[0].update(target, offset, bytes, &mut |_| panic!("it is refused"));
        assert!(matches!(refused, Err(PoolError::Argument { .. })), "{refused:?}");
        assert!(ranks[0].get(target, offset, &mut vec![0; bytes as usize]).is_err());
    }
    ranks[0].put(1, 0, &[]).unwrap();
    assert_eq!((ranks[0].data_range(2).unwrap(), ranks[0].own_data().bytes), (ranks[2].own_data(), 16));
    for name in ["/w//x", "/", "", "/w/", "..", "w\n"] {
        let refused = Window::create(Arc::clone(&pools[0]), name, 0, 2, 8).unwrap_err();
        assert!(matches!(refused, PoolError::Name { .. }), "{name:?}: {refused}");
    }
    let mut slash = Window::create(Arc::clone(&pools[0]), "/named/so", 0, 2, 8).unwrap();
    let _none = Window::create(Arc::clone(&pools[1]), "named/so", 1, 2, 8).unwrap();
    slash.join().unwrap();
    let unjoined = Window::create(Arc::clone(&pools[0]), "x", 0, 2, 8).unwrap();
    assert!(unjoined.get(0, 0, &mut [0]).is_err(), "the others may not be there");
    assert!(matches!(Window::create(Arc::clone(&pools[0]), "y", 2, 2, 8), Err(PoolError::Argument { .. })));
    let huge = Window::create(Arc::clone(&pools[0]), "y", 0, 2, u64::MAX);
    assert!(matches!(huge, Err(PoolError::Argument { .. })));
}

#[test]
fn a_segment_that_is_not_of_this_window_is_corrupt() {
    let pools = pools();
    let mut one = Window::create(Arc::clone(&pools[0]), "w", 0, 2, 8).unwrap();
    assert!(matches!(one.join(), Err(PoolError::NotFound { .. })));
    let other = Window::create(Arc::clone(&pools[1]), "w", 1, 3, 8).unwrap();
    assert!(matches!(one.join(), Err(PoolError::Corrupt { what: "segment of a window", .. })));
    drop(other);
    let _right = Window::create(Arc::clone(&pools[1]), "w", 1, 2, 8).unwrap();
    one.join().unwrap();
}

#[test]
fn an_update_waits_for_another_of_its_target_and_names_whoever_takes_too_long() {
    let pools = pools();
    let mut ranks = windows(&pools, [16; 3]);
    let [first, second, _] = &mut ranks[..] else { panic!("three ranks") };
    let update = second.update(2, 0, 4, &mut |bytes| {
        first.put(2, 8, &[7; 8]).unwrap();
        first.put(0, 1, &[7]).unwrap();
        assert_eq!(
            first.try_lock(2, Access::Exclusive, &mut LockPlace::default()),
            Ok(true),
            "it is another lock"
        );
        first.put(2, 5, &[5]).unwrap();
        let late = first.update(2, 9, 1, &mut |_| true).unwrap_err();
        let is_named = matches!(late, PoolError::Timeout { peer, sequence: 1, .. } if peer.host == 1);
        assert!(is_named, "{late}");
        bytes.fill(9);
        true
    });
    update.unwrap();
    first.put(2, 4, &[6]).unwrap();
    assert_eq!(got(first, 2, 0, 16), [9, 9, 9, 9, 6, 5, 0, 0, 7, 7, 7, 7, 7, 7, 7, 7]);
}

#[test]
fn a_window_that_is_dropped_leaves_nothing_and_gives_its_locks_back() {
    let pools = pools();
    let mut ranks = windows(&pools, [8; 3]);
    let [mut place, mut other] = [LockPlace::default(), LockPlace::default()];
    assert_eq!(ranks[1].try_lock(0, Access::Exclusive, &mut other), Ok(true));
    assert_eq!(ranks[0].try_lock(0, Access::Exclusive, &mut place), Ok(false));
    drop(ranks.remove(1));
    assert_eq!(ranks[0].try_lock(0, Access::Exclusive, &mut place), Ok(true));
    drop(ranks);
    assert_eq!(pools[2].list("").unwrap(), []);
}

#[test]
fn those_who_share_a_lock_hold_it_together_and_in_turn_with_others() {
    let pools = pools();
    let mut ranks = windows(&pools, [8; 3]);
    let [mut place, mut last] = [LockPlace::default(), LockPlace::default()];
    for rank in [0, 1] {
        assert_eq!(ranks[rank].try_lock(2, Access::Shared, &mut LockPlace::default()), Ok(true));
    }
    assert_eq!(ranks[2].try_lock(2, Access::Exclusive, &mut last), Ok(false));
    assert!(ranks[0].unlock(2));
    assert_eq!(ranks[2].try_lock(2, Access::Exclusive, &mut last), Ok(false));
    // A process that comes later waits behind it, also to share.
    assert_eq!(ranks[0].try_lock(2, Access::Shared, &mut place), Ok(false));
    assert!(ranks[1].unlock(2));
    assert_eq!(ranks[2].try_lock(2, Access::Exclusive, &mut last), Ok(true));
    assert_eq!(ranks[0].try_lock(2, Access::Shared, &mut place), Ok(false));
    let own = ranks[1].try_lock(0, Access::Exclusive, &mut LockPlace::default());
    assert_eq!(own, Ok(true), "every rank has a lock of its own");
    // A place in the queue is given back.
    assert!(!ranks[0].unlock(2), "it has a place and no lock");
    ranks[0].leave(2, place);
    assert!(ranks[2].unlock(2));
    assert_eq!(ranks[1].try_lock(2, Access::Exclusive, &mut LockPlace::default()), Ok(true));
}

#[test]
fn one_thread_of_a_window_waits_for_a_lock_or_has_it_and_no_other_ends_that() {
    let pools = pools();
    let mut ranks = windows(&pools, [8; 3]);
    let [mut first, mut second, mut third] = [(); 3].map(|()| LockPlace::default());
    let mut ask = |rank: usize, place: &mut LockPlace| ranks[rank].try_lock(2, Access::Exclusive, place);
    assert_eq!([ask(0, &mut first), ask(0, &mut first)], [Ok(true), Ok(false)], "it asks again");
    assert_eq!([ask(0, &mut second), ask(1, &mut third)], [Ok(false), Ok(false)]);
    ranks[0].leave(2, second);
    assert!(ranks[0].unlock(2), "a thread that gave up has not given the lock back");
    // Of two threads that wait, the one that came first goes on when its turn has come, and the other takes no turn of its.
    let [mut second, mut other] = [LockPlace::default(), LockPlace::default()];
    let mut ask = |rank: usize, place: &mut LockPlace| ranks[rank].try_lock(2, Access::Exclusive, place);
    assert_eq!([ask(1, &mut third), ask(0, &mut first)], [Ok(true), Ok(false)]);
    assert_eq!([ask(0, &mut second), ask(2, &mut other)], [Ok(false), Ok(false)]);
    assert!(ranks[1].unlock(2));
    ranks[0].leave(2, second);
    let mut ask = |rank: usize, place: &mut LockPlace| ranks[rank].try_lock(2, Access::Exclusive, place);
    assert_eq!([ask(2, &mut other), ask(0, &mut LockPlace::default())], [Ok(false), Ok(false)]);
    assert_eq!(ask(0, &mut first), Ok(true), "it has kept its place");
}

#[test]
fn epochs_pass_a_segment_between_target_and_origins() {
    let pools = pools();
    let mut ranks = windows(&pools, [16; 3]);
    for round in 1..=5_u8 {
        ranks[1].start(&[0]).unwrap();
        assert_eq!(ranks[1].try_start(), Ok(false), "round {round} is not posted");
        ranks[1].complete().unwrap_err();
        ranks[1].start(&[0]).unwrap_err();
        ranks[0].post(&[1, 2]).unwrap();
        ranks[0].post(&[1]).unwrap_err();
        ranks[2].start(&[0]).unwrap();
        for rank in [1, 2] {
            assert_eq!(ranks[rank].try_start(), Ok(true));
            ranks[rank].put(0, rank as u64, &[round]).unwrap();
        }
        ranks[1].complete().unwrap();
        assert_eq!(ranks[0].try_wait(), Ok(false));
        ranks[2].complete().unwrap();
        assert_eq!(ranks[0].try_wait(), Ok(true));
        ranks[0].try_wait().unwrap_err();
        assert_eq!(got(&ranks[0], 0, 0, 4), [0, round, round, 0]);
    }
    // A rank may be its own origin.
    ranks[0].post(&[0]).unwrap();
    ranks[0].start(&[0]).unwrap();
    assert_eq!(ranks[0].try_start(), Ok(true));
    assert_eq!(ranks[0].try_wait(), Ok(false));
    ranks[0].complete().unwrap();
    assert_eq!(ranks[0].try_wait(), Ok(true));
}

/// Waits until every rank has come here for the `round`th time.
fn meet<M: Memory>(window: &mut Window<M>, pool: &Pool<M>, round: u64) {
    let (me, ranks) = (u64::from(window.rank()), u64::from(window.ranks()));
    window.put(0, me * 8, &round.to_le_bytes()).unwrap();
    window.flush();
    for rank in 0..ranks {
        while u64::from_le_bytes(got(window, 0, rank * 8, 8).try_into().unwrap()) < round {
            pool.memory().yield_now();
        }
    }
}

/// Makes a window, as soon as the others have.
fn enter<M: Memory>(pool: &Arc<Pool<M>>, rank: u32, ranks: u32) -> Window<M> {
    let mut window = Window::create(Arc::clone(pool), "w", rank, ranks, 256).unwrap();
    while let Err(missing) = window.join() {
        assert!(matches!(missing, PoolError::NotFound { .. }), "{missing}");
        std::thread::yield_now();
    }
    window
}

/// What each rank does on real memory: all it can, at the same time as the others.
fn everything<M: Memory>(pool: &Arc<Pool<M>>, rank: u32) {
    const ROUNDS: u64 = 100;
    let mut window = enter(pool, rank, RANKS);
    for round in 1..=ROUNDS {
        // Bytes beside those of the others, in one word, and words beside theirs, in one line.
        window.put(1, 64 + u64::from(rank), &[round as u8]).unwrap();
        window.put(1, 72 + u64::from(rank) * 8, &(round + u64::from(rank)).to_le_bytes()).unwrap();
        window
            .update(2, 32, 8, &mut |word| {
                let count = u64::from_le_bytes((&*word).try_into().unwrap()) + 1;
                word.copy_from_slice(&count.to_le_bytes());
                true
            })
            .unwrap();
        let mut place = LockPlace::default();
        while !window.try_lock(0, Access::Exclusive, &mut place).unwrap() {
            pool.memory().yield_now();
        }
        let sum = u64::from_le_bytes(got(&window, 0, 128, 8).try_into().unwrap());
        window.put(0, 128, &(sum + 1).to_le_bytes()).unwrap();
        window.unlock(0);
        window.flush();
        meet(&mut window, pool, round * 2 - 1);
        for other in 0..u64::from(RANKS) {
            assert_eq!(got(&window, 1, 64 + other, 1), [round as u8]);
            assert_eq!(got(&window, 1, 72 + other * 8, 8), (round + other).to_le_bytes());
        }
        assert_eq!(got(&window, 2, 32, 8), (round * u64::from(RANKS)).to_le_bytes());
        assert_eq!(got(&window, 0, 128, 8), (round * u64::from(RANKS)).to_le_bytes());
        meet(&mut window, pool, round * 2);
    }
}

#[test]
fn ranks_in_processes_put_update_and_lock_at_once_on_coherent_and_on_software_coherent_memory() {
    for coherence in ["coherent", "software"] {
        let scratch = Scratch::new();
        let path = scratch.path().join("pool");
        session::create(&path, BYTES, &geometry()).unwrap();
        let children: Vec<_> = (0..RANKS)
            .map(|rank| {
                let settings = environment(&path, scratch.path(), coherence, (rank > 0).into());
                Child::fork(|| {
                    let session = Session::open(&settings).unwrap();
                    everything(session.pool(), rank);
                })
            })
            .collect();
        for mut child in children {
            assert_eq!(child.wait(), Ended::Exited(0), "{coherence}");
        }
    }
}

#[test]
fn the_lock_of_a_process_that_died_passes_on_and_whoever_waits_for_its_post_is_told() {
    let scratch = Scratch::new();
    let path = scratch.path().join("pool");
    session::create(&path, BYTES, &geometry()).unwrap();
    let [survivors, victims] = [0, 1].map(|host| environment(&path, scratch.path(), "software", host));
    let mut victim = Child::fork(|| {
        let session = Session::open(&victims).unwrap();
        {
            let pool = session.pool();
            let mut window = enter(pool, 1, 2);
            let mut place = LockPlace::default();
            while !window.try_lock(0, Access::Exclusive, &mut place).unwrap() {}
            window.put(0, 0, &[1; 8]).unwrap();
            window.flush();
            std::thread::sleep(Duration::from_secs(60));
        };
    });
    let session = Session::open(&survivors).unwrap();
    {
        let pool = session.pool();
        let mut window = enter(pool, 0, 2);
        while got(&window, 0, 0, 1) == [0] {
            std::thread::yield_now();
        }
        let mut place = LockPlace::default();
        assert_eq!(window.try_lock(0, Access::Shared, &mut place), Ok(false));
        victim.kill();
        while !window.try_lock(0, Access::Shared, &mut place).unwrap() {}
        window.unlock(0);
        window.start(&[1]).unwrap();
        let told = std::iter::repeat_with(|| window.try_start()).find_map(Result::err).unwrap();
        assert!(matches!(&told, PoolError::PeerDead { peer, .. } if peer.host == 1), "{told}");
    };
}

fn environment(path: &Path, run: &Path, coherence: &str, host: u16) -> Settings {
    let lookup = |key: &str| match key {
        "POLDER_POOL" => Some(path.to_str()?.to_owned()),
        "POLDER_RUN" => Some(run.to_str()?.to_owned()),
        "POLDER_COHERENCE" => Some(coherence.to_owned()),
        "POLDER_HOST" => Some(host.to_string()),
        _ => None,
    };
    Settings::environment(lookup).unwrap()
}

#[test]
fn a_hostile_rank_causes_errors_and_never_a_panic() {
    for seed in 0..3_000_u64 {
        let mut state = seed;
        let mut byte = || {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (state >> 56) as u8
        };
        let script: Vec<u8> = (0..400).map(|_| byte()).collect();
        let run = std::panic::catch_unwind(|| polder_pool::window::hostile::drive(&script));
        assert!(run.is_ok(), "seed {seed}");
    }
}
