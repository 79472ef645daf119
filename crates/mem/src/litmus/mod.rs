//! Litmus tests: the smallest programs that tell what the machine may do.
//!
//! Each is data, so that the same program is walked through every state of the model and run between two real hosts ([`run_host`]).

mod deaths;
pub(crate) mod onhost;

use std::fmt;

use crate::{Coherence, Offset};

pub use deaths::{DEATHS, DeathLitmus};
pub use onhost::{Family, LITMUS_BYTES, LitmusError, Tally, Verdict, run_host};

/// A word of a test: which line, and which word of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// How programs call it.
    pub name: &'static str,
    /// Its line, from 0.
    pub line: u8,
    /// Its place in the line.
    pub word: u8,
}

impl Place {
    #[cfg(feature = "model")]
    pub(crate) fn index(self) -> u32 {
        u32::from(self.line) * 8 + u32::from(self.word)
    }

    pub(crate) fn offset(self, base: Offset) -> Offset {
        base.lines(self.line.into()).word(self.word.into())
    }
}

/// One operation of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A store.
    Store(Place, u64),
    /// A non-temporal store.
    StoreNt(Place, u64),
    /// A load; what it sees is part of the outcome.
    Load(Place),
    /// `clwb` of a line.
    WriteBack(Place),
    /// `clflushopt` of a line.
    Invalidate(Place),
    /// `clflush` of a line, which stores do not pass. No protocol uses it, so only the model runs it.
    Flush(Place),
    /// `sfence`.
    Sfence,
    /// `mfence`.
    Mfence,
    /// `mfence` where software keeps coherence, nothing elsewhere.
    FenceInvalidations,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Store(place, value) => write!(f, "{}={value}", place.name),
            Self::StoreNt(place, value) => write!(f, "{}=nt {value}", place.name),
            Self::Load(place) => write!(f, "read {}", place.name),
            Self::WriteBack(place) => write!(f, "clwb {}", place.name),
            Self::Invalidate(place) => write!(f, "clflushopt {}", place.name),
            Self::Flush(place) => write!(f, "clflush {}", place.name),
            Self::Sfence => f.write_str("sfence"),
            Self::Mfence => f.write_str("mfence"),
            Self::FenceInvalidations => f.write_str("mfence*"),
        }
    }
}

/// One thread of a test.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// Where it runs.
    pub host: u16,
    /// What it does.
    pub steps: &'static [Step],
}

/// One test. All words are 0 at first; an outcome is what the loads saw, thread by thread, and then the words `last` in
/// memory after everything has reached it.
#[derive(Clone, Copy, Debug)]
pub struct Litmus {
    /// Its name.
    pub name: &'static str,
    /// The threads.
    pub threads: &'static [Program],
    /// Words of memory that belong to the outcome.
    pub last: &'static [Place],
    /// The last load is of a checksum over the two before it: outcomes whose checksum is wrong are thrown away.
    pub sealed: bool,
    /// What may be seen where software keeps coherence; an outcome that was thrown away is empty.
    pub allowed: &'static [&'static [u64]],
    /// What may be seen where caches agree, by whoever's work: on coherent memory and on hdm-db.
    pub coherent: &'static [&'static [u64]],
    /// The outcome that a protocol fears.
    pub feared: &'static [u64],
}

/// The checksum that stands for 64 bits of XXH3: only the pairs that were written have a value.
fn seal(a: u64, b: u64) -> u64 {
    match (a, b) {
        (0, 0) => 0,
        (1, 1) => 7,
        _ => u64::MAX,
    }
}

