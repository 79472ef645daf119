//! Attempts: ranks publish the same numbers, each in a store of its own, and stop, pause or die at any memory operation, alone or with their
//! host. The next attempt, of one rank or two, takes the stores from the dead, goes on from what the one before has on all its ranks, or
//! cannot read that and begins anew, and stops in the middle too. A reader looks all the while.
//!
//! The oracle is beside the pool: which attempt and which call each version is of, and of which calls every rank has been told.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, LazyLock};

use polder_mem::model::{Crash, Kernels, ModelMemory, Outcome, Suite, World};
use polder_mem::{Coherence, Memory};

use super::group::Dice;
use super::stage::{attached, pool_of, shape_of, small};
use crate::deviation::Deviation;
use crate::format::{Geometry, Layout, Superblock};
use crate::storage::{Attempt, Kept, Store};
use crate::{Member, PoolError};

pub(super) fn suites() -> Vec<Suite> {
    let about = "ranks publish the same numbers, die and start again beside a reader: nobody sees two attempts at once, or goes back";
    // A host that boots again did die here: its scene leaves out that it is fenced.
    let attempts = |seed| Deviation::SilenceIsEnough.during(|| attempts(seed, true));
    // `storage` judges what a store publishes and reads.
    vec![Suite::new("attempts", about, attempts).mutates(&["storage/attempt.rs"])]
}

/// Protocols that are known to be wrong. The suite is their control.
pub(super) fn canaries() -> Vec<Suite> {
    let canary = |name, about, deviation: Deviation| {
        Suite::new(name, about, move |seed| deviation.during(|| attempts(seed, false)))
    };
    vec![
        canary("attempts-mixed", "numbers alone say which versions belong together", Deviation::AnyAttempt),
        canary("attempts-two-owners", "a store is taken from an owner that lives", Deviation::OwnsTheLiving),
        canary("attempts-prunes-alone", "a rank removes what the others still need", Deviation::PrunesAlone),
        canary(
            "attempts-prunes-unread",
            "a rank removes what its job could not read",
            Deviation::IgnoresFloor,
        ),
        canary(
            "attempts-clears-at-once",
            "what other ranks left goes before a version is whole",
            Deviation::ClearsAtOnce,
        ),
        canary(
            "attempts-behind",
            "a rank publishes although another attempt has since it began",
            Deviation::PublishesBehind,
        ),
    ]
}

const HOSTS: u16 = 2;
const RANKS: usize = 2;
/// Processes of a host: a rank or two, a reader, another job, and those that come after.
const PROCESSES: u16 = 5;
const CHUNKS: u32 = 40;
/// The process ids: of the ranks, of another job, and of the first of those that come when all others have ended.
const FIRST: u32 = 100;
const OTHER: u32 = 300;
const JUDGE: u32 = 500;

static POOL: LazyLock<(Superblock, Layout)> = LazyLock::new(|| {
    let geometry = Geometry { names: 37, opens: 48, ..small(HOSTS, PROCESSES) };
    pool_of(geometry, CHUNKS)
});

/// What is known outside the memory.
#[derive(Default)]
struct Witness {
    /// How many ranks each attempt has, and its floor.
    attempts: RefCell<BTreeMap<u64, (usize, u64)>>,
    /// The attempt of each number of each rank that was to be published.
    calls: RefCell<Vec<(usize, u64, u64)>>,
    /// The same of those of which a call has returned.
    told: RefCell<Vec<(usize, u64, u64)>>,
    /// The process that publishes for each rank, while it does.
    publishes: [Cell<u32>; RANKS],
    /// The ranks that may die, and the host of the one that does.
    victims: Vec<u32>,
    host: u16,
    crash: Option<Crash>,
    kernels: Option<Kernels>,
    boots: [Cell<u64>; HOSTS as usize],
}

type Stores = [Store<ModelMemory>; RANKS];

impl Witness {
    /// Begins an attempt of so many ranks: its word.
    fn begin(&self, ranks: usize, floor: u64) -> u64 {
        let word = 1 + self.attempts.borrow().len() as u64;
        self.attempts.borrow_mut().insert(word, (ranks, floor));
        word
    }

