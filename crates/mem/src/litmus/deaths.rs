//! Litmus tests with a death: one host may die between any two steps, and the others read what is left.

use super::{
    ANY, ANY_OF_THREE, BUT_STALE, CONSUME, IN_ORDER, Litmus, Load, PUBLISH, Program, Sfence, Store, StoreNt,
    WRITE, WaitInvalidations, X1, on, passed_on, passing,
};
use super::{Invalidate, WriteBack, X, Y};
use crate::Coherence;

/// A litmus test whose host 0, or another that it names, may die at any point.
#[derive(Clone, Copy, Debug)]
pub struct DeathLitmus {
    /// The program, with what may be seen on software-coherent and on coherent memory.
    pub test: Litmus,
    /// The host that may die. Its loads are no part of the outcome.
    pub dies: u16,
    /// What may be seen where the device keeps coherence, and a remote read writes the line back.
    pub written_back: &'static [&'static [u64]],
    /// The same, where a dirty line goes to another host's cache as it is.
    pub kept_dirty: &'static [&'static [u64]],
}

impl DeathLitmus {
    /// What may be seen on memory of this kind, of which `keeps_dirty` says how dirty lines go from host to host.
    #[must_use]
    pub fn allowed(&self, coherence: Coherence, keeps_dirty: bool) -> &'static [&'static [u64]] {
        match coherence {
            Coherence::HdmDb if keeps_dirty => self.kept_dirty,
            Coherence::HdmDb => self.written_back,
            _ => self.test.allowed(coherence),
        }
    }
}

/// Host 1 reads what host 0 only stored, and passes it on with a sequence.
const BROKER: Program =
    on(1, &[Invalidate(X), WaitInvalidations, Load(X), Store(Y, 1), WriteBack(Y), Sfence]);
/// The same, writing back the line of the dead before that.
const CAREFUL_BROKER: Program = on(
    1,
    &[Invalidate(X), WaitInvalidations, Load(X), WriteBack(X), Sfence, Store(Y, 1), WriteBack(Y), Sfence],
);
const READER: Program = Program { host: 2, ..CONSUME };

const READ_TWICE: Program =
    on(1, &[Invalidate(X), WaitInvalidations, Load(X), Invalidate(X), WaitInvalidations, Load(X)]);

/// A test in which host 0 may die.
const fn first_dies(
    test: Litmus,
    written_back: &'static [&'static [u64]],
    kept_dirty: &'static [&'static [u64]],
) -> DeathLitmus {
    DeathLitmus { test, dies: 0, written_back, kept_dirty }
}

/// The tests.
pub const DEATHS: &[DeathLitmus] = &[
    first_dies(passing("message passing", &[PUBLISH, CONSUME], IN_ORDER), IN_ORDER, IN_ORDER),
    first_dies(
        passing(
            "… nothing is written back",
            &[on(0, &[Store(X, 1), Sfence, Store(Y, 1), Sfence]), CONSUME],
            ANY,
        ),
        ANY,
        ANY,
    ),
    first_dies(
        passing(
            "… the payload is not written back",
            &[on(0, &[Store(X, 1), Sfence, Store(Y, 1), WriteBack(Y), Sfence]), CONSUME],
            ANY,
        ),
        ANY,
        ANY,
    ),
    first_dies(
        passing(
            "… no fence between payload and sequence",
            &[on(0, &[Store(X, 1), WriteBack(X), Store(Y, 1), WriteBack(Y), Sfence]), CONSUME],
            ANY,
        ),
        ANY,
        ANY,
    ),
    first_dies(
        passing(
            "… the sequence is not written back",
            &[on(0, &[Store(X, 1), WriteBack(X), Sfence, Store(Y, 1)]), CONSUME],
            IN_ORDER,
        ),
        IN_ORDER,
        IN_ORDER,
    ),
    first_dies(
        passing(
            "… a non-temporal payload",
            &[on(0, &[StoreNt(X, 1), Sfence, Store(Y, 1), WriteBack(Y), Sfence]), CONSUME],
            IN_ORDER,
        ),
        IN_ORDER,
        IN_ORDER,
    ),
    first_dies(passing("a word read twice", &[WRITE, READ_TWICE], IN_ORDER), IN_ORDER, ANY),
    first_dies(
        passed_on("… passed on by another host", &[WRITE, BROKER, READER], BUT_STALE),
        BUT_STALE,
        ANY_OF_THREE,
    ),
    first_dies(
        passed_on(
            "… passed on by another host, which writes it back itself",
            &[WRITE, CAREFUL_BROKER, READER],
            BUT_STALE,
        ),
        BUT_STALE,
        ANY_OF_THREE,
    ),
    DeathLitmus {
        test: Litmus {
            name: "two hosts write one line, and the other one dies",
            threads: &[WRITE, on(1, &[Store(X1, 1), WriteBack(X), Sfence])],
            last: &[X, X1],
            sealed: false,
            allowed: ANY,
            coherent: &[&[1, 0], &[1, 1]],
            feared: &[0, 0],
        },
        dies: 1,
        written_back: &[&[1, 0], &[1, 1]],
        kept_dirty: ANY,
    },
];
