//! Where a fabric between racks pays: the fastest layouts over two fabrics, by the bandwidth of each and of the memory nodes behind one.

use polder_platform::{Bandwidth, LeftOut, Platform, Prices, Rates, TierId};
use serde::Serialize;

use super::request::{Request, RequestError, UNPROVED_DIFFERENCE};
use super::{FoundLayout, Outcome, Progress};
use crate::judge::margin::Margin;
use crate::judge::range::StepClass;
use crate::step::layout::Layout;

/// A step over two fabrics, of which some bandwidths are tried.
#[derive(Clone, Debug)]
pub struct PaysQuestion<'a> {
    /// The step, on the platform that is there.
    pub request: &'a Request,
    /// The platform that may pay: its name or path, on a kind of rack with `:RACK` behind it.
    pub against: &'a str,
    /// What an accelerator gets between racks in one direction, on both platforms.
    pub between: &'a [Bandwidth],
    /// What an accelerator reads from the memory nodes of the one that may pay. What is above the bandwidth of its link is not tried.
    pub pool: &'a [Bandwidth],
    /// What both cost as they are: a port costs as much at each bandwidth.
    pub prices: Option<&'a Prices>,
}

/// Steps over both fabrics.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FabricMap {
    /// How the figures were obtained: "simulated".
    pub kind: &'static str,
    /// The platforms' names: the one that is there, and the one that may pay.
    pub platforms: [String; 2],
    /// Both as they are.
    pub own: MapCell,
    /// Tokens of a step.
    pub tokens: f64,
    /// With each bandwidth of the one that may pay, of its pool, and of the one that is there, in this order.
    pub cells: Vec<MapCell>,
    /// What must be said with it.
    pub note: &'static str,
    /// What both cost a second.
    #[serde(skip)]
    pub rates: Option<[Rates; 2]>,
}

impl FabricMap {
    /// What of their costs is not compared: whether of the one that is there or of the other.
    #[must_use]
    pub fn left_out(&self) -> LeftOut<'_> {
        let Some(mut rates) = self.rates.clone() else { return LeftOut::default() };
        left_out(&self.platforms, &mut rates)
    }
}

/// Leaves out of the rates what could not be compared.
fn left_out<'a>(platforms: &'a [String; 2], rates: &mut [Rates; 2]) -> LeftOut<'a> {
    let mut named: Vec<_> = platforms.iter().map(String::as_str).zip(rates.iter_mut()).collect();
    Rates::leave_out_incomparable(&mut named)
}

/// What a step costs on both platforms.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CellCost {
    /// Of what: one of [`Rates::NAMES`].
    pub name: &'static str,
    /// On the platform that is there, and on the other.
    pub step: [f64; 2],
    /// How many times as much a step costs where it is as on the platform that may pay, as predicted.
    pub times: f64,
    /// From how many to how many times, as far as can be relied on.
    pub range: [f64; 2],
}

impl CellCost {
    /// Whether a step is surely cheaper on the second platform, or surely dearer; `None` where neither is sure.
    #[must_use]
    pub fn pays(&self) -> Option<bool> {
        is_above_one(self.range)
    }
}

fn is_above_one([least, most]: [f64; 2]) -> Option<bool> {
    match (least > 1.0, most < 1.0) {
        (true, _) => Some(true),
        (_, true) => Some(false),
        _ => None,
    }
}

/// One pair of fabrics.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MapCell {
    /// Bytes a second that an accelerator gets between racks in one direction: on the platform that is there, and on the other.
    pub between_bytes_per_s: [f64; 2],
    /// Bytes a second that an accelerator reads from memory nodes; `None` where there are none.
    pub pool_bytes_per_s: Option<f64>,
    /// Seconds of the fastest step that fits.
    pub seconds: [f64; 2],
    /// How that is laid out.
    pub layouts: [Layout; 2],
    /// How many times as fast the step is on the platform that may pay, as predicted.
    pub times: f64,
    /// From how many to how many times, as far as can be relied on.
    pub range: [f64; 2],
    /// What a step costs, of what is known of both.
    pub costs: Vec<CellCost>,
}

