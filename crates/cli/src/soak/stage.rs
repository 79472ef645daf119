//! The processes of a soak: two survivors that stay, a victim for each round, and who cleans up after it.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use polder_attach::session::{self, AnyPool, Session};
use polder_attach::settings::{CoherenceChoice, Settings, TimeSpan, Wrap};
use polder_mem::testing::{Child, Ended};
use polder_mem::{Trigger, TriggerAction, Wrapped};
use polder_pool::{Geometry, Pool};

use super::acts::{self, Actor, DEADLINE, Victim};
use super::scene::{Dice, FIRST_HOST, Fate, LONELY_HOST, Round, SHARED_HOST, Scene, What};
use super::wire::Wire;
use crate::Failure;

/// Small, so that a host that comes back has little to look through; and of so few chunks for its hosts that none keeps an
/// empty one.
const BYTES: u64 = 1 << 20;
const GEOMETRY: Geometry =
    Geometry { hosts: 8, processes: 4, names: 61, levels: 3, chunk_bytes: 16 << 10, opens: 16, keepers: 2 };

/// A pool with its survivors.
pub(super) struct Stage {
    settings: Settings,
    first: Survivor,
    second: Survivor,
    /// The bytes that are free when nothing is left of any victim.
    free: u64,
    rounds: u64,
}

/// How a round went.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outcome {
    /// Whether the victim met its fate, and did not come to its end before.
    pub(super) fell: bool,
    /// The memory operations of a victim that came to its end.
    pub(super) operations: u64,
}

impl Default for Outcome {
    /// Until it says that it came to its end, a victim has met its fate.
    fn default() -> Self {
        Self { fell: true, operations: 0 }
    }
}

struct Survivor {
    child: Child,
    wire: Wire,
}

impl Stage {
    /// Makes a pool in `directory` and starts the survivors.
    pub(super) fn open(directory: &Path, coherence: CoherenceChoice) -> Result<Self, Failure> {
        let path = directory.join(coherence.to_string());
        session::create(&path, BYTES, &GEOMETRY)?;
        let settings = Settings {
            pool: Some(path),
            run: Some(directory.into()),
            coherence: Some(coherence),
            timeout: Some(TimeSpan(DEADLINE)),
            wrap: Some(Wrap::default()),
            ..Settings::default()
        };
        // They meet names and locks that are blocked until somebody repairs them, and learn soon that they are.
        let impatient = Settings { timeout: Some(TimeSpan(Duration::from_millis(250))), ..settings.clone() };
        let mut first = Survivor::start(&impatient, FIRST_HOST)?;
        first.ask("set up")?;
        let mut second = Survivor::start(&impatient, SHARED_HOST)?;
        second.ask("maintain")?;
        let free = first.free_bytes()?;
        Ok(Self { settings, first, second, free, rounds: 0 })
    }

    /// Plays a round, and looks whether anything is left of its victim.
    pub(super) fn play(&mut self, scene: Scene, seed: u64, fate: Fate) -> Result<Outcome, Failure> {
        self.rounds += 1;
        let round = Round { scene, seed, number: self.rounds, fate };
        let outcome = match scene.what {
            What::Push | What::Stream | What::Pop => self.play_ring(&round)?,
            What::Create => self.play_create(&round)?,
            What::AllReduce => self.play_all_reduce(&round)?,
            What::Attach => self.play_attach(&round)?,
            What::Job => self.play_job(&round)?,
        };
        self.clean(&round)?;
        Ok(outcome)
    }

    fn play_ring(&mut self, round: &Round) -> Result<Outcome, Failure> {
        let mut victim = Running::start(&self.settings, round)?;
        let slot = victim.ready()?;
        let command = if round.scene.what == What::Pop { "push" } else { "pop" };
        self.first.say(command, round, &[victim.child.pid().into(), slot])?;
        self.first.expect("attached")?;
        victim.go()?;
        let first = &mut self.first;
        let end = victim.end_with(round, &mut [first])?;
        let count: usize = end.survivors.parse()?;
        let (begun, done) = (end.begun, end.done);
        if round.scene.what != What::Pop && !(done <= count && count <= begun) {
            let what =
                format!("the victim pushed {done} messages and began {begun}, the survivor popped {count}");
            return Err(Failure(what));
        }
        Ok(end.outcome)
    }

    fn play_create(&mut self, round: &Round) -> Result<Outcome, Failure> {
        self.first.tell("prepare", round, &[])?;
        let mut victim = Running::start(&self.settings, round)?;
        let slot = victim.ready()?;
        victim.go()?;
        let end = match round.fate.action {
            TriggerAction::Kill => victim.end()?,
            TriggerAction::Stop => {
                victim.await_standstill()?;
                self.second.tell("bypass", round, &[victim.child.pid().into(), slot])?;
                let end = victim.revive(false)?;
                self.second.ask("maintain")?;
                end
            }
        };
        self.judge(round, &end)?;
        Ok(end.outcome)
    }

