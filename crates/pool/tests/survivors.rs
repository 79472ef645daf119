//! 64 endpoints in four processes: one process is killed, or one of 64 hosts is evicted. Every survivor has its error, the others go
//! on, and nothing is left in the pool.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use polder_mem::testing::{Child, Ended, Scratch};
use polder_mem::{Mapped, Memory, Offset, Region};
use polder_pool::endpoint::{Address, Completion, Endpoint, EndpointOptions, Filter, Label};
use polder_pool::keeper::{Keeper, KeeperTask};
use polder_pool::testing::plan_of;
use polder_pool::{Geometry, IdSource, Member, Overwrite, Pool, PoolError, Uuid, format, inspect};

const BYTES: u64 = 128 << 20;
const ENDS: usize = 64;
const PROCESSES: usize = 4;
/// Endpoints of a process.
const EACH: usize = ENDS / PROCESSES;
const JOB: u64 = 7;
const BOOT: u64 = 1;
/// Whoever waits longer waits for ever.
const HANGS: Duration = Duration::from_secs(120);

const TALK: u64 = 1;
const LAST: u64 = 2;
const AFTER: u64 = 3;

type End = Endpoint<Mapped, Vec<u8>, usize>;

/// How endpoints are dealt out, and what becomes of one of them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// Four hosts with 16 endpoints each. The process of the last is killed.
    Killed,
    /// 64 hosts with an endpoint each, 16 in a process. The last is evicted, and its process goes on.
    Evicted,
}

impl Fate {
    fn geometry(self) -> Geometry {
        let (hosts, processes) = if self == Self::Killed { (4, 16) } else { (64, 2) };
        Geometry { hosts, processes, names: 67, opens: 4096, ..Geometry::for_region(BYTES) }
    }

    fn host_of(self, end: usize) -> u16 {
        (if self == Self::Killed { end / EACH } else { end }) as u16
    }

    /// Endpoints that are dead to the others.
    fn victims(self) -> std::ops::Range<usize> {
        if self == Self::Killed { ENDS - EACH..ENDS } else { ENDS - 1..ENDS }
    }
}

/// Where the processes tell each other how far they are: a line each, and then a line for each address.
struct Track(Mapped);

impl Track {
    const BYTES: u64 = ((PROCESSES + ENDS) * 64) as u64;

    fn at(scratch: &Path) -> Self {
        Self(Mapped::coherent(Region::open(scratch.join("track")).unwrap()))
    }

    fn reach(&self, process: usize, stage: u64) {
        self.0.mfence();
        self.0.store(Offset(0).lines(process as u64), stage);
    }

    /// How long it took until all errors were there, for the parent to print.
    fn note(&self, process: usize, took: Duration) {
        self.0.store(Offset(0).lines(process as u64).word(1), took.as_millis() as u64);
    }

    fn noted(&self, process: usize) -> u64 {
        self.0.load(Offset(0).lines(process as u64).word(1)).unwrap()
    }

    fn has_reached(&self, process: usize, stage: u64) -> bool {
        self.0.load(Offset(0).lines(process as u64)).unwrap() >= stage
    }

    fn have_all_reached(&self, stage: u64) -> bool {
        (0..PROCESSES).all(|process| self.has_reached(process, stage))
    }

    fn place(end: usize) -> Offset {
        Offset(0).lines((PROCESSES + end) as u64)
    }

    fn publish(&self, end: usize, address: Address) {
        self.0.copy_in(Self::place(end), &address.encode()).unwrap();
    }

    fn address(&self, end: usize) -> Address {
        let mut bytes = [0; 16];
        self.0.copy_out(Self::place(end), &mut bytes).unwrap();
        Address::decode(bytes).unwrap()
    }
}

fn software(scratch: &Path) -> Mapped {
    Mapped::new(Region::open(scratch.join("pool")).unwrap())
}

