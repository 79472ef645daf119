//! Windows and memory of MPI in the pool, for programs that are neither changed nor rebuilt.
//!
//! LD_PRELOAD loads a shim before the program. The shim takes the calls of MPI that make windows, move bytes through them, order
//! these moves, or allocate memory. `pool` has memory, puts and locks; this crate has MPI's meaning of them. All other calls stay
//! with the MPI library. The shim calls the library by the names with a P in front, which no shim takes.
//!
//! The same libraries write down what a program sends and waits for (`trace`), where the environment asks for it.
//!
//! This crate is generic over [`abi::Abi`]. The crates `mpi-mpich`, `mpi-openmpi` and `mpi-abi` each make a library of it.

pub mod abi;
mod calls;
mod datatype;
mod epoch;
mod failure;
mod hosts;
mod layout;
pub mod library;
mod memory;
pub mod shim;
pub mod trace;
mod view;
pub mod window;
