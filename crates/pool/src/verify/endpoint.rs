//! Endpoints that send each other messages of every form, with rings and windows that are always full; one may die at any
//! memory operation, while somebody sweeps up what the dead leave and uses it for something else. Some messages lie in the pool,
//! and are read there. Some endpoints sleep until a peer wakes them, and ask now and then whether a peer lives.
//!
//! The oracle is the plan of all messages, which everybody knows: each arrives once, whole, and in the order that its sender
//! and its receiver's filters say; and what is complete when it is received has been written where it belongs before that.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use polder_mem::model::{Change, Crash, Harmless, Kernels, ModelMemory, Outcome, Suite, World};
use polder_mem::{Coherence, LINE, Memory, Offset};

use super::group::{Dice, harmless};
use super::stage::{PATIENCE, attached, expect_all_clean, pool_of, shape_of};
use crate::deviation::Deviation;
use crate::endpoint::{
    Address, CompleteWhen, Completion, Endpoint, EndpointOptions, Filter, Label, MessageBuffer,
};
use crate::format::{Geometry, Layout, Superblock};
use crate::object::{InitialContents, Object};
use crate::ring::RingShape;
use crate::wait::Patience;
use crate::{Member, Pool, PoolError, PrivateMemory};

pub(super) fn suites() -> Vec<Suite> {
    let about = "endpoints send each other eager and long messages, and one may die";
    let files = &["endpoint.rs", "inlet.rs", "place.rs", "watch.rs"];
    let small = "endpoints on small rings alone exchange words and parts in send buffers";
    vec![
        Suite::new("endpoint", about, endpoint).mutates(files).harmless(HARMLESS),
        Suite::new("endpoint-small", small, endpoint_small).mutates(&["outlet.rs", "stock.rs"]),
    ]
}

pub(super) fn canaries() -> Vec<Suite> {
    let about = "endpoints sleep until they are woken, and no message wakes them";
    let unchecked = "a piece is taken out of send buffers that may be something else by now";
    vec![
        Suite::new("endpoint-without-bells", about, |seed| explore(seed, false, false)),
        Suite::new("endpoint-unchecked", unchecked, |seed| {
            Deviation::TakesUnchecked.during(|| explore(seed, true, true))
        }),
    ]
}

const HARMLESS: &[Harmless] = &[
    harmless("endpoint/place.rs", "the blocks of the dead", Change::Drop),
    harmless("endpoint/place.rs", "the blocks of the dead", Change::Weaken),
    harmless("endpoint/place.rs", "one look at what the dead said", Change::Drop),
    harmless("endpoint/place.rs", "one look at what the dead said", Change::Weaken),
];

pub(super) const HOSTS: u16 = 2;
pub(super) const PROCESSES: u16 = 4;
/// The slot of the process that sweeps.
const SWEEPER: u16 = 2;
/// The slot of the process that looks at the end.
pub(super) const SPARE: u16 = 3;
const CHUNKS: u32 = 15;
const FIRST: u32 = 100;
/// Bytes of a cell, and of the longest message that is eager: less than a cell holds, or more.
const CELL: usize = 64;
const EAGER: usize = 48;
const EAGER_IN_PARTS: usize = 150;
/// Objects without which a process cannot talk: endpoints of all, blocks of its own and of those that write to it.
const NEEDED: usize = 3 + 2 + 3;
/// Inline, in a cell, and in parts of one.
const SIZES: [usize; 6] = [0, 8, 16, 40, 64, 150];

type End = Endpoint<ModelMemory, Lent, usize>;

/// Bytes that are lent for an operation, of which some lie in the pool too.
#[derive(Debug)]
struct Lent {
    bytes: Vec<u8>,
    place: Option<Offset>,
    /// How often they were written.
    writes: Rc<Cell<usize>>,
}

impl MessageBuffer for Lent {
    fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.writes.set(self.writes.get() + 1);
        &mut self.bytes
    }

    fn place(&self) -> Option<Offset> {
        self.place
    }
}

fn room(bytes: usize) -> Lent {
    Lent { bytes: vec![0; bytes], place: None, writes: Rc::default() }
}

