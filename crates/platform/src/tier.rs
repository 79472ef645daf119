//! Tiers of memory: how much there is, how fast it is, and how late under load; and what each of several that share one gets.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Bandwidth, Bytes, Link, Time, TransferRate, quoted};

/// Which tier beyond the accelerator's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum TierId {
    /// The host's own.
    #[default]
    Host,
    /// The pool's.
    Pool,
    /// Another kind behind the host, by its name.
    Named(TierName),
}

/// The name of a tier, filled up with zeros so that a layout is plain bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TierName([u8; Self::MOST]);

/// Why a text names no tier.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected host, pool or the name of a tier of the host, 1 to {} bytes without a zero, found \"{}\"",
    TierName::MOST,
    quoted(found)
)]
pub struct TierIdError {
    found: String,
}

impl TierName {
    const MOST: usize = 24;

    /// The name, unless it is empty, too long or holds a zero.
    #[must_use]
    pub fn new(name: &str) -> Option<Self> {
        let mut bytes = [0; Self::MOST];
        bytes.get_mut(..name.len())?.copy_from_slice(name.as_bytes());
        (!name.is_empty() && !name.contains('\0')).then_some(Self(bytes))
    }
}

impl fmt::Display for TierName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.0.split(|byte| *byte == 0).next().unwrap_or_default();
        f.write_str(&String::from_utf8_lossy(name))
    }
}

impl fmt::Debug for TierName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.to_string())
    }
}

impl FromStr for TierId {
    type Err = TierIdError;

    fn from_str(name: &str) -> Result<Self, TierIdError> {
        match name {
            "host" => Ok(Self::Host),
            "pool" => Ok(Self::Pool),
            _ => TierName::new(name).map(Self::Named).ok_or_else(|| TierIdError { found: name.into() }),
        }
    }
}

impl fmt::Display for TierId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Pool => f.write_str("pool"),
            Self::Named(name) => name.fmt(f),
        }
    }
}

impl TryFrom<String> for TierId {
    type Error = TierIdError;

    fn try_from(name: String) -> Result<Self, TierIdError> {
        name.parse()
    }
}

impl From<TierId> for String {
    fn from(id: TierId) -> Self {
        id.to_string()
    }
}

/// A tier of memory, by the rates that are given of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryTier {
    /// How much.
    pub capacity: Bytes,
    /// Reading.
    pub read: Bandwidth,
    /// Writing.
    pub write: Bandwidth,
    /// Idle.
    pub latency: Time,
}

/// A tier of memory as it is built: its rates follow from channels and links.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BuiltTier {
    /// How much.
    pub capacity: Bytes,
    /// Channels of DRAM, of all devices together.
    pub channels: u32,
    /// Transfers a second of a channel, each of 8 bytes.
    pub rate: TransferRate,
    /// From a load to its value while nothing else goes on, as if the channels were the host's own.
    pub latency: Time,
    /// Hosts that share it, each by a port of its own.
    #[serde(default = "one")]
    pub hosts: u32,
    /// How a host reaches it, when the channels are not its own.
    pub port: Option<Port>,
    /// A line that is written and flushed, until that is known, where hosts share it without coherence.
    pub flushed: Option<Time>,
    /// What no data sheet has.
    #[serde(default)]
    pub fitted: FittedTier,
}

const fn one() -> u32 {
    1
}

const fn nothing() -> Time {
    Time::new(0.0)
}

/// How a host reaches memory on other devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Port {
    /// Links, each of one device, that lines are spread over.
    pub links: u32,
    /// One of them. Its packet is what a line travels as; what has no line is as long as the packet's header.
    pub link: Link,
    /// What controllers and physical layers at both ends add to a load, there and back.
    pub latency: Time,
    /// The latencies of the switches on the way.
    #[serde(default)]
    pub hops: Vec<Time>,
    /// The part of the links that the devices reach.
    #[serde(default = "whole")]
    pub reached: f64,
}

const fn whole() -> f64 {
    1.0
}

/// What a kind of memory reaches of its channels, fitted to what was published of it, see `polder plan validate`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FittedTier {
    /// The part of the channels' rate, when it is only read.
    pub reads: f64,
    /// The part of it with writes among the reads.
    pub mixed: f64,
    /// How long the queue before it is busy with one request: no time of a line, but of what goes by in one piece.
    pub service: Time,
}

impl Default for FittedTier {
    fn default() -> Self {
        Self { reads: 1.0, mixed: 1.0, service: nothing() }
    }
}

/// What one of several that share a tier gets of it, in bytes, seconds and bytes a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TierShare {
    /// Reading alone.
    pub read: f64,
    /// Writing alone.
    pub write: f64,
    /// Each way, when as much is read as written.
    pub both: f64,
    /// Until a transfer begins. Where a file gives bandwidths alone it is in them, and 0 here.
    pub latency: f64,
    /// What it can hold.
    pub capacity: f64,
}

