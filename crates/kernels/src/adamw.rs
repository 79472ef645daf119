//! One step of AdamW in one pass over memory: parameters, gradients and both moments are read once and written once.

use std::thread;

use crate::dtype::KernelError;
use crate::lane::{narrow_bfloat, widen_bfloat};
use crate::level::Level;

/// The settings of `torch.optim.AdamW`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the mean of gradients.
    pub beta1: f64,
    /// Decay of the mean of squared gradients.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

/// The coefficients of one step, in the precision in which elements are computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    decay: f32,
    mean: f32,
    is_small: bool,
    beta2: f32,
    square: f32,
    correction: f32,
    eps: f32,
    step: f32,
}

impl AdamW {
    /// The coefficients of step number `step`, which starts at 1. Computed in 64 bits and rounded once, as torch does.
    #[must_use]
    pub fn update(&self, step: f64) -> Update {
        let Self { lr, beta1, beta2, eps, weight_decay } = *self;
        let weight = (1.0 - beta1) as f32;
        let is_small = weight.abs() < 0.5;
        Update {
            decay: (1.0 - lr * weight_decay) as f32,
            mean: if is_small { weight } else { weight - 1.0 },
            is_small,
            beta2: beta2 as f32,
            square: (1.0 - beta2) as f32,
            correction: (1.0 - beta2.powf(step)).sqrt() as f32,
            eps: eps as f32,
            step: -(lr / (1.0 - beta1.powf(step))) as f32,
        }
    }
}

/// Gradients, in either precision. 16-bit ones are brain floats, as their bits.
#[derive(Clone, Copy, Debug)]
pub enum Gradients<'a> {
    /// 32 bits.
    F32(&'a [f32]),
    /// bf16.
    Bf16(&'a [u16]),
}

impl Gradients<'_> {
    const fn len(&self) -> usize {
        match self {
            Self::F32(all) => all.len(),
            Self::Bf16(all) => all.len(),
        }
    }

    fn split_at(&self, at: usize) -> (Self, Self) {
        match self {
            Self::F32(all) => {
                let (a, b) = all.split_at(at);
                (Self::F32(a), Self::F32(b))
            }
            Self::Bf16(all) => {
                let (a, b) = all.split_at(at);
                (Self::Bf16(a), Self::Bf16(b))
            }
        }
    }
}

/// The arrays of one parameter tensor, or of a piece of one.
#[derive(Debug)]
pub struct Piece<'a> {
    /// Parameters, updated in place.
    pub parameters: &'a mut [f32],
    /// Their gradients.
    pub gradients: Gradients<'a>,
    /// Mean of gradients, `exp_avg` in torch.
    pub mean: &'a mut [f32],
    /// Mean of squared gradients, `exp_avg_sq` in torch.
    pub square: &'a mut [f32],
    /// Where a bf16 copy of the new parameters goes.
    pub copy: Option<&'a mut [u16]>,
}

/// A tensor may be cut into pieces at multiples of so many elements: results are then the same bits as in one piece.
pub const PIECE: usize = 64;

/// Applies one step of AdamW on at most `threads` threads.
///
/// On a CPU with AVX2 the new parameters and moments have the bits that torch's fused AdamW gives at the same
/// instruction set. torch computes the elements after the last whole vector of a tensor with another rounding, and so
/// does this: cut a tensor at multiples of [`PIECE`] only. A NaN or an infinity among the inputs gives what IEEE 754
/// gives, as in torch.
///
/// # Errors
/// [`KernelError::Sizes`] when the arrays have different lengths; then nothing was written.
pub fn adamw(update: &Update, piece: Piece<'_>, threads: usize) -> Result<(), KernelError> {
    on_threads(piece, threads, |level, piece| level.adamw(update, piece))
}

