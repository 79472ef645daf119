//! What machines cost: money, watts and carbon dioxide, each number with its source.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::{
    CarbonIntensity, DataError, EnergyPrice, Folder, Lifetime, Money, Platform, Power, Quantity, Rack, Rent,
    Unit, file, names, quoted, read,
};

/// What a file of prices says.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prices {
    /// What they are, in a line.
    #[serde(deserialize_with = "file::printable_text")]
    pub title: String,
    /// Of all machines.
    #[serde(default)]
    everywhere: Costs,
    /// By the name of a platform or of an accelerator, laid over that: first the accelerator's, then the platform's.
    #[serde(default)]
    machine: BTreeMap<String, Costs>,
    #[serde(skip)]
    file: String,
}

/// A number with its source.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, bound = "T: DeserializeOwned")]
struct Sourced<T> {
    value: T,
    #[serde(deserialize_with = "file::printable_text")]
    source: String,
}

/// What a machine costs, as far as it is known.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Costs {
    /// An accelerator with all that it takes, electricity too; comes before prices.
    rent: Option<Sourced<Rent>>,
    /// For how long what is bought is used.
    lifetime: Option<Sourced<Lifetime>>,
    electricity: Option<Sourced<EnergyPrice>>,
    carbon: Option<Sourced<CarbonIntensity>>,
    accelerator: Part,
    /// A host, with whatever stands in its chassis besides accelerators.
    host: Part,
    /// A port of a switch between racks.
    port: Part,
    /// A memory node of a pool.
    node: Part,
}

/// What is bought and fed.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Part {
    price: Option<Sourced<Money>>,
    power: Option<Sourced<Power>>,
}

/// What a machine costs in a second that it is used.
#[derive(Clone, Debug, PartialEq)]
pub struct Rates {
    /// In the order of [`Rates::NAMES`]; what there is no number for is left out.
    pub a_second: [Option<f64>; Self::NAMES.len()],
    /// What of the money is electricity beside prices; nothing where a rent has it inside, `None` where it is not known.
    pub electricity: Option<f64>,
    /// What they follow from.
    pub inputs: Vec<Input>,
}

/// A number that rates follow from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// What it is a number of.
    pub what: &'static str,
    /// The number with its unit.
    pub value: String,
    /// How many there are of that, where it is counted.
    pub count: Option<u64>,
    /// Where it comes from.
    pub source: String,
}

/// What of rates is not compared, because some platform has no number for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeftOut<'a> {
    /// Of [`Rates::NAMES`], by their places, each with the first such platform.
    pub axes: Vec<(usize, &'a str)>,
    /// The first platform of which it is electricity.
    pub electricity: Option<&'a str>,
}

impl Rates {
    /// What machines cost, with the units.
    pub const NAMES: [&str; 3] = ["money_usd", "energy_j", "carbon_g"];

    /// Leaves out of the rates of platforms what could not be compared: of unlike sums no one is the least.
    pub fn leave_out_incomparable<'a>(all: &mut [(&'a str, &mut Self)]) -> LeftOut<'a> {
        let axes = (0..Self::NAMES.len()).filter_map(|axis| Some((axis, Self::leave_axis_out(all, axis)?)));
        LeftOut { axes: axes.collect(), electricity: Self::leave_electricity_out(all) }
    }

    /// Leaves out what some platform has no number for: the first, if another has one.
    fn leave_axis_out<'a>(all: &mut [(&'a str, &mut Self)], axis: usize) -> Option<&'a str> {
        let without = all.iter().find(|(_, rates)| rates.a_second[axis].is_none())?.0;
        let is_known_of_any = all.iter().any(|(_, rates)| rates.a_second[axis].is_some());
        all.iter_mut().for_each(|(_, rates)| rates.a_second[axis] = None);
        is_known_of_any.then_some(without)
    }

    /// Leaves electricity out of the money of all where that of some platform is not known: the first such platform.
    fn leave_electricity_out<'a>(all: &mut [(&'a str, &mut Self)]) -> Option<&'a str> {
        let paid = |rates: &Self| rates.electricity.filter(|_| rates.a_second[0].is_some());
        let without = all.iter().find(|(_, rates)| paid(rates).is_none())?.0;
        all.iter().find_map(|(_, rates)| paid(rates))?;
        for (_, rates) in all {
            let electricity = rates.electricity.unwrap_or(0.0);
            rates.a_second[0] = rates.a_second[0].map(|money| money - electricity);
        }
        Some(without)
    }
}

impl Prices {
    /// Reads prices: those that Polder brings along by their name, any other by the path of their file.
    ///
    /// # Errors
    /// When there are none, or the file says what cannot be.
    pub fn load(name: &str) -> Result<Self, DataError> {
        let prices = Self { file: name.into(), ..read(Folder::Prices, name)? };
        let mut names = prices.machine.keys().map(|machine| file::check_name(machine));
        names.try_for_each(|it| it.map_err(|problem| DataError::new(name, "machine", problem)))?;
        Ok(prices)
    }

