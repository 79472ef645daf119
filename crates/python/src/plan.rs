//! Predicted steps: a question and its answer as JSON, which the front gives types, and tables of many layouts.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use polder_platform::{Bandwidth, Platform, Prices, TierId, TierIdError, in_words};
use polder_sim::contention::{FabricQuestion, answer};
use polder_sim::memory::{
    CoherentRack, Inference, InferenceQuestion, InferenceRow, Question, RegionQuestion, configurations,
};
use polder_sim::offload::{OffloadError, PlacingPolicy, Planner, Settings};
use polder_sim::program::{
    OperatorRates, ProgramQuestion, ProgramTrace, StepCommunication, StepFabric, StepTrace,
};
use polder_sim::sync::{SyncQuestion, SyncSeconds, layers_of};
use polder_sim::{
    Execution, MixedError, MixedRequest, Model, NUMBERS, OrderError, PaysQuestion, Points, Request,
    RequestError, SITE_NUMBERS, Step, TierQuestion, TierRow, TierServer, Tiers, choices, points,
};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde::de::DeserializeOwned;

use crate::errors::argument;

/// What the front wrote as JSON. An error names a key without the `groups` that it lies in.
fn asked<T: DeserializeOwned>(text: &str, groups: &[&str]) -> PyResult<T> {
    // By way of a value: the front wrote the text, and its lines and columns say nothing to its caller.
    let value: serde_json::Value = serde_json::from_str(text).map_err(wrong)?;
    serde_path_to_error::deserialize(value).map_err(|error| {
        let path = error.path().to_string();
        // Rows are alike: an error is of the argument that all of them have.
        let key = path.split_once("].").map_or(path.as_str(), |(_, key)| key);
        let key = groups.iter().fold(key, |key, group| key.strip_prefix(group).unwrap_or(key));
        argument(format!("{key}: {}", in_words(&error.inner().to_string())))
    })
}

/// An error of a question, by the names of arguments.
fn wrong(error: impl std::fmt::Display) -> PyErr {
    argument(error.to_string())
}

/// 64-bit floats, as NumPy reads them.
fn floats(py: Python<'_>, figures: impl IntoIterator<Item = f64>) -> Bound<'_, PyBytes> {
    PyBytes::new(py, &figures.into_iter().flat_map(f64::to_le_bytes).collect::<Vec<u8>>())
}

/// Answers a [`Request`] in JSON.
#[pyfunction]
pub(crate) fn plan_train(py: Python<'_>, request: &str, file: Option<&str>) -> PyResult<String> {
    let mut request: Request = asked(request, &["layout.", "flits."])?;
    if let Some(file) = file {
        request = request.or(&Execution::load(file).map_err(|error| argument(error.to_string()))?);
    }
    py.detach(|| {
        let threads = std::thread::available_parallelism().map_or(1, Into::into);
        let answer = request.train(threads, &|_, _| ()).map_err(|error| argument(error.to_string()))?;
        serde_json::to_string(&answer).map_err(|error| argument(error.to_string()))
    })
}

/// Draws the map of two fabrics in JSON, with bandwidths in bytes a second.
#[pyfunction]
pub(crate) fn plan_pays(
    py: Python<'_>,
    request: &str,
    against: &str,
    between: Vec<f64>,
    pool: Vec<f64>,
    prices: Option<&str>,
) -> PyResult<String> {
    let mut request: Request = asked(request, &["layout."])?;
    request.layout.tiers = Tiers::All;
    let prices = prices.map(Prices::load).transpose().map_err(wrong)?;
    let [between, pool] = [between, pool].map(|all| all.into_iter().map(Bandwidth::new).collect::<Vec<_>>());
    let question =
        PaysQuestion { request: &request, against, between: &between, pool: &pool, prices: prices.as_ref() };
    py.detach(|| {
        let threads = std::thread::available_parallelism().map_or(1, Into::into);
        serde_json::to_string(&question.map(threads, &|_, _| ()).map_err(wrong)?).map_err(wrong)
    })
}

/// A platform as JSON, with all that it extends.
#[pyfunction]
pub(crate) fn plan_platform(name: &str) -> PyResult<String> {
    serde_json::to_string(&Platform::load(name).map_err(wrong)?).map_err(wrong)
}

/// Access times of accesses and working sets of so many bytes, one of each in turn: the names of the configurations, and 64-bit floats,
/// one of each configuration in turn, NaN where it holds less.
#[pyfunction]
pub(crate) fn plan_memory<'py>(
    py: Python<'py>,
    question: &str,
    access: PyBuffer<f64>,
    sets: PyBuffer<f64>,
) -> PyResult<(Vec<&'static str>, Bound<'py, PyBytes>)> {
    let question: Question = asked(question, &["ways."])?;
    let (access, sets) = (access.to_vec(py)?, sets.to_vec(py)?);
    let (_, configurations) = configurations(&question).map_err(|error| argument(error.to_string()))?;
    let seconds = access.iter().zip(&sets).flat_map(|(bytes, set)| {
        configurations
            .iter()
            .map(|configuration| configuration.seconds(*bytes, *set).unwrap_or(f64::NAN))
            .collect::<Vec<_>>()
    });
    let seconds: Vec<f64> = seconds.collect();
    Ok((configurations.iter().map(|configuration| configuration.name).collect(), floats(py, seconds)))
}

