//! A platform as the closed form sees it: rates and latencies, with everything multiplied out.

use std::sync::Arc;

use polder_platform::{
    Compute, Efficiency, Fabric, FlopRate, Platform, Protocol, Rack, Reduction, TierId, TierShare, Topology,
};

use crate::contention::{FlitOptions, Network, TransferError};
use crate::step::cost::{CommunicationCosts, GroupSpan, Pattern, Scopes, Transfer};
use crate::step::flows::{Flows, FollowedFlits, StepFlits};
use crate::step::layout::{Layout, Precision, Refusal};
use crate::step::order::{Order, Ranks};

/// Rates and latencies of a platform, in bytes, seconds and operations a second.
#[derive(Clone, Debug)]
pub struct Machine {
    /// What large matrix products reach, by precision; 0 where there is none. The peaks where efficiency goes by size.
    matrix: [f64; 3],
    depth: f64,
    attention: [f64; 3],
    /// What kernels that only move data reach. The peak where efficiency goes by size.
    stream: f64,
    efficiency: Efficiency,
    launch: f64,
    pub(crate) straggle: f64,
    pub(crate) capacity: f64,
    /// Accelerators of a rack that are used.
    pub(crate) fill: u32,
    order: Order,
    /// Inside a rack, and between racks.
    pub(crate) scopes: [LinkRates; 2],
    /// Every tier beyond the accelerator's own memory, with its share of it; the host's own comes first.
    tiers: Vec<(TierId, TierShare)>,
    fabric: Option<Fabric>,
    /// Ports of memory nodes for each accelerator.
    pool_ports: f64,
    /// Whether what is in the pool can be loaded and stored.
    loads: bool,
    /// Flows of all ranks, which communication is priced by in place of the closed form.
    flows: Option<Arc<Flows>>,
}

/// What messages take inside a rack, or between racks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LinkRates {
    /// Bytes a second that an accelerator sends and receives in a collective, around a ring or to the next stage.
    pub(crate) bandwidth: f64,
    /// The same along trees.
    trees: f64,
    /// Where it sends to all others at once.
    spread: f64,
    /// Seconds of a step of a collective.
    pub(crate) alpha: f64,
    /// Seconds of a message or a collective as a whole.
    call: f64,
    /// Seconds of software of a message.
    message: f64,
    pub(crate) in_switch: bool,
    /// The part of the processors that a collective takes.
    pub(crate) processors: f64,
}

impl Machine {
    /// The machine that `platform` is for `accelerators` of one kind of rack, filled with `fill` of each rack, ranks
    /// counted in this order.
    #[must_use]
    pub fn new(platform: &Platform, rack: &Rack, fill: u32, order: Order) -> Self {
        let chip = &rack.accelerator;
        let mut fitted = chip.fitted;
        if chip.efficiency.matrix.is_some() {
            fitted.matrix = 1.0;
        }
        if chip.efficiency.memory.is_some() {
            fitted.stream = 1.0;
        }
        let Compute { bf16, fp8, fp32 } = chip.compute;
        let reached = |peaks: [Option<FlopRate>; 3], part: f64| {
            peaks.map(|peak| peak.map_or(0.0, FlopRate::value) * part)
        };
        Self {
            matrix: reached([bf16, fp8, fp32], fitted.matrix),
            depth: fitted.depth,
            attention: reached([bf16, bf16, fp32], fitted.attention),
            stream: chip.memory.read.value().min(chip.memory.write.value()) * fitted.stream,
            efficiency: chip.efficiency.clone(),
            launch: fitted.launch.value(),
            straggle: fitted.straggle,
            capacity: chip.memory.capacity.value(),
            fill,
            order,
            scopes: [
                LinkRates::new(rack.fabric.as_ref(), fitted.inside),
                LinkRates::new(platform.between.as_ref(), fitted.between),
            ],
            tiers: platform.tiers(rack),
            fabric: platform.between.clone(),
            loads: platform.between.as_ref().is_some_and(|it| it.carries.contains(&Protocol::Mem)),
            flows: None,
            pool_ports: platform
                .pool
                .as_ref()
                .map_or(0.0, |pool| f64::from(pool.ports) / f64::from(pool.accelerators)),
        }
    }

    /// The machine with communication of so many ranks priced by their flows, with `flits` flit by flit; `failed` is the fabric between
    /// racks with failed links.
    pub(crate) fn with_flows(
        self,
        platform: &Platform,
        rack: &Rack,
        ranks: u32,
        failed: Option<Arc<Network>>,
        flits: Option<(FlitOptions, FollowedFlits)>,
    ) -> Self {
        Self { flows: Some(Arc::new(Flows::new(platform, rack, self.fill, ranks, failed, flits))), ..self }
    }

