//! Groups of real processes: on shadow memory, where every flush is needed, and with a rank that is killed at any of its
//! memory operations.

use std::path::Path;
use std::time::{Duration, Instant};

use polder_kernels::{Dtype, Op};
use polder_mem::testing::{Child, Ended, Scratch};
use polder_mem::{
    Bell, FlushSite, HostPlan, Liveness, Mapped, Memory, Offset, ProcessSlot, Region, Trigger, TriggerAction,
    Wrapped,
};
use polder_pool::group::{Group, GroupOptions, LINES, RankPlace, extent_bytes};
use polder_pool::wait::Patience;
use polder_pool::{Buffers, Operation, PoolError};
use polder_schedule::Collective;

/// Bytes of each rank's data in the pool.
const DATA: u64 = 16 << 10;

/// GroupOptions with which a few kilobytes take many rounds.
fn options() -> GroupOptions {
    GroupOptions {
        staging_bytes: 8192,
        segment_bytes: 256,
        direct_bytes: 64,
        timeout: Duration::from_secs(10),
        patience: Patience { spins: 20, yields: 20, nap: Duration::from_micros(200) },
        ..GroupOptions::default()
    }
}

/// Ranks on hosts, side by side in a region of their own.
struct Scene {
    scratch: Scratch,
    hosts: Vec<u16>,
}

impl Scene {
    fn new(hosts: &[u16]) -> Self {
        let scratch = Scratch::new();
        let bytes = Self::stride() * hosts.len() as u64;
        drop(Region::create(scratch.path().join("region"), bytes).unwrap());
        Self { scratch, hosts: hosts.to_vec() }
    }

    fn stride() -> u64 {
        (extent_bytes(&options()) + DATA).next_multiple_of(4096)
    }

    fn region(&self) -> Region {
        Region::open(self.scratch.path().join("region")).unwrap()
    }

    fn data(&self, rank: usize) -> Offset {
        Offset(Self::stride() * rank as u64 + extent_bytes(&options()))
    }

    fn slot(&self, rank: usize) -> ProcessSlot {
        let before = self.hosts[..rank].iter().filter(|&&host| host == self.hosts[rank]);
        ProcessSlot(before.count() as u16)
    }

    fn plan(&self, rank: usize) -> HostPlan {
        let bells = self.hosts.len() as u32;
        HostPlan { hosts: 4, processes: 4, bells, ..self.scratch.plan(self.hosts[rank]) }
    }

    fn members(&self, pids: &[u32]) -> Vec<RankPlace> {
        let member = |rank: usize| RankPlace {
            at: Offset(Self::stride() * rank as u64),
            bytes: extent_bytes(&options()),
            host: self.hosts[rank],
            slot: self.slot(rank),
            pid: pids.get(rank).copied().unwrap_or(rank as u32),
            bell: Some(Bell(rank as u32)),
            heartbeat: None,
            sign: None,
        };
        (0..self.hosts.len()).map(member).collect()
    }

    /// Attaches `memory` as the process of `rank`: the first free slot is taken, so ranks of a host come one by one.
    fn attach(&self, memory: Wrapped, rank: usize) -> Wrapped {
        let mark = |rank: usize| self.scratch.path().join(format!("rank-{rank}"));
        while (0..rank).any(|before| self.hosts[before] == self.hosts[rank] && !mark(before).exists()) {
            std::thread::yield_now();
        }
        let memory = memory.attach(&self.plan(rank)).unwrap();
        std::fs::write(mark(rank), "").unwrap();
        memory
    }

    /// Forks a process for each rank, and says how they ended.
    fn run(&self, memory: impl Fn(Region) -> Wrapped, options: GroupOptions) -> Vec<Ended> {
        let fork = |rank: usize| {
            Child::fork(|| {
                let memory = self.attach(memory(self.region()), rank);
                let mut group = Group::over_extents(memory, self.members(&[]), rank, options).unwrap();
                for salt in 0..3 {
                    operations(&mut group, self.data(rank), salt).unwrap();
                }
                // A process that leaves early is dead to the others.
                group.barrier().unwrap();
            })
        };
        let mut children: Vec<Child> = (0..self.hosts.len()).map(fork).collect();
        children.iter_mut().map(Child::wait).collect()
    }
}

fn input(rank: usize, salt: usize, count: usize) -> Vec<u8> {
    (0..count).flat_map(|index| ((index * 31 + rank * 1009 + salt * 7 + 1) as u32).to_le_bytes()).collect()
}

fn sum(ranks: usize, salt: usize, count: usize) -> Vec<u8> {
    let of = |index| (0..ranks).map(|rank| (index * 31 + rank * 1009 + salt * 7 + 1) as u32).sum::<u32>();
    (0..count).flat_map(|index| of(index).to_le_bytes()).collect()
}

