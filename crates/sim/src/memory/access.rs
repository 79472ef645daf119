//! What an access takes, part by part.

use polder_platform::{Fabric, Time};
use serde::Serialize;

/// Bytes that a load moves at least.
pub const LINE: f64 = 64.0;

/// How bytes are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum How {
    /// In the accelerator's own memory.
    Own,
    /// By loads, all lines of an access at once.
    Load,
    /// Software copies them.
    Copy,
}

/// Seconds of an access, there and back, and the bytes a second that its data come at while all accelerators do the same.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Access {
    /// How.
    pub how: How,
    /// What software adds.
    pub software_s: f64,
    /// Controllers and physical layers at both ends.
    pub controllers_s: f64,
    /// Switches, there and back.
    pub switches_s: f64,
    /// Wires, there and back.
    pub wires_s: f64,
    /// The memory itself.
    pub memory_s: f64,
    /// The rate of the data.
    pub bytes_per_s: f64,
}

/// A way over a fabric, through so many switches.
#[derive(Clone, Copy)]
pub(super) struct Way<'a> {
    pub(super) fabric: &'a Fabric,
    pub(super) switches: f64,
}

impl<'a> Way<'a> {
    /// As far as two ports are from each other.
    pub(super) fn far(fabric: &'a Fabric) -> Self {
        Self { fabric, switches: fabric.hops() }
    }
}

impl Access {
    /// Nothing but the data.
    pub(super) const fn at(bytes_per_s: f64) -> Self {
        let [software_s, controllers_s, switches_s, wires_s, memory_s] = [0.0; 5];
        Self { how: How::Own, software_s, controllers_s, switches_s, wires_s, memory_s, bytes_per_s }
    }

    /// One way there, another back; what both ends take is that of the way there.
    pub(super) fn over(ways: [Way<'_>; 2], how: How, memory_s: f64, bytes_per_s: f64) -> Self {
        let there = ways[0].fabric;
        let wires = ways.map(|it| (it.switches + 1.0) * it.fabric.link.propagation.value());
        let switches = ways.map(|it| it.switches * it.fabric.switch.latency.value());
        Self {
            how,
            // Hardware loads; a copy is a message.
            software_s: if how == How::Copy { there.software.message.value() } else { 0.0 },
            controllers_s: there.controllers.map_or(0.0, Time::value),
            switches_s: switches.iter().sum(),
            wires_s: wires.iter().sum(),
            memory_s,
            bytes_per_s,
        }
    }

    /// Seconds of an access to so many bytes, to the last of them.
    #[must_use]
    pub fn seconds(&self, bytes: f64) -> f64 {
        let moved = if self.how == How::Copy { bytes } else { (bytes / LINE).ceil() * LINE };
        self.idle() + moved / self.bytes_per_s
    }

    /// Seconds of it before the first of its data.
    #[must_use]
    pub fn idle(&self) -> f64 {
        let Self { software_s, controllers_s, switches_s, wires_s, memory_s, .. } = self;
        software_s + controllers_s + switches_s + wires_s + memory_s
    }
}
