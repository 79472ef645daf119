//! Time of an access to memory by the size of the working set: which memories of a cluster it takes, and what a load or a copy takes in
//! each. All of it follows from a platform's links, switches, protocols and memory nodes.

mod access;
mod answer;
mod coherence;
mod curve;
mod holders;
mod inference;
mod region;

pub use access::{Access, How, LINE};
pub use answer::{Curves, Pays, Point, curves, landmarks};
pub use coherence::{CoherentRack, RegionQuestion, RegionTimes};
pub use curve::{PAYS, Span, met, pays_from, ratio, ratios};
pub use inference::{
    CONTEXT, Inference, InferenceKind, InferenceLoad, InferenceQuestion, InferenceRow, InferenceStep,
    InferenceTier, MODEL, SET_BYTES, kv_bytes,
};
pub use region::{RegionLoad, RegionRates};

use self::access::Way;
use self::holders::Holders;
use polder_platform::{AttachKind, Bytes, DataError, Fabric, Platform, Protocol, Rack, TierId};
use serde::{Deserialize, Serialize};

use crate::contention::TransferError;
use crate::given::GivenError;
use crate::step::job::Job;
use crate::step::layout::Refusal;

/// Racks that there are where nobody says how many accelerators.
const RACKS: u32 = 16;

/// How far memory nodes are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Nodes {
    /// On the switch that the accelerator's own link leads to.
    Near,
    /// As far as two ports of the fabric are from each other.
    #[default]
    Far,
}

/// How accelerators reach each other's memory over a fabric that keeps nothing coherent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Inside {
    /// Software copies what is needed, and keeps the copies in step.
    #[default]
    Copy,
    /// By loads, of which no cache keeps the result.
    Load,
}

/// What a load of a memory node takes, without a switch on the way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeLatency {
    /// What the platform gives of nodes.
    #[default]
    Given,
    /// What that is more than a CPU's own memory takes, added to what an accelerator's own takes.
    Added,
}

/// What each accelerator caches of memory that hardware keeps coherent, and how popular its bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Caching {
    /// Bytes of it that each accelerator may cache.
    pub cache_bytes: f64,
    /// Bytes of the lines that snoop filters have entries for.
    pub snoop_filter_bytes: f64,
    /// How much more often some of it is accessed: the exponent of Zipf's law, 0 where all is alike.
    pub skew: f64,
}

/// What a platform leaves open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Ways {
    /// How far memory nodes are.
    pub nodes: Nodes,
    /// How accelerators of a rack reach each other's memory over its own fabric.
    pub inside: Inside,
    /// What a load of a memory node takes.
    pub node_latency: NodeLatency,
    /// Whether data that accelerators of a rack load of each other come over the rack's own fabric, and coherence alone over CXL.
    pub bulk: bool,
    /// Whether the CPU's memory is taken too, after an accelerator's own.
    pub host: bool,
    /// What accelerators cache of what they load coherently; nothing when left out.
    pub caching: Option<Caching>,
}

/// What access times are asked of.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Question {
    /// The machine.
    pub platform: String,
    /// Another that is compared with it.
    pub against: Option<String>,
    /// Kind of rack of the machine; the first by name when left out.
    pub rack: Option<String>,
    /// Accelerators; those of 16 racks when left out.
    pub accelerators: Option<u32>,
    /// What platforms leave open.
    #[serde(default)]
    pub ways: Ways,
}

/// A memory that a working set takes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tier {
    /// Where it is.
    pub name: &'static str,
    /// How much there is.
    pub capacity_bytes: f64,
    /// What an access takes.
    #[serde(flatten)]
    pub access: Access,
    /// Whether an accelerator may cache what it loads of it: CXL keeps it coherent.
    pub is_cached: bool,
    /// What holds it, where that is reached over a fabric.
    #[serde(skip)]
    holders: Option<Holders>,
}

/// Which memories a working set takes in which order.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Configuration {
    /// `baseline`, `clusters` or `tiered`, as in Figure 7 of ScalePool.
    pub name: &'static str,
    /// The machine.
    pub platform: String,
    /// The memories, in the order in which they are taken.
    pub tiers: Vec<Tier>,
    /// What accelerators cache of them, and how many share what is cached: those of a rack.
    #[serde(skip)]
    caching: Option<(Caching, u32)>,
}

impl Tier {
    /// Whether other accelerators or memory nodes hold it, so that reads of it share links.
    #[must_use]
    pub const fn is_over_fabric(&self) -> bool {
        self.holders.is_some()
    }
}

