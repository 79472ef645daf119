//! A parameter service: up to three clients push shards in orders of their own, one or two proxies sum them, step after step; one or two
//! of them die or stop at any memory operation. Each sum that a client pulls is that of its own step.
//!
//! Where proxies keep an optimizer's state, a proxy dies while it logs and steps, or its host does. What the clients recover of each shard is
//! that of a whole step. One of them brings it to another proxy, on another host, and goes on there. Clients also recover shards of a proxy that
//! lives, as if they took it for dead.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

use polder_kernels::{Dtype, Sgd};
use polder_mem::model::{Change, Crash, Harmless, ModelMemory, Outcome, Suite, reached};
use polder_mem::{Coherence, LINE, Offset, ProcessSlot};
use polder_schedule::{Exchange, Shard, ShardOrder};

use super::group::{Aimed, Dice, Scene, harmless, tiny};
use crate::PoolError;
use crate::deviation::Deviation;
use crate::group::{GroupOptions, RankPlace};
use crate::service::{
    Agreement, Client, ClientReport, EmulatedLink, Optimizer, Order, Proxy, ServiceOptions, Slot,
};

pub(super) fn suites() -> Vec<Suite> {
    let about = "clients push shards in any order and pull the sums of their own step, or the parameters that an optimizer makes of them; survivors of a crash are told who died, and go on with the state of a dead proxy";
    let files = &["service.rs", "service/client.rs", "service/proxy.rs"];
    let on_hdm_db =
        "on hdm-db, a host that dies alone has written back what its proxy says of an optimizer's step";
    vec![
        Suite::new("service", about, service).mutates(files).harmless(HARMLESS),
        Suite::new("service-hdm-db", on_hdm_db, service).mutates(files).on(Coherence::HdmDb),
    ]
}

/// Protocols that are known to be wrong.
pub(super) fn canaries() -> Vec<Suite> {
    let about = "a proxy stays at the shard that came first until every queue has it at its head, as in Figure 10 of the paper";
    let first_come = |seed| Deviation::FirstComeFirstServed.during(|| service(seed));
    let taken = "a client pushes a shard into a window that another shard of the step still has";
    let is_taken = |seed| Deviation::WindowIsTaken.during(|| service(seed));
    let unlogged = "a proxy changes moments that it has not logged";
    let is_unlogged = |seed| Deviation::StepsUnlogged.during(|| service(seed));
    let at_a_look = "a client takes what a proxy keeps of a shard for whole, and does not look again";
    let is_at_a_look = |seed| Deviation::RecoversAtALook.during(|| service(seed));
    vec![
        Suite::new("service-first-come-first-served", about, first_come),
        Suite::new("service-window-is-taken", taken, is_taken),
        Suite::new("service-steps-unlogged", unlogged, is_unlogged),
        Suite::new("service-recovers-at-a-look", at_a_look, is_at_a_look),
    ]
}

const HARMLESS: &[Harmless] = &[
    harmless("service.rs", "one look at the queues", Change::Drop),
    harmless("service.rs", "one look at the queues", Change::Weaken),
];

/// Bytes of any part.
const PART: u64 = 40 * LINE;
/// Bytes behind a rank's extent: its part, one for when another process has its place, and a heartbeat.
const EXTRA: u64 = 2 * PART + LINE;

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
    /// Whether each client recovers shards of proxies that live.
    looks: Vec<bool>,
    /// What becomes of the state of a proxy that dies.
    will: Option<Will>,
}

/// The client that takes over the state of a proxy, and that proxy's heir.
#[derive(Clone, Copy)]
struct Will {
    client: usize,
    proxy: u16,
    heir: RankPlace,
}

