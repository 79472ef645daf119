//! Predicted seconds: fabrics and training steps, in closed form, with their error against published runs.
//!
//! - `contention` follows flows over the links of a fabric;
//! - `step` computes the time of a step;
//! - `offload` computes that of a step whose tensors lie in host memory, and places them;
//! - `memory` computes the time of accesses, by the size of the working set;
//! - `sync` computes that of a step with a parameter service;
//! - `program` follows the ranks of MPI programs;
//! - `pages` follows the pages of a host's services on two tiers;
//! - `formats` reads models and layouts;
//! - `judge` compares predictions with published figures;
//! - `search` answers questions.
//!
//! Each imports only those before it.
#![forbid(unsafe_code)]

#[macro_use]
mod text;

pub mod contention;
mod fidelity;
mod formats;
mod given;
mod judge;
pub mod memory;
pub mod message;
pub mod offload;
pub mod pages;
pub mod program;
mod random;
mod search;
mod step;
pub mod sync;

pub use fidelity::Fidelity;
pub use formats::Execution;
pub use given::GivenError;
pub use judge::fabrics;
pub use judge::fit::{descend, fit};
pub use judge::margin::Margin;
pub use judge::published::{
    Compared, Counting, Judged, Pooled, PublishedTime, Ratio, Row, Table, fitted, tables, validate,
};
pub use judge::range::StepClass;
pub use random::Random;
pub use search::mixed::{MixedAnswer, MixedError, MixedPart, MixedRequest, RackPart};
pub use search::pays::{CellCost, FabricMap, MapCell, PaysError, PaysQuestion};
pub use search::request::{Answer, Request, RequestError, alternatives, unjudged};
pub use search::rows::{Cell, NUMBERS, Points, RANGE, SITE_NUMBERS, cells, choices, points};
pub use search::tier::{GivenIdle, TierError, TierQuestion, TierRow, TierServer};
pub use search::{FoundLayout, Outcome, Progress, Space, front, search};
pub use step::figures::{
    Communication, ComputeTimes, Exposure, FigureUnit, MemoryUse, Scoped, Stage, Step, StepFigure, TierUse,
};
pub use step::flows::StepFlits;
pub use step::given::{GivenLayout, Tiers};
pub use step::job::{FabricRates, Fabrics, Job, PlannedStep};
pub use step::layout::{Layout, Offload, Overlap, Precision, Recompute, Refusal, Zero};
pub use step::machine::Machine;
pub use step::model::{Experts, Indexer, Latent, Mixer, Model, OtherBlocks, Recurrent, Window};
pub use step::order::{Order, OrderError};
pub use step::timeline::{Sent, Stretch, Work, timeline, traffic};
pub use text::{accelerators, counted, grouped, listed};
