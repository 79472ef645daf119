//! One training step on racks of two kinds, which a fabric between racks joins: copies of the model on either kind, and of the batch so many
//! sequences for each copy that neither kind waits long for the other.
//!
//! A copy never spans both kinds: a rack's own fabric joins accelerators of its kind alone. Each kind is predicted as if all copies were on
//! it, so that gradients cross the fabric between racks between all of them; the slower kind sets the pace.
//!
//! Flit by flit, the batch is divided by flows. Then this division and its neighbours are followed, so that the flits of all can be counted before.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use polder_platform::Platform;
use serde::{Deserialize, Serialize};

use crate::contention::{FlitOptions, TransferError};
use crate::fidelity::Fidelity;
use crate::search::request::{Answer, Request, RequestError};
use crate::step::flows::{FollowedFlits, StepFlits};
use crate::step::given::GivenLayout;
use crate::step::layout::Refusal;

/// Racks of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RackPart {
    /// The platform that describes them: a name or a path.
    pub platform: String,
    /// Their name on the platform.
    pub rack: String,
    /// Accelerators in racks of it.
    pub accelerators: u32,
}

/// A step on racks of two kinds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MixedRequest {
    /// Both kinds.
    pub parts: [RackPart; 2],
    /// What is asked of either kind, whose platform, rack and accelerators are those of `parts`. Its layout gives `tp`, `pp` and
    /// `batch` at least.
    pub step: Request,
}

/// What a kind of rack does.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MixedPart {
    /// Its name.
    pub rack: String,
    /// How its CPUs attach, and what CXL the fabrics carry.
    pub machine: String,
    /// Accelerators.
    pub accelerators: u32,
    /// Copies of the model.
    pub copies: u32,
    /// Sequences of each copy in a step.
    pub sequences: u32,
    /// What its copies take for them.
    pub step_s: f64,
    /// From how many to how many seconds that is, as far as can be relied on.
    pub range_s: [f64; 2],
    /// What the step takes with these racks alone; nothing where it cannot run.
    pub alone_s: Option<f64>,
}

/// The step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MixedAnswer {
    /// How closely communication was looked at.
    pub fidelity: Fidelity,
    /// What each kind does.
    pub parts: Vec<MixedPart>,
    /// Until the slower kind has ended.
    pub total_s: f64,
    /// From how many to how many seconds that is, as far as can be relied on.
    pub range_s: [f64; 2],
    /// With as many sequences for each copy, whatever its kind; nothing where the batch has no such part.
    pub even_s: Option<f64>,
    /// At L2, what of the divisions that were looked at was followed flit by flit.
    pub flits: Option<StepFlits>,
}

/// Why there is no such step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MixedError {
    /// Both kinds in one rack.
    #[error(
        "{0}: NVLink and UALink cannot be in one rack: their physical layers and flits differ (48 to 272 bytes, 640 bytes), so no switch joins both; give each racks of its own, which CXL joins"
    )]
    OneRack(String),
    /// What is needed is not given, or does not go together.
    #[error("{0}")]
    Layout(String),
    /// The flits of all steps are too many.
    #[error(transparent)]
    Transfers(#[from] TransferError),
    /// One kind cannot run its part.
    #[error("rack {rack}: {error}")]
    Part {
        /// Which.
        rack: String,
        /// Why.
        error: Box<RequestError>,
    },
}

/// A step of one kind alone.
#[derive(Clone)]
struct Alone {
    seconds: f64,
    range_s: [f64; 2],
    machine: String,
}

/// The steps of a kind, by the sequences of a copy.
struct Kind<'a> {
    step: &'a Request,
    fidelity: Fidelity,
    followed: FollowedFlits,
    part: &'a RackPart,
    copies: u32,
    all: u32,
    known: RefCell<BTreeMap<u32, Alone>>,
}

