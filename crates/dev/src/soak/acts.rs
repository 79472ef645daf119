//! What victims and survivors do in a round, each in a process of its own.

mod cache;

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use polder_kernels::{Dtype, Op};
use polder_mem::{AnyMemory, Memory, Nanos, ProcessSlot, Trigger, TriggerAction, Wrapped};
use polder_pool::endpoint::{self, Address, Completion, Endpoint, Filter, Label};
use polder_pool::group::{Group, GroupOptions, JoinedGroup};
use polder_pool::ring::{Consumer, Producer, RingLink, RingPlace, RingShape};
use polder_pool::service::{Agreement, Client, ClientSession, ProxySession, ServiceOptions};
use polder_pool::storage::{Store, Version};
use polder_pool::wait::Patience;
use polder_pool::{InitialContents, Object, Peer, Pool, PoolError, Process, inspect};
use polder_schedule::{Exchange, Shard};

use super::scene::{Dice, Fate, Round, What};
use super::wire::Wire;
use crate::Failure;

/// Within this time a survivor knows what happened; far longer than it takes on a machine that is not overloaded.
pub(super) const DEADLINE: Duration = Duration::from_secs(20);
/// Within this time a survivor knows that a victim stands still.
pub(super) const SHORT_DEADLINE: Duration = Duration::from_millis(60);

/// More slots than the messages of a round need, so that nobody waits.
const WIDE: (u32, u32) = (16, 1024);
/// Fewer slots than a message has parts.
const NARROW: (u32, u32) = (2, 1024);

/// The credits of rings from victims to the first survivor.
const CREDITS: &str = "/ring/credits";
/// The headers and cells of rings from the first survivor to victims.
const LINES: &str = "/ring/lines";
/// An object of the first survivor that every victim reads.
const KEPT: &str = "/kept";
const KEPT_BYTES: usize = 200;

/// What survivors may name: everything else is of this round.
pub(super) const STAYS: [&str; 3] = [CREDITS, LINES, KEPT];

/// A process of a soak in its pool.
pub(super) struct Actor<'a> {
    pub(super) pool: &'a Arc<Pool<AnyMemory>>,
    pub(super) wire: &'a mut Wire,
}

fn shape(what: What) -> RingShape {
    let (slots, cell_bytes) = if what == What::Push { WIDE } else { NARROW };
    RingShape::new(slots, cell_bytes).expect("a shape in range")
}

/// What is sent in a round: every form of message, of every way into the ring.
fn messages(seed: u64) -> Vec<Vec<u8>> {
    let mut dice = Dice(seed);
    [8, 0, 16, 100, 700, 2500, 17, 1024].map(|length| dice.bytes(length)).into()
}

fn kept() -> Vec<u8> {
    Dice(7).bytes(KEPT_BYTES)
}

/// The objects of the first survivor that stay for the whole soak.
pub(super) fn set_up(pool: &Pool<AnyMemory>) -> Result<Vec<Object>, Failure> {
    let credits = pool.create(CREDITS, shape(What::Push).consumer_bytes())?;
    let lines = pool.create(LINES, shape(What::Push).producer_bytes())?;
    let object = pool.create(KEPT, KEPT_BYTES as u64)?;
    object.write_at(pool.memory(), 0, &kept())?;
    Ok(vec![credits, lines, object])
}

/// The victim's name for an object of this round.
fn own(round: &Round, what: &str) -> String {
    format!("/victim/{}/{what}", round.number)
}

/// The object of the first survivor that the victim of this round destroys.
fn doomed(round: &Round) -> String {
    format!("/doomed/{}", round.number)
}

// The victim.

/// The steps of a victim, each announced before and after, so that everybody knows how far it came.
struct Steps<'a, 'b> {
    actor: &'a mut Actor<'b>,
    first: u64,
    /// Whether each line is answered.
    is_heard: bool,
}

impl<'a, 'b> Steps<'a, 'b> {
    /// Says that it is ready, waits until it may begin, and arms its fate.
    fn begin(actor: &'a mut Actor<'b>, fate: Fate) -> Result<Self, Failure> {
        actor.wire.say(&format!("ready {}", actor.pool.this_process().slot.0))?;
        let is_heard = match actor.wire.hear()?.as_deref() {
            Some("go") => false,
            Some("go and be heard") => true,
            _ => return Err(Failure("the victim was not let go".into())),
        };
        let memory = actor.pool.memory();
        let first = instruments(memory).operations();
        instruments(memory).arm(fate.trigger());
        Ok(Self { actor, first, is_heard })
    }

    fn step<T>(&mut self, what: impl FnOnce(&Pool<AnyMemory>) -> Result<T, PoolError>) -> Result<T, Failure> {
        self.say("begun")?;
        let outcome = what(self.actor.pool)?;
        self.say("done")?;
        Ok(outcome)
    }

    /// Where its kernel will die, what it says must have been heard before: a kernel takes along what it has not sent.
    fn say(&mut self, words: &str) -> Result<(), Failure> {
        self.actor.wire.say(words)?;
        match self.is_heard {
            true => self.actor.wire.hear().map(drop),
            false => Ok(()),
        }
    }

    /// Says how many operations it made, and dies.
    fn end(self) -> Result<(), Failure> {
        let memory = self.actor.pool.memory();
        let operations = instruments(memory).operations() - self.first;
        self.actor.wire.say(&format!("total {operations}"))?;
        die(memory)
    }
}

/// What counts the operations of this process: its settings name a trigger.
pub(super) fn instruments(memory: &AnyMemory) -> &Wrapped {
    memory.instruments().expect("the settings name what is wrapped around the memory")
}

