//! What ranks send, and the seconds that it takes.

use std::ops::{Index, IndexMut};

/// How a group of ranks lies: so many of it in a rack, and in so many racks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupSpan {
    pub(crate) inside: u32,
    pub(crate) between: u32,
    /// How many ranks lie from one of its members in a rack to the next, and from one rack's to the next one's; of kinds that are not
    /// counted one after the other those of the first.
    pub(crate) near: u32,
    pub(crate) far: u32,
}

/// Which links carry something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Those inside a rack.
    Inside,
    /// Those between racks.
    Between,
}

impl Scope {
    pub(crate) const fn other(self) -> Self {
        match self {
            Self::Inside => Self::Between,
            Self::Between => Self::Inside,
        }
    }
}

/// Seconds on links inside racks, and on those between them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Scopes {
    pub(crate) inside: f64,
    pub(crate) between: f64,
}

impl Scopes {
    /// What a function says of each scope.
    #[inline(always)]
    pub(crate) fn of(mut seconds: impl FnMut(Scope) -> f64) -> Self {
        Self { inside: seconds(Scope::Inside), between: seconds(Scope::Between) }
    }

    /// What a function makes of each.
    #[inline(always)]
    pub(crate) fn map(self, mut change: impl FnMut(f64) -> f64) -> Self {
        Self { inside: change(self.inside), between: change(self.between) }
    }

    /// What these parts of both come to.
    #[inline(always)]
    pub(crate) const fn parts(self, parts: Self) -> f64 {
        parts.inside * self.inside + parts.between * self.between
    }

    /// Both, one after the other.
    #[inline(always)]
    pub(crate) const fn sum(self) -> f64 {
        self.inside + self.between
    }
}

impl Index<Scope> for Scopes {
    type Output = f64;

    #[inline(always)]
    fn index(&self, scope: Scope) -> &f64 {
        match scope {
            Scope::Inside => &self.inside,
            Scope::Between => &self.between,
        }
    }
}

impl IndexMut<Scope> for Scopes {
    #[inline(always)]
    fn index_mut(&mut self, scope: Scope) -> &mut f64 {
        match scope {
            Scope::Inside => &mut self.inside,
            Scope::Between => &mut self.between,
        }
    }
}

/// Which ranks send what to which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pattern {
    /// A sum of the bytes of each rank, on each rank.
    AllReduce,
    /// A reduce-scatter, or an all-gather, whose whole is the bytes.
    Half,
    /// The bytes of each rank are for all ranks, itself too.
    AllToAll,
    /// From a stage to the next.
    Send,
}

/// A transfer among the ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Transfer {
    pub(crate) pattern: Pattern,
    pub(crate) span: GroupSpan,
    pub(crate) bytes: f64,
}

/// What transfers cost on some machine.
pub(crate) trait CommunicationCosts {
    /// Seconds of each of some transfers that run at the same time.
    fn seconds<const N: usize>(&self, transfers: [Transfer; N]) -> [Scopes; N];

    /// Seconds of a transfer beside which nothing runs.
    #[inline]
    fn alone(&self, pattern: Pattern, span: GroupSpan, bytes: f64) -> Scopes {
        let [seconds] = self.seconds([Transfer { pattern, span, bytes }]);
        seconds
    }
}