impl Litmus {
    /// The words that the test names.
    pub fn places(&self) -> impl Iterator<Item = Place> + '_ {
        self.steps().filter_map(Step::place).chain(self.last.iter().copied())
    }

    fn steps(&self) -> impl Iterator<Item = Step> + '_ {
        self.threads.iter().flat_map(|thread| thread.steps.iter().copied())
    }

    /// The words of a line that the test uses, as a bit set.
    #[cfg(feature = "model")]
    pub(crate) fn words(&self) -> u8 {
        self.places().fold(0, |words, place| words | 1 << place.word)
    }

    /// Whether two processes on two hosts can run it on real memory.
    #[must_use]
    pub fn runs_on_two_hosts(&self) -> bool {
        let hosts: Vec<u16> = self.threads.iter().map(|thread| thread.host).collect();
        hosts == [0, 1] && !self.needs_clflush()
    }

    /// Whether only the machine can run it, not a [`Memory`](crate::Memory).
    pub(crate) fn needs_clflush(&self) -> bool {
        self.steps().any(|step| matches!(step, Step::Flush(_)))
    }

    /// Throws away what a checksum shows to be torn.
    pub(crate) fn judge(&self, outcome: Vec<u64>) -> Vec<u64> {
        match outcome[..] {
            [a, b, sum] if self.sealed && sum != seal(a, b) => Vec::new(),
            _ => outcome,
        }
    }

    /// What may be seen.
    #[must_use]
    pub fn allowed(&self, coherence: Coherence) -> &'static [&'static [u64]] {
        if coherence.needs_invalidation() { self.allowed } else { self.coherent }
    }

    /// Whether this test may show what a protocol fears, because it lacks a flush or a fence.
    #[must_use]
    pub fn is_control(&self, coherence: Coherence) -> bool {
        self.allowed(coherence).iter().any(|outcome| self.is_relaxed(outcome, coherence))
    }

    /// Whether an outcome is one that a control is there to show: what a protocol fears, or what coherent memory never shows.
    #[must_use]
    pub fn is_relaxed(&self, outcome: &[u64], coherence: Coherence) -> bool {
        let is_allowed = self.allowed(coherence).contains(&outcome);
        is_allowed && (outcome == self.feared || !self.coherent.contains(&outcome))
    }

    /// Everything that loads of the stored values could return, and that is not allowed.
    #[must_use]
    pub fn forbidden(&self) -> Vec<Vec<u64>> {
        let loads =
            self.steps().filter_map(|step| if let Step::Load(place) = step { Some(place) } else { None });
        let mut outcomes = vec![Vec::new()];
        for place in loads.chain(self.last.iter().copied()) {
            let mut values: Vec<u64> = vec![0];
            values.extend(self.steps().filter_map(|step| match step {
                Step::Store(at, value) | Step::StoreNt(at, value) if at == place => Some(value),
                _ => None,
            }));
            outcomes = outcomes
                .iter()
                .flat_map(|outcome| values.iter().map(move |value| [&outcome[..], &[*value]].concat()))
                .collect();
        }
        outcomes.retain(|outcome| {
            !self.allowed.contains(&&outcome[..]) && !self.judge(outcome.clone()).is_empty()
        });
        outcomes
    }
}

impl Step {
    fn place(self) -> Option<Place> {
        match self {
            Self::Store(place, _) | Self::StoreNt(place, _) | Self::Load(place) => Some(place),
            Self::WriteBack(place) | Self::Invalidate(place) | Self::Flush(place) => Some(place),
            Self::Sfence | Self::Mfence | Self::FenceInvalidations => None,
        }
    }
}

const X: Place = Place { name: "X", line: 0, word: 0 };
/// On the line of `X`.
const X1: Place = Place { name: "X.1", line: 0, word: 1 };
const X2: Place = Place { name: "X.2", line: 0, word: 2 };
const Y: Place = Place { name: "Y", line: 1, word: 0 };

use Step::{
    FenceInvalidations as WaitInvalidations, Flush, Invalidate, Load, Mfence, Sfence, Store, StoreNt,
    WriteBack,
};

/// A thread on a host.
const fn on(host: u16, steps: &'static [Step]) -> Program {
    Program { host, steps }
}

