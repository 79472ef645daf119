//! `polder-dev soak`: processes that are killed or stopped at any memory operation, and others that must go on.
//!
//! Every round has a victim and survivors. The victim kills or stops itself before its memory operation `k`. The survivors must
//! find an exact prefix of what it did, get one error that names it, and lose nothing. The operations of every scene are counted
//! first; the rounds then go through all of them.
//!
//! With `--listen` and `--join` two machines play in one pool on a device: the first survivor on one, all others on the other.

mod acts;
mod remote;
mod scene;
mod stage;
mod task;
mod wire;

use std::collections::HashSet;
use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use polder_attach::settings::{CoherenceChoice, Settings, TimeSpan};
use polder_mem::TriggerAction;

use crate::Failure;
use polder_measure::Scratch;
use scene::{Dice, Fate, Scene, What};
use stage::{NEVER, Stage};

/// Kills and stops processes at any memory operation, for as long as one likes.
#[derive(Args)]
pub(crate) struct Arguments {
    /// How long, such as 10min [default: for ever, unless --kills is given].
    #[arg(long = "for", value_name = "TIME")]
    time: Option<TimeSpan>,
    /// Number of victims.
    #[arg(long, visible_alias = "rounds")]
    kills: Option<u64>,
    /// One victim at each memory operation, then end.
    #[arg(long, conflicts_with_all = ["kills", "at"])]
    once: bool,
    /// The first seed [default: from the clock].
    #[arg(long)]
    seed: Option<u64>,
    /// Scenes to play, with commas between them: push, stream, pop, create, all-reduce, attach, job, client, proxy, publish, kv,
    /// or a variant of one such as push/software/alone.
    #[arg(long, value_delimiter = ',')]
    what: Vec<String>,
    /// What happens to the victims.
    #[arg(long, value_enum, default_value_t = Doom::Kill)]
    doom: Doom,
    /// The memory operation at which it happens, instead of each in turn.
    #[arg(long, value_name = "OPERATION")]
    at: Option<u64>,
    /// Play in the empty pool of --pool with a second machine, which joins at this address of this one.
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with = "join")]
    listen: Option<String>,
    /// Run the victims of the machine that listens at this address.
    #[arg(long, value_name = "ADDRESS:PORT",
          conflicts_with_all = ["time", "kills", "once", "seed", "what", "doom", "at"])]
    join: Option<String>,
}

impl Arguments {
    /// That the victims can meet their doom where they are.
    fn expect_doom(&self) -> Result<(), Failure> {
        match (self.doom, &self.listen) {
            (Doom::Kernel, None) => {
                Err(Failure("--doom kernel needs a second machine: give --listen".into()))
            }
            (Doom::Stop, Some(_)) => {
                Err(Failure("--doom stop plays on one machine: leave --listen out".into()))
            }
            _ => Ok(()),
        }
    }

