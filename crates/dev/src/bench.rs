//! `polder-dev bench`: Polder and its peers in turn, in one run, a row for each figure.

mod ab;
mod agent;
mod fabric;
mod kv;
mod lines;
mod memory;
mod mpi;
mod objects;
mod pages;
mod peer;
mod plan;
pub(crate) mod python;
mod ranks;
mod scaling;
mod sync;

use clap::{Args, Subcommand};
use polder_measure::{Row, ring};

use crate::Failure;
pub(crate) use ab::{Enter, enter};
pub(crate) use objects::{Second as ObjectsSecond, second as second_of_objects};
pub(crate) use ranks::{Second as RanksSecond, second as second_of_ranks};

/// Measures Polder and its peers in turn.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Print a JSON object a line instead of a table.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// Messages between two processes, beside the line operations that they need at least.
    Ring,
    /// Writing and flushing with each instruction (cMPI, Figure 11 and Table 1).
    Lines,
    /// Each node's memory under load: bandwidth by reads and writes, latency by load and its tail (Vistara, Tables III and IV).
    Memory(memory::MemoryArguments),
    /// Latency of a footprint over two nodes, by the part of it that is hot (Vistara, Table X).
    Knee(memory::KneeArguments),
    /// A command on the memory of some nodes and on that of others, in turn, by `cpuset.mems`.
    Ab(ab::Arguments),
    /// What the agent takes of a core and of memory, by the number of services.
    Agent(agent::Arguments),
    /// Collectives through Python, beside gloo and Open MPI.
    Collectives(python::Collectives),
    /// Every collective and message through torch, over each kind of pool, beside gloo and Open MPI.
    Torch(python::Torch),
    /// Messages of stock MPI libraries over a pool, beside TCP and their own shared memory.
    Mpi(mpi::Arguments),
    /// The fused step of an optimizer, beside DeepSpeed's sequence, torch's step, and the memory traffic alone.
    Offload(python::Offload),
    /// A million objects, created and opened by four processes.
    Objects(objects::Arguments),
    /// All-to-alls of many ranks on emulated hosts, and the memory that a rank and a pair take.
    Ranks(ranks::Arguments),
    /// Layouts predicted in a second, and the error of predictions beside that of a constant rate.
    Plan(plan::Arguments),
    /// Flows of a permutation that share the links of a Clos, beside SimGrid.
    Fabric(fabric::Arguments),
    /// Accesses to the pages of services on two tiers, beside a plain C model that decides the same.
    Pages(pages::Arguments),
    /// Sums of a parameter service's proxies, beside the same additions on plain memory.
    Sync,
    /// Snapshots of a training state and restarts from them, beside torch's own checkpoints.
    Snapshot(python::Snapshot),
    /// Weights that several processes load from a pool, beside a safetensors file in /dev/shm.
    Weights(python::Weights),
    /// Blocks of keys and values in a cache, beside copying into a mapped file, files, vLLM's fs tier, LMCache, Redis and Mooncake.
    Kv(kv::Arguments),
}

/// Runs one benchmark and prints its rows.
pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let show = |row: &Row| print(row, arguments.json);
    let rows = match &arguments.bench {
        Bench::Ring => ring::run()?,
        Bench::Lines => lines::run()?,
        Bench::Sync => sync::run()?,
        Bench::Memory(arguments) => memory::run(arguments)?,
        Bench::Knee(arguments) => memory::knee(arguments)?,
        Bench::Ab(arguments) => ab::run(arguments)?,
        Bench::Agent(arguments) => agent::run(arguments)?,
        Bench::Plan(arguments) => plan::run(arguments)?,
        Bench::Fabric(arguments) => fabric::run(arguments)?,
        Bench::Pages(arguments) => pages::run(arguments)?,
        Bench::Objects(arguments) => objects::run(arguments)?,
        Bench::Ranks(arguments) => ranks::run(arguments)?,
        Bench::Collectives(what) => return what.run(show),
        Bench::Torch(what) => return what.run(show),
        Bench::Weights(what) => return what.run(show),
        Bench::Snapshot(what) => return what.run(show),
        Bench::Offload(what) => return what.run(show),
        Bench::Kv(what) => return kv::run(what, show),
        Bench::Mpi(what) => return mpi::run(what, arguments.json),
    };
    rows.iter().try_for_each(show)
}

fn print(row: &Row, json: bool) -> Result<(), Failure> {
    if json {
        println!("{}", serde_json::to_string(row)?);
    } else {
        println!("{}", row.line());
    }
    Ok(())
}
