//! Figure 10 of cMPI: CG class D and miniAMR over CXL memory and over TCP, the text's percentages beside ours.
//!
//! Nothing is fitted to them. What the paper leaves open stands in the figure's file. The paper simulated with `SimGrid`. Its `smpirun`
//! multiplies latency and bandwidth by factors of a message's size. Each network is tried without and with them. Two more show the
//! cause of a miss: each rank with a link of its own, and links that differ by latency alone.

use polder_platform::{Bandwidth, DataError, FlopRate, Folder, Time, read};
use polder_sim::program::{Network, SizeFactor, Way};
use serde::{Deserialize, Serialize};

use super::skeleton::{Cg, MiniAmr, Part, ProgramSeconds, SkeletonError, program_time};

/// What the paper gives, as data: `data/figures/cmpi-fig10.toml`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ProgramFigure {
    /// What it is, in a line.
    pub title: String,
    /// Where it was published.
    pub source: String,
    /// Numbers of nodes.
    pub nodes: Vec<u32>,
    /// Ranks of each.
    #[serde(rename = "ranks_per_node")]
    pub ranks_per_node: u32,
    /// What the ranks of a node read of its memory together.
    pub memory: Bandwidth,
    /// Operations of a stencil that a rank does.
    pub operations: FlopRate,
    /// Between ranks of a node.
    pub inside: LatencyBandwidth,
    /// The most nodes up to which Ethernet is faster for miniAMR than `ConnectX-6` Dx, by the text.
    #[serde(rename = "ethernet_until")]
    pub ethernet_until: u32,
    /// What is taken to be so.
    pub assumed: Vec<String>,
    /// What is known to be off.
    pub unexplained: Vec<String>,
    /// Class D.
    pub cg: Cg,
    /// Blocks of 4 x 4 x 4.
    pub mini_amr: MiniAmr,
    /// What each network was measured to have.
    pub input: Vec<NetworkInput>,
    /// What `SimGrid`'s `smpirun` multiplies latency and bandwidth by unless it is told otherwise; those of the longest messages first.
    pub factor: Vec<SizeFactor>,
    /// What the text says.
    pub claim: Vec<ProgramClaim>,
}

/// A network as two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LatencyBandwidth {
    /// Of an empty message.
    pub latency: Time,
    /// Of a node.
    pub bandwidth: Bandwidth,
}

/// What each network was measured to have, by one part of the paper.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkInput {
    /// Which part.
    pub name: String,
    /// CXL memory that nodes share.
    pub cxl: LatencyBandwidth,
    /// TCP over `ConnectX-6` Dx.
    pub smartnic: LatencyBandwidth,
    /// TCP over Ethernet.
    pub ethernet: LatencyBandwidth,
}

/// A percentage of the text: by how much CXL is better.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProgramClaim {
    /// Of which program.
    pub program: ProgramName,
    /// Of what.
    pub metric: ProgramMetric,
    /// Over which network.
    pub over: OtherNetwork,
    /// Percent.
    pub published: f64,
}

/// A program of the figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProgramName {
    /// CG class D.
    Cg,
    /// miniAMR.
    MiniAmr,
}

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProgramMetric {
    /// Percent less time of communication.
    Communication,
    /// Percent faster in all.
    Total,
}

/// What CXL is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OtherNetwork {
    /// TCP over `ConnectX-6` Dx.
    Smartnic,
    /// TCP over Ethernet.
    Ethernet,
}

/// How ranks share a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkSharing {
    /// The ranks of a node share its link.
    Node,
    /// As `Node`, with the factors that `SimGrid`'s `smpirun` has by default.
    Smpirun,
    /// Each message has the bandwidth for itself.
    Alone,
    /// As `Node`, and all have the bandwidth of CXL: they differ by latency.
    LatencyAlone,
}

impl LinkSharing {
    /// All, the one that is judged first.
    pub const ALL: [Self; 4] = [Self::Node, Self::Smpirun, Self::Alone, Self::LatencyAlone];