fn service(seed: u64) -> Outcome {
    let mut dice = Dice::new(seed, 11);
    // A proxy waits as long as all live, so that it has to see when one does not.
    let mut scene = Scene::new(seed, &mut dice, 4, tiny(128), EXTRA).with_heartbeats().with_two_victims();
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
    let keeps = dice.roll(2) == 0;
    if keeps {
        agreed.dtypes.fill(Dtype::F32);
        agreed.moments = 1;
        agreed.groups = (0..shards).map(|shard| shard as u16 % 2).collect();
    }
    let is_kept = keeps && dice.roll(3) == 0;
    let looks = (0..clients).map(|_| keeps && dice.roll(3) == 0).collect();
    let parts: Vec<Offset> = (0..scene.size()).map(|rank| scene.extra(rank)).collect();
    let mut script =
        Script { clients, agreed: Arc::new(agreed), steps, orders, eager, is_kept, looks, will: None };
    if keeps && dice.roll(2) == 0 {
        scene = die_in_a_step(scene, &mut script, &parts, &mut dice);
    }
    let script = Rc::new(script);
    scene.run_over(&mut dice, 60 * u64::from(shards) * steps, move |memory, members, rank, options| {
        run(&script, memory, places(members, &parts), rank, options)
    })
}

/// Lets a proxy die about where it says that it has logged a shard, or done its step, or let its host die.
fn die_in_a_step(scene: Scene, script: &mut Script, parts: &[Offset], dice: &mut Dice) -> Scene {
    let Agreement { exchange, .. } = &*script.agreed;
    let proxy = dice.roll(exchange.proxies().into()) as u16;
    let Some(&shard) = exchange.of_proxy(proxy).first() else { return scene };
    let rank = script.clients + usize::from(proxy);
    let [log, step] = script.agreed.step_words(parts[rank], proxy, shard);
    let shards = exchange.of_proxy(proxy).len() as u64;
    let (word, before) = match dice.roll(3) {
        0 => (step, dice.roll(script.steps)),
        _ => (log, dice.roll(shards * script.steps)),
    };
    let host = scene.host(rank);
    let away = |rank: &usize| scene.host(*rank) != host;
    let client = (0..script.clients).find(away).unwrap_or_default();
    let heir_host = (0..scene.size()).rev().find(away).map_or(host, |rank| scene.host(rank));
    let heir = RankPlace {
        at: parts[rank] + PART,
        bytes: PART,
        host: heir_host,
        slot: ProcessSlot(scene.on_host(heir_host)),
        pid: 200,
        bell: None,
        heartbeat: None,
        sign: None,
    };
    script.will = Some(Will { client, proxy, heir });
    let crash = [Crash::Process, Crash::Host][dice.roll(2) as usize];
    let members = vec![second_part(scene.member(client), parts[client]), heir];
    let (agreed, options) = (script.agreed_of_heir(proxy), service_options(scene.options()));
    let serve = move |memory| {
        let served = Proxy::over(memory, members, 1, 0, agreed, options).expect("the parts fit").serve();
        // The client may have needed nothing more.
        assert!(matches!(served, Ok(()) | Err(PoolError::PeerDead { .. })), "{served:?}");
    };
    scene.with_death(Aimed {
        rank,
        crash,
        store: (word, before),
        operations: dice.roll(64),
        heir: Box::new(serve),
        heir_host,
    })
}

/// The place of a client in an exchange with the heir of a proxy: another kernel's, so that it is known by its heartbeat.
fn second_part(member: RankPlace, part: Offset) -> RankPlace {
    RankPlace { at: part + PART, bytes: PART, bell: None, ..member }
}

fn service_options(options: GroupOptions) -> ServiceOptions {
    let GroupOptions { timeout, silence, patience, epoch, .. } = options;
    ServiceOptions { timeout, silence, patience, epoch }
}

/// The parts of the ranks.
fn places(members: Vec<RankPlace>, parts: &[Offset]) -> Vec<RankPlace> {
    let part = |(member, &at): (RankPlace, &Offset)| RankPlace { at, bytes: PART, ..member };
    members.into_iter().zip(parts).map(part).collect()
}