fn attach(scratch: &Path, fate: Fate, host: u16) -> Pool<Mapped> {
    let plan = plan_of(&fate.geometry(), BYTES, host, scratch);
    let memory = software(scratch).attach(&plan).unwrap();
    Pool::attach(memory, Member { job: JOB, ..Member::new(host, BOOT) }).unwrap()
}

fn label(tag: u64) -> Label {
    Label { kind: 1, tag, data: None }
}

fn from(peer: usize, tag: u64) -> Filter {
    Filter { from: Some(peer as u32), kind: 1, tag, ignore: 0 }
}

fn word(from: usize, to: usize) -> Vec<u8> {
    ((from << 16 | to) as u64).to_le_bytes().into()
}

/// The endpoints of one process, each with the number that it has among all. Its peers have their numbers, too.
struct Crew {
    track: Track,
    fate: Fate,
    process: usize,
    ends: Vec<(usize, End)>,
    since: Instant,
}

impl Crew {
    fn new(scratch: &Path, fate: Fate, process: usize) -> Self {
        let track = Track::at(scratch);
        let mine = process * EACH..(process + 1) * EACH;
        let mut pools = std::collections::BTreeMap::new();
        let mut open = |end: usize| {
            let host = fate.host_of(end);
            let pool = pools.entry(host).or_insert_with(|| Arc::new(attach(scratch, fate, host)));
            (end, End::open(Arc::clone(pool), EndpointOptions::default()).unwrap())
        };
        let ends: Vec<_> = mine.map(&mut open).collect();
        ends.iter().for_each(|(number, end)| track.publish(*number, end.address()));
        let mut crew = Self { track, fate, process, ends, since: Instant::now() };
        // Without progress: a peer that is heard before it is connected to would have another number.
        crew.track.reach(process, 1);
        while !crew.track.have_all_reached(1) {
            crew.expect_patience(1);
            std::thread::yield_now();
        }
        for (_, end) in &mut crew.ends {
            for peer in 0..ENDS {
                assert_eq!(end.connect(crew.track.address(peer)), peer as u32);
            }
        }
        crew
    }

    /// Makes progress until all processes have come so far.
    fn meet(&mut self, stage: u64) {
        self.track.reach(self.process, stage);
        while !self.track.have_all_reached(stage) {
            self.expect_patience(stage);
            self.progress();
        }
    }

    fn expect_patience(&self, stage: u64) {
        assert!(self.since.elapsed() < HANGS, "process {} hangs at {stage}", self.process);
    }

    fn progress(&mut self) {
        for (_, end) in &mut self.ends {
            end.progress().unwrap();
        }
        std::thread::yield_now();
    }

    /// Sends a word to each endpoint of `peers`, and receives one of each, for all that are not dead.
    fn talk(&mut self, tag: u64, peers: std::ops::Range<usize>) {
        let mut awaited = 0;
        for (number, end) in self.ends.iter_mut().filter(|(number, _)| peers.contains(number)) {
            for peer in peers.clone().filter(|peer| peer != number) {
                end.receive(from(peer, tag), vec![0; 8], peer);
                end.send(peer as u32, label(tag), word(*number, peer), peer).unwrap();
                awaited += 2;
            }
        }
        while awaited > 0 {
            self.expect_patience(tag);
            self.progress();
            for (number, end) in &mut self.ends {
                while let Some(done) = end.completion() {
                    awaited -= 1;
                    match done {
                        Completion::Sent { .. } => {}
                        Completion::Received { buffer, context, .. } => {
                            assert_eq!(buffer, word(context, *number), "from {context} to {number}");
                        }
                        other => panic!("{number}: {other:?}"),
                    }
                }
            }
        }
    }

