//! Layouts and steps as rows of numbers, for tables of many.

use crate::json;
use crate::layout::{FarTier, Layout, Offload, Overlap, Precision, Recompute, Zero};
use crate::model::Model;
use crate::order::Order;
use crate::request::RequestError;
use crate::step::Step;
use crate::train::Job;

/// The numbers of a layout, in the order of [`NUMBERS`].
#[must_use]
pub fn numbers(layout: &Layout) -> [u32; NUMBERS.len()] {
    let Overlap { tensor, pipeline, data, offload } = layout.overlap;
    let Offload { tier, weights, optimizer, activations } = layout.offload;
    [
        layout.tp,
        layout.cp,
        layout.ep,
        layout.dp,
        layout.pp,
        layout.interleave,
        layout.batch,
        layout.micro_batch,
        layout.sequence_parallel.into(),
        layout.gather_again.into(),
        layout.recompute as u32,
        layout.flash.into(),
        layout.zero as u32,
        layout.precision as u32,
        layout.wide_gradients.into(),
        tensor.into(),
        pipeline.into(),
        data.into(),
        offload.into(),
        tier as u32,
        weights.into(),
        optimizer.into(),
        activations.into(),
    ]
}

/// The numbers that name a layout in a table of many; what is a choice is counted from 0 in the order of its type.
pub const NUMBERS: [&str; 23] = [
    "tp",
    "cp",
    "ep",
    "dp",
    "pp",
    "interleave",
    "batch",
    "micro_batch",
    "sequence_parallel",
    "gather_again",
    "recompute",
    "flash",
    "zero",
    "precision",
    "wide_gradients",
    "overlap_tensor",
    "overlap_pipeline",
    "overlap_data",
    "overlap_offload",
    "offload_tier",
    "offload_weights",
    "offload_optimizer",
    "offload_activations",
];

fn layout(numbers: &[u32]) -> Option<Layout> {
    let &[tp, cp, ep, dp, pp, interleave, batch, micro_batch, ref choices @ ..] = numbers else {
        return None;
    };
    let &[sequence_parallel, gather_again, recompute, flash, zero, precision, wide_gradients, ref rest @ ..] =
        choices
    else {
        return None;
    };
    let &[tensor, pipeline, data, offload, tier, weights, optimizer, activations] = rest else { return None };
    Some(Layout {
        tp,
        cp,
        ep,
        dp,
        pp,
        interleave,
        batch,
        micro_batch,
        sequence_parallel: sequence_parallel != 0,
        gather_again: gather_again != 0,
        recompute: *[Recompute::None, Recompute::Selective, Recompute::Full].get(recompute as usize)?,
        flash: flash != 0,
        zero: *[Zero::None, Zero::Optimizer, Zero::Gradients, Zero::Weights].get(zero as usize)?,
        precision: *Precision::ALL.get(precision as usize)?,
        wide_gradients: wide_gradients != 0,
        overlap: Overlap {
            tensor: tensor != 0,
            pipeline: pipeline != 0,
            data: data != 0,
            offload: offload != 0,
        },
        offload: Offload {
            tier: *[FarTier::Host, FarTier::Pool].get(tier as usize)?,
            weights: weights != 0,
            optimizer: optimizer != 0,
            activations: activations != 0,
        },
    })
}

/// Predicts many layouts, each given by the [`NUMBERS`] of a row; a row of [`Step::COLUMNS`] for each, all NaN where the layout
/// cannot run.
///
/// # Errors
/// When a file is damaged or missing, or the platform has no such rack.
pub fn points(
    model: &str,
    platform: &str,
    rack: Option<&str>,
    fill: Option<u32>,
    order: Option<Order>,
    numbers: &[u32],
) -> Result<Vec<f64>, RequestError> {
    let refused = |refusal| RequestError::Refused { name: platform.into(), refusal };
    let loaded = json::platform(platform)?;
    let model = Model::load(model)?;
    let job = Job::chosen(&loaded, rack, fill, order).map_err(refused)?;
    let rows = numbers.chunks_exact(NUMBERS.len()).map(|row| {
        let plan = layout(row).and_then(|layout| job.predict(&model, &layout).ok());
        plan.map_or([f64::NAN; Step::COLUMNS.len()], |plan| plan.step.columns())
    });
    Ok(rows.flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_is_the_one_that_its_numbers_name() {
        let row: Vec<_> =
            (0..8).map(|it| it + 1).chain([1, 0, 2, 0, 3, 1, 1, 0, 1, 0, 1, 1, 0, 1, 0]).collect();
        assert_eq!(numbers(&layout(&row).unwrap()).to_vec(), row);
        assert_eq!(layout(&[0; 23][..22]), None);
        let mut wrong = row;
        wrong[10] = 3;
        assert_eq!(layout(&wrong), None, "there are three kinds of recomputation");
    }
}
