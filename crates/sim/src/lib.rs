//! Predicted seconds: fabrics and training steps, in closed form, with their error against published runs.
#![forbid(unsafe_code)]

#[macro_use]
mod text;

mod block;
mod calculon;
mod collective;
pub mod fabrics;
mod fit;
mod hugging_face;
mod json;
mod layout;
mod machine;
mod measured;
pub mod message;
mod model;
mod nearest;
mod order;
mod published;
mod request;
mod rows;
pub mod scalepool;
mod search;
mod step;
pub mod tier;
mod timeline;
mod train;

pub use calculon::Execution;
pub use collective::{LOOKS, Place, collective};
pub use fit::fit;
pub use json::platform;
pub use layout::{
    FarTier, Layout, Offload, Overlap, Precision, Recompute, Refusal, TierError, TierName, Zero,
};
pub use machine::Machine;
pub use measured::{Beside, Measured, Verified, step_through, verify};
pub use model::{Experts, Model};
pub use order::{Order, OrderError};
pub use published::{
    Compared, Counting, Judged, Margin, Pooled, Ratio, Row, Seen, Table, compare, fitted, tables, validate,
};
pub use request::{Answer, Given, Request, RequestError, Tiers, unjudged, would};
pub use rows::{CHOICES, Cell, NUMBERS, PLACE, Points, cells, points};
pub use search::{Found, Outcome, Progress, Space, front, search};
pub use step::{Communication, Compute, Memory, Scoped, Shown, Stage, Step};
pub use text::{accelerators, grouped, listed};
pub use timeline::{Sent, Stretch, Work, timeline, traffic};
pub use train::{FabricRates, Fabrics, Job, Plan};
