//! `polder keeper`: the one voice that says who is a member.

use std::fs::File;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::mpsc::channel;
use std::time::Duration;

use clap::{Args, ValueEnum};
use polder_attach::session::{self, SessionError};
use polder_attach::settings::{Settings, TimeSpan};
use polder_front::{Teller, unwritten};
use polder_pool::keeper::{Keeper, KeeperTask, ReplaceKeeper, next_incarnation};
use polder_pool::{IdSource, Member};
use rustix::io::Errno;
use signal_hook::consts::{SIGHUP, SIGINT, SIGPIPE, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use crate::Failure;
use crate::agent::{GRACE, tell_unread};
use crate::kv::room::Visits;
use crate::pool::hosts;

/// Runs the keeper of a pool until it is stopped, or superseded by a newer one.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Number of this keeper, higher than that of every keeper before it [default: the next]. Give it if a supervisor makes
    /// sure that only one keeper runs.
    #[arg(long)]
    incarnation: Option<u16>,
    /// Take the place of an earlier keeper that this machine cannot see. Give it only if every earlier keeper is gone for
    /// certain.
    #[arg(long)]
    force: bool,
    /// How hosts get their ids from now on [default: as before, in a new pool launcher].
    #[arg(long)]
    ids: Option<Giver>,
    /// Evict a host if all its processes are silent for this long, such as 10s; at least 1s [default: never].
    #[arg(long, value_name = "TIME")]
    evict_after: Option<TimeSpan>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Giver {
    /// Each host brings its own id.
    Launcher,
    /// Hosts ask this keeper for an id.
    Keeper,
}

/// Runs the keeper.
pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> Result<ExitCode, Failure> {
    let path = settings.pool.as_deref().ok_or(SessionError::NoPool)?;
    expect_patience(arguments.evict_after)?;
    let memory = session::open_memory(path, settings.coherence.unwrap_or_default())?;
    let replace = if arguments.force { ReplaceKeeper::Unseen } else { ReplaceKeeper::Gone };
    let mut told = Signals::new([SIGHUP, SIGINT, SIGTERM])?;
    // A reader that went away is an error, which ends the keeper, and not the process before it.
    let _caught = Signals::new([SIGPIPE])?;
    let (sender, unread) = channel();
    tell_unread(sender)?;
    // A reader that reads nothing holds no answer to a host up.
    let stdout = Teller::start(File::from(std::io::stdout().as_fd().try_clone_to_owned()?))?;
    let incarnation = match arguments.incarnation {
        Some(incarnation) => incarnation,
        None => next_incarnation(&memory, replace)?,
    };
    let id_source = arguments.ids.map(|giver| match giver {
        Giver::Launcher => IdSource::Launcher,
        Giver::Keeper => IdSource::Keeper,
    });
    let evict_after = arguments.evict_after.map(|span| span.0);
    let task = KeeperTask { incarnation, id_source, evict_after };
    let mut keeper = Keeper::start_replacing(memory.clone(), task, replace)?;
    let (mut visits, mut asked) = (Visits::start(memory.clone(), settings), None);
    let mut unsaid = format!("keeper {incarnation} of {} runs; stop it with Ctrl-C\n", path.display());
    let mut epoch = 0;
    loop {
        if let Some(signal) = told.pending().next() {
            visits.end();
            asked = Some((signal, asked.is_some()));
        }
        match asked {
            Some((signal, is_urgent)) if is_urgent || visits.has_ended() => {
                // Another machine can take its place.
                keeper.end();
                drop(stdout.end(GRACE));
                emulate_default_handler(signal)?;
                return Ok(ExitCode::SUCCESS);
            }
            _ => {}
        }
        let view = keeper.view();
        if view.epoch != epoch {
            epoch = view.epoch;
            let (members, fenced) = (hosts(view.members), hosts(view.fenced));
            unsaid += &format!("epoch {epoch}: members {members}, fenced {fenced}\n");
        }
        unsaid.extend(visits.told());
        let mut go_on = || {
            if unread.try_recv().is_ok() {
                return Err(unwritten(&Errno::PIPE.into()));
            }
            // Also nothing: it may be that what was said before could not be written.
            stdout.say(std::mem::take(&mut unsaid))?;
            if !memory.region().is_at(path, true).unwrap_or(false) {
                let why = "this pool was removed, or another lies here now; start a keeper again";
                return Err(Failure(format!("{}: {why}", path.display())));
            }
            keeper.tick()?;
            visits.take_back(&mut keeper)
        };
        if let Err(error) = go_on() {
            // A visit that goes on is answered by the keeper that took this one's place.
            visits.end();
            while !visits.has_ended() {
                std::thread::sleep(TICK);
            }
            keeper.end();
            return Err(error);
        }
        std::thread::sleep(TICK);
    }
}

/// That a host which gives its signs of life is never silent for so long.
fn expect_patience(evict_after: Option<TimeSpan>) -> Result<(), Failure> {
    // A few heartbeats come within that time.
    let least = Member::new(0, 0).silence / 2;
    match evict_after {
        Some(TimeSpan(asked)) if asked < least => Err(Failure(format!(
            "--evict-after is {asked:?}, and a host that lives may be silent for so long between two heartbeats; give at least {least:?}"
        ))),
        _ => Ok(()),
    }
}

/// How long a host that asks waits for an answer at most, beside the keeper's own work.
const TICK: Duration = Duration::from_millis(50);
