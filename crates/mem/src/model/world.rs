//! Threads as coroutines, and the loop that runs them.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::rc::Rc;

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};

use super::explore::{self, Failure, Outcome};
use super::memory::ModelMemory;
use super::state::{Crash, Mode, Shape, State};
use crate::Offset;

/// Bytes of a thread's stack; the kernel gives only what is touched.
const STACK_BYTES: usize = 256 * 1024;

type Thread = Coroutine<(), (), ()>;
type Check = Box<dyn FnOnce()>;

/// What all handles of a world share.
pub(super) struct Core {
    pub(super) state: RefCell<State>,
    pub(super) bytes: Cell<u64>,
    /// How each thread leaves its coroutine; null before it has started.
    yielders: RefCell<Vec<*const Yielder<(), ()>>>,
}

impl Core {
    fn new() -> Self {
        LIVE_CORES.set(LIVE_CORES.get() + 1);
        Self { state: RefCell::default(), bytes: Cell::new(0), yielders: RefCell::default() }
    }

    /// Goes back to the loop in [`World::run`], from inside the coroutine of `thread`.
    pub(super) fn suspend(&self, thread: usize) {
        let yielder = self.yielders.borrow()[thread];
        assert!(!yielder.is_null(), "thread {thread} suspends before it has started");
        // SAFETY: the coroutine of `thread` stored this pointer to its own yielder when it started, and the yielder
        // lives as long as the coroutine's body runs. We are in that body: `thread` is the world's current thread,
        // which only the loop in `World::run` sets, to the coroutine that it then resumes.
        unsafe { &*yielder }.suspend(());
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        LIVE_CORES.set(LIVE_CORES.get() - 1);
    }
}

/// How many worlds of this OS thread have ended while handles of them are still there: each keeps its memory.
pub(super) fn held_worlds() -> usize {
    LIVE_CORES.get() - CORES.with_borrow(Vec::len)
}

thread_local! {
    static LIVE_CORES: Cell<usize> = const { Cell::new(0) };
    static CORES: RefCell<Vec<Rc<Core>>> = const { RefCell::new(Vec::new()) };
    static STACKS: RefCell<Vec<DefaultStack>> = const { RefCell::new(Vec::new()) };
}

/// A thread of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadId(usize);

/// One schedule: hosts with caches, threads on them, an adversary, and a seed that decides everything.
pub struct World {
    core: Rc<Core>,
    seed: u64,
    threads: Vec<Option<Thread>>,
    checks: Vec<Check>,
}

impl World {
    /// An empty world of zeros. How wild its adversary is comes from the seed too.
    ///
    /// # Panics
    /// When the shape has no hosts, more than 64, or bytes that are no whole lines.
    #[must_use]
    pub fn new(seed: u64, shape: Shape) -> Self {
        let core = CORES.with_borrow_mut(Vec::pop).unwrap_or_else(|| Rc::new(Core::new()));
        core.state.borrow_mut().reset(seed, shape);
        core.bytes.set(shape.bytes);
        core.yielders.borrow_mut().clear();
        Self { core, seed, threads: Vec::new(), checks: Vec::new() }
    }

    /// Runs `set_up` alone, as a process of host 0: it works on memory itself, with no caches between.
    pub fn setup<R>(&mut self, set_up: impl FnOnce(ModelMemory) -> R) -> R {
        self.setup_as(0, 0, set_up)
    }

    /// As [`World::setup`], as the process at `slot` of `host`. What it returns, handles included, may be moved into
    /// threads of that process.
    pub fn setup_as<R>(&mut self, host: u16, slot: u16, set_up: impl FnOnce(ModelMemory) -> R) -> R {
        set_up(self.memory(host, slot))
    }

    /// A handle for the process at `slot` of `host`.
    #[must_use]
    pub fn memory(&self, host: u16, slot: u16) -> ModelMemory {
        ModelMemory::new(Rc::clone(&self.core), host, slot)
    }

