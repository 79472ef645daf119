//! Hostile processes of a parameter service, driven by bytes: whatever their parts say, the victim's calls end with a result or an
//! error.
//!
//! The victim is a client or a proxy; the parts of all others belong to the script. It writes there between the victim's calls and
//! while the victim waits: entries of queues, marks and orders that look right, some that do not, single words, and gradients.
//! The script also tells the victim what is exchanged, as client 0 does.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use polder_kernels::{Adam, Dtype, Sgd};
use polder_mem::{Bell, Heap, HeapShape, LINE, Memory, Offset, ProcessSlot};
use polder_schedule::{Exchange, Shard, ShardOrder};

use super::place::{Places, encode, order_lines, state_line};
use super::session::{HEAD, Told};
use super::{Agreement, Client, ClientReport, EmulatedLink, Optimizer, Order, Proxy, ServiceOptions, Slot};
use crate::PoolError;
use crate::group::{Mark, RankPlace};
use crate::line::{self, WORDS};
use crate::script::Script;
use crate::wait::Patience;

const CLIENTS: usize = 2;
const PROXIES: u16 = 2;
const PROCESSES: usize = CLIENTS + PROXIES as usize;
const SHARDS: u32 = 5;
/// Bytes of a part: more than any agreement needs.
const PART: u64 = 4096;

const OPTIONS: ServiceOptions = ServiceOptions {
    timeout: Duration::from_micros(100),
    silence: Duration::ZERO,
    patience: Patience { spins: 0, yields: 0, nap: Duration::ZERO },
    epoch: 0,
};

/// Runs the script `bytes`.
///
/// # Panics
/// When the victim does, writes outside its own part, or returns an error that is none of a service.
pub fn drive(bytes: &[u8]) {
    let stage = Arc::new(Mutex::new(Stage::new(bytes)));
    while !lock(&stage).is_over() {
        lock(&stage).play(tell);
        let victim = lock(&stage).set();
        match victim.own.checked_sub(CLIENTS) {
            None => exchange(&stage, &victim),
            Some(proxy) => serve(&stage, &victim, proxy as u16),
        }
    }
}

/// What client 0 tells becomes an agreement or an error.
fn tell(script: &mut Script<'_>) {
    let mut head = [0; HEAD];
    head[0] = script.byte() % 8;
    head[8..11].copy_from_slice(&[script.byte() % 2, script.byte() % 2, script.byte() % 4]);
    head[16] = script.byte() % 3;
    head[24] = script.of(&[0, 64, 128]);
    if script.byte() < 64 {
        head[usize::from(script.byte()) % HEAD] = script.byte();
    }
    let Ok(Some(told)) = Told::read(&head) else { return };
    // A group's broadcast brings as many rows as the head says.
    if told.row_bytes() > 9 * 32 {
        return;
    }
    let word = |script: &mut Script<'_>, usual| script.near(usual).to_le_bytes();
    let row = |script: &mut Script<'_>| {
        let first = u64::from(script.byte() % 3) | u64::from(script.byte() % 2) << 32;
        let start = u64::from(script.byte()) * 64;
        let name = u64::from_le_bytes(*b"float32\0");
        [word(script, first), word(script, start), word(script, 64), word(script, name)].concat()
    };
    let mut rows: Vec<u8> = (0..9).flat_map(|_| row(script)).collect();
    rows.truncate(told.row_bytes());
    if let Ok(agreed) = told.agreement(&rows, PROXIES) {
        let places = agreed.places();
        assert!((0..PROXIES).all(|proxy| places.bytes(Some(proxy)) >= 4 * LINE), "{agreed:?}");
    }
}

