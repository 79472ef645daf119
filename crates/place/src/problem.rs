//! What is placed, where it can lie, and what a placement takes.

use polder_platform::{Bandwidth, Bytes};
use serde::{Deserialize, Serialize};

/// Bytes a second of a link, each way.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// Reading.
    pub read: Bandwidth,
    /// Writing.
    pub write: Bandwidth,
}

/// A kind of memory that objects can lie in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tier {
    /// What tables call it.
    pub name: String,
    /// How much of it objects may take.
    pub capacity: Bytes,
    /// What the CPU reaches of it.
    pub cpu: Rates,
    /// What copies of a device, such as a GPU, reach of it; as the CPU when absent.
    #[serde(default)]
    pub device: Option<Rates>,
    /// The tier through which its bytes are staged, by its place: that one's link carries them too.
    #[serde(default)]
    pub through: Option<usize>,
}

/// What an object is to a training step. The order is that in which the `paper` policy fills DRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The optimizer's mean of gradients.
    Momentum,
    /// Its mean of squared gradients.
    Variance,
    /// 32-bit gradients.
    MasterGradient,
    /// 32-bit parameters.
    MasterParameter,
    /// 16-bit parameters.
    Parameter,
    /// Checkpointed activations.
    Activation,
    /// 16-bit gradients.
    Gradient,
    /// Any other tensor.
    Other,
}

/// Bytes that are placed together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Object {
    /// What tables call it.
    pub name: String,
    /// What it is to the step.
    pub kind: Kind,
    /// How large it is.
    pub bytes: Bytes,
    /// The tiers that it can lie in, by their places; any of them when there is none.
    #[serde(default)]
    pub only: Vec<usize>,
}

impl Object {
    pub(crate) fn can_lie_in(&self, tier: usize) -> bool {
        self.only.is_empty() || self.only.contains(&tier)
    }
}

/// What a phase moves of an object.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Moved {
    /// Which, by its place.
    pub object: usize,
    /// How often it is read.
    pub read: f64,
    /// How often it is written.
    pub write: f64,
}

/// A part of a step that ends before the next begins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phase {
    /// What tables call it.
    pub name: String,
    /// Whether a device moves the bytes, and not the CPU.
    #[serde(default)]
    pub by_device: bool,
    /// Seconds that it takes wherever the bytes lie: computation, or a link that all of them cross.
    #[serde(default)]
    pub least_s: f64,
    /// Computation, of which a part may hold transfers up.
    #[serde(default)]
    pub computing: Computing,
    /// Copies that are made in turn, beside all others, on links that they share.
    #[serde(default)]
    pub streams: Vec<Stream>,
    /// What it moves.
    pub moved: Vec<Moved>,
}

/// Copies of a phase that are made in turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stream {
    /// Which of what the phase moves, by its place there.
    pub moved: Vec<usize>,
    /// Seconds in which devices send each other what was copied, or will be: in turn with its copies.
    pub exchanged_s: f64,
    /// Seconds that its copies take wherever the bytes lie.
    pub least_s: f64,
}

/// Copies that share links, and what they last at least.
pub(crate) struct Turn<'p> {
    pub(crate) moved: Vec<&'p Moved>,
    pub(crate) exchanged_s: f64,
    pub(crate) least_s: f64,
}

impl Phase {
    /// All copies of the phase, then those of each stream: it lasts as long as the slowest of these.
    pub(crate) fn turns(&self) -> impl Iterator<Item = Turn<'_>> {
        let all = Turn { moved: self.moved.iter().collect(), exchanged_s: 0.0, least_s: self.least_s };
        let own = self.streams.iter().map(|stream| Turn {
            moved: stream.moved.iter().map(|it| &self.moved[*it]).collect(),
            exchanged_s: stream.exchanged_s,
            least_s: stream.least_s,
        });
        std::iter::once(all).chain(own)
    }
}

/// What a phase computes while its bytes move.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Computing {
    /// Seconds.
    pub seconds: f64,
    /// The part of computation and transfers, of whichever is shorter, that runs beside the other.
    pub overlap: f64,
}

impl Default for Computing {
    fn default() -> Self {
        Self { seconds: 0.0, overlap: 1.0 }
    }
}

impl Computing {
    /// Seconds of both, where transfers take so long.
    #[must_use]
    pub fn beside(&self, transfers: f64) -> f64 {
        let Self { seconds, overlap } = *self;
        seconds.max(transfers) + (1.0 - overlap) * seconds.min(transfers)
    }
}

/// Objects, tiers and phases. The first tier is DRAM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Problem {
    /// Where objects can lie, DRAM first.
    pub tiers: Vec<Tier>,
    /// What is placed.
    pub objects: Vec<Object>,
    /// What a step moves.
    pub phases: Vec<Phase>,
}

/// The fraction of each object in each tier.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// A row for each object, in it a fraction for each tier.
    pub fractions: Vec<Vec<f64>>,
}

