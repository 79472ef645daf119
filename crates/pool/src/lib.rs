//! The meaning of pool bytes.
//!
//! Everything here is written once against [`polder_mem::Memory`] and explored in its incoherent model before it
//! meets a CPU. Bytes of another host are copied out first and validated after.
#![forbid(unsafe_code)]

mod allocator;
pub mod channel;
mod collectives;
mod deaths;
mod deviation;
mod directory;
pub mod endpoint;
mod error;
pub mod group;
#[cfg(feature = "hostile")]
pub mod hostile;
mod inspect;
mod jobs;
pub mod keeper;
pub mod kv;
mod layout;
pub mod local;
pub mod membership;
mod object;
mod objects;
mod pieces;
mod pool;
mod purpose;
pub mod ring;
#[cfg(feature = "hostile")]
mod script;
pub mod service;
mod shared;
mod site;
pub mod storage;
#[cfg(any(test, feature = "hostile"))]
#[doc(hidden)]
pub mod testing;
#[cfg(feature = "model")]
pub mod verify;
pub mod wait;
pub mod window;

pub use layout::{format, line, name, word};
pub use local::state;
pub use membership::{claim, view};
pub(crate) use ring::summary;

use allocator::{chunks, extents};
use directory::{entry, list, opens};
use objects::{owned, private};
use wait::watch;

pub use collectives::{Buffers, Operation};
pub use error::{Peer, PoolError};
pub use inspect::{
    EndpointStat, HostStat, Inspection, ObjectStat, PairStat, PairsStat, PoolStat, Problem, inspect,
};
pub use jobs::SweepReport;
pub use layout::contents::expect_vacant;
pub use layout::format::VERSION as FORMAT_VERSION;
pub use layout::format::{Geometry, Layout, Overwrite, Superblock, Uuid, format, format_as, read_superblock};
pub use list::ListedObject;
pub use membership::{HeartbeatMonitor, HostLine, HostState, Process, ProcessState};
pub use object::{InitialContents, Object};
pub use polder_schedule::Collective;
pub use pool::{Member, PeerState, Pool};
pub use private::PrivateMemory;
pub use view::{IdSource, View};
