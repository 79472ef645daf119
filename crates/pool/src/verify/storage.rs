//! A store: a writer publishes versions one after another, readers take whatever is newest, and the writer or a reader dies or stops
//! at any memory operation. Another writer goes on from what the dead one left.
//!
//! The oracle is beside the pool. Every version holds the number of the call that made it, and the calls' bytes are known: the process that
//! reads a version knows which bytes are due, and at least which number.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, LazyLock};

use polder_mem::model::{Crash, Kernels, ModelMemory, Outcome, Suite, ThreadId, World};
use polder_mem::{Coherence, Memory};

use super::group::Dice;
use super::stage::{attached, expect_all_clean, pool_of, shape_of, small};
use crate::deviation::Deviation;
use crate::format::{Layout, Superblock};
use crate::object::Object;
use crate::owned::{self, Kind};
use crate::storage::{Found, Plan, Store, Version};
use crate::{Member, PoolError};

pub(super) fn suites() -> Vec<Suite> {
    let about = "versions are published, read and removed, while writers and readers die: each is whole, or named as missing";
    // A host that boots again did die here: its scene leaves out that it is fenced.
    let store = |seed| Deviation::SilenceIsEnough.during(|| store(seed, true));
    let files = &["storage.rs", "storage/manifest.rs", "storage/reader.rs", "storage/writer.rs"];
    vec![Suite::new("storage", about, store).mutates(files)]
}

/// Protocols that are known to be wrong. The suite is their control.
pub(super) fn canaries() -> Vec<Suite> {
    vec![
        Suite::new("storage-head-first", "a version is published before its bytes are written", |seed| {
            Deviation::HeadFirst.during(|| store(seed, false))
        }),
        Suite::new(
            "storage-remove-first",
            "the versions before are removed before the new one is there",
            |seed| Deviation::RemoveFirst.during(|| store(seed, false)),
        ),
        Suite::new("storage-by-list", "a reader goes by a list, and not by the marks", |seed| {
            Deviation::NewestByList.during(|| store(seed, false))
        }),
    ]
}

const NAME: &str = "s";
const HOSTS: u16 = 2;
/// Processes of a host: a writer, two readers, and the process that comes for the dead.
const PROCESSES: u16 = 4;
const SPARE: u16 = 3;
/// Enough for two versions, what they share with another, one that is being written, one that died, and those that are read.
const CHUNKS: u32 = 14;
/// The process id of the one that looks at the end.
const JUDGE: u32 = 500;

static POOL: LazyLock<(Superblock, Layout)> = LazyLock::new(|| pool_of(small(HOSTS, PROCESSES), CHUNKS));

/// What is known outside the memory.
#[derive(Default)]
struct Witness {
    /// The bytes of each call: of a tensor that always changes, and of one that may stay.
    calls: RefCell<Vec<[Vec<u8>; 2]>>,
    /// The newest version of which a call has returned.
    newest: Cell<u64>,
    /// How many calls have returned.
    done: Cell<u64>,
    crash: Option<Crash>,
    kernels: Option<Kernels>,
    boots: [Cell<u64>; HOSTS as usize],
}

impl Witness {
    /// Publishes once more; `stays` keeps the second tensor as it was.
    fn publish(&self, store: &Store<ModelMemory>, sizes: [usize; 2], stays: bool) -> Option<PoolError> {
        let bytes = {
            let mut calls = self.calls.borrow_mut();
            let call = calls.len() as u8 + 1;
            let fill = |size: usize, salt: u8| (0..size).map(|at| call * 16 + salt + at as u8 % 8).collect();
            let first: Vec<u8> = [call; 8].into_iter().chain(fill(sizes[0], 1)).collect();
            let second = match calls.last() {
                Some([_, second]) if stays => second.clone(),
                _ => fill(sizes[1], 8),
            };
            calls.push([first, second]);
            calls[calls.len() - 1].clone()
        };
        match store.publish(&[("a", &bytes[0]), ("b", &bytes[1])]) {
            Ok(published) => {
                assert!(published.version > self.newest.get(), "{published:?} is not new");
                assert_eq!(published.copied + published.shared, (bytes[0].len() + bytes[1].len()) as u64);
                self.newest.set(published.version);
                self.done.set(self.done.get() + 1);
                None
            }
            Err(error) => {
                if matches!(error, PoolError::VersionTaken { .. }) {
                    // Nothing was written.
                    self.calls.borrow_mut().pop();
                }
                Some(error)
            }
        }
    }

