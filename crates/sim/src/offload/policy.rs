//! The policies that a plan sets side by side: those of `place`, and files of fractions.

use std::collections::BTreeMap;

use polder_place::{Kind, PlaceError, Placement, Policy, Problem};
use polder_platform::{in_words, quoted, text_of};
use serde_json::Value;

use super::OffloadError;

/// How a step's objects are placed.
#[derive(Clone, Debug, PartialEq)]
pub enum PlacingPolicy {
    /// By a rule.
    Rule(Policy),
    /// By the fractions of a file.
    File(FractionFile),
}

/// A file of fractions: of each object by name, a list of one number for each tier, or numbers by the names of tiers.
#[derive(Clone, Debug, PartialEq)]
pub struct FractionFile {
    path: String,
    objects: BTreeMap<String, Value>,
}

/// Names that stand for several objects.
const GROUPS: [(&str, &[Kind]); 3] = [
    ("optimizer states", &[Kind::Momentum, Kind::Variance]),
    ("weights", &[Kind::MasterParameter, Kind::Parameter]),
    ("gradients", &[Kind::MasterGradient, Kind::Gradient]),
];

impl PlacingPolicy {
    /// A rule by its name, or a file by its path.
    ///
    /// # Errors
    /// When it is neither, or the file is no JSON object.
    pub fn parse(text: &str) -> Result<Self, OffloadError> {
        if let Ok(rule) = text.parse() {
            return Ok(Self::Rule(rule));
        }
        if !std::path::Path::new(text).exists() {
            let known = Policy::ALL.map(Policy::name).join(", ");
            let problem = format!("\"{}\" is no policy and no file; there are {known}", quoted(text));
            return Err(OffloadError::option("--policy", problem));
        }
        let json: Value = serde_json::from_str(&text_of(text)?).map_err(|error| {
            OffloadError::option(text, format!("expected JSON: {}", in_words(&error.to_string())))
        })?;
        let Value::Object(objects) = json else {
            return Err(OffloadError::option(text, "expected an object such as {\"activations\": [0, 1]}"));
        };
        Ok(Self::File(FractionFile { path: text.into(), objects: objects.into_iter().collect() }))
    }

    /// What tables call it.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::Rule(rule) => rule.name().into(),
            Self::File(file) => quoted(&file.path),
        }
    }

    /// Places the objects; `Ok(Err)` where they do not fit.
    pub(crate) fn place(&self, problem: &Problem) -> Result<Result<Placement, PlaceError>, OffloadError> {
        let placement = match self {
            Self::Rule(rule) => problem.place(*rule),
            Self::File(file) => {
                let placement = file.placement(problem)?;
                problem.check_placement(&placement).map(|()| placement)
            }
        };
        match (placement, self) {
            (Err(error @ (PlaceError::TooSmall { .. } | PlaceError::NoRoom { .. })), _) => Ok(Err(error)),
            (Err(error), Self::File(file)) => Err(OffloadError::option(&file.path, error.to_string())),
            (placement, _) => Ok(Ok(placement?)),
        }
    }
}

impl FractionFile {
    /// A row for each object: its own, else that of its group, else all of it in the first tier.
    fn placement(&self, problem: &Problem) -> Result<Placement, OffloadError> {
        let wrong = |problem: String| OffloadError::option(&self.path, problem);
        let group =
            |kind: Kind| GROUPS.iter().find(|(_, kinds)| kinds.contains(&kind)).map(|(name, _)| *name);
        let names = problem.objects.iter().map(|it| it.name.as_str());
        let groups = problem.objects.iter().filter_map(|object| group(object.kind));
        let mut known: Vec<&str> = names.chain(groups).collect();
        if let Some(unknown) = self.objects.keys().find(|name| !known.contains(&name.as_str())) {
            let mut seen = std::collections::BTreeSet::new();
            known.retain(|name| seen.insert(*name));
            let (unknown, known) = (quoted(unknown), known.join(", "));
            return Err(wrong(format!("{unknown}: no object of this step; there are {known}")));
        }
        let row = |object: &polder_place::Object| -> Result<Vec<f64>, OffloadError> {
            let own = self.objects.get_key_value(&object.name);
            let given = own.or_else(|| self.objects.get_key_value(group(object.kind)?));
            let first = || (0..problem.tiers.len()).map(|tier| f64::from(tier == 0)).collect();
            given.map_or_else(
                || Ok(first()),
                |(name, value)| {
                    fractions(value, problem).map_err(|reason| wrong(format!("{name}: {reason}")))
                },
            )
        };
        Ok(Placement { fractions: problem.objects.iter().map(row).collect::<Result<_, _>>()? })
    }
}

/// A list of fractions, or fractions by the names of tiers, those that are left out 0.
fn fractions(value: &Value, problem: &Problem) -> Result<Vec<f64>, String> {
    let number = |entry: &Value| {
        entry.as_f64().ok_or_else(|| format!("expected a number, found {}", quoted(&entry.to_string())))
    };
    match value {
        Value::Array(all) => all.iter().map(number).collect(),
        Value::Object(by_name) => {
            let place = |name: &str| problem.tiers.iter().position(|tier| tier.name == name);
            let mut row = vec![0.0; problem.tiers.len()];
            for (name, share) in by_name {
                let Some(tier) = place(name) else {
                    let known: Vec<_> = problem.tiers.iter().map(|tier| tier.name.as_str()).collect();
                    return Err(format!(
                        "{}: no tier of this name; there are {}",
                        quoted(name),
                        known.join(", ")
                    ));
                };
                row[tier] = number(share)?;
            }
            Ok(row)
        }
        _ => Err(format!(
            "expected a list of fractions, or fractions by tier, found {}",
            quoted(&value.to_string())
        )),
    }
}
