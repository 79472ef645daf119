//! What single papers have published, and what a machine was measured to take, beside what is predicted of it.

pub mod cmpi;
pub mod coarse;
pub mod cxl;
pub mod cxl_measured;
pub mod cxl_text;
pub mod measured;
pub mod open;
pub mod scalepool;
pub mod scalepool_tiers;
pub mod skeleton;
pub mod toptier;
pub mod vistara;
pub mod vistara_fair;
pub mod vistara_ratio;
pub mod vistara_services;
pub mod vistara_tier;
