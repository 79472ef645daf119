//! What steps cost, and what of it can be compared.

use polder_platform::Rates;
use polder_sim::FoundLayout;
use serde::Serialize;

use super::{Arguments, Site};

/// What a step costs, or a run of many.
#[derive(Serialize)]
pub(super) struct Costs {
    pub(super) steps: f64,
    pub(super) total_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    money_usd: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    energy_j: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    carbon_g: Option<f64>,
}

/// A run over so many tokens, in sequences of so many.
#[derive(Clone, Copy)]
pub(super) struct Run {
    pub(super) tokens: f64,
    pub(super) sequence: f64,
}

impl Costs {
    /// Of a step, or of as many as go through the tokens of a run.
    pub(super) fn new(rates: &Rates, FoundLayout { layout, step }: &FoundLayout, run: Option<Run>) -> Self {
        let steps = run.map_or(1.0, |run| (run.tokens / (run.sequence * f64::from(layout.batch))).ceil());
        let total_s = steps * step.total_s;
        let [money_usd, energy_j, carbon_g] = rates.a_second.map(|rate| rate.map(|rate| rate * total_s));
        Self { steps, total_s, money_usd, energy_j, carbon_g }
    }

    /// In the order of [`Rates::NAMES`].
    pub(super) const fn paid(&self) -> [Option<f64>; Rates::NAMES.len()] {
        [self.money_usd, self.energy_j, self.carbon_g]
    }

    /// The names of its columns.
    pub(super) fn names(&self) -> impl Iterator<Item = &'static str> {
        let paid = Rates::NAMES.into_iter().zip(self.paid()).filter_map(|(name, cost)| cost.and(Some(name)));
        ["bill_steps", "bill_total_s"].into_iter().chain(paid)
    }

    /// Its columns.
    pub(super) fn figures(&self) -> impl Iterator<Item = f64> {
        [self.steps, self.total_s].into_iter().chain(self.paid().into_iter().flatten())
    }
}

/// What is paid besides time and memory, each with the unit of its column and how much of [`Rates::NAMES`] that is.
pub(super) const AXES: [(&str, (&str, f64)); Rates::NAMES.len()] =
    [("money", ("USD", 1.0)), ("energy", ("kWh", 3.6e6)), ("carbon", ("kg CO2", 1e3))];

/// What is not compared, because some platform has no number for it.
pub(super) struct LeftOut<'a> {
    /// Axes, each with the first such platform.
    pub(super) axes: Vec<(&'static str, &'a str)>,
    /// The first platform of which it is electricity.
    electricity: Option<&'a str>,
}

impl LeftOut<'_> {
    pub(super) fn electricity_line(&self, arguments: &Arguments) -> Option<String> {
        let prices = arguments.prices.as_deref().unwrap_or_default();
        self.electricity.map(|platform| {
            format!("electricity is left out of money, but of rents: {prices} has no power or no price of it for {platform}")
        })
    }
}

/// Leaves out what could not be compared.
pub(super) fn leave_out_incomparable<'a>(sites: &mut [Site<'a>]) -> LeftOut<'a> {
    LeftOut { axes: leave_axes_out(sites), electricity: leave_electricity_out(sites) }
}

/// Leaves out what some platform has no number for: each such axis with the first platform.
fn leave_axes_out<'a>(sites: &mut [Site<'a>]) -> Vec<(&'static str, &'a str)> {
    let mut left_out = vec![];
    for (axis, (name, _)) in AXES.into_iter().enumerate() {
        let is_unknown = |site: &Site<'_>| site.rates.as_ref().is_some_and(|it| it.a_second[axis].is_none());
        let is_known_of_any = sites.iter().any(|site| !is_unknown(site));
        let Some(without) = sites.iter().find(|site| is_unknown(site)).map(|site| site.platform) else {
            continue;
        };
        if is_known_of_any {
            left_out.push((name, without));
        }
        for rates in sites.iter_mut().filter_map(|site| site.rates.as_mut()) {
            rates.a_second[axis] = None;
        }
    }
    left_out
}

/// Leaves electricity out of the money of all where that of some platform is not known, because unlike sums alternatives be compared:
/// the first such platform.
fn leave_electricity_out<'a>(sites: &mut [Site<'a>]) -> Option<&'a str> {
    let paid = |site: &Site<'_>| site.rates.as_ref().filter(|it| it.a_second[0].is_some())?.electricity;
    let without = sites.iter().find(|site| paid(site).is_none())?.platform;
    sites.iter().find_map(paid)?;
    for rates in sites.iter_mut().filter_map(|site| site.rates.as_mut()) {
        let electricity = rates.electricity.unwrap_or(0.0);
        rates.a_second[0] = rates.a_second[0].map(|money| money - electricity);
    }
    Some(without)
}
