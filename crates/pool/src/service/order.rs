//! What a step does at proxies that keep an optimizer's state: steps, or moves that state. Client 0 says so before it pushes.
//!
//! # Lines of an order
//! | line | words |
//! |---|---|
//! | 0 of an order | 0 the step; 1 what: 1 the optimizer steps, 2 the state comes from client 0, 3 it goes to all clients, 4 gradients are averaged alone, 5 the optimizer steps with the averages of the step before; 2 which of the state: 0 parameters, 1 and 2 the moments; 3 the number of the optimizer's step, from 1; 4 to 6, where it steps with averages, factors of them, one after another |
//! | then one a group | 0 rule: 1 SGD, 2 Adam, 3 AdamW; 1 learning rate; 2 momentum or first beta; 3 dampening or second beta; 4 epsilon; 5 weight decay; 6 whether SGD's momentum is Nesterov's |
//!
//! Words 1 to 5 of a group are 64-bit floats as their bits. A factor is a 32-bit float as its bits, and bit 32; 0 is none.

use polder_kernels::{Adam, Factor, Gradients, KernelError, Piece, Sgd, Update, Work, step};
use polder_mem::{Fault, Memory, Offset};

use crate::line;

/// An array of an optimizer's state, of as many elements as the parameters have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// The parameters themselves.
    Parameters,
    /// The mean of gradients, or the moment of SGD.
    Mean,
    /// The mean of squared gradients; SGD has none.
    Square,
}

/// Moments of each parameter, at most.
pub const MOMENTS: usize = 2;

impl Slot {
    /// The number of a moment, from 0.
    pub(super) const fn moment(self) -> Option<u64> {
        match self {
            Self::Parameters => None,
            Self::Mean => Some(0),
            Self::Square => Some(1),
        }
    }

    const ALL: [Self; 3] = [Self::Parameters, Self::Mean, Self::Square];
}

/// The settings of a group of parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimizer {
    /// SGD.
    Sgd(Sgd),
    /// Adam or AdamW.
    Adam(Adam),
}

/// What a step does.
#[derive(Clone, Debug, PartialEq)]
pub enum Order {
    /// The optimizer's step of this number, from 1, with the mean of the gradients. The clients pull the new parameters.
    Step {
        /// Which step.
        number: u64,
        /// The settings of each group.
        groups: Vec<Optimizer>,
    },
    /// The clients pull the mean of the gradients, or leave it where it is. The optimizer does nothing yet.
    Mean,
    /// As [`Order::Step`], with the means of the step before, which was one of [`Order::Mean`]. What the clients push counts for nothing.
    StepWithMeans {
        /// Which step.
        number: u64,
        /// The settings of each group.
        groups: Vec<Optimizer>,
        /// What the means are multiplied by, one after another: [`FACTORS`] at most.
        factors: Vec<f32>,
    },
    /// What client 0 pushes becomes the state. The clients pull it.
    Load(Slot),
    /// The clients pull the state; what they push counts for nothing.
    Save(Slot),
}

/// Factors of an order, at most.
pub const FACTORS: usize = 3;
const FACTOR: u64 = 1 << 32;

type Words = [u64; 7];

impl Order {
    /// The lines of an order in `step`.
    pub(super) fn lines(&self, step: u32) -> Vec<Words> {
        let (what, slot, number) = match self {
            Self::Step { number, .. } => (1, 0, *number),
            Self::Load(slot) => (2, *slot as u64, 0),
            Self::Save(slot) => (3, *slot as u64, 0),
            Self::Mean => (4, 0, 0),
            Self::StepWithMeans { number, .. } => (5, 0, *number),
        };
        let mut head = [u64::from(step), what, slot, number, 0, 0, 0];
        if let Self::StepWithMeans { factors, .. } = self {
            let words = factors.iter().map(|it| FACTOR | u64::from(it.to_bits()));
            head[4..].iter_mut().zip(words).for_each(|(to, word)| *to = word);
        }
        std::iter::once(head).chain(self.groups().iter().map(Optimizer::words)).collect()
    }

