//! Which bytes live in which tier of memory: pure functions of what was measured and what is wanted.
//!
//! [`pages`] decides where the pages of a host's services lie. [`sync`] divides the work of a parameter service. The rest places
//! the tensors of a training step: objects and tiers in, the fraction of each object in each tier out. A step has phases. In a
//! phase, each tier's link carries the bytes that the phase moves to and from that tier. All links work at the same time, so
//! the phase lasts as long as the slowest, with what of its computation cannot run beside that. [`Policy::Optimal`] minimises the sum over phases.
//!
//! ```
//! use polder_place::{Computing, Kind, Moved, Object, Phase, Policy, Problem, Rates, Tier};
//! use polder_platform::{Bandwidth, Bytes};
//!
//! let rates = |read, write| Rates { read: Bandwidth::new(read), write: Bandwidth::new(write) };
//! let tier = |name: &str, capacity, read, write| Tier {
//!     name: name.into(),
//!     capacity: Bytes::new(capacity),
//!     cpu: rates(read, write),
//!     device: None,
//!     through: None,
//! };
//! let problem = Problem {
//!     tiers: vec![tier("dram", 8e9, 40e9, 40e9), tier("card", 64e9, 10e9, 10e9)],
//!     objects: vec![Object { name: "states".into(), kind: Kind::Momentum, bytes: Bytes::new(6e9), only: vec![] }],
//!     phases: vec![Phase {
//!         name: "STEP".into(),
//!         by_device: false,
//!         least_s: 0.0,
//!         computing: Computing::default(),
//!         streams: vec![],
//!         moved: vec![Moved { object: 0, read: 1.0, write: 1.0 }],
//!     }],
//! };
//! let optimal = problem.place(Policy::Optimal)?;
//! // A fifth on the card: both links end together.
//! assert!((optimal.fractions[0][1] - 0.2).abs() < 1e-9);
//! assert!((problem.seconds(&optimal)[0] - 0.24).abs() < 1e-9);
//! # Ok::<(), polder_place::PlaceError>(())
//! ```
#![forbid(unsafe_code)]

mod optimal;
pub mod pages;
mod policy;
mod problem;
pub mod sync;

pub use policy::{Policy, PolicyError};
pub use problem::{
    Computing, Kind, Moved, Object, Phase, PlaceError, Placement, Problem, Rates, Stream, Tier,
};
