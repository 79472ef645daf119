//! A tiny pool in the model, and processes on it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use polder_mem::model::{Kernels, ModelMemory, Shape, World};
use polder_mem::{Coherence, LINE, Memory};

use crate::directory::Directory;
use crate::entry::Entry;
use crate::extents::Account;
use crate::format::{Geometry, Layout, Superblock, Uuid};
use crate::line;
use crate::local::{Local, LocalLayout};
use crate::membership::{HostLine, HostState};
use crate::site::Site;
use crate::state::Marks;
use crate::view::{Grant, View};
use crate::{Member, Pool};

/// Longer than anyone pauses: a call that waits so long is blocked for ever.
pub(super) const PATIENCE: Duration = Duration::from_secs(24 * 3600);
/// Processes of a host: two that act, and one that cleans up after them.
pub(super) const PROCESSES: u16 = 3;
/// Slots of the directory's first level.
const NAMES: u32 = 3;
/// The slot of the process that cleans up.
pub(super) const SPARE: u16 = 2;

/// A few names and small chunks.
pub(super) const fn small(hosts: u16, processes: u16) -> Geometry {
    Geometry { hosts, processes, names: 13, levels: 4, chunk_bytes: 512, opens: 10, keepers: 1 }
}

/// The pool of a geometry that has so many chunks.
pub(super) fn pool_of(geometry: Geometry, chunks: u32) -> (Superblock, Layout) {
    let sizes = (4096..).step_by(LINE as usize);
    let mut layouts = sizes.filter_map(|bytes| Layout::new(&geometry, bytes).ok());
    let layout = layouts.find(|layout| layout.chunks() == chunks).expect("some size fits");
    (Superblock { uuid: Uuid(1), bytes: layout.bytes(), geometry, coherence: None }, layout)
}

/// The pool as a process attaches it. Heartbeats are not used where it `is_known` who lives, as under one kernel. Else a host is taken for
/// dead after a silence that is longer than any stop.
#[expect(
    clippy::arc_with_non_send_sync,
    reason = "what shares a pool is of one world, whose threads all run on one"
)]
pub(super) fn attached(
    (superblock, layout): &(Superblock, Layout),
    memory: ModelMemory,
    is_known: bool,
    member: Member,
) -> Arc<Pool<ModelMemory>> {
    let silence = if is_known { Duration::from_micros(2) } else { PATIENCE };
    let member = Member { timeout: PATIENCE, silence, ..member };
    Arc::new(Pool::attach_in(memory, *superblock, layout.clone(), member).expect("the host is ours"))
}

/// A pool with entries in two levels of 3 and 2 slots, and chunks of four lines.
pub(super) struct Stage {
    pub(super) world: World,
    pub(super) layout: Rc<Layout>,
}

impl Stage {
    /// All `hosts` hosts are there, and a keeper. One schedule of eight is of coherent hosts, which have store buffers only.
    pub(super) fn new(seed: u64, hosts: u16, chunks: u64) -> Self {
        Self::with_names(seed, hosts, chunks, NAMES)
    }

    /// As `new`, with levels of `names` slots and fewer.
    pub(super) fn with_names(seed: u64, hosts: u16, chunks: u64, names: u32) -> Self {
        let mut stage = Self::of(seed, layout(hosts, chunks, names));
        for host in 0..hosts {
            stage.setup(host, SPARE, Process::join);
        }
        let layout = Rc::clone(&stage.layout);
        stage.world.setup(|memory| {
            line::publish_and_fence(&memory, layout.view_line(1, 0), &View::starting(1));
            // Whoever was here before them was evicted.
            Self::publish_view(&memory, &layout, &View { evicted: (1 << hosts) - 1, ..LAUNCHED });
        });
        stage
    }

    /// No host is there yet.
    pub(super) fn empty(seed: u64, hosts: u16, chunks: u64) -> Self {
        Self::of(seed, layout(hosts, chunks, NAMES))
    }

    fn of(seed: u64, layout: Rc<Layout>) -> Self {
        let coherence = if seed >> 3 & 7 == 7 { Coherence::Coherent } else { Coherence::Software };
        let shape = shape_of(&layout, Shape::default().kernels, coherence);
        Self { world: World::new(seed, shape), layout }
    }

    /// Lets a process do something before anything else happens.
    pub(super) fn setup<R>(&mut self, host: u16, slot: u16, part: impl FnOnce(&Process) -> R) -> R {
        part(&self.enter(host, slot))
    }

    /// A process that several threads are of.
    pub(super) fn enter(&mut self, host: u16, slot: u16) -> Rc<Process> {
        let layout = Rc::clone(&self.layout);
        self.world.setup_as(host, slot, |memory| Rc::new(Process::enter(memory, &layout, host)))
    }

    /// Makes the view say that `host` is off for certain.
    pub(super) fn fence(memory: &ModelMemory, layout: &Layout, host: u16) {
        let grant = Grant { nonce: 0, boot: 1, incarnation: 1, epoch: 0, evicted_through: 1 };
        line::publish_and_fence(memory, layout.grant_line(1, host), &grant.encode());
        let all = (1 << layout.geometry().hosts) - 1;
        Self::publish_view(
            memory,
            layout,
            &View { epoch: 1_000_002, fenced: 1 << host, evicted: all, ..LAUNCHED },
        );
    }