pub(super) static POOL: LazyLock<(Superblock, Layout)> = LazyLock::new(|| {
    let geometry = Geometry {
        hosts: HOSTS,
        processes: PROCESSES,
        names: 29,
        levels: 3,
        chunk_bytes: 2048,
        opens: 32,
        keepers: 1,
    };
    pool_of(geometry, CHUNKS)
});

/// When a pair gets a ring of its own and for how long, how many send buffers there are for those that have none, and what is eager.
#[derive(Clone, Copy, Debug)]
struct Room {
    memory_bytes: u64,
    short_talk: u64,
    idle: Duration,
    send_buffers: u32,
    eager_bytes: usize,
    /// Objects that a process can open beside those that it cannot do without, if that is few.
    opens: Option<usize>,
}

impl Room {
    const ENOUGH: Self = Self {
        memory_bytes: u64::MAX,
        short_talk: 2,
        idle: PATIENCE,
        send_buffers: 1,
        eager_bytes: EAGER,
        opens: None,
    };
}

fn options(slots: u32, rings_bells: bool, room: Room) -> EndpointOptions {
    let shape = |cells| {
        RingShape::new(cells, CELL as u32).and_then(|shape| shape.with_slots(slots)).expect("a shape")
    };
    EndpointOptions {
        ring: shape(2),
        small_ring: shape(1),
        first_blocks: 1,
        short_talk: room.short_talk,
        send_buffers: room.send_buffers,
        memory_bytes: room.memory_bytes,
        idle: room.idle,
        eager_bytes: room.eager_bytes as u64,
        window_bytes: room.eager_bytes as u64 + 112,
        in_place_bytes: 50,
        timeout: PATIENCE,
        calls_a_look: 8,
        calls_a_search: 8,
        rings_bells,
    }
}

/// A message that everybody knows of.
#[derive(Clone, Copy, Debug)]
struct Message {
    from: usize,
    to: usize,
    label: Label,
    size: usize,
    salt: u64,
    /// Whether its bytes lie in the pool.
    staged: bool,
    /// When it is complete.
    until: CompleteWhen,
}

impl Witness {
    fn options(&self) -> EndpointOptions {
        options(self.slots, self.rings_bells && self.sleeps.is_some(), self.room)
    }
}

impl Message {
    /// How often the buffer that it belongs in has been written, at least, when its sender is told that it is complete.
    fn writes(&self, eager_bytes: usize) -> usize {
        let pieces = if self.staged { self.size.min(1) } else { self.size.div_ceil(CELL) };
        match self.until {
            CompleteWhen::Received => pieces,
            CompleteWhen::LongReceived if self.size > eager_bytes => pieces,
            CompleteWhen::LongReceived | CompleteWhen::Out | CompleteWhen::Matched => 0,
        }
    }

    /// Lines that it has of its sender's private memory, if it lies there.
    fn lines(&self) -> u64 {
        (self.size as u64).div_ceil(LINE).max(1)
    }

    fn bytes(&self) -> Vec<u8> {
        (0..self.size as u64).map(|index| (self.salt.rotate_left(index as u32 % 64) ^ index) as u8).collect()
    }
}

/// What is known outside the memory.
struct Witness {
    hosts: &'static [u16],
    plan: Vec<Message>,
    /// How often the buffer of each message's receive was written.
    writes: Vec<Rc<Cell<usize>>>,
    /// How each endpoint receives: 0 the next of anybody, 1 the next of each, 2 the next of each with its tag.
    ways: Vec<u64>,
    addresses: RefCell<Vec<Option<Address>>>,
    /// Slots of the rings.
    slots: u32,
    room: Room,
    /// Who dies.
    victim: Option<usize>,
    /// Whether the others come for its messages when it may be dead, or gone.
    comes_late: bool,
    /// Whether the first endpoint leaves when it is done, and another at its place talks to the second, which stays.
    encore: bool,
    kernels: Kernels,
    /// Whether the first endpoint leaves, whatever was taken of its messages, and uses its memory for something else.
    leaves: bool,
    /// How the endpoints sleep when they can only wait, if they do.
    sleeps: Option<Sleep>,
    /// Whether a message wakes the process that it goes to.
    rings_bells: bool,
    /// Whether they ask if a peer lives.
    asks: bool,
    /// Which have left, or begun to.
    left: RefCell<Vec<bool>>,
    /// Endpoints that have all that they wait for.
    over: Cell<usize>,
}

