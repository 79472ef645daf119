//! Attempts: two ranks publish the same numbers, each in a store of its own, and stop or die at any memory operation. The next attempt
//! takes the stores from the dead, goes on from what both ranks have, and stops in the middle too. A reader looks all the while.
//!
//! The oracle is beside the pool: which attempt and which call each version is of, and of which calls every rank has been told.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use polder_mem::model::{Crash, Kernels, ModelMemory, Outcome, Suite, World};
use polder_mem::{Coherence, Memory};

use super::group::Dice;
use super::stage::{pool_of, shape_of, small};
use crate::deviation::Deviation;
use crate::format::{Geometry, Layout, Superblock};
use crate::storage::{Attempt, Kept, Store};
use crate::{Member, Pool, PoolError};

pub(super) fn suites() -> Vec<Suite> {
    let about = "ranks publish the same numbers, die and start again beside a reader: nobody sees two attempts at once, or goes back";
    // `storage` judges what a store publishes and reads.
    vec![Suite::new("attempts", about, attempts).mutates(&["storage/attempt.rs"])]
}

/// Protocols that are known to be wrong. The suite is their control.
pub(super) fn canaries() -> Vec<Suite> {
    let canary = |name, about, deviation: Deviation| {
        Suite::new(name, about, move |seed| deviation.during(|| attempts(seed)))
    };
    vec![
        canary("attempts-mixed", "numbers alone say which versions belong together", Deviation::AnyAttempt),
        canary("attempts-two-owners", "a store is taken from an owner that lives", Deviation::OwnsTheLiving),
        canary("attempts-prunes-alone", "a rank removes what the others still need", Deviation::PrunesAlone),
    ]
}

const HOSTS: u16 = 2;
const RANKS: usize = 2;
/// Processes of a host: a rank or two, a reader, and those that come after.
const PROCESSES: u16 = 5;
const CHUNKS: u32 = 40;
const PATIENCE: Duration = Duration::from_secs(24 * 3600);
/// The process id of the first of those that come when all others have ended.
const JUDGE: u32 = 500;

static POOL: LazyLock<(Superblock, Layout)> = LazyLock::new(|| {
    let geometry = Geometry { names: 29, opens: 24, ..small(HOSTS, PROCESSES) };
    pool_of(geometry, CHUNKS)
});

/// What is known outside the memory.
#[derive(Default)]
struct Witness {
    /// The attempt of each number of each rank that was to be published.
    calls: RefCell<Vec<(usize, u64, u64)>>,
    /// The same of those of which a call has returned.
    told: RefCell<Vec<(usize, u64, u64)>>,
    /// The process that publishes for each rank, while it does.
    publishes: [Cell<u32>; RANKS],
}

type Stores = [Store<ModelMemory>; RANKS];

impl Witness {
    /// The newest number that both ranks have been told of.
    fn whole(&self) -> u64 {
        let told = self.told.borrow();
        let of_first = told.iter().filter(|(rank, ..)| *rank == 0);
        of_first
            .filter(|(_, number, word)| told.contains(&(1, *number, *word)))
            .map(|told| told.1)
            .max()
            .unwrap_or(0)
    }

    /// Owns the store of a rank, as soon as nobody else does.
    fn own(&self, stores: &Stores, rank: usize, pid: u32) {
        loop {
            match stores[rank].own() {
                Ok(()) => break,
                Err(PoolError::VersionTaken { .. }) => stores[rank].pool().memory().pause(),
                Err(error) => panic!("rank {rank} cannot own its store: {error}"),
            }
        }
        let other = self.publishes[rank].replace(pid);
        assert_eq!(other, 0, "{pid} owns the store of rank {rank} beside {other}");
    }

    /// Publishes number `number` of a rank; whether that was possible.
    fn publish(&self, stores: &Stores, rank: usize, number: u64, attempt: (u64, u64, u64)) -> bool {
        let (word, first, base) = attempt;
        self.calls.borrow_mut().push((rank, number, word));
        let others = std::slice::from_ref(&stores[1 - rank]);
        let attempt = Attempt { word, first, base, floor: 0, others };
        let bytes = [word, number].map(u64::to_le_bytes).concat();
        match stores[rank].publish_in(&attempt, number, &[("a", &bytes), ("b", &[7; 64])]) {
            Ok(published) => {
                assert_eq!(published.version, number);
                self.told.borrow_mut().push((rank, number, word));
                true
            }
            Err(PoolError::Exists { .. }) if Deviation::AnyAttempt.is_on() => false,
            Err(error) => panic!("rank {rank} cannot publish {number} of attempt {word}: {error}"),
        }
    }

