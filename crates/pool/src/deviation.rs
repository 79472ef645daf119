//! What a suite of the model makes a protocol do otherwise. In the libraries that users load, this is nothing.

/// A change to a protocol: a mistake that its suite must notice, or a part that its suite leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Deviation {
    /// A claim goes on past that of a higher host, without waiting.
    LowerDoesNotWait,
    /// It looks at the others first, and takes without announcing.
    CheckThenSet,
    /// An update stores whole words where bytes beside it may be another's, and where nothing is changed.
    WholeWords,
    /// A wait for a lock of a window ends with the patience for one holder, also where others have it after another.
    WaitsOnce,
    /// Extents are used again without a look at who holds them open.
    IgnoreAnnouncements,
    /// An extent is free before what its host stored there has reached memory.
    FreeUnwritten,
    /// A look-up waits until a half-written line is whole, also when its writer is dead.
    WaitForHalfWritten,
    /// Another boot takes the id of a host that gives no sign of life, and may only stand still.
    SilenceIsEnough,
    /// What the host's own file does not know is taken for dead, without watching it.
    FileKnowsAll,
    /// A process comes with words of its own while the last one of its host is about to say that the host has left.
    LeftIsGone,
    /// A member does not look after the directory: the suites of membership leave that alone.
    WithoutObjects,
    /// A proxy stays at the shard that came first until every queue has it at its head.
    FirstComeFirstServed,
    /// A client pushes a shard into its window while another of the same bytes is not summed or pulled.
    WindowIsTaken,
    /// A proxy changes moments that it has not logged.
    StepsUnlogged,
    /// A client takes what a proxy keeps of a shard for whole, and does not look again.
    RecoversAtALook,
    /// A process that finds no part of another as an exchange begins says so, and not on whom the other gave up.
    MissingPartIsTheError,
    /// A process that fails the last barrier before an exchange says so in the group alone.
    GivesUpInSilence,
    /// A service ends with an error when a proxy has died of which nothing is awaited.
    IdleProxyIsMissed,
    /// The head of a version is published before its bytes are written.
    HeadFirst,
    /// Older versions are removed before the new one is published.
    RemoveFirst,
    /// A process takes a store whose owner lives.
    OwnsTheLiving,
    /// A process removes older versions without a look at what the others of its attempt have published.
    PrunesAlone,
    /// A process removes versions that its job could not read.
    IgnoresFloor,
    /// A process publishes, although another attempt has published since its own began.
    PublishesBehind,
    /// A process removes what the ranks left that its job has no more, before a version of the job is whole.
    ClearsAtOnce,
    /// A reader goes by a list of versions, and not by the marks.
    NewestByList,
    /// A reader takes two versions of one number for one, whichever attempts they are of.
    AnyAttempt,
    /// A piece of a message is taken out of send buffers without a look whether they are still its sender's.
    TakesUnchecked,
    /// A reader or a check of a cache does not look at the slot's line again.
    LooksOnce,
    /// An inspection does not look again whether an object is still there.
    JudgesOnce,
    /// An inspection does not look again which chunks hosts hold.
    CountsOnce,
    /// The owner of a slot of a cache does not look whether it is pinned.
    IgnoresPins,
    /// The header of an object is written back as far as its first line.
    WritesBackOneLine,
    /// What chunks a host holds stays in its caches.
    KeepsClaims,
    /// A slot of the directory is taken before the intent says so.
    IntendsLate,
    /// A slot of a cache is written before its line says that it is taken.
    TakesInSilence,
    /// A group that is asked says of every rank that it lives.
    NobodyHasDied,
    /// A rank that was stopped judges its peers at once, and by some naps, in which a peer may lack a CPU.
    CountsNaps,
    /// A rank takes the end of any collective for news of all ranks.
    EveryEndIsHeard,
    /// A rank that ends a group after a death in another one does not say so.
    KeepsDeathsToItself,
}

#[cfg(not(feature = "model"))]
impl Deviation {
    /// Never.
    pub(crate) const fn is_on(self) -> bool {
        false
    }
}

#[cfg(feature = "model")]
mod in_the_model {
    use std::cell::Cell;

    use super::Deviation;

    thread_local! {
        static ON: Cell<Option<Deviation>> = const { Cell::new(None) };
    }

    impl Deviation {
        /// Whether the schedule that this OS thread runs deviates so.
        pub(crate) fn is_on(self) -> bool {
            ON.get() == Some(self)
        }

        /// Runs one schedule so. All threads of a world run on one OS thread.
        pub(crate) fn during<R>(self, schedule: impl FnOnce() -> R) -> R {
            let _before = Before(ON.replace(Some(self)));
            schedule()
        }
    }

    /// What was on before, also when a schedule panics.
    struct Before(Option<Deviation>);

    impl Drop for Before {
        fn drop(&mut self) {
            ON.set(self.0);
        }
    }
}