/// Dies as if by `kill -9`.
pub(super) fn die(memory: &AnyMemory) -> Result<(), Failure> {
    instruments(memory).arm(Trigger { operation: 1, action: TriggerAction::Kill });
    memory.sfence();
    Err(Failure("a process outlived its death".into()))
}

/// Plays the victim of a round; does not return.
pub(super) fn victim(actor: &mut Actor<'_>, round: &Round) -> Result<(), Failure> {
    match round.scene.what {
        What::Push | What::Stream => push(actor, round),
        What::Pop => pop(actor, round),
        What::Create | What::Attach => create(actor, round),
        What::AllReduce => all_reduce(actor, round),
        What::Job | What::Kv => take_part(actor, round, 0),
        What::Client => train(actor, round),
        What::Proxy => sum(actor, round),
        What::Publish => publish(actor, round),
    }
}

fn push(actor: &mut Actor<'_>, round: &Round) -> Result<(), Failure> {
    let (pool, shape) = (Arc::clone(actor.pool), shape(round.scene.what));
    // Not cleared: a ring must bear whatever stands in a new extent.
    let lines = pool.create_filled(&own(round, "lines"), shape.producer_bytes(), InitialContents::Nothing)?;
    let credits = pool.open(CREDITS)?;
    let peer = pool.process(super::scene::FIRST_HOST, ProcessSlot(0))?;
    let mut steps = Steps::begin(actor, round.fate)?;
    let place = RingPlace { lines: lines.at(), credits: credits.at(), generation: round.number as u32 };
    let mut producer = Producer::new(pool.memory().clone(), shape, place, link(&pool, peer)?);
    for (tag, bytes) in (0..).zip(messages(round.seed)) {
        steps.step(|pool| producer.push(1, tag, &bytes, soon(pool, DEADLINE)))?;
    }
    steps.end()
}

fn pop(actor: &mut Actor<'_>, round: &Round) -> Result<(), Failure> {
    let (pool, shape) = (Arc::clone(actor.pool), shape(round.scene.what));
    let credits =
        pool.create_filled(&own(round, "credits"), shape.consumer_bytes(), InitialContents::Nothing)?;
    let lines = pool.open(LINES)?;
    let peer = pool.process(super::scene::FIRST_HOST, ProcessSlot(0))?;
    let mut steps = Steps::begin(actor, round.fate)?;
    let place = RingPlace { lines: lines.at(), credits: credits.at(), generation: round.number as u32 };
    let mut consumer = Consumer::new(pool.memory().clone(), shape, place, link(&pool, peer)?);
    // A producer that gave up on it in the middle of a message sends no more.
    let patience = if round.fate.action == TriggerAction::Stop { 10 * SHORT_DEADLINE } else { DEADLINE };
    for sent in messages(round.seed) {
        let (_, bytes) = steps.step(|pool| consumer.pop(soon(pool, patience)))?;
        if bytes != sent {
            return Err(Failure("the victim popped what was not sent".into()));
        }
    }
    steps.end()
}

/// The steps of `create`, by number.
mod step {
    pub(super) const CREATE: usize = 0;
    pub(super) const WRITE: usize = 1;
    pub(super) const READ_KEPT: usize = 2;
    pub(super) const CREATE_LARGE: usize = 3;
    pub(super) const DESTROY_OTHERS: usize = 4;
    pub(super) const DESTROY_OWN: usize = 5;
    pub(super) const CREATE_AGAIN: usize = 6;
    pub(super) const MAINTAIN: usize = 7;
    pub(super) const LIST: usize = 8;
}

const SMALL: u64 = 100;
const LARGER: u64 = 300;

/// More than a chunk.
fn large_bytes(pool: &Pool<AnyMemory>) -> u64 {
    pool.superblock().geometry.chunk_bytes * 5 / 4
}

fn create(actor: &mut Actor<'_>, round: &Round) -> Result<(), Failure> {
    let (small, large, doomed) = (own(round, "small"), own(round, "large"), doomed(round));
    let mut steps = Steps::begin(actor, round.fate)?;
    let written = Dice(round.seed).bytes(SMALL as usize);
    let object = Cell::new(None);
    for number in step::CREATE..=step::LIST {
        steps.step(|pool| {
            match number {
                step::CREATE => object.set(Some(pool.create(&small, SMALL)?)),
                step::WRITE => {
                    let created = object.take().expect("created in the step before");
                    created.write_at(pool.memory(), 0, &written)?;
                    pool.close(created);
                }
                step::READ_KEPT => {
                    let mut read = vec![0; KEPT_BYTES];
                    let object = pool.open(KEPT)?;
                    object.read_at(pool.memory(), 0, &mut read)?;
                    assert_eq!(read, kept(), "the survivor's object");
                    pool.close(object);
                }
                step::CREATE_LARGE => {
                    pool.close(pool.create_filled(&large, large_bytes(pool), InitialContents::Nothing)?)
                }
                step::DESTROY_OTHERS => pool.destroy(&doomed)?,
                step::DESTROY_OWN => pool.destroy(&small)?,
                step::CREATE_AGAIN => object.set(Some(pool.create(&small, LARGER)?)),
                step::MAINTAIN => pool.maintain()?,
                _ => assert!(pool.list("/victim/")?.len() >= 2, "its own objects are missing"),
            }
            Ok(())
        })?;
    }
    steps.end()
}