/// Patterns on fabrics, a list of questions in JSON: of each 64-bit floats, the time of all steps, four quantiles of a step's messages and bytes
/// a second, NaN in closed form.
#[pyfunction]
pub(crate) fn plan_fabric<'py>(py: Python<'py>, questions: &str) -> PyResult<Bound<'py, PyBytes>> {
    let questions: Vec<FabricQuestion> = asked(questions, &["flits."])?;
    let found = py.detach(|| questions.iter().map(answer).collect::<Result<Vec<_>, _>>()).map_err(wrong)?;
    let figures = found.into_iter().flat_map(|it| {
        let of = it.seconds;
        [it.total_s, of.p50_s, of.p90_s, of.p99_s, of.max_s, it.bytes_per_s.unwrap_or(f64::NAN)]
    });
    Ok(floats(py, figures))
}

/// Steps of inference, a list of rows in JSON: the names of the configurations, and 64-bit floats, of each row the bytes of its set and
/// then seconds on each configuration, NaN where it does not fit.
#[pyfunction]
pub(crate) fn plan_inference<'py>(
    py: Python<'py>,
    question: &str,
    rows: &str,
) -> PyResult<(Vec<&'static str>, Bound<'py, PyBytes>)> {
    let question: InferenceQuestion = asked(question, &["machines.", "ways."])?;
    let rows: Vec<InferenceRow> = asked(rows, &[])?;
    let inference = Inference::new(&question).map_err(wrong)?;
    let loads = rows.iter().map(|row| inference.load(row)).collect::<Result<Vec<_>, _>>().map_err(wrong)?;
    let steps = py.detach(|| inference.steps(&loads)).map_err(wrong)?;
    let mut figures = vec![];
    for (load, steps) in loads.iter().zip(steps) {
        figures.push(load.set_bytes * f64::from(inference.serving));
        figures.extend(steps.into_iter().map(|step| step.map_or(f64::NAN, |it| it.seconds)));
    }
    let names = inference.configurations.iter().map(|it| it.name).collect();
    Ok((names, floats(py, figures)))
}

/// Coherent regions, a list of rows in JSON: of each 64-bit floats, the rates an access, then seconds by hardware and by copies.
#[pyfunction]
pub(crate) fn plan_coherence<'py>(
    py: Python<'py>,
    platform: &str,
    rack: Option<&str>,
    rows: &str,
) -> PyResult<Bound<'py, PyBytes>> {
    let rows: Vec<RegionQuestion> = asked(rows, &[])?;
    let predicted = py.detach(|| {
        let rack = CoherentRack::new(platform, rack)?;
        rows.iter().map(|row| rack.region(row)).collect::<Result<Vec<_>, _>>()
    });
    let figures = predicted.map_err(wrong)?.into_iter().flat_map(|it| {
        let of = it.rates;
        let rates = [of.hits, of.filter_misses, of.back_invalidations, of.invalidations, of.waited];
        rates.into_iter().chain([it.coherent_s, it.copies_s])
    });
    Ok(floats(py, figures))
}