    /// What of a step was followed flit by flit since this was asked last, or why it could not be.
    pub(crate) fn flits(&self) -> Result<Option<StepFlits>, TransferError> {
        self.flows.as_ref().map_or(Ok(None), |flows| flows.flits())
    }

    /// An accelerator's share of this tier, if there is any.
    #[inline]
    pub(crate) fn tier(&self, id: TierId) -> Option<&TierShare> {
        // The host's own memory comes first, and a search asks for it with each layout.
        let own = self.tiers.first().filter(|(it, _)| matches!((it, id), (TierId::Host, TierId::Host)));
        own.or_else(|| self.tiers.iter().find(|(it, _)| *it == id)).map(|(_, share)| share)
    }

    /// Every tier beyond the accelerator's memory that there is.
    pub(crate) fn tier_ids(&self) -> impl Iterator<Item = TierId> {
        self.tiers.iter().map(|(id, _)| *id)
    }

    /// A matrix product of `[m, k]` by `[k, n]`, `count` of them in one launch: the roof of compute, with the start and
    /// end of each tile's pipeline, or of memory.
    pub(crate) fn product(&self, count: f64, [m, n, k]: [f64; 3], precision: Precision) -> f64 {
        let operations = match &self.efficiency.matrix {
            None => 2.0 * count * m * n * (k + self.depth),
            Some(curve) => {
                let operations = 2.0 * count * m * n * k;
                operations / curve.at(operations)
            }
        };
        let bytes = precision.bytes() * count * (m * k + k * n + m * n);
        let (compute, memory) = (operations / self.matrix[precision as usize], self.streamed(bytes));
        (if self.efficiency.in_turn { compute + memory } else { compute.max(memory) }) + self.launch
    }

    /// A fused attention kernel of so many operations.
    pub(crate) fn fused(&self, operations: f64, precision: Precision) -> f64 {
        operations / self.attention[precision as usize] + self.launch
    }

    /// A kernel that moves so many bytes through the accelerator's memory.
    #[inline]
    pub(crate) fn moved(&self, bytes: f64) -> f64 {
        self.streamed(bytes) + self.launch
    }

    #[inline]
    fn streamed(&self, bytes: f64) -> f64 {
        bytes / self.efficiency.memory.as_ref().map_or(self.stream, |curve| self.stream * curve.at(bytes))
    }

    /// The part of the processors that a collective of such a group takes. Its blocks of threads share none with other kernels
    /// (NVIDIA/nccl, issue 689), and what only moves bytes has less of the memory's bandwidth beside it. Between racks one kernel does
    /// both parts.
    #[inline]
    pub(crate) fn taken(&self, span: GroupSpan) -> Scopes {
        let [inside, between] = self.scopes.each_ref().map(|scope| scope.processors);
        Scopes { inside: if span.between > 1 { between } else { inside }, between }
    }

    /// Where the members of a group lie that differ in these kinds of rank: of each run of kinds that are counted one after
    /// the other as many to a rack as go into every rack without one of them straddling two.
    #[inline]
    pub(crate) fn span(&self, ranks: &Ranks, kinds: &[usize]) -> GroupSpan {
        let mut span = GroupSpan { inside: 1, between: 1, near: 0, far: 0 };
        let mut run = None;
        let mut close = |run: &mut Option<(u32, u32)>| {
            let Some((stride, members)) = run.take() else { return };
            let inside = if self.fill.is_multiple_of(stride) {
                common_divisor(self.fill / stride, members)
            } else {
                1
            };
            let is_first = |members: u32, before: u32| members > 1 && before == 0;
            span = GroupSpan {
                inside: span.inside * inside,
                between: span.between * (members / inside),
                near: if is_first(inside, span.near) { stride } else { span.near },
                far: if is_first(members / inside, span.far) { stride * inside } else { span.far },
            };
        };
        for (kind, stride) in self.order.strides(ranks) {
            match kinds.contains(&kind) {
                true => run.get_or_insert((stride, 1)).1 *= ranks[kind],
                false => close(&mut run),
            }
        }
        close(&mut run);
        span
    }

