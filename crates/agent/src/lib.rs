//! The tiering agent of a host: it carries out the page policies of [`polder_place`] through [`polder_linux`].
//!
//! One [`Agent::round`] looks at every service, decides with [`polder_place::pages::decide`], and acts. The same
//! function serves a simulator, so a recorded run replays to the same decisions.
#![forbid(unsafe_code)]

mod control;
mod policy;

pub use control::{Agent, AgentError, Alarm, Round, ServiceRound};
pub use policy::{Policy, PolicyError, Service};

/// A unit for systemd that runs the agent with the rights that it needs and no others.
pub const UNIT: &str = include_str!("../share/polder-agent.service");
