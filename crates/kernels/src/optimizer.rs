//! What an optimizer makes of an element: the settings of Adam, AdamW, Lion and SGD, and their formulas.

/// The settings of `torch.optim.Adam`, or of `torch.optim.AdamW` if the weight decay is decoupled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the mean of gradients.
    pub beta1: f64,
    /// Decay of the mean of squared gradients.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Parameters decay by themselves, as in AdamW; otherwise through their gradients, as in Adam.
    pub is_decoupled: bool,
}

/// The settings of Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, Algorithm 2).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion {
    /// Learning rate.
    pub lr: f64,
    /// Weight of the mean in the sign that a step takes.
    pub beta1: f64,
    /// Decay of the mean of gradients.
    pub beta2: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

/// The settings of `torch.optim.SGD`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// Learning rate.
    pub lr: f64,
    /// What is kept of the moment; at 0 there is none.
    pub momentum: f64,
    /// What the moment does not take of a gradient.
    pub dampening: f64,
    /// Weight decay, which goes through the gradients.
    pub weight_decay: f64,
    /// Nesterov's momentum.
    pub is_nesterov: bool,
}

/// The coefficients of one step, in the precision in which elements are computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update(pub(crate) Formulas);

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Formulas {
    Adam(AdamFormula<false>),
    /// Weight decay goes through the gradients.
    Coupled(AdamFormula<true>),
    Lion(LionFormula),
    Sgd(SgdFormula),
    Traffic(Traffic),
}

impl Adam {
    /// The coefficients of step number `step`, which starts at 1. Computed in 64 bits and rounded once, as torch does.
    #[must_use]
    pub fn update(&self, step: f64) -> Update {
        let Self { lr, beta1, beta2, eps, weight_decay, is_decoupled } = *self;
        let weight = (1.0 - beta1) as f32;
        let is_small = weight.abs() < 0.5;
        // As in torch, no decay is no operation: a parameter that is infinite would make NaN of its gradient.
        let is_coupled = !is_decoupled && weight_decay != 0.0;
        let correction = (1.0 - beta2.powf(step)).sqrt() as f32;
        let coefficients = Coefficients {
            decay: if is_decoupled { (1.0 - lr * weight_decay) as f32 } else { 1.0 },
            coupled: weight_decay as f32,
            mean: if is_small { weight } else { weight - 1.0 },
            is_small,
            beta2: beta2 as f32,
            square: (1.0 - beta2) as f32,
            correction,
            inverse: 1.0 / correction,
            eps: eps as f32,
            step: -(lr / (1.0 - beta1.powf(step))) as f32,
        };
        Update(match is_coupled {
            true => Formulas::Coupled(AdamFormula(coefficients)),
            false => Formulas::Adam(AdamFormula(coefficients)),
        })
    }
}

impl Lion {
    /// The coefficients of a step; they are the same for every step.
    #[must_use]
    pub fn update(&self) -> Update {
        let Self { lr, beta1, beta2, weight_decay } = *self;
        Update(Formulas::Lion(LionFormula {
            decay: (1.0 - lr * weight_decay) as f32,
            beta1: beta1 as f32,
            gradient1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            gradient2: (1.0 - beta2) as f32,
            step: -lr as f32,
        }))
    }
}

impl Sgd {
    /// The coefficients of step number `step`, which starts at 1: the first gradients become the moment as they are.
    #[must_use]
    pub fn update(&self, step: f64) -> Update {
        let Self { lr, momentum, dampening, weight_decay, is_nesterov } = *self;
        Update(Formulas::Sgd(SgdFormula {
            decay: weight_decay as f32,
            momentum: momentum as f32,
            gradient: (1.0 - dampening) as f32,
            step: -lr as f32,
            is_nesterov,
            is_first: step <= 1.0,
        }))
    }
}

impl Update {
    /// The memory traffic of Adam with next to no arithmetic: the floor that its time is set beside. Finite
    /// numbers stay what they are.
    #[must_use]
    pub const fn traffic() -> Self {
        Self(Formulas::Traffic(Traffic))
    }

    /// Arrays of moments: two for Adam, and one for Lion and SGD.
    pub(crate) const fn has_square(&self) -> bool {
        !matches!(self.0, Formulas::Lion(_) | Formulas::Sgd(_))
    }
}

/// What is done with a gradient before it is used: divided by the scale of the loss, then multiplied to clip its norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Factor {
    /// The scale of the loss, as of torch's `GradScaler`.
    pub scale: f32,
    /// What [`clip`] returns; negative to ascend.
    pub clip: f32,
}

impl Default for Factor {
    fn default() -> Self {
        Self { scale: 1.0, clip: 1.0 }
    }
}

/// The factor that clips gradients of this norm, as `torch.nn.utils.clip_grad_norm_` computes it. An infinite norm gives
/// 0 and a NaN gives NaN, as there.
///
/// ```
/// assert_eq!(polder_kernels::clip(4.0, 1.0), 1.0 / (4.0 + 1e-6));
/// assert_eq!(polder_kernels::clip(0.5, 1.0), 1.0);
/// assert!(polder_kernels::clip(f64::NAN, 1.0).is_nan());
/// ```
#[must_use]
pub fn clip(norm: f64, max_norm: f64) -> f32 {
    let factor = max_norm as f32 / (norm as f32 + 1e-6);
    // `min` would prefer 1 to NaN.
    if factor > 1.0 { 1.0 } else { factor }
}