    /// Lets the adversary of this world do everything soon, whole and in order, whatever the seed says.
    pub fn calm(&mut self) {
        self.core.state.borrow_mut().calm();
    }

    /// Sets how many operations may pass before the schedule is called a livelock; 200,000 by default. Set-ups and
    /// checks may make a hundred times as many.
    pub fn budget(&mut self, operations: u64) {
        self.core.state.borrow_mut().budget = operations;
    }

    /// Adds a thread of the process at `slot` of `host`.
    pub fn spawn(&mut self, host: u16, slot: u16, body: impl FnOnce(ModelMemory) + 'static) -> ThreadId {
        self.add(host, slot, None, body)
    }

    /// Adds a thread that starts when `thread` has crashed, and never otherwise: a process that is started again, or a
    /// host that has booted again.
    pub fn spawn_after_crash(
        &mut self,
        thread: ThreadId,
        host: u16,
        slot: u16,
        body: impl FnOnce(ModelMemory) + 'static,
    ) -> ThreadId {
        self.add(host, slot, Some((thread.0, true)), body)
    }

    /// Adds a thread that starts when `thread` has returned or crashed.
    pub fn spawn_after(
        &mut self,
        thread: ThreadId,
        host: u16,
        slot: u16,
        body: impl FnOnce(ModelMemory) + 'static,
    ) -> ThreadId {
        self.add(host, slot, Some((thread.0, false)), body)
    }

    fn add(
        &mut self,
        host: u16,
        slot: u16,
        after: Option<(usize, bool)>,
        body: impl FnOnce(ModelMemory) + 'static,
    ) -> ThreadId {
        let thread = self.core.state.borrow_mut().add_thread(host, slot, after);
        self.core.yielders.borrow_mut().push(ptr::null());
        let memory = self.memory(host, slot);
        let stack = STACKS.with_borrow_mut(Vec::pop).unwrap_or_else(|| {
            DefaultStack::new(STACK_BYTES)
                .expect("address space for the stack of one more thread of the model")
        });
        self.threads.push(Some(Coroutine::with_stack(stack, move |yielder, ()| {
            let core = Rc::clone(memory.core());
            core.yielders.borrow_mut()[thread] = yielder;
            drop(core);
            body(memory);
        })));
        ThreadId(thread)
    }

    /// Lets `crash` fall at a random memory operation of `thread`, up to its 2,047th, early ones likelier. It does not
    /// fall when the thread returns before.
    pub fn crash(&mut self, thread: ThreadId, crash: Crash) {
        self.core.state.borrow_mut().plan_crash(thread.0, crash, None);
    }

    /// Lets `crash` fall at one of the first `operations` memory operations of `thread`, each as likely.
    pub fn crash_within(&mut self, thread: ThreadId, crash: Crash, operations: u64) {
        self.core.state.borrow_mut().plan_crash(thread.0, crash, Some(operations));
    }

    /// Lets `crash` fall just before the memory operation number `operation` of `thread`, from 0.
    pub fn crash_at(&mut self, thread: ThreadId, crash: Crash, operation: u64) {
        self.core.state.borrow_mut().plan_crash_at(thread.0, crash, operation);
    }

    /// Lets `crash` fall so many memory operations of `thread` after it has stored the word at `at`, for the first time after `before`
    /// others. It does not fall when the thread stores there less often.
    pub fn crash_past_store(
        &mut self,
        thread: ThreadId,
        crash: Crash,
        (at, before): (Offset, u64),
        operations: u64,
    ) {
        let mut state = self.core.state.borrow_mut();
        let word = state.word_index(at.0, "a crash past a store");
        state.aim_crash(thread.0, crash, word, before, operations);
    }

    /// Lets the line at `at` fail from the memory operation number `operation` of the whole world on, as poison or a lost
    /// link does. Set-up and checks do not meet it.
    pub fn poison(&mut self, at: Offset, operation: u64) {
        let mut state = self.core.state.borrow_mut();
        let word = state.word_index(at.line().0, "poison");
        state.poison(word, operation);
    }

