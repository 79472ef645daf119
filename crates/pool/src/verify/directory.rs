//! The directory in the incoherent model: races of creators for one name, every operation against every other, and crashes of
//! processes and hosts at any memory operation, with repair, restart, reboot and fencing after them.
//!
//! The oracle is the history of calls, with a clock that ticks at each begin and end, held against what any order of them
//! could have given; and the bytes of each object, which hold its owner and generation, or zeros while it is new.

use std::cell::RefCell;
use std::rc::Rc;

use polder_mem::model::{Change, Crash, Harmless, ModelMemory, Outcome, Suite, ThreadId};
use polder_mem::{Coherence, ProcessSlot};

use self::history::{End, History, Id, What};
use super::group::{Dice, harmless};
use super::stage::{PROCESSES, Process, SPARE, Stage, expect_clean};
use crate::PoolError;
use crate::deviation::Deviation;
use crate::format::Layout;
use crate::name::Name;
use crate::object::{InitialContents, Object};

mod history;
mod scenes;

const NAMES: [&str; 2] = ["/a", "/b"];
/// Bytes of an object: one line, so that header and data are half a chunk; or four, which take two chunks.
const SIZES: [u64; 4] = [8, 64, 64, 200];

pub(super) fn suites() -> Vec<Suite> {
    let about = "names are created, opened, destroyed and created again, while processes and hosts die";
    vec![Suite::new("directory", about, directory).harmless(HARMLESS)]
}

const HARMLESS: &[Harmless] = &[
    harmless("reclaim.rs", "one look at tombstones", Change::Drop),
    harmless("reclaim.rs", "one look at tombstones", Change::Weaken),
    // A grant from before the invalidation names fewer incarnations as evicted: its host counts as a member, is waited for,
    // and looked at again.
    harmless("line.rs", "memory.fence_invalidations()", Change::Drop),
    harmless("line.rs", "memory.fence_invalidations()", Change::Weaken),
    // A look at the view without a memory of an older one looks at the higher keepers twice. Before the second time the fence
    // of the view's lines has completed the invalidations of the first.
    harmless("view.rs", "// Before the first words of all higher keepers.", Change::Drop),
    harmless("view.rs", "// Before the first words of all higher keepers.", Change::Weaken),
];

pub(super) fn canaries() -> Vec<Suite> {
    vec![
        Suite::new("directory-lower-does-not-wait", "a claim goes on past that of a higher host", |seed| {
            Deviation::LowerDoesNotWait.during(|| create(seed))
        }),
        Suite::new("directory-check-then-set", "a name is taken when nobody was seen to have it", |seed| {
            Deviation::CheckThenSet.during(|| create(seed))
        }),
        Suite::new(
            "directory-ignores-announcements",
            "extents are used again without a look at who reads",
            |seed| Deviation::IgnoreAnnouncements.during(|| scenes::reuse(seed)),
        ),
        Suite::new(
            "directory-frees-unwritten",
            "an extent is free before what its host stored there is in memory",
            |seed| Deviation::FreeUnwritten.during(|| scenes::leave_unwritten(seed)),
        ),
        Suite::new(
            "directory-waits-for-the-dead",
            "a look-up waits for a line that a dead writer has left",
            |seed| Deviation::WaitForHalfWritten.during(|| scenes::unattended(seed)),
        ),
        // The kinds of bugs that CXLMC seeds in RECIPE's indexes and CXL-SHM. Where caches are coherent, only a death shows the first two.
        Suite::new(
            "directory-one-line",
            "on hdm-db, of a header of two lines the first is written back before its entry is live",
            |seed| Deviation::WritesBackOneLine.during(|| scenes::outlive(seed)),
        )
        .on(Coherence::HdmDb),
        Suite::new(
            "directory-keeps-claims",
            "on hdm-db, which chunks a host holds stays in its caches while objects in them are live",
            |seed| Deviation::KeepsClaims.during(|| scenes::outlive(seed)),
        )
        .on(Coherence::HdmDb),
        Suite::new("directory-intends-late", "a slot is taken, and then logged for repair", |seed| {
            Deviation::IntendsLate.during(|| crashes(seed))
        }),
    ]
}

