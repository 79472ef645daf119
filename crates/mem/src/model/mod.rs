//! The incoherent model: a machine whose caches evict, prefetch and tear at will, and a runner that explores every
//! protocol on it.
//!
//! One seed is one schedule. A suite is a function of a seed that builds a [`World`], spawns threads in it and runs it:
//!
//! ```
//! use polder_mem::model::{Outcome, Shape, World, explore};
//! use polder_mem::{LINE, Memory, Offset};
//!
//! const PAYLOAD: Offset = Offset(0);
//! const SEQUENCE: Offset = Offset(64);
//!
//! fn message_passing(seed: u64) -> Outcome {
//!     let mut world = World::new(seed, Shape { hosts: 2, bytes: 4096, ..Shape::default() });
//!     world.spawn(0, 0, |memory| {
//!         memory.store(PAYLOAD, 42);
//!         memory.write_back(PAYLOAD, LINE);
//!         memory.sfence();
//!         memory.store(SEQUENCE, 1);
//!         memory.write_back(SEQUENCE, LINE);
//!         memory.sfence();
//!     });
//!     world.spawn(1, 0, |memory| loop {
//!         memory.invalidate(SEQUENCE, LINE);
//!         memory.fence_invalidations();
//!         if memory.load(SEQUENCE).unwrap() == 1 {
//!             memory.invalidate(PAYLOAD, LINE);
//!             memory.fence_invalidations();
//!             assert_eq!(memory.load(PAYLOAD).unwrap(), 42);
//!             return;
//!         }
//!         memory.pause();
//!     });
//!     world.run()
//! }
//!
//! explore("message passing", 1000, 0, message_passing).expect_none();
//! ```
//!
//! - A **panic** in a thread (an `assert!`) fails the schedule. [`explore`] replays the failing seed with tracing on, so
//!   that the [`Failure`] carries the last operations of each thread; the fast path traces nothing.
//! - **Time is virtual.** When every thread sleeps, pauses or is stopped and nothing is on its way, time jumps, so that
//!   deadlines of seconds cost nothing. [`Memory::pause`] and [`Memory::yield_now`] give low priority. A schedule that does
//!   not end within its budget of operations fails with a message that says so.
//! - **Crashes** ([`World::crash`]) fall at a random memory operation. The dead thread's destructors run only after the
//!   schedule has been judged, and find memory operations that do nothing.
//! - **Mutants** ([`Suite::mutants`]): each flush and fence is dropped or weakened in turn, and the suite must fail.
//! - **Canaries** ([`canaries()`]) are protocols that are known to be wrong: they must fail, or the model cannot be believed.
//! - **Litmus tests** ([`litmus`](crate::litmus)) are walked through every state.
//! - A handle belongs to a process, (host, slot): it may be made in [`World::setup_as`] and used by any thread of that
//!   process. Results may leave a thread through an `Rc<RefCell<..>>`: all threads of a world run on one OS thread.
//!
//! [`Memory::pause`]: crate::Memory::pause
//! [`Memory::yield_now`]: crate::Memory::yield_now

mod canaries;
mod explore;
mod machine;
mod memory;
mod mutants;
mod state;
mod suite;
mod table;
#[cfg(test)]
mod tests;
mod trace;
mod walk;
mod world;

pub use canaries::{Canary, canaries};
pub use explore::{Explorer, Failure, Outcome, Report, Tally, explore, reached, replay};
pub use machine::BackInvalidation;
pub use memory::ModelMemory;
pub use mutants::{Change, Harmless, Mutant, SiteKind, find, judge, mutants};
pub use state::{Crash, Kernels, Shape};
pub use suite::Suite;
pub use table::{DeathRow, Row, death_table, table};
pub use walk::{Walked, walk, walk_deaths};
pub use world::{ThreadId, World};
