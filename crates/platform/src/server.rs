//! Hosts by themselves: kinds of memory behind their channels and links, and the ways by which their processes send messages.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Bandwidth, Bytes, Link, Time, TransferRate};

/// Hosts of one kind that have no accelerators.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Server {
    /// How many there are.
    pub count: u32,
    /// Kinds of memory behind each, by name.
    pub tier: BTreeMap<String, Memory>,
    /// Links of each into networks, by name.
    #[serde(default)]
    pub nic: BTreeMap<String, Link>,
    /// How processes of two of them send messages, by name.
    #[serde(default)]
    pub path: BTreeMap<String, Path>,
}

/// A kind of memory behind a host, as it is built.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
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
    pub fitted: FittedMemory,
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
pub struct FittedMemory {
    /// The part of the channels' rate, when it is only read.
    pub reads: f64,
    /// The part of it with writes among the reads.
    pub mixed: f64,
    /// How long the queue before it is busy with one request: no time of a line, but of what goes by in one piece.
    pub service: Time,
}

impl Default for FittedMemory {
    fn default() -> Self {
        Self { reads: 1.0, mixed: 1.0, service: nothing() }
    }
}

/// How a process sends a message to one of another host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Path {
    /// The link or the kind of memory that carries it, by name.
    pub over: String,
    /// What software adds to a message.
    #[serde(default = "nothing")]
    pub message: Time,
    /// Of a message through memory, the writes that are flushed one after another: flags, and the message itself.
    #[serde(default)]
    pub flushes: u32,
    /// Of a message through memory, how often its bytes are copied: once when the receiver finds them in place.
    #[serde(default = "one")]
    pub copies: u32,
    /// Of a message through memory, what goes at once, header included.
    pub cell: Option<Bytes>,
    /// How long a sender of many messages is busy with each, besides its bytes.
    #[serde(default = "nothing")]
    pub gap: Time,
}

impl Memory {
    /// What its channels carry.
    #[must_use]
    pub fn peak(&self) -> Bandwidth {
        Bandwidth::new(self.rate.value() * 8.0 * f64::from(self.channels))
    }

    /// Whether its own numbers can be built: what is wrong otherwise, with the key.
    pub(crate) fn check(&self) -> Result<(), (String, String)> {
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

impl Server {
    /// Whether its parts go together: what is wrong otherwise, with the key.
    pub(crate) fn check(&self) -> Result<(), (String, String)> {
        if self.count == 0 {
            return Err(("count".into(), "expected at least one".into()));
        }
        if self.tier.is_empty() {
            return Err(("tier".into(), "expected at least one kind of memory".into()));
        }
        for (name, memory) in &self.tier {
            check(name, memory)?;
            if memory.hosts == 0 || memory.hosts > self.count {
                let (hosts, count) = (memory.hosts, self.count);
                return Err((format!("tier.{name}.hosts"), format!("expected 1 to {count}, found {hosts}")));
            }
        }
        for (name, link) in &self.nic {
            link.check().map_err(|(key, problem)| (format!("nic.{name}.{key}"), problem))?;
        }
        for (name, path) in &self.path {
            let at = |key: &str| format!("path.{name}.{key}");
            match self.tier.get(&path.over) {
                None if !self.nic.contains_key(&path.over) => {
                    let known: Vec<_> = self.nic.keys().chain(self.tier.keys()).map(String::as_str).collect();
                    let problem = format!("expected one of {}, found {:?}", known.join(", "), path.over);
                    return Err((at("over"), problem));
                }
                Some(memory) if path.flushes > 0 && memory.flushed.is_none() => {
                    let problem = format!("expected a tier {} with the key flushed", path.over);
                    return Err((at("flushes"), problem));
                }
                _ if path.copies == 0 => return Err((at("copies"), "expected at least one".into())),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Whether the kind of memory `name` can be built.
pub(crate) fn check(name: &str, memory: &Memory) -> Result<(), (String, String)> {
    memory.check().map_err(|(key, problem)| (format!("tier.{name}.{key}"), problem))
}
