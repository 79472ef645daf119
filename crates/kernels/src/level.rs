//! Instruction sets: the same loops compiled once for each, one of them picked at run time.
//!
//! Each module of loops has its own functions with the features of each level, because generic code is inlined into these functions, and only
//! there are its loops compiled with their features.

/// What the loops may be made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// What every CPU of the target has.
    Portable,
    /// AVX2, with fused multiply-adds.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// The levels that this CPU has, the best one last.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn available() -> impl DoubleEndedIterator<Item = Self> {
        let avx2 = !cfg!(miri) && is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let avx512 = avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        [(Self::Portable, true), (Self::Avx2, avx2), (Self::Avx512, avx512)]
            .into_iter()
            .filter_map(|(level, here)| here.then_some(level))
    }

    /// The levels that this CPU has, the best one last.
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn available() -> impl DoubleEndedIterator<Item = Self> {
        [Self::Portable].into_iter()
    }

    /// The best level of this CPU.
    pub(crate) fn best() -> Self {
        Self::available().next_back().unwrap_or(Self::Portable)
    }
}