    /// A version has the bytes of one call.
    fn judge(&self, version: &Version<ModelMemory>) {
        let sizes: Vec<_> = version.tensors().map(|(name, bytes)| (name.to_owned(), bytes)).collect();
        let [a, b] = &sizes[..] else { panic!("{sizes:?}") };
        let read = |(name, bytes): &(String, u64)| {
            let mut into = vec![0; *bytes as usize];
            // The versions of even numbers in two rows, from the second on.
            let read = match (version.number() % 2, into.split_at_mut(*bytes as usize / 2)) {
                (0, (head, tail)) if !head.is_empty() => {
                    let (first, row) = (head.len() as u64, tail.len() as u64);
                    let tail = version.read_rows(name, first, [row, row], tail);
                    tail.and_then(|()| version.read_rows(name, 0, [1, 1], head))
                }
                _ => version.read(name, &mut into),
            };
            read.unwrap_or_else(|error| panic!("{name} of {}: {error}", version.number()));
            into
        };
        let found = [read(a), read(b)];
        let call = usize::from(found[0][0]);
        assert_eq!(self.calls.borrow().get(call - 1), Some(&found), "version {} is torn", version.number());
    }

    /// Reads the newest; its number.
    fn restore(&self, store: &Store<ModelMemory>) -> u64 {
        let before = self.newest.get();
        let marked = store.marked().expect("the model has no faults");
        assert!(marked >= before, "version {before} has no mark: {marked}");
        match store.newest() {
            Ok(version) => {
                assert!(version.number() >= before, "{} is older than {before}", version.number());
                self.judge(&version);
                version.number()
            }
            Err(PoolError::NoVersion { .. }) if before == 0 => 0,
            Err(error) => panic!("after version {before}: {error}"),
        }
    }

    /// Whether nobody knows that a dead writer is dead.
    fn is_unsure(&self) -> bool {
        self.crash.is_some() && self.kernels == Some(Kernels::OnePerHost) || self.crash == Some(Crash::Pause)
    }
}

fn sizes(dice: &mut Dice) -> [usize; 2] {
    [[0, 8, 56][dice.roll(3) as usize], [8, 64, 128][dice.roll(3) as usize]]
}

/// A writer and one or two readers; `boots` says whether a host may die and boot again.
fn store(seed: u64, boots: bool) -> Outcome {
    let mut dice = Dice::new(seed, 13);
    let crashes = [None, Some(Crash::Pause), Some(Crash::Host), Some(Crash::Process)];
    let crash = crashes[dice.roll(4) as usize].filter(|crash| boots || *crash != Crash::Host);
    let kernels = dice.kernels_beside(crash);
    let coherence = if dice.roll(8) == 0 { Coherence::Coherent } else { Coherence::Software };
    let shape = shape_of(&POOL.1, kernels, coherence);
    let mut world = World::new(seed, shape);
    let witness = Rc::new(Witness { crash, kernels: Some(kernels), ..Witness::default() });
    if dice.roll(4) == 0 {
        return window(world, &witness, &mut dice);
    }
    let host = dice.roll(u64::from(HOSTS)) as u16;
    let first = world.setup_as(host, 0, |memory| attach(memory, host, 100, &witness));
    for _ in 0..dice.roll(3) {
        let (sizes, stays) = (sizes(&mut dice), dice.roll(2) == 0);
        world.setup_as(host, 0, |_| assert_eq!(witness.publish(&first, sizes, stays), None));
    }
    let calls: Vec<_> = (0..1 + dice.roll(3)).map(|_| (sizes(&mut dice), dice.roll(2) == 0)).collect();
    let known = Rc::clone(&witness);
    let writer = world.spawn(host, 0, move |_| {
        for (sizes, stays) in calls {
            match known.publish(&first, sizes, stays) {
                None => {}
                // It stopped for so long that another has taken its place.
                Some(
                    PoolError::NoVersion { .. } | PoolError::VersionTaken { .. } | PoolError::Exists { .. },
                ) if known.crash == Some(Crash::Pause) => {}
                Some(error) => panic!("cannot publish: {error}"),
            }
        }
    });
    let mut victim = writer;
    for reader in 0..1 + dice.roll(2) as u16 {
        let host = dice.roll(u64::from(HOSTS)) as u16;
        let slot = 1 + reader;
        let looks = 1 + dice.roll(3);
        let store = world.setup_as(host, slot, |memory| attach(memory, host, 200, &witness));
        let (known, watches) = (Rc::clone(&witness), dice.roll(2) == 0);
        let thread = world.spawn(host, slot, move |_| match watches {
            true => watch(&known, &store),
            false => read(&known, &store, looks),
        });
        if reader == 1 && dice.roll(4) == 0 && crash != Some(Crash::Host) {
            victim = thread;
        }
    }
    if let Some(crash) = crash {
        world.crash_within(victim, crash, 1500);
        if victim == writer {
            come_back(&mut world, &witness, victim, host, &mut dice);
        }
    }
    judge(&mut world, &witness, victim == writer);
    world.run()
}

