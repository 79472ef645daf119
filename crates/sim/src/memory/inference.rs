//! Inference that outgrows an accelerator: KV caches, embedding tables and retrieval, by the memories that they take.

use polder_platform::{Bytes, Platform};
use serde::{Deserialize, Serialize};

use super::holders::{Holders, ReadRequest, Readers};
use super::{Access, Configuration, MemoryError, Nodes, Question, Tier, configurations, job};
use crate::contention::{FlitCount, FlitOptions, FlitWork};
use crate::fidelity::Fidelity;
use crate::given::GivenError;
use crate::step::model::Model;

/// Bytes of a key, a value or a weight.
const HALF: f64 = 2.0;

/// The model whose keys and values are read where none is given.
pub const MODEL: &str = "llama3-70b";
/// Tokens of a sequence where none are given.
pub const CONTEXT: u32 = 131_072;
/// Bytes of tables or of an index where none are given.
pub const SET_BYTES: f64 = 40e12;

/// What is read in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InferenceKind {
    /// All keys and values of all sequences, by pages.
    #[default]
    Kv,
    /// Rows of embedding tables.
    Embedding,
    /// Vectors of an index, one after another.
    Retrieval,
}

impl InferenceKind {
    const fn name(self) -> &'static str {
        match self {
            Self::Kv => "kv",
            Self::Embedding => "embedding",
            Self::Retrieval => "retrieval",
        }
    }

    /// Refuses what such a load does not read.
    fn expect_read(self, key: &'static str, is_given: bool) -> Result<(), GivenError> {
        let is_read = match key {
            "model" | "context" => self == Self::Kv,
            _ => self != Self::Kv,
        };
        match is_given && !is_read {
            true => {
                let problem = format!("a step of load {} does not read it; leave it out", self.name());
                Err(GivenError::new(key, problem))
            }
            false => Ok(()),
        }
    }

    /// Bytes of an access, accesses at once, and visits of a sequence.
    const fn defaults(self) -> (f64, u32, u32) {
        match self {
            Self::Kv => (65536.0, 64, 0),
            Self::Embedding => (512.0, 64, 64),
            Self::Retrieval => (4096.0, 1, 100),
        }
    }
}

/// Which machines serve what.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InferenceQuestion {
    /// The machines.
    pub machines: Question,
    /// Accelerators of a rack that serve; all when left out.
    pub serving: Option<u32>,
    /// What is read.
    #[serde(default)]
    pub load: InferenceKind,
    /// The model whose keys and values are read, by its name or the path of its file; [`MODEL`] when left out.
    pub model: Option<String>,
    /// The most tokens of a sequence; those of the model's file when left out, which has to have them then.
    #[serde(default)]
    pub sequence: Option<u32>,
    /// How closely reads over fabrics are looked at: each accelerator with its share, as flows, or flit by flit.
    #[serde(default)]
    pub fidelity: Fidelity,
    /// What flits need beside the platform.
    #[serde(default)]
    pub flits: FlitOptions,
}

/// A step that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InferenceRow {
    /// Sequences that are served at once.
    pub sequences: u32,
    /// Tokens of each whose keys and values are read; [`CONTEXT`] when left out.
    pub context: Option<u32>,
    /// Bytes of the tables or of the index; [`SET_BYTES`] when left out.
    pub set_bytes: Option<f64>,
    /// Bytes of an access; those of the kind of load when left out.
    pub access_bytes: Option<f64>,
    /// Accesses under way at once; those of the kind of load when left out.
    pub outstanding: Option<u32>,
    /// Rows or vectors of a sequence in a step; those of the kind of load when left out.
    pub visits: Option<u32>,
}

/// Machines that serve a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Inference {
    /// Accelerators of the machine.
    pub accelerators: u32,
    /// Those that serve.
    pub serving: u32,
    /// The memories of the machines.
    pub configurations: Vec<Configuration>,
    /// What is served.
    pub model: Model,
    kind: InferenceKind,
    readers: Readers,
}