    /// Lets lines fail that are dirty in the caches of a host when it dies, on memory that its device keeps coherent. Memory has what it
    /// had otherwise.
    pub fn poison_lost_lines(&mut self) {
        self.core.state.borrow_mut().machine.poison_lost_lines();
    }

    /// Adds a look at the end: it runs alone, as a process of `host`, after every thread has ended and everything that
    /// survived has reached memory.
    pub fn check(&mut self, host: u16, check: impl FnOnce(ModelMemory) + 'static) {
        let memory = self.memory(host, 0);
        self.checks.push(Box::new(move || check(memory)));
    }

    /// Memory operations that `thread` has made.
    #[must_use]
    pub fn operations(&self, thread: ThreadId) -> u64 {
        self.core.state.borrow().threads[thread.0].operations
    }

    /// Whether `thread` died in a crash.
    #[must_use]
    pub fn crashed(&self, thread: ThreadId) -> bool {
        self.core.state.borrow().threads[thread.0].crashed
    }

    /// Runs the schedule to its end. After a good one, handles work on what is then in memory.
    ///
    /// # Errors
    /// The [`Failure`] when a thread or a check panicked, the budget ended, or nobody could ever go on.
    pub fn run(&mut self) -> Outcome {
        let result = explore::quietly(|| self.schedule());
        let state = self.core.state.borrow();
        let (coherence, operations) = (state.shape.coherence, state.operations);
        explore::with_session(|session| session.tally.count_world(coherence, operations));
        let trace = state.trace.as_ref().map(super::trace::Trace::render).unwrap_or_default();
        drop(state);
        self.end();
        result.map_err(|message| Failure { seed: self.seed, message, trace })
    }

    fn schedule(&mut self) -> Result<(), String> {
        let mut next = self.core.state.borrow_mut().start();
        while let Some(thread) = next {
            next = self.resume(thread)?;
        }
        let mut state = self.core.state.borrow_mut();
        if let Some(message) = state.failure.take() {
            return Err(message);
        }
        state.settle();
        drop(state);
        for check in self.checks.drain(..) {
            catch_unwind(AssertUnwindSafe(check)).map_err(|payload| explore::panic_message(&*payload))?;
        }
        Ok(())
    }

    /// Runs `thread` until it lets another go on, and says which.
    fn resume(&mut self, thread: usize) -> Result<Option<usize>, String> {
        self.core.state.borrow_mut().current = thread;
        let coroutine = self.threads[thread].as_mut().expect("a thread runs only until it has returned");
        let result = catch_unwind(AssertUnwindSafe(|| coroutine.resume(())));
        let mut state = self.core.state.borrow_mut();
        match result {
            Ok(CoroutineResult::Yield(())) => Ok(state.next.take()),
            Ok(CoroutineResult::Return(())) => {
                state.finish(thread);
                Ok(state.choose())
            }
            Err(payload) => Err(explore::panic_message(&*payload as &(dyn Any + Send))),
        }
    }

    /// Runs the destructors of whoever has not returned, with operations that do nothing, and keeps the stacks.
    fn end(&mut self) {
        self.core.state.borrow_mut().mode = Mode::Over;
        for mut coroutine in self.threads.drain(..).flatten() {
            if !coroutine.done() {
                coroutine.force_unwind();
            }
            let stack = coroutine.into_stack();
            STACKS.with_borrow_mut(|stacks| stacks.push(stack));
        }
        self.checks.clear();
        self.core.state.borrow_mut().mode = Mode::Alone;
        explore::keep_sites(self.core.state.borrow_mut().take_sites());
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.end();
        // Whoever still holds a handle keeps this core to itself.
        if Rc::strong_count(&self.core) == 1 {
            CORES.with_borrow_mut(|cores| cores.push(Rc::clone(&self.core)));
        }
    }
}
