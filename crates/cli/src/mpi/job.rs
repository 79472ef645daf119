//! `polder mpi run`: starts the library's mpiexec, waits for it, and passes signals and its end on.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use polder_pool::session::{AnyMemory, Session, SessionError};
use polder_pool::settings::Settings;
use polder_pool::{Geometry, Member, Swept, each, each_memory, read_superblock};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Cause;

use super::Choice;
use super::library::{Install, Library, Section, in_path, quoted};
use crate::Failure;
use crate::pool::removed;

#[derive(Args)]
pub(crate) struct Run {
    /// How many ranks.
    #[arg(short = 'n', long, value_name = "RANKS", value_parser = clap::value_parser!(u16).range(1..))]
    ranks: u16,
    /// The machines to run on, with commas between them; their host ids in the pool are 0, 1, ... in this order.
    #[arg(long, value_delimiter = ',', value_name = "MACHINES", conflicts_with = "emulate")]
    hosts: Vec<String>,
    /// Split the ranks over so many emulated hosts of this machine; what goes between them goes through the pool.
    #[arg(long, value_name = "HOSTS", value_parser = clap::value_parser!(u16).range(1..=64))]
    emulate: Option<u16>,
    /// The MPI library, where PATH has several.
    #[arg(long, value_name = "LIBRARY")]
    mpi: Option<Library>,
    #[command(flatten)]
    choice: Choice,
    /// Print the command, and start nothing.
    #[arg(long)]
    dry_run: bool,
    /// The program and its arguments.
    #[arg(last = true, required = true, value_hint = clap::ValueHint::CommandWithArguments)]
    program: Vec<String>,
}

/// Starts the program and waits until it has ended.
pub(super) fn run(arguments: &Run, settings: &Settings) -> Result<ExitCode, Failure> {
    let Run { choice, program, .. } = arguments;
    arguments.expect_room(settings)?;
    let Install { library, mpiexec } = Install::find(choice.mpiexec.as_deref(), arguments.mpi)?;
    arguments.expect_program()?;
    let through_pool = choice.all_through_pool || arguments.emulate.is_some();
    let variables = choice.variables(library, Some(&mpiexec), through_pool, settings)?;
    let words = library.arguments(&arguments.sections(), &variables, program);
    if arguments.dry_run {
        let settings = variables.iter().map(|(name, value)| format!("{name}={}", quoted(value)));
        let command = [mpiexec.display().to_string()].into_iter().chain(words).map(|word| quoted(&word));
        println!("{}", settings.chain(command).collect::<Vec<_>>().join(" "));
        return Ok(ExitCode::SUCCESS);
    }
    let mut command = Command::new(&mpiexec);
    let status = passing_signals(command.args(words).envs(variables.clone()), &mpiexec)?;
    let install = Install { library, mpiexec };
    if let Err(failure) = arguments.clean_up(&install, &variables, settings) {
        eprintln!("polder: cannot clean up after the job: {failure}");
    }
    Ok(code_of(status))
}

impl Run {
    fn sections(&self) -> Vec<Section> {
        let is_said = self.emulate.is_some() || !self.hosts.is_empty();
        let place = |section: Section| Section {
            host: section.host.filter(|_| is_said),
            machine: section.host.and_then(|host| self.hosts.get(usize::from(host)).cloned()),
            ..section
        };
        Section::deal(self.ranks, self.host_count()).map(place).collect()
    }

    fn host_count(&self) -> u16 {
        self.emulate.unwrap_or(self.hosts.len().max(1) as u16)
    }

    /// That the pool is there, and has room for so many ranks on so many hosts.
    fn expect_room(&self, settings: &Settings) -> Result<(), Failure> {
        let path = settings.pool.as_deref().ok_or(SessionError::NoPool)?;
        let memory = AnyMemory::open(path, settings.coherence.unwrap_or_default())?;
        let superblock = each_memory!(&memory, memory => read_superblock(memory))
            .map_err(|source| SessionError::Pool { path: path.to_owned(), source })?;
        let Geometry { hosts, processes, .. } = superblock.geometry;
        let (asked, pool) = (self.host_count(), path.display());
        if asked > self.ranks {
            return Err(Failure(format!(
                "{asked} hosts are too many for {} ranks; give a larger -n",
                self.ranks
            )));
        }
        if asked > hosts {
            let remedy = "take fewer, or format a pool with more --hosts";
            return Err(Failure(format!("{pool} is made for {hosts} hosts, not for {asked}; {remedy}")));
        }
        // The provider is in the pool, and so is the shim.
        let room = processes / if self.choice.windows { 2 } else { 1 };
        let most = self.ranks.div_ceil(asked);
        if most > room {
            let remedy = "take more hosts, or format a pool with more --processes";
            return Err(Failure(format!("{pool} has room for {room} ranks on a host, not {most}; {remedy}")));
        }
        let twice = |name: &&String| self.hosts.iter().filter(|other| other == name).count() > 1;
        match self.hosts.iter().find(twice) {
            Some(name) => Err(Failure(format!("{name} is named twice in --hosts; name each machine once"))),
            None => Ok(()),
        }
    }