/// A race, or one of the scenes, by the seed.
fn directory(seed: u64) -> Outcome {
    match Dice::new(seed, 1).roll(16) {
        0 => create(seed),
        1 => churn(seed),
        2..5 => crashes(seed),
        5 | 6 => scenes::reuse(seed),
        _ => scenes::other(seed),
    }
}

type Shared = Rc<RefCell<History>>;

/// One process that creates, opens, reads and destroys.
struct Actor {
    process: Process,
    history: Shared,
    /// Draws what to do.
    random: u64,
    held: Option<(Object, Id)>,
}

impl Actor {
    fn new(process: Process, history: &Shared, seed: u64) -> Self {
        let slot = u64::from(process.directory().site.me.slot.0);
        let mixed = seed ^ (u64::from(process.host()) << 32 | slot << 16);
        Self { process, history: Rc::clone(history), random: mixed | 1 << 63, held: None }
    }

    fn draw(&mut self, below: u64) -> u64 {
        self.random = self.random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.random >> 33) % below
    }

    /// Calls, and notes when and how it ended.
    fn call<T>(
        &self,
        what: What,
        name: usize,
        call: impl FnOnce(&Name<'_>) -> Result<T, PoolError>,
        id: impl Fn(&T) -> Option<Id>,
    ) -> Option<T> {
        let index = self.history.borrow_mut().begin(what, name);
        let done = call(&Name::parse(NAMES[name]).expect("a good name"));
        let end = match &done {
            Ok(done) => End::Done(id(done)),
            Err(PoolError::Exists { .. } | PoolError::NotFound { .. }) => End::Refused,
            Err(PoolError::Full { .. } | PoolError::DirectoryFull { .. }) => End::Short,
            Err(error) => panic!("{what:?} of {}: {error}", NAMES[name]),
        };
        self.history.borrow_mut().end(index, end);
        done.ok()
    }

    fn create(&mut self, name: usize, bytes: u64) {
        let id = |object: &Object| Some((object.owner(), object.generation()));
        let create = |name: &Name<'_>| self.process.directory().create(name, bytes, InitialContents::Zeros);
        if let Some(object) = self.call(What::Create, name, create, id) {
            let id = id(&object).expect("as above");
            assert_eq!(self.read(&object), 0, "{id:?} is not new");
            object.write_at(&self.process.memory, 0, &pattern(id).to_le_bytes()).expect("inside");
            self.hold(object, id);
        }
    }

    fn open(&mut self, name: usize) {
        let id = |object: &Object| Some((object.owner(), object.generation()));
        let open = |name: &Name<'_>| self.process.directory().open(name);
        if let Some(object) = self.call(What::Open, name, open, id) {
            let id = id(&object).expect("as above");
            self.hold(object, id);
        }
    }

    fn destroy(&self, name: usize) {
        let destroy = |name: &Name<'_>| self.process.directory().destroy(name);
        self.call(What::Destroy, name, destroy, |()| None);
    }

    /// Holds this object open from now on, in place of another.
    fn hold(&mut self, object: Object, id: Id) {
        self.release();
        self.held = Some((object, id));
        self.look();
    }

    /// While an object is held open, its bytes are its own.
    fn look(&self) {
        if let Some((object, id)) = &self.held {
            let seen = self.read(object);
            assert!(seen == 0 || seen == pattern(*id), "{id:?} is open and holds {seen:#x}");
        }
    }

    fn release(&mut self) {
        self.look();
        if let Some((object, _)) = self.held.take() {
            self.process.directory().close(&object);
        }
    }

    fn read(&self, object: &Object) -> u64 {
        let mut bytes = [0; 8];
        object.read_at(&self.process.memory, 0, &mut bytes).expect("inside");
        u64::from_le_bytes(bytes)
    }

    /// Something, to one of the names.
    fn act(&mut self) {
        let name = [0, 0, 1][self.draw(3) as usize];
        match self.draw(8) {
            0..3 => {
                let bytes = SIZES[self.draw(4) as usize];
                self.create(name, bytes);
            }
            3..5 => self.open(name),
            5 => self.release(),
            6 => self.destroy(name),
            _ => {
                self.destroy(name);
                self.process.directory().maintain().expect("nobody keeps a lock");
            }
        }
        self.look();
    }
}