/// How endpoints sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sleep {
    /// Until a peer wakes them: all are under one kernel, and nobody leaves before it has all.
    UntilWoken,
    /// For a while at most.
    Nap,
}

impl Sleep {
    fn patience(self) -> Patience {
        let nap = if self == Self::UntilWoken { PATIENCE } else { Duration::from_micros(3) };
        Patience { spins: 2, yields: 2, nap }
    }
}

fn endpoint(seed: u64) -> Outcome {
    explore(seed, true, false)
}

fn endpoint_small(seed: u64) -> Outcome {
    explore(seed, true, true)
}

fn explore(seed: u64, rings_bells: bool, is_small: bool) -> Outcome {
    let mut dice = Dice::new(seed, 9);
    let hosts: &[u16] = [&[0, 1][..], &[0, 1], &[0, 0], &[0, 1, 1]][dice.roll(4) as usize];
    let crash = dice.roll(3) == 0;
    let ends = hosts.len() as u64;
    let messages = 1 + dice.roll(6);
    // All are read in place, and their sender looks at nothing meanwhile.
    let offers = !is_small && dice.roll(4) == 0;
    // Or all go one way, through send buffers.
    let go_one_way = offers || is_small && dice.roll(3) == 0;
    let leaves = go_one_way && !crash && dice.roll(3) == 0;
    let plan = (0..messages).map(|_| {
        let label =
            Label { kind: 1, tag: dice.roll(2), data: (dice.roll(4) == 0).then(|| dice.roll(100) as u32) };
        let salt = dice.roll(u64::MAX);
        if offers {
            return Message {
                from: 0,
                to: 1,
                label,
                size: SIZES[4],
                salt,
                staged: true,
                until: CompleteWhen::Out,
            };
        }
        let pair = (dice.roll(ends) as usize, dice.roll(ends) as usize);
        let (from, to) = if go_one_way { (0, 1) } else { pair };
        let staged = dice.roll(4) == 0;
        let until = [
            CompleteWhen::Out,
            CompleteWhen::Out,
            CompleteWhen::LongReceived,
            CompleteWhen::Received,
            CompleteWhen::Matched,
        ];
        let until = until[dice.roll(5) as usize];
        // A word, or more than a cell of a small ring holds.
        let size = if is_small { SIZES[1 + 4 * dice.roll(2) as usize] } else { SIZES[dice.roll(6) as usize] };
        Message { from, to, label, size, salt, staged: staged && !is_small, until }
    });
    let plan: Vec<_> = plan.collect();
    let writes = plan.iter().map(|_| Rc::default()).collect();
    // Nobody is told of the death of whoever may be anybody.
    let ways = (0..ends).map(|_| if crash || leaves { 1 + dice.roll(2) } else { dice.roll(3) }).collect();
    let kernels = if crash || dice.roll(2) == 0 { Kernels::Shared } else { Kernels::OnePerHost };
    let coherence = if dice.roll(8) == 0 { Coherence::Coherent } else { Coherence::Software };
    let shape = shape_of(&POOL.1, kernels, coherence);
    let mut world = World::new(seed, shape);
    let addresses = RefCell::new(vec![None; hosts.len()]);
    let victim = crash.then(|| if go_one_way { 0 } else { dice.roll(ends) as usize });
    let encore = !crash && !leaves && dice.roll(3) == 0;
    let slots = if offers { 4 } else { 2 };
    let mut room = Room {
        memory_bytes: [0, u64::MAX][dice.roll(2) as usize],
        short_talk: 1 + dice.roll(4),
        idle: [Duration::from_micros(1), PATIENCE][dice.roll(2) as usize],
        send_buffers: dice.roll(3) as u32,
        eager_bytes: if offers { EAGER } else { [EAGER, EAGER_IN_PARTS][dice.roll(2) as usize] },
        opens: (dice.roll(4) == 0 && !encore && !offers).then(|| dice.roll(3) as usize),
    };
    if is_small {
        (room.memory_bytes, room.send_buffers) = (0, 1 + room.send_buffers % 2);
    }
    let sleeps = (dice.roll(2) == 0).then(|| match crash || encore || leaves || kernels != Kernels::Shared {
        true => Sleep::Nap,
        false => Sleep::UntilWoken,
    });
    let witness = Rc::new(Witness {
        hosts,
        plan,
        writes,
        ways,
        addresses,
        slots,
        room,
        victim,
        comes_late: offers || is_small,
        encore,
        kernels,
        leaves,
        sleeps,
        rings_bells,
        asks: dice.roll(2) == 0,
        left: RefCell::new(vec![false; hosts.len()]),
        over: Cell::new(0),
    });
    for (number, &host) in hosts.iter().enumerate() {
        let slot = hosts[..number].iter().filter(|&&other| other == host).count() as u16;
        let (pool, acts) =
            (world.setup_as(host, slot, |memory| attach(memory, kernels, host, number)), dice.roll(1 << 30));
        let known = Rc::clone(&witness);
        let thread = world.spawn(host, slot, move |_| converse(pool, number, acts, &known));
        if victim == Some(number) {
            world.crash_within(thread, Crash::Process, 1500);
        }
    }
    let used_again = victim.filter(|_| offers || is_small);
    if used_again.is_some() || dice.roll(4) == 0 {
        let host = used_again.map_or_else(|| dice.roll(u64::from(HOSTS)) as u16, |victim| hosts[victim]);
        let pool = world.setup_as(host, SWEEPER, |memory| attach(memory, kernels, host, 40));
        world.spawn(host, SWEEPER, move |_| {
            for _ in 0..if used_again.is_some() { 12 } else { 3 } {
                pool.sweep_job(0).expect("nobody keeps a lock");
                litter(&pool);
            }
        });
    }
    judge(&mut world, kernels, &witness);
    world.run()
}

