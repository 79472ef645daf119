//! A step of one model with one layout on one platform.

use std::sync::Arc;

use polder_platform::{Fabric, Platform, Rack, TierId};
use serde::Serialize;

use crate::contention::{FlitOptions, Network};
use crate::fidelity::Fidelity;
use crate::step::block::Block;
use crate::step::closed_form;
use crate::step::cost::{CommunicationCosts, Pattern};
use crate::step::figures::{Stage, Step};
use crate::step::flows::{FollowedFlits, StepFlits, endpoint};
use crate::step::layout::{Layout, Offload, Refusal};
use crate::step::machine::Machine;
use crate::step::model::Model;
use crate::step::order::{Order, TP};

const UNPROVED: &str = "no run over CXL validates this";

/// A platform that steps are predicted on.
#[derive(Clone, Debug)]
pub struct Job<'a> {
    platform: &'a Platform,
    rack: &'a Rack,
    rack_name: &'a str,
    fill: Option<u32>,
    order: Order,
    fidelity: Fidelity,
    flits: FlitOptions,
    /// What the steps of a command follow together, if this is one of them.
    followed: Option<FollowedFlits>,
    /// The fabric between racks with failed links.
    failed: Option<Arc<Network>>,
}

/// A predicted step, with what it was predicted for.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedStep {
    /// How the step is laid out.
    pub layout: Layout,
    /// Accelerators of each rack that are used.
    pub fill: u32,
    /// What it takes.
    pub step: Step,
    /// What of it was followed flit by flit, with fidelity L2.
    pub flits: Option<StepFlits>,
}

/// What the fabrics of a platform give an accelerator; `None` where there is none.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Fabrics {
    /// Inside a rack.
    pub inside: Option<FabricRates>,
    /// Between racks.
    pub between: Option<FabricRates>,
}

/// What a fabric gives an accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct FabricRates {
    /// Bytes a second in one direction: the links' rate less line code, flits and headers.
    pub payload_bytes_per_s: f64,
    /// The part of them that collectives reach, to neighbours: fitted, and what the topology carries.
    pub reached_bytes_per_s: f64,
    /// Seconds of an empty message.
    pub latency_s: f64,
}

impl FabricRates {
    fn new(fabric: &Fabric, reached: f64) -> Self {
        let payload_bytes_per_s = fabric.payload().value();
        let reached_bytes_per_s = payload_bytes_per_s * reached * fabric.carried()[0];
        Self { payload_bytes_per_s, reached_bytes_per_s, latency_s: fabric.latency().value() }
    }
}

impl<'a> Job<'a> {
    /// Steps on the platform's first kind of rack.
    ///
    /// # Panics
    /// When the platform has servers alone, which [`Job::chosen`] refuses.
    #[must_use]
    pub fn new(platform: &'a Platform) -> Self {
        let (rack_name, rack) =
            platform.rack.iter().next().expect("a platform that is trained on has a kind of rack");
        let (order, fidelity, flits) = (Order::default(), Fidelity::default(), FlitOptions::default());
        Self { platform, rack, rack_name, fill: None, order, fidelity, flits, followed: None, failed: None }
    }

    /// Fills `fill` accelerators of each rack instead of as many as go in evenly.
    ///
    /// # Errors
    /// When a rack has fewer, or `fill` is 0.
    pub fn with_fill(self, fill: u32) -> Result<Self, Refusal> {
        let rack = self.rack.accelerators;
        if fill == 0 || fill > rack {
            return Err(Refusal::Fill { fill, rack });
        }
        Ok(Self { fill: Some(fill), ..self })
    }

    /// Steps on this kind of rack.
    ///
    /// # Errors
    /// When the platform has none of this name.
    pub fn with_rack(self, name: &str) -> Result<Self, Refusal> {
        let (rack_name, rack) = self.platform.rack.get_key_value(name).ok_or_else(|| Refusal::Rack {
            name: name.into(),
            known: self.platform.rack.keys().cloned().collect::<Vec<_>>().join(", "),
        })?;
        Ok(Self { rack, rack_name, ..self })
    }

