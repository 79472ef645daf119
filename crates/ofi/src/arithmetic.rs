//! What atomics do with numbers: every datatype and operator that libfabric names and a CPU knows.

/// How an atomic is asked for: for what it does alone, for what was there before as well, or with something to compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Plain,
    Fetch,
    Compare,
}

macro_rules! coded {
    ($(#[$what:meta])* $name:ident: $($case:ident = $code:literal,)*) => {
        $(#[$what])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum $name { $($case = $code,)* }

        impl $name {
            pub(crate) const fn of(code: u8) -> Option<Self> {
                match code {
                    $($code => Some(Self::$case),)*
                    _ => None,
                }
            }

            pub(crate) const fn code(self) -> u8 {
                self as u8
            }
        }
    };
}

coded! {
    /// An operator, in libfabric's numbers.
    Op:
    Min = 0, Max = 1, Sum = 2, Prod = 3, Lor = 4, Land = 5, Bor = 6, Band = 7, Lxor = 8, Bxor = 9, Read = 10,
    Write = 11, Cswap = 12, CswapNe = 13, CswapLe = 14, CswapLt = 15, CswapGe = 16, CswapGt = 17, Mswap = 18,
}

coded! {
    /// A datatype, in libfabric's numbers; without long double, which Rust does not have.
    Datatype:
    I8 = 0, U8 = 1, I16 = 2, U16 = 3, I32 = 4, U32 = 5, I64 = 6, U64 = 7, F32 = 8, F64 = 9, C32 = 10, C64 = 11,
    I128 = 14, U128 = 15,
}

impl Datatype {
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::I16 | Self::U16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 | Self::C32 => 8,
            Self::I128 | Self::U128 | Self::C64 => 16,
        }
    }

    /// Whether there is such an atomic.
    pub(crate) const fn takes(self, form: Form, op: Op) -> bool {
        let is_complex = matches!(self, Self::C32 | Self::C64);
        let is_whole = !is_complex && !matches!(self, Self::F32 | Self::F64);
        let compares = op.code() >= Op::Cswap.code();
        let fits_form = match form {
            Form::Plain => !compares && !matches!(op, Op::Read),
            Form::Fetch => !compares,
            Form::Compare => compares,
        };
        fits_form
            && match op {
                Op::Min | Op::Max | Op::CswapLe | Op::CswapLt | Op::CswapGe | Op::CswapGt => !is_complex,
                Op::Bor | Op::Band | Op::Bxor | Op::Mswap => is_whole,
                _ => true,
            }
    }

    /// What is there afterwards, of what was there before; both operands are as long, but for [`Op::Read`].
    pub(crate) fn apply(self, op: Op, before: &[u8], operand: &[u8], compare: &[u8]) -> Vec<u8> {
        match self {
            Self::I8 => each::<i8, 1>(op, before, operand, compare),
            Self::U8 => each::<u8, 1>(op, before, operand, compare),
            Self::I16 => each::<i16, 2>(op, before, operand, compare),
            Self::U16 => each::<u16, 2>(op, before, operand, compare),
            Self::I32 => each::<i32, 4>(op, before, operand, compare),
            Self::U32 => each::<u32, 4>(op, before, operand, compare),
            Self::I64 => each::<i64, 8>(op, before, operand, compare),
            Self::U64 => each::<u64, 8>(op, before, operand, compare),
            Self::I128 => each::<i128, 16>(op, before, operand, compare),
            Self::U128 => each::<u128, 16>(op, before, operand, compare),
            Self::F32 => each::<f32, 4>(op, before, operand, compare),
            Self::F64 => each::<f64, 8>(op, before, operand, compare),
            Self::C32 => each::<Complex<f32>, 8>(op, before, operand, compare),
            Self::C64 => each::<Complex<f64>, 16>(op, before, operand, compare),
        }
    }
}