impl Inference {
    /// Reads the machines and the model.
    ///
    /// # Errors
    /// As [`configurations`]; when a rack has fewer accelerators than serve, the model's file is damaged, or reads cannot be looked at so closely.
    pub fn new(question: &InferenceQuestion) -> Result<Self, MemoryError> {
        let machines = &question.machines;
        let (accelerators, configurations) = configurations(machines)?;
        let platform = Platform::load(&machines.platform)?;
        let rack = job(&machines.platform, &platform, machines.rack.as_deref())?.rack().accelerators;
        let most = rack.min(accelerators);
        let serving = question.serving.unwrap_or(most);
        if serving == 0 || serving > most {
            let problem = format!("expected 1 to {most}, the accelerators of a rack, found {serving}");
            return Err(GivenError::new("serving", problem).into());
        }
        let InferenceQuestion { load: kind, fidelity, flits, .. } = *question;
        let refused = |error| MemoryError::Transfers { platform: machines.platform.clone(), error };
        flits.check(fidelity).map_err(refused)?;
        if fidelity != Fidelity::L0 {
            configurations.iter().try_for_each(Configuration::expect_holders)?;
            let has_nodes = configurations.iter().flat_map(|it| &it.tiers).any(|it| it.name == "pool");
            if has_nodes && machines.ways.nodes == Nodes::Near {
                let problem = "expected far with fidelities L1 and L2, because not all nodes can be on one switch, found near";
                return Err(GivenError::new("nodes", problem).into());
            }
        }
        let readers = Readers { count: serving, fidelity, flits };
        kind.expect_read("model", question.model.is_some())?;
        // A step reads each key and value once, so that all others come before it is read again.
        kind.expect_read("cache", machines.ways.caching.is_some())?;
        let model = Model::load_with(question.model.as_deref().unwrap_or(MODEL), question.sequence)?;
        Ok(Self { accelerators, serving, configurations, model, kind, readers })
    }

    /// What each accelerator that serves reads in a step.
    ///
    /// # Errors
    /// When a number is 0 or less, or is given where nothing reads it; when a row is larger than the tables.
    pub fn load(&self, row: &InferenceRow) -> Result<InferenceLoad, MemoryError> {
        let (bytes, outstanding, visits) = self.kind.defaults();
        let bytes = row.access_bytes.unwrap_or(bytes);
        let outstanding = f64::from(row.outstanding.unwrap_or(outstanding));
        let given = [
            ("context", row.context.is_some()),
            ("set", row.set_bytes.is_some()),
            ("visits", row.visits.is_some()),
        ];
        given.into_iter().try_for_each(|(key, is_given)| self.kind.expect_read(key, is_given))?;
        let (context, sequences) = (f64::from(row.context.unwrap_or(CONTEXT)), f64::from(row.sequences));
        let set_bytes = row.set_bytes.unwrap_or(SET_BYTES);
        for (key, value) in [
            ("sequences", sequences),
            ("context", context),
            ("set", set_bytes),
            ("access", bytes),
            ("outstanding", outstanding),
            ("visits", row.visits.map_or(1.0, f64::from)),
        ] {
            GivenError::expect_above_zero(key, value)?;
        }
        if self.kind != InferenceKind::Kv && bytes > set_bytes {
            let [bytes, all] = [bytes, set_bytes].map(Bytes::new);
            let problem = format!("expected {all} at most, the size of the set, found {bytes}");
            return Err(GivenError::new("access", problem).into());
        }
        let serving = f64::from(self.serving);
        let kv = InferenceLoad::kv(&self.model, context, sequences, serving, bytes, outstanding);
        Ok(match self.kind {
            InferenceKind::Kv => kv,
            // Sequences are spread over the accelerators, and the set too. A step ends with the accelerator that has the most of them.
            InferenceKind::Embedding | InferenceKind::Retrieval => {
                let own = (sequences / serving).ceil();
                InferenceLoad {
                    outstanding: match self.kind {
                        // Sequences search beside one another.
                        InferenceKind::Retrieval => outstanding * own,
                        _ => outstanding,
                    },
                    resident_bytes: 0.0,
                    resident_read_bytes: 0.0,
                    set_bytes: set_bytes / serving,
                    accesses: own * f64::from(row.visits.unwrap_or(visits)),
                    ..kv
                }
            }
        })
    }