impl Kind<'_> {
    fn ask(&self, accelerators: u32, copies: u32, batch: u32) -> Result<Alone, MixedError> {
        let request = Request {
            platform: self.part.platform.clone(),
            accelerators,
            rack: Some(self.part.rack.clone()),
            fidelity: self.fidelity,
            flits: if self.fidelity == Fidelity::L2 { self.step.flits } else { FlitOptions::default() },
            layout: GivenLayout { dp: Some(copies), batch: Some(batch), ..self.step.layout.clone() },
            ..self.step.clone()
        };
        let failed = |error| MixedError::Part { rack: self.part.rack.clone(), error: Box::new(error) };
        let answer = request.train_sharing(&self.followed).map_err(failed)?;
        match answer.fits {
            true => {
                let Answer { step, range_s, machine, .. } = answer;
                Ok(Alone { seconds: step.total_s, range_s, machine })
            }
            false => {
                let refusal = Refusal::Missing {
                    what: "this layout",
                    needs: "more memory than its accelerators have",
                    remedy: "give more --tp or --pp",
                };
                Err(failed(RequestError::refused(&self.part.rack, refusal)))
            }
        }
    }

    /// The step in which each copy has so many sequences.
    fn with(&self, sequences: u32) -> Result<Alone, MixedError> {
        if let Some(known) = self.known.borrow().get(&sequences) {
            return Ok(known.clone());
        }
        let too_many = || {
            let all = self.all;
            MixedError::Layout(format!(
                "--batch: {sequences} sequences for each of {all} copies are too many"
            ))
        };
        let batch = sequences.checked_mul(self.all).ok_or_else(too_many)?;
        let copy = self.part.accelerators / self.copies;
        let step = self.ask(copy * self.all, self.all, batch)?;
        self.known.borrow_mut().insert(sequences, step.clone());
        Ok(step)
    }

    fn seconds(&self, sequences: u32) -> Result<f64, MixedError> {
        Ok(self.with(sequences)?.seconds)
    }
}

impl MixedRequest {
    /// Divides the batch, and predicts the step.
    ///
    /// # Errors
    /// When a kind cannot run its part, or the batch cannot be divided.
    pub fn predict(&self) -> Result<MixedAnswer, MixedError> {
        let Request { layout, fidelity, flits, .. } = &self.step;
        let (Some(tp), Some(pp), Some(batch)) = (layout.tp, layout.pp, layout.batch) else {
            return Err(MixedError::Layout(
                "expected --tp, --pp and --batch: copies on both kinds have one layout".into(),
            ));
        };
        self.expect_joined()?;
        if self.parts[0].accelerators.checked_add(self.parts[1].accelerators).is_none() {
            return Err(MixedError::Layout("--gpus: expected fewer than 2^32 accelerators in all".into()));
        }
        let each = tp.saturating_mul(pp).saturating_mul(layout.cp.unwrap_or(1)).max(1);
        let copies = self.parts.each_ref().map(|part| part.accelerators / each);
        for (part, copies) in self.parts.iter().zip(copies) {
            if copies == 0 || copies * each != part.accelerators {
                return Err(MixedError::Layout(format!(
                    "{} accelerators in racks {}: expected a multiple of the {each} of a copy",
                    part.accelerators, part.rack
                )));
            }
        }
        let all = copies[0] + copies[1];
        let followed = FollowedFlits::default();
        let kinds = |fidelity: Fidelity| {
            [0, 1].map(|at| Kind {
                step: &self.step,
                fidelity,
                followed: followed.clone(),
                part: &self.parts[at],
                copies: copies[at],
                all,
                known: RefCell::default(),
            })
        };
        let unit = layout.micro_batch.unwrap_or(1).max(1);
        let divided = divisions(copies, batch, unit);
        if divided.is_empty() {
            return Err(MixedError::Layout(format!(
                "--batch: {batch} sequences cannot be divided over {} and {} copies by {unit}; give a multiple of {}",
                copies[0],
                copies[1],
                u64::from(all) * u64::from(unit)
            )));
        }
        flits.check(*fidelity)?;
        if *fidelity != Fidelity::L2 {
            let kinds = kinds(*fidelity);
            let at = fastest(&kinds, &divided)?;
            return self.answer(&kinds, &divided, at..=at);
        }
        let at = fastest(&kinds(Fidelity::L1), &divided)?;
        let near = at.saturating_sub(1)..=(at + 1).min(divided.len() - 1);
        self.answer(&kinds(Fidelity::L2), &divided, near.clone())?;
        followed.begin(flits.window_bytes)?;
        let answer = self.answer(&kinds(Fidelity::L2), &divided, near)?;
        Ok(MixedAnswer { flits: Some(followed.all(flits.window_bytes)), ..answer })
    }