    /// Each machine of the file that is none of these platforms and none that Polder brings along, and no accelerator of theirs:
    /// nobody ever asks what it costs.
    ///
    /// # Errors
    /// When a platform that Polder brings along is damaged.
    pub fn unknown(&self, platforms: &[(&str, Platform)]) -> Result<Vec<DataError>, DataError> {
        let ours = names(Folder::Platforms).into_iter().map(|name| Ok((name, Platform::load(name)?)));
        let ours = ours.collect::<Result<Vec<_>, DataError>>()?;
        let known = ours.iter().chain(platforms).flat_map(|(name, platform)| {
            platform.rack.values().map(|rack| rack.accelerator.name.as_str()).chain([*name])
        });
        let known: BTreeSet<_> = known.collect();
        let unknown = self.machine.keys().filter(|name| !known.contains(name.as_str()));
        let problem = "no platform and no accelerator of this name; it is passed over";
        Ok(unknown.map(|name| DataError::new(&self.file, &format!("machine.{name}"), problem)).collect())
    }

    /// What so many accelerators of `rack` of the platform called `name` cost, with their hosts, their ports and memory nodes.
    ///
    /// # Errors
    /// When nothing is said of the machine, or prices come without a lifetime.
    pub fn rates(
        &self,
        name: &str,
        platform: &Platform,
        rack: &Rack,
        accelerators: u32,
    ) -> Result<Rates, DataError> {
        let chip = &rack.accelerator.name;
        let known = [chip.as_str(), name].into_iter().filter_map(|it| self.machine.get(it));
        let costs = known.fold(self.everywhere.clone(), Costs::overridden_by);
        if costs.rent.is_none() && costs.lifetime.is_none() && costs.accelerator.price.is_some() {
            let problem =
                format!("{} has prices to be spread over it; expected one such as \"4 years\"", quoted(name));
            return Err(DataError::new(&self.file, "everywhere.lifetime", problem));
        }
        let rates = costs.rates(platform, rack, accelerators);
        match rates.a_second {
            [None, None, None] => {
                let problem = format!(
                    "expected \"{}\", or its accelerator \"{}\", with rent, or price or power of the accelerator",
                    quoted(name),
                    quoted(chip)
                );
                Err(DataError::new(&self.file, "machine", problem))
            }
            _ => Ok(rates),
        }
    }
}

impl Costs {
    /// What `over` says, and where it says nothing what this says.
    fn overridden_by(self, over: &Self) -> Self {
        Self {
            rent: over.rent.clone().or(self.rent),
            lifetime: over.lifetime.clone().or(self.lifetime),
            electricity: over.electricity.clone().or(self.electricity),
            carbon: over.carbon.clone().or(self.carbon),
            accelerator: self.accelerator.overridden_by(&over.accelerator),
            host: self.host.overridden_by(&over.host),
            port: self.port.overridden_by(&over.port),
            node: self.node.overridden_by(&over.node),
        }
    }

    fn rates(&self, platform: &Platform, rack: &Rack, accelerators: u32) -> Rates {
        let all = u64::from(accelerators);
        let nodes = platform.pool.as_ref().map_or(0, |pool| all.div_ceil(pool.accelerators.into()));
        let ports = platform.between.as_ref().map_or(0, |between| {
            // Within one rack only memory nodes need the fabric between racks.
            let leaves = accelerators > rack.accelerators || nodes > 0;
            let own = if leaves { all * u64::from(between.links) } else { 0 };
            between.switch_ports(own + platform.pool.as_ref().map_or(0, |pool| nodes * u64::from(pool.ports)))
        });
        let others = [
            ("host", &self.host, all.div_ceil(rack.host.accelerators.into())),
            ("port", &self.port, ports),
            ("memory node", &self.node, nodes),
        ];
        let mut inputs = vec![];
        let power = times(&self.accelerator.power, "accelerator", Some(all), &mut inputs).map(|watts| {
            let rest = others.map(|(what, part, count)| times(&part.power, what, Some(count), &mut inputs));
            rest.into_iter().flatten().fold(watts, |sum, watts| sum + watts)
        });
        let rent = times(&self.rent, "accelerator", Some(all), &mut inputs).map(|rent| (rent, Some(0.0)));
        let paid = rent.or_else(|| {
            let price = times(&self.accelerator.price, "accelerator", Some(all), &mut inputs)?;
            let rest = others.map(|(what, part, count)| times(&part.price, what, Some(count), &mut inputs));
            let price = rest.into_iter().flatten().fold(price, |sum, price| sum + price);
            let lifetime = times(&self.lifetime, "lifetime", None, &mut inputs)?;
            let fed = |watts| Some(watts * times(&self.electricity, "electricity", None, &mut inputs)?);
            let electricity = power.and_then(fed);
            Some((price / lifetime + electricity.unwrap_or(0.0), electricity))
        });
        let (money, electricity) = paid.unzip();
        let carbon =
            power.and_then(|watts| Some(watts * times(&self.carbon, "electricity", None, &mut inputs)?));
        Rates { a_second: [money, power, carbon], electricity: electricity.flatten(), inputs }
    }
}

impl Part {
    fn overridden_by(self, over: &Self) -> Self {
        Self { price: over.price.clone().or(self.price), power: over.power.clone().or(self.power) }
    }
}

/// So many times a number, which is noted.
fn times<U: Unit>(
    number: &Option<Sourced<Quantity<U>>>,
    what: &'static str,
    count: Option<u64>,
    inputs: &mut Vec<Input>,
) -> Option<f64> {
    let Sourced { value, source } = number.as_ref().filter(|_| count != Some(0))?;
    inputs.push(Input { what, value: value.to_string(), count, source: source.clone() });
    Some(count.map_or(1.0, |count| count as f64) * value.value())
}
