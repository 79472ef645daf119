//! A parameter service: up to three clients push shards in orders of their own, one or two proxies sum them, step after step; one or two
//! of them die or stop at any memory operation. Each sum that a client pulls is that of its own step.

use std::rc::Rc;
use std::sync::Arc;

use polder_kernels::{Dtype, Sgd};
use polder_mem::model::{Change, Harmless, ModelMemory, Outcome, Suite};
use polder_mem::{LINE, Offset};
use polder_schedule::{Exchange, Shard, ShardOrder};

use super::group::{Dice, Scene, harmless, tiny};
use crate::PoolError;
use crate::deviation::Deviation;
use crate::group::{GroupOptions, RankPlace};
use crate::service::{
    Agreement, Client, ClientReport, EmulatedLink, Optimizer, Order, Proxy, ServiceOptions, Slot,
};

pub(super) fn suites() -> Vec<Suite> {
    let about = "clients push shards in any order and pull the sums of their own step, or the parameters that an optimizer makes of them; survivors of a crash are told who died";
    let files = &["service.rs", "service/client.rs", "service/proxy.rs"];
    vec![Suite::new("service", about, service).mutates(files).harmless(HARMLESS)]
}

/// Protocols that are known to be wrong.
pub(super) fn canaries() -> Vec<Suite> {
    let about = "a proxy stays at the shard that came first until every queue has it at its head, as in Figure 10 of the paper";
    let first_come = |seed| Deviation::FirstComeFirstServed.during(|| service(seed));
    let taken = "a client pushes a shard into a window that another shard of the step still has";
    let is_taken = |seed| Deviation::WindowIsTaken.during(|| service(seed));
    vec![
        Suite::new("service-first-come-first-served", about, first_come),
        Suite::new("service-window-is-taken", taken, is_taken),
    ]
}

const HARMLESS: &[Harmless] = &[
    harmless("service.rs", "one look at the queues", Change::Drop),
    harmless("service.rs", "one look at the queues", Change::Weaken),
];

/// Bytes behind a rank's extent: any part, and a heartbeat.
const EXTRA: u64 = 24 * LINE;

/// What is exchanged in a schedule, and by whom.
struct Script {
    clients: usize,
    agreed: Arc<Agreement>,
    steps: u64,
    /// The order in which each client pushes in each step, and after how many pushes it pulls what has come.
    orders: Vec<Vec<Vec<u32>>>,
    eager: Vec<bool>,
    /// Whether each of the optimizer's steps is two: one averages, and the next steps with twice the means.
    is_kept: bool,
}

fn service(seed: u64) -> Outcome {
    let mut dice = Dice::new(seed, 11);
    // A proxy waits as long as all live, so that it has to see when one does not.
    let scene = Scene::new(seed, &mut dice, 4, tiny(128), EXTRA).with_heartbeats().with_two_victims();
    let has_two_proxies = match scene.size() {
        4 => dice.roll(4) > 0,
        3 => dice.roll(4) == 0,
        _ => false,
    };
    let proxies = 1 + u16::from(has_two_proxies);
    let clients = scene.size() - usize::from(proxies);
    let shards = 1 + dice.roll(4) as u32;
    let shard = |tensor, dice: &mut Dice| {
        let bytes = [8, 72, 128][dice.roll(3) as usize];
        Shard { tensor, start: 0, bytes, proxy: dice.roll(u64::from(proxies)) as u16 }
    };
    let exchange = Exchange::new((0..shards).map(|tensor| shard(tensor, &mut dice)).collect(), proxies);
    let exchange = exchange.expect("all go to a proxy");
    let steps = 1 + dice.roll(4);
    let mut order = || {
        let mut order: Vec<u32> = (0..shards).collect();
        for end in (1..order.len()).rev() {
            order.swap(end, dice.roll(end as u64 + 1) as usize);
        }
        order
    };
    let orders = (0..clients).map(|_| (0..steps).map(|_| order()).collect()).collect();
    let eager = (0..clients).map(|_| dice.roll(2) == 0).collect();
    let order = [ShardOrder::FirstInFirstOut, ShardOrder::FirstLayersFirst][dice.roll(2) as usize];
    let mut agreed = Agreement::new(exchange.ordered(order), Dtype::F64);
    if dice.roll(4) == 0 {
        agreed.links = vec![EmulatedLink { latency_ns: 100_000, bytes_per_second: 1 << 20 }; proxies.into()];
    }
    if dice.roll(2) == 0 {
        // One shard at a time, or two small ones.
        agreed.exchange = agreed.exchange.windowed(64 << dice.roll(2));
    }
    agreed.dtypes.iter_mut().for_each(|dtype| *dtype = [Dtype::F64, Dtype::F32][dice.roll(2) as usize]);
    if dice.roll(3) == 0 {
        agreed.dtypes.fill(Dtype::F32);
        agreed.groups = (0..shards).map(|shard| shard as u16 % 2).collect();
    }
    let is_kept = !agreed.groups.is_empty() && dice.roll(2) == 0;
    let agreed = Arc::new(agreed);
    let script = Rc::new(Script { clients, agreed, steps, orders, eager, is_kept });
    let parts: Vec<Offset> = (0..scene.size()).map(|rank| scene.extra(rank)).collect();
    scene.run_over(&mut dice, 60 * u64::from(shards) * steps, move |memory, members, rank, options| {
        run(&script, memory, places(members, &parts), rank, options)
    })
}