fn run(
    script: &Script,
    memory: ModelMemory,
    members: Vec<RankPlace>,
    rank: usize,
    options: GroupOptions,
) -> Result<(), PoolError> {
    let options = service_options(options);
    let agreed = Arc::clone(&script.agreed);
    if rank >= script.clients {
        let proxy = (rank - script.clients) as u16;
        return Proxy::over(memory, members, script.clients, proxy, agreed, options)?.serve();
    }
    let mut client = Client::over(memory.clone(), members.clone(), script.clients, rank, agreed, options)?;
    let mut pulled = BTreeSet::new();
    let trained = train(script, &mut client, &mut pulled);
    if let Err(PoolError::PeerDead { peer, .. }) = &trained
        && let Some(number) = members.iter().position(|member| member.pid == peer.pid)
        && let Some(proxy) = number.checked_sub(script.clients)
        && script.agreed.moments > 0
    {
        let recovered = recover_all(script, &mut client, proxy as u16, &pulled)?;
        if let Some(Will { heir, .. }) =
            script.will.filter(|will| (will.client, will.proxy) == (rank, proxy as u16))
            && !recovered.is_empty()
        {
            let step = u64::from(client.step()) - 1;
            let members = vec![second_part(members[rank], members[rank].at), heir];
            go_on(
                step,
                &recovered,
                Client::over(memory, members, 1, 0, script.agreed_of_heir(proxy as u16), options)?,
            )?;
        }
    }
    trained
}

/// Parameters and moment of a shard.
type Recovered = [Vec<u8>; 2];

/// Recovers a shard of a proxy, and sees that it is that of a whole step, this one or the one before. Returns its parameters, if they are those
/// of this step, and its moment.
fn recover(
    script: &Script,
    client: &mut Client<ModelMemory>,
    step: u64,
    shard: u32,
) -> Result<(bool, Recovered), PoolError> {
    let room = || vec![0; script.agreed.exchange.shards()[shard as usize].bytes as usize];
    let [mut parameters, mut moment] = [room(), room()];
    let has_stepped = client.recover(shard, &mut parameters, &mut [&mut moment])?;
    let steps = script.steps_before(step) + u64::from(has_stepped);
    script.check_each(shard, &moment, |index| script.moment(steps, shard, index));
    if has_stepped {
        assert!(
            matches!(script.of(step), Of::Pushes | Of::Means),
            "shard {shard} has stepped where no optimizer does"
        );
        script.check(step, shard, &parameters);
    }
    Ok((has_stepped, [parameters, moment]))
}

/// Recovers what a proxy had that died in this step. Does the step with the shards with which the proxy had not done it. Returns nothing if
/// this step brings no gradients.
fn recover_all(
    script: &Script,
    client: &mut Client<ModelMemory>,
    proxy: u16,
    pulled: &BTreeSet<u32>,
) -> Result<Vec<Recovered>, PoolError> {
    let (step, number) = (u64::from(client.step()) - 1, client.number());
    let pushed = client.unsummed();
    let mut all = vec![];
    for &shard in script.agreed.exchange.of_proxy(proxy) {
        let (has_stepped, [mut parameters, mut moment]) = recover(script, client, step, shard)?;
        let is_pushed = pushed.contains(&shard);
        assert!(!(is_pushed && pulled.contains(&shard)));
        reached(if has_stepped { "shards after their step" } else { "shards before their step" });
        if is_pushed && matches!(script.of(step), Of::Load | Of::Mean | Of::Pushes) {
            let mut found = vec![0; moment.len()];
            client.pushed(shard, &mut found)?;
            assert_eq!(found, gradients(script, number, step, shard), "shard {shard} of step {step}");
        }
        if !matches!(script.of(step), Of::Pushes) {
            continue;
        }
        assert!(has_stepped || !pulled.contains(&shard), "the step of shard {shard} is lost");
        assert!(
            !has_stepped || is_pushed || pulled.contains(&shard),
            "the step of shard {shard} came before its gradients"
        );
        if !has_stepped {
            let before = |index| script.expected(step - 1, shard, index);
            let stepped = |index| floats(&moment)[index as usize] + script.mean(step, shard, index) as f32;
            let next: Vec<f32> = (0..moment.len() as u64 / 4).map(stepped).collect();
            let rate = f32::from(script.agreed.groups[shard as usize]) + 1.0;
            parameters =
                bytes_of((0..).zip(&next).map(|(index, moment)| before(index) as f32 - rate * moment));
            moment = bytes_of(next.into_iter());
        }
        script.check(step, shard, &parameters);
        script.check_each(shard, &moment, |index| script.moment(script.steps_before(step) + 1, shard, index));
        all.push([parameters, moment]);
    }
    Ok(all)
}