/// Takes what is newest a few times, and what it was before by its number.
fn read(witness: &Witness, store: &Store<ModelMemory>, looks: u64) {
    let mut last = 0;
    for _ in 0..looks {
        let number = witness.restore(store);
        assert!(number >= last, "{number} after {last}");
        last = number;
    }
    match store.open(last.max(1)) {
        Ok(version) => {
            assert_eq!(version.number(), last.max(1));
            witness.judge(&version);
        }
        Err(PoolError::NoVersion { .. }) => {}
        Err(error) => panic!("version {last}: {error}"),
    }
}

/// The moment of publication alone: everything but the bytes and the head is done before, and a reader waits for the head.
fn window(mut world: World, witness: &Rc<Witness>, dice: &mut Dice) -> Outcome {
    let hosts = [dice.roll(u64::from(HOSTS)) as u16, dice.roll(u64::from(HOSTS)) as u16];
    let bytes = [vec![1; 8 + 8 * dice.roll(8) as usize], vec![2; 64]];
    witness.calls.borrow_mut().push(bytes.clone());
    let plan = |bytes: &[Vec<u8>; 2], made: &mut dyn FnMut(&mut Plan<'_>)| {
        let tensors: [(&str, &[u8]); 2] = [("a", &bytes[0]), ("b", &bytes[1])];
        made(&mut Plan::new(1, &tensors, None::<&Version<ModelMemory>>).expect("two names"));
    };
    let (mut size, mut object) = (0, None);
    plan(&bytes, &mut |plan| size = plan.bytes);
    let writer = world.setup_as(hosts[0], 0, |memory| attach(memory, hosts[0], 100, witness));
    world.setup_as(hosts[0], 0, |_| {
        let made = owned::create_unfilled(writer.pool(), &writer.object_name(1), size, Kind::Version, [0; 3]);
        object = Some(made.expect("there is room"));
    });
    let object = object.expect("as above");
    let marks = world.setup_as(hosts[0], 0, |_| writer.marks_or_new().expect("there is room"));
    let (known, is_short) = (Rc::clone(witness), dice.roll(2) == 0);
    world.spawn(hosts[0], 0, move |_| {
        plan(&bytes, &mut |plan| writer.write(&object, plan).expect("the model has no faults"));
        writer.mark(&marks, 1).expect("the model has no faults");
        known.newest.set(1);
    });
    let reader = world.setup_as(hosts[1], 1, |memory| attach(memory, hosts[1], 200, witness));
    let known = Rc::clone(witness);
    let seen =
        world.setup_as(hosts[1], 1, |_| reader.pool().open(&reader.object_name(1)).expect("it is there"));
    let marks = world.setup_as(hosts[1], 1, |_| reader.marks().expect("as above").expect("as above"));
    world.spawn(hosts[1], 1, move |_| {
        for _ in 0..if is_short { 0 } else { 60 } {
            let before = known.newest.get();
            assert!(reader.marked_in(&marks).expect("the model has no faults") >= before, "it has no mark");
        }
        poll(&known, &reader, 1, seen);
    });
    world.run()
}

/// Takes a version as soon as it is published.
fn watch(witness: &Witness, store: &Store<ModelMemory>) {
    for _ in 0..8 {
        let listed = store.listed().expect("the model has no faults");
        let Some((number, listed)) = listed.first() else { continue };
        let Some(object) = store.open_listed(listed).expect("the model has no faults") else { continue };
        if poll(witness, store, *number, object) {
            return;
        }
    }
}

