//! What a process of a soak is there for, in words that go to another machine as well.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use polder_attach::session::{AnyPool, Session};
use polder_attach::settings::{Settings, TimeSpan, Wrap};
use polder_mem::TriggerAction;

use super::acts::{self, Actor, Victim};
use super::scene::{FIRST_HOST, Fate, Round, Scene};
use super::wire::Wire;
use crate::Failure;

/// What a process does.
#[derive(Clone, Copy, Debug)]
pub(super) enum Task {
    /// It is the survivor of a host, and meets names and locks that are blocked until somebody repairs them: it learns within this
    /// time that they are.
    Survive(u16, Duration),
    /// It is the victim of a round.
    Fall(Round),
    /// Its fate is counted from the beginning of its attachment.
    Attach(Round),
    /// It is an endpoint of a job, or a process that shares a cache.
    Talk(Round, usize),
    /// It cleans up for a host.
    Maintain(u16),
    /// It gives up what the victim's host has of a cache.
    GiveUp(Round),
}

impl Task {
    /// The host whose process it is.
    pub(super) const fn host(&self) -> u16 {
        match self {
            Self::Survive(host, _) | Self::Maintain(host) => *host,
            Self::Fall(round) | Self::Attach(round) | Self::GiveUp(round) => round.scene.host(),
            Self::Talk(_, 1 | 3) => FIRST_HOST,
            Self::Talk(round, _) => round.scene.host(),
        }
    }

    /// Does it, in a process of its own.
    pub(super) fn play(&self, settings: &Settings, wire: &mut Wire) {
        let mut settings = Settings { host: Some(self.host()), ..settings.clone() };
        let done = match *self {
            Self::Survive(host, patience) => {
                settings.timeout = Some(TimeSpan(patience));
                if let Err(failure) = survive(&settings, wire) {
                    panic!("survivor on host {host}: {failure}");
                }
                Ok(())
            }
            Self::Fall(ref round) => with(&settings, |pool| acts::victim(&mut Actor { pool, wire }, round)),
            Self::Talk(ref round, rank) => {
                with(&settings, |pool| acts::take_part(&mut Actor { pool, wire }, round, rank))
            }
            Self::Attach(ref round) => attach(&mut settings, wire, round),
            Self::Maintain(_) => with(&settings, |pool| Ok(pool.maintain()?)),
            Self::GiveUp(ref round) => with(&settings, |pool| acts::give_up(pool, round)),
        };
        if let Err(failure) = done {
            // Nobody hears it when the soak is gone.
            drop(wire.say(&format!("failed {failure}")));
        }
    }

    /// What [`Task`]'s `Display` says.
    pub(super) fn parse(words: &str) -> Option<Self> {
        let mut words = words.split(' ');
        let kind = words.next()?;
        let rest: Vec<_> = words.collect();
        match (kind, &rest[..]) {
            ("survive", [host, patience]) => {
                Some(Self::Survive(host.parse().ok()?, Duration::from_millis(patience.parse().ok()?)))
            }
            ("maintain", [host]) => Some(Self::Maintain(host.parse().ok()?)),
            ("fall", round) => Some(Self::Fall(parse_round(round)?)),
            ("attach", round) => Some(Self::Attach(parse_round(round)?)),
            ("give-up", round) => Some(Self::GiveUp(parse_round(round)?)),
            ("talk", [rank, round @ ..]) => Some(Self::Talk(parse_round(round)?, rank.parse().ok()?)),
            _ => None,
        }
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, round) = match self {
            Self::Survive(host, patience) => return write!(f, "survive {host} {}", patience.as_millis()),
            Self::Maintain(host) => return write!(f, "maintain {host}"),
            Self::Fall(round) => ("fall".to_owned(), round),
            Self::Attach(round) => ("attach".to_owned(), round),
            Self::GiveUp(round) => ("give-up".to_owned(), round),
            Self::Talk(round, rank) => (format!("talk {rank}"), round),
        };
        let Round { scene, seed, number, fate } = round;
        let stop = u8::from(fate.action == TriggerAction::Stop);
        write!(f, "{kind} {scene} {seed} {number} {stop} {}", fate.operation)
    }
}

fn parse_round(words: &[&str]) -> Option<Round> {
    let [scene, numbers @ ..] = words else { return None };
    let numbers = numbers.iter().map(|number| number.parse()).collect::<Result<Vec<u64>, _>>().ok()?;
    let [seed, number, stop, operation] = numbers[..] else { return None };
    let action = if stop == 1 { TriggerAction::Stop } else { TriggerAction::Kill };
    let scene = Scene::named(scene).first().copied()?;
    Some(Round { scene, seed, number, fate: Fate { operation, action } })
}