    /// Whether the platform has what `layout` asks for.
    pub(crate) fn check(&self, layout: &Layout) -> Result<(), Refusal> {
        // Products with weights, and the rest.
        let rates = [layout.precision, layout.precision.outside_weights()].map(|it| self.matrix[it as usize]);
        if rates.contains(&0.0) {
            let (what, needs) = match layout.precision {
                Precision::Bf16 => ("bf16", "accelerators with 16-bit floats"),
                Precision::Fp8 => ("fp8", "accelerators with 8-bit floats"),
                Precision::Fp32 => ("fp32", "accelerators whose file has a rate of 32-bit floats"),
            };
            let remedy = if self.matrix[0] > 0.0 { "take bf16" } else { "take fp32" };
            return Err(Refusal::Missing { what, needs, remedy });
        }
        let offload = layout.offload;
        if offload.is_any() && self.tier(offload.tier).is_none() {
            let remedy = "offload to the host, or take a platform with a pool";
            let known = self.tier_ids().map(String::from).collect::<Vec<_>>().join(", ");
            return Err(match offload.tier {
                TierId::Named(name) => Refusal::Tier { tier: name.to_string(), known },
                _ => Refusal::Missing { what: "offload to the pool", needs: "memory nodes", remedy },
            });
        }
        if offload.is_any() && offload.tier == TierId::Pool && !self.loads {
            let needs = "a fabric between racks that carries \"mem\" (loads and stores)";
            let remedy = "offload to the host, or take a platform whose fabric carries it";
            return Err(Refusal::Missing { what: "offload to the pool", needs, remedy });
        }
        self.check_ports(layout.accelerators(), offload.is_any() && offload.tier == TierId::Pool)
    }

    /// Whether as many accelerators can be joined, in one rack also to the pool.
    pub(crate) fn check_ports(&self, accelerators: u32, uses_pool: bool) -> Result<(), Refusal> {
        if accelerators <= self.fill && !uses_pool {
            return Ok(());
        }
        let Some(fabric) = &self.fabric else {
            let remedy = "take as many accelerators as a rack has, or fewer";
            return Err(Refusal::Missing {
                what: "more than one rack",
                needs: "a fabric between racks",
                remedy,
            });
        };
        let nodes = (f64::from(accelerators) * self.pool_ports).ceil() as u64;
        let ports = u64::from(accelerators) * u64::from(fabric.links) + nodes;
        if ports > fabric.ports() {
            let remedy = match fabric.topology {
                Topology::Clos { .. } => "take fewer, more levels, or switches with more ports",
                _ => "take fewer, or a larger topology",
            };
            return Err(Refusal::Ports {
                accelerators,
                what: "ports",
                needs: ports,
                has: fabric.ports(),
                remedy,
            });
        }
        let Some(pbr) = fabric.pbr else { return Ok(()) };
        let racks = u64::from(accelerators.div_ceil(self.fill));
        let needs = if pbr.rack_bridges { racks + nodes } else { ports };
        let has = u64::from(pbr.ids) * u64::from(pbr.domains);
        match needs > has {
            true => {
                let remedy = "join several domains, or give each rack one id (rack_bridges = true)";
                Err(Refusal::Ports { accelerators, what: "PBR ids", needs, has, remedy })
            }
            false => Ok(()),
        }
    }
}

/// The closed form, where each transfer takes what it takes alone, or flows.
impl CommunicationCosts for Machine {
    #[inline]
    fn seconds<const N: usize>(&self, transfers: [Transfer; N]) -> [Scopes; N] {
        match &self.flows {
            None => transfers.map(|transfer| Links(&self.scopes).seconds(transfer)),
            Some(flows) => flows.seconds(transfers),
        }
    }
}

/// The links inside a rack, and those between racks.
pub(crate) struct Links<'a>(pub(crate) &'a [LinkRates; 2]);