fn on_threads(
    piece: Piece<'_>,
    threads: usize,
    pass: impl Fn(Level, Piece<'_>) + Copy + Send,
) -> Result<(), KernelError> {
    let elements = piece.parameters.len();
    let copy = piece.copy.as_ref().map_or(elements, |copy| copy.len());
    let others = [piece.gradients.len(), piece.mean.len(), piece.square.len(), copy];
    if let Some(other) = others.into_iter().find(|&other| other != elements) {
        return Err(KernelError::Sizes { first: 4 * elements, other: 4 * other });
    }
    // A thread costs some 10 us, as many elements as this.
    let threads = threads.clamp(1, elements / (16 << 10) + 1);
    let each = elements.div_ceil(threads).next_multiple_of(PIECE);
    let level = Level::best();
    thread::scope(|scope| {
        let mut rest = piece;
        while rest.parameters.len() > each {
            let (first, after) = rest.split_at(each);
            scope.spawn(move || pass(level, first));
            rest = after;
        }
        pass(level, rest);
    });
    Ok(())
}

/// The memory traffic of [`adamw`] on 32-bit gradients with next to no arithmetic: the floor that its time is set beside.
///
/// # Errors
/// As [`adamw`].
pub fn adamw_traffic(piece: Piece<'_>, threads: usize) -> Result<(), KernelError> {
    on_threads(piece, threads, |level, piece| level.traffic(piece))
}

impl<'a> Piece<'a> {
    fn split_at(self, at: usize) -> (Self, Self) {
        let (parameters, more_parameters) = self.parameters.split_at_mut(at);
        let (gradients, more_gradients) = self.gradients.split_at(at);
        let (mean, more_mean) = self.mean.split_at_mut(at);
        let (square, more_square) = self.square.split_at_mut(at);
        let (copy, more_copy) = self.copy.map(|copy| copy.split_at_mut(at)).unzip();
        (
            Self { parameters, gradients, mean, square, copy },
            Self {
                parameters: more_parameters,
                gradients: more_gradients,
                mean: more_mean,
                square: more_square,
                copy: more_copy,
            },
        )
    }
}

/// The loop for these arrays.
#[inline(always)]
pub(crate) fn pass(update: &Update, piece: Piece<'_>) {
    let Piece { parameters, gradients, mean, square, copy } = piece;
    match (gradients, copy) {
        (Gradients::F32(all), None) => elements(update, parameters, all, mean, square, &mut []),
        (Gradients::F32(all), Some(copy)) => elements(update, parameters, all, mean, square, copy),
        (Gradients::Bf16(all), None) => elements(update, parameters, all, mean, square, &mut []),
        (Gradients::Bf16(all), Some(copy)) => elements(update, parameters, all, mean, square, copy),
    }
}

/// The loop of [`adamw_traffic`].
#[inline(always)]
pub(crate) fn traffic(piece: Piece<'_>) {
    let Piece { parameters, gradients: Gradients::F32(gradients), mean, square, .. } = piece else { return };
    let blocks = parameters.as_chunks_mut::<BLOCK>().0.iter_mut().zip(gradients.as_chunks::<BLOCK>().0);
    let moments = mean.as_chunks_mut::<BLOCK>().0.iter_mut().zip(square.as_chunks_mut::<BLOCK>().0);
    for ((p, g), (m, v)) in blocks.zip(moments) {
        prefetch(p);
        prefetch(g);
        prefetch(m);
        prefetch(v);
        moved(p, g, m, v);
    }
}

#[inline(always)]
fn moved(p: &mut [f32; BLOCK], g: &[f32; BLOCK], m: &mut [f32; BLOCK], v: &mut [f32; BLOCK]) {
    for index in 0..BLOCK {
        p[index] += g[index];
        m[index] = -m[index];
        v[index] = -v[index];
    }
}

/// A gradient as it is stored.
trait Gradient: Copy {
    fn widened(self) -> f32;
}

impl Gradient for f32 {
    #[inline(always)]
    fn widened(self) -> f32 {
        self
    }
}

impl Gradient for u16 {
    #[inline(always)]
    fn widened(self) -> f32 {
        widen_bfloat(self)
    }
}

/// Elements after the last whole vector of so many are rounded in another way by torch, with AVX2 and with AVX-512.
const VECTOR: usize = 8;

/// Elements that are computed between two prefetches: whole lines of every array.
const BLOCK: usize = 64;

#[inline(always)]
fn elements<G: Gradient>(
    update: &Update,
    parameters: &mut [f32],
    gradients: &[G],
    mean: &mut [f32],
    square: &mut [f32],
    copy: &mut [u16],
) {
    let (blocks, rest) = parameters.as_chunks_mut::<BLOCK>();
    let (gradient_blocks, gradient_rest) = gradients.as_chunks::<BLOCK>();
    let (mean_blocks, mean_rest) = mean.as_chunks_mut::<BLOCK>();
    let (square_blocks, square_rest) = square.as_chunks_mut::<BLOCK>();
    let (copy_blocks, copy_rest) = copy.as_chunks_mut::<BLOCK>();
    let mut copies = copy_blocks.iter_mut();
    for (((p, g), m), v) in blocks.iter_mut().zip(gradient_blocks).zip(mean_blocks).zip(square_blocks) {
        prefetch(p);
        prefetch(g);
        prefetch(m);
        prefetch(v);
        block(update, p, g, m, v);
        if let Some(copy) = copies.next() {
            narrowed(copy, p);
        }
    }
    let vectors = rest.len() / VECTOR * VECTOR;
    let others = mean_rest.iter_mut().zip(square_rest);
    for (index, ((p, g), (m, v))) in rest.iter_mut().zip(gradient_rest).zip(others).enumerate() {
        element(update, index >= vectors, p, g.widened(), m, v);
    }
    for (copy, p) in copy_rest.iter_mut().zip(rest) {
        *copy = narrow_bfloat(*p);
    }
}

// Arrays as arguments of a function do not overlap, which is what lets the compiler make vectors of the loop.
#[inline(always)]
fn block<G: Gradient>(
    update: &Update,
    parameters: &mut [f32; BLOCK],
    gradients: &[G; BLOCK],
    mean: &mut [f32; BLOCK],
    square: &mut [f32; BLOCK],
) {
    for index in 0..BLOCK {
        let gradient = gradients[index].widened();
        element(update, false, &mut parameters[index], gradient, &mut mean[index], &mut square[index]);
    }
}

#[inline(always)]
fn narrowed(copy: &mut [u16; BLOCK], parameters: &[f32; BLOCK]) {
    for (copy, parameter) in copy.iter_mut().zip(parameters) {
        *copy = narrow_bfloat(*parameter);
    }
}

/// The formula of torch's `FusedAdamKernel.cpp`, operation by operation, with the fused multiply-adds that its release
/// builds have: found by comparing every candidate with torch 2.12.1, and held by `python/tests/test_offload.py`.
#[inline(always)]
fn element(update: &Update, is_tail: bool, p: &mut f32, g: f32, m: &mut f32, v: &mut f32) {
    let decayed = *p * update.decay;
    *m = update.mean.mul_add(g - *m, if update.is_small { *m } else { g });
    *v = match is_tail {
        false => (update.square * g).mul_add(g, *v * update.beta2),
        true => v.mul_add(update.beta2, update.square * g * g),
    };
    let denominator = v.sqrt() / update.correction + update.eps;
    *p = decayed + update.step * *m / denominator;
}

/// Bytes ahead of the loop.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const AHEAD: usize = 4096;

/// Asks for the lines that the loop will come to.
#[inline(always)]
fn prefetch<T>(block: &[T; BLOCK]) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    for line in (0..size_of_val(block)).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let ahead = block.as_ptr().cast::<i8>().wrapping_add(AHEAD + line);
        // SAFETY: a prefetch accesses nothing as far as the program can tell, whatever its address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = block;
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SETTINGS: AdamW = AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };

    /// Parameters, gradients and moments from a seed.
    fn arrays(elements: usize, seed: u32) -> [Vec<f32>; 4] {
        let mut state = seed | 1;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        let mut some = |scale: f32| (0..elements).map(|_| next() * scale).collect::<Vec<f32>>();
        let square = some(1e-4).into_iter().map(f32::abs).collect();
        [some(1.0), some(1e-2), some(1e-2), square]
    }

    fn bits(all: &[f32]) -> Vec<u32> {
        all.iter().map(|it| it.to_bits()).collect()
    }

    /// The formula in 64 bits.
    fn reference(settings: &AdamW, step: f64, p: f32, g: f32, m: f32, v: f32) -> [f64; 3] {
        let AdamW { lr, beta1, beta2, eps, weight_decay } = *settings;
        let [p, g, m, v] = [p, g, m, v].map(f64::from);
        let m = beta1 * m + (1.0 - beta1) * g;
        let v = beta2 * v + (1.0 - beta2) * g * g;
        let denominator = (v / (1.0 - beta2.powf(step))).sqrt() + eps;
        [p * (1.0 - lr * weight_decay) - lr / (1.0 - beta1.powf(step)) * m / denominator, m, v]
    }

    #[test]
    fn a_step_is_the_formula_to_within_rounding() {
        for (beta1, elements) in [(0.9, 1000), (0.3, 333), (0.0, 77)] {
            let settings = AdamW { beta1, ..SETTINGS };
            let [mut p, g, mut m, mut v] = arrays(elements, 7);
            let before = [p.clone(), m.clone(), v.clone()];
            let piece = Piece {
                parameters: &mut p,
                gradients: Gradients::F32(&g),
                mean: &mut m,
                square: &mut v,
                copy: None,
            };
            adamw(&settings.update(3.0), piece, 1).unwrap();
            for index in 0..elements {
                let [was_p, was_m, was_v] = [0, 1, 2].map(|it| before[it][index]);
                let [in_p, in_m, in_v] = reference(&settings, 3.0, was_p, g[index], was_m, was_v);
                assert!((f64::from(p[index]) - in_p).abs() < 1e-7, "{index}: {} {in_p}", p[index]);
                assert!((f64::from(m[index]) - in_m).abs() < 1e-8);
                assert!((f64::from(v[index]) - in_v).abs() < 1e-10);
            }
        }
    }

    #[test]
    fn every_level_gives_the_same_bits_for_whole_vectors() {
        let update = SETTINGS.update(5.0);
        let results: Vec<_> = Level::available()
            .map(|level| {
                let [mut p, mut g, mut m, mut v] = arrays(640 + 32, 3);
                (g[3], g[650], m[70]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
                let mut copy = vec![0; p.len()];
                let piece = Piece {
                    parameters: &mut p,
                    gradients: Gradients::F32(&g),
                    mean: &mut m,
                    square: &mut v,
                    copy: Some(&mut copy),
                };
                level.adamw(&update, piece);
                assert!(p[3].is_nan() && m[3].is_nan() && v[3].is_nan());
                assert!(p[650].is_nan() && m[650] == f32::INFINITY && v[650] == f32::INFINITY);
                assert!(m[70].is_nan() && p[70].is_nan() && v[70].is_finite());
                for index in [3, 70, 650] {
                    (p[index], m[index], v[index]) = (0.0, 0.0, 0.0);
                }
                (bits(&p), bits(&m), bits(&v), copy[71..650].to_vec())
            })
            .collect();
        for result in &results {
            assert!(*result == results[0]);
        }
    }

    proptest! {
        #[test]
        fn pieces_and_threads_change_no_bit(elements in 1_usize..70_000, cut in 0_usize..1000, threads in 1_usize..5, seed: u32) {
            let update = SETTINGS.update(2.0);
            let step = |cut: usize, threads: usize| {
                let [mut p, g, mut m, mut v] = arrays(elements, seed);
                let piece = Piece { parameters: &mut p, gradients: Gradients::F32(&g), mean: &mut m, square: &mut v, copy: None };
                let (first, second) = piece.split_at(cut);
                adamw(&update, first, threads).unwrap();
                adamw(&update, second, threads).unwrap();
                [bits(&p), bits(&m), bits(&v)]
            };
            prop_assert_eq!(step(0, 1), step((cut * PIECE).min(elements / PIECE * PIECE), threads));
        }

        #[test]
        fn brain_floats_are_widened_before_and_rounded_after(elements in 1_usize..300, seed: u32) {
            let update = SETTINGS.update(1.0);
            let [p, g, m, v] = arrays(elements, seed);
            let narrow: Vec<u16> = g.iter().map(|it| half::bf16::from_f32(*it).to_bits()).collect();
            let wide: Vec<f32> = narrow.iter().map(|it| half::bf16::from_bits(*it).to_f32()).collect();
            let step = |gradients: Gradients<'_>, copy: Option<&mut [u16]>| {
                let [mut p, mut m, mut v] = [p.clone(), m.clone(), v.clone()];
                let piece = Piece { parameters: &mut p, gradients, mean: &mut m, square: &mut v, copy };
                adamw(&update, piece, 1).unwrap();
                [p, m, v]
            };
            let mut copy = vec![0; elements];
            let [p16, m16, v16] = step(Gradients::Bf16(&narrow), Some(&mut copy));
            let [p32, m32, v32] = step(Gradients::F32(&wide), None);
            prop_assert_eq!([bits(&p16), bits(&m16), bits(&v16)], [bits(&p32), bits(&m32), bits(&v32)]);
            let rounded: Vec<u16> = p32.iter().map(|it| half::bf16::from_f32(*it).to_bits()).collect();
            prop_assert_eq!(copy, rounded);
        }
    }

    #[test]
    fn arrays_of_different_lengths_are_refused_and_left_alone() {
        let [mut p, g, mut m, mut v] = arrays(10, 1);
        let before = p.clone();
        let piece = Piece {
            parameters: &mut p,
            gradients: Gradients::F32(&g[..9]),
            mean: &mut m,
            square: &mut v,
            copy: None,
        };
        let said = adamw(&SETTINGS.update(1.0), piece, 1).unwrap_err().to_string();
        assert_eq!(said, "arrays of 40 and 36 bytes cannot be combined; pass arrays of one size");
        assert_eq!(p, before);
    }
}