fn all_reduce(actor: &mut Actor<'_>, round: &Round) -> Result<(), Failure> {
    let size = ranks(round);
    let mut group = join(actor, round, size - 1, size)?;
    let mut steps = Steps::begin(actor, round.fate)?;
    for index in 0..EXCHANGES {
        let right = steps.step(|_| exchange(&mut group, round.seed, index))?;
        if !right {
            return Err(Failure(format!("the victim got a wrong result of operation {index}")));
        }
    }
    steps.end()
}

/// Does what a process does that is one of several that may die.
pub(super) fn take_part(actor: &mut Actor<'_>, round: &Round, rank: usize) -> Result<(), Failure> {
    match round.scene.what {
        What::Kv => cache::share(actor, round, rank),
        _ => talk(actor, round, rank),
    }
}

/// Bytes of what each endpoint of a job sends to each: in a header, in a cell, and in parts.
const TALK: [usize; 3] = [8, 700, 5000];

/// One endpoint of a job: tells its address, sends every message to every endpoint, and receives as many.
fn talk(actor: &mut Actor<'_>, round: &Round, rank: usize) -> Result<(), Failure> {
    let (pool, memory) = (Arc::clone(actor.pool), actor.pool.memory());
    let first = instruments(memory).operations();
    instruments(memory).arm(round.fate.trigger());
    let options = endpoint::EndpointOptions {
        ring: shape(What::Push),
        eager_bytes: 1000,
        window_bytes: 2000,
        timeout: DEADLINE,
        // On a busy machine each call gives way to others, and thousands take long.
        calls_a_look: 64,
        ..endpoint::EndpointOptions::default()
    };
    let mut end = Endpoint::open(Arc::clone(&pool), options)?;
    actor.wire.say(&format!("{:032x}", u128::from_le_bytes(end.address().encode())))?;
    let all = actor.wire.hear()?.unwrap_or_default();
    let decode = |word: &str| Address::decode(u128::from_str_radix(word, 16).ok()?.to_le_bytes());
    let of = |from: usize, tag: usize| Dice(round.seed ^ (from << 8 | tag) as u64).bytes(TALK[tag]);
    let mut open = 0;
    for (other, address) in
        all.split(' ').enumerate().filter_map(|(other, word)| Some((other, decode(word)?)))
    {
        let peer = end.connect(address);
        for (tag, &bytes) in TALK.iter().enumerate() {
            let label = Label { kind: 1, tag: tag as u64, data: None };
            let filter = Filter { from: Some(peer), kind: 1, tag: tag as u64, ignore: 0 };
            end.receive(filter, vec![0; bytes], Some(of(other, tag)));
            // A peer that has died is refused at once.
            let refused = end.send(peer, label, of(rank, tag), None).err();
            open += 1 + usize::from(refused.is_none());
        }
    }
    let deadline = soon(&pool, DEADLINE);
    while open > 0 {
        end.progress()?;
        match end.completion() {
            Some(Completion::Received { buffer, context: Some(sent), .. }) if buffer != sent => {
                return Err(Failure("an endpoint received what was not sent".into()));
            }
            Some(Completion::Failed {
                error: PoolError::PeerDead { .. } | PoolError::Broken { .. }, ..
            }) => open -= 1,
            Some(Completion::Failed { error, .. }) => return Err(error.into()),
            Some(Completion::Lost { .. }) => {}
            Some(_) => open -= 1,
            None if pool.memory().now() > deadline => {
                return Err(Failure("an endpoint waits for the dead".into()));
            }
            None => std::thread::yield_now(),
        }
    }
    if round.seed.is_multiple_of(3) {
        end.close()?;
    }
    actor.wire.say(&format!("total {}", instruments(pool.memory()).operations() - first))?;
    die(pool.memory())
}

/// Sweeps up what a job has left, of which nobody lives.
pub(super) fn sweep(actor: &Actor<'_>) -> Result<(), Failure> {
    actor.pool.sweep_job(actor.pool.member().job)?;
    match actor.pool.list("/endpoint/")?.first() {
        Some(left) => Err(Failure(format!("{} is left of the job", left.name))),
        None => Ok(()),
    }
}

/// Ranks of the group of a round; the victim is the last of them.
pub(super) const fn ranks(round: &Round) -> usize {
    if round.scene.alone { 2 } else { 3 }
}

/// The operations of a victim: a barrier, a message in one exchange, and one that is cut into rounds; then again.
const EXCHANGES: usize = 5;
/// Elements of the long message: it goes through the staging several times.
const LONG: usize = 700;

fn options(round: &Round) -> GroupOptions {
    GroupOptions {
        staging_bytes: 4096,
        segment_bytes: 512,
        direct_bytes: 256,
        timeout: patience(round),
        patience: Patience::SHARED,
        ..GroupOptions::default()
    }
}

fn join(
    actor: &Actor<'_>,
    round: &Round,
    rank: usize,
    size: usize,
) -> Result<JoinedGroup<AnyMemory>, Failure> {
    let joining = GroupOptions { timeout: DEADLINE, ..options(round) };
    let mut group = Group::join(Arc::clone(actor.pool), &own(round, "group"), rank, size, joining, None)?;
    group.set_timeout(patience(round));
    Ok(group)
}

/// One operation of every rank; whether its result is right.
fn exchange(group: &mut Group<AnyMemory>, seed: u64, index: usize) -> Result<bool, PoolError> {
    let elements = match index % 3 {
        0 => return group.barrier().map(|()| true),
        1 => 5,
        _ => LONG,
    };
    let of = |rank: usize| {
        let mut dice = Dice(seed ^ (index << 8 | rank) as u64);
        (0..elements).map(move |_| dice.draw() >> 8)
    };
    let mut data: Vec<u8> = of(group.rank()).flat_map(u64::to_le_bytes).collect();
    group.all_reduce(Op::Sum, Dtype::U64, &mut data)?;
    let mut sums = vec![0; elements];
    for rank in 0..group.size() {
        sums.iter_mut().zip(of(rank)).for_each(|(sum, element)| *sum += element);
    }
    Ok(sums.into_iter().flat_map(u64::to_le_bytes).eq(data))
}

