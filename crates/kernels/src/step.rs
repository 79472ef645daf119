//! One step of an optimizer in one pass over memory: parameters, gradients and moments are read once and written once.

use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::dtype::KernelError;
use crate::lane::{narrow_bfloat, widen_bfloat};
use crate::level::Level;
use crate::optimizer::{Factor, Formula, Formulas, Update};

/// Gradients, in either precision. 16-bit ones are brain floats, as their bits.
#[derive(Clone, Copy, Debug)]
pub enum Gradients<'a> {
    /// 32 bits.
    F32(&'a [f32]),
    /// bf16.
    Bf16(&'a [u16]),
}

impl Gradients<'_> {
    pub(crate) const fn len(&self) -> usize {
        match self {
            Self::F32(all) => all.len(),
            Self::Bf16(all) => all.len(),
        }
    }

    pub(crate) fn split_at(&self, at: usize) -> (Self, Self) {
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
    /// Mean of gradients, `exp_avg` in torch; the moment of SGD, `momentum_buffer` there.
    pub mean: &'a mut [f32],
    /// Mean of squared gradients, `exp_avg_sq` in torch; empty for Lion and SGD.
    pub square: &'a mut [f32],
    /// Where a bf16 copy of the new parameters goes.
    pub copy: Option<&'a mut [u16]>,
}

/// A piece, what happens to it, and the link that its bytes come over.
#[derive(Debug)]
pub struct Work<'a> {
    /// The coefficients.
    pub update: Update,
    /// The arrays.
    pub piece: Piece<'a>,
    /// The memory tier of the arrays. Pieces of different stripes are worked on at the same time, each in proportion to
    /// its size, so that all links are busy until the end.
    pub stripe: usize,
}

/// A tensor may be cut into pieces at multiples of so many elements: results are then the same bits as in one piece.
pub const PIECE: usize = 64;

/// Elements that a thread takes at a time.
const CHUNK: usize = 128 << 10;

/// From so many elements on, a bf16 copy bypasses the caches: it would not be in them when it is read.
const STREAMED: usize = 4 << 20;

/// Applies one step of an optimizer on at most `threads` threads.
///
/// On a CPU with AVX2 the new parameters and moments of Adam and AdamW have the bits that torch's fused ones have at the
/// same instruction set, also with `factor.scale` as its `grad_scale`. torch computes the elements after the last whole
/// vector of a tensor with another rounding, and so does this: cut a tensor at multiples of [`PIECE`] only. A NaN or an
/// infinity among the inputs gives what IEEE 754 gives, as in torch. Gradients are left as they are.
///
/// # Errors
/// [`KernelError::Sizes`] when the arrays of a piece have different lengths; then nothing was written.
pub fn step(work: Vec<Work<'_>>, factor: Factor, threads: usize) -> Result<(), KernelError> {
    step_at(Level::best(), work, factor, threads)
}

pub(crate) fn step_at(
    level: Level,
    work: Vec<Work<'_>>,
    factor: Factor,
    threads: usize,
) -> Result<(), KernelError> {
    work.iter().try_for_each(|it| it.piece.check(it.update.has_square()))?;
    let elements: usize = work.iter().map(|it| it.piece.parameters.len()).sum();
    let chunks = striped(work);
    // A thread costs some 10 us, as many elements as this.
    let threads = threads.clamp(1, elements / (16 << 10) + 1).min(chunks.len());
    let left = Mutex::new(chunks.into_iter());
    let rest = || {
        let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
        while let Some(Work { update, piece, .. }) = next() {
            level.step(&update, factor, piece, elements >= STREAMED);
        }
    };
    thread::scope(|scope| {
        (1..threads).for_each(|_| drop(scope.spawn(rest)));
        rest();
    });
    Ok(())
}

