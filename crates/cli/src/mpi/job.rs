//! `polder mpi run`: starts the library's mpiexec, waits for it, and passes signals and its end on.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitCode, ExitStatus, Stdio};

use clap::Args;
use polder_attach::job_pool::{self, JobPool};
use polder_attach::session::{self, Session, SessionError};
use polder_attach::settings::Settings;
use polder_mem::{Coherence, HostPlan, Memory};
use polder_platform::shell_word;
use polder_pool::format::MAX_PROCESSES;
use polder_pool::{Geometry, Superblock, read_superblock};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Cause;

use super::cleanup::Cleanup;
use super::guard::Guard;
use super::leftovers::{MARK, TALLIES, TALLY_END, kill_marked, remove_tallies};
use super::library::{Install, Library, Section, in_path, may_run};
use super::room::Ranks;
use super::{Choice, job_id, text_of};
use crate::Failure;

#[derive(Args)]
pub(crate) struct Run {
    /// Number of ranks, also as -np.
    #[arg(short = 'n', long, value_name = "RANKS", value_parser = clap::value_parser!(u16).range(1..))]
    ranks: u16,
    /// The machines to run on, with commas between them. They get the host ids 0, 1, ... in this order.
    #[arg(long, value_delimiter = ',', value_name = "MACHINES", conflicts_with = "emulate")]
    hosts: Vec<String>,
    /// Split the ranks over this many emulated hosts of this machine. Messages between these hosts go through the pool.
    #[arg(long, value_name = "HOSTS", value_parser = clap::value_parser!(u16).range(1..=64))]
    emulate: Option<u16>,
    /// The MPI library, if PATH has several [default: the first].
    #[arg(long, value_name = "LIBRARY")]
    mpi: Option<Library>,
    /// Number of other ranks that a rank sends to at most [default: all]. Fewer need a smaller pool.
    #[arg(long, value_name = "RANKS", value_parser = clap::value_parser!(u16).range(1..))]
    partners: Option<u16>,
    #[command(flatten)]
    choice: Choice,
    /// Print the command, and start nothing.
    #[arg(long)]
    dry_run: bool,
    /// The program and its arguments.
    #[arg(trailing_var_arg = true, required = true, value_hint = clap::ValueHint::CommandWithArguments)]
    program: Vec<String>,
}

/// Starts the program and waits until it has ended.
pub(super) fn run(arguments: &Run, settings: &Settings) -> Result<ExitCode, Failure> {
    let Run { choice, program, .. } = arguments;
    arguments.expect_hosts(settings)?;
    let install = Install::find(choice.mpiexec.as_deref(), arguments.mpi)?;
    arguments.expect_program()?;
    let mut settings = Settings { job: Some(job_id(settings)), ..settings.clone() };
    let owns_pool = settings.pool.is_none();
    match &settings.pool {
        Some(pool) => {
            let Superblock { bytes, geometry, .. } = superblock(pool, &settings)?;
            arguments.ranks(install.library).expect_room(pool, &geometry, bytes)?;
        }
        None => settings.pool = Some(JobPool::place_of_mpi()),
    }
    let through_pool = arguments.goes_through_pool();
    let (library, mpiexec) = (install.library, Some(&*install.mpiexec));
    let variables = choice.variables(library, mpiexec, through_pool, &settings, Some(&program[0]))?;
    if arguments.dry_run {
        let words = install.library.arguments(&arguments.sections(), &variables, program);
        let settings = variables.iter().map(|(name, value)| format!("{name}={}", shell_word(value)));
        let command = [install.mpiexec.display().to_string()].into_iter().chain(words);
        let command = settings.chain(command.map(|word| shell_word(&word)));
        println!("{}", command.collect::<Vec<_>>().join(" "));
        return Ok(ExitCode::SUCCESS);
    }
    arguments.start(&install, variables, &settings, owns_pool)
}

