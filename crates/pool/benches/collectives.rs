//! Times collectives between processes on one region in /dev/shm, without Python and without a directory:
//! `cargo bench -p polder-pool --bench collectives -- all-reduce software 2 4096 16777216`. For tuning: the rows that are
//! published are those of `polder-dev bench collectives`.
//!
//! Arguments: the operation (`all-reduce`, `in-pool`, `broadcast`, `barrier`), the memory (`coherent`, `software`), the
//! number of processes, each on a host of its own, and message sizes in bytes. The environment may set `STAGING`,
//! `SEGMENT`, `DIRECT` (bytes), `SPINS`, `YIELDS`, and `HOSTS` (how many hosts the processes share).

use std::path::Path;
use std::time::{Duration, Instant};

use polder_kernels::{Dtype, Op};
use polder_mem::testing::{Child, Scratch};
use polder_mem::{Bell, Coherent, HostPlan, Memory, Offset, ProcessSlot, Region, Software};
use polder_pool::group::{Group, GroupOptions, RankPlace, extent_bytes};
use polder_pool::wait::Patience;
use polder_pool::{Buffers, Operation};
use polder_schedule::Collective;

const PAGE: u64 = 2 << 20;

#[derive(Clone)]
struct Case {
    operation: String,
    software: bool,
    ranks: u16,
    sizes: Vec<u64>,
    options: GroupOptions,
    hosts: u16,
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |text| text.parse().expect("a number"))
}

fn case() -> Case {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|text| text != "--bench").collect();
    let [operation, memory, ranks, sizes @ ..] = arguments.as_slice() else {
        // `cargo bench` and `cargo test` run every target: this one says nothing unless asked.
        std::process::exit(0);
    };
    let default = GroupOptions::default();
    let ranks: u16 = ranks.parse().expect("a number of processes");
    let patience = Patience::for_ranks(usize::from(ranks));
    let options = GroupOptions {
        staging_bytes: number("STAGING", default.staging_bytes),
        segment_bytes: number("SEGMENT", default.segment_bytes),
        direct_bytes: number("DIRECT", default.direct_bytes),
        patience: Patience {
            spins: number("SPINS", patience.spins.into()) as u32,
            yields: number("YIELDS", patience.yields.into()) as u32,
            nap: Duration::from_micros(number("NAP_US", patience.nap.as_micros() as u64)),
        },
        ..default
    };
    let sizes = sizes.iter().map(|text| text.parse().expect("a size in bytes")).collect();
    let hosts = number("HOSTS", ranks.into()) as u16;
    Case { operation: operation.clone(), software: memory == "software", ranks, sizes, options, hosts }
}

impl Case {
    fn extra(&self) -> u64 {
        let largest = self.sizes.iter().copied().max().unwrap_or(0);
        if self.operation == "in-pool" { largest.next_multiple_of(PAGE) } else { 0 }
    }

    fn stride(&self) -> u64 {
        (extent_bytes(&self.options) + self.extra()).next_multiple_of(PAGE)
    }

    fn place(&self, rank: u16) -> (u16, u16) {
        (rank % self.hosts, rank / self.hosts)
    }

    fn plan(&self, directory: &Path, rank: u16) -> HostPlan {
        HostPlan {
            pool: 1,
            host: self.place(rank).0,
            hosts: self.hosts,
            processes: self.ranks,
            local_words: 1,
            bells: self.ranks.into(),
            directory: directory.to_owned(),
            kept: 0..0,
            patience: HostPlan::PATIENCE,
        }
    }

    fn members(&self) -> Vec<RankPlace> {
        let member = |rank: u16| RankPlace {
            at: Offset(u64::from(rank) * self.stride()),
            bytes: extent_bytes(&self.options),
            host: self.place(rank).0,
            slot: ProcessSlot(self.place(rank).1),
            pid: rank.into(),
            bell: Some(Bell(rank.into())),
            heartbeat: None,
            sign: None,
        };
        (0..self.ranks).map(member).collect()
    }

    /// Waits for its turn to take a slot: the first free one is taken.
    fn run(&self, directory: &Path, rank: u16) {
        while rank > 0 && !directory.join(format!("rank-{}", rank - 1)).exists() {
            std::thread::yield_now();
        }
        let region = Region::open(directory.join("region")).expect("the region opens");
        let plan = self.plan(directory, rank);
        let ready = || std::fs::write(directory.join(format!("rank-{rank}")), "").expect("a mark");
        if self.software {
            let memory = Software::new(region).attach(&plan).expect("a slot");
            ready();
            self.time(memory, rank);
        } else {
            let memory = Coherent::new(region).attach(&plan).expect("a slot");
            ready();
            self.time(memory, rank);
        }
    }

    fn time<M: Memory>(&self, memory: M, rank: u16) {
        let mut group =
            Group::over_extents(memory, self.members(), rank.into(), self.options).expect("the members fit");
        let at = Offset(u64::from(rank) * self.stride() + extent_bytes(&self.options));
        for &bytes in &self.sizes {
            let mut data = vec![0; if self.operation == "in-pool" { 0 } else { bytes as usize }];
            let mut times = Vec::new();
            let repeats = if bytes <= 1 << 16 { 50 } else { 1 };
            let rounds = (1 << 31) / bytes.max(1 << 22) / repeats.min(8);
            for _ in 0..rounds.clamp(10, 200) {
                group.barrier().expect("all are there");
                let begin = Instant::now();
                for _ in 0..repeats {
                    self.once(&mut group, &mut data, at, bytes);
                }
                times.push(begin.elapsed() / repeats as u32);
            }
            times.sort_unstable();
            if rank == 0 {
                let at = |part: usize| times[(times.len() - 1) * part / 10].as_nanos() as f64 / 1e3;
                let (memory, ranks) = (if self.software { "software" } else { "coherent" }, self.ranks);
                let name = &self.operation;
                println!(
                    "{name} {memory} {ranks} procs {bytes}: {:.2} us (10% {:.2}, 90% {:.2})",
                    at(5),
                    at(1),
                    at(9)
                );
            }
        }
        group.barrier().expect("all are there");
    }

    fn once<M: Memory>(&self, group: &mut Group<M>, data: &mut [u8], at: Offset, bytes: u64) {
        match self.operation.as_str() {
            "all-reduce" => group.all_reduce(Op::Sum, Dtype::F32, data),
            "in-pool" => {
                let sum = Operation::reducing(Collective::AllReduce, Op::Sum, Dtype::F32);
                group.run(&sum, Buffers::Pool { at, bytes })
            }
            "broadcast" => group.broadcast(0, Dtype::F32, data),
            _ => group.barrier(),
        }
        .expect("every rank does the same");
    }
}

fn main() {
    let case = case();
    let scratch = Scratch::new();
    let region = Region::create(scratch.path().join("region"), case.stride() * u64::from(case.ranks));
    region
        .expect("a region in /dev/shm")
        .populate(Offset(0), case.stride() * u64::from(case.ranks))
        .expect("memory");
    let fork = |rank| Child::fork(|| case.run(scratch.path(), rank));
    let mut children: Vec<Child> = (0..case.ranks).map(fork).collect();
    for child in &mut children {
        child.wait();
    }
}