impl MapCell {
    /// Whether the second platform is surely faster, or surely slower; `None` where neither is sure.
    #[must_use]
    pub fn pays(&self) -> Option<bool> {
        is_above_one(self.range)
    }
}

/// Why a map cannot be drawn.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PaysError {
    /// A platform, or the model, refuses.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// A platform has no fabric between racks.
    #[error(
        "{0}: no fabric joins its racks, so no bandwidth of one can be tried; take a platform with [between]"
    )]
    NoFabric(String),
    /// Bandwidths of a pool are given, and there is none.
    #[error(
        "{0}: has no memory nodes, so no bandwidth of them can be tried; leave them out, or take a platform with [pool]"
    )]
    NoPool(String),
    /// No layout fits on a platform.
    #[error("{platform}: nothing fits")]
    NothingFits {
        /// Which.
        platform: String,
        /// What comes nearest.
        outcome: Box<Outcome>,
    },
}

/// The fastest step on a platform with some bandwidths.
struct Side {
    between: f64,
    pool: Option<f64>,
    best: FoundLayout,
    margin: Margin,
}

/// One of both platforms, as it is asked about.
struct PlatformRequest {
    name: String,
    request: Request,
    platform: Platform,
}

impl PlatformRequest {
    fn new(name: &str, file: &str, request: Request) -> Result<Self, PaysError> {
        let platform = Platform::load(file).map_err(RequestError::from)?;
        Ok(Self { name: name.into(), request, platform })
    }

    /// The fastest step on `platform`, which is this one with other bandwidths.
    fn side(&self, platform: &Platform, threads: usize, progress: Progress<'_>) -> Result<Side, PaysError> {
        let model = self.request.model()?;
        let outcome = self.request.look(platform, &model, threads, progress)?;
        let Some(best) = outcome.best().copied() else {
            return Err(PaysError::NothingFits { platform: self.name.clone(), outcome: Box::new(outcome) });
        };
        let job = self.request.job(&self.name, platform)?;
        let rack = job.rack();
        let class = StepClass::of(&model, &best.layout);
        let margin = Margin::of(&rack.accelerator, class).map_err(RequestError::from)?;
        let fabric = platform.between.as_ref().ok_or_else(|| PaysError::NoFabric(self.name.clone()))?;
        let nodes = platform.tiers(rack).into_iter().find(|(id, _)| *id == TierId::Pool);
        let pool = nodes.map(|(_, share)| share.read);
        Ok(Side { between: fabric.payload().value(), pool, best, margin })
    }

    /// What it costs a second, as it is.
    fn rates(&self, prices: &Prices) -> Result<Rates, RequestError> {
        let job = self.request.job(&self.name, &self.platform)?;
        let Request { platform: file, accelerators, .. } = &self.request;
        Ok(prices.rates(file, &self.platform, job.rack(), *accelerators)?)
    }

    fn with_between(&self, bandwidth: Bandwidth) -> Result<Platform, PaysError> {
        self.platform.with_between(bandwidth).ok_or_else(|| PaysError::NoFabric(self.name.clone()))
    }

    /// With each of these bandwidths of memory nodes that an accelerator's link does not hold back, or with those that it has.
    fn with_pools(&self, between: Bandwidth, pools: &[Bandwidth]) -> Result<Vec<Platform>, PaysError> {
        let platform = self.with_between(between)?;
        if pools.is_empty() {
            return Ok(vec![platform]);
        }
        // Of those that the link holds back, all are as good as the first.
        let beyond = pools.iter().position(|pool| pool.value() >= between.value());
        let tried = pools.iter().take(beyond.map_or(pools.len(), |at| at + 1));
        let with = |pool: &Bandwidth| platform.with_pool(*pool);
        tried.map(|pool| with(pool).ok_or_else(|| PaysError::NoPool(self.name.clone()))).collect()
    }
}

