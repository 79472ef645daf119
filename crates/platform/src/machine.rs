//! Racks of accelerators with their hosts, and what joins the racks.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::tier::check_rate;
use crate::{
    Bandwidth, BuiltTier, Disk, Efficiency, Fabric, FlopRate, LocalTier, MemoryTier, OffloadRates, Protocol,
    Server, Sharing, TierId, TierName, TierShare, Time, TransferRate, file,
};

/// A machine: racks of accelerators, a fabric between the racks, and perhaps a memory pool on that fabric.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Platform {
    /// What it is, in a line.
    #[serde(deserialize_with = "file::printable_text")]
    pub title: String,
    /// Where its numbers come from.
    #[serde(deserialize_with = "file::printable_text")]
    pub source: String,
    /// The kinds of rack that it has, by name. A rack is a scale-up domain: what its own fabric joins in one hop.
    #[serde(default)]
    pub rack: BTreeMap<String, Rack>,
    /// What joins racks.
    pub between: Option<Fabric>,
    /// Memory nodes on the fabric between the racks.
    pub pool: Option<MemoryNodes>,
    /// Storage on it, of which software copies what is read. No training step goes through it.
    pub storage: Option<MemoryNodes>,
    /// What ranks pay that exchange bytes by copying them.
    pub sharing: Option<Sharing>,
    /// Kinds of host without accelerators, by name.
    #[serde(default)]
    pub server: BTreeMap<String, Server>,
    /// Memory of this machine that objects can be placed in, by name; `dram` is the host's own.
    #[serde(default, rename = "tier")]
    pub local_tiers: BTreeMap<String, LocalTier>,
    /// Folders on disks that objects can be placed in, by name.
    #[serde(default)]
    pub disk: BTreeMap<String, Disk>,
}

/// A scale-up domain.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rack {
    /// Accelerators in it.
    pub accelerators: u32,
    /// What each is.
    pub accelerator: Accelerator,
    /// What joins them.
    pub fabric: Option<Fabric>,
    /// CXL that joins them too, for loads of each other's memory. No training step goes through it.
    pub coherent: Option<Fabric>,
    /// The host that feeds them.
    pub host: Host,
}

/// What computes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Accelerator {
    /// What it is sold as.
    pub name: String,
    /// Dense peaks.
    pub compute: Compute,
    /// Its own memory.
    pub memory: MemoryTier,
    /// The constants of its software and silicon that no data sheet has.
    pub fitted: Fitted,
    /// What of them was measured by size.
    #[serde(default)]
    pub efficiency: Efficiency,
}

/// Peak rates by data type, without sparsity.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compute {
    /// 16-bit brain floats, or halves.
    pub bf16: Option<FlopRate>,
    /// 8-bit floats.
    pub fp8: Option<FlopRate>,
    /// 32-bit floats.
    pub fp32: Option<FlopRate>,
}

/// Eight constants an accelerator that are fitted to published steps, see `polder plan validate`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fitted {
    /// The part of the peak that a large matrix product reaches.
    pub matrix: f64,
    /// Start and end of a matrix product's pipeline, as so many steps of its inner dimension.
    pub depth: f64,
    /// The part of the peak that fused attention reaches.
    pub attention: f64,
    /// The part of the memory's bandwidth that element-wise kernels reach.
    pub stream: f64,
    /// From one kernel to the next.
    pub launch: Time,
    /// The part of a rack's links that collectives reach.
    pub inside: f64,
    /// The part of the links between racks that collectives reach.
    pub between: f64,
    /// How far the slowest of many lags behind, for each doubling of the accelerators, as a part of the step.
    pub straggle: f64,
}

/// A host that feeds accelerators.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Accelerators that share one host's memory.
    pub accelerators: u32,
    /// Its memory.
    pub memory: MemoryTier,
    /// How each of its accelerators reaches it.
    pub attach: Attach,
    /// Tiers behind it besides its own memory, by name.
    #[serde(default, rename = "tier")]
    pub tiers: BTreeMap<String, BuiltTier>,
    /// What steps with offloaded tensors were measured to reach of them.
    pub offload: Option<OffloadRates>,
}

