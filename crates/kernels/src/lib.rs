//! Arithmetic on arrays with SIMD: reductions.
