//! Memory that other hosts may write.
//!
//! One trait, [`Memory`], does what the hardware does and no more; every protocol of the pool is written once
//! against it. Three implementations pass one conformance suite: coherent, software-coherent, and the incoherent
//! model in [`model`], in which every protocol is explored.

mod bounds;
mod clock;
mod heap;
mod memory;
pub mod model;
mod offset;

pub use heap::{Heap, HeapShape};
pub use memory::{Bell, Coherence, Fault, Liveness, LocalWord, Memory, Nanos, ProcessSlot};
pub use offset::{LINE, Offset};