/// Reduces, short, long and in the pool, and broadcasts; each result must be right.
fn operations<M: Memory>(group: &mut Group<M>, at: Offset, salt: usize) -> Result<(), PoolError> {
    let (rank, ranks) = (group.rank(), group.size());
    for count in [4, 700] {
        let mut data = input(rank, salt, count);
        group.all_reduce(Op::Sum, Dtype::U32, &mut data)?;
        assert!(data == sum(ranks, salt, count), "a sum of {count} is wrong on rank {rank}");
    }
    let mut data = input(rank, salt, 500);
    group.broadcast(salt % ranks, Dtype::U32, &mut data)?;
    assert!(data == input(salt % ranks, salt, 500), "a broadcast is wrong on rank {rank}");
    group.memory().copy_in(at, &input(rank, salt, 300))?;
    let reduce = Operation::reducing(Collective::AllReduce, Op::Sum, Dtype::U32);
    group.run(&reduce, Buffers::Pool { at, bytes: 1200 })?;
    let mut data = vec![0; 1200];
    group.memory().copy_out(at, &mut data)?;
    assert!(data == sum(ranks, salt, 300), "a sum in the pool is wrong on rank {rank}");
    Ok(())
}

#[test]
fn processes_compute_together_on_shadow_software_and_coherent_memory() {
    let memories: [fn(Region) -> Wrapped; 3] = [
        |region| Wrapped::shadow(Mapped::coherent(region)),
        |region| Mapped::new(region).into(),
        |region| Mapped::coherent(region).into(),
    ];
    for memory in memories {
        for hosts in [&[0, 1][..], &[0, 0], &[0, 0, 1, 1], &[0, 1, 2]] {
            let ended = Scene::new(hosts).run(memory, options());
            assert!(ended.iter().all(|ended| *ended == Ended::Exited(0)), "{hosts:?}: {ended:?}");
        }
    }
}

/// The place of the first line in `file` that holds `snippet`.
fn site(file: &str, snippet: &str) -> FlushSite {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(file);
    let text = std::fs::read_to_string(path).unwrap();
    let line = text.lines().position(|line| line.contains(snippet));
    let line = line.unwrap_or_else(|| panic!("{file} has no {snippet:?}")) as u32 + 1;
    FlushSite { file: file.to_owned(), line }
}

#[test]
fn on_shadow_memory_every_missing_flush_shows() {
    let sites = [
        // That of `publish`, which comes before the one of `announce`.
        site("layout/line.rs", "memory.write_back(at, LINE);"),
        site("group/progress.rs", "memory.invalidate(line_at(extent), LINE);"),
        site("collectives/run.rs", "memory().invalidate(self.place(block, round), bytes);"),
        site("collectives/run.rs", "memory().write_back(self.place(&block, round)"),
    ];
    // A rank that sees nothing of the others gives up soon.
    let hasty = GroupOptions { timeout: Duration::from_millis(300), ..options() };
    for site in sites {
        let memory = |region| Wrapped::shadow(Mapped::coherent(region)).without_flushes_at(site.clone());
        let ended = Scene::new(&[0, 1]).run(memory, hasty);
        assert!(ended.iter().any(|ended| *ended != Ended::Exited(0)), "{site:?} is not missed");
    }
}

/// Kills rank 1 of three at operation after operation. The survivors are threads of this process.
#[test]
fn survivors_of_a_rank_that_is_killed_at_any_operation_have_right_sums_or_its_name() {
    let kills = std::env::var("POLDER_KILLS").ok().map_or(1500, |text| text.parse().unwrap());
    let scene = Scene::new(&[0, 1, 2]);
    let survivors = [0, 2].map(|rank| scene.attach(Mapped::new(scene.region()).into(), rank));
    let (mut through, mut named) = (0, 0);
    for kill in 0..kills {
        // Steps that share no factor with the number of operations reach all of them.
        match one_kill(&scene, &survivors, 1 + kill * 7 % 2600) {
            Some(error) => {
                named += 1;
                assert!(matches!(error, PoolError::PeerDead { peer, .. } if peer.host == 1), "{error}");
            }
            None => through += 1,
        }
    }
    assert!(named > kills / 2, "{through} of {kills} went through");
}

/// What a survivor was told, if not all went through.
fn one_kill(scene: &Scene, survivors: &[Wrapped; 2], operation: u64) -> Option<PoolError> {
    for rank in 0..3 {
        let at = Offset(Scene::stride() * rank);
        (0..LINES * 8).for_each(|word| survivors[0].store(at.word(word), 0));
        survivors[0].write_back(at, LINES * 64);
        survivors[0].mfence();
    }
    let mut victim = Child::fork(|| {
        let trigger = Trigger { operation, action: TriggerAction::Kill };
        let memory = Wrapped::from(Mapped::new(scene.region())).with_trigger(trigger);
        let memory = memory.attach(&scene.plan(1)).unwrap();
        let mut group = Group::over_extents(memory, scene.members(&[]), 1, options()).unwrap();
        operations(&mut group, scene.data(1), 0).unwrap();
        group.barrier().unwrap();
    });
    while survivors[0].liveness(1, ProcessSlot(0)) != Liveness::Alive && victim.ended().is_none() {
        std::thread::yield_now();
    }
    let begin = Instant::now();
    let pids = [0, victim.pid(), 2];
    let survive = |memory: &Wrapped, rank: usize| {
        let mut group = Group::over_extents(memory.clone(), scene.members(&pids), rank, options()).unwrap();
        operations(&mut group, scene.data(rank), 0).and_then(|()| group.barrier()).err()
    };
    let errors = std::thread::scope(|scope| {
        let other = scope.spawn(|| survive(&survivors[1], 2));
        [survive(&survivors[0], 0), other.join().unwrap()]
    });
    victim.wait();
    assert!(begin.elapsed() < options().timeout, "a survivor waited for the dead");
    errors.into_iter().flatten().next()
}
