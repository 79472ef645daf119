//! Figure 7 of ScalePool: access time by working set, in a baseline, in accelerator clusters and with two tiers of memory.
//!
//! The paper's text (section 6) gives three ratios and no access time. Nothing here is fitted to them: access times follow from the
//! platforms, and what the platforms leave open is tried in every way.

use polder_platform::{Bytes, DataError, Folder, Platform, read};
use polder_sim::Job;
use polder_sim::memory::{
    Configuration, Inside, MemoryError, NodeLatency, Nodes, Question, Span, Ways, configurations, met, ratio,
    ratios,
};
use serde::{Deserialize, Serialize};

/// What the paper gives, as data: `data/figures/scalepool-fig7.toml`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TierFigure {
    /// What it is, in a line.
    pub title: String,
    /// Where it was published.
    pub source: String,
    /// The platform with two tiers, and without them the clusters.
    pub platform: String,
    /// The baseline's.
    pub against: String,
    /// Racks that there are.
    pub racks: u32,
    /// Sizes of an access.
    pub access: Vec<Bytes>,
    /// What is taken to be so.
    pub assumed: Vec<String>,
    /// What is known to be off.
    pub unexplained: Vec<String>,
    /// What the paper says.
    pub claim: Vec<Claim>,
}

/// How many times faster an access is, as published.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// What it is, in a line.
    pub name: String,
    /// Over what.
    pub over: Over,
    /// Which working sets it is of.
    pub beyond: Beyond,
    /// How many times.
    pub published: f64,
}

/// What two tiers are compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Over {
    /// Racks joined by a network.
    Baseline,
    /// Racks joined by CXL, without memory nodes and without coherence inside.
    Clusters,
}

/// What a working set does not fit into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Beyond {
    /// An accelerator's memory; it fits into that of a rack.
    Accelerator,
    /// That of a rack.
    Rack,
}

impl Beyond {
    /// The working sets of a map, in parts of what they do not fit into.
    const fn parts(self) -> [f64; 8] {
        match self {
            Self::Accelerator => [1.25, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 72.0],
            Self::Rack => [1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0],
        }
    }
}

/// The figure made again.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TierReport {
    /// Accelerators that there are.
    pub accelerators: u32,
    /// Each way in which what the platforms leave open can be.
    pub variants: Vec<Variant>,
}

/// The claims with what the platforms leave open taken in one way.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Variant {
    /// Which.
    #[serde(flatten)]
    pub ways: Ways,
    /// The memories of each configuration.
    pub configurations: Vec<Configuration>,
    /// Each claim.
    pub claims: Vec<JudgedClaim>,
    /// How many times faster clusters are than the baseline, at most, at any working set: no tier counts in it. At one working set
    /// both claims beyond a rack ask for `needed`.
    pub clusters_over_baseline: CommonPart,
}

/// What two claims together ask for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CommonPart {
    /// What they ask for.
    pub needed: f64,
    /// What is simulated.
    pub most: f64,
}

/// A claim beside what is simulated.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct JudgedClaim {
    /// What it is, in a line.
    pub name: String,
    /// Over what.
    pub over: Over,
    /// Which working sets it is of.
    pub beyond: Beyond,
    /// How many times faster, as published.
    pub published: f64,
    /// The least and the most that is simulated, over those working sets, of the smallest access.
    pub simulated: [f64; 2],
    /// The smallest working set at which the published ratio is met, in bytes.
    pub met_at_bytes: Option<f64>,
    /// What the last memory takes in those sets, and what the other's takes, in seconds: of the smallest access.
    pub marginal_s: Marginal,
    /// Working sets of the map, in bytes.
    pub sets_bytes: Vec<f64>,
    /// How many times faster: of each size of an access, at each working set. Empty beyond what either holds.
    pub map: Vec<Vec<Option<f64>>>,
}

/// Access times where a working set goes on growing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Marginal {
    /// With two tiers.
    pub simulated: f64,
    /// What is compared with.
    pub other: f64,
    /// What two tiers may take at most for the published ratio, with ever larger sets.
    pub needed: f64,
}

impl JudgedClaim {
    /// Whether the published ratio lies among the simulated ones.
    #[must_use]
    pub const fn is_met(&self) -> bool {
        self.met_at_bytes.is_some()
    }
}