    /// What steps take on each configuration, by load; nothing where one does not fit.
    ///
    /// # Errors
    /// When reads over a fabric are too many to be looked at so closely. All flits are counted before any is followed.
    pub fn steps(&self, loads: &[InferenceLoad]) -> Result<Vec<Vec<Option<InferenceStep>>>, MemoryError> {
        let each = || loads.iter().flat_map(|load| self.configurations.iter().map(move |on| (load, on)));
        if self.readers.fidelity == Fidelity::L2 {
            let mut work = FlitWork::default();
            for (load, on) in each() {
                let step = load.step(on, f64::from(self.serving));
                for (tier, part) in on.tiers.iter().zip(step.iter().flat_map(|it| &it.tiers)) {
                    if let Some((holders, asked)) = load.reads_of(tier, part) {
                        work.add(holders.work(&self.readers, asked).map_err(|error| on.refused(error))?);
                    }
                }
            }
            // What is too long is so of all together, whichever machine it is of.
            let [on, ..] = self.configurations.as_slice() else { return Ok(vec![]) };
            work.check(self.readers.flits.window_bytes).map_err(|error| on.refused(error))?;
        }
        let mut known = vec![];
        let steps =
            each().map(|(load, on)| self.step(load, on, &mut known)).collect::<Result<Vec<_>, _>>()?;
        let mut rows = steps.into_iter();
        Ok(loads.iter().map(|_| rows.by_ref().take(self.configurations.len()).collect()).collect())
    }

    /// What a step takes, with reads over fabrics as closely looked at as is asked.
    fn step<'a>(
        &self,
        load: &InferenceLoad,
        on: &'a Configuration,
        known: &mut Vec<(&'a Tier, u32, f64)>,
    ) -> Result<Option<InferenceStep>, MemoryError> {
        let Some(mut step) = load.step(on, f64::from(self.serving)) else { return Ok(None) };
        if self.readers.fidelity == Fidelity::L0 {
            return Ok(Some(step));
        }
        for (tier, part) in on.tiers.iter().zip(&mut step.tiers) {
            let Some((holders, asked)) = load.reads_of(tier, part) else { continue };
            // By flows, messages of other sizes that go the same ways reach the same rate.
            let messages = holders.messages_each(&self.readers, asked);
            let same = |it: &&(&Tier, u32, f64)| std::ptr::eq(it.0, tier) && it.1 == messages;
            let (rate, flits) = match known.iter().find(same) {
                Some((.., rate)) => (*rate, None),
                None => {
                    let reached = holders.rate(&self.readers, asked).map_err(|error| on.refused(error))?;
                    if self.readers.fidelity == Fidelity::L1 {
                        known.push((tier, messages, reached.0));
                    }
                    reached
                }
            };
            let access = Access { bytes_per_s: rate, ..tier.access };
            let own = &on.tiers[0].access;
            let seconds = load.taken(&access, own, part.bytes, part.hits);
            step.seconds += seconds - part.seconds;
            *part = InferenceTier { seconds, bytes_per_s: rate, flits, ..*part };
        }
        Ok(Some(step))
    }
}

/// Accesses of a step, spread evenly over the bytes of a set.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct InferenceLoad {
    /// Bytes of an accelerator that stay in its own memory: weights.
    pub resident_bytes: f64,
    /// Bytes of these that a step reads: not those of experts that none of its tokens chooses.
    pub resident_read_bytes: f64,
    /// Bytes of the set, of an accelerator.
    pub set_bytes: f64,
    /// Accesses of an accelerator in a step.
    pub accesses: f64,
    /// Bytes of each.
    pub access_bytes: f64,
    /// Accesses that are under way at once; 1 where each depends on the one before.
    pub outstanding: f64,
}

/// What a step takes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct InferenceStep {
    /// All of it.
    pub seconds: f64,
    /// What each memory does in it.
    pub tiers: Vec<InferenceTier>,
}

/// What a memory does in a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct InferenceTier {
    /// Its name.
    pub name: &'static str,
    /// Bytes of the set that lie in it, of an accelerator that serves.
    pub bytes: f64,
    /// What its accesses take.
    pub seconds: f64,
    /// The rate at which their data come.
    pub bytes_per_s: f64,
    /// The part of its accesses that the accelerator's own cache answers.
    pub hits: f64,
    /// What was followed for it flit by flit.
    pub flits: Option<FlitCount>,
}