/// Cuts work into chunks in the order in which threads take them: at any time about the same part of each stripe is done.
fn striped(work: Vec<Work<'_>>) -> Vec<Work<'_>> {
    let mut stripes = std::collections::BTreeMap::<usize, Vec<Work<'_>>>::new();
    for Work { update, mut piece, stripe } in work {
        let chunks = stripes.entry(stripe).or_default();
        while piece.parameters.len() > CHUNK {
            let (first, rest) = piece.split_at(CHUNK);
            chunks.push(Work { update, piece: first, stripe });
            piece = rest;
        }
        chunks.push(Work { update, piece, stripe });
    }
    let mut ordered: Vec<(f64, Work<'_>)> = vec![];
    for chunks in stripes.into_values() {
        let count = chunks.len() as f64;
        ordered.extend(
            chunks.into_iter().zip(0_u32..).map(|(it, index)| ((f64::from(index) + 0.5) / count, it)),
        );
    }
    // Stable: with one stripe the order is that of addresses.
    ordered.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    ordered.into_iter().map(|(_, work)| work).collect()
}

impl Level {
    /// Applies one step of an optimizer. The level must be one of [`Level::available`].
    pub(crate) fn step(self, update: &Update, factor: Factor, piece: Piece<'_>, is_streamed: bool) {
        match self {
            Self::Portable => pass(update, factor, piece, is_streamed),
            // SAFETY: `available` has found these features in this CPU.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { x86::step_avx2(update, factor, piece, is_streamed) },
            // SAFETY: `available` has found these features in this CPU.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { x86::step_avx512(update, factor, piece, is_streamed) },
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Factor, Piece, Update, pass};

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn step_avx2(update: &Update, factor: Factor, piece: Piece<'_>, is_streamed: bool) {
        pass(update, factor, piece, is_streamed);
    }

    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) fn step_avx512(update: &Update, factor: Factor, piece: Piece<'_>, is_streamed: bool) {
        pass(update, factor, piece, is_streamed);
    }
}

impl Piece<'_> {
    fn check(&self, has_square: bool) -> Result<(), KernelError> {
        let elements = self.parameters.len();
        let square = if has_square { self.square.len() } else { elements + self.square.len() };
        let copy = self.copy.as_ref().map_or(elements, |copy| copy.len());
        let others = [self.gradients.len(), self.mean.len(), square, copy];
        match others.into_iter().find(|&other| other != elements) {
            Some(other) => Err(KernelError::Sizes { first: 4 * elements, other: 4 * other }),
            None => Ok(()),
        }
    }

    pub(crate) fn split_at(self, at: usize) -> (Self, Self) {
        let (parameters, more_parameters) = self.parameters.split_at_mut(at);
        let (gradients, more_gradients) = self.gradients.split_at(at);
        let (mean, more_mean) = self.mean.split_at_mut(at);
        let (square, more_square) = self.square.split_at_mut(at.min(self.square.len()));
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
fn pass(update: &Update, factor: Factor, piece: Piece<'_>, is_streamed: bool) {
    match update.0 {
        Formulas::Adam(formula) => with_gradients(formula, factor, piece, is_streamed),
        Formulas::Coupled(formula) => with_gradients(formula, factor, piece, is_streamed),
        Formulas::Lion(formula) => with_gradients(formula, factor, piece, is_streamed),
        Formulas::Sgd(formula) => with_gradients(formula, factor, piece, is_streamed),
        Formulas::Traffic(formula) => with_gradients(formula, factor, piece, is_streamed),
    }
}

#[inline(always)]
fn with_gradients(formula: impl Formula, factor: Factor, piece: Piece<'_>, is_streamed: bool) {
    let Piece { parameters, gradients, mean, square, copy } = piece;
    match gradients {
        Gradients::F32(all) => {
            with_factor(formula, factor, (parameters, all, mean, square, copy), is_streamed)
        }
        Gradients::Bf16(all) => {
            with_factor(formula, factor, (parameters, all, mean, square, copy), is_streamed)
        }
    }
}

type Arrays<'a, G> = (&'a mut [f32], &'a [G], &'a mut [f32], &'a mut [f32], Option<&'a mut [u16]>);

#[inline(always)]
fn with_factor<G: Gradient>(formula: impl Formula, factor: Factor, arrays: Arrays<'_, G>, is_streamed: bool) {
    let Factor { scale, clip } = factor;
    // A product with the inverse of a power of two has the bits of the quotient, in a fraction of the time.
    let is_power = scale.is_normal() && scale.to_bits() & 0x007f_ffff == 0;
    match (scale == 1.0 && clip == 1.0, is_power) {
        (true, _) => elements(formula, |g| g, arrays, is_streamed),
        (false, true) => {
            let inverse = 1.0 / scale;
            elements(formula, move |g| g * inverse * clip, arrays, is_streamed);
        }
        (false, false) => elements(formula, move |g| g / scale * clip, arrays, is_streamed),
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
fn elements<G: Gradient, F: Formula>(
    formula: F,
    factor: impl Fn(f32) -> f32 + Copy,
    (parameters, gradients, mean, square, copy): Arrays<'_, G>,
    is_streamed: bool,
) {
    let (blocks, rest) = parameters.as_chunks_mut::<BLOCK>();
    let (gradient_blocks, gradient_rest) = gradients.as_chunks::<BLOCK>();
    let (mean_blocks, mean_rest) = mean.as_chunks_mut::<BLOCK>();
    let (square_blocks, square_rest) = square.as_chunks_mut::<BLOCK>();
    let (copy_blocks, copy_rest) = copy.unwrap_or_default().as_chunks_mut::<BLOCK>();
    let is_streamed = is_streamed && copy_blocks.as_ptr().addr().is_multiple_of(LINE);
    let (mut copies, mut squares) = (copy_blocks.iter_mut(), square_blocks.iter_mut());
    for ((p, g), m) in blocks.iter_mut().zip(gradient_blocks).zip(mean_blocks) {
        prefetch(p);
        prefetch(g);
        prefetch(m);
        match squares.next() {
            Some(v) if F::HAS_SQUARE => {
                prefetch(v);
                block(formula, factor, p, g, m, v);
            }
            _ => block(formula, factor, p, g, m, &mut [0.0; BLOCK]),
        }
        match copies.next() {
            Some(copy) if is_streamed => stream(copy, &narrowed(p)),
            Some(copy) => *copy = narrowed(p),
            None => {}
        }
    }
    if is_streamed {
        // SYNC: the end of this thread's work publishes the copy, and streamed stores only obey fences.
        fence();
    }
    let vectors = rest.len() / VECTOR * VECTOR;
    let (mut none, mut squares) = (0.0, square_rest.iter_mut());
    for (index, ((p, g), m)) in rest.iter_mut().zip(gradient_rest).zip(mean_rest).enumerate() {
        let v = squares.next().unwrap_or(&mut none);
        formula.element(index >= vectors, p, factor(g.widened()), m, v);
    }
    for (copy, p) in copy_rest.iter_mut().zip(rest) {
        *copy = narrow_bfloat(*p);
    }
}

// Arrays as arguments of a function do not overlap, which is what lets the compiler make vectors of the loop.
#[inline(always)]
fn block<G: Gradient>(
    formula: impl Formula,
    factor: impl Fn(f32) -> f32,
    parameters: &mut [f32; BLOCK],
    gradients: &[G; BLOCK],
    mean: &mut [f32; BLOCK],
    square: &mut [f32; BLOCK],
) {
    for index in 0..BLOCK {
        let gradient = factor(gradients[index].widened());
        formula.element(false, &mut parameters[index], gradient, &mut mean[index], &mut square[index]);
    }
}

#[inline(always)]
fn narrowed(parameters: &[f32; BLOCK]) -> [u16; BLOCK] {
    parameters.map(narrow_bfloat)
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Stores whole lines past the caches, so that they are not read first. The copy is aligned to lines.
#[inline(always)]
fn stream(copy: &mut [u16; BLOCK], values: &[u16; BLOCK]) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    for (to, from) in copy.as_chunks_mut::<8>().0.iter_mut().zip(values.as_chunks::<8>().0) {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
        // SAFETY: 16 bytes of either array, the first of which is aligned to lines.
        unsafe { _mm_stream_si128(to.as_mut_ptr().cast::<__m128i>(), _mm_loadu_si128(from.as_ptr().cast())) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    {
        *copy = *values;
    }
}

#[inline(always)]
fn fence() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: every CPU of this target has SSE.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Bytes ahead of the loop.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const AHEAD: usize = 1024;

/// Asks for the lines that the loop will come to, into the second cache. Arrays begin at the same place of a page, so all of them
/// compete for the same sets of a first cache of 32 KiB and 8 ways: there, what is fetched ahead pushes out what is in use.
#[inline(always)]
pub(crate) fn prefetch<T>(block: &[T; BLOCK]) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    for line in (0..size_of_val(block)).step_by(LINE) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        let ahead = block.as_ptr().cast::<i8>().wrapping_add(AHEAD + line);
        // SAFETY: a prefetch accesses nothing as far as the program can tell, whatever its address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(ahead) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = block;
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::optimizer::{Adam, Lion, Sgd};

    const ADAMW: Adam =
        Adam { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, is_decoupled: true };
    const ADAM: Adam = Adam { is_decoupled: false, ..ADAMW };
    const SGD: Sgd = Sgd { lr: 1e-2, momentum: 0.9, dampening: 0.1, weight_decay: 0.1, is_nesterov: false };
    const LION: Lion = Lion { lr: 1e-3, beta1: 0.9, beta2: 0.99, weight_decay: 0.1 };
    /// No power of two, and one that clips.
    const FACTOR: Factor = Factor { scale: 3.0, clip: 0.7 };

    fn updates() -> [Update; 7] {
        [
            ADAMW.update(3.0),
            ADAM.update(3.0),
            Adam { weight_decay: 0.0, ..ADAM }.update(1.0),
            LION.update(),
            SGD.update(2.0),
            SGD.update(1.0),
            Sgd { momentum: 0.0, weight_decay: 0.0, ..SGD }.update(2.0),
        ]
    }

    /// Parameters, gradients and moments of some elements, and the bf16 copy.
    #[derive(Clone, Debug)]
    struct Arrays {
        p: Vec<f32>,
        g: Vec<f32>,
        g16: Vec<u16>,
        m: Vec<f32>,
        v: Vec<f32>,
        copy: Vec<u16>,
    }

    /// Numbers that formulas trip over.
    const ODD: [f32; 8] =
        [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-40, -1e-45, f32::MAX, -0.0, f32::MIN_POSITIVE];

    impl Arrays {
        /// From a seed; one in `odd` numbers is an odd one.
        fn new(elements: usize, seed: u32, odd: Option<u32>) -> Self {
            let mut state = seed | 1;
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                state >> 8
            };
            let mut some = |scale: f32, squares: bool| -> Vec<f32> {
                (0..elements)
                    .map(|_| {
                        let usual = (next() as f32 / (1 << 24) as f32 - 0.5) * scale;
                        let drawn = match odd {
                            Some(odd) if next() % odd == 0 => ODD[next() as usize % ODD.len()],
                            _ => usual,
                        };
                        if squares { drawn.abs() } else { drawn }
                    })
                    .collect()
            };
            let (p, g, m, v) = (some(1.0, false), some(1e-2, false), some(1e-2, false), some(1e-4, true));
            let g16 = g.iter().map(|it| half::bf16::from_f32(*it).to_bits()).collect();
            Self { p, g, g16, m, v, copy: vec![7; elements] }
        }

        fn piece(&mut self, update: &Update, is_half: bool, has_copy: bool) -> Piece<'_> {
            Piece {
                parameters: &mut self.p,
                gradients: if is_half { Gradients::Bf16(&self.g16) } else { Gradients::F32(&self.g) },
                mean: &mut self.m,
                square: if update.has_square() { &mut self.v } else { &mut [] },
                copy: has_copy.then_some(&mut self.copy),
            }
        }

        /// What can be compared: a NaN has many patterns of bits, and none means anything.
        fn bits(&self) -> Vec<u32> {
            let all = self.p.iter().chain(&self.m).chain(&self.v);
            let floats = all.map(|it| if it.is_nan() { f32::NAN.to_bits() } else { it.to_bits() });
            floats.chain(self.copy.iter().map(|it| u32::from(*it))).collect()
        }

        /// Element by element, with a division where the loop has a product with the inverse.
        fn stepped(mut self, update: &Update, factor: Factor, is_half: bool, has_copy: bool) -> Self {
            let elements = self.p.len();
            let (blocks, vectors) = (elements / BLOCK * BLOCK, elements / VECTOR * VECTOR);
            assert!(blocks <= vectors);
            for index in 0..elements {
                let g = if is_half { half::bf16::from_bits(self.g16[index]).to_f32() } else { self.g[index] };
                let g = g / factor.scale * factor.clip;
                let (p, m, v) = (&mut self.p[index], &mut self.m[index], &mut self.v[index]);
                match update.0 {
                    Formulas::Adam(formula) => formula.element(index >= vectors, p, g, m, v),
                    Formulas::Coupled(formula) => formula.element(index >= vectors, p, g, m, v),
                    Formulas::Lion(formula) => formula.element(index >= vectors, p, g, m, v),
                    Formulas::Sgd(formula) => formula.element(index >= vectors, p, g, m, v),
                    Formulas::Traffic(formula) => formula.element(index >= vectors, p, g, m, v),
                }
                if has_copy {
                    self.copy[index] = half::bf16::from_f32(self.p[index]).to_bits();
                    if self.p[index].is_nan() {
                        self.copy[index] = 0x7fc0;
                    }
                }
            }
            self
        }
    }

    /// The formulas of the papers in 64 bits: a new parameter, and both moments.
    fn adam_in_64_bits(of: &Adam, step: f64, [p, g, m, v]: [f64; 4]) -> [f64; 3] {
        let g = if of.is_decoupled { g } else { g + of.weight_decay * p };
        let decayed = if of.is_decoupled { p * (1.0 - of.lr * of.weight_decay) } else { p };
        let m = of.beta1 * m + (1.0 - of.beta1) * g;
        let v = of.beta2 * v + (1.0 - of.beta2) * g * g;
        let denominator = (v / (1.0 - of.beta2.powf(step))).sqrt() + of.eps;
        [decayed - of.lr / (1.0 - of.beta1.powf(step)) * m / denominator, m, v]
    }

    #[test]
    fn a_step_of_sgd_is_its_formula_to_within_rounding() {
        for (step, is_nesterov) in [(1.0, false), (2.0, false), (2.0, true)] {
            let of = Sgd { is_nesterov, ..SGD };
            let mut arrays = Arrays::new(333, 7, None);
            let before = arrays.clone();
            let update = of.update(step);
            let piece = arrays.piece(&update, false, false);
            super::step(vec![Work { update, piece, stripe: 0 }], FACTOR, 1).unwrap();
            for index in 0..333 {
                let [p, g, m] = [before.p[index], before.g[index], before.m[index]].map(f64::from);
                let g = g / f64::from(FACTOR.scale) * f64::from(FACTOR.clip) + of.weight_decay * p;
                let m = if step == 1.0 { g } else { of.momentum * m + (1.0 - of.dampening) * g };
                let p = p - of.lr * if is_nesterov { g + of.momentum * m } else { m };
                assert!((f64::from(arrays.p[index]) - p).abs() < 1e-7, "{index}: {} {p}", arrays.p[index]);
                assert!((f64::from(arrays.m[index]) - m).abs() < 1e-8, "{index}: {} {m}", arrays.m[index]);
            }
        }
    }

    fn lion_in_64_bits(of: &Lion, [p, g, m, _]: [f64; 4]) -> [f64; 3] {
        let direction = of.beta1 * m + (1.0 - of.beta1) * g;
        let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
        [p - of.lr * (sign + of.weight_decay * p), of.beta2 * m + (1.0 - of.beta2) * g, 0.0]
    }

    #[test]
    fn a_step_is_the_papers_formula_to_within_rounding() {
        for (beta1, elements, factor) in [
            (0.9, 1000, Factor::default()),
            (0.3, 333, FACTOR),
            (0.0, 77, Factor { scale: 1024.0, clip: -1.0 }),
        ] {
            let adamw = Adam { beta1, ..ADAMW };
            let adam = Adam { beta1, ..ADAM };
            let lion = Lion { beta1, ..LION };
            for (which, update) in [adamw.update(3.0), adam.update(3.0), lion.update()].iter().enumerate() {
                let mut arrays = Arrays::new(elements, 7, None);
                let before = arrays.clone();
                let piece = arrays.piece(update, false, false);
                step(vec![Work { update: *update, piece, stripe: 0 }], factor, 1).unwrap();
                for index in 0..elements {
                    let g = f64::from(before.g[index]) / f64::from(factor.scale) * f64::from(factor.clip);
                    let [p, m, v] = [before.p[index], before.m[index], before.v[index]].map(f64::from);
                    let [p, m, v] = match which {
                        0 => adam_in_64_bits(&adamw, 3.0, [p, g, m, v]),
                        1 => adam_in_64_bits(&adam, 3.0, [p, g, m, v]),
                        _ => lion_in_64_bits(&lion, [p, g, m, v]),
                    };
                    let near = |found: f32, exact: f64, bound: f64| (f64::from(found) - exact).abs() < bound;
                    assert!(near(arrays.p[index], p, 1e-7), "{which} {index}: {} {p}", arrays.p[index]);
                    assert!(near(arrays.m[index], m, 1e-8), "{which} {index}: {} {m}", arrays.m[index]);
                    assert!(which == 2 || near(arrays.v[index], v, 1e-9));
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn every_level_gives_the_bits_of_the_element_by_element_step(
            elements in 1_usize..400,
            shift in 0_usize..5,
            seed: u32,
            odd in prop_oneof![Just(None), Just(Some(4)), Just(Some(100))],
            [is_half, has_copy, is_streamed] in any::<[bool; 3]>(),
            factor in prop_oneof![
                Just(Factor::default()),
                Just(FACTOR),
                Just(Factor { scale: 65536.0, clip: 1.0 }),
                Just(Factor { scale: 65536.0, clip: -0.3 }),
                Just(Factor { scale: 1e-40, clip: 1.0 }),
                Just(Factor { scale: 1.0, clip: f32::NAN }),
                Just(Factor { scale: 1.0, clip: 0.0 }),
            ],
        ) {
            for update in updates() {
                // Unaligned: the loop begins after some elements, which stay what they are.
                let whole = Arrays::new(elements + shift, seed, odd);
                let (mut expected, mut rest) = (whole.clone(), whole.clone());
                for array in [&mut rest.p, &mut rest.g, &mut rest.m, &mut rest.v] {
                    array.drain(..shift);
                }
                rest.g16.drain(..shift);
                rest.copy.drain(..shift);
                let rest = rest.stepped(&update, factor, is_half, has_copy);
                expected.p.splice(shift.., rest.p);
                expected.m.splice(shift.., rest.m);
                expected.v.splice(shift.., rest.v);
                expected.copy.splice(shift.., rest.copy);
                for level in Level::available() {
                    let mut arrays = whole.clone();
                    let (_, piece) = arrays.piece(&update, is_half, has_copy).split_at(shift);
                    level.step(&update, factor, piece, is_streamed);
                    prop_assert!(arrays.bits() == expected.bits(), "{level:?} {update:?}");
                }
            }
        }

        #[test]
        fn pieces_threads_and_stripes_change_no_bit(
            elements in 1_usize..400_000,
            cuts in proptest::collection::vec(0_usize..6000, 0..4),
            threads in 1_usize..5,
            seed: u32,
        ) {
            for update in [ADAMW.update(2.0), LION.update()] {
                let mut whole = Arrays::new(elements, seed, None);
                let mut cut = whole.clone();
                let one = whole.piece(&update, true, true);
                step(vec![Work { update, piece: one, stripe: 0 }], FACTOR, 1).unwrap();
                let mut rest = cut.piece(&update, true, true);
                let mut work = vec![];
                for (stripe, at) in cuts.iter().enumerate() {
                    let at = (at * PIECE).min(rest.parameters.len() / PIECE * PIECE);
                    let (piece, after) = rest.split_at(at);
                    work.push(Work { update, piece, stripe: stripe % 2 });
                    rest = after;
                }
                work.push(Work { update, piece: rest, stripe: 2 });
                step(work, FACTOR, threads).unwrap();
                prop_assert!(cut.bits() == whole.bits());
            }
        }

        #[test]
        fn at_any_time_as_much_is_done_of_every_stripe(sizes in proptest::collection::vec(1_usize..20, 1..5)) {
            let mut arrays: Vec<Arrays> = sizes.iter().map(|_| Arrays::new(0, 1, None)).collect();
            for (arrays, size) in arrays.iter_mut().zip(&sizes) {
                arrays.p = vec![0.0; size * CHUNK];
                arrays.g = vec![0.0; size * CHUNK];
                arrays.m = vec![0.0; size * CHUNK];
            }
            let update = LION.update();
            let work = arrays.iter_mut().enumerate().map(|(stripe, it)| {
                Work { update, piece: it.piece(&update, false, false), stripe }
            });
            let mut done = vec![0; sizes.len()];
            for Work { stripe, .. } in striped(work.collect()) {
                done[stripe] += 1;
                // In chunks of this stripe: no stripe is ahead or behind by more than one of its own.
                for (other, size) in sizes.iter().enumerate() {
                    let expected = done[stripe] as f64 / sizes[stripe] as f64 * *size as f64;
                    let chunk = *size as f64 / sizes[stripe] as f64;
                    prop_assert!((f64::from(done[other]) - expected).abs() <= 1.0 + chunk);
                }
            }
            prop_assert!(done.iter().zip(&sizes).all(|(done, size)| *done as usize == *size));
        }
    }

    #[test]
    fn traffic_changes_no_finite_number() {
        let mut arrays = Arrays::new(1000, 3, None);
        let before = arrays.bits();
        let update = Update::traffic();
        let piece = arrays.piece(&update, false, false);
        step(vec![Work { update, piece, stripe: 0 }], Factor::default(), 1).unwrap();
        assert!(arrays.bits() == before);
    }

    #[test]
    fn arrays_of_different_lengths_are_refused_and_left_alone() {
        let update = ADAMW.update(1.0);
        let mut good = Arrays::new(10, 1, None);
        let mut arrays = Arrays::new(10, 1, None);
        let before = (good.bits(), arrays.bits());
        let mut piece = arrays.piece(&update, false, false);
        piece.gradients = piece.gradients.split_at(9).0;
        let first = Work { update, piece: good.piece(&update, false, false), stripe: 0 };
        let message =
            step(vec![first, Work { update, piece, stripe: 0 }], FACTOR, 1).unwrap_err().to_string();
        assert_eq!(message, "arrays of 40 and 36 bytes cannot be combined; pass arrays of one size");
        // Lion has one moment, Adam has two.
        let piece = good.piece(&LION.update(), false, false);
        step(vec![Work { update, piece, stripe: 0 }], FACTOR, 1).unwrap_err();
        let piece = good.piece(&update, false, false);
        step(vec![Work { update: LION.update(), piece, stripe: 0 }], FACTOR, 1).unwrap_err();
        assert!((good.bits(), arrays.bits()) == before);
    }
}
