//! The only source of chance in the model and the litmus tests: a schedule is a function of its seed.

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): one addition and two multiplications a draw.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

#[cfg_attr(not(feature = "model"), expect(dead_code, reason = "the model draws more than the litmus tests"))]
impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        // Neighbouring seeds are many draws apart.
        let mut random = Self(seed.wrapping_mul(0xd6e8_feb8_6659_fd93));
        random.next();
        random
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which is not 0.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }

    /// True in `rate` of 65,536 draws.
    pub(crate) fn chance(&mut self, rate: u32) -> bool {
        (self.next() as u32 & 0xffff) < rate
    }

    /// One of `choices`.
    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// The place of a set bit of `mask`, which is not 0.
    pub(crate) fn bit(&mut self, mask: u64) -> usize {
        if mask & (mask - 1) == 0 {
            return mask.trailing_zeros() as usize;
        }
        let mut rest = mask;
        for _ in 0..self.below(mask.count_ones() as usize) {
            rest &= rest - 1;
        }
        rest.trailing_zeros() as usize
    }

    /// A number of up to `bits` bits whose length is even likelier than its value.
    pub(crate) fn magnitude(&mut self, bits: u32) -> u64 {
        let length = self.below(bits as usize + 1) as u32;
        if length == 0 { 0 } else { self.next() >> (64 - length) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bit_is_always_one_of_the_mask() {
        let mut random = Random::new(1);
        for _ in 0..1000 {
            let mask = random.next() | 1;
            assert_ne!(mask & (1 << random.bit(mask)), 0);
        }
    }

    #[test]
    fn the_same_seed_draws_the_same_numbers_and_its_neighbour_others() {
        let draw = |seed| (0..4).scan(Random::new(seed), |r, _| Some(r.next())).collect::<Vec<_>>();
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }
}