    /// Counts ranks in this order.
    #[must_use]
    pub fn with_order(self, order: Order) -> Self {
        Self { order, ..self }
    }

    /// Looks so closely at communication; `flits` is for `Fidelity::L2` alone.
    ///
    /// # Errors
    /// When flits cannot be so.
    pub fn with_fidelity(self, fidelity: Fidelity, flits: FlitOptions) -> Result<Self, Refusal> {
        flits.check(fidelity)?;
        Ok(Self { fidelity, flits, ..self })
    }

    /// Counts or follows flits together with other steps: each step is predicted to count them, and once more to follow them.
    #[must_use]
    pub(crate) fn sharing(self, followed: &FollowedFlits) -> Self {
        Self { followed: Some(followed.clone()), ..self }
    }

    /// Lets links between two switches of the fabric between racks fail. Flows (`Fidelity::L1`) are then spread over the shortest ways that
    /// are left.
    ///
    /// # Errors
    /// When there is no such fabric or link.
    pub fn with_failed(self, links: &[(u32, u32)]) -> Result<Self, Refusal> {
        if links.is_empty() {
            return Ok(self);
        }
        let Some(fabric) = &self.platform.between else {
            let remedy = "take a platform of several racks";
            return Err(Refusal::Missing { what: "a failed link", needs: "a fabric between racks", remedy });
        };
        if self.fidelity == Fidelity::L0 {
            return Err(Refusal::FailedInClosedForm);
        }
        let ports = u32::try_from(fabric.ports()).unwrap_or(u32::MAX);
        let mut network = Network::new(fabric, ports)?;
        links.iter().try_for_each(|(one, other)| network.fail(*one, *other))?;
        Ok(Self { failed: Some(Arc::new(network)), ..self })
    }

    /// Steps on this kind of rack, with so many of each used and with ranks in this order, as far as each is given.
    ///
    /// # Errors
    /// When the platform has no accelerators, and as [`Job::with_rack`] and [`Job::with_fill`].
    pub fn chosen(
        platform: &'a Platform,
        rack: Option<&str>,
        fill: Option<u32>,
        order: Option<Order>,
    ) -> Result<Self, Refusal> {
        if platform.rack.is_empty() {
            let remedy = "take a platform with racks";
            return Err(Refusal::Missing { what: "a training step", needs: "accelerators", remedy });
        }
        let job = Self::new(platform).with_order(order.unwrap_or_default());
        let job = rack.map_or(Ok(job.clone()), |rack| job.with_rack(rack))?;
        fill.map_or(Ok(job.clone()), |fill| job.with_fill(fill))
    }