pub(super) fn attach(
    memory: ModelMemory,
    kernels: Kernels,
    host: u16,
    number: usize,
) -> Arc<Pool<ModelMemory>> {
    let member = Member { pid: FIRST + number as u32, ..Member::new(host, 7) };
    attached(&POOL, memory, kernels == Kernels::Shared, member)
}

/// Writes where something was that is not there any more.
fn litter(pool: &Pool<ModelMemory>) {
    pool.maintain().expect("nobody keeps a lock");
    let litter = [0xdd; 400];
    if let Ok(object) = pool.create_filled(LITTER, litter.len() as u64, InitialContents::Nothing) {
        object.write_at(pool.memory(), 0, &litter).expect("no fault");
        pool.abandon(object);
    }
}

const LITTER: &str = "/litter";

/// Sends and receives all that the plan says of endpoint `number`.
fn converse(pool: Arc<Pool<ModelMemory>>, number: usize, acts: u64, witness: &Witness) {
    let mut dice = Dice::new(acts, 10);
    let mut end = End::open(Arc::clone(&pool), witness.options()).expect("a port is free");
    witness.addresses.borrow_mut()[number] = Some(end.address());
    let peers: Vec<u32> = (0..witness.hosts.len())
        .map_while(|peer| Some(end.connect(address_of(&pool, witness, peer)?)))
        .collect();
    if peers.len() < witness.hosts.len() {
        return;
    }
    let plan = &witness.plan;
    let mut sends: VecDeque<usize> = (0..plan.len()).filter(|&index| plan[index].from == number).collect();
    let mut receives: VecDeque<usize> = (0..plan.len()).filter(|&index| plan[index].to == number).collect();
    let staged = sends.iter().filter(|&&index| plan[index].staged);
    let lines: u64 = staged.map(|&index| plan[index].lines()).sum();
    let take = || PrivateMemory::take(Arc::clone(&pool), 0, lines * LINE).expect("there is room");
    let stage = (lines > 0).then(take);
    let mut free = stage.as_ref().map(PrivateMemory::at);
    let hoard = witness.room.opens.map_or_else(Vec::new, |opens| hoard(&pool, end.address(), opens));
    let is_late = witness.comes_late
        && (witness.victim.is_some_and(|victim| victim != number) || witness.leaves && number != 0);
    if is_late {
        work(&pool, dice.roll(4000));
    }
    let (mut open, mut received) = (0, BTreeMap::new());
    while open > 0 || !sends.is_empty() || !receives.is_empty() {
        if is_late && dice.roll(8) == 0 {
            work(&pool, dice.roll(2000));
        }
        if witness.asks && dice.roll(8) == 0 {
            ask(&mut end, &peers, dice.roll(peers.len() as u64) as usize, witness);
        }
        let mut over = None;
        match dice.roll(4) {
            0 | 1 => {
                if let Some(index) = sends.pop_front() {
                    let place = free.filter(|_| plan[index].staged);
                    if let Some(place) = place {
                        pool.memory().copy_in(place, &plan[index].bytes()).expect("no fault");
                        free = Some(place.lines(plan[index].lines()));
                    }
                    open += send(&mut end, peers[plan[index].to], &plan[index], index, place, &mut dice);
                    if witness.slots > 2 {
                        (0..dice.roll(24)).for_each(|_| pool.memory().pause());
                    }
                }
                let is_time = witness.slots > 2 || dice.roll(4) == 0;
                if witness.leaves && number == 0 && sends.is_empty() && is_time {
                    return leave(end, stage, &pool, witness);
                }
            }
            2 => {
                if let Some(index) = receives.pop_front() {
                    let Message { from, label, .. } = plan[index];
                    let way = witness.ways[number];
                    let filter = Filter {
                        from: (way > 0).then_some(peers[from]),
                        kind: 1,
                        tag: label.tag,
                        ignore: if way == 2 { 0 } else { u64::MAX },
                    };
                    let lent = Lent { writes: Rc::clone(&witness.writes[index]), ..room(SIZES[5]) };
                    end.receive(filter, lent, index);
                    open += 1;
                }
            }
            _ => match witness.sleeps.filter(|_| sends.is_empty() && receives.is_empty() && open > 0) {
                Some(sleep) => over = sleep_until_over(&mut end, sleep),
                None => {
                    if dice.roll(4) == 0 {
                        end.read_news_next();
                    }
                    end.progress().expect("nobody is evicted");
                    pool.memory().pause();
                }
            },
        }
        while let Some(done) = over.take().or_else(|| end.completion()) {
            open -= usize::from(!matches!(done, Completion::Lost { .. }));
            if let Some((context, came)) = finish(done, &peers, number, witness, pool.memory()) {
                received.insert(context, came);
            }
        }
    }
    for from in 0..peers.len() {
        let came = received.values().filter(|came| came.from == from);
        let sent = plan.iter().filter(|message| (message.from, message.to) == (from, number));
        let pairs: Vec<_> = came.zip(sent).collect();
        // Where it matters who is meant, each receive has been held against its message.
        let in_order = pairs.iter().all(|(came, sent)| came.is(sent));
        assert!(
            in_order || witness.ways[number] > 0,
            "{number} received from {from} in another order: {pairs:?}"
        );
    }
    if witness.encore && number == 1 {
        hear_the_next(&pool, &mut end, peers[0]);
    }
    let at = end.address();
    witness.left.borrow_mut()[number] = true;
    end.close().expect("nobody is evicted");
    hoard.into_iter().for_each(|object| pool.close(object));
    if witness.encore && number == 0 {
        let to = address_of(&pool, witness, 1).expect("nobody dies");
        drop(stage);
        let memory = pool.memory().clone();
        // The block that the second had for it is free once its process is gone.
        let is_gone = dice.roll(2) == 0;
        let pool = if is_gone { None } else { Some(pool) };
        let pool = pool.unwrap_or_else(|| attach(memory, witness.kernels, witness.hosts[0], number));
        speak_as_the_next(&pool, at, to);
    }
    witness.over.set(witness.over.get() + 1);
}