    /// The newest number that all ranks of its attempt have been told of.
    fn whole(&self) -> u64 {
        let (told, attempts) = (self.told.borrow(), self.attempts.borrow());
        let by_all = |(_, number, word): &&(usize, u64, u64)| {
            (0..attempts[word].0).all(|rank| told.contains(&(rank, *number, *word)))
        };
        told.iter().filter(by_all).map(|told| told.1).max().unwrap_or(0)
    }

    /// Whether this process may be dead.
    fn may_be_dead(&self, pid: u32) -> bool {
        self.crash != Some(Crash::Pause) && self.victims.contains(&pid)
    }

    /// Owns the store of a rank, as soon as nobody else does; false if that may never come out.
    fn own(&self, stores: &Stores, rank: usize, pid: u32, host: u16) -> bool {
        let looks = match (self.crash, self.kernels) {
            _ if pid >= JUDGE => u32::MAX,
            // Between two kernels only those that left are known to be gone.
            (Some(Crash::Process), Some(Kernels::OnePerHost)) if host != self.host => 3,
            // It may stop for longer than a schedule may last.
            (Some(Crash::Pause), _) => 60,
            _ => u32::MAX,
        };
        for look in 0.. {
            match stores[rank].own() {
                Ok(()) => break,
                Err(PoolError::VersionTaken { .. }) if look == looks => return false,
                Err(PoolError::VersionTaken { .. }) => stores[rank].pool().memory().pause(),
                Err(error) => panic!("rank {rank} cannot own its store: {error}"),
            }
        }
        let other = self.publishes[rank].replace(pid);
        assert!(
            other == 0 || self.may_be_dead(other) || pid >= JUDGE,
            "{pid} owns the store of rank {rank} beside {other}"
        );
        true
    }

    fn disown(&self, stores: &Stores, rank: usize) {
        self.publishes[rank].set(0);
        stores[rank].disown();
    }

    /// Publishes number `number` of a rank, or a higher one if that is alone; false if another attempt has published since.
    fn publish(&self, stores: &Stores, rank: usize, number: u64, terms: &Terms) -> bool {
        let word = terms.word;
        let has_one = self.attempts.borrow()[&word].0 == 1;
        let call = self.calls.borrow().len();
        self.calls.borrow_mut().push((rank, number, word));
        let other = std::slice::from_ref(&stores[1 - rank]);
        let (others, left) = if has_one { (&[][..], other) } else { (other, &[][..]) };
        let Terms { first, base, floor, .. } = *terms;
        let attempt = Attempt { word, first, base, floor, seen: terms.seen[rank], others, left };
        let bytes = [word, number].map(u64::to_le_bytes).concat();
        match stores[rank].publish_in(&attempt, number, &[("a", &bytes), ("b", &[7; 64])]) {
            Ok(published) => {
                assert!(
                    published.version == number || has_one && published.version > number,
                    "{published:?}"
                );
                self.calls.borrow_mut()[call].1 = published.version;
                self.told.borrow_mut().push((rank, published.version, word));
                true
            }
            Err(PoolError::VersionBehind { newest, .. }) => {
                let calls = self.calls.borrow();
                let is_so =
                    calls.iter().any(|&(of, number, by)| (of, number) == (rank, newest) && by != word);
                assert!(is_so, "nobody else has published {newest} of rank {rank}");
                false
            }
            Err(PoolError::Exists { .. }) if Deviation::AnyAttempt.is_on() => false,
            Err(error) => panic!("rank {rank} cannot publish {number} of attempt {word}: {error}"),
        }
    }