    /// Waits for words that the victims never send. Those that live are told so, and those that were evicted cannot go on.
    fn mourn(&mut self) -> Duration {
        let victims = self.fate.victims();
        for (number, end) in self.ends.iter_mut().filter(|(number, _)| !victims.contains(number)) {
            for victim in victims.clone() {
                end.receive(from(victim, LAST), vec![0; 8], victim);
            }
            assert!(end.completion().is_none(), "{number}");
        }
        self.meet(2);
        let began = Instant::now();
        let mut left: Vec<usize> = self
            .ends
            .iter()
            .map(|(number, _)| if victims.contains(number) { 1 } else { victims.len() })
            .collect();
        while left.iter().any(|&left| left > 0) {
            self.expect_patience(LAST);
            for ((number, end), left) in self.ends.iter_mut().zip(&mut left).filter(|(_, left)| **left > 0) {
                match end.progress() {
                    Ok(()) => {}
                    Err(PoolError::Evicted { .. }) if victims.contains(number) => *left = 0,
                    Err(error) => panic!("{number}: {error}"),
                }
                while let Some(done) = end.completion() {
                    let Completion::Failed { context, error: PoolError::PeerDead { .. }, .. } = done else {
                        panic!("{number}: {done:?}");
                    };
                    assert!(victims.contains(&context), "{number} lost {context}");
                    *left -= 1;
                }
            }
            std::thread::yield_now();
        }
        began.elapsed()
    }
}

fn live(scratch: &Path, fate: Fate, process: usize) {
    let mut crew = Crew::new(scratch, fate, process);
    crew.talk(TALK, 0..ENDS);
    let took = crew.mourn();
    crew.track.note(process, took);
    // One that was evicted cannot go on.
    crew.ends.retain(|(number, _)| !fate.victims().contains(number));
    crew.talk(AFTER, 0..fate.victims().start);
    crew.track.reach(process, 3);
    let survivors = || (0..PROCESSES).filter(|process| fate == Fate::Evicted || *process < PROCESSES - 1);
    // Whoever leaves early is dead to the others.
    while !survivors().all(|process| crew.track.has_reached(process, 3)) {
        crew.expect_patience(AFTER);
        crew.progress();
    }
}

fn run(fate: Fate) {
    let scratch = Scratch::new();
    let path = scratch.path();
    drop(Region::create(path.join("pool"), BYTES).unwrap());
    drop(Region::create(path.join("track"), Track::BYTES.next_multiple_of(4096)).unwrap());
    format(&software(path), &fate.geometry(), Uuid(1), Overwrite::Refuse).unwrap();
    let charge = KeeperTask { incarnation: 1, id_source: Some(IdSource::Launcher), evict_after: None };
    let mut keeper = Keeper::start(software(path), charge).unwrap();
    let mut children: Vec<_> =
        (0..PROCESSES).map(|process| Child::fork(|| live(path, fate, process))).collect();
    let track = Track::at(path);
    while !track.have_all_reached(2) {
        keeper.tick().unwrap();
        let ended = children.iter_mut().find_map(Child::ended);
        assert!(ended.is_none(), "a process ended before anybody died: {ended:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    let last = fate.host_of(ENDS - 1);
    let expected = match fate {
        Fate::Killed => {
            children[PROCESSES - 1].kill();
            PROCESSES - 1
        }
        Fate::Evicted => {
            keeper.evict(last).unwrap();
            PROCESSES
        }
    };
    for child in &mut children[..expected] {
        assert_eq!(child.wait(), Ended::Exited(0));
    }
    let noted: Vec<_> = (0..expected).map(|process| track.noted(process)).collect();
    println!("every error was there {noted:?} ms after the processes had met");
    if fate == Fate::Evicted {
        keeper.fence(last).unwrap();
    }
    let pool = attach(path, fate, 0);
    pool.sweep_job(JOB).unwrap();
    assert_eq!(pool.list("").unwrap(), [], "the dead have left something");
    let found = inspect(pool.memory()).unwrap();
    assert_eq!((found.problems, found.stat.objects), (vec![], 0));
}

#[test]
fn every_survivor_of_64_endpoints_has_its_error_when_a_process_of_16_is_killed() {
    run(Fate::Killed);
}

#[test]
fn sixty_three_hosts_go_on_when_one_of_64_is_evicted() {
    run(Fate::Evicted);
}
