//! Litmus tests with a death: one host may die between any two steps, and the others read what is left.

use super::{
    ANY, CONSUME, IN_ORDER, Litmus, Load, PUBLISH, Program, Sfence, Store, StoreNt, WaitInvalidations,
};
use super::{Invalidate, WriteBack, X, X1, Y};
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

const fn passing(
    name: &'static str,
    threads: &'static [Program],
    allowed: &'static [&'static [u64]],
) -> Litmus {
    Litmus { name, threads, last: &[], sealed: false, allowed, coherent: IN_ORDER, feared: &[1, 0] }
}

/// Host 1 reads what host 0 only stored, and passes it on with a sequence.
const BROKER: Program = Program {
    host: 1,
    steps: &[Invalidate(X), WaitInvalidations, Load(X), Store(Y, 1), WriteBack(Y), Sfence],
};
/// The same, writing back the line of the dead before that.
const CAREFUL_BROKER: Program = Program {
    host: 1,
    steps: &[
        Invalidate(X),
        WaitInvalidations,
        Load(X),
        WriteBack(X),
        Sfence,
        Store(Y, 1),
        WriteBack(Y),
        Sfence,
    ],
};
const READER: Program = Program { host: 2, ..CONSUME };

const READ_TWICE: Program = Program {
    host: 1,
    steps: &[Invalidate(X), WaitInvalidations, Load(X), Invalidate(X), WaitInvalidations, Load(X)],
};

const BUT_LOST: &[&[u64]] = super::BUT_STALE;
const ANY_OF_THREE: &[&[u64]] = super::ANY_OF_THREE;

const fn passed_on(
    name: &'static str,
    threads: &'static [Program],
    allowed: &'static [&'static [u64]],
) -> Litmus {
    Litmus { name, threads, last: &[], sealed: false, allowed, coherent: BUT_LOST, feared: &[1, 1, 0] }
}

/// The tests.
pub const DEATHS: &[DeathLitmus] = &[
    DeathLitmus {
        test: passing("message passing", &[PUBLISH, CONSUME], IN_ORDER),
        dies: 0,
        written_back: IN_ORDER,
        kept_dirty: IN_ORDER,
    },
    DeathLitmus {
        test: passing(
            "… nothing is written back",
            &[Program { host: 0, steps: &[Store(X, 1), Sfence, Store(Y, 1), Sfence] }, CONSUME],
            ANY,
        ),
        dies: 0,
        written_back: ANY,
        kept_dirty: ANY,
    },
    DeathLitmus {
        test: passing(
            "… the payload is not written back",
            &[Program { host: 0, steps: &[Store(X, 1), Sfence, Store(Y, 1), WriteBack(Y), Sfence] }, CONSUME],
            ANY,
        ),
        dies: 0,
        written_back: ANY,
        kept_dirty: ANY,
    },
    DeathLitmus {
        test: passing(
            "… no fence between payload and sequence",
            &[
                Program { host: 0, steps: &[Store(X, 1), WriteBack(X), Store(Y, 1), WriteBack(Y), Sfence] },
                CONSUME,
            ],
            ANY,
        ),
        dies: 0,
        written_back: ANY,
        kept_dirty: ANY,
    },
    DeathLitmus {
        test: passing(
            "… the sequence is not written back",
            &[Program { host: 0, steps: &[Store(X, 1), WriteBack(X), Sfence, Store(Y, 1)] }, CONSUME],
            IN_ORDER,
        ),
        dies: 0,
        written_back: IN_ORDER,
        kept_dirty: IN_ORDER,
    },
    DeathLitmus {
        test: passing(
            "… a non-temporal payload",
            &[
                Program { host: 0, steps: &[StoreNt(X, 1), Sfence, Store(Y, 1), WriteBack(Y), Sfence] },
                CONSUME,
            ],
            IN_ORDER,
        ),
        dies: 0,
        written_back: IN_ORDER,
        kept_dirty: IN_ORDER,
    },
    DeathLitmus {
        test: passing(
            "a word read twice",
            &[Program { host: 0, steps: &[Store(X, 1), WriteBack(X), Sfence] }, READ_TWICE],
            IN_ORDER,
        ),
        dies: 0,
        written_back: IN_ORDER,
        kept_dirty: ANY,
    },
    DeathLitmus {
        test: passed_on(
            "… passed on by another host",
            &[Program { host: 0, steps: &[Store(X, 1), WriteBack(X), Sfence] }, BROKER, READER],
            BUT_LOST,
        ),
        dies: 0,
        written_back: BUT_LOST,
        kept_dirty: ANY_OF_THREE,
    },
    DeathLitmus {
        test: passed_on(
            "… passed on by another host, which writes it back itself",
            &[Program { host: 0, steps: &[Store(X, 1), WriteBack(X), Sfence] }, CAREFUL_BROKER, READER],
            BUT_LOST,
        ),
        dies: 0,
        written_back: BUT_LOST,
        kept_dirty: ANY_OF_THREE,
    },
    DeathLitmus {
        test: Litmus {
            name: "two hosts write one line, and the other one dies",
            threads: &[
                Program { host: 0, steps: &[Store(X, 1), WriteBack(X), Sfence] },
                Program { host: 1, steps: &[Store(X1, 1), WriteBack(X), Sfence] },
            ],
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
