//! Real processes that want one host id at once: the keeper gives it to one of them.

use std::path::Path;
use std::time::Duration;

use polder_mem::testing::{Child, Ended, Scratch};
use polder_mem::{Mapped, Memory, Offset, Region};
use polder_pool::claim::{IdClaim, claim_host_id};
use polder_pool::keeper::{Keeper, KeeperTask};
use polder_pool::testing::plan_of;
use polder_pool::{Geometry, IdSource, Member, Overwrite, Pool, PoolError, Uuid, format};

const RACES: u64 = 1000;
const CONTENDERS: u64 = 3;
const HOST: u16 = 1;
const BYTES: u64 = 512 << 10;
const GEOMETRY: Geometry =
    Geometry { hosts: 2, processes: 4, names: 31, levels: 2, chunk_bytes: 64 << 10, opens: 8, keepers: 1 };

/// How a race ended for one contender, as it says beside the pool.
const WON: u64 = 1;
const REFUSED: u64 = 2;
const LEFT: u64 = 3;

fn software(path: &Path) -> Mapped {
    Mapped::new(Region::open(path).unwrap())
}

/// Where the contenders wait for the start, and say how a race ended: word 0 is the race, word `n` a contender's.
struct Track(Mapped);

impl Track {
    fn at(path: &Path) -> Self {
        Self(Mapped::coherent(Region::open(path).unwrap()))
    }

    fn word(&self, index: u64) -> u64 {
        self.0.load(Offset(0).lines(index)).unwrap()
    }

    fn set(&self, index: u64, value: u64) {
        self.0.store(Offset(0).lines(index), value);
        self.0.mfence();
    }

    fn await_word(&self, index: u64, value: u64) {
        while self.word(index) < value {
            nap();
        }
    }
}

/// Leaves the CPU to those who have something to do.
fn nap() {
    std::thread::sleep(Duration::from_micros(50));
}

/// Races for the id, and as its holder gives signs of life until the race is over.
fn contend(scratch: &Path, contender: u64) {
    let (path, track) = (scratch.join("pool"), Track::at(&scratch.join("track")));
    let boot = 100 + contender;
    for race in 1..=RACES {
        track.await_word(0, 2 * race - 1);
        let wanted = IdClaim { timeout: Duration::from_secs(60), ..IdClaim::new(Some(HOST), boot) };
        let outcome = match claim_host_id(&software(&path), &wanted) {
            Ok(granted) => {
                assert_eq!(granted.host, HOST);
                WON
            }
            Err(PoolError::HostLive { host: HOST, boot: holder }) if holder != boot => REFUSED,
            Err(error) => panic!("race {race}: {error}"),
        };
        let pool = (outcome == WON).then(|| attach(scratch, boot));
        track.set(contender, race << 8 | outcome);
        while track.word(0) < 2 * race {
            if let Some(pool) = &pool {
                pool.beat().unwrap();
            }
            nap();
        }
        drop(pool);
        track.set(contender, race << 8 | LEFT);
    }
}

fn attach(scratch: &Path, boot: u64) -> Pool<Mapped> {
    let plan = plan_of(&GEOMETRY, BYTES, HOST, scratch);
    let memory = software(&scratch.join("pool")).attach(&plan).unwrap();
    Pool::attach(memory, Member::new(HOST, boot)).unwrap()
}

#[test]
fn races_of_processes_for_one_host_id_have_one_winner_each() {
    let scratch = Scratch::new();
    let path = scratch.path().join("pool");
    drop(Region::create(&path, BYTES).unwrap());
    drop(Region::create(scratch.path().join("track"), 4096).unwrap());
    format(&software(&path), &GEOMETRY, Uuid(1), Overwrite::Refuse).unwrap();
    let track = Track::at(&scratch.path().join("track"));
    let charge = KeeperTask { incarnation: 1, id_source: Some(IdSource::Keeper), evict_after: None };
    let mut keeper = Keeper::start(software(&path), charge).unwrap();
    let mut contenders: Vec<_> =
        (1..=CONTENDERS).map(|contender| Child::fork(|| contend(scratch.path(), contender))).collect();
    let mut wins = [0; CONTENDERS as usize];
    for race in 1..=RACES {
        track.set(0, 2 * race - 1);
        let answers = || (1..=CONTENDERS).map(|contender| track.word(contender));
        let mut check =
            || contenders.iter_mut().all(|it| matches!(it.ended(), None | Some(Ended::Exited(0))));
        while answers().any(|answer| answer >> 8 != race) {
            keeper.tick().unwrap();
            assert!(check(), "a contender failed in race {race}");
        }
        let winners: Vec<_> = (0..).zip(answers()).filter(|(_, answer)| answer & 0xff == WON).collect();
        let [(winner, _)] = winners[..] else { panic!("race {race}: {} winners", winners.len()) };
        wins[winner] += 1;
        // The winner has to be gone before its id is free again.
        track.set(0, 2 * race);
        while answers().any(|answer| answer != race << 8 | LEFT) {
            assert!(check(), "a contender failed after race {race}");
            nap();
        }
        keeper.evict(HOST).unwrap();
        keeper.fence(HOST).unwrap();
    }
    for contender in &mut contenders {
        assert_eq!(contender.wait(), Ended::Exited(0));
    }
    println!("{RACES} races, won by {wins:?}");
}
