//! What a server holds with slow memory beside its own, for a service that is described: the tiers of a platform, and costs of the Vistara
//! paper where none are given.

use polder_platform::{Bandwidth, BuiltTier, Bytes, DataError, Platform, quoted};
use serde::Deserialize;

use crate::given::GivenError;
use crate::pages::plan::{Costs, Described, Row, rows};
use crate::pages::vistara_services::ServicesFigure;
use crate::pages::{Idle, Pair, TrafficLaw};

/// How long pages of a service lie idle.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum GivenIdle {
    /// As those of a service of the Vistara paper, Table I.
    Named(String),
    /// Shares of the memory, each with seconds.
    Points(Vec<[f64; 2]>),
}

/// A server, and what its slow memory is for.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TierQuestion {
    /// The machine, with a server of two tiers.
    pub platform: String,
    /// The server's own memory.
    pub fast: String,
    /// Its slow memory.
    pub slow: String,
    /// Cost of a byte of slow memory, as a part of that of fast memory.
    pub slow_cost: Option<f64>,
    /// Watts of a server without slow memory.
    pub server_watts: Option<f64>,
}

/// Why a server cannot be predicted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TierError {
    /// A file is damaged.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A given value cannot be.
    #[error(transparent)]
    Given(#[from] GivenError),
}

/// A server whose tiers are known.
#[derive(Clone, Debug)]
pub struct TierServer {
    fast: BuiltTier,
    slow: BuiltTier,
    fast_name: String,
    paper: ServicesFigure,
    law: TrafficLaw,
    /// What its tiers cost.
    pub costs: Costs,
}

/// A service, and the ratio of fast to slow memory that it has.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TierRow {
    /// How long its pages lie idle.
    pub idle: GivenIdle,
    /// Bytes of a container.
    pub unit_bytes: f64,
    /// Bytes a second that one draws of memory.
    pub unit_bytes_per_s: f64,
    /// The part of its time that it waits for memory, from 0 to 1.
    pub waits: f64,
    /// Bytes of fast memory for each byte of slow memory.
    pub ratio: f64,
}

