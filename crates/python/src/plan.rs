//! Predicted steps: a question and its answer as JSON, which the front gives types, and tables of many layouts.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use polder_platform::{Platform, TierId, TierIdError, in_words};
use polder_sim::contention::{FabricQuestion, answer};
use polder_sim::memory::{Question, configurations};
use polder_sim::offload::{OffloadError, PlacingPolicy, Planner, Settings};
use polder_sim::{
    CHOICES, Execution, Model, NUMBERS, OrderError, Points, Request, SITE_NUMBERS, Step, points,
};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::argument;

/// Answers a [`Request`] in JSON.
#[pyfunction]
pub(crate) fn plan_train(py: Python<'_>, request: &str, file: Option<&str>) -> PyResult<String> {
    // By way of a value: the front wrote the text, and its lines and columns say nothing to whoever called it.
    let value: serde_json::Value =
        serde_json::from_str(request).map_err(|error| argument(error.to_string()))?;
    let mut request: Request = serde_path_to_error::deserialize(value).map_err(|error| {
        let key = error.path().to_string();
        let problem = in_words(&error.inner().to_string());
        argument(format!("{}: {problem}", key.strip_prefix("layout.").unwrap_or(&key)))
    })?;
    if let Some(file) = file {
        request = request.or(&Execution::load(file).map_err(|error| argument(error.to_string()))?);
    }
    py.detach(|| {
        let threads = std::thread::available_parallelism().map_or(1, Into::into);
        let answer = request.train(threads, &|_, _| ()).map_err(|error| argument(error.to_string()))?;
        serde_json::to_string(&answer).map_err(|error| argument(error.to_string()))
    })
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
    let value: serde_json::Value =
        serde_json::from_str(question).map_err(|error| argument(error.to_string()))?;
    let question: Question = serde_path_to_error::deserialize(value).map_err(|error| {
        let key = error.path().to_string();
        let problem = in_words(&error.inner().to_string());
        argument(format!("{}: {problem}", key.strip_prefix("ways.").unwrap_or(&key)))
    })?;
    let (access, sets) = (access.to_vec(py)?, sets.to_vec(py)?);
    let (_, found) = configurations(&question).map_err(|error| argument(error.to_string()))?;
    let seconds = access.iter().zip(&sets).flat_map(|(bytes, set)| {
        found.iter().map(|it| it.seconds(*bytes, *set).unwrap_or(f64::NAN)).collect::<Vec<_>>()
    });
    let seconds: Vec<u8> = seconds.flat_map(f64::to_le_bytes).collect();
    Ok((found.iter().map(|it| it.name).collect(), PyBytes::new(py, &seconds)))
}

/// Patterns on fabrics, a list of questions in JSON: of each 64-bit floats, the time of all steps, four quantiles of a step's messages and bytes
/// a second.
#[pyfunction]
pub(crate) fn plan_fabric<'py>(py: Python<'py>, questions: &str) -> PyResult<Bound<'py, PyBytes>> {
    let values: Vec<serde_json::Value> =
        serde_json::from_str(questions).map_err(|error| argument(error.to_string()))?;
    let mut asked = vec![];
    for value in values {
        let question: FabricQuestion = serde_path_to_error::deserialize(value).map_err(|error| {
            let key = error.path().to_string();
            let problem = in_words(&error.inner().to_string());
            argument(format!("{}: {problem}", key.strip_prefix("flits.").unwrap_or(&key)))
        })?;
        asked.push(question);
    }
    let found = py.detach(|| asked.iter().map(answer).collect::<Result<Vec<_>, _>>());
    let figures = found.map_err(|error| argument(error.to_string()))?.into_iter().flat_map(|it| {
        let of = it.seconds;
        [it.total_s, of.p50_s, of.p90_s, of.p99_s, of.max_s, it.bytes_per_s]
    });
    let figures: Vec<u8> = figures.flat_map(f64::to_le_bytes).collect();
    Ok(PyBytes::new(py, &figures))
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
    let value: serde_json::Value =
        serde_json::from_str(settings).map_err(|error| argument(error.to_string()))?;
    let settings: Settings = serde_path_to_error::deserialize(value).map_err(|error| {
        let (key, problem) = (error.path().to_string(), in_words(&error.inner().to_string()));
        argument(format!("{key}: {problem}"))
    })?;
    let predicted = py.detach(|| {
        let machine = Platform::load(platform)?;
        let planner = Planner::new(&machine, platform, settings)?;
        let policies: Vec<_> =
            policies.iter().map(|it| PlacingPolicy::parse(it)).collect::<Result<_, OffloadError>>()?;
        let tiers: Vec<String> = planner.tiers().iter().map(|it| it.name.clone()).collect();
        // Each is read once, for whatever batches and policies.
        let mut models = BTreeMap::new();
        let (mut objects, mut figures, mut said) = (vec![], vec![], vec![]);
        for (context, batch, policy) in rows {
            let model = match models.entry(context) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(Model::load_with(model, Some(context))?),
            };
            let mut point = planner.point(model, batch, std::slice::from_ref(&policies[policy]))?;
            let placed = point.policies.remove(0);
            let phase = |index: usize| placed.phases.get(index).map_or(f64::NAN, |it| it.seconds);
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
            objects = point.objects.into_iter().map(|it| it.name).collect();
            said.push((placed.lacks.unwrap_or_default(), placed.would_fit.unwrap_or_default()));
        }
        Ok::<_, OffloadError>((objects, tiers, figures, said))
    });
    let (objects, tiers, figures, said) = predicted.map_err(|error| argument(error.to_string()))?;
    let figures: Vec<u8> = figures.into_iter().flat_map(f64::to_le_bytes).collect();
    Ok((objects, tiers, PyBytes::new(py, &figures), said))
}

/// The names of each choice.
type Choices = Vec<(&'static str, &'static [&'static str])>;

/// A figure of a step: its key, the keys that lead to it in JSON, its label, and whether it is seconds beside computation.
type Figures = Vec<(&'static str, &'static str, &'static str, bool)>;

/// The names of a layout's numbers, those of each choice among them, and the figures of a step.
#[pyfunction]
pub(crate) fn plan_names() -> (Vec<&'static str>, Choices, Figures) {
    let figures = Step::FIGURES.iter().map(|it| (it.key, it.path, it.label, it.is_hidden));
    (NUMBERS.to_vec(), CHOICES.to_vec(), figures.collect())
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
    let figures: Vec<u8> = figures.iter().flat_map(|figure| figure.to_le_bytes()).collect();
    let refused: Vec<u8> = refused.iter().flat_map(|place| place.to_le_bytes()).collect();
    Ok((PyBytes::new(py, &figures), PyBytes::new(py, &refused), reasons))
}