/// Does something else meanwhile. Whoever waits so long lets the time pass after which others give up.
fn work(pool: &Pool<ModelMemory>, steps: u64) {
    for _ in 0..steps {
        pool.memory().now();
    }
}

/// Asks whether a peer lives, which says no of those only that are dead or have left.
fn ask(end: &mut End, peers: &[u32], peer: usize, witness: &Witness) {
    if let Err(error) = end.check_alive(peers[peer]) {
        let is_gone = witness.victim == Some(peer) || witness.left.borrow()[peer];
        assert!(is_gone && matches!(error, PoolError::PeerDead { .. }), "{peer} is said to be gone: {error}");
    }
}

/// Sleeps until an operation is over, or a while.
fn sleep_until_over(end: &mut End, sleep: Sleep) -> Option<Completion<Lent, usize>> {
    let watch = end.watch();
    let span = if sleep == Sleep::UntilWoken { PATIENCE } else { Duration::from_micros(20) };
    let over = watch.until(sleep.patience(), span, |harder| {
        if harder {
            end.search_next();
        }
        end.step().expect("nobody is evicted")
    });
    assert!(over.is_some() || sleep == Sleep::Nap, "nobody has woken an endpoint that sleeps");
    over
}

/// Leaves, whatever was read of its messages, and uses the memory where they lie for something else.
fn leave(end: End, stage: Option<PrivateMemory<ModelMemory>>, pool: &Pool<ModelMemory>, witness: &Witness) {
    witness.left.borrow_mut()[0] = true;
    drop(end);
    if let Some(stage) = &stage {
        pool.memory().copy_in(stage.at(), &vec![0xee; stage.bytes() as usize]).expect("no fault");
    }
    drop(stage);
    litter(pool);
    witness.over.set(witness.over.get() + 1);
}