    fn way(self, network: LatencyBandwidth, cxl: LatencyBandwidth) -> Way {
        let own = Way::new(network.latency.value(), network.bandwidth.value());
        match self {
            Self::Node | Self::Smpirun => own,
            Self::Alone => Way { port_bytes_per_s: f64::INFINITY, ..own },
            Self::LatencyAlone => Way::new(network.latency.value(), cxl.bandwidth.value()),
        }
    }
}

/// The seconds of a program over the three networks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct OnNodes {
    /// How many.
    pub nodes: u32,
    /// CXL.
    pub cxl: ProgramSeconds,
    /// TCP over `ConnectX-6` Dx.
    pub smartnic: ProgramSeconds,
    /// TCP over Ethernet.
    pub ethernet: ProgramSeconds,
}

impl OnNodes {
    const fn other(&self, over: OtherNetwork) -> &ProgramSeconds {
        match over {
            OtherNetwork::Smartnic => &self.smartnic,
            OtherNetwork::Ethernet => &self.ethernet,
        }
    }

    /// By how many percent CXL is better.
    fn percent(&self, metric: ProgramMetric, over: OtherNetwork) -> f64 {
        let other = self.other(over);
        100.0
            * match metric {
                ProgramMetric::Communication => 1.0 - self.cxl.communication_s / other.communication_s,
                ProgramMetric::Total => other.total_s / self.cxl.total_s - 1.0,
            }
    }
}

/// A percentage beside ours.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct JudgedPercent {
    /// The paper's.
    #[serde(flatten)]
    pub claim: ProgramClaim,
    /// Ours, the mean over numbers of nodes.
    pub simulated: f64,
    /// The least and the most over numbers of nodes.
    pub range: [f64; 2],
    /// Whether CXL is better here too.
    pub sign: bool,
    /// Whether it is near enough: CG within 5 points, miniAMR within half of the paper's.
    pub near: bool,
}

/// The figure by one part of the paper, with one way to share links.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProgramVariant {
    /// Which part of the paper the networks are from.
    pub input: String,
    /// How ranks share them.
    pub sharing: LinkSharing,
    /// CG by nodes.
    pub cg: Vec<OnNodes>,
    /// miniAMR by nodes.
    pub mini_amr: Vec<OnNodes>,
    /// The percentages.
    pub claims: Vec<JudgedPercent>,
    /// The most nodes up to which Ethernet is faster for miniAMR than `ConnectX-6` Dx. Nothing if it never is.
    pub ethernet_until: Option<u32>,
}

impl ProgramFigure {
    /// Percentage points by which CG may be off.
    pub const POINTS: f64 = 5.0;
    /// The part of its value by which miniAMR may be off.
    pub const PART: f64 = 0.5;

    /// Reads the figure.
    ///
    /// # Errors
    /// When its file is damaged.
    pub fn load() -> Result<Self, DataError> {
        read(Folder::Figures, "cmpi-fig10")
    }

    /// Makes the figure again.
    ///
    /// # Errors
    /// When a number of ranks is no power of two.
    pub fn predict(&self) -> Result<Vec<ProgramVariant>, SkeletonError> {
        let ways = self.input.iter().flat_map(|input| LinkSharing::ALL.map(|sharing| (input, sharing)));
        ways.map(|(input, sharing)| self.variant(input, sharing)).collect()
    }

    fn variant(&self, input: &NetworkInput, sharing: LinkSharing) -> Result<ProgramVariant, SkeletonError> {
        let bytes_per_s = self.memory.value() / f64::from(self.ranks_per_node);
        let cg = self.by_nodes(input, sharing, |ranks| self.cg.parts(ranks, bytes_per_s))?;
        let mini_amr =
            self.by_nodes(input, sharing, |ranks| self.mini_amr.parts(ranks, self.operations.value()))?;
        let judged = |claim: &ProgramClaim| {
            let (rows, may_be_off) = match claim.program {
                ProgramName::Cg => (&cg, Self::POINTS),
                ProgramName::MiniAmr => (&mini_amr, Self::PART * claim.published),
            };
            let percents: Vec<_> = rows.iter().map(|row| row.percent(claim.metric, claim.over)).collect();
            let simulated = percents.iter().sum::<f64>() / percents.len() as f64;
            let range = [
                percents.iter().copied().fold(f64::INFINITY, f64::min),
                percents.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            ];
            let near = (simulated - claim.published).abs() <= may_be_off;
            JudgedPercent { claim: *claim, simulated, range, sign: simulated > 0.0, near }
        };
        let claims = self.claim.iter().map(judged).collect();
        let is_faster = |row: &&OnNodes| row.ethernet.total_s <= row.smartnic.total_s;
        let ethernet_until = mini_amr.iter().take_while(is_faster).last().map(|row| row.nodes);
        Ok(ProgramVariant { input: input.name.clone(), sharing, claims, ethernet_until, cg, mini_amr })
    }

