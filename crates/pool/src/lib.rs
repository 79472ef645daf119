//! The meaning of pool bytes.
//!
//! Everything here is written once against [`polder_mem::Memory`] and explored in its incoherent model before it
//! meets a CPU. Whatever another host wrote is copied out first and validated after.
#![forbid(unsafe_code)]

mod barrier;
mod collectives;
mod error;
pub mod format;
pub mod group;
pub mod keeper;
pub mod line;
pub mod local;
pub mod membership;
mod pool;
pub mod ring;
pub mod session;
pub mod settings;
pub mod summary;
pub mod verify;
pub mod view;
pub mod wait;
pub mod word;

pub use error::{Peer, PoolError};
pub use format::{Geometry, Layout, Overwrite, Superblock, Uuid, format, read_superblock};
pub use membership::{Heartbeats, HostLine, HostState, Process, ProcessState};
pub use pool::{Member, PeerState, Pool};
pub use view::{Ids, View};