impl Configuration {
    /// What comes of the caches, an access to memory that is cached, where so much of it is accessed, `unit` bytes at a time: each unit is as
    /// popular as it is, and its lines with it.
    fn cached(&self, region: f64, unit: f64) -> RegionRates {
        let Some((caching, sharers)) = self.caching.filter(|_| region > 0.0) else {
            return RegionRates::default();
        };
        let unit = (unit / LINE).ceil() * LINE;
        let [lines, cached, filter] =
            [region, caching.cache_bytes, caching.snoop_filter_bytes].map(|bytes| bytes / unit);
        let load = RegionLoad {
            accelerators: sharers,
            lines: lines.max(1.0),
            cached,
            filter,
            writes: 0.0,
            skew: caching.skew,
        };
        // An access that is larger than the cache or the filter leaves nothing there.
        load.rates().unwrap_or_default()
    }

    /// Whether each memory beyond an accelerator's own and its CPU's has holders.
    fn expect_holders(&self) -> Result<(), MemoryError> {
        match self
            .tiers
            .iter()
            .find(|it| !["own", "host", "storage"].contains(&it.name) && it.holders.is_none())
        {
            None => Ok(()),
            Some(_) => {
                let problem = "expected a multiple of between.links, because fidelities L1 and L2 send a part of each read over each of them";
                Err(DataError::new(&self.platform, "pool.ports", problem).into())
            }
        }
    }

    fn refused(&self, error: TransferError) -> MemoryError {
        MemoryError::Transfers { platform: self.platform.clone(), error }
    }
}

/// Why access times cannot be given.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// A file is damaged, or has not what is asked for.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A given value cannot be.
    #[error(transparent)]
    Given(#[from] GivenError),
    /// The machine cannot be that large.
    #[error("{platform}: {refusal}")]
    Refused {
        /// The machine.
        platform: String,
        /// Why.
        refusal: Refusal,
    },
    /// Reads over a fabric cannot be followed.
    #[error("{platform}: {error}")]
    Transfers {
        /// The machine.
        platform: String,
        /// Why not.
        error: TransferError,
    },
}

/// The memories of the machines that are asked for: of the other machine and of this one as accelerators alone (`baseline`, `clusters`),
/// and of this one with its memory nodes (`tiered`), as far as there are such; with how many accelerators there are.
///
/// # Errors
/// When a machine has no accelerators, or not as many ports, or when its file does not say what its memory takes.
pub fn configurations(question: &Question) -> Result<(u32, Vec<Configuration>), MemoryError> {
    let Question { platform, against, rack, accelerators, ways } = question;
    let machine = Platform::load(platform)?;
    let job = job(platform, &machine, rack.as_deref())?;
    let accelerators = accelerators.unwrap_or(RACKS * job.rack().accelerators);
    if let Some(caching) = &ways.caching {
        caching.check(job.rack().accelerator.memory.capacity.value())?;
    }
    let caching = |job: &Job<'_>| Some((ways.caching?, accelerators.min(job.rack().accelerators)));
    let mut configurations = vec![];
    if let Some(name) = against {
        let other = Platform::load(name)?;
        let job = self::job(name, &other, None)?;
        let site = Site::new(name, &other, &job, accelerators, *ways)?;
        configurations.push(Configuration {
            name: "baseline",
            platform: name.clone(),
            tiers: site.clusters(),
            caching: caching(&job),
        });
    }
    let site = Site::new(platform, &machine, &job, accelerators, *ways)?;
    configurations.push(Configuration {
        name: "clusters",
        platform: platform.clone(),
        tiers: site.clusters(),
        caching: caching(&job),
    });
    let tiers = site.tiers();
    if tiers != configurations[configurations.len() - 1].tiers {
        configurations.push(Configuration {
            name: "tiered",
            platform: platform.clone(),
            tiers,
            caching: caching(&job),
        });
    }
    if ways.caching.is_some() && !configurations.iter().flat_map(|it| &it.tiers).any(|tier| tier.is_cached) {
        let problem = "expected memory that is loaded over CXL, which caches keep coherent; take nvl72-cxl, or leave it out";
        return Err(GivenError::new("cache", problem).into());
    }
    Ok((accelerators, configurations))
}

/// The kind of rack of a machine whose accelerators access memory.
fn job<'a>(name: &str, platform: &'a Platform, rack: Option<&str>) -> Result<Job<'a>, MemoryError> {
    if platform.rack.is_empty() {
        let problem = "expected a kind of rack, whose accelerators access memory";
        return Err(DataError::new(name, "rack", problem).into());
    }
    Job::chosen(platform, rack, None, None)
        .map_err(|refusal| MemoryError::Refused { platform: name.into(), refusal })
}