/// Steps of a service. Clients that outlive a victim go on until it is dead.
const TRAINING: usize = 3;

/// Who is what in a service: the clients, then one proxy. Survivors come first among their kind.
#[derive(Clone, Copy)]
struct Cast {
    clients: usize,
    victim: usize,
}

impl Cast {
    const fn of(round: &Round) -> Self {
        match (round.scene.what, round.scene.alone) {
            (What::Proxy, true) => Self { clients: 1, victim: 1 },
            (What::Proxy, false) => Self { clients: 2, victim: 2 },
            (_, true) => Self { clients: 1, victim: 0 },
            (_, false) => Self { clients: 2, victim: 1 },
        }
    }

    /// The number of a survivor.
    const fn survivor(self, rank: usize) -> usize {
        if rank < self.victim { rank } else { rank + 1 }
    }

    fn join(
        self,
        actor: &Actor<'_>,
        round: &Round,
        client: usize,
    ) -> Result<ClientSession<AnyMemory>, Failure> {
        let (pool, name) = (Arc::clone(actor.pool), own(round, "service"));
        Ok(ClientSession::join(pool, &name, client, (self.clients, 1), service_options(), None)?)
    }

    fn join_as_proxy(self, actor: &Actor<'_>, round: &Round) -> Result<ProxySession<AnyMemory>, Failure> {
        let (pool, name) = (Arc::clone(actor.pool), own(round, "service"));
        Ok(ProxySession::join(pool, &name, 0, (self.clients, 1), service_options(), None)?)
    }
}

/// How long a survivor waits for others in a service that has been joined. With one client, a proxy has nobody else to wait for.
fn service_patience(round: &Round) -> Duration {
    let awaits_one = round.scene.what == What::Client && round.scene.alone;
    match round.fate.action {
        // An exchange takes longer to begin than a ring.
        TriggerAction::Stop if !awaits_one => 4 * SHORT_DEADLINE,
        _ => DEADLINE,
    }
}

fn service_options() -> ServiceOptions {
    ServiceOptions { timeout: DEADLINE, ..ServiceOptions::default() }
}

/// Three tensors: of a line, of some lines, and of more than a block of a copy.
fn agreed() -> Agreement {
    let shard = |(tensor, bytes)| Shard { tensor, start: 0, bytes, proxy: 0 };
    let shards = (0..).zip([64, 200, 1000]).map(shard).collect();
    Agreement::new(Exchange::new(shards, 1).expect("shards of different tensors"), Dtype::F32)
}

/// What a client pushes of a shard: whole numbers that are so small that the mean of two has a half at most.
fn gradients(seed: u64, step: usize, client: usize, bytes: u64) -> Vec<f32> {
    let mut dice = Dice(seed ^ (step << 8 | client) as u64);
    (0..bytes / 4).map(|_| (dice.draw() % 1000) as f32).collect()
}

/// One step of a client; whether it pulled the means.
fn train_once(
    client: &mut Client<AnyMemory>,
    seed: u64,
    step: usize,
    number: usize,
    clients: usize,
) -> Result<bool, PoolError> {
    let shards = client.agreed().exchange.shards().to_vec();
    let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
    for (index, shard) in (0..).zip(&shards) {
        client.push(index, &bytes(&gradients(seed, step, number, shard.bytes)))?;
    }
    let mut is_right = true;
    while let Some(index) = client.wait()? {
        let length = shards[index as usize].bytes;
        let mut weights = vec![0; length as usize];
        client.pull(index, &mut weights)?;
        let mut mean = vec![0.0; length as usize / 4];
        for client in 0..clients {
            mean.iter_mut().zip(gradients(seed, step, client, length)).for_each(|(sum, value)| *sum += value);
        }
        mean.iter_mut().for_each(|sum| *sum /= clients as f32);
        is_right &= weights == bytes(&mean);
    }
    Ok(is_right)
}

fn train(actor: &mut Actor<'_>, round: &Round) -> Result<(), Failure> {
    let cast = Cast::of(round);
    let mut session = cast.join(actor, round, cast.victim)?;
    let mut steps = Steps::begin(actor, round.fate)?;
    steps.step(|_| session.begin(&agreed(), None).map(drop))?;
    for step in 0..TRAINING {
        let is_right =
            steps.step(|_| train_once(session.client()?, round.seed, step, cast.victim, cast.clients))?;
        if !is_right {
            return Err(Failure(format!("the victim pulled a wrong mean in step {step}")));
        }
    }
    steps.end()
}

fn sum(actor: &mut Actor<'_>, round: &Round) -> Result<(), Failure> {
    let session = Cast::of(round).join_as_proxy(actor, round)?;
    let mut steps = Steps::begin(actor, round.fate)?;
    steps.step(|_| session.serve(|| None))?;
    steps.end()
}

/// Versions that a victim publishes. The first survivor has published one before.
const VERSIONS: u64 = 3;
/// Draws the tensors of the version that a survivor publishes after it.
const LAST: u64 = 100;

fn store(pool: &Arc<Pool<AnyMemory>>, round: &Round) -> Result<Store<AnyMemory>, PoolError> {
    Store::new(Arc::clone(pool), &format!("victim/{}", round.number))
}