/// Data-parallel steps, a list of rows in JSON: of each 64-bit floats, step and blocked seconds of all-reduces after and beside the backward
/// pass, and of the service by the formula and at best; then bytes on the proxies of both, and the formula's m.
#[pyfunction]
pub(crate) fn plan_sync<'py>(
    py: Python<'py>,
    model: Option<&str>,
    layers: Vec<u64>,
    rows: &str,
) -> PyResult<Bound<'py, PyBytes>> {
    let rows: Vec<SyncQuestion> = asked(rows, &[])?;
    let layers = match model {
        Some(model) => layers_of(&Model::load(model).map_err(wrong)?),
        None => layers,
    };
    let figures = py.detach(|| {
        let mut figures = vec![];
        for row in &rows {
            let job = row.job(&layers)?;
            let (service, best) = (job.service(job.split_bytes()), job.best());
            for SyncSeconds { step_s, blocked_s } in
                [job.all_reduce(), job.overlapped(), service.seconds, best.seconds]
            {
                figures.extend([step_s, blocked_s]);
            }
            figures.extend([service.proxied_bytes, best.proxied_bytes].map(|it| it as f64));
            figures.push(job.split_bytes());
        }
        Ok::<_, String>(figures)
    });
    Ok(floats(py, figures.map_err(wrong)?))
}

/// Steps on racks of two kinds, a list of requests in JSON: of each 64-bit floats, the step, that with an even batch, the range of the step, and of each kind copies,
/// sequences of a copy, its step and its step alone; and why not, empty where a step can run.
#[pyfunction]
pub(crate) fn plan_mixed<'py>(
    py: Python<'py>,
    requests: &str,
) -> PyResult<(Bound<'py, PyBytes>, Vec<String>)> {
    let requests: Vec<MixedRequest> = asked(requests, &["step.", "layout.", "flits."])?;
    let answers = py.detach(|| {
        let mut answers = vec![];
        for request in &requests {
            answers.push(match request.predict() {
                Ok(answer) => Ok(answer),
                Err(error @ MixedError::OneRack(_)) => return Err(error),
                Err(MixedError::Part { rack, error }) if matches!(*error, RequestError::Data(_)) => {
                    return Err(MixedError::Part { rack, error });
                }
                Err(refused) => Err(refused.to_string()),
            });
        }
        Ok::<_, MixedError>(answers)
    });
    let answers = answers.map_err(wrong)?;
    let (mut figures, mut reasons) = (vec![], vec![]);
    for answer in answers {
        match answer {
            Ok(it) => {
                let [low, high] = it.range_s;
                figures.extend([it.total_s, it.even_s.unwrap_or(f64::NAN), low, high]);
                for of in it.parts {
                    let [copies, sequences] = [of.copies, of.sequences].map(f64::from);
                    figures.extend([copies, sequences, of.step_s, of.alone_s.unwrap_or(f64::NAN)]);
                }
                reasons.push(String::new());
            }
            Err(reason) => {
                figures.extend([f64::NAN; 12]);
                reasons.push(reason);
            }
        }
    }
    Ok((floats(py, figures), reasons))
}

/// A traced MPI program over networks, a list of questions in JSON: what it took, all of it and in calls; and of each network 64-bit floats,
/// the program, the mean in calls, messages and bytes between hosts.
#[pyfunction]
pub(crate) fn plan_mpi<'py>(
    py: Python<'py>,
    folder: PathBuf,
    questions: &str,
) -> PyResult<((f64, f64), Bound<'py, PyBytes>)> {
    let questions: Vec<ProgramQuestion> = asked(questions, &["flits."])?;
    let predicted = py.detach(|| {
        let trace = ProgramTrace::load(&folder).map_err(|error| error.to_string())?;
        let of = |question: &ProgramQuestion| trace.predict(question).map_err(|error| error.to_string());
        let all = questions.iter().map(of).collect::<Result<Vec<_>, _>>()?;
        Ok::<_, String>((trace.measured_s(), all))
    });
    let (measured, predicted) = predicted.map_err(argument)?;
    let figures = predicted.into_iter().flat_map(|answer| {
        let of = answer.replayed;
        let waits_s = of.ranks.iter().map(|rank| rank.total_s - rank.compute_s).sum::<f64>();
        [of.total_s, waits_s / of.ranks.len() as f64, of.messages as f64, of.bytes as f64]
    });
    Ok((measured, floats(py, figures)))
}