impl Caching {
    fn check(&self, own_bytes: f64) -> Result<(), GivenError> {
        let Self { cache_bytes, snoop_filter_bytes, skew } = *self;
        for (key, bytes, most) in
            [("cache", cache_bytes, own_bytes), ("snoop-filter", snoop_filter_bytes, f64::MAX)]
        {
            if !(LINE..=most).contains(&bytes) {
                let up_to = if most < f64::MAX {
                    format!(" to {}, an accelerator's own memory", Bytes::new(most))
                } else {
                    " or more".into()
                };
                return Err(GivenError::new(key, format!("expected {LINE} B{up_to}, found {bytes} B")));
            }
        }
        match (0.0..=4.0).contains(&skew) {
            true => Ok(()),
            false => Err(GivenError::new("skew", format!("expected a number from 0 to 4, found {skew}"))),
        }
    }
}

/// So many accelerators of a machine.
struct Site<'a> {
    platform: &'a Platform,
    rack: &'a Rack,
    /// Those of a rack.
    inside: f64,
    /// Those of all other racks.
    outside: f64,
    ways: Ways,
}

impl<'a> Site<'a> {
    fn new(
        name: &str,
        platform: &'a Platform,
        job: &Job<'a>,
        accelerators: u32,
        ways: Ways,
    ) -> Result<Self, MemoryError> {
        let rack = job.rack();
        let refused = |refusal| MemoryError::Refused { platform: name.into(), refusal };
        if accelerators == 0 {
            return Err(refused(Refusal::Zero { what: "a count of accelerators" }));
        }
        job.check_ports(accelerators, platform.pool.is_some()).map_err(refused)?;
        if rack.accelerator.memory.latency.value() == 0.0 {
            let key = format!("rack.{}.accelerator.memory.latency", job.rack_name());
            let problem = "expected a time above 0, which every access takes, found 0 ps";
            return Err(DataError::new(name, &key, problem).into());
        }
        let inside = accelerators.min(rack.accelerators);
        let outside = accelerators - inside;
        Ok(Self { platform, rack, inside: f64::from(inside), outside: f64::from(outside), ways })
    }

    /// An accelerator's own memory.
    fn own(&self) -> Tier {
        let memory = &self.rack.accelerator.memory;
        let access =
            Access { how: How::Own, memory_s: memory.latency.value(), ..Access::at(memory.read.value()) };
        Tier { name: "own", capacity_bytes: memory.capacity.value(), access, is_cached: false, holders: None }
    }

    /// An accelerator's share of its CPU's memory. C2C and UCIe let an accelerator load it; over PCIe software copies it, as inside the rack.
    fn host(&self) -> Option<Tier> {
        let host = self.ways.host.then_some(&self.rack.host)?;
        let loads = matches!(host.attach.kind, Some(AttachKind::C2c | AttachKind::Ucie));
        let software = self.rack.fabric.as_ref().map_or(0.0, |fabric| fabric.software.message.value());
        let share = f64::from(host.accelerators);
        let rate = host.attach.each().value().min(host.memory.read.value() / share);
        let access = Access {
            how: if loads { How::Load } else { How::Copy },
            software_s: if loads { 0.0 } else { software },
            memory_s: host.memory.latency.value(),
            ..Access::at(rate)
        };
        Some(Tier {
            name: "host",
            capacity_bytes: host.memory.capacity.value() / share,
            access,
            is_cached: false,
            holders: None,
        })
    }

    /// The memory of so many other accelerators, over this fabric.
    fn other_accelerators(&self, name: &'static str, count: f64, fabric: &Fabric, how: How) -> Tier {
        self.other_accelerators_over(name, count, [fabric; 2], how)
    }

    /// The same, asked for over one fabric and got over another.
    fn other_accelerators_over(
        &self,
        name: &'static str,
        count: f64,
        [fabric, back]: [&Fabric; 2],
        how: How,
    ) -> Tier {
        let memory = &self.rack.accelerator.memory;
        let rate = (back.payload().value() * back.carried()[1]).min(memory.read.value());
        let access = Access::over([Way::far(fabric), Way::far(back)], how, memory.latency.value(), rate);
        let capacity_bytes = count * memory.capacity.value();
        let is_cached = how == How::Load && fabric.carries.contains(&Protocol::Cache);
        Tier { name, capacity_bytes, access, is_cached, holders: Some(self.accelerators(name, back)) }
    }

    /// The accelerators that hold such memory: those of the rack, or all others.
    fn accelerators(&self, name: &'static str, fabric: &Fabric) -> Holders {
        let [inside, outside] = [self.inside, self.outside].map(|it| it as u32);
        let (first, endpoints) = if name == "rack" { (0, inside) } else { (inside, inside + outside) };
        Holders { fabric: fabric.clone(), first, endpoints, read: self.rack.accelerator.memory.read.value() }
    }