impl PaysQuestion<'_> {
    /// Searches for the fastest layout with each bandwidth, on `threads` threads. `progress` is told of every block that is done, of how
    /// many.
    ///
    /// # Errors
    /// When a file is damaged, a platform lacks what is tried, or no layout runs or fits there.
    pub fn map(&self, threads: usize, progress: Progress<'_>) -> Result<FabricMap, PaysError> {
        let Request { platform: name, .. } = self.request;
        let there = PlatformRequest::new(name, name, self.request.clone())?;
        let (file, request) = self.request.on(self.against);
        let other = PlatformRequest::new(self.against, file, request)?;
        let (mut between, mut pool) = (self.between.to_vec(), self.pool.to_vec());
        for tried in [&mut between, &mut pool] {
            tried.sort_by(|a, b| a.value().total_cmp(&b.value()));
            tried.dedup();
        }
        let platforms = |asked: &PlatformRequest| {
            let tried = between.iter().map(|bandwidth| asked.with_between(*bandwidth));
            std::iter::once(Ok(asked.platform.clone())).chain(tried).collect::<Result<Vec<_>, _>>()
        };
        let theres = platforms(&there)?;
        let mut others = vec![other.platform.clone()];
        for bandwidth in &between {
            others.extend(other.with_pools(*bandwidth, &pool)?);
        }
        let count = theres.len() + others.len();
        let all = theres
            .iter()
            .map(|platform| (&there, platform))
            .chain(others.iter().map(|platform| (&other, platform)));
        let sides = all.enumerate().map(|(at, (asked, platform))| {
            asked.side(platform, threads, &|index, blocks| progress(at * blocks + index, count * blocks))
        });
        let sides = sides.collect::<Result<Vec<_>, _>>()?;
        let (theres, others) = sides.split_at(theres.len());
        let ([own_there, theres @ ..], [own_other, others @ ..]) = (theres, others) else {
            unreachable!("both are tried as they are");
        };
        let rates = |prices| Ok::<_, PaysError>([there.rates(prices)?, other.rates(prices)?]);
        let rates = self.prices.map(rates).transpose()?;
        let platforms = [there.name, other.name];
        let comparable = rates.clone().map(|mut rates| {
            left_out(&platforms, &mut rates);
            rates
        });
        let cell = |there, other| cell(there, other, comparable.as_ref());
        let batch = f64::from(own_there.best.layout.batch);
        Ok(FabricMap {
            kind: "simulated",
            own: cell(own_there, own_other),
            tokens: batch * f64::from(self.request.model()?.sequence),
            cells: others
                .iter()
                .flat_map(|other| theres.iter().map(move |there| cell(there, other)))
                .collect(),
            platforms,
            note: UNPROVED_DIFFERENCE,
            rates,
        })
    }
}