/// Brings what was recovered to the heir of its proxy, and does a step with it there.
fn go_on(step: u64, recovered: &[Recovered], mut client: Client<ModelMemory>) -> Result<(), PoolError> {
    let rows = |slot: usize| recovered.iter().map(move |of| of[slot].clone()).collect::<Vec<_>>();
    let gradients: Vec<Vec<u8>> =
        recovered.iter().map(|[_, moment]| bytes_of((1..=moment.len() / 4).map(|it| it as f32))).collect();
    let moved = |(moment, gradient): (&Vec<u8>, &Vec<u8>)| {
        bytes_of(floats(moment).into_iter().zip(floats(gradient)).map(|(moment, gradient)| moment + gradient))
    };
    let moments: Vec<Vec<u8>> = rows(1).iter().zip(&gradients).map(moved).collect();
    let groups = &client.agreed().groups;
    let settings = (0..=groups.iter().max().copied().unwrap_or_default()).map(sgd).collect();
    let stepped = |((parameters, moment), group): ((&Vec<u8>, &Vec<u8>), &u16)| {
        let rate = f32::from(*group) + 1.0;
        bytes_of(floats(parameters).into_iter().zip(floats(moment)).map(|(it, moment)| it - rate * moment))
    };
    let parameters: Vec<Vec<u8>> = rows(0).iter().zip(&moments).zip(groups).map(stepped).collect();
    let orders = [
        (Order::Load(Slot::Parameters), rows(0), rows(0)),
        (Order::Load(Slot::Mean), rows(1), rows(1)),
        (Order::Step { number: step + 1, groups: settings }, gradients, parameters),
        (Order::Save(Slot::Mean), rows(1), moments),
    ];
    for (order, pushes, expected) in orders {
        client.order(&order)?;
        for (shard, bytes) in (0..).zip(&pushes) {
            client.push(shard, bytes)?;
        }
        while let Some(shard) = client.wait().expect("the heir lives") {
            let mut found = vec![0; pushes[shard as usize].len()];
            client.pull(shard, &mut found)?;
            assert_eq!(
                floats(&found),
                floats(&expected[shard as usize]),
                "shard {shard} at the heir, {order:?}"
            );
        }
    }
    client.leave();
    reached("steps of heirs");
    Ok(())
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|it| f32::from_le_bytes(*it)).collect()
}

fn bytes_of(numbers: impl Iterator<Item = f32>) -> Vec<u8> {
    numbers.flat_map(f32::to_le_bytes).collect()
}

