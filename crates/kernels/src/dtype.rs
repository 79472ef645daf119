//! What arrays hold, what is done to them, and what can be wrong with a request.

use std::fmt;

/// The type of an array's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE 754 double.
    F64,
    /// IEEE 754 single.
    F32,
    /// The upper half of a single: 8 bits of exponent, 7 of fraction.
    BF16,
    /// IEEE 754 half.
    F16,
    /// Unsigned byte; also a bool.
    U8,
    /// Signed byte.
    I8,
    /// Unsigned, 2 bytes.
    U16,
    /// Signed, 2 bytes.
    I16,
    /// Unsigned, 4 bytes.
    U32,
    /// Signed, 4 bytes.
    I32,
    /// Unsigned, 8 bytes.
    U64,
    /// Signed, 8 bytes.
    I64,
}

impl Dtype {
    /// Every type.
    pub const ALL: [Self; 12] = [
        Self::F64,
        Self::F32,
        Self::BF16,
        Self::F16,
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::U64,
        Self::I64,
    ];

    /// Its name, as NumPy and torch spell it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F64 => "float64",
            Self::F32 => "float32",
            Self::BF16 => "bfloat16",
            Self::F16 => "float16",
            Self::U8 => "uint8",
            Self::I8 => "int8",
            Self::U16 => "uint16",
            Self::I16 => "int16",
            Self::U32 => "uint32",
            Self::I32 => "int32",
            Self::U64 => "uint64",
            Self::I64 => "int64",
        }
    }

    /// The type of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// The size of an element in bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::BF16 | Self::F16 | Self::U16 | Self::I16 => 2,
            Self::F32 | Self::U32 | Self::I32 => 4,
            Self::F64 | Self::U64 | Self::I64 => 8,
        }
    }

    /// Whether elements have an exponent.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F64 | Self::F32 | Self::BF16 | Self::F16)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How two elements become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// a + b
    Sum,
    /// a * b
    Product,
    /// The smaller one, or NaN.
    Min,
    /// The larger one, or NaN.
    Max,
    /// a + b, and at the end of the reduction [`divide`](crate::divide) by the number of operands.
    Average,
    /// a & b
    BitAnd,
    /// a | b
    BitOr,
    /// a ^ b
    BitXor,
}

impl Op {
    /// Every operation.
    pub const ALL: [Self; 8] = [
        Self::Sum,
        Self::Product,
        Self::Min,
        Self::Max,
        Self::Average,
        Self::BitAnd,
        Self::BitOr,
        Self::BitXor,
    ];

    /// Its name, as users write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Product => "product",
            Self::Min => "min",
            Self::Max => "max",
            Self::Average => "average",
            Self::BitAnd => "and",
            Self::BitOr => "or",
            Self::BitXor => "xor",
        }
    }

    /// The operation of this name. The names that torch has instead of ours name it too.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let name = match name {
            "prod" => "product",
            "avg" => "average",
            "band" => "and",
            "bor" => "or",
            "bxor" => "xor",
            name => name,
        };
        Self::ALL.into_iter().find(|op| op.name() == name)
    }

    /// Whether it works on bits, which floats do not take.
    #[must_use]
    pub const fn is_bitwise(self) -> bool {
        matches!(self, Self::BitAnd | Self::BitOr | Self::BitXor)
    }

    /// Whether it is defined for elements of type `dtype`.
    ///
    /// # Errors
    /// [`KernelError::Bits`] for a bit operation on floats.
    pub const fn check(self, dtype: Dtype) -> Result<(), KernelError> {
        if self.is_bitwise() && dtype.is_float() {
            return Err(KernelError::Bits { op: self, dtype });
        }
        Ok(())
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why arrays were not combined. Nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A bit operation on floats.
    #[error("{op} is not defined for {dtype}; use an integer type, or sum, product, min, max or average")]
    Bits {
        /// The operation.
        op: Op,
        /// The type.
        dtype: Dtype,
    },
    /// Arrays of different sizes.
    #[error("arrays of {first} and {other} bytes cannot be combined; pass arrays of one size")]
    Sizes {
        /// The size of the array that is written, in bytes.
        first: usize,
        /// The size of the one that differs from it, in bytes.
        other: usize,
    },
    /// A size that is no whole number of elements.
    #[error("{bytes} bytes are no whole number of {dtype} elements; pass a multiple of {}", dtype.bytes())]
    Partial {
        /// The size in bytes.
        bytes: usize,
        /// The type.
        dtype: Dtype,
    },
}