impl InferenceLoad {
    /// A step in which `sequences` of so many tokens each get one more, on so many accelerators that share them: all keys and values are read,
    /// by pages.
    #[must_use]
    pub fn kv(
        model: &Model,
        tokens: f64,
        sequences: f64,
        accelerators: f64,
        page: f64,
        outstanding: f64,
    ) -> Self {
        let set_bytes = kv_bytes(model, tokens) * sequences / accelerators;
        Self {
            resident_bytes: HALF * model.parameters() / accelerators,
            resident_read_bytes: HALF * model.parameters_read(sequences) / accelerators,
            set_bytes,
            accesses: set_bytes / page,
            access_bytes: page,
            outstanding,
        }
    }

    /// What it takes where `serving` accelerators have such a load each, and the others lend their memory; nothing where it does not fit.
    ///
    /// The accesses of different memories follow one another, and those of one overlap as far as they may be under way at once.
    #[must_use]
    pub fn step(&self, on: &Configuration, serving: f64) -> Option<InferenceStep> {
        let mut left = self.set_bytes;
        let mut parts = vec![];
        let own = on.tiers.first()?;
        for tier in &on.tiers {
            let room = match tier.name {
                "own" => tier.capacity_bytes - self.resident_bytes,
                "host" => tier.capacity_bytes,
                // The accelerators that serve lend nothing.
                "rack" => (tier.capacity_bytes - (serving - 1.0) * own.capacity_bytes) / serving,
                _ => tier.capacity_bytes / serving,
            };
            if tier.name == "own" && room < 0.0 {
                return None;
            }
            let bytes = left.min(room.max(0.0));
            left -= bytes;
            parts.push((tier, bytes));
        }
        // What rounding leaves is nothing.
        if left > self.set_bytes * 1e-12 {
            return None;
        }
        let region = parts.iter().filter(|(tier, _)| tier.is_cached).map(|(_, bytes)| bytes).sum::<f64>();
        let rates = on.cached(region * serving, self.access_bytes);
        let part = |(tier, bytes): (&Tier, f64)| {
            let hits = if tier.is_cached { rates.hits } else { 0.0 };
            let seconds = self.taken(&tier.access, &own.access, bytes, hits);
            let bytes_per_s = tier.access.bytes_per_s;
            InferenceTier { name: tier.name, bytes, seconds, bytes_per_s, hits, flits: None }
        };
        let tiers: Vec<_> = parts.into_iter().map(part).collect();
        let resident = self.resident_read_bytes / own.access.bytes_per_s;
        Some(InferenceStep { seconds: resident + tiers.iter().map(|it| it.seconds).sum::<f64>(), tiers })
    }

    /// What is asked of those that hold a part of the set, if that is reached over a fabric.
    fn reads_of<'a>(&self, tier: &'a Tier, part: &InferenceTier) -> Option<(&'a Holders, ReadRequest)> {
        let holders = tier.holders.as_ref().filter(|_| part.bytes > 0.0)?;
        let accesses = self.accesses * part.bytes / self.set_bytes * (1.0 - part.hits);
        Some((holders, ReadRequest { bytes: accesses * self.access_bytes, accesses }))
    }

    /// What accesses to so many bytes of the set take, a part of which the cache answers as soon as own memory does.
    fn taken(&self, access: &Access, own: &Access, bytes: f64, hits: f64) -> f64 {
        if bytes == 0.0 {
            return 0.0;
        }
        let accesses = self.accesses * bytes / self.set_bytes;
        let each = |access: &Access| {
            let idle = access.idle();
            let moved = access.seconds(self.access_bytes) - idle;
            // A memory gives what comes first: its bandwidth, or what so many accesses at once ask for. No more are under way than there are.
            moved.max((idle + moved) / self.outstanding.min(self.accesses))
        };
        accesses * ((1.0 - hits) * each(access) + hits * each(own))
    }
}