/// A client, until its service breaks or the script ends.
fn exchange(stage: &Arc<Mutex<Stage>>, victim: &Victim) {
    let Victim { own, memory, members, agreed } = victim;
    let client = Client::over(memory.clone(), members.clone(), CLIENTS, *own, Arc::clone(agreed), OPTIONS);
    let mut client = client.expect("the parts fit");
    let meanwhile = Arc::clone(stage);
    client.on_wait(Box::new(move || lock(&meanwhile).meanwhile()));
    while !lock(stage).is_over() {
        let (what, shard) = lock(stage).begin();
        let known = agreed.exchange.shards().get(shard as usize);
        let mut data = vec![1; known.map_or(8, |shard| shard.bytes) as usize];
        let outcome = match what % 13 {
            0 | 1 => client.push(shard, &data),
            8 => client.push_nothing(shard),
            9 => client.leave_sum(shard),
            10 => client.read(shard, &mut data),
            11 => client.pushed(shard, &mut data),
            12 => {
                let [mut mean, mut square] = [vec![0; data.len()], vec![0; data.len()]];
                let moments = &mut [&mut *mean, &mut *square][..usize::from(agreed.moments)];
                client.recover(shard, &mut data, moments).map(drop)
            }
            2 => client.ready().map(expect_shard),
            3 => client.wait().map(expect_shard),
            4 | 5 => client.pull(shard, &mut data),
            6 => {
                client.report(&ClientReport::default());
                client.unsummed().into_iter().for_each(|shard| expect_shard(Some(shard)));
                client.summed_by(shard as u16 % PROXIES).map(drop)
            }
            _ => client.order(&Order::Load(Slot::Mean)),
        };
        if !lock(stage).judge(outcome) {
            return;
        }
    }
    client.leave();
}

fn expect_shard(shard: Option<u32>) {
    assert!(shard.is_none_or(|shard| shard < SHARDS), "{shard:?}");
}

/// A proxy, until all clients say that they left, its service breaks or the script ends.
fn serve(stage: &Arc<Mutex<Stage>>, victim: &Victim, proxy: u16) {
    let Victim { memory, members, agreed, .. } = victim;
    let serving = Proxy::over(memory.clone(), members.clone(), CLIENTS, proxy, Arc::clone(agreed), OPTIONS);
    let mut serving = serving.expect("the parts fit");
    let meanwhile = Arc::clone(stage);
    serving.on_wait(Box::new(move || lock(&meanwhile).meanwhile()));
    lock(stage).begin();
    let outcome = serving.serve();
    lock(stage).judge(outcome);
}

fn lock(stage: &Mutex<Stage>) -> std::sync::MutexGuard<'_, Stage> {
    stage.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The process that must bear it.
struct Victim {
    own: usize,
    memory: Heap,
    members: Vec<RankPlace>,
    agreed: Arc<Agreement>,
}

/// The region, and the hand that writes what belongs to the others.
struct Stage {
    memory: Heap,
    peer: Heap,
    script: Vec<u8>,
    at: usize,
    own: usize,
    agreed: Arc<Agreement>,
    /// What the victim must not change, as the script left it.
    theirs: Vec<u8>,
}

impl Stage {
    fn new(script: &[u8]) -> Self {
        let shape = HeapShape {
            bytes: PART * PROCESSES as u64,
            hosts: 4,
            processes: 3,
            local_words: 0,
            bells: PROCESSES as u32,
        };
        let memory = Heap::new(shape);
        let exchange = Exchange::new(vec![], PROXIES).expect("an exchange of nothing");
        let agreed = Arc::new(Agreement::new(exchange, Dtype::F32));
        let peer = memory.process(3, ProcessSlot(0));
        Self { memory, peer, script: script.to_vec(), at: 0, own: 0, agreed, theirs: vec![] }
    }

    fn is_over(&self) -> bool {
        self.at >= self.script.len()
    }