/// Why there is no placement.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlaceError {
    /// The problem is none.
    #[error("{at}: {problem}")]
    Problem {
        /// Which part of it.
        at: String,
        /// What was expected, and what is there.
        problem: String,
    },
    /// Fractions that no placement has.
    #[error("{object}: {problem}")]
    Fractions {
        /// Of which object.
        object: String,
        /// What was expected, and what is there.
        problem: String,
    },
    /// A tier cannot hold what it should.
    #[error("tier {tier} of {capacity} cannot hold {bytes}: it is {} too small; enlarge it, or place less there", Bytes::new(bytes.value() - capacity.value()))]
    TooSmall {
        /// Which.
        tier: String,
        /// How much it can hold.
        capacity: Bytes,
        /// How much it should.
        bytes: Bytes,
    },
    /// All tiers together are too small.
    #[error("{objects} do not fit in all tiers together, which hold {capacity}: they are {} too small; add a tier, or enlarge one", Bytes::new(objects.value() - capacity.value()))]
    NoRoom {
        /// What all objects take.
        objects: Bytes,
        /// What all tiers hold.
        capacity: Bytes,
    },
    /// The solver gave up.
    #[error("the linear program of {objects} objects in {tiers} tiers was not solved: {problem}")]
    Unsolved {
        /// How many objects.
        objects: usize,
        /// How many tiers.
        tiers: usize,
        /// What it said.
        problem: String,
    },
}

/// What a rounding error may add to a capacity or a sum of fractions.
pub(crate) const SLACK: f64 = 1e-9;

impl Problem {
    /// Whether its parts go together.
    ///
    /// # Errors
    /// [`PlaceError::Problem`], which names the part.
    pub fn check(&self) -> Result<(), PlaceError> {
        let wrong = |at: String, problem: String| Err(PlaceError::Problem { at, problem });
        if self.tiers.is_empty() {
            return wrong("tiers".into(), "expected at least one".into());
        }
        for (index, tier) in self.tiers.iter().enumerate() {
            if tier.through.is_some_and(|through| through >= self.tiers.len() || through == index) {
                return wrong(
                    format!("tier {}", tier.name),
                    "expected another tier that its bytes go through".into(),
                );
            }
        }
        for object in &self.objects {
            if object.only.iter().any(|only| *only >= self.tiers.len()) {
                return wrong(object.name.clone(), format!("expected one of {} tiers", self.tiers.len()));
            }
        }
        for Phase { name, least_s, computing, streams, moved, .. } in &self.phases {
            let Computing { seconds, overlap } = computing;
            if !(0.0..=1.0).contains(overlap) {
                let problem = format!("expected a part from 0 to 1, found {overlap}");
                return wrong(format!("phase {name}"), problem);
            }
            let is_time = |time: &&f64| time.is_finite() && **time >= 0.0;
            let own = streams.iter().flat_map(|stream| [&stream.exchanged_s, &stream.least_s]);
            if let Some(seconds) = [seconds, least_s].into_iter().chain(own).find(|time| !is_time(time)) {
                let problem = format!("expected seconds from 0 on, found {seconds}");
                return wrong(format!("phase {name}"), problem);
            }
            if let Some(astray) =
                streams.iter().flat_map(|stream| &stream.moved).find(|index| **index >= moved.len())
            {
                let problem = format!("expected streams of what it moves, found number {astray}");
                return wrong(format!("phase {name}"), problem);
            }
            for Moved { object, read, write } in moved {
                if *object >= self.objects.len() {
                    return wrong(
                        format!("phase {name}"),
                        format!("expected one of {} objects", self.objects.len()),
                    );
                }
                if !(read.is_finite() && write.is_finite() && *read >= 0.0 && *write >= 0.0) {
                    return wrong(
                        format!("phase {name}"),
                        format!("expected passes from 0 on, found {read} and {write}"),
                    );
                }
            }
        }
        Ok(())
    }