    /// The newest version that all ranks of its attempt have, not older than `least`.
    fn restore(&self, stores: &Stores, least: u64) -> Restored {
        let least = least.max(self.whole());
        for _ in 0..20 {
            let kept = [0, 1].map(|rank: usize| stores[rank].kept().expect("the model has no faults"));
            let highest =
                kept.each_ref().map(|kept| kept.versions.first().map_or(0, |version| version.number()));
            assert!(kept.iter().all(|kept| kept.damaged.is_empty()), "{kept:?}");
            let (number, word) = self.newest_of(&kept);
            if number == 0 && least > 0 {
                // Versions came and went between the two looks.
                stores[0].pool().memory().pause();
                continue;
            }
            assert!(number >= least, "{number} is older than {least}");
            let (ranks, floor) = self.attempts.borrow().get(&word).copied().unwrap_or_default();
            if number > 0 {
                self.judge(&kept[..ranks], number);
            }
            return Restored { number, ranks, floor, highest };
        }
        let found: Vec<_> = stores.iter().map(|store| store.versions()).collect();
        panic!("{found:?}, and all ranks were told of {least}");
    }

    /// The newest number that all ranks of its attempt have, and the attempt; 0 for none.
    fn newest_of(&self, kept: &[Kept<ModelMemory>; RANKS]) -> (u64, u64) {
        let attempts = self.attempts.borrow();
        let is_whole = |(number, word): &(u64, u64)| {
            kept[1..attempts[word].0].iter().all(|kept| {
                let parts = kept.versions.iter().filter(|part| part.number() == *number);
                parts.into_iter().any(|part| part.attempt() == *word || Deviation::AnyAttempt.is_on())
            })
        };
        let newest = kept[0].versions.iter().map(|version| (version.number(), version.attempt()));
        newest.into_iter().find(is_whole).unwrap_or_default()
    }

    /// All parts are of one attempt and one call.
    fn judge(&self, kept: &[Kept<ModelMemory>], number: u64) {
        let mut parts = kept.iter().map(|kept| {
            let version = kept.versions.iter().find(|version| version.number() == number);
            let mut bytes = [0; 16];
            version.expect("it is common").read("a", &mut bytes).expect("it is whole");
            bytes
        });
        let first = parts.next().expect("an attempt has a rank");
        assert!(parts.all(|part| part == first), "two attempts in version {number}");
        let word = u64::from_le_bytes(first[..8].try_into().expect("8 bytes"));
        assert!(self.calls.borrow().contains(&(0, number, word)), "nobody published {number} of {word}");
    }

    /// Somebody comes because a process of `host` died.
    fn boot(&self, host: u16) {
        if self.crash == Some(Crash::Host) {
            self.boots[usize::from(host)].set(1);
        }
    }
}

/// What is restored: its number, the ranks and the floor of its attempt, and the highest number that is in each store.
struct Restored {
    number: u64,
    ranks: usize,
    floor: u64,
    highest: [u64; RANKS],
}

/// Of an attempt, what it found as it began.
struct Terms {
    word: u64,
    first: u64,
    base: u64,
    floor: u64,
    seen: [u64; RANKS],
}

/// What the next attempt does.
#[derive(Clone, Copy)]
struct Next {
    /// How many versions each rank publishes, and how many ranks there are.
    calls: [u64; RANKS],
    ranks: usize,
    /// Whether it can read what is there.
    reads: bool,
}

impl Next {
    fn draw(dice: &mut Dice) -> Self {
        let calls = [dice.roll(4), dice.roll(4)];
        Self { calls, ranks: 1 + dice.roll(2) as usize, reads: dice.roll(4) != 0 }
    }
}