/// Looks at the head of an object until it is a version, or for so long; whether that was seen.
fn poll(witness: &Witness, store: &Store<ModelMemory>, number: u64, mut object: Object) -> bool {
    for _ in 0..40 {
        match store.find(number, object) {
            Ok(Found::Unpublished(same)) => object = same,
            Ok(Found::Whole(version)) => {
                witness.judge(&version);
                return true;
            }
            Ok(Found::Gone) => return true,
            Err(error) => panic!("version {number}: {error}"),
        }
    }
    store.pool().close(object);
    false
}

/// When the writer dies, another goes on: in its place, at another of its host, or on the other host.
fn come_back(world: &mut World, witness: &Rc<Witness>, writer: ThreadId, host: u16, dice: &mut Dice) {
    let (now, slot) = [(host, 0), (host, SPARE), (1 - host, SPARE)][dice.roll(3) as usize];
    let (sizes, stays) = (sizes(dice), dice.roll(2) == 0);
    let known = Rc::clone(witness);
    world.spawn_after_crash(writer, now, slot, move |memory| {
        known.boot(host);
        let store = attach(memory, now, 300, &known);
        loop {
            match known.publish(&store, sizes, stays) {
                None => break,
                Some(PoolError::VersionTaken { .. }) if known.is_unsure() => break,
                // Another process has the slot of the dead one, and has not said so yet.
                Some(PoolError::VersionTaken { .. }) => store.pool().memory().pause(),
                Some(error) => panic!("cannot go on: {error}"),
            }
        }
        known.restore(&store);
    });
    if now != host {
        // Somebody of its host puts right what it left.
        let known = Rc::clone(witness);
        world.spawn_after_crash(writer, host, 0, move |memory| {
            known.boot(host);
            drop(attach(memory, host, 400, &known));
        });
    }
}

impl Witness {
    /// Somebody comes because a process of `host` died.
    fn boot(&self, host: u16) {
        if self.crash == Some(Crash::Host) {
            self.boots[usize::from(host)].set(1);
        }
    }
}

/// At the end the newest version is whole, and the one before it too; then all can be removed, and nothing is left.
fn judge(world: &mut World, witness: &Rc<Witness>, is_writer: bool) {
    let memories: Vec<_> = (0..HOSTS).map(|host| world.memory(host, SPARE)).collect();
    let witness = Rc::clone(witness);
    world.check(0, move |_| {
        let attach = |(host, memory)| attach(memory, host, JUDGE, &witness);
        let stores: Vec<_> = (0..).zip(memories).map(attach).collect();
        let newest = witness.restore(&stores[0]);
        let versions = stores[1].versions().expect("the model has no faults");
        assert!(
            versions.len() as u64 >= witness.done.get().min(2),
            "{versions:?} of {} calls",
            witness.done.get()
        );
        if witness.crash.is_none() || !is_writer {
            // Two, and those that hold what the two share with them.
            let objects = stores[1].pool().list("").expect("the model has no faults").len();
            assert!(objects <= 4 && versions.len() <= objects, "{objects} objects of {versions:?}");
        }
        assert_eq!(versions.last().copied().unwrap_or(0), newest);
        for number in versions {
            witness.judge(&stores[1].open(number).expect("it is kept"));
        }
        stores[0].remove().expect("nobody keeps a lock");
        let none = stores[1].newest().map(|version| version.number());
        assert_eq!(none, Err(PoolError::NoVersion { name: NAME.to_owned(), version: None, kept: vec![] }));
        let pools: Vec<_> = stores.iter().map(|store| Arc::clone(store.pool())).collect();
        assert_eq!(pools[0].list(""), Ok(vec![]));
        expect_all_clean(&pools);
    });
}

fn attach(memory: ModelMemory, host: u16, pid: u32, witness: &Witness) -> Store<ModelMemory> {
    // When the judge comes, all have ended: a host line that a dead process left torn has it watch for heartbeats.
    let is_known = witness.kernels == Some(Kernels::Shared) || pid == JUDGE;
    let boot = 7 + witness.boots[usize::from(host)].get();
    let pool = attached(&POOL, memory, is_known, Member { pid, ..Member::new(host, boot) });
    Store::new(pool, NAME).expect("a good name")
}