    /// What a keeper does to change the view.
    pub(super) fn publish_view(memory: &ModelMemory, layout: &Layout, view: &View) {
        line::publish_and_fence(
            memory,
            layout.view_line(view.keeper, View::line_of(view.epoch)),
            &view.encode(),
        );
    }
}

/// The first view of the first keeper, who leaves it to the launcher who is a member.
pub(super) const LAUNCHED: View = View { epoch: 1_000_001, keeper: 1, ..View::INITIAL };

/// A pool with so many hosts, chunks and slots in its first level, and no byte more.
fn layout(hosts: u16, chunks: u64, names: u32) -> Rc<Layout> {
    thread_local! {
        static LAYOUTS: RefCell<BTreeMap<(u16, u64, u32), Rc<Layout>>> = RefCell::default();
    }
    let geometry =
        Geometry { hosts, processes: PROCESSES, names, levels: 2, chunk_bytes: 256, opens: 3, keepers: 2 };
    let fitting = || {
        let mut layouts =
            (4096..).step_by(LINE as usize).filter_map(|bytes| Layout::new(&geometry, bytes).ok());
        Rc::new(layouts.find(|layout| u64::from(layout.chunks()) == chunks).expect("some size fits"))
    };
    LAYOUTS
        .with_borrow_mut(|layouts| Rc::clone(layouts.entry((hosts, chunks, names)).or_insert_with(fitting)))
}

/// A process of a host.
pub(super) struct Process {
    pub(super) memory: ModelMemory,
    layout: Rc<Layout>,
    me: Local,
}

impl Process {
    pub(super) fn enter(memory: ModelMemory, layout: &Rc<Layout>, host: u16) -> Self {
        let me = Local::enter(&memory, LocalLayout::new(layout), host, 0, 0);
        Self { memory, layout: Rc::clone(layout), me }
    }

    /// Makes the host known and its state ready, unless another process has.
    pub(super) fn join(&self) {
        self.arrive();
        self.directory().prepare().expect("nobody keeps a lock");
    }

    pub(super) fn arrive(&self) {
        let line = HostLine { state: HostState::Live, boot: 1, incarnation: 1, epoch: 0 };
        line::publish_and_fence(&self.memory, self.layout.host_line(self.host()), &line.encode());
    }

    pub(super) const fn host(&self) -> u16 {
        self.me.host
    }

    pub(super) fn directory(&self) -> Directory<'_, ModelMemory> {
        let site = Site { memory: &self.memory, layout: &self.layout, me: &self.me, patience: PATIENCE };
        Directory { site, account: Account { job: 0, quota: u64::MAX } }
    }
}

/// The memory of a pool with this layout.
pub(super) fn shape_of(layout: &Layout, kernels: Kernels, coherence: Coherence) -> Shape {
    let Geometry { hosts, processes, .. } = *layout.geometry();
    let local_words = LocalLayout::new(layout).words();
    Shape {
        hosts,
        bytes: layout.bytes(),
        local_words,
        bells: u32::from(hosts * processes),
        kernels,
        coherence,
        ..Shape::default()
    }
}

/// Nothing is left once every host has cleaned up, three times in turn: what one destroys, others condemn and then let go of.
pub(super) fn expect_all_clean(pools: &[Arc<Pool<ModelMemory>>]) {
    for pool in pools.iter().chain(pools).chain(pools) {
        pool.maintain().expect("nobody keeps a lock");
    }
    pools.iter().for_each(|pool| expect_clean(&pool.directory()));
}

/// Nothing that a process of this host could have left is left.
pub(super) fn expect_clean(directory: &Directory<'_, ModelMemory>) {
    let Directory { site, .. } = directory;
    let (layout, words, host) = (site.layout, site.words(), site.host());
    for slot in 0..layout.slots() {
        let entry = directory.load_entry(host, slot).expect("the model has no faults");
        assert_eq!(entry, Some(Entry::Free), "slot {slot} of host {host} has leaked");
        assert_eq!(site.tag(slot), 0, "slot {slot} of host {host} is tagged for ever");
        for marks in [Marks::Condemned, Marks::Tombstones] {
            let bits = site.get(words.marks(marks).bits(slot / 64));
            assert_eq!(bits >> (slot % 64) & 1, 0, "slot {slot} of host {host} is marked for ever");
        }
    }
    for index in 0..layout.chunk_words() {
        let claims = site.memory.load(layout.chunk_word(host, index)).expect("the model has no faults");
        assert_eq!(claims, 0, "host {host} holds chunks for nothing");
    }
    for chunk in 0..layout.chunks() {
        assert_eq!(site.get(words.chunk(chunk)), 0, "host {host} thinks that it holds chunk {chunk}");
    }
    for stripe in 0..words.stripes() {
        assert_eq!(directory.intent(stripe), None, "host {host} stripe {stripe}");
    }
    assert_eq!(site.get(words.job_bytes(0)), 0, "the job of host {host} holds bytes for nothing");
}