fn attempts(seed: u64, boots: bool) -> Outcome {
    let mut dice = Dice::new(seed, 17);
    let crashes = [None, Some(Crash::Pause), Some(Crash::Host), Some(Crash::Process)];
    let crash = crashes[dice.roll(4) as usize].filter(|crash| boots || *crash != Crash::Host);
    let kernels = dice.kernels_beside(crash);
    let coherence = if dice.roll(8) == 0 { Coherence::Coherent } else { Coherence::Software };
    let mut world = World::new(seed, shape_of(&POOL.1, kernels, coherence));
    // Each list reads all slots, and each attempt makes several.
    world.budget(600_000);
    let hosts = [dice.roll(HOSTS.into()) as u16, dice.roll(HOSTS.into()) as u16];
    let victim = dice.roll(RANKS as u64) as usize;
    let (host, other_host) = (hosts[victim], dice.roll(HOSTS.into()) as u16);
    let dies = |pid: u32, at: u16| pid == FIRST + victim as u32 || crash == Some(Crash::Host) && at == host;
    let places = [(FIRST, hosts[0]), (FIRST + 1, hosts[1]), (OTHER, other_host)];
    let victims = places.into_iter().filter(|(pid, at)| dies(*pid, *at)).map(|(pid, _)| pid).collect();
    let witness = Witness { victims, host, crash, kernels: Some(kernels), ..Witness::default() };
    let witness = Rc::new(witness);
    // The first attempt: both ranks have some versions before the world begins.
    let before = dice.roll(3);
    let terms =
        Rc::new(Terms { word: witness.begin(RANKS, 0), first: 1, base: 0, floor: 0, seen: [0; RANKS] });
    let (mut ranks, mut threads) = (vec![], vec![]);
    for (rank, host) in hosts.into_iter().enumerate() {
        let (slot, pid) = (rank as u16, FIRST + rank as u32);
        let attached = world.setup_as(host, slot, |memory| attach(memory, host, pid, &witness));
        let stores = Rc::new(attached);
        ranks.push(Rc::clone(&stores));
        let (known, terms, last) = (Rc::clone(&witness), Rc::clone(&terms), before + dice.roll(3));
        threads.push(world.spawn(host, slot, move |_| {
            for number in before + 1..=last {
                assert!(known.publish(&stores, rank, number, &terms), "rank {rank} owns its store");
            }
            known.publishes[rank].set(0);
            drop(stores);
        }));
    }
    for (rank, stores) in ranks.iter().enumerate() {
        let pid = FIRST + rank as u32;
        world.setup_as(hosts[rank], rank as u16, |_| assert!(witness.own(stores, rank, pid, hosts[rank])));
    }
    for number in 1..=before {
        for (rank, stores) in ranks.iter().enumerate() {
            world.setup_as(hosts[rank], rank as u16, |_| {
                assert!(witness.publish(stores, rank, number, &terms), "it is alone");
            });
        }
    }
    drop(ranks);
    let reader = dice.roll(HOSTS.into()) as u16;
    let stores = world.setup_as(reader, 2, |memory| attach(memory, reader, 200, &witness));
    let (known, looks) = (Rc::clone(&witness), 2 + dice.roll(3));
    world.spawn(reader, 2, move |_| {
        let mut last = 0;
        for _ in 0..looks {
            last = known.restore(&stores, last).number;
        }
    });
    // Another job under the same name, while the ranks live: it must not own what they own, and goes on once they have ended.
    if dice.roll(3) == 0 {
        let next = Next::draw(&mut dice);
        let (host, goes_on) = (other_host, dice.roll(2) == 0);
        let stores = world.setup_as(host, 3, |memory| attach(memory, host, OTHER, &witness));
        let known = Rc::clone(&witness);
        world.spawn(host, 3, move |_| match goes_on {
            true => go_on(&known, stores, next, OTHER, host),
            false => try_to_own(&known, &stores, victim),
        });
    }
    if let Some(crash) = crash {
        world.crash_within(threads[victim], crash, 2500);
        let (known, next) = (Rc::clone(&witness), Next::draw(&mut dice));
        // At another process of its host, or on the other host.
        let now = if dice.roll(3) == 0 { 1 - host } else { host };
        world.spawn_after_crash(threads[victim], now, 4, move |memory| {
            known.boot(host);
            go_on(&known, attach(memory, now, 400, &known), next, 400, now);
        });
        if now != host {
            // Another process of its host puts right what it left.
            let known = Rc::clone(&witness);
            world.spawn_after_crash(threads[victim], host, 4, move |memory| {
                known.boot(host);
                drop(attach(memory, host, 450, &known));
            });
        }
    }
    let memories = [world.memory(0, 4), world.memory(1, 3)];
    let (witness, next) = (Rc::clone(&witness), Next::draw(&mut dice));
    world.check(0, move |_| {
        let [one, other] = memories;
        go_on(&witness, attach(one, 0, JUDGE, &witness), next, JUDGE, 0);
        let stores = attach(other, 1, JUDGE + 1, &witness);
        witness.restore(&stores, 0);
        for store in &stores {
            store.remove().expect("nobody keeps a lock");
        }
    });
    world.run()
}

