//! What steps cost, and what of it can be compared.

use polder_platform::Rates;
use polder_sim::{FoundLayout, Margin};
use serde::{Serialize, Serializer};

use super::{Arguments, Site};

/// What a step costs, or a run of many.
pub(super) struct Costs {
    steps: f64,
    pub(super) total_s: f64,
    paid: [Option<f64>; Rates::NAMES.len()],
    range: [f64; 2],
}

/// A run over so many tokens, in sequences of so many.
#[derive(Clone, Copy)]
pub(super) struct Run {
    pub(super) tokens: f64,
    pub(super) sequence: f64,
}

impl Costs {
    /// Of a step, or of as many as go through the tokens of a run.
    pub(super) fn new(
        rates: &Rates,
        margin: &Margin,
        FoundLayout { layout, step }: &FoundLayout,
        run: Option<Run>,
    ) -> Self {
        let steps = run.map_or(1.0, |run| (run.tokens / (run.sequence * f64::from(layout.batch))).ceil());
        let total_s = steps * step.total_s;
        Self {
            steps,
            total_s,
            paid: rates.a_second.map(|rate| rate.map(|rate| rate * total_s)),
            range: margin.range,
        }
    }

    /// In the order of [`Rates::NAMES`].
    pub(super) const fn paid(&self) -> [Option<f64>; Rates::NAMES.len()] {
        self.paid
    }

    /// Its columns, each with its name: what is predicted, and from the least to the most that can be relied on.
    pub(super) fn columns(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let paid = COLUMNS.into_iter().zip([Some(self.total_s)].into_iter().chain(self.paid));
        let paid = paid.filter_map(|(names, cost)| {
            let [low, high] = self.range.map(|times| Some(times * cost?));
            Some(names.into_iter().zip([cost?, low?, high?]))
        });
        std::iter::once(("bill_steps", self.steps)).chain(paid.flatten())
    }
}

/// The names of the time and of [`Rates::NAMES`], each with those of the ends of its range.
const COLUMNS: [[&str; 3]; 1 + Rates::NAMES.len()] = [
    ["bill_total_s", "bill_total_low_s", "bill_total_high_s"],
    [Rates::NAMES[0], "money_low_usd", "money_high_usd"],
    [Rates::NAMES[1], "energy_low_j", "energy_high_j"],
    [Rates::NAMES[2], "carbon_low_g", "carbon_high_g"],
];

/// By the names of its columns, without that of the bill.
impl Serialize for Costs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.columns().map(|(name, cost)| (name.trim_start_matches("bill_"), cost)))
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
