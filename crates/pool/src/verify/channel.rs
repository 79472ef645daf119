//! A sender and a receiver that find each other by name, with a ring that is always full; one may die at any memory operation.
//!
//! The oracle is the plan of all messages: the receiver gets them whole and in order, all when nobody died, and learns how it
//! ended. Then nothing is left.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use polder_mem::Coherence;
use polder_mem::model::{Crash, Kernels, ModelMemory, Outcome, Suite, World};

use super::endpoint::{HOSTS, POOL, SPARE, attach};
use super::group::Dice;
use super::stage::{expect_clean, shape_of};
use crate::channel::{Receiver, Sender};
use crate::ring::RingShape;
use crate::{Pool, PoolError};

pub(super) fn suites() -> Vec<Suite> {
    // All flushes are those of rings, lines and the directory.
    let about = "a sender and a receiver meet by name, and one may die";
    vec![Suite::new("channel", about, channel).mutates(&["channel.rs"])]
}

const NAME: &str = "/c";
/// A hundred looks for an end that never comes.
const TIMEOUT: Duration = Duration::from_millis(100);
const LONGEST: usize = 200;

/// What is known outside the memory.
struct Witness {
    messages: u64,
    /// Which end dies: 0 sends, 1 receives.
    victim: Option<usize>,
    over: Cell<u64>,
}

fn message(number: u64) -> Vec<u8> {
    (0..number * 57 % LONGEST as u64).map(|index| (number * 31 + index) as u8).collect()
}

fn channel(seed: u64) -> Outcome {
    let mut dice = Dice::new(seed, 11);
    let hosts: [u16; 2] = if dice.roll(3) == 0 { [0, 0] } else { [0, 1] };
    let crash = dice.roll(3) == 0;
    let kernels = if crash || dice.roll(2) == 0 { Kernels::Shared } else { Kernels::OnePerHost };
    let coherence = if dice.roll(8) == 0 { Coherence::Coherent } else { Coherence::Software };
    let shape = shape_of(&POOL.1, kernels, coherence);
    let mut world = World::new(seed, shape);
    let victim = crash.then(|| dice.roll(2) as usize);
    let witness = Rc::new(Witness { messages: dice.roll(7), victim, over: Cell::new(0) });
    for (number, part) in [send as fn(_, &Witness), receive].into_iter().enumerate() {
        let (host, slot) = (hosts[number], if hosts[0] == hosts[1] { number as u16 } else { 0 });
        let pool = world.setup_as(host, slot, |memory| attach(memory, kernels, host, number));
        let known = Rc::clone(&witness);
        let thread = world.spawn(host, slot, move |_| part(pool, &known));
        if victim == Some(number) {
            world.crash_within(thread, Crash::Process, 800);
        }
    }
    let memories: Vec<_> = (0..HOSTS).map(|host| world.memory(host, SPARE)).collect();
    world.check(0, move |_| {
        let pools: Vec<_> =
            (0..).zip(memories).map(|(host, memory)| attach(memory, kernels, host, 50)).collect();
        if witness.victim.is_none() {
            assert_eq!(witness.over.get(), 2, "an end waits for ever");
            assert_eq!(pools[0].list(""), Ok(vec![]));
            pools.iter().chain(&pools).for_each(|pool| pool.maintain().expect("nobody keeps a lock"));
            pools.iter().for_each(|pool| expect_clean(&pool.directory()));
        }
    });
    world.run()
}

fn send(pool: Arc<Pool<ModelMemory>>, witness: &Witness) {
    let shape = RingShape::new(2, 64).expect("a shape");
    let mut sender = Sender::create(pool, NAME, shape).expect("there is room");
    for number in 0..witness.messages {
        match sender.push(number, &message(number), TIMEOUT) {
            Ok(()) => {}
            // The receiver may have given up before this end began.
            Err(PoolError::NoReceiver { .. } | PoolError::Closed { end: "receiver", .. }) => break,
            // It died, perhaps in the middle of the entry of its line.
            Err(PoolError::PeerDead { .. } | PoolError::Corrupt { .. }) if witness.victim == Some(1) => break,
            // A process that is at something else for so long is late.
            Err(PoolError::Timeout { .. }) => break,
            Err(error) => panic!("message {number}: {error}"),
        }
    }
    drop(sender);
    witness.over.set(witness.over.get() + 1);
}

fn receive(pool: Arc<Pool<ModelMemory>>, witness: &Witness) {
    let finish = || witness.over.set(witness.over.get() + 1);
    let mut receiver = match Receiver::open(pool, NAME, TIMEOUT) {
        Ok(receiver) => receiver,
        Err(PoolError::NotFound { .. }) => return finish(),
        Err(PoolError::Corrupt { .. }) if witness.victim == Some(0) => return finish(),
        Err(error) => panic!("cannot receive: {error}"),
    };
    let mut into = [0; LONGEST];
    for number in 0.. {
        match receiver.pop(&mut into, TIMEOUT) {
            Ok(envelope) => {
                assert_eq!((envelope.tag, &into[..envelope.bytes as usize]), (number, &message(number)[..]));
            }
            Err(PoolError::Closed { end: "sender", .. }) if number == witness.messages => break,
            Err(PoolError::PeerDead { .. }) if witness.victim == Some(0) => break,
            // A sender that could not push a message in time closes too, perhaps in the middle of it.
            Err(PoolError::Timeout { .. } | PoolError::Closed { .. } | PoolError::GaveUp { .. }) => break,
            Err(error) => panic!("message {number}: {error}"),
        }
    }
    drop(receiver);
    finish();
}
