//! In which order ranks are counted: which of them are neighbours.

use std::fmt;
use std::str::FromStr;

use polder_platform::quoted;
use serde::{Deserialize, Serialize};

/// In which order ranks are counted, the closest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Order([usize; KINDS.len()]);

/// Kinds of groups, by which [`Ranks`] are indexed; `dp` stands for the groups that share all experts.
const KINDS: [&str; 5] = ["tp", "cp", "ep", "dp", "pp"];
pub(crate) const TP: usize = 0;
pub(crate) const CP: usize = 1;
pub(crate) const EP: usize = 2;
pub(crate) const DP: usize = 3;
pub(crate) const PP: usize = 4;

/// How many there are of each kind.
pub(crate) type Ranks = [u32; KINDS.len()];

/// What is no order.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected an order of tp, cp, ep, dp and pp, each once, such as \"{}\", found \"{}\"",
    Order::default(),
    quoted(found)
)]
pub struct OrderError {
    found: String,
}

impl Order {
    /// The kinds in words, the closest first.
    pub fn words(self) -> impl Iterator<Item = &'static str> {
        self.0.into_iter().map(|kind| ["tensor", "context", "expert", "data", "pipeline"][kind])
    }

    /// Each kind with how far apart its neighbours are, the closest first.
    pub(crate) fn strides(self, ranks: &Ranks) -> impl Iterator<Item = (usize, u32)> {
        self.0.into_iter().scan(1, |next, kind| {
            let stride = *next;
            *next *= ranks[kind];
            Some((kind, stride))
        })
    }

    /// How many ranks the closest group has, the closest two, and the closest three.
    pub(crate) fn groups(self, ranks: &Ranks) -> [u32; 3] {
        let [a, b, c, ..] = self.0.map(|kind| ranks[kind]);
        [a, a * b, a * b * c]
    }

    /// Whether copies and stages are counted last, so that a block lies alike in however many of them.
    pub(crate) fn is_block_first(self) -> bool {
        self.0[3..].iter().all(|kind| [DP, PP].contains(kind))
    }
}

impl Default for Order {
    fn default() -> Self {
        Self([TP, CP, EP, DP, PP])
    }
}

impl FromStr for Order {
    type Err = OrderError;

    fn from_str(text: &str) -> Result<Self, OrderError> {
        let kinds = text.split('-').map(|name| KINDS.iter().position(|kind| *kind == name));
        let kinds = kinds.collect::<Option<Vec<_>>>().and_then(|kinds| kinds.try_into().ok());
        let is_whole = |kinds: &[usize; KINDS.len()]| (0..KINDS.len()).all(|kind| kinds.contains(&kind));
        kinds.filter(is_whole).map(Self).ok_or_else(|| OrderError { found: text.into() })
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.map(|kind| KINDS[kind]).join("-"))
    }
}

as_text!(Order);
