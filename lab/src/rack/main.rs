//! Boots two kernels in QEMU on one shared memory device, and runs the pool's story between them.
//!
//! One coherent CPU stands under both: this proves the device, the kernels and recovery, not flushes. `shadow` in each
//! guest stands for caches that are not kept in step.
#![forbid(unsafe_code)]

mod guest;
mod story;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};

/// Boots a rack of two kernels on one memory device, and runs the pool's story between them.
#[derive(Parser)]
struct Arguments {
    /// The kernel, as an ELF file.
    kernel: PathBuf,
    /// The guests' first file system.
    initrd: PathBuf,
    /// The memory that the kernels share.
    #[arg(long, value_enum, default_value_t = Device::Nvdimm)]
    device: Device,
    /// Where the guests' logs go.
    #[arg(long, default_value = "out/lab")]
    logs: PathBuf,
    /// Run an MPI program, which the initrd has.
    #[arg(long)]
    mpi: bool,
    /// Flushes to leave out, each in a run of its own.
    #[arg(long, default_value_t = polder_lab::hosts::FLUSHES.len())]
    flushes: usize,
    /// Processes of host 1 that are killed at a memory operation.
    #[arg(long, default_value_t = 60)]
    kills: u64,
    /// Times that the kernel of host 1 is killed at a memory operation of a process.
    #[arg(long, default_value_t = 3)]
    kernel_kills: u64,
    /// Kill alone, in these scenes of `polder-dev soak`, such as `kv`, and leave out the rest of the story.
    #[arg(long)]
    what: Option<String>,
    /// The seed of the first kill.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// The memory that the kernels share.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Device {
    /// An nvdimm. Guests reach it as their own memory.
    Nvdimm,
    /// A persistent CXL Type-3 device. QEMU emulates each access to it, which takes long: the story is told once, with few rounds.
    Cxl,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match story::run(&arguments) {
        Ok(checks) => {
            println!("lab: {checks} checks passed on the rack");
            ExitCode::SUCCESS
        }
        Err(why) => {
            println!("lab: FAILED on the rack: {why}");
            ExitCode::FAILURE
        }
    }
}