    /// That the program is there, if it is to run here.
    fn expect_program(&self) -> Result<(), Failure> {
        let program = &self.program[0];
        let is_here =
            if program.contains('/') { Path::new(program).is_file() } else { !in_path(program).is_empty() };
        match is_here || !self.hosts.is_empty() {
            true => Ok(()),
            false => Err(Failure(format!("{program}: no such program, or not in PATH"))),
        }
    }
}

impl Run {
    /// Removes what ranks that were killed have left in the pool.
    fn clean_up(
        &self,
        install: &Install,
        variables: &[(String, String)],
        settings: &Settings,
    ) -> Result<(), Failure> {
        let job = variables.iter().find(|(name, _)| name == "POLDER_JOB").map_or("", |(_, job)| job);
        if !self.hosts.is_empty() {
            // Each host knows which of its processes are gone.
            let sections: Vec<_> =
                self.sections().into_iter().map(|section| Section { ranks: 1, ..section }).collect();
            let polder = std::env::current_exe()?.display().to_string();
            let sweep = [&*polder, "pool", "sweep", "--job", job].map(str::to_owned);
            let words = install.library.arguments(&sections, variables, &sweep);
            let mut command = Command::new(&install.mpiexec);
            command.args(words).envs(variables.iter().cloned()).stdout(Stdio::null());
            return passing_signals(&mut command, &install.mpiexec).map(drop);
        }
        let hosts: Vec<_> = match self.emulate {
            Some(hosts) => (0..hosts).map(Some).collect(),
            None => vec![settings.host],
        };
        sweep_until_clean(settings, &hosts, job.parse()?)
    }
}

/// Sweeps as each of the hosts of this machine, until nothing of the job is left: ranks may outlive an mpiexec that was
/// killed.
fn sweep_until_clean(settings: &Settings, hosts: &[Option<u16>], job: u64) -> Result<(), Failure> {
    let patience = settings.timeout.map_or(Member::new(0, 0).timeout, |span| span.0);
    let (start, mut swept) = (Instant::now(), Swept::default());
    loop {
        let mut stays = false;
        for host in hosts {
            // Not of the job: nobody waits for this process.
            let settings = Settings { host: *host, job: Some(0), ..settings.clone() };
            let session = Session::open(&settings)?;
            each!(session.pool(), pool => {
                let Swept { objects, dead, .. } = pool.sweep_job(job)?;
                swept.objects.extend(objects);
                swept.dead.extend(dead);
                pool.maintain()?;
                stays = pool.jobs()?.contains(&job);
            });
        }
        if !stays || start.elapsed() > patience {
            if !swept.objects.is_empty() {
                eprintln!("polder: removed {}", removed(&swept));
            }
            if stays {
                let remedy = format!("end them, then run `polder pool sweep --job {job}`");
                eprintln!(
                    "polder: ranks of job {job} outlive mpiexec and keep objects in the pool; {remedy}"
                );
            }
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Signals that are handed on.
const PASSED: [i32; 6] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];

/// Runs `command` to its end, and hands on what this process is told meanwhile.
fn passing_signals(command: &mut Command, mpiexec: &Path) -> Result<ExitStatus, Failure> {
    let signals = SignalsInfo::new(PASSED)?;
    let mut child = command.spawn().map_err(|error| Failure(format!("{}: {error}", mpiexec.display())))?;
    let pid = Pid::from_child(&child);
    let pass = move |signal| {
        // It may have ended just now.
        let _ = kill_process(pid, signal);
    };
    // Its id is not another's before it is reaped.
    let ends = || retry_on_intr(|| waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT));
    meanwhile(signals, pass, ends)?;
    Ok(child.wait()?)
}

/// What `wait` returns; `pass` gets what this process is told until then, by whoever is not the kernel.
fn meanwhile<T>(
    mut signals: SignalsInfo<WithOrigin>,
    pass: impl Fn(Signal) + Send + 'static,
    wait: impl FnOnce() -> T,
) -> T {
    let handle = signals.handle();
    let passing = std::thread::spawn(move || {
        // A terminal tells both at once, and mpiexec takes a second Ctrl-C for impatience.
        let told = signals.forever().filter(|origin| origin.cause != Cause::Kernel);
        told.filter_map(|origin| Signal::from_named_raw(origin.signal)).for_each(pass);
        signals
    });
    let waited = wait();
    // It says that it closes, then writes to who listens: those stay until it has, or SIGPIPE ends this process.
    handle.close();
    drop(passing.join());
    waited
}

/// As a shell says it.
fn code_of(status: ExitStatus) -> ExitCode {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

#[cfg(test)]
mod tests {
    use signal_hook::consts::SIGPIPE;
    use signal_hook::iterator::Signals;

    use super::*;

    /// 20,000 ends, each with its own schedule of the two threads. SIGPIPE ends `polder`, whose end is then not its program's.
    #[test]
    fn who_hands_signals_on_is_told_to_end_while_it_listens() {
        let mut broken = Signals::new([SIGPIPE]).unwrap();
        for round in 0..20_000 {
            let signals = SignalsInfo::new(PASSED).unwrap();
            meanwhile(signals, |_| (), || (0..round % 100 * 10).for_each(|_| std::hint::spin_loop()));
            assert_eq!(broken.pending().next(), None, "round {round}");
        }
    }
}
