//! Memory that other hosts may write.
//!
//! One trait, [`Memory`], does what the hardware does and no more. Every protocol of the pool is written once against it.
//! Three implementations pass one conformance suite: coherent memory, software-coherent memory, and the incoherent model,
//! in which every protocol is explored. The last is `model`, behind a feature that libraries for users leave out.

#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
compile_error!("Polder maps memory with Linux and orders it with the instructions of x86-64 or aarch64");

mod affinity;
mod any;
mod bounds;
mod clock;
#[doc(hidden)]
pub mod conformance;
mod cpu;
mod fault;
mod fold;
mod fork;
mod heap;
mod host;
mod instructions;
mod kernel;
pub mod lines;
pub mod litmus;
mod mapped;
mod memory;
#[cfg(feature = "model")]
pub mod model;
mod offset;
mod random;
mod region;
mod serial;
mod shm;
mod slice;
#[doc(hidden)]
pub mod testing;
pub mod threads;
#[cfg(feature = "instruments")]
mod wrapped;

pub use affinity::{allowed_cpus, bind_memory, pin_to_cpu};
pub use any::AnyMemory;
pub use cpu::{Cpu, Flush};
pub use fault::host_file_lost;
pub use fold::{BLOCK, Fold};
pub use fork::forks;
pub use heap::{Heap, HeapCounts, HeapShape};
pub use host::{HostError, HostPlan};
pub use mapped::{Mapped, populate_buffer};
pub use memory::{Bell, Coherence, Fault, Liveness, LocalWord, Memory, Nanos, ProcessSlot};
pub use offset::{LINE, Offset};
pub use region::{DraftRegion, MemoryFile, Region, RegionError, RegionKind};
pub use serial::{Serial, SerialGuard};
pub use slice::{give_up, was_away};
#[cfg(feature = "instruments")]
pub use wrapped::{Cost, FlushSite, FlushSiteError, Trigger, TriggerAction, Wrapped};
