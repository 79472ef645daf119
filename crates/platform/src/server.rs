//! Hosts by themselves: kinds of memory behind their channels and links, and the ways by which their processes send messages.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{BuiltTier, Bytes, Link, Time, quoted};

/// Hosts of one kind that have no accelerators.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Server {
    /// How many there are.
    pub count: u32,
    /// Tiers behind each, by name.
    #[serde(rename = "tier")]
    pub tiers: BTreeMap<String, BuiltTier>,
    /// Links of each into networks, by name.
    #[serde(default)]
    pub nic: BTreeMap<String, Link>,
    /// How processes of two of them send messages, by name.
    #[serde(default)]
    pub path: BTreeMap<String, MessagePath>,
}

const fn one() -> u32 {
    1
}

const fn nothing() -> Time {
    Time::new(0.0)
}

/// How a process sends a message to one of another host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MessagePath {
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

impl Server {
    /// Whether its parts go together: what is wrong otherwise, with the key.
    pub(crate) fn check(&self) -> Result<(), (String, String)> {
        if self.count == 0 {
            return Err(("count".into(), "expected at least one".into()));
        }
        if self.tiers.is_empty() {
            return Err(("tier".into(), "expected at least one kind of memory".into()));
        }
        for (name, memory) in &self.tiers {
            memory.check_at(name)?;
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
            match self.tiers.get(&path.over) {
                None if !self.nic.contains_key(&path.over) => {
                    let known: Vec<_> =
                        self.nic.keys().chain(self.tiers.keys()).map(String::as_str).collect();
                    let problem =
                        format!("expected one of {}, found \"{}\"", known.join(", "), quoted(&path.over));
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
