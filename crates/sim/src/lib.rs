//! Predicted seconds: fabrics and training steps, in closed form, with their error against published runs.
//!
//! - `contention` follows flows over the links of a fabric;
//! - `step` computes the time of a step;
//! - `offload` computes that of a step whose tensors lie in host memory, and places them;
//! - `walk` computes the time of a collective as the pool runs it;
//! - `memory` computes the time of accesses, by the size of the working set;
//! - `sync` computes that of a step with a parameter service;
//! - `program` follows the ranks of MPI programs;
//! - `scaling` computes what many ranks take from what fewer took;
//! - `pages` follows the pages of a host's services on two tiers;
//! - `formats` reads models and layouts;
//! - `judge` compares predictions with published and measured figures;
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
mod scaling;
mod search;
mod step;
pub mod sync;
mod walk;

pub use fidelity::Fidelity;
pub use formats::Execution;
pub use given::GivenError;
pub use judge::fit::fit;
pub use judge::margin::Margin;
pub use judge::measured::{Comparison, Measured, Verified, step_through, verify};
pub use judge::open::{OpenValue, Origin};
pub use judge::published::{
    Compared, Counting, Judged, Pooled, PublishedTime, Ratio, Row, Table, fitted, tables, validate,
};
pub use judge::range::StepClass;
pub use judge::{
    cmpi, coarse, cxl, cxl_measured, cxl_text, fabrics, scalepool, scalepool_tiers, toptier, vistara,
    vistara_fair, vistara_ratio, vistara_services, vistara_tier,
};
pub use scaling::Scaling;
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
pub use walk::{LOOKS, MessagePlace, collective};
