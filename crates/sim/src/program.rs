//! MPI programs: what each rank computes, sends and waits for, and what that takes over a network.
//!
//! - `collective` turns collective calls into messages;
//! - `replay` follows all ranks at once over the ports of their hosts;
//! - `wires` has the messages between hosts flit by flit;
//! - `trace` reads what a program was seen to do;
//! - `question` follows it over another network;
//! - `chakra` reads the operators of a step of PyTorch, and prices its collective calls as `step` does.

mod chakra;
mod collective;
mod question;
mod replay;
mod trace;
mod wires;

use serde::Serialize;

pub use chakra::{
    CollectiveTime, OperatorRates, OperatorTime, StepCommunication, StepFabric, StepFabricError, StepTrace,
    TracedStep,
};
pub use collective::{Collective, Group};
pub use question::{PredictedProgram, ProgramError, ProgramQuestion};
pub use replay::{Meeting, Network, RankTime, ReplayError, Replayed, SizeFactor, Way, replay, replay_over};
pub use trace::{CallSeconds, MeasuredRank, ProgramTrace, read_trace};
pub use wires::HostLinks;

/// What a rank does next.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    /// Computes for so many seconds.
    Compute {
        /// How long.
        seconds: f64,
    },
    /// Sends a message. The receiver need not wait for it.
    Send {
        /// The rank that it goes to.
        to: u32,
        /// Its length.
        bytes: u64,
        /// What it is told from others by.
        tag: i64,
        /// Whether the rank goes on at once, and by what it waits later; else it goes on once the bytes have left its host.
        request: Option<u32>,
    },
    /// Receives the next message of a rank and tag.
    Receive {
        /// The rank that it comes from.
        from: u32,
        /// What it is told from others by.
        tag: i64,
        /// Whether the rank goes on at once, and by what it waits later.
        request: Option<u32>,
    },
    /// Waits for what was begun with a request.
    Wait {
        /// Which.
        request: u32,
    },
}

/// The request of a send that nothing waits for.
pub const UNWAITED: u32 = u32::MAX;