    /// What both ranks have: its number, and the highest number that there is. Never older than `least`.
    fn restore(&self, stores: &Stores, least: u64) -> (u64, u64) {
        let least = least.max(self.whole());
        for _ in 0..20 {
            let kept = [0, 1].map(|rank: usize| stores[rank].kept().expect("the model has no faults"));
            let highest = stores.iter().flat_map(|store| store.listed().expect("as above"));
            let highest = highest.map(|(number, _)| number).max().unwrap_or(0);
            assert!(kept.iter().all(|kept| kept.damaged.is_empty()), "{kept:?}");
            let number = common(&kept);
            if number == 0 && least > 0 {
                // Versions came and went between the two looks.
                stores[0].pool().memory().pause();
                continue;
            }
            assert!(number >= least, "{number} is older than {least}");
            if number > 0 {
                self.judge(&kept, number);
            }
            return (number, highest.max(number));
        }
        let found: Vec<_> = stores.iter().map(|store| store.versions()).collect();
        panic!("{found:?}, and all ranks were told of {least}");
    }

    /// Both parts are of one attempt and one call.
    fn judge(&self, kept: &[Kept<ModelMemory>; RANKS], number: u64) {
        let parts = kept.each_ref().map(|kept| {
            let version = kept.versions.iter().find(|version| version.number() == number);
            let mut bytes = [0; 16];
            version.expect("it is common").read("a", &mut bytes).expect("it is whole");
            bytes
        });
        assert_eq!(parts[0], parts[1], "two attempts in version {number}");
        let word = u64::from_le_bytes(parts[0][..8].try_into().expect("8 bytes"));
        assert!(self.calls.borrow().contains(&(0, number, word)), "nobody published {number} of {word}");
    }
}

/// The newest number of one attempt that both have; 0 for none.
fn common(kept: &[Kept<ModelMemory>; RANKS]) -> u64 {
    let of = |rank: usize| kept[rank].versions.iter().map(|version| (version.number(), version.attempt()));
    let is_both = |&(number, word): &(u64, u64)| {
        of(1).any(|(other, their)| other == number && (their == word || Deviation::AnyAttempt.is_on()))
    };
    of(0).find(is_both).map_or(0, |(number, _)| number)
}