/// A number of `N` bytes, as this machine stores it.
trait Number<const N: usize>: Copy + PartialEq + PartialOrd {
    const ZERO: Self;
    const ONE: Self;
    fn of(bytes: [u8; N]) -> Self;
    fn bytes(self) -> [u8; N];
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    /// The bits of both, as an operator puts them together: of whole numbers alone.
    fn bits(self, other: Self, with: impl Fn(u8, u8) -> u8) -> Self {
        let (one, other) = (self.bytes(), other.bytes());
        Self::of(std::array::from_fn(|at| with(one[at], other[at])))
    }
}

macro_rules! whole {
    ($($number:ty: $bytes:literal),*) => {$(
        impl Number<$bytes> for $number {
            const ZERO: Self = 0;
            const ONE: Self = 1;
            fn of(bytes: [u8; $bytes]) -> Self { Self::from_le_bytes(bytes) }
            fn bytes(self) -> [u8; $bytes] { self.to_le_bytes() }
            fn sum(self, other: Self) -> Self { self.wrapping_add(other) }
            fn product(self, other: Self) -> Self { self.wrapping_mul(other) }
        }
    )*};
}
whole!(i8: 1, u8: 1, i16: 2, u16: 2, i32: 4, u32: 4, i64: 8, u64: 8, i128: 16, u128: 16);

/// Two numbers as C and MPI store a complex one.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
struct Complex<T>(T, T);

macro_rules! real {
    ($($number:ty: $bytes:literal, $both:literal);*) => {$(
        impl Number<$bytes> for $number {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            fn of(bytes: [u8; $bytes]) -> Self { Self::from_le_bytes(bytes) }
            fn bytes(self) -> [u8; $bytes] { self.to_le_bytes() }
            fn sum(self, other: Self) -> Self { self + other }
            fn product(self, other: Self) -> Self { self * other }
        }

        impl Number<$both> for Complex<$number> {
            const ZERO: Self = Self(0.0, 0.0);
            const ONE: Self = Self(1.0, 0.0);
            fn of(bytes: [u8; $both]) -> Self {
                let part = |from: usize| <$number>::from_le_bytes(std::array::from_fn(|at| bytes[from + at]));
                Self(part(0), part($bytes))
            }
            fn bytes(self) -> [u8; $both] {
                let parts = [self.0.to_le_bytes(), self.1.to_le_bytes()];
                std::array::from_fn(|at| parts[at / $bytes][at % $bytes])
            }
            fn sum(self, other: Self) -> Self { Self(self.0 + other.0, self.1 + other.1) }
            fn product(self, other: Self) -> Self {
                Self(self.0 * other.0 - self.1 * other.1, self.0 * other.1 + self.1 * other.0)
            }
        }
    )*};
}
real!(f32: 4, 8; f64: 8, 16);

fn each<T: Number<N>, const N: usize>(op: Op, before: &[u8], operand: &[u8], compare: &[u8]) -> Vec<u8> {
    let number = |bytes: &[u8], index: usize| {
        let bytes = bytes.as_chunks::<N>().0.get(index);
        bytes.map_or(T::ZERO, |bytes| T::of(*bytes))
    };
    let after = before.as_chunks::<N>().0.iter().enumerate().map(|(index, before)| {
        one(op, T::of(*before), number(operand, index), number(compare, index)).bytes()
    });
    after.flatten().collect()
}

