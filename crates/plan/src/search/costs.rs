//! What steps cost, and what that follows from.

use std::collections::BTreeSet;

use polder_platform::{LeftOut, Rates};
use polder_sim::{FoundLayout, Margin, accelerators, grouped};
use serde::{Serialize, Serializer};

use super::super::table::print_wrapped;

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
pub(crate) const AXES: [(&str, (&str, f64)); Rates::NAMES.len()] =
    [("money", ("USD", 1.0)), ("energy", ("kWh", 3.6e6)), ("carbon", ("kg CO2", 1e3))];

/// What says that electricity is left out, if it is.
pub(crate) fn electricity_line(left_out: &LeftOut<'_>, prices: &str) -> Option<String> {
    left_out.electricity.map(|platform| {
        format!("electricity is left out of money, but of rents: {prices} has no power or no price of it for {platform}")
    })
}

/// What costs follow from, each number once with its source, and what is left out.
pub(crate) fn print_sources(what: &str, prices: &str, sites: &[(&str, u32, &Rates)], left_out: &LeftOut<'_>) {
    print_wrapped(&format!(
        "what {what} costs, by {prices}, as if everything took its full power all the time:"
    ));
    let mut sources = vec![];
    for (platform, count, rates) in sites {
        let counted = rates.inputs.iter().map(|input| {
            sources.push(format!("  {}, {}: {}", input.what, input.value, input.source));
            match input.count {
                Some(count) => format!("{} x {}, {}", grouped(count), input.what, input.value),
                None => format!("{}, {}", input.what, input.value),
            }
        });
        let counted: Vec<_> = counted.collect();
        print_wrapped(&format!("  {platform}, {}: {}", accelerators(*count), counted.join("; ")));
    }
    print_wrapped("from");
    let mut seen = BTreeSet::new();
    for line in sources.iter().filter(|line| seen.insert(*line)) {
        print_wrapped(line);
    }
    for (axis, platform) in &left_out.axes {
        print_wrapped(&format!("{} is left out: {prices} has none for {platform}", AXES[*axis].0));
    }
}
