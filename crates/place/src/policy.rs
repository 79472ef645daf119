//! The ways to place: by a fixed order, or by a linear program.

use std::fmt;
use std::str::FromStr;

use polder_platform::Bytes;

use crate::optimal;
use crate::problem::{PlaceError, Placement, Problem, whole};

/// How objects are placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Everything in the first tier.
    Dram,
    /// Page by page over all tiers in turn until one is full, then over the others.
    Interleave,
    /// The greedy order of Liaw and Chen's code, `latency_first_allocation`: objects by [`Kind`](crate::Kind), each in DRAM
    /// where it fits whole; the first ones that do not, over DRAM and every card alike; the rest on the cards.
    Paper,
    /// What minimises the sum over phases of the slowest link's seconds.
    Optimal,
}

/// There is no such policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no policy; there are dram, interleave, paper and optimal")]
pub struct PolicyError(String);

impl Policy {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Dram, Self::Interleave, Self::Paper, Self::Optimal];

    /// As options have it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dram => "dram",
            Self::Interleave => "interleave",
            Self::Paper => "paper",
            Self::Optimal => "optimal",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Policy {
    type Err = PolicyError;

    fn from_str(name: &str) -> Result<Self, PolicyError> {
        Self::ALL.into_iter().find(|it| it.name() == name).ok_or_else(|| PolicyError(name.into()))
    }
}

impl Problem {
    /// Places the objects.
    ///
    /// # Errors
    /// [`PlaceError`] when they do not fit, or the problem is none.
    pub fn place(&self, policy: Policy) -> Result<Placement, PlaceError> {
        self.check()?;
        let (objects, capacity) = (self.objects.iter().map(|it| it.bytes.value()).sum(), self.capacity());
        if objects > capacity && policy != Policy::Dram {
            return Err(PlaceError::NoRoom { objects: Bytes::new(objects), capacity: Bytes::new(capacity) });
        }
        let mut order: Vec<usize> = (0..self.objects.len()).collect();
        let placement = match policy {
            Policy::Dram => self.in_order(order, first),
            Policy::Interleave => self.in_order(order, spread),
            Policy::Paper => {
                order.sort_by_key(|object| self.objects[*object].kind);
                self.in_order(order, greedy)
            }
            Policy::Optimal => optimal::place(self)?,
        };
        self.check_placement(&placement)?;
        Ok(placement)
    }

    fn capacity(&self) -> f64 {
        self.tiers.iter().map(|tier| tier.capacity.value()).sum()
    }

    /// Places one object after the other, those first that can lie in the fewest tiers. `share` says how many bytes of an
    /// object go into each tier that it can lie in, given what room is left there.
    fn in_order(&self, mut order: Vec<usize>, share: impl Fn(f64, &[f64]) -> Vec<f64>) -> Placement {
        let mut rooms: Vec<f64> = self.tiers.iter().map(|tier| tier.capacity.value()).collect();
        let mut fractions = vec![vec![0.0; self.tiers.len()]; self.objects.len()];
        let open =
            |object: usize| (0..self.tiers.len()).filter(move |tier| self.objects[object].can_lie_in(*tier));
        order.sort_by_key(|object| open(*object).count());
        for object in order {
            let bytes = self.objects[object].bytes.value();
            let mut shares = match open(object).map(|tier| rooms[tier]).collect::<Vec<_>>()[..] {
                [_] => vec![bytes],
                ref rooms => share(bytes, rooms),
            };
            // What finds no room makes the first tier too small, which the check says.
            shares[0] += (bytes - shares.iter().sum::<f64>()).max(0.0);
            for (index, (tier, share)) in open(object).zip(shares).enumerate() {
                rooms[tier] = (rooms[tier] - share).max(0.0);
                // An object of no bytes lies anywhere.
                fractions[object][tier] = if bytes > 0.0 { share / bytes } else { f64::from(index == 0) };
            }
        }
        Placement { fractions: fractions.into_iter().map(|row| whole(&row)).collect() }
    }
}

/// All bytes into the first tier, whether they fit or not.
fn first(bytes: f64, rooms: &[f64]) -> Vec<f64> {
    let mut shares = vec![0.0; rooms.len()];
    shares[0] = bytes;
    shares
}

/// As many bytes into each tier as into the next, while they have room.
fn spread(bytes: f64, rooms: &[f64]) -> Vec<f64> {
    let mut shares = vec![0.0; rooms.len()];
    let mut left = bytes;
    while left > bytes * 1e-12 {
        let open: Vec<usize> =
            (0..rooms.len()).filter(|it| rooms[*it] - shares[*it] > bytes * 1e-12).collect();
        // What rounding left of the last room.
        let Some(least) = open.iter().map(|it| rooms[*it] - shares[*it]).min_by(f64::total_cmp) else {
            break;
        };
        let each = least.min(left / open.len() as f64);
        for tier in &open {
            shares[*tier] += each;
        }
        left -= each * open.len() as f64;
    }
    shares
}

/// What `latency_first_allocation` does with one object. The cards share alike what DRAM does not take.
fn greedy(bytes: f64, rooms: &[f64]) -> Vec<f64> {
    let local = match rooms[0] {
        room if room >= bytes => bytes,
        room => room.min(bytes / rooms.len() as f64),
    };
    let cards = spread(bytes - local, &rooms[1..]);
    // Where the cards are full too, DRAM takes the rest: the authors' code gives up there.
    let rest = (bytes - local - cards.iter().sum::<f64>()).max(0.0);
    std::iter::once(local + rest).chain(cards).collect()
}