impl Run {
    /// Runs mpiexec under a guard, tells how it went, and cleans up.
    fn start(
        &self,
        install: &Install,
        mut variables: Vec<(String, String)>,
        settings: &Settings,
        owns_pool: bool,
    ) -> Result<ExitCode, Failure> {
        let cleanup = self.cleanup(settings, owns_pool);
        let tally = text_of(&cleanup.tally)?;
        job_pool::remove_left(Path::new(HostPlan::DIRECTORY));
        cleanup.tally.parent().into_iter().for_each(remove_tallies);
        let guard = Guard::over(&cleanup, &variables)?;
        // Until the end: what no process has locked is for the next run to remove.
        let _share = match &settings.pool {
            Some(pool) if owns_pool => Some(self.ranks(install.library).make_pool(pool)?),
            _ => None,
        };
        // What every rank would be refused for is said once, before any starts.
        if let (Some(host), Some(pool)) = (cleanup.hosts.first(), &settings.pool) {
            let attached = Session::open(&Settings { host: *host, job: Some(0), ..settings.clone() });
            if attached.is_err() && owns_pool {
                drop(std::fs::remove_file(pool));
            }
            drop(attached?);
        }
        let is_here = self.hosts.is_empty();
        variables.extend(is_here.then(|| (TALLY.to_owned(), tally)));
        let _counted = if is_here { Some(Tally::begin(&cleanup.tally)?) } else { None };
        variables.push((MARK.to_owned(), cleanup.mark.clone()));
        let words = install.library.arguments(&self.sections(), &variables, &self.program);
        // Once the job has ended, a pool of its own is gone.
        let opened = settings
            .pool
            .as_deref()
            .map(|pool| session::open_memory(pool, settings.coherence.unwrap_or_default()));
        let coherence = opened.and_then(Result::ok).map(|memory| memory.coherence());
        let mut command = Command::new(&install.mpiexec);
        let status = passing_signals(command.args(words).envs(variables.iter().cloned()), &install.mpiexec);
        let tally = Tally::read(&cleanup.tally);
        if status.as_ref().map_or(true, |status| status.signal().is_some()) {
            kill_marked(&cleanup.mark);
        }
        let is_well = status.as_ref().is_ok_and(ExitStatus::success);
        if let Err(failure) = self.clean_up(&cleanup, install, &variables, settings, is_well) {
            eprintln!("polder: cannot clean up after the job: {failure}");
        }
        drop(guard);
        let status = status?;
        match status.success() {
            true => eprintln!("polder: {}", self.summary(&tally, coherence)),
            false => install.library.hint().into_iter().for_each(|hint| eprintln!("polder: {hint}")),
        }
        Ok(code_of(status))
    }

    fn cleanup(&self, settings: &Settings, owns_pool: bool) -> Cleanup {
        let job = job_id(settings);
        let hosts = match self.emulate {
            // Each host knows which of its processes are gone.
            _ if !self.hosts.is_empty() => vec![],
            Some(hosts) => (0..hosts).map(Some).collect(),
            None => vec![settings.host],
        };
        let new = Cleanup::new(job, format!("`polder mpi run` of job {job}"));
        let folder = settings.run.clone().unwrap_or_else(|| HostPlan::DIRECTORY.into());
        let tally = folder.join(format!("{TALLIES}{}{TALLY_END}", new.mark));
        Cleanup { hosts, owns_pool, tally, ..new }
    }

    /// How many ranks ran on how many hosts, and what went between them through the pool, which was kept coherent so.
    fn summary(&self, tally: &Tally, coherence: Option<Coherence>) -> String {
        let count = |number, noun| format!("{number} {noun}{}", if number == 1 { "" } else { "s" });
        let ran = [count(self.ranks, "rank"), count(self.host_count(), "host")].join(", ");
        let Tally { ranks, bytes } = *tally;
        let megabytes = bytes as f64 / 1e6;
        let kept = coherence.map_or_else(String::new, |coherence| format!(" ({coherence})"));
        match ranks >= usize::from(self.ranks) {
            true => format!("{ran}, {megabytes:.1} MB through the pool{kept}"),
            // Some do not end as MPI programs do; those of other machines cannot write here.
            false if ranks > 0 => {
                format!("{ran}, {megabytes:.1} MB through the pool{kept} from {ranks} of them")
            }
            false => ran,
        }
    }