/// The parts of the ranks.
fn places(members: Vec<RankPlace>, parts: &[Offset]) -> Vec<RankPlace> {
    let part = |(member, &at): (RankPlace, &Offset)| RankPlace { at, bytes: EXTRA - LINE, ..member };
    members.into_iter().zip(parts).map(part).collect()
}

fn run(
    script: &Script,
    memory: ModelMemory,
    members: Vec<RankPlace>,
    rank: usize,
    options: GroupOptions,
) -> Result<(), PoolError> {
    let GroupOptions { timeout, silence, patience, epoch, .. } = options;
    let options = ServiceOptions { timeout, silence, patience, epoch };
    let agreed = Arc::clone(&script.agreed);
    if rank >= script.clients {
        let proxy = (rank - script.clients) as u16;
        return Proxy::over(memory, members, script.clients, proxy, agreed, options)?.serve();
    }
    let mut client = Client::over(memory, members, script.clients, rank, agreed, options)?;
    for step in 0..script.steps {
        assert_eq!(u64::from(client.step()), step + 1);
        let mut pulled = 0;
        // That of client 0 counts.
        if rank == 0 && !script.agreed.groups.is_empty() {
            client.order(&script.order(step))?;
        }
        let mut later = vec![];
        for &shard in &script.orders[rank][step as usize] {
            match script.of(step) {
                Of::Means => {
                    // No proxy has written there since.
                    let mut found = vec![0; script.agreed.exchange.shards()[shard as usize].bytes as usize];
                    client.read(shard, &mut found)?;
                    script.check(step - 1, shard, &found);
                    client.push_nothing(shard)?;
                }
                _ => later.push(shard),
            }
            push_what_may(script, &mut client, step, &mut later)?;
            if script.eager[rank]
                && let Some(shard) = client.ready()?
            {
                pull(script, &mut client, step, shard)?;
                pulled += 1;
                push_what_may(script, &mut client, step, &mut later)?;
            }
        }
        while let Some(shard) = client.wait()? {
            pull(script, &mut client, step, shard)?;
            pulled += 1;
            push_what_may(script, &mut client, step, &mut later)?;
        }
        assert_eq!(pulled, script.agreed.exchange.shards().len(), "each shard is handed out once");
    }
    client.leave();
    // Nothing comes of it: the proxies wait for the mark, which this would wipe or tear.
    client.report(&ClientReport { steps: script.steps, ..ClientReport::default() });
    Ok(())
}

/// Pushes the shards whose windows are free.
fn push_what_may(
    script: &Script,
    client: &mut Client<ModelMemory>,
    step: u64,
    later: &mut Vec<u32>,
) -> Result<(), PoolError> {
    if !later.is_empty() && script.eager[client.number()] {
        client.note()?;
    }
    // With the last pull the next step began.
    while u64::from(client.step()) == step + 1
        && let Some(at) = later.iter().position(|shard| client.may_push(*shard))
    {
        let shard = later.swap_remove(at);
        client.push(shard, &gradients(script, client.number(), step, shard))?;
    }
    Ok(())
}