/// What an object holds once its creator has written to it.
const fn pattern((owner, generation): Id) -> u64 {
    generation << 8 | (owner as u64 + 1)
}

/// Two to four hosts, of which one has two processes, create one name, and then open it.
fn create(seed: u64) -> Outcome {
    let hosts = 2 + (seed % 3) as u16;
    let mut stage = Stage::new(seed, hosts, 6);
    let history = Shared::default();
    for (host, slot) in (0..hosts).map(|host| (host, 0)).chain([((seed / 3 % 2) as u16, 1)]) {
        let (layout, history) = (Rc::clone(&stage.layout), Rc::clone(&history));
        stage.world.spawn(host, slot, move |memory| {
            let mut actor = Actor::new(Process::enter(memory, &layout, host), &history, seed);
            actor.create(0, 8);
            actor.open(0);
            actor.release();
        });
    }
    judge(&mut stage, &history);
    stage.world.run()
}

/// Processes of two or three hosts do whatever they like.
fn churn(seed: u64) -> Outcome {
    let mut stage = Stage::new(seed, 2 + (seed % 2) as u16, 8);
    let history = Shared::default();
    for (host, slot) in cast(seed) {
        act_on(&mut stage, &history, seed, host, slot);
    }
    judge(&mut stage, &history);
    stage.world.run()
}

/// Three or four processes on two or three hosts.
fn cast(seed: u64) -> Vec<(u16, u16)> {
    match seed % 4 {
        0 => vec![(0, 0), (1, 0), (1, 1)],
        1 => vec![(0, 0), (1, 0), (2, 0)],
        2 => vec![(0, 0), (0, 1), (1, 0)],
        _ => vec![(0, 0), (1, 0), (2, 0), (2, 1)],
    }
}

fn act_on(stage: &mut Stage, history: &Shared, seed: u64, host: u16, slot: u16) -> ThreadId {
    let (layout, history) = (Rc::clone(&stage.layout), Rc::clone(history));
    stage.world.spawn(host, slot, move |memory| {
        let mut actor = Actor::new(Process::enter(memory, &layout, host), &history, seed);
        for _ in 0..4 {
            actor.act();
        }
        actor.release();
    })
}

/// As churn, and one of them dies or stops, or its host does.
fn crashes(seed: u64) -> Outcome {
    let mut stage = Stage::new(seed, 2 + (seed % 2) as u16, 8);
    let history = Shared::default();
    let cast = cast(seed);
    let victim = (seed / 4) as usize % cast.len();
    for (index, &(host, slot)) in cast.iter().enumerate() {
        let thread = act_on(&mut stage, &history, seed, host, slot);
        if index == victim {
            strike(&mut stage, &history, seed, thread, (host, slot));
        }
    }
    judge(&mut stage, &history);
    stage.world.run()
}