    /// Plays on where the script stands.
    fn play<T>(&mut self, play: impl FnOnce(&mut Script<'_>) -> T) -> T {
        let mut script = Script(&self.script[self.at.min(self.script.len())..]);
        let played = play(&mut script);
        // A script that has ended plays zeros, and each of them ends it.
        self.at = (self.script.len() - script.0.len()).max(self.at + 1);
        played
    }

    fn part(number: usize) -> Offset {
        Offset(PART * number as u64)
    }

    /// Zeroes all parts for a new service.
    fn set(&mut self) -> Victim {
        let (own, hosts, agreed) = self.play(|script| {
            let own = usize::from(script.byte()) % PROCESSES;
            let hosts = script.of(&[[0, 1, 2, 2], [0, 0, 1, 1], [0, 0, 0, 0]]);
            (own, hosts, agreement(script))
        });
        (self.own, self.agreed) = (own, Arc::new(agreed));
        self.peer.copy_in(Offset(0), &vec![0; PART as usize * PROCESSES]).expect("ordinary memory");
        let member = |number: usize| RankPlace {
            at: Self::part(number),
            bytes: PART,
            host: hosts[number],
            slot: ProcessSlot((number % 3) as u16),
            pid: number as u32,
            bell: Some(Bell(number as u32)),
            heartbeat: None,
            sign: None,
        };
        let members = (0..PROCESSES).map(member).collect();
        Victim { own, memory: self.memory.clone(), members, agreed: Arc::clone(&self.agreed) }
    }

    /// Writes a few things, and says what the victim does next: what, and to which shard.
    fn begin(&mut self) -> (u8, u32) {
        self.write();
        self.play(|script| (script.byte(), u32::from(script.byte()) % (SHARDS + 1)))
    }

    /// While the victim waits; whether it gives up.
    fn meanwhile(&mut self) -> bool {
        assert!(self.theirs == self.bytes_of_theirs(), "the victim wrote outside its own part");
        self.write();
        self.is_over()
    }

    /// Whether the victim's service goes on after this.
    fn judge(&self, outcome: Result<(), PoolError>) -> bool {
        assert!(self.theirs == self.bytes_of_theirs(), "the victim wrote outside its own part");
        match outcome {
            Ok(()) | Err(PoolError::Argument { .. }) => true,
            Err(
                PoolError::PeerDead { .. }
                | PoolError::Timeout { .. }
                | PoolError::GaveUp { .. }
                | PoolError::Interrupted { .. }
                | PoolError::Corrupt { .. },
            ) => false,
            Err(error) => panic!("not an error of a hostile peer: {error}"),
        }
    }

    /// All bytes that the victim must not write.
    fn bytes_of_theirs(&self) -> Vec<u8> {
        let bytes = |number: usize| {
            let mut bytes = vec![0; PART as usize];
            self.peer.copy_out(Self::part(number), &mut bytes).expect("ordinary memory");
            bytes
        };
        (0..PROCESSES).filter(|&number| number != self.own).flat_map(bytes).collect()
    }

    /// Writes up to four things.
    fn write(&mut self) {
        for _ in 0..self.play(|script| script.byte() % 5) {
            let (peer, agreed, own) = (self.peer.clone(), Arc::clone(&self.agreed), self.own);
            self.play(|script| write(&peer, &agreed, own, script));
        }
        self.theirs = self.bytes_of_theirs();
    }
}

/// What is exchanged: up to five shards over two proxies.
fn agreement(script: &mut Script<'_>) -> Agreement {
    let keeps_state = script.byte() < 64;
    let shard = |tensor, script: &mut Script<'_>| Shard {
        tensor,
        start: 0,
        bytes: script.of(&[8, 72, 128]),
        proxy: u16::from(script.byte()) % PROXIES,
    };
    let shards = (0..u32::from(script.byte()) % (SHARDS + 1)).map(|tensor| shard(tensor, script)).collect();
    let order = script.of(&[ShardOrder::FirstInFirstOut, ShardOrder::FirstLayersFirst]);
    let exchange = Exchange::new(shards, PROXIES).expect("shards of different tensors").ordered(order);
    let exchange = exchange.windowed(script.of(&[0, 64, 200]));
    let mut agreed = Agreement::new(exchange, Dtype::F32);
    if !keeps_state {
        let dtypes = [Dtype::F32, Dtype::F64, Dtype::BF16];
        agreed.dtypes.iter_mut().for_each(|dtype| *dtype = script.of(&dtypes));
    }
    if keeps_state {
        agreed.groups = (0..agreed.exchange.shards().len()).map(|shard| shard as u16 % 2).collect();
        agreed.moments = if agreed.keeps_state() { u16::from(script.byte() % 3) } else { 0 };
    }
    if script.byte() < 32 {
        let link = EmulatedLink { latency_ns: script.near(10), bytes_per_second: script.near(1 << 30) };
        agreed.links = vec![link; PROXIES.into()];
    }
    agreed
}