/// Rule 2: payload, write-back, fence; sequence, write-back, fence.
const PUBLISH: Program = on(0, &[Store(X, 1), WriteBack(X), Sfence, Store(Y, 1), WriteBack(Y), Sfence]);
/// Rule 3: sequence afresh, then payload afresh.
const CONSUME: Program =
    on(1, &[Invalidate(Y), WaitInvalidations, Load(Y), Invalidate(X), WaitInvalidations, Load(X)]);

/// A payload alone.
const WRITE: Program = on(0, &[Store(X, 1), WriteBack(X), Sfence]);

/// What may be seen by a reader of the sequence and then the payload: all but the new sequence with the old payload.
const IN_ORDER: &[&[u64]] = &[&[0, 0], &[0, 1], &[1, 1]];
const ANY: &[&[u64]] = &[&[0, 0], &[0, 1], &[1, 0], &[1, 1]];
const STALE: &[u64] = &[1, 0];

/// A test of a payload and its sequence: coherent memory shows them in order.
const fn passing(
    name: &'static str,
    threads: &'static [Program],
    allowed: &'static [&'static [u64]],
) -> Litmus {
    Litmus { name, threads, last: &[], sealed: false, allowed, coherent: IN_ORDER, feared: STALE }
}

/// The same where a third thread passes the payload on.
const fn passed_on(
    name: &'static str,
    threads: &'static [Program],
    allowed: &'static [&'static [u64]],
) -> Litmus {
    Litmus { coherent: BUT_STALE, feared: &[1, 1, 0], ..passing(name, threads, allowed) }
}

/// Two hosts of which each stores a word and reads the other's.
const fn buffering(
    name: &'static str,
    threads: &'static [Program],
    allowed: &'static [&'static [u64]],
) -> Litmus {
    Litmus { coherent: ANY, feared: &[0, 0], ..passing(name, threads, allowed) }
}

/// Two threads that write a word each of one line.
const fn sharing(
    name: &'static str,
    threads: &'static [Program],
    allowed: &'static [&'static [u64]],
) -> Litmus {
    Litmus { last: &[X, X1], coherent: &[&[1, 1]], ..passing(name, threads, allowed) }
}