/// Lets something befall a process, and somebody put it right.
fn strike(stage: &mut Stage, history: &Shared, seed: u64, thread: ThreadId, (host, slot): (u16, u16)) {
    const OPERATIONS: u64 = 700;
    let (layout, history) = (Rc::clone(&stage.layout), Rc::clone(history));
    let crash = match seed / 16 % 8 {
        0 => Crash::Pause,
        1..5 => Crash::Process,
        _ => Crash::Host,
    };
    stage.world.crash_within(thread, crash, OPERATIONS);
    let enter = move |memory: ModelMemory, host| Process::enter(memory, &layout, host);
    match (crash, seed / 16 % 8) {
        (Crash::Pause, _) => {}
        (Crash::Process, 1) => {
            // Another process of the host repairs.
            let repair = move |memory| {
                let spare = enter(memory, host);
                spare.directory().repair_process(ProcessSlot(slot)).expect("nobody keeps a lock");
            };
            stage.world.spawn_after_crash(thread, host, SPARE, repair);
        }
        (Crash::Process, _) => {
            // It starts again, and goes on.
            let again = move |memory| {
                let process = enter(memory, host);
                process.directory().repair_process(ProcessSlot(slot)).expect("nobody keeps a lock");
                let mut actor = Actor::new(process, &history, seed ^ 0x55);
                actor.act();
                actor.act();
                actor.release();
            };
            stage.world.spawn_after_crash(thread, host, slot, again);
        }
        (Crash::Host, 5) => {
            // It stays off, and the view says so.
            let layout = Rc::clone(&stage.layout);
            let keeper = move |memory: ModelMemory| Stage::fence(&memory, &layout, host);
            stage.world.spawn_after_crash(thread, u16::from(host == 0), SPARE, keeper);
        }
        (Crash::Host, _) => {
            // It boots again, and goes on.
            let again = move |memory| {
                let process = enter(memory, host);
                process.directory().prepare().expect("nobody else is there");
                let mut actor = Actor::new(process, &history, seed ^ 0xaa);
                actor.act();
                actor.act();
                actor.release();
            };
            stage.world.spawn_after_crash(thread, host, slot, again);
        }
    }
}

/// Holds the history against what could have been, and then sees that everything can be taken away.
fn judge(stage: &mut Stage, history: &Shared) {
    let (layout, history) = (Rc::clone(&stage.layout), Rc::clone(history));
    let hosts = layout.geometry().hosts;
    let memories: Vec<_> = (0..hosts).map(|host| stage.world.memory(host, SPARE)).collect();
    stage.world.check(0, move |_| {
        history.borrow().judge();
        let processes = revive(memories, &layout);
        expect_live(&processes[0], &history.borrow());
        // A host whose slots are all taken by tombstones must wait until the owners have seen them.
        for _ in 0..4 {
            for process in &processes {
                for name in NAMES {
                    let _ = process.directory().destroy(&Name::parse(name).expect("a good name"));
                }
                process.directory().maintain().expect("nobody else is there");
            }
        }
        processes.iter().for_each(|process| expect_clean(&process.directory()));
    });
}

/// A process on each host, after which nothing is left half done.
fn revive(memories: Vec<ModelMemory>, layout: &Rc<Layout>) -> Vec<Process> {
    let revive = |(host, memory)| {
        let process = Process::enter(memory, layout, host);
        process.directory().prepare().expect("nobody else is there");
        for slot in 0..PROCESSES {
            process.directory().repair_process(ProcessSlot(slot)).expect("nobody else is there");
        }
        process
    };
    (0..).zip(memories).map(revive).collect()
}

/// No name is live twice, and what was created and never destroyed is live.
fn expect_live(process: &Process, history: &History) {
    let inventory = process.directory().inventory().expect("the model has no faults");
    assert_eq!((inventory.claimed, inventory.unclear), (0, vec![]), "something is half done for ever");
    for (name, text) in NAMES.into_iter().enumerate() {
        let hash = Name::parse(text).expect("a good name").hash();
        let live: Vec<Id> = inventory
            .live
            .iter()
            .filter(|sight| sight.record.hash == hash)
            .map(|sight| (sight.host, sight.record.generation))
            .collect();
        assert!(live.len() <= 1, "{text} is live as each of {live:?}");
        for id in history.never_destroyed(name) {
            assert_eq!(live, [id], "{text} was created and never destroyed");
        }
    }
}