/// A traced step on machines, a list of rates in JSON: the files of ranks, the names of operators, and of each machine 64-bit floats, seconds of
/// each rank, then those of each operator in the slowest; seconds of the collective calls of each rank, 0 without a `fabric` in JSON, which are
/// in those of the rank; and how many calls are left out.
#[pyfunction]
#[expect(clippy::type_complexity, reason = "a tuple of Python's")]
pub(crate) fn plan_chakra<'py>(
    py: Python<'py>,
    folder: PathBuf,
    rates: &str,
    fabric: Option<&str>,
) -> PyResult<(Vec<String>, Vec<String>, Bound<'py, PyBytes>, Vec<f64>, u64)> {
    let rates: Vec<OperatorRates> = asked(rates, &[])?;
    rates.iter().try_for_each(OperatorRates::check).map_err(wrong)?;
    let on: Option<StepFabric> = fabric.map(|text| asked(text, &["flits."])).transpose()?;
    let traces = py.detach(|| StepTrace::load(&folder)).map_err(wrong)?;
    let ranks: Vec<_> = traces.iter().map(|(_, trace)| trace).collect();
    let calls = match &on {
        Some(on) => py.detach(|| StepTrace::communication(&ranks, on)).map_err(wrong)?,
        None => {
            let none =
                |trace: &&StepTrace| StepCommunication { left_out: trace.collectives, ..Default::default() };
            ranks.iter().map(none).collect()
        }
    };
    let names: BTreeSet<&str> = traces.iter().flat_map(|(_, trace)| trace.names()).collect();
    let mut figures = vec![];
    for rates in &rates {
        let steps: Vec<_> = traces.iter().map(|(_, trace)| trace.step(*rates)).collect();
        let totals: Vec<_> =
            steps.iter().zip(&calls).map(|(step, calls)| step.total_s + calls.total_s).collect();
        figures.extend(&totals);
        let slowest = totals.iter().zip(&steps).max_by(|one, other| one.0.total_cmp(other.0));
        let of: BTreeMap<&str, f64> = slowest
            .into_iter()
            .flat_map(|(_, step)| &step.operators)
            .map(|operator| (&*operator.name, operator.seconds))
            .collect();
        figures.extend(names.iter().map(|name| of.get(name).copied().unwrap_or(0.0)));
    }
    let left_out = calls.iter().map(|communication| communication.left_out).sum();
    let calls = calls.iter().map(|communication| communication.total_s).collect();
    let names = names.iter().map(|name| (*name).to_owned()).collect();
    let figures = floats(py, figures);
    Ok((traces.into_iter().map(|(name, _)| name).collect(), names, figures, calls, left_out))
}

/// Servers with slow memory, a list of services in JSON: of each 64-bit floats.
#[pyfunction]
pub(crate) fn plan_tier<'py>(py: Python<'py>, question: &str, rows: &str) -> PyResult<Bound<'py, PyBytes>> {
    let question: TierQuestion = asked(question, &[])?;
    let rows: Vec<TierRow> = asked(rows, &[])?;
    let predicted = py.detach(|| {
        let server = TierServer::new(&question)?;
        rows.iter().map(|row| server.row(row)).collect::<Result<Vec<_>, _>>()
    });
    let or_nan = |value: Option<f64>| value.unwrap_or(f64::NAN);
    let figures = predicted.map_err(wrong)?.into_iter().flat_map(|row| {
        [
            row.slow_bytes,
            row.spill,
            f64::from(row.units),
            row.slow_bytes_per_s,
            row.touches_a_minute,
            or_nan(row.mean_s),
            or_nan(row.slowdown),
            or_nan(row.crowding),
            row.servers,
            row.memory_cost,
            row.watts,
            row.carbon,
            row.carbon_new,
        ]
    });
    Ok(floats(py, figures))
}