fn one<T: Number<N>, const N: usize>(op: Op, before: T, operand: T, compare: T) -> T {
    let truth = |is: bool| if is { T::ONE } else { T::ZERO };
    let (was, is) = (before != T::ZERO, operand != T::ZERO);
    let swap = |does: bool| if does { operand } else { before };
    match op {
        Op::Min => swap(operand < before),
        Op::Max => swap(operand > before),
        Op::Sum => before.sum(operand),
        Op::Prod => before.product(operand),
        Op::Lor => truth(was || is),
        Op::Land => truth(was && is),
        Op::Lxor => truth(was != is),
        Op::Bor => before.bits(operand, |was, is| was | is),
        Op::Band => before.bits(operand, |was, is| was & is),
        Op::Bxor => before.bits(operand, |was, is| was ^ is),
        Op::Read => before,
        Op::Write => operand,
        Op::Cswap => swap(compare == before),
        Op::CswapNe => swap(compare != before),
        Op::CswapLe => swap(compare <= before),
        Op::CswapLt => swap(compare < before),
        Op::CswapGe => swap(compare >= before),
        Op::CswapGt => swap(compare > before),
        Op::Mswap => {
            let taken = operand.bits(compare, |is, mask| is & mask);
            taken.bits(before.bits(compare, |was, mask| was & !mask), |is, was| is | was)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operator_does_what_libfabric_says() {
        let with = |op, compare: i32| {
            let bytes = |number: i32| number.to_le_bytes();
            let after = Datatype::I32.apply(op, &bytes(6), &bytes(-3), &bytes(compare));
            i32::from_le_bytes(after.try_into().unwrap())
        };
        let plain = [
            (Op::Min, -3),
            (Op::Max, 6),
            (Op::Sum, 3),
            (Op::Prod, -18),
            (Op::Lor, 1),
            (Op::Land, 1),
            (Op::Lxor, 0),
            (Op::Bor, 6 | -3),
            (Op::Band, 6 & -3),
            (Op::Bxor, 6 ^ -3),
            (Op::Read, 6),
            (Op::Write, -3),
        ];
        for (op, after) in plain {
            assert_eq!(with(op, 0), after, "{op:?}");
        }
        let compared = [
            (Op::Cswap, [6, -3, 6]),
            (Op::CswapNe, [-3, 6, -3]),
            (Op::CswapLe, [-3, -3, 6]),
            (Op::CswapLt, [-3, 6, 6]),
            (Op::CswapGe, [6, -3, -3]),
            (Op::CswapGt, [6, 6, -3]),
        ];
        for (op, after) in compared {
            assert_eq!([5, 6, 7].map(|compare| with(op, compare)), after, "{op:?}");
        }
        assert_eq!(with(Op::Mswap, 0xf0), (-3 & 0xf0) | (6 & !0xf0));
    }

    #[test]
    fn elements_are_taken_one_by_one_and_wrap_around() {
        assert_eq!(Datatype::U8.apply(Op::Sum, &[255, 1], &[2, 3], &[]), [1, 4]);
        let bytes = |parts: [f64; 4]| parts.map(f64::to_le_bytes).concat();
        let product =
            Datatype::C64.apply(Op::Prod, &bytes([1.0, 2.0, 0.0, 1.0]), &bytes([3.0, 4.0, 0.0, 1.0]), &[]);
        assert_eq!(product, bytes([-5.0, 10.0, -1.0, 0.0]));
        let half = 0.5_f32.to_le_bytes();
        assert_eq!(Datatype::F32.apply(Op::Land, &half, &half, &[]), 1.0_f32.to_le_bytes());
    }

    #[test]
    fn bits_are_those_of_whole_numbers_and_order_is_not_for_complex_ones() {
        let forms = [Form::Plain, Form::Fetch, Form::Compare];
        for code in 0..=u8::MAX {
            let (Some(op), datatypes) = (Op::of(code), (0..=u8::MAX).filter_map(Datatype::of)) else {
                continue;
            };
            for datatype in datatypes {
                let taken = forms.map(|form| datatype.takes(form, op));
                assert!(!taken[2] || !taken[1], "{op:?} fetches or compares");
                assert!(!taken[0] || taken[1], "{op:?} fetches where it need not");
            }
        }
        assert!(!Datatype::F64.takes(Form::Plain, Op::Bxor) && !Datatype::C32.takes(Form::Fetch, Op::Max));
        assert!(Datatype::U128.takes(Form::Compare, Op::Mswap) && !Datatype::U8.takes(Form::Plain, Op::Read));
    }
}