/// How an accelerator reaches its host.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attach {
    /// By what, where it is given: it changes no figure of a step, but only behind a switch may several share a link, and by PCIe software
    /// copies what C2C and UCIe let accelerators load.
    pub kind: Option<AttachKind>,
    /// Of one link, in each direction.
    pub bandwidth: Bandwidth,
    /// Accelerators behind one link from a switch to the host.
    #[serde(default = "one")]
    pub accelerators: u32,
}

const fn one() -> u32 {
    1
}

impl Attach {
    /// What each accelerator has of it while all move bytes.
    #[must_use]
    pub fn each(&self) -> Bandwidth {
        Bandwidth::new(self.bandwidth.value() / f64::from(self.accelerators))
    }
}

/// How CPUs attach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AttachKind {
    /// A link between two chips, as NVLink-C2C.
    C2c,
    /// Through a switch of PCIe.
    PcieSwitch,
    /// By PCIe, with nothing between.
    Pcie,
    /// On one package.
    Ucie,
}

impl AttachKind {
    /// As files have it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::C2c => "c2c",
            Self::PcieSwitch => "pcie-switch",
            Self::Pcie => "pcie",
            Self::Ucie => "ucie",
        }
    }
}

/// Memory nodes on a CXL fabric.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryNodes {
    /// Accelerators that share one node.
    pub accelerators: u32,
    /// One node's memory. Its latency is that of a load with the controllers at both ends, and with no switch on the way.
    pub memory: MemoryTier,
    /// Ports of a node into the fabric, each of the fabric's link.
    pub ports: u32,
}

impl MemoryNodes {
    /// What an accelerator has of them over this fabric.
    #[must_use]
    pub fn share(&self, between: &Fabric) -> TierShare {
        let parts = f64::from(self.accelerators);
        let ports = between.link.payload().value() * f64::from(self.ports) / parts;
        let roof = (between.payload().value() * between.carried()[1]).min(ports);
        self.memory.share(parts, roof)
    }

    fn check(&self, name: &str, between: Option<&Fabric>) -> Result<(), (String, String)> {
        if between.is_none() {
            return Err((name.into(), "expected a fabric between the racks that it hangs on".into()));
        }
        if self.accelerators == 0 || self.ports == 0 {
            return Err((name.into(), "expected at least one port, and one accelerator to a node".into()));
        }
        self.memory.check().map_err(|(key, problem)| (format!("{name}.memory.{key}"), problem))
    }
}

impl Platform {
    /// The tier of this name, behind the first kind of server or host that has one.
    #[must_use]
    pub fn tier(&self, name: &str) -> Option<&BuiltTier> {
        let servers = self.server.values().map(|server| &server.tiers);
        servers.chain(self.rack.values().map(|rack| &rack.host.tiers)).find_map(|tiers| tiers.get(name))
    }

    /// Every tier beyond an accelerator's own memory, with the share of it that each accelerator of `rack` has.
    #[must_use]
    pub fn tiers(&self, rack: &Rack) -> Vec<(TierId, TierShare)> {
        let host = &rack.host;
        let (parts, roof) = (f64::from(host.accelerators), host.attach.each().value());
        let own = (TierId::Host, host.memory.share(parts, roof));
        let pool = self
            .pool
            .as_ref()
            .zip(self.between.as_ref())
            .map(|(pool, between)| (TierId::Pool, pool.share(between)));
        let named = host
            .tiers
            .iter()
            .filter_map(|(name, tier)| Some((TierId::Named(TierName::new(name)?), tier.share(parts, roof))));
        std::iter::once(own).chain(pool).chain(named).collect()
    }

    /// The same with a fabric between racks that gives an accelerator this payload in each direction: its lanes are as much faster. `None`
    /// where no fabric joins racks.
    #[must_use]
    pub fn with_between(&self, payload: Bandwidth) -> Option<Self> {
        let mut platform = self.clone();
        let fabric = platform.between.as_mut()?;
        let times = payload.value() / fabric.payload().value();
        fabric.link.rate = TransferRate::new(fabric.link.rate.value() * times);
        Some(platform)
    }