/// The tensors of a version: one that changes each time, and one that seldom does.
fn tensors(round: &Round, version: u64) -> [Vec<u8>; 2] {
    let seldom = version / 3;
    [Dice(round.seed ^ version).bytes(700), Dice(round.seed ^ seldom << 32).bytes(300)]
}

fn publish_version(store: &Store<AnyMemory>, round: &Round, version: u64) -> Result<u64, PoolError> {
    let [often, seldom] = tensors(round, version);
    Ok(store.publish(&[("often", &often), ("seldom", &seldom)])?.version)
}

/// That a version holds what was published under its number.
fn expect_version(round: &Round, version: &Version<AnyMemory>) -> Result<(), Failure> {
    let number = version.number();
    for (name, bytes) in ["often", "seldom"].into_iter().zip(tensors(round, number)) {
        let mut found = vec![0; bytes.len()];
        version.read(name, &mut found)?;
        if found != bytes {
            return Err(Failure(format!("{name} of version {number} holds other bytes than were written")));
        }
    }
    Ok(())
}

fn publish(actor: &mut Actor<'_>, round: &Round) -> Result<(), Failure> {
    let store = store(actor.pool, round)?;
    let mut steps = Steps::begin(actor, round.fate)?;
    for number in 2..2 + VERSIONS {
        let published = steps.step(|_| publish_version(&store, round, number))?;
        if published != number {
            return Err(Failure(format!("the victim published version {published}, not {number}")));
        }
    }
    steps.end()
}

// The survivors.

/// What a survivor is told of a victim.
#[derive(Clone, Copy, Debug)]
pub(super) struct Victim {
    pub(super) pid: u32,
    pub(super) slot: u16,
}

impl Victim {
    fn process(self, actor: &Actor<'_>, round: &Round) -> Result<Process, Failure> {
        let process = actor.pool.process(round.scene.host(), ProcessSlot(self.slot))?;
        match process.pid == self.pid {
            true => Ok(process),
            false => Err(Failure(format!("the victim's line names pid {}, not {}", process.pid, self.pid))),
        }
    }

    /// That `error` is the one that a survivor must get once the victim is dead: it names it, in time.
    fn expect_dead(self, round: &Round, error: &PoolError, waited: Duration) -> Result<(), Failure> {
        let victim = Peer::new(round.scene.host(), self.pid);
        match error {
            PoolError::PeerDead { peer, .. }
                if Peer::new(peer.host, peer.pid) == victim && waited < DEADLINE =>
            {
                Ok(())
            }
            error => Err(Failure(format!(
                "a survivor got, after {} ms, not the death of {victim}: {error}",
                waited.as_millis()
            ))),
        }
    }

    /// That `error` is the one that a survivor must get once the victim is dead or stands still: it names it, or another survivor that gave up
    /// on it before. The soak holds that one did.
    fn expect_named(
        self,
        actor: &mut Actor<'_>,
        round: &Round,
        error: &PoolError,
        waited: Duration,
    ) -> Result<(), Failure> {
        match error {
            // The victim gives up too, once it goes on and finds that others have.
            PoolError::GaveUp { .. } if round.fate.action == TriggerAction::Stop => actor.wire.say("told"),
            _ if self.is_late(round, error, actor)? => Ok(()),
            _ => self.expect_dead(round, error, waited),
        }
    }

    /// Whether `error` says that the victim is late; the soak lets it go on then.
    fn is_late(self, round: &Round, error: &PoolError, actor: &mut Actor<'_>) -> Result<bool, Failure> {
        let victim = Peer::new(round.scene.host(), self.pid);
        match late(round, error) == Some(victim) {
            true => actor.wire.say("late").map(|()| true),
            false => Ok(false),
        }
    }
}

/// Whom `error` calls late, in a round in which the victim may stand still.
fn late(round: &Round, error: &PoolError) -> Option<Peer> {
    match (round.fate.action, error) {
        (TriggerAction::Stop, PoolError::Timeout { peer, .. }) => Some(Peer::new(peer.host, peer.pid)),
        _ => None,
    }
}

fn expect_broken<T>(outcome: Result<T, PoolError>) -> Result<(), Failure> {
    match outcome {
        Err(PoolError::Broken { .. }) => Ok(()),
        Err(error) => Err(Failure(format!("the second error of a survivor is another: {error}"))),
        Ok(_) => Err(Failure("what failed went on".into())),
    }
}

/// Pops what the victim pushes until that is dead, and says how much it was.
pub(super) fn outlive_producer(
    actor: &mut Actor<'_>,
    round: &Round,
    victim: Victim,
) -> Result<usize, Failure> {
    let pool = Arc::clone(actor.pool);
    let (lines, credits) = (pool.open(&own(round, "lines"))?, pool.open(CREDITS)?);
    let place = RingPlace { lines: lines.at(), credits: credits.at(), generation: round.number as u32 };
    let link = link(&pool, victim.process(actor, round)?)?;
    let mut consumer = Consumer::new(pool.memory().clone(), shape(round.scene.what), place, link);
    actor.wire.say("attached")?;
    let (sent, mut into, mut patience) = (messages(round.seed), Vec::new(), patience(round));
    let mut count = 0;
    loop {
        let began = Instant::now();
        match consumer.pop_into(&mut into, soon(&pool, patience)) {
            Ok(envelope) if envelope.tag as usize == count && sent.get(count) == Some(&into) => count += 1,
            Ok(envelope) => {
                return Err(Failure(format!("message {count} came as {envelope:?}, or with other bytes")));
            }
            // The ring goes on, and so does the victim.
            Err(error) if patience < DEADLINE && victim.is_late(round, &error, actor)? => patience = DEADLINE,
            Err(error) => {
                victim.expect_dead(round, &error, began.elapsed())?;
                expect_broken(consumer.pop_into(&mut into, soon(&pool, patience)))?;
                pool.close(lines);
                pool.close(credits);
                return Ok(count);
            }
        }
    }
}