impl Links<'_> {
    /// Seconds of a transfer.
    #[inline]
    pub(crate) fn seconds(&self, Transfer { pattern, span, bytes }: Transfer) -> Scopes {
        match pattern {
            Pattern::AllReduce => self.all_reduce(span, bytes),
            Pattern::Half => self.half(span, bytes),
            Pattern::AllToAll => self.all_to_all(span, bytes),
            Pattern::Send => self.send(span, bytes),
        }
    }

    /// An all-reduce of `bytes` on each rank: reduced inside the racks, then between them by equal parts, and back.
    #[inline]
    fn all_reduce(&self, span: GroupSpan, bytes: f64) -> Scopes {
        let [inside, between] = self.0;
        // A switch gets each input once and gives the sum once, both ways at a time.
        let near = match inside.in_switch {
            true => inside.all_reduce(span.inside, bytes),
            false => 2.0 * inside.ring(span.inside, bytes) + inside.calls(span.inside),
        };
        Scopes { inside: near, between: between.all_reduce(span.between, bytes / f64::from(span.inside)) }
    }

    /// A reduce-scatter or an all-gather whose whole is `bytes`.
    #[inline]
    fn half(&self, span: GroupSpan, bytes: f64) -> Scopes {
        let [inside, between] = self.0;
        let one = |scope: &LinkRates, members, bytes| scope.ring(members, bytes) + scope.calls(members);
        Scopes {
            inside: one(inside, span.inside, bytes),
            between: one(between, span.between, bytes / f64::from(span.inside)),
        }
    }

    /// An all-to-all in which each rank has `bytes` for all ranks together, itself too: a pairwise exchange that waits for none of
    /// its messages, so that each takes its software, and all of them a latency once.
    fn all_to_all(&self, span: GroupSpan, bytes: f64) -> Scopes {
        let members = f64::from(span.inside * span.between);
        let [inside, between] = self.0;
        let near = f64::from(span.inside - 1);
        let far = members - f64::from(span.inside);
        let part = |scope: &LinkRates, peers: f64| match peers > 0.0 {
            true => {
                let messages = (peers - 1.0) * scope.message;
                bytes * peers / members / scope.spread + scope.alpha + messages + scope.call
            }
            false => 0.0,
        };
        Scopes { inside: part(inside, near), between: part(between, far) }
    }

    /// A message from a stage to the next: the slowest hop sets the pace, and one of them leaves the rack unless all stages
    /// lie in it.
    fn send(&self, span: GroupSpan, bytes: f64) -> Scopes {
        let [inside, between] = self.0;
        let seconds = |scope: &LinkRates| bytes / scope.bandwidth + scope.alpha + scope.call;
        match span.between {
            1 => Scopes { inside: seconds(inside), between: 0.0 },
            _ => Scopes { inside: 0.0, between: seconds(between) },
        }
    }
}

fn common_divisor(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

impl LinkRates {
    fn new(fabric: Option<&Fabric>, reached: f64) -> Self {
        let carried = fabric.map_or([1.0; 2], Fabric::carried);
        let whole = Self::whole(fabric, reached);
        let bandwidth = whole.bandwidth * carried[0];
        Self { bandwidth, trees: bandwidth, spread: whole.bandwidth * carried[1], ..whole }
    }

    /// As if switches carried whatever endpoints send.
    pub(crate) fn whole(fabric: Option<&Fabric>, reached: f64) -> Self {
        match fabric {
            Some(fabric) => Self {
                bandwidth: fabric.payload().value() * reached,
                trees: fabric.payload().value() * reached,
                spread: fabric.payload().value() * reached,
                alpha: fabric.latency().value() + fabric.software.step.value(),
                call: fabric.software.call.value(),
                message: fabric.software.message.value(),
                in_switch: fabric.switch.reduction == Reduction::InSwitch,
                processors: fabric.software.processors,
            },
            None => Self::of(0.0),
        }
    }

    /// Empty messages of so many seconds each.
    pub(crate) const fn of(alpha: f64) -> Self {
        Self {
            bandwidth: f64::INFINITY,
            trees: f64::INFINITY,
            spread: f64::INFINITY,
            alpha,
            call: 0.0,
            message: 0.0,
            in_switch: false,
            processors: 0.0,
        }
    }

    /// So many times slower, all that is sent but along trees.
    pub(crate) fn share(&mut self, times: f64) {
        self.bandwidth /= times;
        self.spread /= times;
    }

    /// So many times slower along trees.
    pub(crate) fn share_trees(&mut self, times: f64) {
        self.trees /= times;
    }

    /// What a collective of so many takes besides its steps.
    #[inline]
    fn calls(&self, members: u32) -> f64 {
        if members > 1 { self.call } else { 0.0 }
    }

    /// Once around a ring: what each rank has of `bytes` passes all others.
    #[inline]
    pub(crate) fn ring(&self, members: u32, bytes: f64) -> f64 {
        let steps = f64::from(members - 1);
        steps * (bytes / f64::from(members) / self.bandwidth + self.alpha)
    }

    /// By rings or by two trees that share the bytes, whichever is sooner.
    fn all_reduce(&self, members: u32, bytes: f64) -> f64 {
        if members == 1 {
            return 0.0;
        }
        if self.in_switch {
            return bytes / self.bandwidth + 2.0 * self.alpha + self.call;
        }
        self.trees(members, bytes).min(2.0 * self.ring(members, bytes)) + self.call
    }

    /// Up and down two trees that share the bytes.
    pub(crate) fn trees(&self, members: u32, bytes: f64) -> f64 {
        let depth = f64::from(members.next_power_of_two().ilog2());
        2.0 * (bytes / self.trees + depth * self.alpha)
    }
}