/// What a step does where the proxies keep parameters.
enum Of {
    Load,
    Mean,
    Means,
    Pushes,
}

impl Script {
    fn of(&self, step: u64) -> Of {
        match (self.is_kept, step) {
            (_, 0) => Of::Load,
            (true, step) if step % 2 == 1 => Of::Mean,
            (true, _) => Of::Means,
            (false, _) => Of::Pushes,
        }
    }

    /// The first step brings the parameters, and every other one is one of plain SGD, or half of it.
    fn order(&self, step: u64) -> Order {
        let sgd = |group| {
            let lr = f64::from(group) + 1.0;
            Optimizer::Sgd(Sgd { lr, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, is_nesterov: false })
        };
        let last = self.agreed.groups.iter().max().copied().unwrap_or_default();
        let groups = (0..=last).map(sgd).collect();
        match self.of(step) {
            Of::Load => Order::Load(Slot::Parameters),
            Of::Mean => Order::Mean,
            Of::Means => Order::StepWithMeans { number: step / 2, groups, factors: vec![2.0] },
            Of::Pushes => Order::Step { number: step, groups },
        }
    }

    /// The mean of what the clients push.
    fn mean(&self, step: u64, shard: u32, index: u64) -> f64 {
        let clients = self.clients as u64;
        (0..clients).map(|client| element(self, client, step, shard, index)).sum::<f64>() / clients as f64
    }

    /// Whether these bytes are those that the clients find of a shard.
    fn check(&self, step: u64, shard: u32, bytes: &[u8]) {
        for (index, word) in (0..).zip(bytes.chunks_exact(self.agreed.dtype(shard).bytes())) {
            let value = match word.first_chunk() {
                Some(word) => f64::from_le_bytes(*word),
                None => f64::from(f32::from_le_bytes(word.try_into().expect("four bytes"))),
            };
            let expected = self.expected(step, shard, index);
            assert_eq!(value, expected, "element {index} of shard {shard} in step {step}");
        }
    }

    /// What the clients find. All numbers are whole and small, so that 32 bits hold them.
    fn expected(&self, step: u64, shard: u32, index: u64) -> f64 {
        let Some(group) = self.agreed.groups.get(shard as usize) else {
            return self.mean(step, shard, index);
        };
        let moved: f64 = match self.of(step) {
            Of::Mean => return self.mean(step, shard, index),
            Of::Means => (1..step).step_by(2).map(|step| 2.0 * self.mean(step, shard, index)).sum(),
            _ => (1..=step).map(|step| self.mean(step, shard, index)).sum(),
        };
        element(self, 0, 0, shard, index) - (f64::from(*group) + 1.0) * moved
    }
}

/// A number of a client, a step, a shard and an element: no two are equal, and their means are whole.
fn element(script: &Script, client: u64, step: u64, shard: u32, index: u64) -> f64 {
    let number = ((step + 1) * 8 + u64::from(shard)) * 32 + index;
    ((number * 8 + client + 1) * script.clients as u64) as f64
}

fn gradients(script: &Script, client: usize, step: u64, shard: u32) -> Vec<u8> {
    let width = script.agreed.dtype(shard).bytes() as u64;
    let elements = script.agreed.exchange.shards()[shard as usize].bytes / width;
    let number = |index| element(script, client as u64, step, shard, index);
    match width {
        4 => (0..elements).flat_map(|index| (number(index) as f32).to_le_bytes()).collect(),
        _ => (0..elements).flat_map(|index| number(index).to_le_bytes()).collect(),
    }
}

fn pull(script: &Script, client: &mut Client<ModelMemory>, step: u64, shard: u32) -> Result<(), PoolError> {
    if matches!(script.of(step), Of::Mean) {
        return client.leave_sum(shard);
    }
    let bytes = script.agreed.exchange.shards()[shard as usize].bytes;
    let mut found = vec![0; bytes as usize];
    client.pull(shard, &mut found)?;
    script.check(step, shard, &found);
    Ok(())
}