    /// The same with memory nodes that an accelerator of their share reads as fast, and writes as much faster; ports do not limit them, an
    /// accelerator's own link does. `None` where there are no memory nodes.
    #[must_use]
    pub fn with_pool(&self, read: Bandwidth) -> Option<Self> {
        let mut platform = self.clone();
        let nodes = platform.pool.as_mut()?;
        let times = read.value() * f64::from(nodes.accelerators) / nodes.memory.read.value();
        for rate in [&mut nodes.memory.read, &mut nodes.memory.write] {
            *rate = Bandwidth::new(rate.value() * times);
        }
        let links = platform.between.as_ref().map_or(1, |fabric| fabric.links);
        nodes.ports = nodes.ports.max(nodes.accelerators.saturating_mul(links));
        Some(platform)
    }

    /// The first name that no table could print, with the key of where it stands.
    fn check_names(&self) -> Result<(), (String, String)> {
        let racks = self.rack.iter().flat_map(|(name, rack)| {
            let own = [
                ("rack".to_owned(), name),
                (format!("rack.{name}.accelerator.name"), &rack.accelerator.name),
            ];
            own.into_iter()
                .chain(rack.host.tiers.keys().map(move |tier| (format!("rack.{name}.host.tier"), tier)))
        });
        let servers = self.server.iter().flat_map(|(name, server)| {
            let at = move |part: &str| format!("server.{name}.{part}");
            let tiers = server.tiers.keys().map(move |tier| (at("tier"), tier));
            let nics = server.nic.keys().map(move |nic| (at("nic"), nic));
            let paths = server.path.keys().map(move |path| (at("path"), path));
            std::iter::once(("server".to_owned(), name)).chain(tiers).chain(nics).chain(paths)
        });
        let exchanges = self.sharing.iter().flat_map(|it| it.exchange.keys());
        let exchanges = exchanges.map(|name| ("sharing.exchange".to_owned(), name));
        let local = self.local_tiers.keys().map(|name| ("tier".to_owned(), name));
        racks
            .chain(servers)
            .chain(exchanges)
            .chain(local)
            .try_for_each(|(key, name)| file::check_name(name).map_err(|problem| (key, problem)))
    }

    /// Whether its parts go together: what is wrong otherwise, with the key.
    pub(crate) fn check(&self) -> Result<(), (String, String)> {
        self.check_names()?;
        if self.rack.is_empty() && self.server.is_empty() && self.sharing.is_none() {
            return Err(("rack".into(), "expected at least one kind of rack, or a kind of server".into()));
        }
        for (name, server) in &self.server {
            server.check().map_err(|(key, problem)| (format!("server.{name}.{key}"), problem))?;
        }
        for (name, rack) in &self.rack {
            rack.check().map_err(|(key, problem)| (format!("rack.{name}.{key}"), problem))?;
        }
        if let Some(sharing) = &self.sharing {
            sharing.check().map_err(|(key, problem)| (format!("sharing.{key}"), problem))?;
        }
        if let Some(between) = &self.between {
            between.check().map_err(|(key, problem)| (format!("between.{key}"), problem))?;
        }
        for (name, tier) in &self.local_tiers {
            tier.check().map_err(|(key, problem)| (format!("tier.{name}.{key}"), problem))?;
        }
        self.check_pool()
    }

    fn check_pool(&self) -> Result<(), (String, String)> {
        let between = self.between.as_ref();
        if let Some(storage) = &self.storage {
            storage.check("storage", between)?;
        }
        let Some(pool) = &self.pool else { return Ok(()) };
        pool.check("pool", between)?;
        let carries = between.map_or(&[][..], |it| &it.carries);
        match carries.iter().any(|it| matches!(it, Protocol::Mem | Protocol::Io)) {
            true => Ok(()),
            false => {
                let problem =
                    "expected \"mem\", by which a memory pool is loaded, or \"io\", by which it is copied";
                Err(("between.carries".into(), problem.into()))
            }
        }
    }
}

impl Rack {
    /// Whether its parts go together: what is wrong otherwise, with the key.
    fn check(&self) -> Result<(), (String, String)> {
        if self.accelerators == 0 || self.host.accelerators == 0 {
            return Err(("accelerators".into(), "expected at least one".into()));
        }
        self.accelerator.check().map_err(|(key, problem)| (format!("accelerator.{key}"), problem))?;
        self.host.check().map_err(|(key, problem)| (format!("host.{key}"), problem))?;
        if let Some(coherent) = &self.coherent {
            self.check_joined("coherent", coherent)?;
            if !coherent.carries.contains(&Protocol::Cache) {
                let problem = "expected \"cache\", by which accelerators load each other's memory";
                return Err(("coherent.carries".into(), problem.into()));
            }
        }
        let Some(fabric) = &self.fabric else {
            return match self.accelerators {
                1 => Ok(()),
                count => Err(("fabric".into(), format!("expected what joins {count} accelerators"))),
            };
        };
        self.check_joined("fabric", fabric)
    }