fn cell(there: &Side, other: &Side, rates: Option<&[Rates; 2]>) -> MapCell {
    let seconds = [there, other].map(|side| side.best.step.total_s);
    let times = seconds[0] / seconds[1];
    let range = there.margin.times(&other.margin, times);
    let cost = |[there, other]: &[Rates; 2], axis: usize| {
        let rates = [there.a_second[axis]?, other.a_second[axis]?];
        let dearer = rates[0] / rates[1];
        Some(CellCost {
            name: Rates::NAMES[axis],
            step: [rates[0] * seconds[0], rates[1] * seconds[1]],
            times: times * dearer,
            range: range.map(|times| times * dearer),
        })
    };
    let costs = |rates| (0..Rates::NAMES.len()).filter_map(|axis| cost(rates, axis)).collect();
    MapCell {
        between_bytes_per_s: [there.between, other.between],
        pool_bytes_per_s: other.pool,
        seconds,
        layouts: [there, other].map(|side| side.best.layout),
        times,
        range,
        costs: rates.map_or_else(Vec::new, costs),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::given::{GivenLayout, Tiers};

    fn request(accelerators: u32) -> Request {
        let asked = serde_json::json!({
            "model": "llama3-8b", "platform": "nvl72-ndr", "accelerators": accelerators, "rack": null, "fill": null, "order": null,
            "against": null, "sequence": null,
        });
        let request: Request = serde_json::from_value(asked).unwrap();
        let layout = GivenLayout { batch: Some(512), tiers: Tiers::All, ..GivenLayout::default() };
        Request { layout, ..request }
    }

    fn rates(gigabytes: &[f64]) -> Vec<Bandwidth> {
        gigabytes.iter().map(|it| Bandwidth::new(it * 1e9)).collect()
    }

    #[test]
    fn more_bandwidth_never_makes_the_fastest_step_slower() {
        let request = request(128);
        let (between, pool) = (rates(&[100.0, 25.0, 50.0, 25.0]), rates(&[50.0, 100.0, 400.0, 50.0]));
        let against = "nvl72-cxl";
        let question =
            PaysQuestion { request: &request, against, between: &between, pool: &pool, prices: None };
        let map = question.map(2, &|_, _| ()).unwrap();
        // A value that is given twice is tried once. At 25 and at 50 GB/s all pools beyond the first are held back by the link, at 100 those beyond the second.
        let pools = [1, 1, 2];
        assert_eq!(map.cells.len(), 3 * pools.iter().sum::<usize>());
        for cell in &map.cells {
            assert!((cell.times - cell.seconds[0] / cell.seconds[1]).abs() < 1e-12);
            assert!(cell.range[0] < cell.times && cell.times < cell.range[1]);
            let [_, other] = cell.between_bytes_per_s;
            assert!(cell.pool_bytes_per_s.unwrap() <= other * (1.0 + 1e-9));
            for slower in &map.cells {
                let is_slower = |at: usize| slower.between_bytes_per_s[at] <= cell.between_bytes_per_s[at];
                assert!(!is_slower(0) || slower.seconds[0] >= cell.seconds[0]);
                let is_slow_pool = slower.pool_bytes_per_s <= cell.pool_bytes_per_s;
                assert!(!(is_slower(1) && is_slow_pool) || slower.seconds[1] >= cell.seconds[1]);
            }
        }
    }

    #[test]
    fn what_a_platform_lacks_is_named() {
        let request = request(64);
        let (between, pool) = (rates(&[25.0]), rates(&[10.0]));
        let asked = |against| {
            let question =
                PaysQuestion { request: &request, against, between: &between, pool: &pool, prices: None };
            question.map(1, &|_, _| ()).unwrap_err().to_string()
        };
        assert!(asked("dgx-h100").contains("dgx-h100: has no memory nodes"), "{}", asked("dgx-h100"));
        assert!(asked("nvl72").contains("nvl72: no fabric joins its racks"), "{}", asked("nvl72"));
    }

    #[test]
    fn a_step_costs_its_time_by_what_a_second_costs() {
        let prices = Prices::load("watts").unwrap();
        let (request, between) = (request(128), rates(&[50.0]));
        let question = PaysQuestion {
            request: &request,
            against: "nvl72-cxl",
            between: &between,
            pool: &[],
            prices: Some(&prices),
        };
        let map = question.map(2, &|_, _| ()).unwrap();
        let there = map.rates.as_ref().unwrap()[0].a_second[1].unwrap();
        assert!(map.left_out().axes.is_empty() && map.tokens > 0.0);
        for cell in map.cells.iter().chain([&map.own]) {
            let [cost] = cell.costs[..] else { panic!("{cell:?}") };
            assert_eq!(cost.name, "energy_j");
            assert!((cost.step[0] / (there * cell.seconds[0]) - 1.0).abs() < 1e-9, "{cell:?}");
            // Both have the same accelerators and hosts, and nothing is known of memory nodes.
            assert!((cost.times / cell.times - 1.0).abs() < 1e-9, "{cell:?}");
            assert!(cost.range[0] < cost.times && cost.times < cost.range[1]);
        }
    }
}
