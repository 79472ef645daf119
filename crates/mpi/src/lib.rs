//! Windows and memory of MPI in the pool, for programs that are neither changed nor rebuilt.
//!
//! A shim is loaded before a program by LD_PRELOAD and takes those calls of MPI that make windows, move bytes through them and
//! order that, and those that take memory. Memory, puts and locks are the pool's: here stands MPI's meaning. Everything else stays
//! with the MPI library, which is called by the names that no shim takes, those with a P in front.
//!
//! What the ABIs have in common stands here, and is generic over [`abi::Abi`]; the crates `mpi-mpich` and `mpi-openmpi` make a
//! library of it each.

pub mod abi;
mod calls;
mod failure;
mod layout;
pub mod library;
mod memory;
pub mod shim;
mod view;
pub mod window;