    /// The settings that it has.
    pub(super) fn groups(&self) -> &[Optimizer] {
        match self {
            Self::Step { groups, .. } | Self::StepWithMeans { groups, .. } => groups,
            Self::Load(_) | Self::Save(_) | Self::Mean => &[],
        }
    }

    /// The order of `step` that stands in the lines at `at`, with room for so many groups. `None` where no correct client wrote them.
    // SYNC: pairs with `Client::order`; the proxy has seen a push that came after it.
    pub(super) fn load<M: Memory>(
        memory: &M,
        at: Offset,
        groups: usize,
        step: u32,
    ) -> Result<Option<Self>, Fault> {
        let Some([said, what, slot, number, by @ ..]) = line::load(memory, at)? else { return Ok(None) };
        if said != u64::from(step) {
            return Ok(None);
        }
        let slot = Slot::ALL.get(slot as usize).copied();
        Ok(match (what, slot) {
            (1 | 5, _) if number > 0 => {
                let mut settings = vec![];
                for group in 0..groups as u64 {
                    let words = line::load(memory, at.lines(1 + group))?;
                    let Some(of) = words.as_ref().and_then(Optimizer::parse) else { return Ok(None) };
                    settings.push(of);
                }
                let factors = by.into_iter().filter(|it| it & FACTOR != 0);
                let factors = factors.map(|it| f32::from_bits(it as u32)).collect();
                Some(match what {
                    1 => Self::Step { number, groups: settings },
                    _ => Self::StepWithMeans { number, groups: settings, factors },
                })
            }
            (4, _) => Some(Self::Mean),
            (2, Some(slot)) => Some(Self::Load(slot)),
            (3, Some(slot)) => Some(Self::Save(slot)),
            _ => None,
        })
    }
}

impl Optimizer {
    fn words(&self) -> Words {
        let bits = f64::to_bits;
        match *self {
            Self::Sgd(Sgd { lr, momentum, dampening, weight_decay, is_nesterov }) => {
                [1, bits(lr), bits(momentum), bits(dampening), 0, bits(weight_decay), u64::from(is_nesterov)]
            }
            Self::Adam(Adam { lr, beta1, beta2, eps, weight_decay, is_decoupled }) => {
                let rule = if is_decoupled { 3 } else { 2 };
                [rule, bits(lr), bits(beta1), bits(beta2), bits(eps), bits(weight_decay), 0]
            }
        }
    }

    fn parse(words: &Words) -> Option<Self> {
        let [rule, lr, first, second, eps, weight_decay, flag] = *words;
        let [lr, first, second, eps, weight_decay] =
            [lr, first, second, eps, weight_decay].map(f64::from_bits);
        match (rule, flag) {
            (1, 0 | 1) => {
                let (momentum, dampening, is_nesterov) = (first, second, flag == 1);
                Some(Self::Sgd(Sgd { lr, momentum, dampening, weight_decay, is_nesterov }))
            }
            (2 | 3, 0) => {
                let (beta1, beta2, is_decoupled) = (first, second, rule == 3);
                Some(Self::Adam(Adam { lr, beta1, beta2, eps, weight_decay, is_decoupled }))
            }
            _ => None,
        }
    }

    /// The coefficients of a step.
    pub(super) fn update(&self, number: u64) -> Update {
        match self {
            Self::Sgd(sgd) => sgd.update(number as f64),
            Self::Adam(adam) => adam.update(number as f64),
        }
    }

    /// How many moments of each parameter it needs.
    pub(super) const fn moments(&self) -> u16 {
        match self {
            Self::Sgd(_) => 1,
            Self::Adam(_) => 2,
        }
    }
}

/// What a proxy has of a shard's parameters in its own memory. They stand in the pool, where clients pull them, and here only while
/// something else stands there.
#[derive(Debug, Default)]
pub(super) struct Held {
    parameters: Vec<f32>,
    /// Whether the parameters stand in the pool.
    pub(super) is_out: bool,
}

impl Held {
    /// Room for `elements` parameters.
    pub(super) fn hold(&mut self, elements: usize) {
        self.parameters.resize(elements, 0.0);
    }

    /// Whether there are `elements` parameters, somewhere.
    pub(super) fn has_parameters(&self, elements: usize) -> bool {
        self.is_out || self.parameters.len() == elements
    }