impl TierServer {
    /// Reads the platform.
    ///
    /// # Errors
    /// When its file is damaged, or it has no such tiers.
    pub fn new(question: &TierQuestion) -> Result<Self, TierError> {
        for (key, value) in [("slow-cost", question.slow_cost), ("server-watts", question.server_watts)] {
            value.map_or(Ok(()), |value| GivenError::expect_above_zero(key, value))?;
        }
        let platform = Platform::load(&question.platform)?;
        let tier = |key: &'static str, name: &str| {
            let of = &question.platform;
            let problem = || {
                let name = quoted(name);
                format!("{of} has no server with a tier \"{name}\"; `polder plan show {of}` prints them")
            };
            platform.tier(name).cloned().ok_or_else(|| GivenError::new(key, problem()))
        };
        let (fast, slow) = (tier("fast", &question.fast)?, tier("slow", &question.slow)?);
        if slow.idle_latency() <= fast.idle_latency() {
            let (slow, fast) = (quoted(&question.slow), quoted(&question.fast));
            let problem = format!("\"{slow}\" is not slower than \"{fast}\", which is the fast tier");
            return Err(GivenError::new("slow", problem).into());
        }
        let paper = ServicesFigure::load()?;
        let mut costs = paper.costs();
        costs.slow_cost = question.slow_cost.unwrap_or(costs.slow_cost);
        costs.server_watts = question.server_watts.unwrap_or(costs.server_watts);
        let law = paper.traffic_law()?;
        Ok(Self { fast, slow, fast_name: question.fast.clone(), paper, law, costs })
    }

    /// Its tiers.
    #[must_use]
    pub const fn pair(&self) -> Pair<'_> {
        Pair { fast: &self.fast, slow: &self.slow }
    }

    /// Bytes a second of slow memory that services of Table VIII of Vistara would draw at this spill, if they drew so much of all memory: the one
    /// that draws the least of it, the middle one, and the one that draws the most.
    #[must_use]
    pub fn slow_traffic(&self, spill: f64, bytes_per_s: f64) -> [f64; 3] {
        self.law.part(spill).map(|part| part * bytes_per_s)
    }

    /// Bytes of its own memory.
    #[must_use]
    pub fn fast_bytes(&self) -> f64 {
        self.fast.capacity.value()
    }

    /// The server with a service, and so much slow memory.
    ///
    /// # Errors
    /// When idle times are none, or a number cannot be: a container that is larger than the server's own memory.
    pub fn row(&self, asked: &TierRow) -> Result<Row, TierError> {
        let TierRow { idle, unit_bytes, unit_bytes_per_s, waits, ratio } = asked;
        let fast = self.fast_bytes();
        GivenError::expect_above_zero("unit", *unit_bytes)?;
        GivenError::expect_above_zero("ratio", *ratio)?;
        for (key, value, most) in [("draws", *unit_bytes_per_s, f64::MAX), ("waits", *waits, 1.0)] {
            if !(0.0..=most).contains(&value) {
                let problem = format!("expected a number from 0 to {most}, found {value}");
                return Err(GivenError::new(key, problem).into());
            }
        }
        if *unit_bytes > fast {
            let (unit, name) = (Bytes::new(*unit_bytes), &self.fast_name);
            let problem = format!("{unit} is more than {name} has, {}; give less", self.fast.capacity);
            return Err(GivenError::new("unit", problem).into());
        }
        let most = f64::from(u32::MAX);
        if fast / unit_bytes > most {
            let problem = format!("{} is too little: more than {most} would fit", Bytes::new(*unit_bytes));
            return Err(GivenError::new("unit", problem).into());
        }
        if (fast + fast / ratio) / unit_bytes > most {
            let problem = format!("{ratio} is too little: more than {most} containers would fit");
            return Err(GivenError::new("ratio", problem).into());
        }
        let service = Described {
            idle: self.idle(idle)?,
            unit_bytes: *unit_bytes,
            unit_bytes_per_s: *unit_bytes_per_s,
            waits: *waits,
        };
        let row = rows(self.pair(), &service, &self.costs, &[fast / ratio])[0];
        let drawn = f64::from(row.units) * unit_bytes_per_s;
        if row.slow_bytes_per_s > drawn {
            let [slow, drawn] = [row.slow_bytes_per_s, drawn].map(Bandwidth::new);
            let problem = format!(
                "{} containers draw {drawn} of all memory, and by their idle times {slow} of slow memory alone; give more, or longer idle times",
                row.units
            );
            return Err(GivenError::new("draws", problem).into());
        }
        Ok(row)
    }

    fn idle(&self, given: &GivenIdle) -> Result<Idle, GivenError> {
        match given {
            GivenIdle::Named(name) => self.paper.idle(name).cloned().ok_or_else(|| {
                let names = self.paper.names().join(", ");
                let problem = format!(
                    "expected one of {names}, or points such as \"25%=22s,50%=28min\", found \"{}\"",
                    quoted(name)
                );
                GivenError::new("idle", problem)
            }),
            GivenIdle::Points(points) => {
                Idle::try_from(points.clone()).map_err(|error| GivenError::new("idle", error.to_string()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question() -> TierQuestion {
        TierQuestion {
            platform: "memserver".into(),
            fast: "local".into(),
            slow: "cxl".into(),
            slow_cost: None,
            server_watts: None,
        }
    }

    fn server() -> TierServer {
        TierServer::new(&question()).unwrap()
    }

    fn ads() -> TierRow {
        let idle = GivenIdle::Named("ads".into());
        TierRow { idle, unit_bytes: 64e9, unit_bytes_per_s: 15e9, waits: 0.5, ratio: 3.0 }
    }

    #[test]
    fn points_that_are_a_services_give_its_row() {
        let server = server();
        let points: Vec<[f64; 2]> = server.paper.idle("ads").unwrap().clone().into();
        let named = server.row(&ads()).unwrap();
        assert_eq!(server.row(&TierRow { idle: GivenIdle::Points(points), ..ads() }).unwrap(), named);
        let more = server.row(&TierRow { ratio: 1.0, ..ads() }).unwrap();
        assert!(more.units > named.units, "{named:?} {more:?}");
    }

    #[test]
    fn what_cannot_be_is_named() {
        let server = server();
        for (row, key) in [
            (TierRow { unit_bytes: 1e12, ..ads() }, "unit: 1 TB is more than local has, 768 GB; give less"),
            (
                TierRow { unit_bytes: 100.0, ..ads() },
                "unit: 100 B is too little: more than 4294967295 would fit",
            ),
            (TierRow { unit_bytes_per_s: -1.0, ..ads() }, "draws: "),
            (TierRow { waits: 2.0, ..ads() }, "waits: expected a number from 0 to 1, found 2"),
            (
                TierRow { ratio: 1e-12, ..ads() },
                "ratio: 0.000000000001 is too little: more than 4294967295 containers would fit",
            ),
            (
                TierRow { unit_bytes_per_s: 1.0, ..ads() },
                "draws: 16 containers draw 16 B/s of all memory, and by ",
            ),
            (TierRow { ratio: 0.0, ..ads() }, "ratio: expected a number above 0, found 0"),
            (TierRow { idle: GivenIdle::Named("lunch".into()), ..ads() }, "idle: expected one of ads, "),
            (
                TierRow { idle: GivenIdle::Points(vec![[0.5, 1.0]]), ..ads() },
                "idle: idle times [[0.5, 1.0]]: ",
            ),
        ] {
            let refusal = server.row(&row).unwrap_err().to_string();
            assert!(refusal.starts_with(key), "{refusal}");
        }
        let same = TierQuestion { slow: "local".into(), ..question() };
        let refusal = TierServer::new(&same).err().unwrap().to_string();
        assert_eq!(refusal, "slow: \"local\" is not slower than \"local\", which is the fast tier");
        for (slow_cost, server_watts, key) in [
            (Some(f64::NAN), None, "slow-cost: expected a number above 0, found NaN"),
            (Some(-1.0), None, "slow-cost: expected a number above 0, found -1"),
            (None, Some(f64::INFINITY), "server-watts: expected a number above 0, found inf"),
        ] {
            let question = TierQuestion { slow_cost, server_watts, ..question() };
            assert_eq!(TierServer::new(&question).err().unwrap().to_string(), key);
        }
    }
}