/// Pushes to the victim until that is dead.
pub(super) fn outlive_consumer(
    actor: &mut Actor<'_>,
    round: &Round,
    victim: Victim,
) -> Result<usize, Failure> {
    let pool = Arc::clone(actor.pool);
    let (lines, credits) = (pool.open(LINES)?, pool.open(&own(round, "credits"))?);
    let place = RingPlace { lines: lines.at(), credits: credits.at(), generation: round.number as u32 };
    let link = link(&pool, victim.process(actor, round)?)?;
    let mut producer = Producer::new(pool.memory().clone(), shape(round.scene.what), place, link);
    actor.wire.say("attached")?;
    let (sent, mut patience, mut count) = (messages(round.seed), patience(round), 0);
    loop {
        // What follows the last is never popped, so the ring fills up.
        let bytes = sent.get(count).map_or(&[][..], Vec::as_slice);
        let began = Instant::now();
        match producer.push(1, count as u64, bytes, soon(&pool, patience)) {
            Ok(()) => count += 1,
            Err(error) if patience < DEADLINE && victim.is_late(round, &error, actor)? => patience = DEADLINE,
            // A message that was under way when the victim was late has ended the ring.
            Err(PoolError::Broken { .. }) if round.fate.action == TriggerAction::Stop => break,
            Err(error) => {
                victim.expect_dead(round, &error, began.elapsed())?;
                expect_broken(producer.push(1, 0, bytes, soon(&pool, patience)))?;
                break;
            }
        }
    }
    pool.close(lines);
    pool.close(credits);
    Ok(count)
}

/// What a survivor says that has nothing to count.
pub(super) const UNCOUNTED: usize = u32::MAX as usize;

/// Works with the victim until that is dead, and says how far it came.
pub(super) fn outlive(actor: &mut Actor<'_>, round: &Round, rank: usize, pid: u32) -> Result<usize, Failure> {
    let victim = Victim { pid, slot: 0 };
    if round.scene.what == What::AllReduce {
        return outlive_rank(actor, round, rank, victim);
    }
    let cast = Cast::of(round);
    match cast.survivor(rank) {
        number if number == cast.clients => outlive_client(actor, round, victim),
        number => outlive_service(actor, round, number, victim),
    }
}

/// Sums for the victim until that is dead.
fn outlive_client(actor: &mut Actor<'_>, round: &Round, victim: Victim) -> Result<usize, Failure> {
    let mut session = Cast::of(round).join_as_proxy(actor, round)?;
    session.set_timeout(service_patience(round));
    actor.wire.say("attached")?;
    let began = Instant::now();
    match session.serve(|| None) {
        // How long it served before is not known.
        Err(error) => victim.expect_named(actor, round, &error, Duration::ZERO).map(|()| UNCOUNTED),
        Ok(()) => Err(Failure(format!("a service ended after {} ms", began.elapsed().as_millis()))),
    }
}

/// Trains as client `number` until the victim is dead, or has summed enough. It says how many operations of a client came to their end. If
/// the victim is the proxy, it says in which step it is, and how much of it was not summed.
fn outlive_service(
    actor: &mut Actor<'_>,
    round: &Round,
    number: usize,
    victim: Victim,
) -> Result<usize, Failure> {
    let cast = Cast::of(round);
    let mut session = cast.join(actor, round, number)?;
    session.set_timeout(service_patience(round));
    actor.wire.say("attached")?;
    let mut began = Instant::now();
    if let Err(error) = session.begin(&agreed(), None) {
        victim.expect_named(actor, round, &error, began.elapsed())?;
        return Ok(0);
    }
    for step in 0.. {
        if round.scene.what == What::Proxy && step == TRAINING {
            let began = Instant::now();
            return match session.leave() {
                Ok(()) => Ok(step),
                Err(error) => victim.expect_named(actor, round, &error, began.elapsed()).map(|()| step),
            };
        }
        began = Instant::now();
        let client = session.client()?;
        match train_once(client, round.seed, step, number, cast.clients) {
            Ok(true) => {}
            Ok(false) => return Err(Failure(format!("a survivor pulled a wrong mean in step {step}"))),
            Err(error) => {
                victim.expect_named(actor, round, &error, began.elapsed())?;
                let unsummed = client.unsummed().len();
                expect_broken(client.wait())?;
                return Ok(match round.scene.what {
                    What::Proxy => step << 8 | unsummed << 4 | 1,
                    _ => 1 + step,
                });
            }
        }
    }
    unreachable!("a victim takes part in a few steps")
}

/// Computes with the victim until that is dead, and says how many operations came to their end.
fn outlive_rank(actor: &mut Actor<'_>, round: &Round, rank: usize, victim: Victim) -> Result<usize, Failure> {
    let mut group = join(actor, round, rank, ranks(round))?;
    actor.wire.say("attached")?;
    for index in 0.. {
        let (began, without_cpu) = (Instant::now(), without_cpu());
        match exchange(&mut group, round.seed, index) {
            Ok(true) => {}
            Ok(false) => return Err(Failure(format!("a survivor got a wrong result of operation {index}"))),
            Err(error) => {
                let stood_still = self::without_cpu() - without_cpu >= patience(round) / 4;
                match (late(round, &error), &error) {
                    // The victim, or the other survivor, which waits for the victim and may have begun to later than this one.
                    (Some(_), _) => actor.wire.say("late")?,
                    // The other survivor was right to give up on this one as well: see `Group::recent`.
                    (None, PoolError::GaveUp { .. }) if stood_still => actor.wire.say("told")?,
                    _ => victim.expect_dead(round, &error, began.elapsed())?,
                }
                expect_broken(group.barrier())?;
                return Ok(index);
            }
        }
    }
    unreachable!("a victim takes part in a few operations")
}