    fn by_nodes(
        &self,
        input: &NetworkInput,
        sharing: LinkSharing,
        parts: impl Fn(u32) -> Result<Vec<Part>, SkeletonError>,
    ) -> Result<Vec<OnNodes>, SkeletonError> {
        let rows = self.nodes.iter().map(|nodes| {
            let ranks = nodes * self.ranks_per_node;
            let parts = parts(ranks)?;
            let hosts: Vec<_> = (0..ranks).map(|rank| rank / self.ranks_per_node).collect();
            let over = |network: LatencyBandwidth| {
                let between = sharing.way(network, input.cxl);
                let inside = Way::new(self.inside.latency.value(), self.inside.bandwidth.value());
                let factors = if sharing == LinkSharing::Smpirun { self.factor.clone() } else { vec![] };
                program_time(&parts, &Network { hosts: hosts.clone(), inside, between, factors })
            };
            Ok(OnNodes {
                nodes: *nodes,
                cxl: over(input.cxl)?,
                smartnic: over(input.smartnic)?,
                ethernet: over(input.ethernet)?,
            })
        });
        rows.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(variant: &ProgramVariant, program: ProgramName, over: OtherNetwork) -> &JudgedPercent {
        let is = |it: &&JudgedPercent| {
            it.claim.program == program
                && it.claim.over == over
                && it.claim.metric == ProgramMetric::Communication
        };
        variant.claims.iter().find(is).unwrap()
    }

    #[test]
    fn signs_hold_but_where_the_card_has_more_bandwidth_than_cxl() {
        let found = ProgramFigure::load().unwrap().predict().unwrap();
        assert_eq!(found.len(), 8);
        for variant in &found {
            let wrong: Vec<_> = variant.claims.iter().filter(|it| !it.sign).map(|it| it.claim).collect();
            // Messages of CG are long: 11.5 GB/s of the card against 9.5, by section 4.2 12.5 against 6.05.
            let is_cg =
                |it: &ProgramClaim| it.program == ProgramName::Cg && it.over == OtherNetwork::Smartnic;
            assert!(wrong.iter().all(is_cg), "{} {:?}: {wrong:?}", variant.input, variant.sharing);
        }
    }

    #[test]
    fn with_the_factors_of_smpirun_all_signs_hold_by_table_1() {
        let found = ProgramFigure::load().unwrap().predict().unwrap();
        let [table, section] = ["Table 1", "section 4.2"].map(|name| {
            let is = |it: &&ProgramVariant| it.input == name && it.sharing == LinkSharing::Smpirun;
            found.iter().find(is).unwrap()
        });
        assert!(table.claims.iter().all(|it| it.sign), "{:?}", table.claims);
        assert_eq!(section.claims.iter().filter(|it| !it.sign).count(), 1, "{:?}", section.claims);
    }

    #[test]
    fn with_one_bandwidth_networks_are_as_far_apart_as_their_latencies() {
        let found = ProgramFigure::load().unwrap().predict().unwrap();
        let alone = found.iter().find(|it| it.sharing == LinkSharing::LatencyAlone).unwrap();
        // 18 us against 16 us of Table 1.
        let [slow, fast] = [OtherNetwork::Smartnic, OtherNetwork::Ethernet]
            .map(|over| claim(alone, ProgramName::MiniAmr, over).simulated);
        assert!(slow > fast && fast > 0.0, "{slow} {fast}");
    }
}
