//! What a paper leaves open, with what is taken for it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A number that a paper leaves open. `N` is how it is called.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpenValue<N = String> {
    /// Its name.
    pub name: N,
    /// What it is, in a line, with its unit.
    pub what: String,
    /// The value taken.
    pub value: f64,
    /// From where to where it is plausible.
    pub range: [f64; 2],
    /// Where the value comes from.
    pub origin: Origin,
}

/// Where a value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// From the paper's numbers.
    Fitted,
    /// From what the hardware does.
    Predicted,
    /// From a data sheet, the paper's text, or what a part of the hardware does, if the rest keeps up.
    Taken,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fitted => "fitted",
            Self::Predicted => "predicted",
            Self::Taken => "taken",
        })
    }
}
