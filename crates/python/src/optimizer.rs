//! Steps of optimizers over arrays at addresses, which `polder.offload`'s optimizers take from torch's tensors.

use polder_kernels::{Adam, Factor, Gradients, Lion, Piece, Update, Work, clip, squares, step};
use polder_offload::expect_apart;
use pyo3::prelude::*;

use crate::errors::argument;
use crate::range::of_step;

/// A rule by its name, its learning rate, both betas, epsilon and the weight decay.
pub(crate) type Settings = (String, f64, f64, f64, f64, f64);

/// The coefficients of a step.
pub(crate) fn update_of(settings: &Settings, number: f64) -> PyResult<Update> {
    let (rule, lr, beta1, beta2, eps, weight_decay) = settings;
    let (lr, beta1, beta2, eps, weight_decay) = (*lr, *beta1, *beta2, *eps, *weight_decay);
    match rule.as_str() {
        "adam" | "adamw" => {
            let is_decoupled = rule == "adamw";
            Ok(Adam { lr, beta1, beta2, eps, weight_decay, is_decoupled }.update(number))
        }
        "lion" => Ok(Lion { lr, beta1, beta2, weight_decay }.update()),
        "traffic" => Ok(Update::traffic()),
        _ => Err(argument(format!("{rule:?} is no rule; there are adam, adamw, lion and traffic"))),
    }
}

/// Elements at an address.
///
/// # Safety
/// As many are allocated there, any bits are a `T`, and nobody else reaches them until the slice is dropped.
pub(crate) unsafe fn slice<'a, T>(at: usize, elements: usize) -> PyResult<&'a mut [T]> {
    match (elements, at) {
        (0, _) => Ok(&mut []),
        (_, at) if at != 0 && at.is_multiple_of(align_of::<T>()) && elements <= isize::MAX as usize / 4 => {
            // SAFETY: aligned and not null, and the rest is this function's contract.
            Ok(unsafe { std::slice::from_raw_parts_mut(at as *mut T, elements) })
        }
        _ => Err(argument(format!(
            "{elements} elements of {} bits at address {at:#x} are no array",
            8 * size_of::<T>()
        ))),
    }
}

/// Gradients at an address, in 16 bits (brain floats) or 32.
///
/// # Safety
/// As for [`slice`].
unsafe fn gradients<'a>(at: usize, elements: usize, is_half: bool) -> PyResult<Gradients<'a>> {
    // SAFETY: this function's contract.
    unsafe {
        Ok(match is_half {
            true => Gradients::Bf16(slice(at, elements)?),
            false => Gradients::F32(slice(at, elements)?),
        })
    }
}

/// What the arrays of a tensor are, as errors name them.
pub(crate) const ARRAYS: [&str; 5] =
    ["the parameter", "the gradient", "exp_avg", "exp_avg_sq", "the parameter"];

/// A tensor: settings, number of the step, addresses of parameters, gradients, both moments and the bf16 copy (0 for
/// none), elements, and whether gradients are brain floats.
type Tensor = (Settings, f64, (usize, usize, usize, usize, usize), usize, bool);

/// One step of an optimizer over arrays at addresses. Gradients are divided by `scale` and multiplied by `factor`.
#[pyfunction]
pub(crate) fn offload_step(
    py: Python<'_>,
    tensors: Vec<Tensor>,
    scale: f32,
    factor: f32,
    threads: usize,
) -> PyResult<()> {
    expect_apart(tensors.iter().enumerate().flat_map(
        |(tensor, (_, _, (p, g, m, v, copy), elements, is_half))| {
            let widths = [4, if *is_half { 2 } else { 4 }, 4, 4, 2];
            let at = [*p, *g, *m, *v, *copy];
            (0..ARRAYS.len())
                .map(move |index| (at[index], elements * widths[index], index != 1, tensor, ARRAYS[index]))
        },
    ))
    .map_err(of_step)?;
    let mut work = Vec::with_capacity(tensors.len());
    for (settings, number, (p, g, m, v, copy), elements, is_half) in tensors {
        let moments = if settings.0 == "lion" { 0 } else { elements };
        // SAFETY: the front passes contiguous tensors of one length, which it holds for the length of the call.
        let piece = unsafe {
            Piece {
                parameters: slice(p, elements)?,
                gradients: gradients(g, elements, is_half)?,
                mean: slice(m, elements)?,
                square: slice(v, moments)?,
                copy: if copy == 0 { None } else { Some(slice(copy, elements)?) },
            }
        };
        work.push(Work { update: update_of(&settings, number)?, piece, stripe: 0 });
    }
    let factor = Factor { scale, clip: factor };
    py.detach(|| step(work, factor, threads)).map_err(|error| argument(error.to_string()))
}

/// Of each array of gradients the sum of squares; it is finite if and only if all gradients are. An array is its
/// address, its elements, and whether they are brain floats.
#[pyfunction]
pub(crate) fn offload_squares(
    py: Python<'_>,
    arrays: Vec<(usize, usize, bool)>,
    threads: usize,
) -> PyResult<Vec<f64>> {
    let arrays = arrays
        .into_iter()
        // SAFETY: as in `offload_step`.
        .map(|(at, elements, is_half)| unsafe { gradients(at, elements, is_half) })
        .collect::<PyResult<Vec<_>>>()?;
    Ok(py.detach(|| squares(&arrays, threads)))
}

/// The factor that clips gradients of this norm, as `torch.nn.utils.clip_grad_norm_` computes it.
#[pyfunction]
pub(crate) fn offload_clip(norm: f64, max_norm: f64) -> f32 {
    clip(norm, max_norm)
}