    const fn goes_through_pool(&self) -> bool {
        self.choice.all_through_pool || self.emulate.is_some()
    }

    fn ranks(&self, library: Library) -> Ranks {
        Ranks {
            on_hosts: self.sections().iter().map(|section| section.ranks).collect(),
            within_hosts: self.goes_through_pool() || library == Library::Openmpi,
            partners: self.partners,
            places: self.choice.places(),
        }
    }

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

    /// That the hosts are named once, and that the pool, if one is named, is there and has room for so many ranks on each.
    fn expect_hosts(&self, settings: &Settings) -> Result<(), Failure> {
        if self.hosts.iter().any(String::is_empty) {
            let remedy = match self.hosts.len() {
                1 => "name a machine",
                _ => "write one comma between two names",
            };
            return Err(Failure(format!("--hosts: the name of a machine is empty; {remedy}")));
        }
        let asked = self.host_count();
        if asked > self.ranks {
            return Err(Failure(format!(
                "{asked} hosts are too many for {} ranks; give a larger -n",
                self.ranks
            )));
        }
        let twice = |name: &&String| self.hosts.iter().filter(|other| other == name).count() > 1;
        if let Some(name) = self.hosts.iter().find(twice) {
            return Err(Failure(format!("{name} is named twice in --hosts; name each machine once")));
        }
        let places = self.choice.places();
        let most = self.ranks.div_ceil(asked);
        if most > MAX_PROCESSES / places {
            let (limit, of) = (MAX_PROCESSES / places, if places == 2 { " with windows" } else { "" });
            return Err(Failure(format!(
                "{most} ranks are too many for one host: {limit} fit{of}; take more hosts with --hosts or --emulate, or fewer ranks"
            )));
        }
        let Some(path) = &settings.pool else {
            return match self.hosts.is_empty() {
                true => Ok(()),
                // What the machines share is no file of this one.
                false => Err(SessionError::NoPool.into()),
            };
        };
        let Geometry { hosts, processes, .. } = superblock(path, settings)?.geometry;
        let pool = path.display();
        if asked > hosts {
            let remedy = "take fewer, or format a pool with more --hosts";
            return Err(Failure(format!("{pool} is made for {hosts} hosts, not for {asked}; {remedy}")));
        }
        let room = processes / places;
        if most > room {
            let more = if places == 2 { ", or leave windows out with --no-windows" } else { "" };
            let remedy =
                format!("take more hosts, or format a pool with --processes {}{more}", most * places);
            return Err(Failure(format!("{pool} has room for {room} ranks on a host, not {most}; {remedy}")));
        }
        Ok(())
    }

    /// That there is one program, and that it is there, if it is to run here.
    fn expect_program(&self) -> Result<(), Failure> {
        let program = &self.program[0];
        if self.program.iter().any(|word| word == ":") {
            let why =
                "mpiexec takes `:` for the beginning of another program, and `polder mpi run` starts one";
            let remedy = "start several with mpiexec and the variables that `polder mpi env` prints";
            return Err(Failure(format!("{why}; {remedy}")));
        }
        // Another machine has its own.
        if !self.hosts.is_empty() {
            return Ok(());
        }
        let path = Path::new(program);
        let refused = match (program.contains('/'), path.metadata()) {
            (false, in_folder) if in_path(&[program]).is_empty() => match in_folder {
                Ok(file) if file.is_file() => {
                    format!("no such program in PATH; ./{program} is the one of this folder")
                }
                _ => "no such program in PATH; check its name, or give its path".to_owned(),
            },
            (false, _) => return Ok(()),
            (true, Err(error)) if error.kind() == io::ErrorKind::NotFound => {
                "no such program; check its path".to_owned()
            }
            (true, Err(error)) => error.to_string(),
            (true, Ok(file)) if file.is_dir() => "it is a directory; name a program".to_owned(),
            (true, Ok(_)) if !may_run(path) => {
                format!(
                    "it may not be executed; run chmod +x on it, or name what runs it, as python3 {program}"
                )
            }
            (true, Ok(_)) => return Ok(()),
        };
        Err(Failure(format!("{program}: {refused}")))
    }
}

