//! What steps with offloaded tensors were measured to reach of a host's memory.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::tier::check_rate;
use crate::{Bandwidth, BuiltTier, Bytes, Time};

/// Measured rates of a host that holds a training step's tensors. Those that are left out follow from the host's other numbers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OffloadRates {
    /// The last levels of the CPUs' caches, which a small optimizer step fits into.
    pub cache: Option<Bytes>,
    /// Copies between an accelerator and the host's own memory, each way.
    pub link: Option<Bandwidth>,
    /// What GPUs of the host reach of each other, when each gathers parameters or scatters gradients.
    pub peers: Option<Bandwidth>,
    /// What the CPUs take for an element of an optimizer's step, wherever it lies.
    pub element: Option<Time>,
    /// By kind of memory: `host` for the host's own, or a tier of it by name.
    #[serde(default, rename = "tier")]
    pub tiers: BTreeMap<String, ReachedRates>,
}

/// What was measured of a kind of memory; of one device where a tier has several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReachedRates {
    /// An optimizer's step on the CPU: bytes read and bytes written together.
    pub step: Option<Bandwidth>,
    /// What accelerators together copy out of it.
    pub read: Option<Bandwidth>,
    /// What accelerators together copy into it.
    pub write: Option<Bandwidth>,
}

impl OffloadRates {
    /// Whether it goes with a host that has these tiers of memory beside its own: what is wrong otherwise, with the key.
    pub(crate) fn check(&self, memories: &BTreeMap<String, BuiltTier>) -> Result<(), (String, String)> {
        let rate = |key: String, rate: Option<Bandwidth>| {
            rate.map_or(Ok(()), check_rate).map_err(|problem| (key, problem))
        };
        rate("link".into(), self.link)?;
        rate("peers".into(), self.peers)?;
        for (name, ReachedRates { step, read, write }) in &self.tiers {
            if name != "host" && !memories.contains_key(name) {
                let known: Vec<_> =
                    std::iter::once("host").chain(memories.keys().map(String::as_str)).collect();
                let problem = format!("expected a memory of the host, one of {}", known.join(", "));
                return Err((format!("tier.{name}"), problem));
            }
            for (key, value) in [("step", step), ("read", read), ("write", write)] {
                rate(format!("tier.{name}.{key}"), *value)?;
            }
        }
        Ok(())
    }
}