    /// Whether a placement is one of this problem: fractions that add up, and no tier over its capacity.
    ///
    /// # Errors
    /// [`PlaceError::Fractions`] or [`PlaceError::TooSmall`].
    pub fn check_placement(&self, placement: &Placement) -> Result<(), PlaceError> {
        if placement.fractions.len() != self.objects.len() {
            let problem = format!(
                "expected a row for each of {}, found {}",
                self.objects.len(),
                placement.fractions.len()
            );
            return Err(PlaceError::Fractions { object: "objects".into(), problem });
        }
        for (object, fractions) in self.objects.iter().zip(&placement.fractions) {
            let wrong = |problem| Err(PlaceError::Fractions { object: object.name.clone(), problem });
            if fractions.len() != self.tiers.len() {
                return wrong(format!(
                    "expected a fraction for each of {} tiers, found {}",
                    self.tiers.len(),
                    fractions.len()
                ));
            }
            if let Some(odd) = fractions.iter().find(|fraction| !(0.0..=1.0).contains(*fraction)) {
                return wrong(format!("expected fractions from 0 to 1, found {odd}"));
            }
            let sum: f64 = fractions.iter().sum();
            if (sum - 1.0).abs() > SLACK * fractions.len() as f64 {
                return wrong(format!("expected fractions that add up to 1, found {sum}"));
            }
            let astray = |tier: &usize| !object.can_lie_in(*tier) && fractions[*tier] > SLACK;
            if let Some(tier) = (0..fractions.len()).find(astray) {
                let names: Vec<_> = object.only.iter().map(|tier| self.tiers[*tier].name.as_str()).collect();
                let tier_name = &self.tiers[tier].name;
                return wrong(match names[..] {
                    [one] => format!("expected all of it in {one}, where it has to stay"),
                    _ => format!("expected none of it in {tier_name}; it can lie in {}", names.join(", ")),
                });
            }
        }
        for (index, tier) in self.tiers.iter().enumerate() {
            let bytes = self.held(placement, index);
            if bytes > tier.capacity.value() * (1.0 + SLACK * 10.0) + 1.0 {
                let (tier, capacity) = (tier.name.clone(), tier.capacity);
                return Err(PlaceError::TooSmall { tier, capacity, bytes: Bytes::new(bytes) });
            }
        }
        Ok(())
    }

    /// Bytes in a tier.
    #[must_use]
    pub fn held(&self, placement: &Placement, tier: usize) -> f64 {
        self.objects
            .iter()
            .zip(&placement.fractions)
            .map(|(object, row)| object.bytes.value() * row[tier])
            .sum()
    }

    /// Seconds of each phase: the slowest of its links, and of the computation beside it what cannot run at the same time.
    #[must_use]
    pub fn seconds(&self, placement: &Placement) -> Vec<f64> {
        self.phases
            .iter()
            .map(|phase| {
                let exchanged = std::iter::once(0.0).chain(phase.streams.iter().map(|it| it.exchanged_s));
                let turns = self.copies(phase, placement).into_iter().zip(exchanged);
                phase
                    .computing
                    .beside(turns.map(|(copies, exchanged)| copies + exchanged).fold(0.0, f64::max))
            })
            .collect()
    }

    /// Seconds of all copies of a phase, then of those of each stream alone: the slowest link of each.
    #[must_use]
    pub fn copies(&self, phase: &Phase, placement: &Placement) -> Vec<f64> {
        let slowest = |turn: Turn<'_>| {
            let links = self.links_of(phase, turn.moved.into_iter(), placement);
            links.into_iter().fold(turn.least_s, f64::max)
        };
        phase.turns().map(slowest).collect()
    }

    /// Seconds of each tier's link in a phase.
    #[must_use]
    pub fn links(&self, phase: &Phase, placement: &Placement) -> Vec<f64> {
        self.links_of(phase, phase.moved.iter(), placement)
    }

    fn links_of<'m>(
        &self,
        phase: &Phase,
        moved: impl Iterator<Item = &'m Moved>,
        placement: &Placement,
    ) -> Vec<f64> {
        let mut seconds = vec![0.0; self.tiers.len()];
        for moved in moved {
            for (tier, fraction) in placement.fractions[moved.object].iter().enumerate() {
                for (link, whole) in self.passes(phase, moved, tier) {
                    seconds[link] += fraction * whole;
                }
            }
        }
        seconds
    }

    /// Seconds of all links in all phases for an object, when all of it lies in `tier`.
    pub(crate) fn passes_of(&self, object: usize, tier: usize) -> f64 {
        let moves = self.phases.iter().flat_map(|phase| phase.moved.iter().map(move |moved| (phase, moved)));
        let of_object = moves.filter(|(_, moved)| moved.object == object);
        of_object.flat_map(|(phase, moved)| self.passes(phase, moved, tier)).map(|(_, seconds)| seconds).sum()
    }

    /// The links that carry an object which lies in `tier`, with their seconds when all of it lies there.
    pub(crate) fn passes(
        &self,
        phase: &Phase,
        moved: &Moved,
        tier: usize,
    ) -> impl Iterator<Item = (usize, f64)> {
        let bytes = self.objects[moved.object].bytes.value();
        let Moved { read, write, .. } = *moved;
        [Some(tier), self.tiers[tier].through].into_iter().flatten().map(move |link| {
            let Tier { cpu, device, .. } = &self.tiers[link];
            let rates = device.as_ref().filter(|_| phase.by_device).unwrap_or(cpu);
            (link, bytes * (read / rates.read.value() + write / rates.write.value()))
        })
    }
}

/// A row that adds up to 1, without what rounding left.
pub(crate) fn whole(row: &[f64]) -> Vec<f64> {
    let row: Vec<f64> = row.iter().map(|it| if *it < 1e-12 { 0.0 } else { *it }).collect();
    let sum: f64 = row.iter().sum();
    row.iter().map(|it| (it / sum).min(1.0)).collect()
}