    /// The kind of rack.
    #[must_use]
    pub const fn rack(&self) -> &'a Rack {
        self.rack
    }

    /// The name of the kind of rack.
    #[must_use]
    pub const fn rack_name(&self) -> &'a str {
        self.rack_name
    }

    /// Accelerators of each rack that a layout uses.
    #[must_use]
    pub fn fill(&self, layout: &Layout) -> u32 {
        let (accelerators, groups) = (layout.accelerators(), self.order.groups(&layout.ranks()));
        self.fill
            .map_or_else(|| fill(self.rack.accelerators, accelerators, groups), |fill| fill.min(accelerators))
    }

    /// In which order ranks are counted.
    #[must_use]
    pub const fn order(&self) -> Order {
        self.order
    }

    /// What must be said of steps over CXL: between racks, or to where something lies.
    #[must_use]
    pub fn unproved(&self, offload: &Offload) -> Option<&'static str> {
        let is_fabric = self.platform.between.as_ref().is_some_and(|between| !between.carries.is_empty());
        let behind = self.rack.host.tiers.get(&offload.tier.to_string());
        let is_behind = offload.is_any() && behind.is_some_and(|memory| memory.port.is_some());
        (is_fabric || is_behind).then_some(UNPROVED)
    }

    /// How CPUs attach and what of CXL the fabrics carry: of the machine, what changes no figure.
    #[must_use]
    pub fn recorded(&self) -> String {
        let kind = self.rack.host.attach.kind;
        let attach = kind
            .map_or("how CPUs attach is not given".into(), |kind| format!("CPUs attach by {}", kind.name()));
        let fabrics = [("inside", self.rack.fabric.as_ref()), ("between", self.platform.between.as_ref())];
        let carried = fabrics.into_iter().filter_map(|(place, fabric)| {
            let names: Vec<_> = fabric?.carries.iter().map(|protocol| protocol.name()).collect();
            (!names.is_empty()).then(|| format!("; {place} racks CXL carries {}", names.join(", ")))
        });
        let carried: String = carried.collect();
        let none = if carried.is_empty() { "; no fabric carries CXL" } else { "" };
        attach + &carried + none
    }

    /// What the fabrics give an accelerator.
    #[must_use]
    pub fn fabrics(&self) -> Fabrics {
        let fitted = &self.rack.accelerator.fitted;
        let rates = |fabric: Option<&Fabric>, reached| fabric.map(|it| FabricRates::new(it, reached));
        Fabrics {
            inside: rates(self.rack.fabric.as_ref(), fitted.inside),
            between: rates(self.platform.between.as_ref(), fitted.between),
        }
    }

    /// Every memory beyond the accelerators' that there is.
    #[must_use]
    pub fn tiers(&self) -> Vec<TierId> {
        self.filled(1).tier_ids().collect()
    }

    /// The machine for so many accelerators, with racks as full as they get.
    fn filled(&self, accelerators: u32) -> Machine {
        let fill = self.fill.unwrap_or(self.rack.accelerators).min(accelerators);
        Machine::new(self.platform, self.rack, fill, self.order)
    }

    /// Whether the platform has what any layout takes that asks for as much as this one.
    pub(crate) fn check(&self, layout: &Layout) -> Result<(), Refusal> {
        self.filled(layout.accelerators()).check(layout)
    }

    /// Whether the platform has ports and ids for so many accelerators, and for its memory nodes if they are used.
    pub(crate) fn check_ports(&self, accelerators: u32, uses_pool: bool) -> Result<(), Refusal> {
        self.filled(accelerators).check_ports(accelerators, uses_pool)
    }

    /// The most accelerators that the platform has ports and ids for.
    pub(crate) fn most_accelerators(&self) -> u32 {
        let has = |accelerators| self.filled(accelerators).check_ports(accelerators, false).is_ok();
        let (mut most, mut beyond) = (1, Layout::MOST + 1);
        while most + 1 < beyond {
            let between = most + (beyond - most) / 2;
            if has(between) {
                most = between;
            } else {
                beyond = between;
            }
        }
        most
    }

    /// The machine for a layout, of which the closest groups of ranks stay together.
    pub(crate) fn machine(&self, layout: &Layout) -> Machine {
        self.machine_for(layout.accelerators(), self.fill(layout), &FollowedFlits::default())
    }

    /// The machine for so many ranks, with so many in each rack, of which flits are counted or followed with those of `followed`.
    fn machine_for(&self, ranks: u32, fill: u32, followed: &FollowedFlits) -> Machine {
        let machine = Machine::new(self.platform, self.rack, fill, self.order);
        match self.fidelity {
            Fidelity::L0 => machine,
            Fidelity::L1 | Fidelity::L2 => {
                let flits = (self.fidelity == Fidelity::L2).then(|| (self.flits, followed.clone()));
                machine.with_flows(self.platform, self.rack, ranks, self.failed.clone(), flits)
            }
        }
    }

    /// Whether links that failed change anything of so many ranks, and leave a way between each two.
    fn check_failed(&self, ranks: u32, fill: u32) -> Result<(), Refusal> {
        let (Some(network), Some(fabric)) = (&self.failed, &self.platform.between) else { return Ok(()) };
        if ranks <= fill {
            return Err(Refusal::FailedElsewhere { accelerators: ranks });
        }
        let ports = |rank| {
            let first = endpoint(rank, fill, self.rack.accelerators) * fabric.links;
            first..first + fabric.links
        };
        Ok(network.check_ways((0..ranks).flat_map(ports))?)
    }

    /// Seconds of collectives among the first accelerators, each with nothing beside it, as those of a step are priced.
    pub(crate) fn collectives(&self, ranks: u32, calls: &[(Pattern, f64)]) -> Result<Vec<f64>, Refusal> {
        self.check_ports(ranks, false)?;
        let fill = fill(self.rack.accelerators, ranks, [ranks; 3]);
        if fill > 1 && self.rack.fabric.is_none() {
            let remedy = "take a platform whose racks have one";
            return Err(Refusal::Missing { what: "a collective", needs: "a fabric inside racks", remedy });
        }
        let followed = self.followed.clone().unwrap_or_default();
        let machine = self.machine_for(ranks, fill, &followed);
        let mut group = [1; 5];
        group[TP] = ranks;
        let span = machine.span(&group, &[TP]);
        let priced =
            || calls.iter().map(|(pattern, bytes)| machine.alone(*pattern, span, *bytes).sum()).collect();
        let seconds = self.counted(&machine, &followed, priced)?;
        machine.flits()?;
        Ok(seconds)
    }

    /// What comes of pricing transfers. If their flits are followed, and not with those of others, they are counted first.
    fn counted<T>(
        &self,
        machine: &Machine,
        followed: &FollowedFlits,
        priced: impl Fn() -> T,
    ) -> Result<T, Refusal> {
        let found = priced();
        if self.fidelity != Fidelity::L2 || self.followed.is_some() {
            return Ok(found);
        }
        machine.flits()?;
        followed.begin(self.flits.window_bytes)?;
        Ok(priced())
    }

    /// Predicts a step.
    ///
    /// # Errors
    /// Why it cannot run.
    pub fn predict(&self, model: &Model, layout: &Layout) -> Result<PlannedStep, Refusal> {
        self.predict_stages(model, layout).map(|(step, _)| step)
    }

    /// Predicts a step, and how the blocks of the model are dealt out to the stages, the first one first.
    ///
    /// # Errors
    /// Why the layout cannot run.
    pub fn predict_stages(
        &self,
        model: &Model,
        layout: &Layout,
    ) -> Result<(PlannedStep, Vec<Stage>), Refusal> {
        layout.check(model)?;
        let followed = self.followed.clone().unwrap_or_default();
        let machine = self.machine_for(layout.accelerators(), self.fill(layout), &followed);
        machine.check(layout)?;
        self.check_failed(layout.accelerators(), machine.fill)?;
        let priced = || {
            let block = Block::new(&machine, model, layout);
            (closed_form::step(&machine, model, &block, layout), block)
        };
        let (step, block) = self.counted(&machine, &followed, priced)?;
        if !step.total_s.is_finite() {
            return Err(Refusal::Infinite);
        }
        let stages = closed_form::stages(model, &block, layout);
        Ok((PlannedStep { layout: *layout, fill: machine.fill, step, flits: machine.flits()? }, stages))
    }
}

/// The most accelerators of a rack that fill all racks evenly and keep groups of neighbours together, as far as that goes.
fn fill(rack: u32, accelerators: u32, groups: [u32; 3]) -> u32 {
    if accelerators <= rack {
        return accelerators;
    }
    let most = |fits: &dyn Fn(u32) -> bool| (1..=rack).rev().find(|it| fits(*it));
    let even = |it: u32| accelerators.is_multiple_of(it);
    let whole = |it: u32| groups.iter().all(|group| it.is_multiple_of(*group) || group.is_multiple_of(it));
    most(&|it| even(it) && whole(it) && 2 * it > rack).or_else(|| most(&whole)).unwrap_or(rack)
}
