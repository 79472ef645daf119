//! Groups in worlds: ranks placed by the seed, a crash now and then, and what a survivor may be told.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use polder_mem::model::{Change, Crash, Harmless, Kernels, ModelMemory, Outcome, Shape, World};
use polder_mem::{Bell, Coherence, LINE, Memory, Offset, ProcessSlot};

use crate::PoolError;
use crate::group::{Group, GroupOptions, RankPlace, extent_bytes};
use crate::wait::Patience;

/// Changes that a group bears, each argued at its site.
pub(super) const HARMLESS: &[Harmless; 7] = &[
    harmless("group.rs", "one look at all", Change::Drop),
    harmless("group.rs", "one look at all", Change::Weaken),
    harmless("group.rs", "one look at one", Change::Drop),
    harmless("group.rs", "one look at one", Change::Weaken),
    harmless("group.rs", "one look for bad news", Change::Drop),
    harmless("group.rs", "one look for bad news", Change::Weaken),
    harmless("line.rs", "for a group", Change::Drop),
];

pub(super) const fn harmless(file: &'static str, snippet: &'static str, change: Change) -> Harmless {
    Harmless { file, snippet, change }
}

/// Shorter than the longest pauses, longer than anything that goes on.
const TIMEOUT: Duration = Duration::from_secs(60);

/// One schedule's group.
pub(super) struct Scene {
    pub(super) world: World,
    seed: u64,
    hosts: Vec<u16>,
    kernels: Kernels,
    members: Vec<RankPlace>,
    options: GroupOptions,
    crashes: &'static [Crash],
    most_victims: usize,
    /// Whether ranks are in two groups.
    has_two_groups: bool,
    aimed: Option<Aimed>,
    crashed: Vec<(usize, Crash)>,
    /// The ranks that did all they were to do.
    finished: Rc<RefCell<Vec<usize>>>,
}

/// A death at a store that a scene chooses, in place of random ones, and the process that replaces the dead one.
pub(super) struct Aimed {
    pub(super) rank: usize,
    pub(super) crash: Crash,
    /// A store of the rank's, how many others to that word come before it, and the operations after it.
    pub(super) store: (Offset, u64),
    pub(super) operations: u64,
    /// Runs as a further process of this host, once the rank is dead.
    pub(super) heir: Heir,
    pub(super) heir_host: u16,
}

type Heir = Box<dyn FnOnce(ModelMemory)>;