    /// Whether these are two kinds, each with racks of its own, and one fabric joins them.
    fn expect_joined(&self) -> Result<(), MixedError> {
        let [one, other] = &self.parts;
        if let Some(part) = self.parts.iter().find(|it| it.rack.contains('+')) {
            return Err(MixedError::OneRack(part.rack.clone()));
        }
        if one.rack == other.rack {
            return Err(MixedError::Layout(format!("expected two kinds of rack, found {} twice", one.rack)));
        }
        let load = |part: &RackPart| {
            let failed = |error| MixedError::Part { rack: part.rack.clone(), error: Box::new(error) };
            Platform::load(&part.platform).map_err(|error| failed(RequestError::from(error)))
        };
        match load(one)?.between == load(other)?.between {
            true => Ok(()),
            false => Err(MixedError::Layout(format!(
                "--platform: {} and {} have different fabrics between racks; one has to join both kinds",
                one.platform, other.platform
            ))),
        }
    }

    /// The step by the fastest of some divisions and the even one.
    fn answer(
        &self,
        kinds: &[Kind<'_>; 2],
        divided: &[[u32; 2]],
        near: RangeInclusive<usize>,
    ) -> Result<MixedAnswer, MixedError> {
        let even = divided.iter().position(|[one, other]| one == other);
        let (mut fastest, mut total_s) = (*near.start(), f64::INFINITY);
        for at in near.chain(even) {
            let seconds = paced(kinds, divided[at])?;
            if seconds < total_s {
                (fastest, total_s) = (at, seconds);
            }
        }
        let even_s = even.map(|at| paced(kinds, divided[at])).transpose()?;
        let mut parts = vec![];
        for (kind, sequences) in kinds.iter().zip(divided[fastest]) {
            let batch = self.step.layout.batch.filter(|it| it.is_multiple_of(kind.copies));
            let alone = batch.and_then(|batch| kind.ask(kind.part.accelerators, kind.copies, batch).ok());
            let Alone { seconds, range_s, machine } = kind.with(sequences)?;
            parts.push(MixedPart {
                rack: kind.part.rack.clone(),
                machine,
                accelerators: kind.part.accelerators,
                copies: kind.copies,
                sequences,
                step_s: seconds,
                range_s,
                alone_s: alone.map(|it| it.seconds),
            });
        }
        // The slower kind sets the pace at either end.
        let end = |at: usize| parts.iter().map(|it| it.range_s[at]).fold(0.0, f64::max);
        let range_s = [end(0), end(1)];
        Ok(MixedAnswer { fidelity: self.step.fidelity, parts, total_s, range_s, even_s, flits: None })
    }
}

/// What the step takes with this division.
fn paced(kinds: &[Kind<'_>; 2], [one, other]: [u32; 2]) -> Result<f64, MixedError> {
    Ok(kinds[0].seconds(one)?.max(kinds[1].seconds(other)?))
}

/// Which division is the fastest: the more sequences the first kind has, the later it ends, and the sooner the second.
fn fastest(kinds: &[Kind<'_>; 2], divided: &[[u32; 2]]) -> Result<usize, MixedError> {
    let (mut low, mut high) = (0, divided.len() - 1);
    while low < high {
        let middle = low.midpoint(high);
        let [one, other] = divided[middle];
        match kinds[0].seconds(one)? < kinds[1].seconds(other)? {
            true => low = middle + 1,
            false => high = middle,
        }
    }
    let is_before = low > 0 && paced(kinds, divided[low - 1])? < paced(kinds, divided[low])?;
    Ok(if is_before { low - 1 } else { low })
}

/// Sequences of a copy of each kind that make the batch, each a multiple of `unit`, the fewest of the first kind first.
fn divisions([first, second]: [u32; 2], batch: u32, unit: u32) -> Vec<[u32; 2]> {
    let most = batch / first / unit;
    let of = |times: u32| {
        let one = times * unit;
        let rest = batch - first * one;
        let other = rest / second;
        (rest.is_multiple_of(second) && other.is_multiple_of(unit) && other > 0).then_some([one, other])
    };
    (1..=most).filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(batch: u32) -> MixedRequest {
        let part = |platform: &str, rack: &str| RackPart {
            platform: platform.into(),
            rack: rack.into(),
            accelerators: 144,
        };
        MixedRequest {
            parts: [part("nvl72-cxl", "nvl72"), part("mixed-nvlink-ualink-cxl", "ualink")],
            step: serde_json::from_value(serde_json::json!({
                "model": "llama3-70b", "platform": "", "accelerators": 0, "layout": {"tp": 8, "pp": 1, "batch": batch},
            }))
            .unwrap(),
        }
    }

    #[test]
    fn both_kinds_together_are_faster_than_either_alone() {
        let found = request(720).predict().unwrap();
        assert_eq!(found.parts.iter().map(|it| it.copies * it.sequences).sum::<u32>(), 720);
        for part in &found.parts {
            assert!(found.total_s < part.alone_s.unwrap(), "{found:?}");
            assert!(part.step_s <= found.total_s);
        }
        assert!(found.total_s <= found.even_s.unwrap());
    }

    /// Divisions of the batch have the same transfers of tensors and gradients, which are followed once.
    #[test]
    fn divisions_of_a_batch_share_their_flits_and_the_limit_counts_all() {
        let mut request = request(720);
        request.step.fidelity = Fidelity::L2;
        request.step.layout.micro_batch = Some(1);
        let followed = FollowedFlits::default();
        let [part, _] = &request.parts;
        let kind = Kind {
            step: &request.step,
            fidelity: Fidelity::L2,
            followed: followed.clone(),
            part,
            copies: 18,
            all: 36,
            known: RefCell::default(),
        };
        kind.with(20).unwrap();
        let first = followed.distinct_sets();
        kind.with(24).unwrap();
        assert!(first > 0 && followed.distinct_sets() == first, "{first} {}", followed.distinct_sets());
        let error = request.predict().unwrap_err();
        let MixedError::Transfers(TransferError::TooManyFlits { window: Some(kib), .. }) = error else {
            panic!("{error}");
        };
        assert!(followed.begin(Some(kib as f64 * 1024.0)).is_ok());
    }

    #[test]
    fn two_kinds_in_one_rack_are_refused_with_the_reason() {
        let mut one_rack = request(720);
        one_rack.parts[0].rack = "nvl72+ualink".into();
        let error = one_rack.predict().unwrap_err().to_string();
        assert!(error.contains("physical layers and flits differ"), "{error}");
        let error = request(719).predict().unwrap_err().to_string();
        assert!(error.contains("719 sequences cannot be divided over 18 and 18 copies"), "{error}");
    }

    #[test]
    fn racks_that_no_fabric_joins_are_refused() {
        let mut apart = request(720);
        apart.parts[0].platform = "nvl72-ndr".into();
        let error = apart.predict().unwrap_err().to_string();
        assert!(error.contains("nvl72-ndr and mixed-nvlink-ualink-cxl have different fabrics"), "{error}");
    }

    #[test]
    fn every_division_makes_the_batch() {
        let found = divisions([3, 5], 61, 1);
        assert_eq!(found, [[2, 11], [7, 8], [12, 5], [17, 2]]);
        assert!(divisions([2, 4], 7, 1).is_empty());
    }
}