    /// Whether `fabric`, at this key, has a port for each link of each accelerator.
    fn check_joined(&self, name: &str, fabric: &Fabric) -> Result<(), (String, String)> {
        fabric.check().map_err(|(key, problem)| (format!("{name}.{key}"), problem))?;
        let (count, links, has) = (self.accelerators, fabric.links, fabric.ports());
        let needed = u64::from(count) * u64::from(links);
        match has < needed {
            true => {
                let problem = format!(
                    "{count} accelerators with {links} links need {needed} ports, the topology has {has}"
                );
                Err((format!("{name}.topology"), problem))
            }
            false => Ok(()),
        }
    }
}

impl Accelerator {
    fn check(&self) -> Result<(), (String, String)> {
        let Compute { bf16, fp8, fp32 } = self.compute;
        if bf16.or(fp8).or(fp32).is_none() {
            return Err(("compute".into(), "expected a rate of bf16, fp8 or fp32".into()));
        }
        self.memory.check().map_err(|(key, problem)| (format!("memory.{key}"), problem))?;
        self.fitted.check().map_err(|(key, problem)| (format!("fitted.{key}"), problem))
    }
}

impl Host {
    fn check(&self) -> Result<(), (String, String)> {
        self.memory.check().map_err(|(key, problem)| (format!("memory.{key}"), problem))?;
        let Attach { kind, bandwidth, accelerators } = self.attach;
        check_rate(bandwidth).map_err(|problem| ("attach.bandwidth".into(), problem))?;
        if accelerators != 1 && (accelerators == 0 || kind != Some(AttachKind::PcieSwitch)) {
            let problem =
                format!("expected 1, or those behind a link of a \"pcie-switch\", found {accelerators}");
            return Err(("attach.accelerators".into(), problem));
        }
        for (name, tier) in &self.tiers {
            if ["host", "pool"].contains(&name.as_str()) {
                let problem = "expected another name: these are the host's own memory and the pool";
                return Err((format!("tier.{name}"), problem.into()));
            }
            if tier.hosts == 0 {
                return Err((format!("tier.{name}.hosts"), "expected at least one".into()));
            }
            tier.check_at(name)?;
        }
        let offload = self.offload.as_ref().map_or(Ok(()), |offload| offload.check(&self.tiers));
        offload.map_err(|(key, problem)| (format!("offload.{key}"), problem))
    }
}

impl Fitted {
    /// The names of the constants, in order.
    pub const NAMES: [&str; 8] =
        ["matrix", "depth", "attention", "stream", "launch", "inside", "between", "straggle"];

    /// The constants in the order of [`Fitted::NAMES`]; times in seconds.
    #[must_use]
    pub fn values(&self) -> [f64; 8] {
        let Self { matrix, depth, attention, stream, launch, inside, between, straggle } = *self;
        [matrix, depth, attention, stream, launch.value(), inside, between, straggle]
    }

    /// The constants from their values.
    #[must_use]
    pub const fn from_values(values: [f64; 8]) -> Self {
        let [matrix, depth, attention, stream, launch, inside, between, straggle] = values;
        Self { matrix, depth, attention, stream, launch: Time::new(launch), inside, between, straggle }
    }

    fn check(&self) -> Result<(), (&'static str, String)> {
        for (name, value) in Self::NAMES.into_iter().zip(self.values()) {
            let (expected, fits) = match name {
                // No matrix product has a longer inner dimension, and no kernel takes longer to start.
                "depth" => ("number from 0 to 1000000", (0.0..=1e6).contains(&value)),
                "launch" => ("time from 0 to 1 s", (0.0..=1.0).contains(&value)),
                "straggle" => ("part from 0 to 1", (0.0..=1.0).contains(&value)),
                _ => ("part from 0 to 1", value > 0.0 && value <= 1.0),
            };
            if !fits {
                return Err((name, format!("expected a {expected}, found {value}")));
            }
        }
        Ok(())
    }
}