/// A formula of one element: of its parameter, gradient and moments.
pub(crate) trait Formula: Copy {
    const HAS_SQUARE: bool;
    /// `is_tail`: torch rounds the elements after the last whole vector in another way.
    fn element(self, is_tail: bool, p: &mut f32, g: f32, m: &mut f32, v: &mut f32);
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct AdamFormula<const COUPLED: bool>(Coefficients);

#[derive(Clone, Copy, Debug, PartialEq)]
struct Coefficients {
    decay: f32,
    coupled: f32,
    mean: f32,
    is_small: bool,
    beta2: f32,
    square: f32,
    correction: f32,
    inverse: f32,
    eps: f32,
    step: f32,
}

/// The bits of `dividend / divisor`, where `inverse` is `1.0 / divisor`: one multiplication and two fused multiply-adds,
/// of which a core does many while it does a division (Brisebarre, Muller, Raina: "Accelerating correctly rounded
/// floating-point division when the divisor is known in advance", 2004, section 2). It holds where no step underflows or
/// overflows; a square root over the root of `1 - beta2^step` is far from both ends.
#[inline(always)]
fn quotient(dividend: f32, divisor: f32, inverse: f32) -> f32 {
    let near = dividend * inverse;
    let exact = (-near).mul_add(divisor, dividend).mul_add(inverse, near);
    // What is left of an infinity would be NaN.
    if near.is_infinite() { near } else { exact }
}

impl<const COUPLED: bool> Formula for AdamFormula<COUPLED> {
    const HAS_SQUARE: bool = true;

    /// The formula of torch's `FusedAdamKernel.cpp`, operation by operation, with the fused multiply-adds that its
    /// release builds have: found by comparing every candidate with torch 2.12.1, and held by
    /// `python/tests/test_optimizers.py`.
    #[inline(always)]
    fn element(self, is_tail: bool, p: &mut f32, g: f32, m: &mut f32, v: &mut f32) {
        let of = self.0;
        let g = if COUPLED { p.mul_add(of.coupled, g) } else { g };
        let decayed = *p * of.decay;
        *m = match (of.is_small, is_tail) {
            (true, _) => of.mean.mul_add(g - *m, *m),
            (false, false) => of.mean.mul_add(g - *m, g),
            // Differs from the line above in the sign of zero alone, and so does 0 - x from -x.
            (false, true) => (-(g - *m)).mul_add(0.0 - of.mean, g),
        };
        *v = match is_tail {
            false => (of.square * g).mul_add(g, *v * of.beta2),
            true => v.mul_add(of.beta2, of.square * g * g),
        };
        let denominator = quotient(v.sqrt(), of.correction, of.inverse) + of.eps;
        *p = decayed + of.step * *m / denominator;
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LionFormula {
    decay: f32,
    beta1: f32,
    gradient1: f32,
    beta2: f32,
    gradient2: f32,
    step: f32,
}

impl Formula for LionFormula {
    const HAS_SQUARE: bool = false;

    /// Operation by operation what torch computes for `m.mul_(beta).add_(g, alpha=1 - beta)` and
    /// `p.mul_(1 - lr * decay).add_(sign, alpha=-lr)`. The sign of a NaN is 0, as of `torch.sign`.
    #[inline(always)]
    fn element(self, _is_tail: bool, p: &mut f32, g: f32, m: &mut f32, _v: &mut f32) {
        let direction = g.mul_add(self.gradient1, *m * self.beta1);
        let sign = f32::from(direction > 0.0) - f32::from(direction < 0.0);
        *p = sign.mul_add(self.step, *p * self.decay);
        *m = g.mul_add(self.gradient2, *m * self.beta2);
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SgdFormula {
    decay: f32,
    momentum: f32,
    gradient: f32,
    step: f32,
    is_nesterov: bool,
    is_first: bool,
}

impl Formula for SgdFormula {
    const HAS_SQUARE: bool = false;

    /// Operation by operation what torch computes for `g.add(p, alpha=decay)`, `m.mul_(momentum).add_(g, alpha=1 -
    /// dampening)`, for Nesterov's `g.add(m, alpha=momentum)`, and `p.add_(g, alpha=-lr)`.
    #[inline(always)]
    fn element(self, _is_tail: bool, p: &mut f32, g: f32, m: &mut f32, _v: &mut f32) {
        // As in torch, no decay and no momentum are no operation.
        let g = if self.decay == 0.0 { g } else { p.mul_add(self.decay, g) };
        let direction = if self.momentum == 0.0 {
            g
        } else {
            *m = if self.is_first { g } else { g.mul_add(self.gradient, *m * self.momentum) };
            if self.is_nesterov { m.mul_add(self.momentum, g) } else { *m }
        };
        *p = direction.mul_add(self.step, *p);
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Traffic;

impl Formula for Traffic {
    const HAS_SQUARE: bool = true;

    #[inline(always)]
    fn element(self, _is_tail: bool, p: &mut f32, g: f32, m: &mut f32, v: &mut f32) {
        // A product with 0 may be NaN, so the compiler has to read and to write.
        *p += g * 0.0;
        *m += g * 0.0;
        *v += g * 0.0;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::quotient;

    proptest! {
        #[test]
        fn a_quotient_by_a_known_divisor_has_the_bits_of_a_division(
            square in prop_oneof![
                (0_u32..=0x7f80_0000).prop_map(f32::from_bits),
                Just(0.0),
                Just(f32::MIN_POSITIVE),
                Just(f32::MAX),
                Just(f32::INFINITY),
            ],
            beta2 in prop_oneof![0.0_f64..1.0, 0.9..1.0, 0.999_999..1.0],
            step in 1_i32..100_000,
        ) {
            let (root, divisor) = (square.sqrt(), (1.0 - beta2.powi(step)).sqrt() as f32);
            let found = quotient(root, divisor, 1.0 / divisor);
            prop_assert_eq!(found.to_bits(), (root / divisor).to_bits(), "{} / {}", root, divisor);
        }
    }
}