/// Does all steps. `pulled` has the shards whose sums came in the last.
fn train(
    script: &Script,
    client: &mut Client<ModelMemory>,
    pulled: &mut BTreeSet<u32>,
) -> Result<(), PoolError> {
    let rank = client.number();
    for step in 0..script.steps {
        assert_eq!(u64::from(client.step()), step + 1);
        pulled.clear();
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
            push_what_may(script, client, step, &mut later)?;
            if script.eager[rank]
                && let Some(shard) = client.ready()?
            {
                pull(script, client, step, shard, pulled)?;
                push_what_may(script, client, step, &mut later)?;
            }
        }
        while pulled.len() < script.agreed.exchange.shards().len() {
            if script.looks[rank] {
                for &shard in &script.orders[rank][step as usize] {
                    let (has_stepped, _) = recover(script, client, step, shard)?;
                    let is_over =
                        pulled.contains(&shard) && matches!(script.of(step), Of::Pushes | Of::Means);
                    assert!(has_stepped || !is_over, "the step of shard {shard} is lost");
                    reached("shards of the living");
                }
            }
            let shard = client.wait()?.expect("each shard is handed out once");
            pull(script, client, step, shard, pulled)?;
            push_what_may(script, client, step, &mut later)?;
        }
        assert_eq!(u64::from(client.step()), step + 2, "a step ends with its last pull");
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

    /// The optimizer's steps before a step.
    fn steps_before(&self, step: u64) -> u64 {
        if self.is_kept { step.saturating_sub(1) / 2 } else { step.saturating_sub(1) }
    }

    /// The momentum after so many of the optimizer's steps: the sum of all gradients.
    fn moment(&self, steps: u64, shard: u32, index: u64) -> f64 {
        let of = |number: u64| match self.is_kept {
            true => 2.0 * self.mean(2 * number - 1, shard, index),
            false => self.mean(number, shard, index),
        };
        (1..=steps).map(of).sum()
    }

    /// Whether these bytes are those that the clients find of a shard.
    fn check(&self, step: u64, shard: u32, bytes: &[u8]) {
        self.check_each(shard, bytes, |index| self.expected(step, shard, index));
    }

    /// Whether the elements of a shard are those of `expected`.
    fn check_each(&self, shard: u32, bytes: &[u8], expected: impl Fn(u64) -> f64) {
        for (index, word) in (0..).zip(bytes.chunks_exact(self.agreed.dtype(shard).bytes())) {
            let value = match word.first_chunk() {
                Some(word) => f64::from_le_bytes(*word),
                None => f64::from(f32::from_le_bytes(word.try_into().expect("four bytes"))),
            };
            assert_eq!(value, expected(index), "element {index} of shard {shard}");
        }
    }

    /// What the heir of a proxy agrees on with the client that takes over: the shards of the proxy.
    fn agreed_of_heir(&self, proxy: u16) -> Arc<Agreement> {
        let Agreement { exchange, groups, .. } = &*self.agreed;
        let of = exchange.of_proxy(proxy);
        let shards = (0..).zip(of).map(|(tensor, &shard)| Shard {
            tensor,
            proxy: 0,
            ..exchange.shards()[shard as usize]
        });
        let exchange = Exchange::new(shards.collect(), 1).expect("all go to one proxy");
        let mut agreed = Agreement::new(exchange, Dtype::F32);
        agreed.groups = of.iter().map(|&shard| groups[shard as usize]).collect();
        agreed.moments = self.agreed.moments;
        Arc::new(agreed)
    }

    /// What the clients find. All numbers are whole and small, so that 32 bits hold them.
    fn expected(&self, step: u64, shard: u32, index: u64) -> f64 {
        let Some(group) = self.agreed.groups.get(shard as usize) else {
            return self.mean(step, shard, index);
        };
        if matches!(self.of(step), Of::Mean) {
            return self.mean(step, shard, index);
        }
        let moved: f64 =
            (1..=self.steps_before(step + 1)).map(|steps| self.moment(steps, shard, index)).sum();
        element(self, 0, 0, shard, index) - (f64::from(*group) + 1.0) * moved
    }
}

/// The optimizer of a group.
fn sgd(group: u16) -> Optimizer {
    let lr = f64::from(group) + 1.0;
    Optimizer::Sgd(Sgd { lr, momentum: 1.0, dampening: 0.0, weight_decay: 0.0, is_nesterov: false })
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

fn pull(
    script: &Script,
    client: &mut Client<ModelMemory>,
    step: u64,
    shard: u32,
    pulled: &mut BTreeSet<u32>,
) -> Result<(), PoolError> {
    assert!(pulled.insert(shard), "each shard is handed out once");
    if matches!(script.of(step), Of::Mean) {
        return client.leave_sum(shard);
    }
    let bytes = script.agreed.exchange.shards()[shard as usize].bytes;
    let mut found = vec![0; bytes as usize];
    client.pull(shard, &mut found)?;
    script.check(step, shard, &found);
    Ok(())
}