    fn play_all_reduce(&mut self, round: &Round) -> Result<Outcome, Failure> {
        let mut victim = Running::start(&self.settings, round)?;
        let pid = victim.child.pid().into();
        let ranks: Vec<_> =
            [&mut self.first, &mut self.second].into_iter().take(acts::ranks(round) - 1).collect();
        let mut ranks = ranks;
        for (rank, survivor) in ranks.iter_mut().enumerate() {
            survivor.say("reduce", round, &[pid, rank as u64])?;
        }
        victim.ready()?;
        for survivor in &mut ranks {
            survivor.expect("attached")?;
        }
        victim.go()?;
        let end = victim.end_with(round, &mut ranks)?;
        for count in end.survivors.split(' ') {
            let count: usize = count.parse()?;
            // The line on which it said that it had ended one may be torn by what it was about to say of the next.
            if !(end.done <= count + 1 && count <= end.begun) && round.fate.action == TriggerAction::Kill {
                let (begun, done) = (end.begun, end.done);
                let what =
                    format!("the victim ended {done} operations and began {begun}, a survivor ended {count}");
                return Err(Failure(what));
            }
        }
        Ok(end.outcome)
    }

    fn play_attach(&mut self, round: &Round) -> Result<Outcome, Failure> {
        self.first.tell("prepare", round, &[])?;
        let operation = 1 + round.seed % CREATE_OPERATIONS;
        let first = Round { fate: Fate { operation, action: TriggerAction::Kill }, ..*round };
        let mut victim = Running::start(&self.settings, &first)?;
        victim.ready()?;
        victim.go()?;
        let end = victim.end()?;
        let mut second = Running::attach(&self.settings, round)?;
        let outcome = second.end()?.outcome;
        self.judge(round, &end)?;
        Ok(outcome)
    }

    /// Endpoints on two hosts meet, talk and die; nothing is left of them once somebody has swept.
    fn play_job(&mut self, round: &Round) -> Result<Outcome, Failure> {
        let mut dice = Dice(round.seed);
        let hosts = [round.scene.host(), FIRST_HOST, round.scene.host()];
        let mut ranks = vec![];
        for (rank, host) in hosts.into_iter().enumerate() {
            let drawn =
                if dice.draw().is_multiple_of(2) { 1 + dice.draw() % JOB_OPERATIONS } else { u64::MAX };
            let operation = if rank == 0 { round.fate.operation } else { drawn };
            let one = Round { fate: Fate { operation, action: TriggerAction::Kill }, ..*round };
            let settings = on_host(&self.settings, host);
            ranks.push(Running::fork(move |wire| {
                let session = Session::open(&settings)?;
                acts::talk(&mut Actor { pool: pool(&session), wire }, &one, rank)
            })?);
        }
        // Whoever is dead already has said nothing.
        let addresses = ranks.iter_mut().map(|rank| rank.wire.hear()).collect::<Result<Vec<_>, _>>()?;
        let all: Vec<_> = addresses.iter().map(|said| said.as_deref().unwrap_or("-")).collect();
        let all = all.join(" ");
        let mut ends = vec![];
        for rank in &mut ranks {
            // It may be dead by now.
            drop(rank.wire.say(&all));
        }
        for mut rank in ranks {
            ends.push(rank.end()?);
        }
        // What the dead of one host held open is in the way of the other.
        self.first.ask("maintain")?;
        self.sweep(round)?;
        self.first.tell("sweep", round, &[])?;
        let Outcome { fell, operations } = ends.swap_remove(0).outcome;
        Ok(Outcome { fell, operations: operations.min(JOB_OPERATIONS) })
    }

    /// Has the first survivor look at what the victim left, before anybody has cleaned up and after.
    fn judge(&mut self, round: &Round, end: &End) -> Result<(), Failure> {
        let (begun, done) = (end.begun as u64, end.done as u64);
        self.first.tell("judge", round, &[begun, done, 0])?;
        self.sweep(round)?;
        self.first.tell("judge", round, &[begun, done, 1])?;
        Ok(())
    }

    /// Lets the victim's host clean up: its other process, or the next that attaches.
    fn sweep(&mut self, round: &Round) -> Result<(), Failure> {
        if !round.scene.alone {
            return self.second.ask("maintain").map(drop);
        }
        let settings = on_host(&self.settings, LONELY_HOST);
        let mut next = Child::fork_tied(|| {
            let session = Session::open(&settings).expect("a session");
            pool(&session).maintain().expect("clean up");
        });
        match next.wait() {
            Ended::Exited(0) => Ok(()),
            ended => Err(Failure(format!("the next process of the victim's host ended with {ended:?}"))),
        }
    }