    /// The memory of the rack's other accelerators, over the fabric that keeps nothing coherent.
    fn rack(&self) -> Option<Tier> {
        let how = if self.ways.inside == Inside::Load { How::Load } else { How::Copy };
        let fabric = self.rack.fabric.as_ref()?;
        Some(self.other_accelerators("rack", self.inside - 1.0, fabric, how))
    }

    /// Accelerators alone: own memory, that of the rack, that of other racks.
    fn clusters(&self) -> Vec<Tier> {
        let racks = self.platform.between.as_ref().map(|fabric| {
            let how = if fabric.carries.contains(&Protocol::Cache) { How::Load } else { How::Copy };
            self.other_accelerators("racks", self.outside, fabric, how)
        });
        present(std::iter::once(self.own()).chain(self.host()).chain(self.rack()).chain(racks))
    }

    /// With memory nodes: own memory, that of the rack kept coherent, that of the nodes.
    fn tiers(&self) -> Vec<Tier> {
        let coherent = self.rack.coherent.as_ref();
        let rack = coherent.map(|fabric| {
            let back = self.rack.fabric.as_ref().filter(|_| self.ways.bulk).unwrap_or(fabric);
            self.other_accelerators_over("rack", self.inside - 1.0, [fabric, back], How::Load)
        });
        let pool = self.pool();
        let storage = self.storage();
        // Without nodes what the rack lacks is in others.
        let others = self.clusters().into_iter().filter(|tier| tier.name == "racks");
        let far: Vec<_> = others.filter(|_| pool.is_none()).collect();
        present(
            std::iter::once(self.own())
                .chain(self.host())
                .chain(rack.or_else(|| self.rack()))
                .chain(pool)
                .chain(far)
                .chain(storage),
        )
    }

    /// Storage on the fabric: software copies what is read of it.
    fn storage(&self) -> Option<Tier> {
        let (nodes, fabric) = self.platform.storage.as_ref().zip(self.platform.between.as_ref())?;
        let share = nodes.share(fabric);
        let latency = nodes.memory.latency.value();
        let access = Access {
            controllers_s: 0.0,
            ..Access::over([Way::far(fabric); 2], How::Copy, latency, share.read)
        };
        let capacity_bytes = share.capacity * (self.inside + self.outside);
        Some(Tier { name: "storage", capacity_bytes, access, is_cached: false, holders: None })
    }

    /// The memory of the nodes.
    fn pool(&self) -> Option<Tier> {
        let (pool, fabric) = self.platform.pool.as_ref().zip(self.platform.between.as_ref())?;
        let shares = self.platform.tiers(self.rack);
        let share = shares.iter().find_map(|(id, share)| (*id == TierId::Pool).then_some(share))?;
        let switches = if self.ways.nodes == Nodes::Near { 1.0 } else { fabric.hops() };
        let [node, own, cpu] = [pool.memory, self.rack.accelerator.memory, self.rack.host.memory];
        let [node, own, cpu] = [node, own, cpu].map(|memory| memory.latency.value());
        let memory_s =
            if self.ways.node_latency == NodeLatency::Added { own + (node - cpu).max(0.0) } else { node };
        // Without CXL.mem nothing loads it: software has it copied. A node's latency has the controllers at both ends.
        let loads = fabric.carries.contains(&Protocol::Mem);
        let how = if loads { How::Load } else { How::Copy };
        let access = Access {
            controllers_s: 0.0,
            ..Access::over([Way { fabric, switches }; 2], how, memory_s, share.read)
        };
        let all = self.inside + self.outside;
        // A node is as many endpoints as accelerators of as many links have ports.
        let each = pool.ports / fabric.links;
        let (first, nodes) = (all as u32, (all / f64::from(pool.accelerators)).ceil() as u32);
        let holders = Holders {
            fabric: fabric.clone(),
            first,
            endpoints: first.saturating_add(nodes.saturating_mul(each)),
            read: pool.memory.read.value() / f64::from(each),
        };
        let is_whole = each * fabric.links == pool.ports;
        let capacity_bytes = share.capacity * all;
        let holders = is_whole.then_some(holders);
        Some(Tier { name: "pool", capacity_bytes, access, is_cached: loads, holders })
    }
}

/// Those of which there is any.
fn present(tiers: impl Iterator<Item = Tier>) -> Vec<Tier> {
    tiers.filter(|tier| tier.capacity_bytes > 0.0).collect()
}