const ENCORE: Label = Label { kind: 2, tag: 9, data: Some(1) };
const ENCORE_OF_ALL: Filter = Filter { from: None, kind: ENCORE.kind, tag: ENCORE.tag, ignore: 0 };
/// Messages with which the one that stays answers.
const ANSWERS: u8 = 3;

/// Holds so much open that few more objects can be opened than a conversation needs.
fn hoard(pool: &Pool<ModelMemory>, Address { host, port, .. }: Address, opens: usize) -> Vec<Object> {
    let open = || pool.open(&format!("/endpoint/0/{host}.{port}"));
    let mut held: Vec<_> = std::iter::from_fn(|| open().ok()).collect();
    let left = held.len().saturating_sub(NEEDED + opens);
    held.split_off(left).into_iter().for_each(|object| pool.close(object));
    held
}

/// Talks to an endpoint that stays, as one at the place of one that has left.
fn speak_as_the_next(pool: &Arc<Pool<ModelMemory>>, left: Address, to: Address) {
    let mut end = End::open(Arc::clone(pool), options(2, true, Room::ENOUGH)).expect("a port is free");
    let address = end.address();
    assert_eq!((address.host, address.port), (left.host, left.port));
    let peer = end.connect(to);
    end.inject(peer, ENCORE, &[7; 40]).expect("the peer is known");
    for answer in 1..=ANSWERS {
        end.receive(ENCORE_OF_ALL, room(40), 0);
        let came = loop {
            end.progress().expect("nobody is evicted");
            match end.completion() {
                Some(Completion::Received { buffer, arrival, .. }) => break (buffer.bytes, arrival.label),
                Some(other) => panic!("{other:?}"),
                None => pool.memory().pause(),
            }
        };
        assert_eq!(came, (vec![answer; 40], ENCORE));
    }
    end.close().expect("nobody is evicted");
}

/// Is told that an endpoint has left from which it waits for something, and hears the next at its place.
fn hear_the_next(pool: &Pool<ModelMemory>, end: &mut End, left: u32) {
    end.receive(Filter { from: Some(left), ..ENCORE_OF_ALL }, room(40), 0);
    end.receive(ENCORE_OF_ALL, room(40), 1);
    let (mut is_gone, mut came) = (false, None);
    while !is_gone || came.is_none() {
        end.progress().expect("nobody is evicted");
        match end.completion() {
            Some(Completion::Failed { context: 0, error: PoolError::PeerDead { .. }, .. }) => is_gone = true,
            Some(Completion::Received { buffer, context: 1, arrival }) => {
                came = Some((buffer.bytes, arrival.label));
                for answer in 1..=ANSWERS {
                    end.inject(arrival.from, ENCORE, &[answer; 40]).expect("the peer is known");
                }
            }
            Some(other) => panic!("{other:?}"),
            None => pool.memory().pause(),
        }
    }
    assert_eq!(came, Some((vec![7; 40], ENCORE)));
}

/// The address of an endpoint, once it has one; nothing when its process died before.
fn address_of(pool: &Pool<ModelMemory>, witness: &Witness, peer: usize) -> Option<Address> {
    loop {
        if let Some(address) = witness.addresses.borrow()[peer] {
            return Some(address);
        }
        let (host, slots) = (witness.hosts[peer], &witness.hosts[..peer]);
        let slot = slots.iter().filter(|&&other| other == host).count() as u16;
        let is_alive = pool.peer_alive(host, polder_mem::ProcessSlot(slot)).expect("no fault");
        if !is_alive && witness.addresses.borrow()[peer].is_none() {
            return None;
        }
        pool.memory().pause();
    }
}