    /// Takes away what is left of the round, and looks whether that was everything.
    fn clean(&mut self, round: &Round) -> Result<(), Failure> {
        self.sweep(round)?;
        self.first.tell("clean", round, &[])?;
        self.sweep(round)?;
        let free = self.first.free_bytes()?;
        match free == self.free {
            true => Ok(()),
            false => {
                Err(Failure(format!("{free} bytes are free at the end of the round, at first {}", self.free)))
            }
        }
    }

    /// Lets the survivors leave.
    pub(super) fn close(self) -> Result<(), Failure> {
        for mut survivor in [self.first, self.second] {
            survivor.ask("leave")?;
            match survivor.child.wait() {
                Ended::Exited(0) => {}
                ended => return Err(Failure(format!("a survivor ended with {ended:?}"))),
            }
        }
        Ok(())
    }
}

/// Where the endpoints of a job die. How many operations one takes depends on how long it waits for the others; those beyond
/// are of waiting.
const JOB_OPERATIONS: u64 = 6000;

/// Where the first of two victims dies: about as many operations as a create scene has.
const CREATE_OPERATIONS: u64 = 1500;

fn on_host(settings: &Settings, host: u16) -> Settings {
    Settings { host: Some(host), ..settings.clone() }
}

fn pool(session: &Session) -> &Arc<Pool<Wrapped>> {
    let AnyPool::Wrapped(pool) = session.pool() else { unreachable!("the settings name a wrapper") };
    pool
}

impl Survivor {
    fn start(settings: &Settings, host: u16) -> Result<Self, Failure> {
        let (mut wire, mut theirs) = Wire::pair()?;
        let (settings, parent) = (on_host(settings, host), std::process::id());
        let child = Child::fork_tied(move || {
            if let Err(failure) = survive(&settings, parent, &mut theirs) {
                panic!("survivor on host {host}: {failure}");
            }
        });
        match wire.hear()?.as_deref() {
            Some("here") => Ok(Self { child, wire }),
            _ => Err(Failure(format!("the survivor on host {host} could not attach"))),
        }
    }

    /// Says something that it answers with one line.
    fn ask(&mut self, words: &str) -> Result<String, Failure> {
        self.wire.say(words)?;
        self.answer()
    }

    fn say(&mut self, command: &str, round: &Round, numbers: &[u64]) -> Result<(), Failure> {
        let Round { scene, seed, number, fate } = round;
        let stop = u8::from(fate.action == TriggerAction::Stop);
        let numbers: String = numbers.iter().map(|number| format!(" {number}")).collect();
        self.wire.say(&format!("{command} {scene} {seed} {number} {stop}{numbers}"))
    }

    /// Says something about a round that it answers with one line.
    fn tell(&mut self, command: &str, round: &Round, numbers: &[u64]) -> Result<String, Failure> {
        self.say(command, round, numbers)?;
        self.answer()
    }

    fn expect(&mut self, words: &str) -> Result<(), Failure> {
        match self.wire.hear()? {
            Some(line) if line == words => Ok(()),
            Some(line) => Err(Failure(line)),
            None => Err(Failure("a survivor died".into())),
        }
    }

    fn answer(&mut self) -> Result<String, Failure> {
        of_survivor(self.wire.hear()?)
    }

    fn free_bytes(&mut self) -> Result<u64, Failure> {
        Ok(self.ask("settle")?.parse()?)
    }
}

/// The life of a survivor: it does as it is told until it is told to leave, or the soak is gone.
fn survive(settings: &Settings, parent: u32, wire: &mut Wire) -> Result<(), Failure> {
    let session = Session::open(settings)?;
    let mut actor = Actor { pool: pool(&session), wire };
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
        ("reduce", [pid, rank]) => {
            acts::outlive_rank(actor, &round, *rank as usize, *pid as u32).map(|n| n as u64)
        }
        _ => Err(unclear()),
    }
}

/// A victim.
struct Running {
    child: Child,
    wire: Wire,
}

/// What is known of a victim at its end.
#[derive(Default)]
struct End {
    outcome: Outcome,
    begun: usize,
    done: usize,
    /// What the survivors said.
    survivors: String,
}

impl Running {
    /// Starts a process that attaches and then plays the victim.
    fn start(settings: &Settings, round: &Round) -> Result<Self, Failure> {
        let (settings, round) = (on_host(settings, round.scene.host()), *round);
        Self::fork(move |wire| {
            let session = Session::open(&settings)?;
            acts::victim(&mut Actor { pool: pool(&session), wire }, &round)
        })
    }