/// What decides a schedule besides the adversary: low bits of the seed, one decision after another.
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn new(seed: u64, salt: u64) -> Self {
        Self((seed ^ salt << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below `sides`.
    pub(super) fn roll(&mut self, sides: u64) -> u64 {
        // xorshift64*
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % sides
    }

    /// Under which kernels hosts run.
    pub(super) fn kernels(&mut self) -> Kernels {
        [Kernels::Shared, Kernels::OnePerHost][self.roll(2) as usize]
    }

    /// As [`Dice::kernels`], where hosts may come back: they watch for the other boot's heartbeats, which takes long where nobody knows
    /// who is dead.
    pub(super) fn kernels_beside(&mut self, crash: Option<Crash>) -> Kernels {
        match crash {
            Some(Crash::Host) => Kernels::Shared,
            _ => self.kernels(),
        }
    }
}

/// GroupOptions for the model: a few lines of staging, looks that give the others a turn at once.
pub(super) fn tiny(staging_bytes: u64) -> GroupOptions {
    GroupOptions {
        staging_bytes,
        segment_bytes: 64,
        direct_bytes: 16,
        stream_bytes: 64,
        timeout: TIMEOUT,
        patience: Patience { spins: 1, yields: 1, nap: Duration::from_secs(1) },
        ..GroupOptions::default()
    }
}

impl Scene {
    /// A group of 2 to `most` ranks on hosts that the seed chooses, each rank with `extra` more bytes after its extent.
    pub(super) fn new(seed: u64, dice: &mut Dice, most: u64, options: GroupOptions, extra: u64) -> Self {
        let ranks = 2 + dice.roll(most - 1) as usize;
        let count = 1 + dice.roll(ranks as u64);
        let hosts: Vec<u16> = (0..ranks).map(|_| dice.roll(count) as u16).collect();
        let kernels = if dice.roll(2) == 0 { Kernels::OnePerHost } else { Kernels::Shared };
        let shape = Shape { hosts: count as u16, kernels, ..Shape::default() };
        Self::on(seed, hosts, shape, &[Crash::Process, Crash::Host, Crash::Pause], options, extra)
    }

    /// A group of 2 to `most` ranks on a busy machine: each has a host and a kernel of its own, may be stopped, and gets a CPU late.
    pub(super) fn busy(seed: u64, dice: &mut Dice, most: u64, options: GroupOptions, extra: u64) -> Self {
        let hosts = 2 + dice.roll(most - 1) as u16;
        let (timeout, nap) = (Duration::from_secs(1), Duration::from_millis(10));
        let options = GroupOptions { timeout, patience: Patience { nap, ..options.patience }, ..options };
        // Longer than some naps, and shorter than a peer may not have been seen to look.
        let shape = Shape { hosts, oversleep: timeout / 5, stop: timeout, ..Shape::default() };
        Self::on(seed, (0..hosts).collect(), shape, &[Crash::Pause], options, extra)
    }

    /// A group of two ranks, each with a host and a kernel of its own, on memory that its device keeps coherent: neither a bell nor a look at
    /// the other fences.
    pub(super) fn apart(seed: u64, options: GroupOptions) -> Self {
        let shape = Shape { coherence: Coherence::HdmDb, ..Shape::default() };
        Self::on(seed, vec![0, 1], shape, &[Crash::Process, Crash::Host, Crash::Pause], options, 0)
    }

    /// A group with a rank on each of `hosts`, which may meet `crashes`.
    fn on(
        seed: u64,
        hosts: Vec<u16>,
        shape: Shape,
        crashes: &'static [Crash],
        options: GroupOptions,
        extra: u64,
    ) -> Self {
        let ranks = hosts.len();
        let stride = extent_bytes(&options) + extra;
        let shape = Shape { bytes: ranks as u64 * stride, local_words: 1, bells: 2 * ranks as u32, ..shape };
        let members = members(&hosts, stride, extra);
        let world = World::new(seed, shape);
        Self {
            world,
            seed,
            hosts,
            kernels: shape.kernels,
            members,
            options,
            crashes,
            most_victims: 1,
            has_two_groups: false,
            aimed: None,
            crashed: vec![],
            finished: Rc::default(),
        }
    }

    pub(super) fn size(&self) -> usize {
        self.hosts.len()
    }

    /// The host of `rank`.
    pub(super) fn host(&self, rank: usize) -> u16 {
        self.hosts[rank]
    }

    /// How many ranks are on a host.
    pub(super) fn on_host(&self, host: u16) -> u16 {
        self.hosts.iter().filter(|&&it| it == host).count() as u16
    }

    pub(super) fn member(&self, rank: usize) -> RankPlace {
        self.members[rank]
    }

    pub(super) fn options(&self) -> GroupOptions {
        self.options
    }

    /// Where the bytes after the extent of `rank` begin.
    pub(super) fn extra(&self, rank: usize) -> Offset {
        self.members[rank].at + extent_bytes(&self.options)
    }

    /// Lets every process give signs of life in the last line after its extent, so that a dead one under another kernel is known to be dead.
    pub(super) fn with_heartbeats(mut self) -> Self {
        self.options.silence = TIMEOUT / 4;
        let stride = self.members[1].at.0;
        for member in &mut self.members {
            member.heartbeat = Some(Offset(member.at.0 + stride - LINE));
        }
        self
    }

    /// Lets two ranks crash now and then, where a third is there that survives them.
    pub(super) fn with_two_victims(mut self) -> Self {
        self.most_victims = if self.size() > 2 { 2 } else { 1 };
        self
    }

    /// Lets one rank die there, and no other.
    pub(super) fn with_death(mut self, aimed: Aimed) -> Self {
        self.aimed = Some(aimed);
        self
    }

    /// Lets ranks wait for a rank that waits elsewhere: if nobody can see who crashed, it is to blame.
    pub(super) fn with_two_groups(mut self) -> Self {
        self.has_two_groups = true;
        self
    }

    /// Runs `body` as every rank of a group. A body that fails has to fail with what [`Survivor`] allows; without a crash, none
    /// fails.
    pub(super) fn run(
        self,
        dice: &mut Dice,
        within: u64,
        body: impl Fn(&mut Group<ModelMemory>) -> Result<(), PoolError> + Clone + 'static,
    ) -> Outcome {
        self.run_over(dice, within, move |memory, members, rank, options| {
            body(&mut Group::over_extents(memory, members, rank, options).expect("the members fit"))
        })
    }

    /// As `run`, over the places of the ranks.
    pub(super) fn run_over(
        mut self,
        dice: &mut Dice,
        within: u64,
        body: impl Fn(ModelMemory, Vec<RankPlace>, usize, GroupOptions) -> Result<(), PoolError> + Clone + 'static,
    ) -> Outcome {
        let mut aimed = self.aimed.take();
        let victim = dice.roll(self.size() as u64) as usize;
        let kind = (dice.roll(2) == 0).then(|| self.crashes[dice.roll(self.crashes.len() as u64) as usize]);
        self.crashed = kind.map(|kind| (victim, kind)).into_iter().collect();
        if let (Some(kind), 2) = (kind, self.most_victims)
            && dice.roll(3) == 0
        {
            let other = (victim + 1 + dice.roll(self.size() as u64 - 1) as usize) % self.size();
            self.crashed.push((other, kind));
        }
        if let Some(Aimed { rank, crash, .. }) = aimed {
            self.crashed = vec![(rank, crash)];
        }
        let ended: Vec<Rc<Cell<bool>>> = (0..self.size()).map(|_| Rc::default()).collect();
        for rank in 0..self.size() {
            let (survivor, ended) = (self.survivor(rank), Rc::clone(&ended[rank]));
            let (members, options, body) = (self.members_for(rank), self.options, body.clone());
            let RankPlace { host, slot, .. } = self.members[rank];
            let goes_on = dice.roll(2) == 0;
            let thread = self.world.spawn(host, slot.0, move |memory| {
                let done = body(memory.clone(), members, rank, options);
                let has_failed = done.is_err();
                survivor.judge(rank, done);
                ended.set(true);
                if has_failed && !goes_on {
                    // As a program does that has met an error: its process is gone, and is not to blame.
                    memory.crash_after(Crash::Process, 0);
                    memory.yield_now();
                }
            });
            if let Some(Aimed { crash, store, operations, heir, heir_host, .. }) =
                aimed.take_if(|it| it.rank == rank)
            {
                self.world.crash_past_store(thread, crash, store, operations);
                self.world.spawn_after_crash(thread, heir_host, self.on_host(heir_host), heir);
                continue;
            }
            for (_, kind) in self.crashed.iter().filter(|(victim, _)| *victim == rank) {
                self.world.crash_within(thread, *kind, within);
            }
        }
        if self.members[0].heartbeat.is_some() {
            (0..self.size()).for_each(|rank| self.beat(rank, &ended[rank]));
        }
        let (finished, alone) = (Rc::clone(&self.finished), self.crashed.is_empty());
        let ranks = self.size();
        self.world.check(0, move |_| {
            assert!(!alone || finished.borrow().len() == ranks, "only {:?} finished", finished.borrow());
        });
        self.world.run()
    }

    /// Counts up the word after the extent of `rank` while its process lives and has not ended.
    fn beat(&mut self, rank: usize, ended: &Rc<Cell<bool>>) {
        let RankPlace { host, slot, heartbeat, .. } = self.members[rank];
        let (at, ended) = (heartbeat.expect("the rank has a heartbeat"), Rc::clone(ended));
        let bell = Bell((self.size() + rank) as u32);
        self.world.spawn(host, slot.0, move |memory| {
            for beat in 1.. {
                memory.store(at, beat);
                memory.write_back(at, LINE);
                if ended.get() {
                    return;
                }
                let seen = memory.announce_sleep(bell);
                memory.sleep(bell, seen, memory.now() + Duration::from_secs(1));
            }
        });
    }

    /// The members, with the bells of those that run under the kernel of `rank`.
    fn members_for(&self, rank: usize) -> Vec<RankPlace> {
        let reaches = |member: &RankPlace| self.kernels == Kernels::Shared || member.host == self.hosts[rank];
        let bell = |(bell, member): (u32, &RankPlace)| RankPlace {
            bell: reaches(member).then_some(Bell(bell)),
            ..*member
        };
        (0..).zip(&self.members).map(bell).collect()
    }

    fn survivor(&self, rank: usize) -> Survivor {
        let culprit = |&(victim, kind): &(usize, Crash), peer: usize| match kind {
            Crash::Host => self.hosts[peer] == self.hosts[victim],
            Crash::Process | Crash::Pause => peer == victim,
        };
        let culprits = (0..self.size())
            .filter(|&peer| self.crashed.iter().any(|crashed| culprit(crashed, peer)))
            .map(|peer| self.members[peer].pid)
            .collect::<Vec<u32>>();
        let is_culprit = culprits.contains(&self.members[rank].pid);
        let dies = self.crashed.first().is_some_and(|(_, kind)| *kind != Crash::Pause);
        let shows = dies && (self.kernels == Kernels::Shared || self.members[0].heartbeat.is_some());
        let names_no_culprit = self.has_two_groups && !shows && !culprits.is_empty();
        let may_fail = is_culprit || names_no_culprit;
        Survivor { dies, shows, seed: self.seed, culprits, may_fail, finished: Rc::clone(&self.finished) }
    }
}

/// What a rank may end with.
struct Survivor {
    /// Whether the culprits die, and whether everybody can see it.
    dies: bool,
    shows: bool,
    seed: u64,
    culprits: Vec<u32>,
    /// Whether it may fail without the name of a culprit.
    may_fail: bool,
    finished: Rc<RefCell<Vec<usize>>>,
}

impl Survivor {
    /// A survivor did everything right, or was told the name of whoever crashed or paused; whoever paused finds that the
    /// others gave up.
    fn judge(&self, rank: usize, result: Result<(), PoolError>) {
        match result {
            Ok(()) => self.finished.borrow_mut().push(rank),
            Err(PoolError::PeerDead { peer, .. }) if self.dies && self.culprits.contains(&peer.pid) => {}
            Err(PoolError::Timeout { peer, .. }) if !self.shows && self.culprits.contains(&peer.pid) => {}
            // Whoever was stopped while it waited may find its peer late, for that one waits for it.
            Err(PoolError::GaveUp { .. } | PoolError::Timeout { .. }) if self.may_fail => {}
            Err(error) => panic!("rank {rank}, culprits {:?}, seed {}: {error}", self.culprits, self.seed),
        }
    }
}

fn members(hosts: &[u16], stride: u64, extra: u64) -> Vec<RankPlace> {
    let member = |rank: usize| {
        let slot = hosts[..rank].iter().filter(|&&host| host == hosts[rank]).count();
        RankPlace {
            at: Offset(stride * rank as u64),
            bytes: stride - extra,
            host: hosts[rank],
            slot: ProcessSlot(slot as u16),
            pid: 100 + rank as u32,
            bell: None,
            heartbeat: None,
            sign: None,
        }
    };
    (0..hosts.len()).map(member).collect()
}