impl TierFigure {
    /// Reads the figure.
    ///
    /// # Errors
    /// When its file is damaged.
    pub fn load() -> Result<Self, DataError> {
        let figure: Self = read(Folder::Figures, "scalepool-fig7")?;
        match figure.access.is_empty() || figure.racks == 0 {
            true => Err(DataError::new(
                "scalepool-fig7",
                "access",
                "expected a size, and at least one of the racks",
            )),
            false => Ok(figure),
        }
    }

    /// Makes the figure again.
    ///
    /// # Errors
    /// When a file is damaged, or a platform has not what is asked for.
    pub fn predict(&self) -> Result<TierReport, MemoryError> {
        let platform = Platform::load(&self.platform)?;
        let rack = Job::new(&platform).rack();
        let accelerators = self.racks * rack.accelerators;
        let own = rack.accelerator.memory.capacity.value();
        let ends = [own, own * f64::from(rack.accelerators)];
        let way = |inside, nodes, node_latency| Ways { nodes, inside, node_latency, ..Ways::default() };
        let ways = [
            way(Inside::Copy, Nodes::Near, NodeLatency::Given),
            way(Inside::Copy, Nodes::Far, NodeLatency::Given),
            way(Inside::Load, Nodes::Near, NodeLatency::Given),
            way(Inside::Load, Nodes::Far, NodeLatency::Given),
            way(Inside::Copy, Nodes::Near, NodeLatency::Added),
            Ways { bulk: true, ..way(Inside::Copy, Nodes::Near, NodeLatency::Given) },
        ];
        let variants = ways.into_iter().map(|ways| {
            let question = Question {
                platform: self.platform.clone(),
                against: Some(self.against.clone()),
                rack: None,
                accelerators: Some(accelerators),
                ways,
            };
            let (_, configurations) = configurations(&question)?;
            let [baseline, clusters, tiered] = &configurations[..] else {
                let problem = "expected memory nodes and racks whose accelerators load each other's memory";
                return Err(DataError::new(&self.platform, "pool", problem).into());
            };
            let bytes = self.access[0].value();
            let judged = |claim: &Claim| {
                let other = if claim.over == Over::Baseline { baseline } else { clusters };
                self.judged(claim, tiered, other, ends)
            };
            let all = Span { from: 0.0, until: f64::INFINITY };
            let [_, most] = ratios(clusters, baseline, bytes, all).unwrap_or_default();
            let of = |over| {
                let of = |it: &&Claim| it.beyond == Beyond::Rack && it.over == over;
                self.claim.iter().find(of).map_or(f64::NAN, |it| it.published)
            };
            let needed = of(Over::Baseline) / of(Over::Clusters);
            let claims = self.claim.iter().map(judged).collect();
            let clusters_over_baseline = CommonPart { needed, most };
            Ok(Variant { ways, claims, clusters_over_baseline, configurations })
        });
        Ok(TierReport { accelerators, variants: variants.collect::<Result<_, MemoryError>>()? })
    }

    fn judged(
        &self,
        claim: &Claim,
        tiered: &Configuration,
        other: &Configuration,
        [own, rack]: [f64; 2],
    ) -> JudgedClaim {
        let (tier, begin, span) = match claim.beyond {
            Beyond::Accelerator => (1, own, Span { from: own, until: rack }),
            Beyond::Rack => (2, rack, Span { from: rack, until: f64::INFINITY }),
        };
        let bytes = self.access[0].value();
        let seconds = |of: &Configuration| of.tiers.get(tier).map_or(f64::NAN, |it| it.access.seconds(bytes));
        let sets_bytes: Vec<_> = claim.beyond.parts().map(|part| part * begin).into();
        let row = |access: &Bytes| {
            sets_bytes.iter().map(|set| ratio(tiered, other, access.value(), *set)).collect::<Vec<_>>()
        };
        JudgedClaim {
            name: claim.name.clone(),
            over: claim.over,
            beyond: claim.beyond,
            published: claim.published,
            simulated: ratios(tiered, other, bytes, span).unwrap_or([f64::NAN; 2]),
            met_at_bytes: met(tiered, other, bytes, span, claim.published),
            marginal_s: Marginal {
                simulated: seconds(tiered),
                other: seconds(other),
                needed: seconds(other) / claim.published,
            },
            map: self.access.iter().map(row).collect(),
            sets_bytes,
        }
    }
}
