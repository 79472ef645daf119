//! Machines as data: accelerators, hosts, memory tiers, links, switches, topologies, what they cost, and the units that
//! these are written in. A [`Platform`] is what a file of `data/platforms` says; nothing here knows what a program does on it.
//!
//! ```
//! use polder_platform::Platform;
//!
//! let platform = Platform::load("dgx-a100")?;
//! let rack = &platform.rack["dgx"];
//! assert_eq!(rack.accelerators, 8);
//! assert_eq!(rack.accelerator.memory.capacity.to_string(), "80 GB");
//! # Ok::<(), polder_platform::DataError>(())
//! ```
#![forbid(unsafe_code)]

mod disk;
mod efficiency;
mod fabric;
mod file;
mod foreign;
mod graph;
mod load;
mod machine;
mod offload;
mod prices;
mod server;
mod sharing;
mod simgrid;
mod tier;
mod unit;

pub use disk::{Disk, LocalTier, ThreadRates};
pub use efficiency::{Curve, Efficiency, Reached};
pub use fabric::{Fabric, Link, Packet, Pbr, Protocol, Reduction, Software, Switch, Topology};
pub use file::{
    DataError, Folder, extended, files_of, in_words, names, printable, printable_text, quoted, quoted_words,
    read, recorded_text_of, shell_word, sized, text, text_of, was_read,
};
pub use foreign::{JsonKind, JsonObject, other_json, read_json};
pub use graph::Graph;
pub use machine::{Accelerator, Attach, AttachKind, Compute, Fitted, Host, MemoryNodes, Platform, Rack};
pub use offload::{OffloadRates, ReachedRates};
pub use prices::{Input, LeftOut, Prices, Rates};
pub use server::{MessagePath, Server};
pub use sharing::{Exchange, Sharing};
pub use simgrid::Cluster;
pub use tier::{BuiltTier, FittedTier, MemoryTier, Port, TierId, TierIdError, TierName, TierShare};
pub use unit::{
    Bandwidth, ByteUnit, Bytes, CarbonIntensity, EnergyPrice, FlopRate, Lifetime, Money, OperationUnit,
    Operations, Power, Quantity, Rent, Time, TransferRate, Unit,
};