impl BuiltTier {
    /// What its channels carry.
    #[must_use]
    pub fn peak(&self) -> Bandwidth {
        Bandwidth::new(self.rate.value() * 8.0 * f64::from(self.channels))
    }

    /// Bytes a second that one host gets of it, `reads` of them read and the others written: the lower of two roofs, what its
    /// channels reach and what lines leave of the links.
    #[must_use]
    pub fn bandwidth(&self, reads: f64) -> f64 {
        self.channel_bandwidth(reads).min(self.port_bandwidth(reads))
    }

    /// Bytes a second of its channels, for all hosts together.
    #[must_use]
    pub fn channel_bandwidth(&self, reads: f64) -> f64 {
        let part = if reads == 1.0 { self.fitted.reads } else { self.fitted.mixed };
        self.peak().value() * part
    }

    /// Bytes a second through one host's links; no bound when the channels are its own.
    #[must_use]
    pub fn port_bandwidth(&self, reads: f64) -> f64 {
        self.port.as_ref().map_or(f64::INFINITY, |port| {
            port.link.lines(reads).value() * f64::from(port.links) * port.reached
        })
    }

    /// Seconds from a load to its value while nothing else goes on: the memory, the controllers of its port, the switches and the
    /// wires there and back.
    #[must_use]
    pub fn idle_latency(&self) -> f64 {
        let way = self.port.as_ref().map_or(0.0, |port| {
            let wires = port.link.propagation.value() * (port.hops.len() + 1) as f64;
            let switches: f64 = port.hops.iter().copied().map(Time::value).sum();
            port.latency.value() + 2.0 * (wires + switches)
        });
        self.latency.value() + way
    }

    /// Seconds from a load to its value at this part of the channels' peak: a queue of random arrivals and constant service before
    /// it (M/D/1: T + S u / (2 (1 - u))).
    #[must_use]
    pub fn loaded_latency(&self, utilisation: f64) -> f64 {
        self.idle_latency() + self.fitted.service.value() * utilisation / (2.0 * (1.0 - utilisation))
    }

    /// One of so many parts of what a host has of it, through a link of `roof` bytes a second each way.
    #[must_use]
    pub fn share(&self, parts: f64, roof: f64) -> TierShare {
        let hosts = f64::from(self.hosts);
        let at = |reads| (self.channel_bandwidth(reads) / hosts).min(self.port_bandwidth(reads)) / parts;
        TierShare {
            read: roof.min(at(1.0)),
            write: roof.min(at(0.0)),
            both: roof.min(at(0.5) / 2.0),
            latency: self.idle_latency(),
            capacity: self.capacity.value() / hosts / parts,
        }
    }

    /// Whether the tier `name` can be built: what is wrong otherwise, with the key.
    pub(crate) fn check_at(&self, name: &str) -> Result<(), (String, String)> {
        self.check().map_err(|(key, problem)| (format!("tier.{name}.{key}"), problem))
    }

    fn check(&self) -> Result<(), (String, String)> {
        let part = |key: &str, value: f64| match value > 0.0 && value <= 1.0 {
            true => Ok(()),
            false => Err((key.to_owned(), format!("expected a part from 0 to 1, found {value}"))),
        };
        if self.channels == 0 {
            return Err(("channels".into(), "expected at least one".into()));
        }
        part("fitted.reads", self.fitted.reads)?;
        part("fitted.mixed", self.fitted.mixed)?;
        let Some(port) = &self.port else {
            return match self.hosts {
                1 => Ok(()),
                hosts => Err(("port".into(), format!("expected how {hosts} hosts reach it"))),
            };
        };
        if port.links == 0 {
            return Err(("port.links".into(), "expected at least one".into()));
        }
        part("port.reached", port.reached)?;
        port.link.check().map_err(|(key, problem)| (format!("port.link.{key}"), problem))
    }
}

/// Bytes a second, at least: what is slower is a unit that was mistyped.
const SLOWEST: f64 = 1e6;

/// Whether memory or a link can be as slow as this: what is wrong otherwise.
pub(crate) fn check_rate(rate: Bandwidth) -> Result<(), String> {
    match rate.value() < SLOWEST {
        true => Err(format!("expected 1 MB/s or more, found {rate}")),
        false => Ok(()),
    }
}

impl MemoryTier {
    /// One of so many parts of it, through a link of `roof` bytes a second each way.
    #[must_use]
    pub fn share(&self, parts: f64, roof: f64) -> TierShare {
        let [read, write] = [self.read, self.write].map(|rate| rate.value() / parts);
        // Each way of the link is its own; the memory does one thing at a time.
        let both = roof.min(1.0 / (1.0 / read + 1.0 / write));
        let [read, write] = [read, write].map(|rate| rate.min(roof));
        TierShare { read, write, both, latency: 0.0, capacity: self.capacity.value() / parts }
    }

    /// Whether it can be as slow: what is wrong otherwise, with the key.
    pub(crate) fn check(&self) -> Result<(), (&'static str, String)> {
        check_rate(self.read).map_err(|said| ("read", said))?;
        check_rate(self.write).map_err(|said| ("write", said))
    }
}
