//! The processes of a soak: two survivors that stay, a victim for each round, and who cleans up after it.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use polder_attach::session::{self, SessionError};
use polder_attach::settings::{CoherenceChoice, Settings, TimeSpan, Wrap};
use polder_mem::testing::{Child, Ended};
use polder_mem::{Trigger, TriggerAction};
use polder_pool::keeper::{MembershipChange, change_membership};
use polder_pool::{Geometry, Member, read_superblock};

use super::acts::{self, DEADLINE, UNCOUNTED};
use super::remote::{Player, Remote, stands_still};
use super::scene::{Dice, FIRST_HOST, Fate, LONELY_HOST, Round, SHARED_HOST, Scene, What};
use super::task::Task;
use super::wire::Wire;
use crate::Failure;

/// Small, so that a host that comes back has little to look through; and of so few chunks for its hosts that none keeps an
/// empty one.
const BYTES: u64 = 1 << 20;
const GEOMETRY: Geometry =
    Geometry { hosts: 8, processes: 4, names: 61, levels: 3, chunk_bytes: 16 << 10, opens: 16, keepers: 2 };

/// A pool with its survivors.
pub(super) struct Stage {
    crew: Crew,
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
    player: Player,
    wire: Wire,
}

/// How processes are started: the first survivor's host is here, the others are on the other machine where there is one.
struct Crew {
    settings: Settings,
    remote: Option<Rc<RefCell<Remote>>>,
}

impl Crew {
    fn start(&self, task: Task) -> Result<Running, Failure> {
        if let (Some(remote), true) = (&self.remote, task.host() != FIRST_HOST) {
            let (id, pid, wire) = remote.borrow_mut().start(&task)?;
            return Ok(Running { player: Player::There { id, pid, remote: Rc::clone(remote) }, wire });
        }
        let (wire, mut theirs) = Wire::pair()?;
        let settings = self.settings.clone();
        let child = Child::fork_tied(move || task.play(&settings, &mut theirs));
        Ok(Running { player: Player::Here(child), wire })
    }

    /// How long a survivor waits at most for what is blocked until somebody repairs it.
    const fn patience(&self) -> Duration {
        Duration::from_millis(if self.remote.is_some() { 2000 } else { 250 })
    }

