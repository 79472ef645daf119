//! The tiering agent of a host: it carries out the page policies of [`polder_place`] through [`polder_linux`].
//!
//! One [`Agent::round`] looks at every service, decides with [`polder_place::pages::decide`], and acts. The same
//! function serves a simulator, so a recorded run replays to the same decisions.
#![forbid(unsafe_code)]

mod cause;
mod control;
mod endpoint;
mod example;
mod forecast;
mod goals;
mod health;
mod host;
mod known;
mod name;
mod pods;
mod policy;
mod record;
mod report;
mod state;
mod telemetry;

pub use control::{Agent, AgentError};
pub use endpoint::{Text, listen};
pub use example::{ExampleService, keep_to_fast, write_example, write_host, write_host_with_pages};
pub use forecast::{Forecast, forecast};
pub use goals::contradictions;
pub use name::Name;
pub use polder_place::pages::{Link, Past, RecordedRound, TierRule, replay};
pub use policy::{
    BadMemory, FairShare, HealthPolicy, Kubernetes, Lines, Place, Policy, PolicyError, Selector, Service,
    Weights,
};
pub use record::read_record;
pub use report::{Alarm, Cause, DeviceHealth, Round, ServiceRound};
pub use state::State;
pub use telemetry::Metrics;

/// A unit for systemd that runs the agent with the rights that it needs and no others.
pub const UNIT: &str = include_str!("../share/polder-agent.service");

/// A dashboard for Grafana over the metrics of [`Metrics`].
pub const DASHBOARD: &str = include_str!("../share/grafana.json");

/// Objects for Kubernetes: a policy, and a DaemonSet that carries it out on each labelled node.
pub const DAEMONSET: &str = include_str!("../share/daemonset.yaml");