/// The tests.
pub const TESTS: &[Litmus] = &[
    passing("message passing", &[PUBLISH, CONSUME], IN_ORDER),
    passing(
        "… the payload is not written back",
        &[on(0, &[Store(X, 1), Sfence, Store(Y, 1), WriteBack(Y), Sfence]), CONSUME],
        ANY,
    ),
    passing(
        "… no fence between payload and sequence",
        &[on(0, &[Store(X, 1), WriteBack(X), Store(Y, 1), WriteBack(Y), Sfence]), CONSUME],
        ANY,
    ),
    passing(
        "… the fence stands before the write-back",
        &[on(0, &[Store(X, 1), Sfence, WriteBack(X), Store(Y, 1), WriteBack(Y), Sfence]), CONSUME],
        ANY,
    ),
    passing(
        "… the payload is not invalidated",
        &[PUBLISH, on(1, &[Invalidate(Y), WaitInvalidations, Load(Y), Load(X)])],
        ANY,
    ),
    passing(
        "… the payload is invalidated before the sequence is read",
        &[PUBLISH, on(1, &[Invalidate(Y), Invalidate(X), WaitInvalidations, Load(Y), Load(X)])],
        ANY,
    ),
    passing(
        "… each read after a fence and then a flush, as in the cMPI paper",
        &[PUBLISH, on(1, &[Mfence, Invalidate(Y), Load(Y), Mfence, Invalidate(X), Load(X)])],
        ANY,
    ),
    passing(
        "… the reader's fence is an sfence",
        &[PUBLISH, on(1, &[Invalidate(Y), Sfence, Load(Y), Invalidate(X), Sfence, Load(X)])],
        ANY,
    ),
    passing(
        "… the reader writes back instead of invalidating",
        &[
            PUBLISH,
            on(1, &[Invalidate(Y), WaitInvalidations, Load(Y), WriteBack(X), WaitInvalidations, Load(X)]),
        ],
        ANY,
    ),
    passing(
        "… clflushopt and no fence between payload and sequence",
        &[on(0, &[Store(X, 1), Invalidate(X), Store(Y, 1), Invalidate(Y), Sfence]), CONSUME],
        ANY,
    ),
    passing(
        "… clflush and no fence between payload and sequence",
        &[on(0, &[Store(X, 1), Flush(X), Store(Y, 1), Flush(Y)]), CONSUME],
        IN_ORDER,
    ),
    passing(
        "… a non-temporal payload",
        &[on(0, &[StoreNt(X, 1), Sfence, Store(Y, 1), WriteBack(Y), Sfence]), CONSUME],
        IN_ORDER,
    ),
    Litmus {
        coherent: ANY,
        ..passing(
            "… a non-temporal payload and no fence",
            &[on(0, &[StoreNt(X, 1), Store(Y, 1), WriteBack(Y), Sfence]), CONSUME],
            ANY,
        )
    },
    passed_on(
        "… passed on by a third host",
        &[
            WRITE,
            on(1, &[Invalidate(X), WaitInvalidations, Load(X), Store(Y, 1), WriteBack(Y), Sfence]),
            Program { host: 2, ..CONSUME },
        ],
        BUT_STALE,
    ),
    passed_on(
        "… passed on by a thread of the writer's host, which saw it in their cache",
        &[WRITE, on(0, &[Load(X), Store(Y, 1), WriteBack(Y), Sfence]), CONSUME],
        ANY_OF_THREE,
    ),
    passed_on(
        "… passed on by a thread of the writer's host, which writes it back itself",
        &[WRITE, on(0, &[Load(X), WriteBack(X), Sfence, Store(Y, 1), WriteBack(Y), Sfence]), CONSUME],
        BUT_STALE,
    ),
    Litmus {
        coherent: ONE_SEES,
        ..buffering(
            "store buffering: announce, mfence, scan",
            &[
                on(0, &[Store(X, 1), WriteBack(X), Mfence, Invalidate(Y), WaitInvalidations, Load(Y)]),
                on(1, &[Store(Y, 1), WriteBack(Y), Mfence, Invalidate(X), WaitInvalidations, Load(X)]),
            ],
            ONE_SEES,
        )
    },
    buffering(
        "… sfence instead of mfence",
        &[
            on(0, &[Store(X, 1), WriteBack(X), Sfence, Invalidate(Y), WaitInvalidations, Load(Y)]),
            on(1, &[Store(Y, 1), WriteBack(Y), Sfence, Invalidate(X), WaitInvalidations, Load(X)]),
        ],
        ONE_SEES,
    ),
    buffering(
        "… sfence everywhere",
        &[
            on(0, &[Store(X, 1), WriteBack(X), Sfence, Invalidate(Y), Sfence, Load(Y)]),
            on(1, &[Store(Y, 1), WriteBack(Y), Sfence, Invalidate(X), Sfence, Load(X)]),
        ],
        ANY,
    ),
    buffering(
        "… no fence",
        &[
            on(0, &[Store(X, 1), WriteBack(X), Invalidate(Y), Load(Y)]),
            on(1, &[Store(Y, 1), WriteBack(Y), Invalidate(X), Load(X)]),
        ],
        ANY,
    ),
    Litmus {
        name: "load buffering",
        threads: &[
            on(0, &[Load(X), Store(Y, 1), WriteBack(Y), Sfence]),
            on(1, &[Load(Y), Store(X, 1), WriteBack(X), Sfence]),
        ],
        last: &[],
        sealed: false,
        allowed: &[&[0, 0], &[0, 1], &[1, 0]],
        coherent: &[&[0, 0], &[0, 1], &[1, 0]],
        feared: &[1, 1],
    },
    passing("a word read twice", &[WRITE, on(1, &[Load(X), Load(X)])], IN_ORDER),
    passing(
        "torn line",
        &[
            on(0, &[Store(X, 1), Store(X1, 1), WriteBack(X), Sfence]),
            on(1, &[Invalidate(X), WaitInvalidations, Load(X1), Load(X)]),
        ],
        ANY,
    ),
    Litmus {
        name: "… a sequence at both ends",
        threads: &[
            on(0, &[Store(X, 1), Store(X1, 1), Store(X2, 1), WriteBack(X), Sfence]),
            on(1, &[Invalidate(X), WaitInvalidations, Load(X), Load(X2), Load(X1)]),
        ],
        last: &[],
        sealed: false,
        allowed: ANY_OF_THREE,
        coherent: &[&[0, 0, 0], &[0, 0, 1], &[0, 1, 1], &[1, 0, 0], &[1, 0, 1], &[1, 1, 1]],
        feared: &[1, 1, 0],
    },
    Litmus {
        name: "… a checksum",
        threads: &[
            on(0, &[Store(X, 1), Store(X1, 1), Store(X2, 7), WriteBack(X), Sfence]),
            on(1, &[Invalidate(X), WaitInvalidations, Load(X), Load(X1), Load(X2)]),
        ],
        last: &[],
        sealed: true,
        allowed: &[&[], &[0, 0, 0], &[1, 1, 7]],
        coherent: &[&[], &[0, 0, 0], &[1, 1, 7]],
        feared: &[1, 0, 7],
    },
    Litmus {
        feared: &[0, 0],
        ..sharing(
            "false sharing: two hosts write one line",
            &[WRITE, on(1, &[Store(X1, 1), WriteBack(X), Sfence])],
            ANY,
        )
    },
    Litmus {
        feared: &[0, 0],
        ..sharing(
            "… invalidated before each store",
            &[
                on(0, &[Invalidate(X), Mfence, Store(X, 1), WriteBack(X), Sfence]),
                on(1, &[Invalidate(X), Mfence, Store(X1, 1), WriteBack(X), Sfence]),
            ],
            ANY,
        )
    },
    sharing("… two threads of one host", &[WRITE, on(0, &[Store(X1, 1), WriteBack(X), Sfence])], &[&[1, 1]]),
    sharing(
        "… non-temporal stores",
        &[on(0, &[StoreNt(X, 1), Sfence]), on(1, &[StoreNt(X1, 1), Sfence])],
        &[&[1, 1]],
    ),
    Litmus {
        feared: &[0, 1],
        ..sharing(
            "… a non-temporal store against a store",
            &[on(0, &[StoreNt(X, 1), Sfence]), on(1, &[Store(X1, 1), WriteBack(X), Sfence])],
            &[&[0, 1], &[1, 1]],
        )
    },
    Litmus {
        name: "a store after the write-back of its line",
        threads: &[
            on(0, &[Store(X, 1), WriteBack(X), Store(X, 2), Sfence, Store(Y, 1), WriteBack(Y), Sfence]),
            CONSUME,
        ],
        last: &[],
        sealed: false,
        allowed: &[&[0, 0], &[0, 1], &[0, 2], &[1, 1], &[1, 2]],
        coherent: &[&[0, 0], &[0, 1], &[0, 2], &[1, 2]],
        feared: &[1, 1],
    },
];

const ONE_SEES: &[&[u64]] = &[&[0, 1], &[1, 0], &[1, 1]];
const BUT_STALE: &[&[u64]] =
    &[&[0, 0, 0], &[0, 0, 1], &[0, 1, 0], &[0, 1, 1], &[1, 0, 0], &[1, 0, 1], &[1, 1, 1]];
const ANY_OF_THREE: &[&[u64]] =
    &[&[0, 0, 0], &[0, 0, 1], &[0, 1, 0], &[0, 1, 1], &[1, 0, 0], &[1, 0, 1], &[1, 1, 0], &[1, 1, 1]];