    fn survivor(&self, host: u16) -> Result<Survivor, Failure> {
        let Running { player, mut wire } = self.start(Task::Survive(host, self.patience()))?;
        match wire.hear()?.as_deref() {
            Some("here") => Ok(Survivor { player, wire }),
            _ => Err(Failure(format!("the survivor on host {host} could not attach"))),
        }
    }
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
        Self::begin(Crew { settings, remote: None })
    }

    /// Plays in the empty pool that `settings` name, together with the machine that joins at `address`.
    pub(super) fn listen(settings: &Settings, address: &str) -> Result<Self, Failure> {
        let settings = on_device(settings)?;
        let remote = Some(Rc::new(RefCell::new(Remote::listen(address)?)));
        Self::begin(Crew { settings, remote })
    }

    fn begin(crew: Crew) -> Result<Self, Failure> {
        let mut first = crew.survivor(FIRST_HOST)?;
        first.ask("set up")?;
        let mut second = crew.survivor(SHARED_HOST)?;
        second.ask("maintain")?;
        let free = first.free_bytes()?;
        Ok(Self { crew, first, second, free, rounds: 0 })
    }

    /// Plays a round, and looks whether anything is left of its victim.
    pub(super) fn play(&mut self, scene: Scene, seed: u64, fate: Fate) -> Result<Outcome, Failure> {
        self.rounds += 1;
        let round = Round { scene, seed, number: self.rounds, fate };
        if self.crew.remote.is_some() && fate.action == TriggerAction::Stop {
            return if scene.what == What::Kv { self.cut_cache(&round) } else { self.cut(&round) };
        }
        let outcome = match scene.what {
            What::Push | What::Stream | What::Pop => self.play_ring(&round)?,
            What::Create | What::Publish => self.play_create(&round)?,
            What::AllReduce | What::Client | What::Proxy => self.play_together(&round)?,
            What::Attach => self.play_attach(&round)?,
            What::Job => self.play_job(&round)?,
            What::Kv => self.play_cache(&round)?,
        };
        self.clean(&round)?;
        Ok(outcome)
    }

    fn play_ring(&mut self, round: &Round) -> Result<Outcome, Failure> {
        let mut victim = self.crew.start(Task::Fall(*round))?;
        let slot = victim.ready()?;
        let command = if round.scene.what == What::Pop { "push" } else { "pop" };
        self.first.say(command, round, &[victim.player.pid().into(), slot])?;
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
        let mut victim = self.crew.start(Task::Fall(*round))?;
        let slot = victim.ready()?;
        victim.go()?;
        let end = match round.fate.action {
            TriggerAction::Kill => victim.end()?,
            TriggerAction::Stop => {
                victim.await_standstill()?;
                self.second.tell("bypass", round, &[victim.player.pid().into(), slot])?;
                let end = victim.revive(false)?;
                self.second.ask("maintain")?;
                end
            }
        };
        self.judge(round, &end)?;
        Ok(end.outcome)
    }

    /// A victim that the survivors work with, as ranks of a group or as processes of a service.
    fn play_together(&mut self, round: &Round) -> Result<Outcome, Failure> {
        let mut victim = self.crew.start(Task::Fall(*round))?;
        let pid = victim.player.pid().into();
        let ranks: Vec<_> =
            [&mut self.first, &mut self.second].into_iter().take(acts::ranks(round) - 1).collect();
        let mut ranks = ranks;
        for (rank, survivor) in ranks.iter_mut().enumerate() {
            survivor.say("work", round, &[pid, rank as u64])?;
        }
        victim.ready()?;
        for survivor in &mut ranks {
            survivor.expect("attached")?;
        }
        victim.go()?;
        let stops = round.fate.action == TriggerAction::Stop;
        let mut end = match &mut ranks[..] {
            [proxy] if stops && round.scene.what == What::Client => victim.end_with_proxy(proxy)?,
            ranks => victim.end_with(round, ranks)?,
        };
        if stops {
            let operations = end.outcome.operations;
            end.outcome.fell = operations == 0 || round.fate.operation <= operations;
        }
        let counts = end.survivors.split(' ').map(str::parse).collect::<Result<Vec<usize>, _>>()?;
        let End { begun, done, .. } = end;
        // The line on which it said that it had ended one may be torn by what it was about to say of the next.
        let is_near = |&count: &usize| count == UNCOUNTED || done <= count + 1 && count <= begun;
        let is_good = match round.scene.what {
            // Clients that lost a proxy come to the same end, once they all have begun.
            What::Proxy => counts.contains(&0) || counts.iter().all(|count| *count == counts[0]),
            _ => counts.iter().all(is_near),
        };
        if !is_good && !stops {
            return Err(Failure(format!(
                "the victim ended {done} operations and began {begun}, survivors came to {counts:?}"
            )));
        }
        Ok(end.outcome)
    }

    fn play_attach(&mut self, round: &Round) -> Result<Outcome, Failure> {
        self.first.tell("prepare", round, &[])?;
        let operation = 1 + round.seed % CREATE_OPERATIONS;
        let first = Round { fate: Fate { operation, action: TriggerAction::Kill }, ..*round };
        let mut victim = self.crew.start(Task::Fall(first))?;
        victim.ready()?;
        victim.go()?;
        let end = victim.end()?;
        let mut second = self.crew.start(Task::Attach(*round))?;
        let outcome = second.end()?.outcome;
        self.judge(round, &end)?;
        Ok(outcome)
    }

    /// Endpoints on two hosts meet, talk and die; nothing is left of them once somebody has swept.
    fn play_job(&mut self, round: &Round) -> Result<Outcome, Failure> {
        let mut dice = Dice(round.seed);
        let mut ranks = vec![];
        for rank in 0..3 {
            let drawn =
                if dice.draw().is_multiple_of(2) { 1 + dice.draw() % JOB_OPERATIONS } else { u64::MAX };
            let operation = if rank == 0 { round.fate.operation } else { drawn };
            let one = Round { fate: Fate { operation, action: TriggerAction::Kill }, ..*round };
            ranks.push(self.crew.start(Task::Talk(one, rank))?);
        }
        // A process that is dead already has said nothing.
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

    /// Processes of two hosts share a cache, and all of them die. No block is wrong, and nothing of theirs is in the way of others.
    fn play_cache(&mut self, round: &Round) -> Result<Outcome, Failure> {
        self.first.tell("prepare", round, &[])?;
        let mut dice = Dice(round.seed);
        let mut running = vec![];
        for rank in 0..4 {
            let drawn = 1 + dice.draw() % CACHE_OPERATIONS;
            let operation = if rank == 0 { round.fate.operation } else { drawn };
            let one = Round { fate: Fate { operation, action: TriggerAction::Kill }, ..*round };
            running.push(self.crew.start(Task::Talk(one, rank))?);
        }
        let mut ends = running.iter_mut().map(Running::end).collect::<Result<Vec<_>, _>>()?;
        self.first.ask("maintain")?;
        self.judge(round, &ends[0])?;
        let Outcome { fell, operations } = ends.swap_remove(0).outcome;
        Ok(Outcome { fell, operations: operations.min(CACHE_OPERATIONS) })
    }

    /// The kernel of the other machine dies at the victim's operation. The first survivor is told, the hosts of that kernel are evicted
    /// and fenced, and the machine boots and joins again.
    fn cut(&mut self, round: &Round) -> Result<Outcome, Failure> {
        let remote = self.crew.remote.clone().expect("another machine");
        let creates = round.scene.what == What::Create;
        if creates {
            self.first.tell("prepare", round, &[])?;
        }
        let mut victim = self.crew.start(Task::Fall(*round))?;
        // Not as one that is stopped: it never goes on.
        let dies = Round { fate: Fate { action: TriggerAction::Kill, ..round.fate }, ..*round };
        let pid = victim.player.pid().into();
        if round.scene.what == What::AllReduce {
            self.first.say("work", &dies, &[pid, 0])?;
        }
        let slot = victim.ready()?;
        match round.scene.what {
            What::Pop => self.first.say("push", &dies, &[pid, slot])?,
            What::Push | What::Stream => self.first.say("pop", &dies, &[pid, slot])?,
            _ => {}
        }
        if !creates {
            self.first.expect("attached")?;
        }
        let Player::There { id, .. } = victim.player else {
            unreachable!("victims are on the other machine")
        };
        remote.borrow_mut().watch(id)?;
        victim.wire.say("go and be heard")?;
        let mut end = End::default();
        victim.end_there(&remote, &mut end)?;
        remote.borrow_mut().cut()?;
        if !creates {
            let count: usize = self.first.answer()?.parse()?;
            let late = usize::from(round.scene.what == What::AllReduce);
            if round.scene.what != What::Pop && !(end.done <= count + late && count <= end.begun) {
                let End { begun, done, .. } = end;
                return Err(Failure(format!(
                    "the victim ended {done} operations and began {begun}, a survivor ended {count}"
                )));
            }
        }
        for host in [SHARED_HOST, LONELY_HOST] {
            self.fence(host)?;
        }
        remote.borrow_mut().rejoin()?;
        self.second = self.crew.survivor(SHARED_HOST)?;
        if creates {
            let (begun, done) = (end.begun as u64, end.done as u64);
            self.first.tell("judge", &dies, &[begun, done, 1])?;
        }
        self.clean(&dies)?;
        Ok(end.outcome)
    }

    /// The kernel of the other machine dies at the victim's operation, while processes of both machines put, get and pin blocks of one
    /// cache, of which those on this machine die as well. The blocks of the dead kernel stay readable, before it is fenced too. Then one of
    /// its hosts comes back to its part, and the part of the other is given up.
    fn cut_cache(&mut self, round: &Round) -> Result<Outcome, Failure> {
        let remote = self.crew.remote.clone().expect("another machine");
        let dies = Round { fate: Fate { action: TriggerAction::Kill, ..round.fate }, ..*round };
        self.first.tell("prepare", &dies, &[])?;
        self.second.tell("keep", &dies, &[])?;
        let mut dice = Dice(round.seed);
        let mut victim = self.crew.start(Task::Talk(*round, 0))?;
        let mut here = vec![];
        for rank in [1, 3] {
            let operation = 1 + dice.draw() % CACHE_OPERATIONS;
            let one = Round { fate: Fate { operation, ..dies.fate }, ..dies };
            here.push(self.crew.start(Task::Talk(one, rank))?);
        }
        // It may be anywhere when its kernel dies, and nobody waits for it.
        let _beside = self.crew.start(Task::Talk(Round { fate: NEVER, ..dies }, 2))?;
        let Player::There { id, .. } = victim.player else {
            unreachable!("victims are on the other machine")
        };
        remote.borrow_mut().watch(id)?;
        let mut end = End::default();
        victim.end_there(&remote, &mut end)?;
        remote.borrow_mut().cut()?;
        self.first.tell("judge", &dies, &[0, 0, 0])?;
        self.first.tell("find-kept", &dies, &[])?;
        for host in [SHARED_HOST, LONELY_HOST] {
            self.fence(host)?;
        }
        here.iter_mut().try_for_each(|one| one.end().map(drop))?;
        self.first.ask("maintain")?;
        self.first.tell("find-kept", &dies, &[])?;
        remote.borrow_mut().rejoin()?;
        self.second = self.crew.survivor(SHARED_HOST)?;
        self.second.tell("find-kept", &dies, &[])?;
        self.run_for_host(Task::GiveUp(dies))?;
        for survivor in [&mut self.second, &mut self.first] {
            survivor.tell("judge", &dies, &[0, 0, 1])?;
        }
        self.clean(&dies)?;
        Ok(end.outcome)
    }

    /// Has a host of a kernel that is dead evicted and fenced.
    fn fence(&self, host: u16) -> Result<(), Failure> {
        let path = self.crew.settings.pool.as_deref().ok_or(SessionError::NoPool)?;
        let memory = session::open_memory(path, self.crew.settings.coherence.unwrap_or_default())?;
        let Member { timeout, silence, .. } = Member::new(host, 0);
        for change in [MembershipChange::Evict, MembershipChange::Fence] {
            change_membership(&memory, host, change, timeout, silence)?;
        }
        Ok(())
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
        self.run_for_host(Task::Maintain(LONELY_HOST))
    }

    /// Has the next process of a host do something.
    fn run_for_host(&self, task: Task) -> Result<(), Failure> {
        let mut next = self.crew.start(task)?;
        let report = next.wire.hear()?;
        match (next.player.wait()?, report) {
            (Ended::Exited(0), None) => Ok(()),
            (ended, report) => {
                let report = report.unwrap_or_default();
                Err(Failure(format!("the next process of the victim's host ended with {ended:?} {report}")))
            }
        }
    }

    /// Takes away what is left of the round, and looks whether that was everything.
    fn clean(&mut self, round: &Round) -> Result<(), Failure> {
        self.sweep(round)?;
        self.first.tell("clean", round, &[])?;
        self.sweep(round)?;
        if round.scene.what == What::Kv {
            // Each host takes back the room of its own slabs.
            self.second.ask("maintain")?;
        }
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
            match survivor.player.wait()? {
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

/// Where the processes that share a cache die: about as many operations as one makes.
const CACHE_OPERATIONS: u64 = 4000;

/// Where the first of two victims dies: about as many operations as a create scene has.
const CREATE_OPERATIONS: u64 = 1500;

/// The settings of a soak in a pool that is there: of so few chunks for its hosts that none keeps an empty one.
pub(super) fn on_device(settings: &Settings) -> Result<Settings, Failure> {
    let path = settings.pool.as_deref().ok_or(SessionError::NoPool)?;
    let memory = session::open_memory(path, settings.coherence.unwrap_or_default())?;
    let superblock = read_superblock(&memory)?;
    let (chunks, Geometry { hosts, .. }) = (superblock.layout()?.chunks(), superblock.geometry);
    if chunks >= 8 * u32::from(hosts) || hosts <= LONELY_HOST {
        let what = format!("{chunks} chunks for {hosts} hosts");
        return Err(Failure(format!(
            "{}: {what}; a soak needs {} hosts or more, and fewer than 8 chunks for each: format it with more --hosts or a larger --chunk",
            path.display(),
            LONELY_HOST + 1
        )));
    }
    let wrap = Some(settings.wrap.clone().unwrap_or_default());
    Ok(Settings { timeout: Some(TimeSpan(DEADLINE)), wrap, ..settings.clone() })
}

impl Survivor {
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

/// A victim.
struct Running {
    player: Player,
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
        let (mut revived, mut is_told) = (None, false);
        for survivor in survivors {
            let mut answer = survivor.wire.hear()?;
            if answer.as_deref() == Some("told") {
                is_told = true;
                answer = survivor.wire.hear()?;
            }
            if answer.as_deref() == Some("late") {
                if revived.is_none() {
                    revived = Some(self.revive(true)?);
                }
                answer = survivor.wire.hear()?;
            }
            answers.push(of_survivor(answer)?);
        }
        let mut end = match revived {
            Some(end) => end,
            None if is_told => {
                return Err(Failure("a survivor was told that another gave up; none did".into()));
            }
            // Clients that have left a proxy do not see that it stands still.
            None if round.scene.what == What::Proxy => self.revive(false)?,
            None => self.end()?,
        };
        end.survivors = answers.join(" ");
        Ok(end)
    }

    /// Lets a client go on that has stood still for a while. A proxy that has no other client waits for it, however long it takes.
    fn end_with_proxy(&mut self, proxy: &mut Survivor) -> Result<End, Failure> {
        self.await_standstill()?;
        let report = proxy.wire.hear_soon(acts::SHORT_DEADLINE)?;
        if let (Some(line), None) = (&report, self.player.here().ended()) {
            return Err(Failure(format!("a proxy gave up on a client that stands still: {line:?}")));
        }
        let mut end = self.revive(false)?;
        end.survivors = report.map_or_else(|| proxy.answer(), of_survivor)?;
        Ok(end)
    }

    /// Waits until it stands still, or came to its end.
    fn await_standstill(&mut self) -> Result<(), Failure> {
        let start = Instant::now();
        while start.elapsed() < DEADLINE {
            if stands_still(self.player.here()) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        Err(Failure("the victim neither stands still nor ends".into()))
    }

    /// Lets it go on until its end, wherever it stands still or is about to. It may fail when others `gave_up` on it.
    fn revive(&mut self, gave_up: bool) -> Result<End, Failure> {
        let start = Instant::now();
        while self.player.here().ended().is_none() {
            self.player.here().go_on();
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

    /// Waits until it, which is on the other machine and watched there, stands still or has ended.
    fn end_there(&mut self, remote: &Rc<RefCell<Remote>>, end: &mut End) -> Result<(), Failure> {
        let start = Instant::now();
        loop {
            let stands = remote.borrow_mut().stands_still()?;
            while let Some(Some(line)) = self.wire.hear_soon(Duration::from_millis(1))? {
                end.take(&line)?;
                // It may stand still, or have ended.
                drop(self.wire.say("heard"));
            }
            if stands {
                return Ok(());
            }
            if start.elapsed() > 2 * DEADLINE {
                return Err(Failure("the victim neither stands still nor ends".into()));
            }
        }
    }

    /// Waits until it is dead.
    fn end(&mut self) -> Result<End, Failure> {
        let mut end = End::default();
        while let Some(line) = self.wire.hear()? {
            end.take(&line)?;
        }
        match self.player.wait()? {
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
