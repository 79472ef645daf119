//! Flows over the links of a fabric, each link on its own: routes, fair shares, and when each flow ends.
//!
//! - `network` knows the links of a fabric and the routes over them, without those that failed;
//! - `sharing` shares links among flows, from the first byte to the last;
//! - `flits` follows each flit of a flow;
//! - `transfers` says when messages that begin together end, at each fidelity;
//! - `pattern` says which messages a pattern of traffic is, and what comes of them.
//!
//! `step` counts crossings instead, because the flows of a step of a collective are equal and begin together.

mod flits;
mod network;
mod pattern;
mod sharing;
mod transfers;

pub use flits::{Deadlock, FlitFlow, FlitRun, FlitTiming, follow};
pub(crate) use flits::{Flits, FlowEvent};
pub use network::{Network, NetworkError, Node, Routing};
pub use pattern::{
    FabricAnswer, FabricError, FabricQuestion, FlowTime, LinkUse, Quantiles, TrafficPattern, answer,
};
pub use sharing::{Flow, finish_times};
pub use transfers::{FlitCount, FlitOptions, TransferError, TransferTimes, Transfers};
pub(crate) use transfers::{FlitWork, MOST_FLOWS, check_total_flit_hops, flit_payload};
