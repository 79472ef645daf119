//! The meaning of pool bytes.
//!
//! Everything here is written once against [`polder_mem::Memory`] and explored in its incoherent model before it
//! meets a CPU. Whatever another host wrote is copied out first and validated after.
#![forbid(unsafe_code)]

mod barrier;
pub mod channel;
mod chunks;
mod collectives;
mod directory;
pub mod endpoint;
mod entry;
mod error;
mod extents;
pub mod format;
pub mod group;
pub mod hostile;
mod inspect;
mod jobs;
pub mod keeper;
pub mod line;
mod list;
pub mod local;
pub mod membership;
pub mod name;
mod object;
mod objects;
mod opens;
mod pool;
mod private;
mod reclaim;
mod recover;
pub mod ring;
pub mod session;
pub mod settings;
mod site;
pub mod state;
pub mod summary;
pub mod verify;
pub mod view;
pub mod wait;
mod watch;
pub mod window;
pub mod word;

pub use error::{Peer, PoolError};
pub use format::{Geometry, Layout, Overwrite, Superblock, Uuid, format, read_superblock};
pub use inspect::{Found, HostStat, Inspection, Problem, Stat, inspect};
pub use jobs::Swept;
pub use list::Listed;
pub use membership::{Heartbeats, HostLine, HostState, Process, ProcessState};
pub use object::{Fill, Object};
pub use pool::{Member, PeerState, Pool};
pub use private::Private;
pub use view::{Ids, View};