impl Run {
    /// Removes what ranks that were killed have left in the pool, on each machine of the job, which ended well or did not.
    fn clean_up(
        &self,
        cleanup: &Cleanup,
        install: &Install,
        variables: &[(String, String)],
        settings: &Settings,
        is_well: bool,
    ) -> Result<(), Failure> {
        let mut swept = Ok(());
        if !self.hosts.is_empty() {
            // Each host knows which of its processes are gone.
            let sections: Vec<_> =
                self.sections().into_iter().map(|section| Section { ranks: 1, ..section }).collect();
            let polder = polder_measure::polder()?.display().to_string();
            let sweep = [&*polder, "pool", "sweep", "--job", &cleanup.job.to_string()].map(str::to_owned);
            let words = install.library.arguments(&sections, variables, &sweep);
            let mut command = Command::new(&install.mpiexec);
            // No pipe: what it starts may outlive it.
            let mut said = File::from(memfd_create("polder-sweep", MemfdFlags::CLOEXEC)?);
            command
                .args(words)
                .envs(variables.iter().cloned())
                .stdout(Stdio::null())
                .stderr(said.try_clone()?);
            let status = passing_signals(&mut command, &install.mpiexec)?;
            // Why it reached no machine, the job has said.
            if is_well || status.success() {
                said.rewind()?;
                io::copy(&mut said, &mut io::stderr())?;
            }
            if !status.success() {
                let (hosts, job) = (self.hosts.join(", "), cleanup.job);
                swept = Err(Failure(format!(
                    "not all of {hosts} were reached to remove what ranks left; run `polder pool sweep --job {job}` on each where one ran"
                )));
            }
        }
        cleanup.run(settings).and(swept)
    }
}

fn superblock(pool: &Path, settings: &Settings) -> Result<Superblock, Failure> {
    let memory = session::open_memory(pool, settings.coherence.unwrap_or_default())?;
    let superblock = read_superblock(&memory);
    Ok(superblock.map_err(|source| SessionError::Pool { path: pool.to_owned(), source })?)
}

/// Where a rank's provider writes what it has sent.
const TALLY: &str = "POLDER_MPI_TALLY";

/// What the providers of a job's ranks have counted.
#[derive(Clone, Copy)]
struct Tally {
    ranks: usize,
    bytes: u64,
}

impl Tally {
    /// Makes it, locked for as long as the file is open.
    fn begin(file: &Path) -> Result<File, Failure> {
        let make = || loop {
            let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(file)?;
            made.lock()?;
            // Another run may have taken it for left before it was locked.
            if made.metadata()?.nlink() > 0 {
                return Ok(made);
            }
        };
        make().map_err(|error: io::Error| Failure(format!("{}: {error}", file.display())))
    }

    fn read(file: &Path) -> Self {
        // A line for each endpoint: its process, and the bytes of its messages.
        let lines = std::fs::read_to_string(file).unwrap_or_default();
        let parsed = |line: &str| -> Option<(u32, u64)> {
            let (process, bytes) = line.split_once(' ')?;
            Some((process.parse().ok()?, bytes.parse().ok()?))
        };
        let counted: Vec<_> = lines.lines().filter_map(parsed).collect();
        let processes: BTreeSet<_> = counted.iter().map(|(process, _)| process).collect();
        Self { ranks: processes.len(), bytes: counted.iter().map(|(_, bytes)| bytes).sum() }
    }
}

/// Signals that are handed on.
pub(crate) const PASSED: [i32; 6] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];

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

/// What `wait` returns; `pass` gets what this process is told until then, by what is not the kernel.
pub(crate) fn meanwhile<T>(
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
pub(crate) fn code_of(status: ExitStatus) -> ExitCode {
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