    /// Whether parameters stand in the pool, and something else is about to.
    pub(super) fn is_in_the_way(&self, order: &Order) -> bool {
        let stays = matches!(
            order,
            Order::Step { .. } | Order::Load(Slot::Parameters) | Order::Save(Slot::Parameters)
        );
        self.is_out && !stays
    }

    /// The parameters stand in the pool from now on.
    pub(super) fn put_out(&mut self) {
        (self.parameters, self.is_out) = (vec![], true);
    }

    /// Takes a piece of the parameters from these bytes, from element `at` on.
    pub(super) fn load(&mut self, at: usize, bytes: &[u8]) {
        self.parameters[at..].iter_mut().zip(floats(bytes)).for_each(|(to, from)| *to = from);
    }

    /// Gives a piece of the parameters, from element `at` on.
    pub(super) fn save(&self, at: usize, bytes: &mut [u8]) {
        put(&self.parameters[at..], bytes);
    }

    /// Steps with the gradients in `bytes` times each of `factors`, from element `at` on, and puts the new parameters there, and the new
    /// moments into theirs. The old parameters are those of `parameters`, if they stood in the pool.
    pub(super) fn step(
        &self,
        update: Update,
        factors: &[f32],
        at: usize,
        parameters: Option<&[u8]>,
        [mean_bytes, square_bytes]: [&mut [u8]; MOMENTS],
        bytes: &mut [u8],
    ) -> Result<(), KernelError> {
        let elements = bytes.len() / 4;
        let mut gradients = floats(bytes);
        for factor in factors {
            gradients.iter_mut().for_each(|it| *it *= factor);
        }
        let mut parameters = parameters.map_or_else(|| self.parameters[at..at + elements].to_vec(), floats);
        let (mut mean, mut square) = (floats(mean_bytes), floats(square_bytes));
        let piece = Piece {
            parameters: &mut parameters,
            gradients: Gradients::F32(&gradients),
            mean: &mut mean,
            square: &mut square,
            copy: None,
        };
        step(vec![Work { update, piece, stripe: 0 }], Factor::default(), 1)?;
        put(&parameters, bytes);
        put(&mean, mean_bytes);
        put(&square, square_bytes);
        Ok(())
    }
}

/// Writes numbers into as many bytes as there are.
fn put(numbers: &[f32], bytes: &mut [u8]) {
    let (words, _) = bytes.as_chunks_mut();
    words.iter_mut().zip(numbers).for_each(|(to, from)| *to = from.to_le_bytes());
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|it| f32::from_le_bytes(*it)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_come_back_from_their_words_and_strange_words_do_not() {
        let sgd = Sgd { lr: 0.1, momentum: 0.9, dampening: 0.2, weight_decay: 0.3, is_nesterov: true };
        let adam =
            Adam { lr: 0.1, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.3, is_decoupled: true };
        let all = [
            Optimizer::Sgd(sgd),
            Optimizer::Adam(adam),
            Optimizer::Adam(Adam { is_decoupled: false, ..adam }),
        ];
        for of in all {
            assert_eq!(Optimizer::parse(&of.words()), Some(of));
        }
        let mut words = all[0].words();
        words[6] = 2;
        assert_eq!(Optimizer::parse(&words), None);
        words[0] = 4;
        assert_eq!(Optimizer::parse(&words), None);
    }

    #[test]
    fn gradients_are_multiplied_by_one_factor_after_another() {
        let sgd = Sgd { lr: 1.0, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, is_nesterov: false };
        let mut held = Held::default();
        held.hold(2);
        assert!(held.has_parameters(2));
        let mut bytes = [3.0_f32, 0.1].map(f32::to_le_bytes).concat();
        let moments: [&mut [u8]; 2] = [&mut [0; 8], &mut []];
        held.step(Optimizer::Sgd(sgd).update(1), &[0.1, 0.7], 0, None, moments, &mut bytes).unwrap();
        let expected = [3.0_f32, 0.1].map(|it| -(it * 0.1 * 0.7)).map(f32::to_le_bytes).concat();
        assert_eq!(bytes, expected);
    }
}