/// Another job does not own what a rank that lives owns.
fn try_to_own(witness: &Witness, stores: &Stores, rank: usize) {
    if stores[rank].own().is_ok() {
        let other = witness.publishes[rank].replace(OTHER);
        assert!(
            other == 0 || witness.may_be_dead(other),
            "another job owns the store of rank {rank} beside {other}"
        );
        witness.disown(stores, rank);
    }
}

/// The next attempt, which stops when each rank has published so many. It begins anew if another has published since.
fn go_on(witness: &Witness, stores: Stores, next: Next, pid: u32, host: u16) {
    for _ in 0..8 {
        let restored = witness.restore(&stores, 0);
        let owned: Vec<_> =
            (0..next.ranks).take_while(|rank| witness.own(&stores, *rank, pid, host)).collect();
        let is_done = owned.len() < next.ranks || publish_all(witness, &stores, next, &restored, pid);
        owned.into_iter().for_each(|rank| witness.disown(&stores, rank));
        if is_done {
            return;
        }
    }
    panic!("others publish without end");
}

/// Publishes all that the next attempt is to; false if another attempt has published since it began.
fn publish_all(witness: &Witness, stores: &Stores, next: Next, restored: &Restored, pid: u32) -> bool {
    let highest = restored.highest.into_iter().max().unwrap_or(0).max(restored.number);
    let first = if Deviation::AnyAttempt.is_on() { restored.number + 1 } else { highest + 1 };
    let (base, floor) = if next.reads { (restored.number, restored.floor) } else { (0, first) };
    let word = witness.begin(next.ranks, floor);
    let terms = Terms { word, first, base, floor, seen: restored.highest };
    let versions = |rank: usize| stores[rank].versions().expect("the model has no faults");
    let before = [0, 1].map(versions);
    for call in 0..next.calls.into_iter().max().unwrap_or(0) {
        for rank in (0..next.ranks).filter(|rank| call < next.calls[*rank]) {
            if !witness.publish(stores, rank, first + call, &terms) {
                return Deviation::AnyAttempt.is_on();
            }
        }
    }
    let now = witness.restore(stores, 0).number;
    let published = witness.told.borrow().iter().filter(|told| told.2 == word).map(|told| told.1).min();
    let whole = next.calls[..next.ranks].iter().copied().min().unwrap_or(0);
    let due = whole.checked_sub(1).and_then(|more| Some(published? + more));
    assert!(
        due.is_none_or(|due| now >= due) || Deviation::AnyAttempt.is_on(),
        "{now}, and {due:?} is whole of {first} and more"
    );
    // The stores of others may change meanwhile.
    let is_alone = pid >= JUDGE;
    for (rank, before) in before.iter().enumerate().take(if is_alone { RANKS } else { next.ranks }) {
        let kept = versions(rank);
        assert!(
            before.iter().all(|number| *number >= floor || kept.contains(number)),
            "{before:?} of rank {rank} could not be read below {floor}, and {kept:?} is left"
        );
        let is_spare = is_alone && whole == 1 && restored.number > 0 && rank < restored.ranks;
        assert!(
            !is_spare || kept.contains(&restored.number),
            "{kept:?} of rank {rank} lacks {}, the spare",
            restored.number
        );
        assert!(
            !is_alone || rank < next.ranks || whole < 2 || kept.iter().all(|number| *number < floor),
            "{kept:?} of rank {rank} is left, which is no rank any more"
        );
    }
    true
}

fn attach(memory: ModelMemory, host: u16, pid: u32, witness: &Witness) -> Stores {
    // A host line that a dead process left torn has others watch for heartbeats: while ranks live, for longer than any stops. A host that
    // boots again watches for those of its boot before.
    let is_known = pid >= JUDGE || witness.crash == Some(Crash::Host);
    let boot = 7 + witness.boots[usize::from(host)].get();
    let pool = attached(&POOL, memory, is_known, Member { pid, ..Member::new(host, boot) });
    [0, 1].map(|rank| Store::new(Arc::clone(&pool), &format!("s/{rank}")).expect("a good name"))
}