/// Writes one thing into the part of a process that is not the victim.
fn write(peer: &Heap, agreed: &Agreement, own: usize, script: &mut Script<'_>) {
    let number = (own + 1 + usize::from(script.byte()) % (PROCESSES - 1)) % PROCESSES;
    let (part, places) = (Stage::part(number), agreed.places());
    match script.byte() % 8 {
        0 => peer.store(part.word(script.word() % (PART / 8)), script.word()),
        1 => {
            let kind = script.of(&[Mark::left, Mark::dead, Mark::late, Mark::own]);
            let usual = u64::from(script.byte()) % PROCESSES as u64;
            let mark = kind(script.near(usual) as u32 as usize).word();
            let mut words = [script.near(mark), 0, 0, 0, 0, 0, 0];
            words[usize::from(script.byte()) % WORDS] |= u64::from(script.byte() / 128);
            line::publish(peer, state_line(part), &words);
        }
        2 if own != 0 => write_order(peer, agreed, script),
        3 => {
            let at = part + places.bytes(None).min(PART - 256) / 2 + u64::from(script.byte());
            let bytes: Vec<u8> = (0..script.byte() % 128).map(|_| script.byte()).collect();
            peer.copy_in(at, &bytes).expect("ordinary memory");
        }
        _ => {
            let proxy = u16::from(script.byte()) % PROXIES;
            let queue = if number < CLIENTS { places.queue_for(part, proxy) } else { Places::queue_of(part) };
            let entry = queue.word(u64::from(script.byte()) % u64::from(SHARDS));
            let [usual, step] = [script.byte() % SHARDS as u8, 1 + script.byte() % 2];
            let [shard, step] =
                [script.near(usual.into()) as u32 % (1 << 24), script.near(step.into()) as u32];
            peer.store(entry, encode(step, shard));
        }
    }
}

/// Writes client 0's order.
fn write_order(peer: &Heap, agreed: &Agreement, script: &mut Script<'_>) {
    let number = script.near(1);
    let sgd = Sgd { lr: 0.1, momentum: 0.9, dampening: 0.0, weight_decay: 0.0, is_nesterov: true };
    let adam = Adam { lr: 0.1, beta1: 0.9, beta2: 0.9, eps: 1e-8, weight_decay: 0.1, is_decoupled: true };
    let of = script.of(&[Optimizer::Sgd(sgd), Optimizer::Adam(adam)]);
    let groups = || vec![of; agreed.settings()];
    let order = match script.byte() % 6 {
        0 => Order::Load(Slot::Parameters),
        1 => Order::Load(Slot::Square),
        2 => Order::Save(Slot::Mean),
        3 => Order::Mean,
        4 => Order::StepWithMeans { number, groups: groups(), factors: vec![0.5] },
        _ => Order::Step { number, groups: groups() },
    };
    let step = script.near(1) as u32;
    for (index, mut words) in (0..).zip(order.lines(step)) {
        if script.byte() < 64 {
            script.change(&mut words);
        }
        line::publish(peer, order_lines(Stage::part(0)).lines(index), &words);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hostile::tests::play;

    #[test]
    fn hostile_processes_of_a_service_cause_errors_and_never_a_panic() {
        play(2000, 2000, drive);
    }
}
