//! A tiny pool in the model, and processes on it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use polder_mem::model::{ModelMemory, Shape, World};
use polder_mem::{Coherence, LINE, Memory};

use crate::directory::Directory;
use crate::extents::Account;
use crate::format::{Geometry, Layout};
use crate::line;
use crate::local::{Local, LocalLayout};
use crate::membership::{HostLine, HostState};
use crate::site::{Flaw, Site};
use crate::state::Marks;
use crate::view::{Grant, Ids, View};

/// Longer than anyone pauses: a call that waits so long is blocked for ever.
const PATIENCE: Duration = Duration::from_secs(24 * 3600);
/// Processes of a host: two that act, and one that cleans up after them.
pub(super) const PROCESSES: u16 = 3;
/// The slot of the process that cleans up.
pub(super) const SPARE: u16 = 2;

/// A pool with entries in two levels of 3 and 2 slots, and chunks of four lines.
pub(super) struct Stage {
    pub(super) world: World,
    pub(super) layout: Rc<Layout>,
    pub(super) flaw: Flaw,
}

impl Stage {
    /// All `hosts` hosts are there. One schedule of eight is of coherent hosts, which have store buffers only.
    pub(super) fn new(seed: u64, hosts: u16, chunks: u64, flaw: Flaw) -> Self {
        let mut stage = Self::empty(seed, hosts, chunks, flaw);
        for host in 0..hosts {
            let layout = Rc::clone(&stage.layout);
            stage.world.setup_as(host, SPARE, move |memory| drop(Self::join(memory, &layout, host)));
        }
        stage
    }

    /// No host is there yet.
    pub(super) fn empty(seed: u64, hosts: u16, chunks: u64, flaw: Flaw) -> Self {
        let layout = layout(hosts, chunks);
        let bytes = layout.bytes();
        let shape = Shape {
            hosts,
            bytes,
            local_words: LocalLayout::new(&layout).words(),
            bells: u32::from(hosts * PROCESSES),
            coherence: if seed >> 3 & 7 == 7 { Coherence::Coherent } else { Coherence::Software },
            ..Shape::default()
        };
        Self { world: World::new(seed, shape), layout, flaw }
    }

    /// Makes a host known and its state ready, as its first process does.
    pub(super) fn join(memory: ModelMemory, layout: &Rc<Layout>, host: u16) -> Process {
        let line = HostLine { state: HostState::Live, boot: 1, incarnation: 1, epoch: 0 };
        line::announce(&memory, layout.host_line(host), &line.encode());
        let process = Process::enter(memory, layout, host, Flaw::None);
        process.directory().prepare().expect("nobody else is there");
        process
    }

    /// Makes the view say that `host` is off for certain.
    pub(super) fn fence(memory: &ModelMemory, layout: &Layout, host: u16) {
        let grant = Grant { nonce: 0, boot: 1, incarnation: 1, epoch: 0, evicted_through: 1 };
        line::announce(memory, layout.grant_line(1, host), &grant.encode());
        let bit = 1 << host;
        let view =
            View { epoch: 1_000_001, keeper: 1, ids: Ids::Launcher, members: 0, fenced: bit, evicted: bit };
        // As a keeper does: it announces itself on its first line, and only then says anything.
        line::announce(memory, layout.view_line(1, 0), &View::starting(1));
        line::announce(memory, layout.view_line(1, View::half(view.epoch)), &view.encode());
    }
}

/// A pool with so many hosts and chunks, and no byte more.
fn layout(hosts: u16, chunks: u64) -> Rc<Layout> {
    thread_local! {
        static LAYOUTS: RefCell<BTreeMap<(u16, u64), Rc<Layout>>> = RefCell::default();
    }
    let geometry =
        Geometry { hosts, processes: PROCESSES, names: 3, levels: 2, chunk_bytes: 256, opens: 3, keepers: 1 };
    let fitting = || {
        let mut layouts =
            (4096..).step_by(LINE as usize).filter_map(|bytes| Layout::new(&geometry, bytes).ok());
        Rc::new(layouts.find(|layout| u64::from(layout.chunks()) == chunks).expect("some size fits"))
    };
    LAYOUTS.with_borrow_mut(|layouts| Rc::clone(layouts.entry((hosts, chunks)).or_insert_with(fitting)))
}

/// A process of a host.
pub(super) struct Process {
    pub(super) memory: ModelMemory,
    layout: Rc<Layout>,
    me: Local,
    flaw: Flaw,
}

impl Process {
    pub(super) fn enter(memory: ModelMemory, layout: &Rc<Layout>, host: u16, flaw: Flaw) -> Self {
        let me = Local::enter(&memory, LocalLayout::new(layout), host, 0, 0);
        Self { memory, layout: Rc::clone(layout), me, flaw }
    }

    pub(super) const fn host(&self) -> u16 {
        self.me.host
    }

    pub(super) fn directory(&self) -> Directory<'_, ModelMemory> {
        let site = Site {
            memory: &self.memory,
            layout: &self.layout,
            me: &self.me,
            patience: PATIENCE,
            flaw: self.flaw,
        };
        Directory { site, account: Account { job: 0, quota: u64::MAX } }
    }

    /// Nothing that another process could have left is left.
    pub(super) fn expect_clean(&self) {
        let (directory, layout, host) = (self.directory(), &self.layout, self.host());
        let words = directory.site.words();
        for slot in 0..layout.slots() {
            let entry = directory.load_entry(host, slot).expect("the model has no faults");
            assert_eq!(entry, Some(crate::entry::Entry::Free), "slot {slot} of host {host} has leaked");
            assert_eq!(directory.site.tag(slot), 0, "slot {slot} of host {host} is tagged for ever");
            for marks in [Marks::Condemned, Marks::Tombstones] {
                let bits = directory.site.get(words.marks(marks).bits(slot / 64));
                assert_eq!(bits >> (slot % 64) & 1, 0, "slot {slot} of host {host} is marked for ever");
            }
        }
        for index in 0..layout.chunk_words() {
            let claims = self.memory.load(layout.chunk_word(host, index)).expect("the model has no faults");
            assert_eq!(claims, 0, "host {host} holds chunks for nothing");
        }
        for chunk in 0..layout.chunks() {
            assert_eq!(
                directory.site.get(words.chunk(chunk)),
                0,
                "host {host} thinks that it holds chunk {chunk}"
            );
        }
        for stripe in 0..words.stripes() {
            assert_eq!(directory.intent(stripe), None, "host {host} stripe {stripe}");
        }
        assert_eq!(
            directory.site.get(words.job_bytes(0)),
            0,
            "the job of host {host} holds bytes for nothing"
        );
    }
}
