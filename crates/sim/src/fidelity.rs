//! How closely communication is looked at: a word that several folders share.

use serde::{Deserialize, Serialize};

/// How closely communication is looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fidelity {
    /// In closed form: each transfer as if it were alone, with what a topology carries on average.
    #[default]
    L0,
    /// By flows: those of all groups at the same time, over the links on their routes.
    L1,
    /// Flit by flit, as long as the flits are few enough.
    L2,
}

impl Fidelity {
    /// All, the least close first.
    pub const ALL: [Self; 3] = [Self::L0, Self::L1, Self::L2];

    /// As options have it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::L0 => "L0",
            Self::L1 => "L1",
            Self::L2 => "L2",
        }
    }
}