/// For how long this thread was ready to run and had no CPU, since it began; nothing where the kernel does not count it.
fn without_cpu() -> Duration {
    let said = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanos = said.split(' ').nth(1).and_then(|nanos| nanos.parse().ok());
    Duration::from_nanos(nanos.unwrap_or(0))
}

/// Makes the object that the victim of this round destroys, the version that it goes on from, or the cache that it shares.
pub(super) fn prepare(actor: &Actor<'_>, round: &Round) -> Result<(), Failure> {
    match round.scene.what {
        What::Publish => publish_version(&store(actor.pool, round)?, round, 1).map(drop)?,
        What::Kv => cache::open(actor.pool, round).map(drop)?,
        _ => actor.pool.close(actor.pool.create(&doomed(round), SMALL)?),
    }
    Ok(())
}

/// Puts blocks into the cache that nobody else puts, for others to find when the kernel of this host is dead.
pub(super) fn keep(actor: &Actor<'_>, round: &Round) -> Result<(), Failure> {
    cache::keep(actor.pool, round)
}

/// Finds the blocks that another host has put for that.
pub(super) fn find_kept(actor: &Actor<'_>, round: &Round) -> Result<(), Failure> {
    cache::find_kept(actor.pool, round)
}

/// Gives up what this host has of the cache of this round, for a host that is gone.
pub(super) fn give_up(pool: &Arc<Pool<AnyMemory>>, round: &Round) -> Result<(), Failure> {
    cache::give_up(pool, round)
}

/// What an object must be, after so many steps.
enum Must {
    Be(u64),
    NotBe,
    /// Either: the victim was at it.
    Maybe(u64),
}

/// Holds what is there against what the victim had `begun` and `done`. Before its host has `repaired` what it left, the one
/// name that it was at may be blocked.
pub(super) fn judge(
    actor: &Actor<'_>,
    round: &Round,
    (begun, done): (usize, usize),
    repaired: bool,
) -> Result<(), Failure> {
    if round.scene.what == What::Publish {
        return judge_versions(actor, round, (begun as u64, done as u64), repaired);
    }
    if round.scene.what == What::Kv {
        return cache::judge(actor, round, repaired);
    }
    let at = |step: usize| (begun > step, done > step);
    let expect = |actor: &Actor<'_>, name: &str, must: &Must, contents: Option<&[u8]>, repaired| {
        let when = if repaired { "repaired" } else { "not repaired" };
        let explain = |Failure(why)| {
            Failure(format!("{why} (the victim began {begun} steps and ended {done}; {when})"))
        };
        expect(actor, name, must, contents, repaired).map_err(explain)
    };
    let made = |step, bytes| match at(step) {
        (_, true) => Must::Be(bytes),
        (true, false) => Must::Maybe(bytes),
        (false, false) => Must::NotBe,
    };
    let small = match (at(step::DESTROY_OWN), at(step::CREATE_AGAIN)) {
        ((_, true), _) => made(step::CREATE_AGAIN, LARGER),
        ((true, false), _) => Must::Maybe(SMALL),
        ((false, false), _) => made(step::CREATE, SMALL),
    };
    let doomed_is = match at(step::DESTROY_OTHERS) {
        (_, true) => Must::NotBe,
        (true, false) => Must::Maybe(SMALL),
        (false, false) => Must::Be(SMALL),
    };
    let contents =
        (at(step::WRITE).1 && !at(step::DESTROY_OWN).0).then(|| Dice(round.seed).bytes(SMALL as usize));
    expect(actor, &own(round, "small"), &small, contents.as_deref(), repaired)?;
    expect(actor, &own(round, "large"), &made(step::CREATE_LARGE, large_bytes(actor.pool)), None, repaired)?;
    expect(actor, &doomed(round), &doomed_is, None, repaired)?;
    expect(actor, KEPT, &Must::Be(KEPT_BYTES as u64), Some(&kept()), repaired)
}

/// The newest version is the last that the victim published, or the one that it was at; two are whole. Once the victim's host has
/// `repaired` what it left, another writer goes on.
fn judge_versions(
    actor: &Actor<'_>,
    round: &Round,
    (begun, done): (u64, u64),
    repaired: bool,
) -> Result<(), Failure> {
    let store = store(actor.pool, round)?;
    let explain =
        |what: String| Failure(format!("{what} (the victim began {begun} versions and ended {done})"));
    let newest = store.newest().map_err(|error| explain(error.to_string()))?;
    let number = newest.number();
    if !(1 + done..=1 + begun).contains(&number) {
        return Err(explain(format!("version {number} is the newest")));
    }
    expect_version(round, &newest)?;
    let kept = store.versions()?;
    if kept.last() != Some(&number) || kept.len() < 2.min(number as usize) {
        return Err(explain(format!("versions {kept:?} are kept")));
    }
    for number in kept {
        expect_version(round, &store.open(number)?)?;
    }
    drop(newest);
    if repaired {
        let next = publish_version(&store, round, LAST)?;
        let newest = store.newest()?;
        if newest.number() != next || next <= number {
            return Err(explain(format!("after version {next} the newest is {}", newest.number())));
        }
    }
    Ok(())
}