/// Bytes of keys, values and states of a sequence of so many tokens.
#[must_use]
pub fn kv_bytes(model: &Model, tokens: f64) -> f64 {
    model.kept_for_next(tokens, HALF)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Question, Ways, configurations};

    fn found() -> Vec<Configuration> {
        let question = Question {
            platform: "nvl72-cxl".into(),
            against: Some("nvl72-ndr".into()),
            rack: None,
            accelerators: None,
            ways: Ways::default(),
        };
        configurations(&question).unwrap().1
    }

    #[test]
    fn a_token_of_llama_3_70b_has_80_layers_of_8_heads_of_128() {
        let model = Model::load("llama3-70b").unwrap();
        assert_eq!(kv_bytes(&model, 1.0), f64::from(2 * 2 * 80 * 8 * 128));
    }

    #[test]
    fn what_a_load_does_not_read_is_refused_and_so_is_a_row_larger_than_its_table() {
        let machines = Question {
            platform: "nvl72-cxl".into(),
            against: None,
            rack: None,
            accelerators: None,
            ways: Ways::default(),
        };
        let row = InferenceRow {
            sequences: 64,
            context: None,
            set_bytes: None,
            access_bytes: None,
            outstanding: None,
            visits: None,
        };
        for (load, model, row, expected) in [
            (
                InferenceKind::Kv,
                None,
                InferenceRow { set_bytes: Some(1e12), ..row },
                "set: a step of load kv does not",
            ),
            (
                InferenceKind::Kv,
                None,
                InferenceRow { visits: Some(5), ..row },
                "visits: a step of load kv does not",
            ),
            (
                InferenceKind::Embedding,
                None,
                InferenceRow { context: Some(8), ..row },
                "context: a step of load embedding does not",
            ),
            (InferenceKind::Retrieval, Some("gpt3-175b"), row, "model: a step of load retrieval does not"),
            (
                InferenceKind::Embedding,
                None,
                InferenceRow { set_bytes: Some(1e3), access_bytes: Some(1e6), ..row },
                "access: expected 1 kB at most, the size of the set, found 1 MB",
            ),
        ] {
            let question = InferenceQuestion {
                machines: machines.clone(),
                serving: None,
                load,
                model: model.map(Into::into),
                sequence: None,
                fidelity: Fidelity::L0,
                flits: FlitOptions::default(),
            };
            let refusal = Inference::new(&question).and_then(|it| it.load(&row)).unwrap_err().to_string();
            assert!(refusal.starts_with(expected), "{refusal}");
        }
    }

    #[test]
    fn a_cache_in_own_memory_goes_at_its_bandwidth() {
        let model = Model::load("llama3-70b").unwrap();
        let load = InferenceLoad::kv(&model, 8192.0, 8.0, 8.0, 65536.0, 64.0);
        for on in found() {
            let step = load.step(&on, 8.0).unwrap();
            let bytes = load.resident_read_bytes + load.set_bytes;
            assert!((step.seconds * on.tiers[0].access.bytes_per_s / bytes - 1.0).abs() < 0.05, "{step:?}");
        }
    }

    /// Active parameters as published: Mixtral of Experts, section 2; DeepSeek-V3, section 1; Qwen3, Table 2. They count the embedding too.
    #[test]
    fn a_step_reads_the_experts_that_its_tokens_choose() {
        for (name, billions) in [("mixtral-8x7b", 12.9), ("deepseek-v3", 37.0), ("qwen3-235b-a22b", 22.0)] {
            let model = Model::load(name).unwrap();
            let active = (model.parameters_read(1.0) + model.embedding_parameters()) / 1e9;
            assert!((active / billions - 1.0).abs() < 0.05, "{name}: {active}");
            let all = model.parameters() - model.embedding_parameters() - model.position_parameters();
            assert!((model.parameters_read(1e6) / all - 1.0).abs() < 1e-9, "{name}");
            let read = [1.0, 8.0, 64.0, 512.0].map(|tokens| model.parameters_read(tokens));
            assert!(read.is_sorted() && read[3] <= all, "{name}: {read:?}");
        }
        let model = Model::load("deepseek-v3").unwrap();
        let [one, all] = [1.0, 4096.0].map(|sequences| {
            let load = InferenceLoad::kv(&model, 1.0, sequences, 72.0, 65536.0, 64.0);
            load.step(&found()[0], 72.0).unwrap().seconds
        });
        assert!(one < 0.07 * all, "{one} {all}");
    }

    #[test]
    fn a_search_takes_its_visits_one_after_another_however_many_accelerators_serve() {
        let all = found();
        let seconds = |serving, load, row: InferenceRow| {
            let machines = Question {
                platform: "nvl72-cxl".into(),
                against: Some("nvl72-ndr".into()),
                rack: None,
                accelerators: None,
                ways: Ways::default(),
            };
            let question = InferenceQuestion {
                machines,
                serving: Some(serving),
                load,
                model: None,
                sequence: None,
                fidelity: Fidelity::L0,
                flits: FlitOptions::default(),
            };
            let inference = Inference::new(&question).unwrap();
            let steps = inference.steps(&[inference.load(&row).unwrap()]).unwrap();
            steps[0][0].as_ref().unwrap().seconds
        };
        let row = InferenceRow {
            sequences: 1,
            context: None,
            set_bytes: Some(1e12),
            access_bytes: None,
            outstanding: None,
            visits: Some(10),
        };
        let own = all[0].tiers[0].access;
        let search = |serving, row| seconds(serving, InferenceKind::Retrieval, row);
        let one = search(72, row);
        assert!((one / (10.0 * own.seconds(4096.0)) - 1.0).abs() < 1e-12, "{one}");
        // As many search beside one another as accelerators serve; one more shares an accelerator, and both search at once.
        assert_eq!(search(72, InferenceRow { sequences: 72, ..row }), one);
        assert_eq!(search(72, InferenceRow { sequences: 73, ..row }), one);
        // No more accesses are under way than there are.
        let at_once = search(72, InferenceRow { outstanding: Some(1000), ..row });
        assert!((at_once / own.seconds(4096.0) - 1.0).abs() < 1e-12, "{at_once}");
        let looked_up = seconds(72, InferenceKind::Embedding, InferenceRow { visits: Some(1), ..row });
        assert!((looked_up / own.seconds(512.0) - 1.0).abs() < 1e-12, "{looked_up}");
    }

    #[test]
    fn nodes_serve_caches_that_racks_do_not_hold_faster_than_copies_do() {
        let model = Model::load("llama3-70b").unwrap();
        let all = found();
        let at = |on: &Configuration, sequences| {
            let load = InferenceLoad::kv(&model, 131_072.0, sequences, 72.0, 65536.0, 64.0);
            load.step(on, 72.0).map(|it| it.seconds)
        };
        // All of a rack serve: what they cannot hold is in other racks, or in nodes.
        let [baseline, tiered] = [&all[0], &all[2]].map(|on| at(on, 600.0).unwrap());
        assert!(tiered < baseline, "{tiered} {baseline}");
        assert!(at(&all[2], 1e9).is_none());
    }

    /// Where as many hold as read, each link is asked for what it carries: all fidelities agree within 2%, but for messages of few flits.
    #[test]
    fn readers_that_share_no_link_reach_the_same_at_each_fidelity() {
        let seconds = |fidelity, serving| {
            let question = InferenceQuestion {
                machines: Question {
                    platform: "nvl72-cxl".into(),
                    against: None,
                    rack: None,
                    accelerators: Some(72),
                    ways: Ways::default(),
                },
                serving: Some(serving),
                load: InferenceKind::Retrieval,
                model: None,
                sequence: None,
                fidelity,
                flits: FlitOptions::default(),
            };
            let inference = Inference::new(&question).unwrap();
            let row = InferenceRow {
                sequences: 4096,
                context: None,
                set_bytes: Some(12.5e12),
                access_bytes: Some(65536.0),
                outstanding: Some(64),
                visits: Some(8),
            };
            let steps = inference.steps(&[inference.load(&row).unwrap()]).unwrap();
            steps[0][0].as_ref().unwrap().seconds
        };
        let [alone, flows, flits] = Fidelity::ALL.map(|fidelity| seconds(fidelity, 36));
        assert!(
            (flows / alone - 1.0).abs() < 0.02 && (flits / alone - 1.0).abs() < 0.02,
            "{alone} {flows} {flits}"
        );
        // Where few hold for many, flows and flits agree with each other alone.
        let [alone, flows, flits] = Fidelity::ALL.map(|fidelity| seconds(fidelity, 60));
        assert!(flows > 1.2 * alone && (flits / flows - 1.0).abs() < 0.05, "{alone} {flows} {flits}");
    }
}