/// Contexts and batches with policies by their places: the names of objects and tiers; of each row 64-bit floats, the figures and then
/// bytes of each object in each tier, NaN where it does not fit; and what does not fit, and what would.
#[pyfunction]
#[expect(clippy::type_complexity, reason = "a tuple of Python's")]
pub(crate) fn plan_offload<'py>(
    py: Python<'py>,
    model: &str,
    platform: &str,
    settings: &str,
    rows: Vec<(u32, u32, usize)>,
    policies: Vec<String>,
) -> PyResult<(Vec<String>, Vec<String>, Bound<'py, PyBytes>, Vec<(String, String)>)> {
    let settings: Settings = asked(settings, &[])?;
    let predicted = py.detach(|| {
        let machine = Platform::load(platform)?;
        let planner = Planner::new(&machine, platform, settings)?;
        let policies: Vec<_> =
            policies.iter().map(|name| PlacingPolicy::parse(name)).collect::<Result<_, OffloadError>>()?;
        let tiers: Vec<String> = planner.tiers().iter().map(|tier| tier.name.clone()).collect();
        // Each is read once, for whatever batches and policies.
        let mut models = BTreeMap::new();
        let (mut objects, mut figures, mut note) = (vec![], vec![], vec![]);
        for (context, batch, policy) in rows {
            let model = match models.entry(context) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(Model::load_with(model, Some(context))?),
            };
            let mut point = planner.point(model, batch, std::slice::from_ref(&policies[policy]))?;
            let placed = point.policies.remove(0);
            let phase = |index: usize| placed.phases.get(index).map_or(f64::NAN, |phase| phase.seconds);
            let or_nan = |value: Option<f64>| value.unwrap_or(f64::NAN);
            figures.extend([
                phase(0),
                phase(1),
                phase(2),
                or_nan(placed.step_s),
                or_nan(placed.tokens_per_s),
            ]);
            figures.extend([point.dram_only_s, point.gpu.used_bytes, point.bytes]);
            match placed.fits {
                true => figures.extend(placed.bytes.iter().flatten()),
                false => figures.extend(std::iter::repeat_n(f64::NAN, point.objects.len() * tiers.len())),
            }
            objects = point.objects.into_iter().map(|object| object.name).collect();
            note.push((placed.lacks.unwrap_or_default(), placed.would_fit.unwrap_or_default()));
        }
        Ok::<_, OffloadError>((objects, tiers, figures, note))
    });
    let (objects, tiers, figures, note) = predicted.map_err(|error| argument(error.to_string()))?;
    Ok((objects, tiers, floats(py, figures), note))
}

/// The names of each choice.
type Choices = Vec<(&'static str, &'static [&'static str])>;

/// A figure of a step: its key, the keys that lead to it in JSON, its label, and whether it is seconds beside computation.
type Figures = Vec<(&'static str, &'static str, &'static str, bool)>;

/// The names of a layout's numbers, those of each choice among them, and the figures of a step.
#[pyfunction]
pub(crate) fn plan_names() -> (Vec<&'static str>, Choices, Figures) {
    let figures = Step::FIGURES.iter().map(|it| (it.key, it.path, it.label, it.is_hidden));
    (NUMBERS.to_vec(), choices(), figures.collect())
}

/// Predicts rows of unsigned 32-bit numbers, on platforms and with tiers that rows name by their places, into rows of 64-bit floats, 32-bit places of why not, and the reasons.
#[pyfunction]
#[pyo3(signature = (model, places, rows, *, rack=None, fill=None, order=None))]
pub(crate) fn plan_points<'py>(
    py: Python<'py>,
    model: &str,
    places: (Vec<String>, Vec<String>),
    rows: PyBuffer<u32>,
    rack: Option<String>,
    fill: Option<u32>,
    order: Option<&str>,
) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyBytes>, Vec<String>)> {
    let rows = rows.to_vec(py)?;
    if !rows.len().is_multiple_of(SITE_NUMBERS + NUMBERS.len()) {
        return Err(argument("no whole number of rows".into()));
    }
    let (platforms, tiers) = places;
    let tiers = tiers.iter().map(|tier| tier.parse()).collect::<Result<Vec<TierId>, TierIdError>>();
    let tiers = tiers.map_err(|error| argument(error.to_string()))?;
    let order = order.map(str::parse).transpose().map_err(|error: OrderError| argument(error.to_string()))?;
    let Points { figures, refused, reasons } = py
        .detach(|| points(model, &platforms, &tiers, rack.as_deref(), fill, order, &rows))
        .map_err(|error| argument(error.to_string()))?;
    let refused: Vec<u8> = refused.iter().flat_map(|place| place.to_le_bytes()).collect();
    Ok((floats(py, figures), PyBytes::new(py, &refused), reasons))
}