fn expect(
    actor: &Actor<'_>,
    name: &str,
    must: &Must,
    contents: Option<&[u8]>,
    repaired: bool,
) -> Result<(), Failure> {
    let pool = actor.pool;
    let object = match (pool.open(name), must) {
        (Ok(object), Must::Be(bytes) | Must::Maybe(bytes)) if object.bytes() == *bytes => object,
        (Err(PoolError::NotFound { .. }), Must::NotBe | Must::Maybe(_)) => return Ok(()),
        // Half a line, for as long as nobody repairs it.
        (Err(PoolError::Corrupt { .. } | PoolError::Timeout { .. }), Must::Maybe(_)) if !repaired => {
            return Ok(());
        }
        (Ok(object), _) => {
            return Err(Failure(format!("{name} of {} bytes is there and should not", object.bytes())));
        }
        (Err(error), _) => return Err(Failure(format!("{name} should be there: {error}"))),
    };
    if let Some(contents) = contents {
        let mut read = vec![0; contents.len()];
        object.read_at(pool.memory(), 0, &mut read)?;
        if read != contents {
            return Err(Failure(format!("{name} holds other bytes than were written")));
        }
    }
    pool.close(object);
    Ok(())
}

/// Creates and destroys an object while a process of the same host may stand still anywhere.
pub(super) fn bypass(actor: &Actor<'_>, round: &Round, victim: Victim) -> Result<(), Failure> {
    let (pool, name) = (actor.pool, format!("/sibling/{}", round.number));
    let peer = Peer::new(round.scene.host(), victim.pid);
    let done = pool.create(&name, SMALL).and_then(|object| {
        pool.close(object);
        pool.destroy(&name)
    });
    match done {
        Err(PoolError::Timeout { peer: late, .. }) if late == peer => Ok(()),
        done => Ok(done?),
    }
}

/// Proves that no name of this round is blocked by what the victim left, and destroys what is there.
pub(super) fn clean(actor: &Actor<'_>, round: &Round) -> Result<(), Failure> {
    let pool = actor.pool;
    let mut names: Vec<_> = ["small", "large", "lines", "credits"].map(|what| own(round, what)).into();
    match round.scene.what {
        What::AllReduce => {
            let victim = ranks(round) - 1;
            names.extend(["group", "group/staging"].map(|of| own(round, &format!("{of}/{victim}"))));
        }
        What::Client | What::Proxy => {
            let victim = Cast::of(round).victim;
            names.extend(["service", "service/1"].map(|of| own(round, &format!("{of}/{victim}"))));
        }
        What::Publish => {
            let store = store(pool, round)?;
            store.remove()?;
            let numbers = (1..3 + VERSIONS).map(|number| number.to_string());
            let of_store = |what: String| format!("/version/{}/{what}", store.name());
            names.extend(numbers.chain(["marks".to_owned()]).map(of_store));
        }
        What::Kv => cache::remove(pool, round)?,
        _ => {}
    }
    for name in names {
        match pool.create(&name, 0) {
            Ok(object) => pool.close(object),
            Err(PoolError::Exists { .. }) => {}
            Err(error) => return Err(Failure(format!("{name} cannot be made: {error}"))),
        }
        pool.destroy(&name)?;
    }
    for name in [doomed(round), format!("/sibling/{}", round.number)] {
        match pool.destroy(&name) {
            Ok(()) | Err(PoolError::NotFound { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// The free bytes, when nothing is there but what stays, and nothing is damaged.
pub(super) fn settle(actor: &Actor<'_>) -> Result<u64, Failure> {
    let pool = actor.pool;
    pool.maintain()?;
    for listed in pool.list("")? {
        if !STAYS.contains(&listed.name.as_str()) {
            return Err(Failure(format!("{} is still there", listed.name)));
        }
    }
    let inspection = inspect(pool.memory())?;
    if let Some(problem) = inspection.problems.first() {
        return Err(Failure(format!(
            "a check of the pool finds {} problems; {problem}",
            inspection.problems.len()
        )));
    }
    if inspection.stat.claimed + inspection.stat.condemned > 0 {
        return Err(Failure(format!("names are claimed or condemned still: {:?}", inspection.stat)));
    }
    match pool.create("/probe", u64::MAX / 4) {
        Err(PoolError::Full { free, .. }) => Ok(free),
        Err(error) => Err(error.into()),
        Ok(_) => Err(Failure("an object larger than the pool was made".into())),
    }
}

/// How long a survivor waits for a victim.
const fn patience(round: &Round) -> Duration {
    match round.fate.action {
        TriggerAction::Kill => DEADLINE,
        TriggerAction::Stop => SHORT_DEADLINE,
    }
}

fn soon(pool: &Pool<AnyMemory>, patience: Duration) -> Nanos {
    pool.memory().now() + patience
}

fn link(
    pool: &Arc<Pool<AnyMemory>>,
    other: Process,
) -> Result<RingLink<impl Fn() -> Result<(), PoolError> + use<>>, Failure> {
    let (pool, layout) = (Arc::clone(pool), pool.layout().clone());
    let me = pool.this_process();
    Ok(RingLink {
        peer: other.peer(),
        epoch: pool.epoch()?,
        bell: layout.bell(me.host, me.slot),
        wakes: Some(layout.bell(other.host, other.slot)),
        patience: Patience::SHARED,
        alive: move || pool.expect_alive(&other, "message", 0),
    })
}
