//! What was called when, and whether any order of the calls explains what came of them.

/// Owner and generation of an object.
pub(super) type Id = (u16, u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Create,
    Open,
    Destroy,
}

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// It did not: its process died in it.
    Never,
    /// It succeeded.
    Done(Option<Id>),
    /// The name existed, or did not.
    Refused,
    /// There was no room.
    Short,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    what: What,
    name: usize,
    begin: u64,
    end: u64,
    how: End,
}

impl Call {
    /// Whether it may have had its effect.
    fn may_have_worked(&self) -> bool {
        matches!(self.how, End::Done(_) | End::Never)
    }
}

/// All calls of a schedule.
#[derive(Debug, Default)]
pub(super) struct History {
    clock: u64,
    calls: Vec<Call>,
}

impl History {
    pub(super) fn begin(&mut self, what: What, name: usize) -> usize {
        self.clock += 1;
        self.calls.push(Call { what, name, begin: self.clock, end: u64::MAX, how: End::Never });
        self.calls.len() - 1
    }

    pub(super) fn end(&mut self, call: usize, how: End) {
        self.clock += 1;
        self.calls[call].end = self.clock;
        self.calls[call].how = how;
    }

    fn of(&self, name: usize, what: What) -> impl Iterator<Item = &Call> {
        self.calls.iter().filter(move |call| call.name == name && call.what == what)
    }

    /// Calls that may have destroyed what `create` made, before `until`.
    fn may_be_destroyed(&self, create: &Call, until: u64) -> bool {
        self.of(create.name, What::Destroy)
            .any(|call| call.may_have_worked() && call.begin < until && call.end > create.begin)
    }

    /// Whether what `create` made was surely gone before `when`: a destroy that began after it was there succeeded.
    fn was_gone(&self, create: &Call, when: u64) -> bool {
        self.of(create.name, What::Destroy)
            .any(|call| matches!(call.how, End::Done(_)) && call.begin > create.end && call.end < when)
    }

    /// Objects of this name that were created, and that no call may have destroyed.
    pub(super) fn never_destroyed(&self, name: usize) -> impl Iterator<Item = Id> {
        self.of(name, What::Create).filter_map(|create| match create.how {
            End::Done(Some(id)) if !self.may_be_destroyed(create, u64::MAX) => Some(id),
            _ => None,
        })
    }

    /// # Panics
    /// When no order of the calls explains one.
    pub(super) fn judge(&self) {
        for call in &self.calls {
            match (call.what, call.how) {
                (_, End::Never | End::Short) | (What::Destroy, End::Done(_)) => {}
                (What::Create, End::Done(_)) => self.judge_created(call),
                (What::Open, End::Done(id)) => self.judge_opened(call, id),
                (What::Create, End::Refused) => self.judge_exists(call),
                (What::Open | What::Destroy, End::Refused) => self.judge_not_found(call),
            }
        }
    }

    /// Of two objects of one name the one must have been destroyed before the other was there.
    fn judge_created(&self, call: &Call) {
        for other in self.of(call.name, What::Create) {
            let before = matches!(other.how, End::Done(_)) && other.end < call.end;
            // A call may have gone on for long after its object was there.
            let after = call.begin < other.end && self.may_be_destroyed(call, other.end);
            assert!(
                !before || after || self.may_be_destroyed(other, call.end),
                "{call:?} succeeded while {other:?} stood: {self:#?}"
            );
        }
    }

    fn judge_opened(&self, call: &Call, id: Option<Id>) {
        let made = |create: &&Call| {
            create.begin < call.end && (create.how == End::Done(id) || create.how == End::Never)
        };
        let stood =
            self.of(call.name, What::Create).filter(made).any(|create| !self.was_gone(create, call.begin));
        assert!(stood, "{call:?} opened what was gone, or never was: {self:#?}");
    }

    fn judge_exists(&self, call: &Call) {
        let stood = self.of(call.name, What::Create).any(|create| {
            let another = create.begin != call.begin && create.may_have_worked();
            another && create.begin < call.end && !self.was_gone(create, call.begin)
        });
        assert!(stood, "{call:?} was refused, and nothing stood: {self:#?}");
    }

    fn judge_not_found(&self, call: &Call) {
        for create in self.of(call.name, What::Create) {
            let stood = matches!(create.how, End::Done(_)) && create.end < call.begin;
            assert!(
                !stood || self.may_be_destroyed(create, call.end),
                "{call:?} did not find what {create:?} made: {self:#?}"
            );
        }
    }
}