/// Sends a message, one way or the other; how many completions come of it.
fn send(
    end: &mut End,
    to: u32,
    message: &Message,
    index: usize,
    place: Option<Offset>,
    dice: &mut Dice,
) -> usize {
    let bytes = message.bytes();
    if place.is_none() && message.until == CompleteWhen::Out && dice.roll(2) == 0 {
        end.inject(to, message.label, &bytes).expect("the peer is known");
        return 0;
    }
    let lent = Lent { bytes, place, writes: Rc::default() };
    end.send_until(message.until, to, message.label, lent, index).expect("the peer is known");
    1
}

/// What came.
#[derive(Debug)]
struct Came {
    from: usize,
    label: Label,
    bytes: Vec<u8>,
}

impl Came {
    fn is(&self, message: &Message) -> bool {
        (self.from, self.label) == (message.from, message.label) && self.bytes == message.bytes()
    }
}

/// Holds what is over against the plan. Returns what came, and to which receive.
fn finish(
    done: Completion<Lent, usize>,
    peers: &[u32],
    number: usize,
    witness: &Witness,
    memory: &ModelMemory,
) -> Option<(usize, Came)> {
    let plan = &witness.plan;
    match done {
        Completion::Sent { buffer: Lent { bytes, place, .. }, context } => {
            assert_eq!(bytes, plan[context].bytes(), "sent {context}");
            // Where it matters who is meant, each receive is that of its message.
            let (writes, wanted) =
                (witness.writes[context].get(), plan[context].writes(witness.room.eager_bytes));
            assert!(
                witness.ways[plan[context].to] == 0 || writes >= wanted,
                "{context} is complete, and was written {writes} times of {wanted}"
            );
            if let Some(place) = place {
                // It is the sender's again, who does with it what it likes.
                memory.copy_in(place, &vec![0xee; bytes.len()]).expect("no fault");
            }
        }
        Completion::Received { buffer: Lent { bytes: mut buffer, .. }, context, arrival } => {
            let from = peers.iter().position(|&peer| peer == arrival.from).expect("a peer of the plan");
            buffer.truncate(arrival.bytes as usize);
            let came = Came { from, label: arrival.label, bytes: buffer };
            let is_right = witness.ways[number] == 0 || came.is(&plan[context]);
            assert!(is_right, "{number} received {came:?} for {:?}", plan[context]);
            return Some((context, came));
        }
        Completion::Failed { context, error, .. } => {
            let Message { from, to, .. } = plan[context];
            let with = if from == number { to } else { from };
            let is_gone = witness.victim == Some(with) || witness.leaves && with == 0;
            let is_fine = matches!(error, PoolError::PeerDead { .. }) && is_gone;
            assert!(is_fine, "message {context} failed: {error}");
        }
        Completion::Lost { error } => {
            let is_fine = matches!(error, PoolError::PeerDead { .. }) && witness.victim.is_some();
            assert!(is_fine, "a message was lost: {error}");
        }
    }
    None
}

/// At the end everybody has all, and nothing is left; where somebody died, its port can be had again.
fn judge(world: &mut World, kernels: Kernels, witness: &Rc<Witness>) {
    let witness = Rc::clone(witness);
    let memories: Vec<_> = (0..HOSTS).map(|host| world.memory(host, SPARE)).collect();
    world.check(0, move |_| {
        let pools: Vec<_> =
            (0..).zip(memories).map(|(host, memory)| attach(memory, kernels, host, 50)).collect();
        if witness.victim.is_none() {
            assert_eq!(witness.over.get(), witness.hosts.len(), "somebody waits for ever");
            assert_eq!(pools[0].list(""), Ok(vec![]));
        }
        pools[0].sweep_job(0).expect("nobody keeps a lock");
        assert_eq!(pools[0].list(""), Ok(vec![]), "the dead have left something");
        expect_all_clean(&pools);
        for pool in pools {
            let end =
                End::open(pool, options(2, false, Room::ENOUGH)).expect("whoever died is in nobody's way");
            assert_eq!(end.address().port, 0);
        }
    });
}