    /// Whether it works on a pool that the user names, and not on its own.
    pub(crate) const fn opens_a_pool(&self) -> bool {
        self.listen.is_some() || self.join.is_some()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Doom {
    /// SIGKILL.
    Kill,
    /// SIGSTOP, until the survivors have given up on them.
    Stop,
    /// The kernel of the second machine restarts at once. The machine must join again when it has booted.
    Kernel,
}

/// Plays rounds until the time, the number or the patience of the caller is over, or one fails.
pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> Result<ExitCode, Failure> {
    if let Some(address) = &arguments.join {
        remote::join(&stage::on_device(settings)?, address)?;
        return Ok(ExitCode::SUCCESS);
    }
    arguments.expect_doom()?;
    let scratch = Scratch::new()?;
    let mut soak = Soak::new(arguments, settings, scratch.path())?;
    let good = soak.run(arguments)?;
    soak.close()?;
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

struct Soak {
    scenes: Vec<(Scene, u64)>,
    stages: Vec<(CoherenceChoice, Stage)>,
    doom: Doom,
}

impl Soak {
    /// Starts the survivors and counts the operations of every scene that was asked for.
    fn new(arguments: &Arguments, settings: &Settings, directory: &Path) -> Result<Self, Failure> {
        let mut soak = Self { scenes: Vec::new(), stages: Vec::new(), doom: arguments.doom };
        if let Some(address) = &arguments.listen {
            soak.stages.push((CoherenceChoice::Software, Stage::listen(settings, address)?));
        }
        // One that stands still while it attaches keeps its host from everything: that is for its operator to see. And what
        // it holds is never swept up.
        let plays = |scene: &Scene| {
            let is_there = arguments.listen.is_none() || scene.coherence == CoherenceChoice::Software;
            let can = match arguments.doom {
                Doom::Kill => true,
                Doom::Stop => !matches!(scene.what, What::Attach | What::Job | What::Kv),
                // The victim's host has no survivor: that would be dead as well. Services and stores are not played there.
                Doom::Kernel => {
                    let is_told =
                        [What::Push, What::Stream, What::Pop, What::Create, What::AllReduce, What::Kv];
                    scene.alone && is_told.contains(&scene.what)
                }
            };
            is_there && can
        };
        for scene in choose(&arguments.what)?.into_iter().filter(plays) {
            if soak.stages.iter().all(|(coherence, _)| *coherence != scene.coherence) {
                soak.stages.push((scene.coherence, Stage::open(directory, scene.coherence)?));
            }
            let operations = soak.stage(scene).play(scene, 0, NEVER)?.operations;
            println!("{scene}: {operations} memory operations");
            soak.scenes.push((scene, operations));
        }
        if soak.scenes.is_empty() {
            let (what, doom) = (arguments.what.join(","), arguments.doom.name());
            return Err(Failure(format!(
                "--what {what} cannot be played with --doom {doom}; choose other scenes"
            )));
        }
        Ok(soak)
    }

    fn stage(&mut self, scene: Scene) -> &mut Stage {
        let found = self.stages.iter_mut().find(|(coherence, _)| *coherence == scene.coherence);
        &mut found.expect("a stage for every scene").1
    }

    fn points(&self) -> u64 {
        self.scenes.iter().map(|(_, operations)| operations).sum()
    }

    /// The number of the scene and the operation of a seed: as many seeds in a row as there are points meet each point once.
    fn draw(&self, seed: u64) -> (usize, u64) {
        let points = self.points();
        // A stride without a common divisor spreads them.
        let stride = (points * 5 / 8..).find(|stride| gcd(*stride, points) == 1).unwrap_or(1);
        let mut point = (u128::from(seed) * u128::from(stride) % u128::from(points)) as u64;
        for (number, (_, operations)) in self.scenes.iter().enumerate() {
            match point.checked_sub(*operations) {
                Some(rest) => point = rest,
                None => return (number, point + 1),
            }
        }
        unreachable!("a point is below the number of points")
    }

    /// Whether no round failed.
    fn run(&mut self, arguments: &Arguments) -> Result<bool, Failure> {
        let first = arguments.seed.unwrap_or_else(clock_seed);
        let rounds = arguments.kills.or(arguments.once.then(|| self.points()));
        let time = arguments.time.map_or(Duration::MAX, |span| span.0);
        println!("first seed {first}, the next is one more each round; {} points", self.points());
        let (bar, start) = (bar(rounds), Instant::now());
        let (mut met, mut played) = (vec![Met::default(); self.scenes.len()], 0);
        while rounds.is_none_or(|rounds| played < rounds) && start.elapsed() < time {
            let seed = first.wrapping_add(played);
            let (number, operation) = self.draw(seed);
            let (scene, _) = self.scenes[number];
            let operation = arguments.at.unwrap_or(operation);
            let action = match self.doom {
                Doom::Kill => TriggerAction::Kill,
                // Where it stands, its kernel ends.
                Doom::Stop | Doom::Kernel => TriggerAction::Stop,
            };
            bar.set_message(format!("seed {seed} {scene}"));
            match self.stage(scene).play(scene, seed, Fate { operation, action }) {
                Ok(outcome) => {
                    played += 1;
                    if outcome.fell {
                        met[number].victims += 1;
                        met[number].operations.insert(operation);
                    }
                }
                Err(failure) => {
                    bar.finish_and_clear();
                    println!("seed {seed}: {scene} before operation {operation}: {failure}");
                    println!(
                        "see it again: polder-dev soak --what {scene} --at {operation} --seed {seed} --kills 1 --doom {}",
                        self.doom.name()
                    );
                    return Ok(false);
                }
            }
            bar.inc(1);
            if !std::io::stderr().is_terminal() && played.is_multiple_of(REPORT) {
                println!("seeds {} to {seed} are good", seed.wrapping_sub(REPORT - 1));
            }
        }
        bar.finish_and_clear();
        let (seconds, past) = (start.elapsed().as_secs_f64(), self.doom.past());
        for ((scene, operations), met) in self.scenes.iter().zip(&met) {
            let (victims, at) = (met.victims, met.operations.len());
            println!("{scene}: {victims} {past}, at {at} of {operations} memory operations");
        }
        println!(
            "{played} rounds from seed {first} in {seconds:.0} s: {} processes {past} in the middle, every survivor went on and \
             nothing was lost",
            met.iter().map(|met| met.victims).sum::<u64>()
        );
        Ok(true)
    }

    fn close(self) -> Result<(), Failure> {
        self.stages.into_iter().try_for_each(|(_, stage)| stage.close())
    }
}

/// The victims of a scene that met their fate, and where.
#[derive(Clone, Debug, Default)]
struct Met {
    victims: u64,
    operations: HashSet<u64>,
}

/// Rounds between two reports where there is no terminal.
const REPORT: u64 = 100;

impl Doom {
    const fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Stop => "stop",
            Self::Kernel => "kernel",
        }
    }

    const fn past(self) -> &'static str {
        match self {
            Self::Kill => "killed",
            Self::Stop => "stopped",
            Self::Kernel => "killed with their kernel",
        }
    }
}

fn choose(names: &[String]) -> Result<Vec<Scene>, Failure> {
    if names.is_empty() {
        return Ok(Scene::all().collect());
    }
    let mut chosen = Vec::new();
    for name in names {
        let scenes = Scene::named(name);
        if scenes.is_empty() {
            let known: Vec<_> = Scene::all().map(|scene| scene.to_string()).collect();
            return Err(Failure(format!("no scene is called {name:?}; there are {}", known.join(", "))));
        }
        chosen.extend(scenes);
    }
    Ok(chosen)
}

fn clock_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    // Short enough to type.
    Dice(now.map_or(0, |now| now.as_nanos() as u64)).draw() % 1_000_000_000
}

const fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// A bar on a terminal, nothing elsewhere.
fn bar(rounds: Option<u64>) -> ProgressBar {
    let bar = rounds.map_or_else(ProgressBar::no_length, ProgressBar::new);
    if let Ok(style) = ProgressStyle::with_template("{human_pos} rounds {per_sec} {wide_bar} {msg}") {
        bar.set_style(style);
    }
    bar
}
