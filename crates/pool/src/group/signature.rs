//! An operation in one word, by which ranks notice that they called different ones.
//!
//! # Bits of a signature
//! | bits | what |
//! |---|---|
//! | 0..38 | bytes of the message; in a group's first barrier, the low 38 bits of a hash of its extents |
//! | 38..50 | root; 1 where ranks of an all-to-all tell each other the lengths of parts |
//! | 50 | 1 where the data lives in the pool |
//! | 51..55 | 0 none, 1 sum, 2 product, 3 min, 4 max, 5 average, 6 and, 7 or, 8 xor |
//! | 55..60 | 0 none, 1 float64, 2 float32, 3 bfloat16, 4 float16, 5 uint8, 6 int8, 7 uint16, 8 int16, 9 uint32, 10 int32, 11 uint64, 12 int64 |
//! | 60..64 | 1 barrier, 2 broadcast, 3 reduce, 4 all-reduce, 5 reduce-scatter, 6 all-gather, 7 gather, 8 scatter, 9 all-to-all |

use std::fmt;

use polder_kernels::{Dtype, Op};
use polder_schedule::Collective;

/// A collective with its element type, operator, root, place and bytes. Zero, which no collective has, is what a rank
/// publishes before its first operation.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Signature(u64);

const ROOT: u32 = 38;
const PLACE: u32 = 50;
const OP: u32 = 51;
const DTYPE: u32 = 55;
const COLLECTIVE: u32 = 60;

/// The bytes that one operation may move.
pub(crate) const MAX_BYTES: u64 = (1 << ROOT) - 1;
/// The ranks that a group may have.
pub(crate) const MAX_RANKS: usize = 1 << (PLACE - ROOT);

impl Signature {
    /// The signature of an operation on `bytes` bytes, at most 256 GiB, of every rank.
    pub(crate) fn new(collective: Collective, root: usize, bytes: u64) -> Self {
        assert!(bytes <= MAX_BYTES && root < MAX_RANKS, "{collective} of {bytes} bytes at root {root}");
        let code = position(&Collective::ALL, collective) + 1;
        Self(bytes | (root as u64) << ROOT | code << COLLECTIVE)
    }

    /// Of elements of this type.
    pub(crate) fn of(self, dtype: Dtype) -> Self {
        Self(self.0 | (position(&Dtype::ALL, dtype) + 1) << DTYPE)
    }

    pub(crate) fn reducing(self, op: Op) -> Self {
        Self(self.0 | (position(&Op::ALL, op) + 1) << OP)
    }

    /// Of an all-to-all in which ranks tell each other the lengths of parts.
    pub(crate) fn of_parts(self) -> Self {
        Self(self.0 | 1 << ROOT)
    }

    pub(crate) fn in_pool(self) -> Self {
        Self(self.0 | 1 << PLACE)
    }

    /// As it stands in the pool.
    pub(crate) fn word(self) -> u64 {
        self.0
    }

    /// What a peer has published, which may be anything.
    pub(crate) fn parse(word: u64) -> Self {
        Self(word)
    }

    fn field(self, from: u32, to: u32) -> u64 {
        self.0 << (64 - to) >> (64 - to + from)
    }

    /// Which collective, when it is one.
    pub(crate) fn collective(self) -> Option<Collective> {
        at(&Collective::ALL, self.field(COLLECTIVE, 64))
    }

    /// Its name.
    pub(crate) fn name(self) -> &'static str {
        self.collective().map_or("an unknown operation", Collective::name)
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(collective) = self.collective() else {
            return write!(f, "an unknown operation {:#018x}", self.0);
        };
        f.write_str(collective.name())?;
        if collective == Collective::Barrier {
            return Ok(());
        }
        match (collective, self.field(ROOT, PLACE)) {
            (Collective::AllToAll, 1) => f.write_str(" of parts of any length")?,
            _ => write!(f, " of {} bytes", self.field(0, ROOT))?,
        }
        match (at(&Op::ALL, self.field(OP, DTYPE)), at(&Dtype::ALL, self.field(DTYPE, COLLECTIVE))) {
            (Some(op), Some(dtype)) => write!(f, " ({op} of {dtype})")?,
            (None, Some(dtype)) => write!(f, " ({dtype})")?,
            _ => {}
        }
        let has_root = [Collective::Broadcast, Collective::Reduce, Collective::Gather, Collective::Scatter];
        if has_root.contains(&collective) {
            write!(f, " with root {}", self.field(ROOT, PLACE))?;
        }
        if self.field(PLACE, OP) == 1 { f.write_str(" in the pool") } else { Ok(()) }
    }
}

impl fmt::Debug for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn position<T: PartialEq + Copy>(all: &[T], one: T) -> u64 {
    all.iter().position(|&other| other == one).expect("one of all") as u64
}

/// The value whose code, one more than its place, is `code`.
fn at<T: Copy>(all: &[T], code: u64) -> Option<T> {
    all.get(usize::try_from(code).ok()?.checked_sub(1)?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_says_what_it_is() {
        let sum = Signature::new(Collective::AllReduce, 0, 4096).of(Dtype::BF16).reducing(Op::Average);
        assert_eq!(sum.to_string(), "all-reduce of 4096 bytes (average of bfloat16)");
        let root = Signature::new(Collective::Broadcast, 7, 0).of(Dtype::I32).in_pool();
        let said = "broadcast of 0 bytes (int32) with root 7 in the pool";
        assert_eq!(Signature::parse(root.word()).to_string(), said);
        assert_eq!(Signature::new(Collective::Barrier, 0, 0).to_string(), "barrier");
    }

    #[test]
    fn codes_are_those_of_the_format() {
        let codes = |names: Vec<String>| {
            let coded = (1..).zip(names).map(|(code, name)| format!("{code} {name}"));
            coded.collect::<Vec<_>>().join(", ")
        };
        let table = include_str!("signature.rs");
        for row in [
            codes(Collective::ALL.map(|collective| collective.name().to_owned()).into()),
            format!("0 none, {}", codes(Op::ALL.map(|op| op.to_string()).into())),
            format!("0 none, {}", codes(Dtype::ALL.map(|dtype| dtype.to_string()).into())),
        ] {
            assert!(table.contains(&format!("| {row} |")), "{row}");
        }
    }

    #[test]
    fn any_word_can_be_shown() {
        for word in [0, u64::MAX, 1 << 63, 0x5555_5555_5555_5555] {
            assert!(!Signature::parse(word).to_string().is_empty());
        }
    }

    #[test]
    fn operations_that_differ_in_anything_have_different_signatures() {
        let base = Signature::new(Collective::Reduce, 0, 8).of(Dtype::F32).reducing(Op::Sum);
        let others = [
            Signature::new(Collective::AllReduce, 0, 8).of(Dtype::F32).reducing(Op::Sum),
            Signature::new(Collective::Reduce, 1, 8).of(Dtype::F32).reducing(Op::Sum),
            Signature::new(Collective::Reduce, 0, 16).of(Dtype::F32).reducing(Op::Sum),
            Signature::new(Collective::Reduce, 0, 8).of(Dtype::I32).reducing(Op::Sum),
            Signature::new(Collective::Reduce, 0, 8).of(Dtype::F32).reducing(Op::Max),
            base.in_pool(),
        ];
        assert!(others.iter().all(|other| *other != base));
    }
}