    /// Starts a process whose fate is counted from the beginning of its attachment.
    fn attach(settings: &Settings, round: &Round) -> Result<Self, Failure> {
        let mut settings = on_host(settings, round.scene.host());
        settings.wrap = Some(Wrap { trigger: Some(round.fate.trigger()), ..Wrap::default() });
        Self::fork(move |wire| {
            let session = Session::open(&settings)?;
            let pool = Arc::clone(pool(&session));
            pool.maintain()?;
            drop(session);
            wire.say(&format!("total {}", pool.memory().operations()))?;
            acts::die(pool.memory())
        })
    }

    fn fork(body: impl FnOnce(&mut Wire) -> Result<(), Failure>) -> Result<Self, Failure> {
        let (wire, mut theirs) = Wire::pair()?;
        let child = Child::fork_tied(move || {
            if let Err(failure) = body(&mut theirs) {
                // Nobody hears it when the soak is gone.
                drop(theirs.say(&format!("failed {failure}")));
            }
        });
        Ok(Self { child, wire })
    }

    /// Waits until it is ready, and returns its slot.
    fn ready(&mut self) -> Result<u64, Failure> {
        let line = self.wire.hear()?.unwrap_or_default();
        match line.strip_prefix("ready ") {
            Some(slot) => Ok(slot.parse()?),
            None => Err(Failure(format!("the victim could not begin: {line}"))),
        }
    }

    fn go(&mut self) -> Result<(), Failure> {
        self.wire.say("go")
    }

    /// Waits until it is dead and each of the survivors knows.
    fn end_with(&mut self, round: &Round, survivors: &mut [&mut Survivor]) -> Result<End, Failure> {
        let mut answers = Vec::new();
        if round.fate.action == TriggerAction::Kill {
            let mut end = self.end()?;
            for survivor in survivors {
                answers.push(survivor.answer()?);
            }
            end.survivors = answers.join(" ");
            return Ok(end);
        }
        let mut revived = None;
        for survivor in survivors {
            let mut answer = survivor.wire.hear()?;
            if answer.as_deref() == Some("late") {
                if revived.is_none() {
                    revived = Some(self.revive(true)?);
                }
                answer = survivor.wire.hear()?;
            }
            answers.push(of_survivor(answer)?);
        }
        let mut end = revived.map_or_else(|| self.end(), Ok)?;
        end.survivors = answers.join(" ");
        Ok(end)
    }

    /// Waits until it stands still, or came to its end.
    fn await_standstill(&mut self) -> Result<(), Failure> {
        let path = format!("/proc/{}/stat", self.child.pid());
        let start = Instant::now();
        while start.elapsed() < DEADLINE {
            // The state stands behind the name, which is in parentheses.
            let stat = std::fs::read_to_string(&path)?;
            let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
            if matches!(state, Some('T' | 'Z')) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        Err(Failure("the victim neither stands still nor ends".into()))
    }

    /// Lets it go on until its end, wherever it stands still or is about to. It may fail when others `gave_up` on it.
    fn revive(&mut self, gave_up: bool) -> Result<End, Failure> {
        let start = Instant::now();
        while self.child.ended().is_none() {
            self.child.go_on();
            if start.elapsed() > 2 * DEADLINE {
                return Err(Failure("the victim was let go on, and does not end".into()));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut end = End::default();
        while let Some(line) = self.wire.hear()? {
            if !(gave_up && line.starts_with("failed")) {
                end.take(&line)?;
            }
        }
        end.outcome.fell = true;
        Ok(end)
    }

    /// Waits until it is dead.
    fn end(&mut self) -> Result<End, Failure> {
        let mut end = End::default();
        while let Some(line) = self.wire.hear()? {
            end.take(&line)?;
        }
        match self.child.wait() {
            Ended::Killed(KILLED) => Ok(end),
            ended => Err(Failure(format!("the victim ended with {ended:?}"))),
        }
    }
}

fn of_survivor(line: Option<String>) -> Result<String, Failure> {
    let line = line.ok_or_else(|| Failure("a survivor died".into()))?;
    match line.strip_prefix("ok ") {
        Some(answer) => Ok(answer.to_owned()),
        None => Err(Failure(line)),
    }
}

/// The number of SIGKILL.
const KILLED: i32 = 9;

impl End {
    fn take(&mut self, line: &str) -> Result<(), Failure> {
        match line.split_once(' ') {
            None if line == "begun" => self.begun += 1,
            None if line == "done" => self.done += 1,
            Some(("total", operations)) => {
                self.outcome = Outcome { fell: false, operations: operations.parse()? };
            }
            _ => return Err(Failure(format!("the victim {line}"))),
        }
        Ok(())
    }
}

/// A fate that no victim meets: it counts its operations and dies at its end.
pub(super) const NEVER: Fate = Fate { operation: u64::MAX, action: TriggerAction::Kill };

const _: Trigger = NEVER.trigger();