fn with(settings: &Settings, act: impl FnOnce(&Arc<AnyPool>) -> Result<(), Failure>) -> Result<(), Failure> {
    act(Session::open(settings)?.pool())
}

fn attach(settings: &mut Settings, wire: &mut Wire, round: &Round) -> Result<(), Failure> {
    let wrap = settings.wrap.take().unwrap_or_default();
    settings.wrap = Some(Wrap { trigger: Some(round.fate.trigger()), ..wrap });
    let session = Session::open(settings)?;
    let pool = Arc::clone(session.pool());
    pool.maintain()?;
    drop(session);
    wire.say(&format!("total {}", acts::instruments(pool.memory()).operations()))?;
    acts::die(pool.memory())
}

/// The life of a survivor: it does as it is told until it is told to leave, or its maker is gone.
fn survive(settings: &Settings, wire: &mut Wire) -> Result<(), Failure> {
    let parent = std::os::unix::process::parent_id();
    let session = Session::open(settings)?;
    let mut actor = Actor { pool: session.pool(), wire };
    actor.wire.say("here")?;
    let mut held = Vec::new();
    loop {
        let goes_on = || std::os::unix::process::parent_id() == parent;
        let Some(line) = actor.wire.hear_while(goes_on)? else { return Ok(()) };
        let outcome = match line.as_str() {
            "set up" => acts::set_up(actor.pool).map(|objects| {
                held = objects;
                0
            }),
            "maintain" => actor.pool.maintain().map(|()| 0).map_err(Failure::from),
            "settle" => acts::settle(&actor),
            "leave" => Ok(0),
            command => obey(&mut actor, command),
        };
        match outcome {
            Ok(number) => actor.wire.say(&format!("ok {number}"))?,
            Err(failure) => actor.wire.say(&failure.to_string())?,
        }
        if line == "leave" {
            held.drain(..).for_each(|object| actor.pool.close(object));
            return Ok(());
        }
    }
}

/// Does what a line says about a round.
fn obey(actor: &mut Actor<'_>, line: &str) -> Result<u64, Failure> {
    let unclear = || Failure(format!("a survivor does not understand {line:?}"));
    let mut words = line.split(' ');
    let command = words.next().ok_or_else(unclear)?;
    let scene =
        words.next().map(Scene::named).and_then(|scenes| scenes.first().copied()).ok_or_else(unclear)?;
    let numbers = words.map(str::parse).collect::<Result<Vec<u64>, _>>()?;
    let [seed, number, stop, ref rest @ ..] = numbers[..] else { return Err(unclear()) };
    let action = if stop == 1 { TriggerAction::Stop } else { TriggerAction::Kill };
    let round = Round { scene, seed, number, fate: Fate { operation: 0, action } };
    match (command, rest) {
        ("prepare", []) => acts::prepare(actor, &round).map(|()| 0),
        ("judge", [begun, done, repaired]) => {
            acts::judge(actor, &round, (*begun as usize, *done as usize), *repaired == 1).map(|()| 0)
        }
        ("keep", []) => acts::keep(actor, &round).map(|()| 0),
        ("find-kept", []) => acts::find_kept(actor, &round).map(|()| 0),
        ("sweep", []) => acts::sweep(actor).map(|()| 0),
        ("clean", []) => acts::clean(actor, &round).map(|()| 0),
        ("pop", [pid, slot]) => {
            acts::outlive_producer(actor, &round, Victim { pid: *pid as u32, slot: *slot as u16 })
                .map(|n| n as u64)
        }
        ("bypass", [pid, slot]) => {
            acts::bypass(actor, &round, Victim { pid: *pid as u32, slot: *slot as u16 }).map(|()| 0)
        }
        ("push", [pid, slot]) => {
            acts::outlive_consumer(actor, &round, Victim { pid: *pid as u32, slot: *slot as u16 })
                .map(|n| n as u64)
        }
        ("work", [pid, rank]) => acts::outlive(actor, &round, *rank as usize, *pid as u32).map(|n| n as u64),
        _ => Err(unclear()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_come_back_from_their_words() {
        let scene = Scene::named("push/software/alone")[0];
        for action in [TriggerAction::Kill, TriggerAction::Stop] {
            let round = Round { scene, seed: 7, number: 8, fate: Fate { operation: 9, action } };
            let tasks = [
                Task::Survive(1, Duration::from_millis(250)),
                Task::Fall(round),
                Task::Attach(round),
                Task::Talk(round, 2),
                Task::GiveUp(round),
                Task::Maintain(2),
            ];
            for task in tasks {
                let back = Task::parse(&task.to_string());
                assert_eq!(back.map(|task| task.to_string()), Some(task.to_string()));
            }
        }
        assert!(Task::parse("fall push 1 2").is_none() && Task::parse("").is_none());
    }
}