fn attempts(seed: u64) -> Outcome {
    let mut dice = Dice::new(seed, 17);
    let crash = [None, Some(Crash::Process)][dice.roll(2) as usize];
    // Between two kernels only those that left are known to be gone.
    let kernels = match crash {
        Some(_) => Kernels::Shared,
        None => [Kernels::Shared, Kernels::OnePerHost][dice.roll(2) as usize],
    };
    let coherence = if dice.roll(8) == 0 { Coherence::Coherent } else { Coherence::Software };
    let mut world = World::new(seed, shape_of(&POOL.1, kernels, coherence));
    let witness = Rc::new(Witness::default());
    let hosts = [dice.roll(HOSTS.into()) as u16, dice.roll(HOSTS.into()) as u16];
    // The first attempt: both ranks have some versions before the world begins.
    let before = dice.roll(3);
    let (mut ranks, mut threads) = (vec![], vec![]);
    for (rank, host) in hosts.into_iter().enumerate() {
        let slot = rank as u16;
        let stores =
            Rc::new(world.setup_as(host, slot, |memory| attach(memory, host, 100 + u32::from(slot))));
        ranks.push(Rc::clone(&stores));
        let (known, last) = (Rc::clone(&witness), before + dice.roll(3));
        threads.push(world.spawn(host, slot, move |_| {
            for number in before + 1..=last {
                known.publish(&stores, rank, number, (1, 1, 0));
            }
            known.publishes[rank].set(0);
            drop(stores);
        }));
    }
    for (rank, stores) in ranks.iter().enumerate() {
        world.setup_as(hosts[rank], rank as u16, |_| witness.own(stores, rank, 100 + rank as u32));
    }
    for number in 1..=before {
        for (rank, stores) in ranks.iter().enumerate() {
            world.setup_as(hosts[rank], rank as u16, |_| {
                witness.publish(stores, rank, number, (1, 1, 0));
            });
        }
    }
    drop(ranks);
    let reader = dice.roll(HOSTS.into()) as u16;
    let stores = world.setup_as(reader, 2, |memory| attach(memory, reader, 200));
    let (known, looks) = (Rc::clone(&witness), 2 + dice.roll(3));
    world.spawn(reader, 2, move |_| {
        let mut last = 0;
        for _ in 0..looks {
            last = known.restore(&stores, last).0;
        }
    });
    let victim = dice.roll(RANKS as u64) as usize;
    // Another job under the same name, while the ranks live: it must not own what they own.
    let (rank, host) = (dice.roll(RANKS as u64) as usize, dice.roll(HOSTS.into()) as u16);
    if dice.roll(3) == 0 {
        let stores = world.setup_as(host, 3, |memory| attach(memory, host, 300));
        let known = Rc::clone(&witness);
        world.spawn(host, 3, move |_| {
            if stores[rank].own().is_ok() {
                let other = known.publishes[rank].get();
                let may_be_dead = crash.is_some() && rank == victim;
                assert!(
                    other == 0 || may_be_dead,
                    "another job owns the store of rank {rank} beside {other}"
                );
                stores[rank].disown();
            }
        });
    }
    let calls = [dice.roll(3), dice.roll(3)];
    if let Some(crash) = crash {
        world.crash_within(threads[victim], crash, 2500);
        let (known, host) = (Rc::clone(&witness), hosts[victim]);
        world.spawn_after_crash(threads[victim], host, 4, move |memory| {
            known.publishes[victim].set(0);
            go_on(&known, attach(memory, host, 400), calls);
        });
    }
    let memories = [world.memory(0, 4), world.memory(1, 3)];
    let witness = Rc::clone(&witness);
    world.check(0, move |_| {
        let [one, other] = memories;
        let stores = attach(one, 0, JUDGE);
        witness.publishes.iter().for_each(|publishes| publishes.set(0));
        go_on(&witness, stores, calls);
        let stores = attach(other, 1, JUDGE + 1);
        witness.restore(&stores, 0);
        for store in &stores {
            store.remove().expect("nobody keeps a lock");
        }
    });
    world.run()
}

/// The next attempt, which stops when each rank has published so many.
fn go_on(witness: &Witness, stores: Stores, calls: [u64; RANKS]) {
    for rank in 0..RANKS {
        witness.own(&stores, rank, 400);
    }
    let (base, highest) = witness.restore(&stores, 0);
    let first = if Deviation::AnyAttempt.is_on() { base + 1 } else { highest + 1 };
    let word = 2 + witness.calls.borrow().len() as u64;
    for call in 0..calls.into_iter().max().unwrap_or(0) {
        for rank in (0..RANKS).filter(|rank| call < calls[*rank]) {
            witness.publish(&stores, rank, first + call, (word, first, base));
        }
    }
    let whole = calls.into_iter().min().unwrap_or(0);
    let (now, _) = witness.restore(&stores, 0);
    assert!(
        whole == 0 || now == first + whole - 1 || Deviation::AnyAttempt.is_on(),
        "{now} of {first} + {whole}"
    );
    witness.publishes.iter().for_each(|publishes| publishes.set(0));
    drop(stores);
}

#[expect(
    clippy::arc_with_non_send_sync,
    reason = "stores share their pool; all threads of a world run on one"
)]
fn attach(memory: ModelMemory, host: u16, pid: u32) -> Stores {
    let (superblock, layout) = &*POOL;
    // A host line that a dead process left torn has others watch for heartbeats: while ranks live, for longer than any stops.
    let silence = if pid < JUDGE { PATIENCE } else { Duration::from_micros(2) };
    let member = Member { pid, timeout: PATIENCE, silence, ..Member::new(host, 7) };
    let pool = Pool::attach_in(memory, *superblock, layout.clone(), member).expect("the host is ours");
    let pool = Arc::new(pool);
    [0, 1].map(|rank| Store::new(Arc::clone(&pool), &format!("s/{rank}")).expect("a good name"))
}
