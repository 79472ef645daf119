//! Kinds of memory behind a host: how fast they are, and how late under load.

use polder_platform::{Memory, Time};

/// Bytes a second that one host gets of it, `reads` of them read and the others written: the lower of two roofs, what its channels reach and
/// what lines leave of the links.
#[must_use]
pub fn bandwidth(memory: &Memory, reads: f64) -> f64 {
    channels(memory, reads).min(port(memory, reads))
}

/// Bytes a second of its channels, for all hosts together.
pub(crate) fn channels(memory: &Memory, reads: f64) -> f64 {
    let part = if reads == 1.0 { memory.fitted.reads } else { memory.fitted.mixed };
    memory.peak().value() * part
}

/// Bytes a second through one host's links; no bound when the channels are its own.
pub(crate) fn port(memory: &Memory, reads: f64) -> f64 {
    memory
        .port
        .as_ref()
        .map_or(f64::INFINITY, |port| port.link.lines(reads).value() * f64::from(port.links) * port.reached)
}

/// Seconds from a load to its value while nothing else goes on: the memory, the controllers of its port, the switches and the wires there
/// and back.
#[must_use]
pub fn idle(memory: &Memory) -> f64 {
    let way = memory.port.as_ref().map_or(0.0, |port| {
        let wires = port.link.propagation.value() * (port.hops.len() + 1) as f64;
        let switches: f64 = port.hops.iter().copied().map(Time::value).sum();
        port.latency.value() + 2.0 * (wires + switches)
    });
    memory.latency.value() + way
}

/// Seconds from a load to its value at this part of the channels' peak: a queue of random arrivals and constant service before it (M/D/1:
/// T + S u / 2 (1 - u)).
#[must_use]
pub fn loaded(memory: &Memory, utilisation: f64) -> f64 {
    idle(memory) + memory.fitted.service.value() * utilisation / (2.0 * (1.0 - utilisation))
}
