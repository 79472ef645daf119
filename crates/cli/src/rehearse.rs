//! `polder rehearse`: runs a program on hosts whose caches are not coherent, by a library that is loaded before it.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};

use polder_mem::HostPlan;
use polder_mem::testing::tie;
use polder_pool::Uuid;
use rustix::process::{Pid, kill_process, test_kill_process};
use signal_hook::consts::SIGTRAP;
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;

use crate::Failure;
use crate::mpi::{PASSED, code_of, in_path, meanwhile};

/// Runs a program on several hosts of this machine, each with caches of its own over one shared file.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Number of hosts.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    hosts: u16,
    /// The file that the hosts share. It must have its size; afterwards it holds what reached memory.
    #[arg(long, value_hint = clap::ValueHint::FilePath)]
    file: PathBuf,
    /// Seed of what evicts and prefetches lines. It draws how often, too.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print the instructions that were reached, with their counts.
    #[arg(long)]
    sites: bool,
    /// Do nothing at one instruction, named as --sites prints it: the program must then fail, or does not need it.
    #[arg(long, value_name = "SITE")]
    skip_site: Option<String>,
    /// Run the program once, on host 0: it starts the processes of all hosts itself, with POLDER_HOST in the environment of each, as
    /// `polder mpi run --emulate` does.
    #[arg(long)]
    launcher: bool,
    /// The program and its arguments.
    #[arg(trailing_var_arg = true, required = true, value_hint = clap::ValueHint::CommandWithArguments)]
    program: Vec<String>,
}

/// Runs the program on all hosts, and says how it went.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    if !cfg!(target_arch = "x86_64") {
        return Err(Failure(
            "polder rehearse replaces x86-64 instructions, and this CPU is not x86-64".to_owned(),
        ));
    }
    let Arguments { seed, sites, .. } = *arguments;
    let library = library()?;
    let hosts = if arguments.launcher { 1 } else { arguments.hosts };
    let programs = (0..hosts).map(|host| arguments.words(host)).collect::<Vec<_>>();
    programs.iter().try_for_each(|words| expect_preload(&words[0]))?;
    let signals = SignalsInfo::new(PASSED)?;
    let rack = Rack::new(&arguments.file, arguments.hosts)?;
    let command = |host: u16, words: &[String]| {
        let mut command = Command::new(&words[0]);
        let before = std::env::var("LD_PRELOAD").unwrap_or_default();
        command
            .args(&words[1..])
            .env("LD_PRELOAD", format!("{}:{before}", library.display()).trim_end_matches(':'))
            .env("POLDER_HOST", host.to_string())
            .env("POLDER_REHEARSE", &rack.folder)
            .env("POLDER_REHEARSE_FILE", &rack.file)
            .env("POLDER_REHEARSE_SEED", seed.to_string())
            .envs(arguments.skip_site.iter().map(|site| ("POLDER_REHEARSE_SKIP", site)));
        command
    };
    // What every host would be refused for is said once.
    let own = [polder_measure::polder()?.display().to_string(), "--version".to_owned()];
    let tried = command(0, &own).output()?;
    if !tried.status.success() {
        let why = String::from_utf8_lossy(&tried.stderr);
        return Err(Failure(why.trim().trim_start_matches("polder: ").to_owned()));
    }
    let mut running = Running::default();
    for host in 0..arguments.hosts {
        let mut adversary = command(host, &own);
        let adversary = adversary.env("POLDER_REHEARSE_ADVERSARY", "1").stdin(Stdio::null());
        running.adversaries.push(tie(adversary).spawn()?);
    }
    for (host, words) in (0..).zip(&programs) {
        let started = tie(command(host, words).stdin(Stdio::null())).spawn();
        running.hosts.push(started.map_err(|error| Failure(format!("{}: {error}", words[0])))?);
    }
    let ends = running.wait(signals)?;
    let reached = rack.sites()?;
    if sites {
        reached.iter().for_each(|(count, site)| println!("{count:>10} {site}"));
    }
    if let Some(site) = arguments.skip_site.as_ref().filter(|_| !rack.has_skipped()) {
        return Err(Failure(format!(
            "--skip-site: no host has loaded a site {site:?}; --sites prints those that are reached"
        )));
    }
    eprint!("{}", summary(&ends, &reached, seed));
    let gaps = rack.gaps()?;
    gaps.iter().for_each(|gap| eprintln!("polder: {gap}"));
    let unfailing = if gaps.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(NOT_REHEARSED) };
    Ok(ends.iter().find(|end| !end.success()).map_or(unfailing, |end| code_of(*end)))
}

impl Arguments {
    /// The program and its arguments for a host.
    fn words(&self, host: u16) -> Vec<String> {
        self.program.iter().map(|word| word.replace("{host}", &host.to_string())).collect()
    }
}

/// The exit status where programs succeeded and a host or a part of the file was not rehearsed.
const NOT_REHEARSED: u8 = 2;

/// Says how each host ended that failed, and what was reached.
fn summary(ends: &[ExitStatus], reached: &[(u64, String)], seed: u64) -> String {
    let mut lines = vec![];
    for (host, end) in ends.iter().enumerate().filter(|(_, end)| !end.success()) {
        let why = match end.signal() {
            Some(SIGTRAP) => "; a program that handles, ignores or blocks SIGTRAP cannot be rehearsed",
            _ => "",
        };
        lines.push(format!("polder: host {host} failed: {end}{why}\n"));
    }
    let count: u64 = reached.iter().map(|(count, _)| count).sum();
    let sites = reached.len();
    lines.push(format!("polder: {count} flushes and non-temporal stores at {sites} sites (seed {seed})\n"));
    lines.concat()
}

/// The library, which is installed beside the command.
fn library() -> Result<PathBuf, Failure> {
    let command = polder_measure::polder()?;
    let library =
        command.ancestors().nth(2).unwrap_or(Path::new("/")).join("lib/polder/libpolder-rehearse.so");
    match library.is_file() {
        true => Ok(library),
        false => {
            let remedy = "run `make setup` and take .venv/bin/polder";
            Err(Failure(format!("there is no {}; {remedy}", library.display())))
        }
    }
}

/// That a program takes preloaded libraries. A script does if its interpreter does.
fn expect_preload(program: &str) -> Result<(), Failure> {
    let found = if program.contains('/') { vec![program.into()] } else { in_path(&[program]) };
    let wrong = |why: &str| Err(Failure(format!("{program}: {why}")));
    let Some(path) = found.first().filter(|path| path.is_file()) else {
        return wrong("there is no such program");
    };
    let bytes = fs::read(path).map_err(at(path))?;
    if !bytes.starts_with(b"\x7fELF") {
        return Ok(());
    }
    const OF_64_BITS: u8 = 2;
    const X86_64: [u8; 2] = [62, 0];
    if bytes.get(4) != Some(&OF_64_BITS) || bytes.get(18..20) != Some(&X86_64[..]) {
        return wrong("it is no program for x86-64");
    }
    match has_interpreter(&bytes) {
        Some(true) => Ok(()),
        _ => wrong(
            "it is linked statically, so that no library can be loaded before it; link it with -dynamic",
        ),
    }
}

/// Whether the headers of an ELF file of 64 bits name a dynamic linker; `None` where they end too soon.
fn has_interpreter(bytes: &[u8]) -> Option<bool> {
    const PT_INTERP: u64 = 3;
    let number = |at: u64, length: u64| {
        let field = bytes.get(usize::try_from(at).ok()?..usize::try_from(at.checked_add(length)?).ok()?)?;
        Some(field.iter().rev().fold(0, |number: u64, byte| number << 8 | u64::from(*byte)))
    };
    let (start, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    for header in 0..count {
        if number(start.checked_add(header * size)?, 4)? == PT_INTERP {
            return Some(true);
        }
    }
    Some(false)
}

/// The processes of a rehearsal: what still runs is ended with it.
#[derive(Default)]
struct Running {
    hosts: Vec<Child>,
    adversaries: Vec<Child>,
}

impl Running {
    /// Waits until all hosts have ended. What this process is told, they are told.
    fn wait(&mut self, signals: SignalsInfo<WithOrigin>) -> Result<Vec<ExitStatus>, Failure> {
        let pids: Vec<_> = self.hosts.iter().map(Pid::from_child).collect();
        let pass = move |signal| {
            for pid in &pids {
                // It may have ended just now.
                let _ = kill_process(*pid, signal);
            }
        };
        Ok(meanwhile(signals, pass, || self.hosts.iter_mut().map(Child::wait).collect::<Result<_, _>>())?)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        for child in self.adversaries.iter_mut().chain(&mut self.hosts) {
            if matches!(child.try_wait(), Ok(None)) {
                drop(child.kill());
            }
            drop(child.wait());
        }
    }
}

/// The files of a rehearsal: for each host its caches, and for all of them locks of lines and counts of sites.
struct Rack {
    folder: PathBuf,
    file: PathBuf,
    hosts: u16,
}

/// How the name of a rack's folder begins; the process that made it follows.
const FOLDER: &str = "polder-rehearse-";
/// Bytes of a site in the file `sites`: a count, a hash, and a text.
const SITE: usize = 128;

impl Rack {
    fn new(file: &Path, hosts: u16) -> Result<Self, Failure> {
        let wrong = |why: &str| Failure(format!("{}: {why}", file.display()));
        let metadata = fs::metadata(file).map_err(at(file))?;
        if !metadata.is_file() {
            return Err(wrong("it is no regular file; give a file that stands for the device"));
        }
        if metadata.len() == 0 {
            return Err(wrong("it is empty; give it its size first, as with truncate -s 64M"));
        }
        // Before anything is made: the hosts read it and write it.
        OpenOptions::new().read(true).write(true).open(file).map_err(at(file))?;
        remove_leftovers();
        let folder = Path::new(HostPlan::DIRECTORY).join(format!("{FOLDER}{}", std::process::id()));
        fs::create_dir(&folder).map_err(at(&folder))?;
        let rack = Self { folder, file: fs::canonicalize(file).map_err(at(file))?, hosts };
        let sized = |path: PathBuf, bytes| {
            File::create(&path).and_then(|file| file.set_len(bytes)).map_err(at(&path))
        };
        sized(rack.folder.join("memory"), 0)?;
        sized(rack.folder.join("locks"), 16 << 10)?;
        sized(rack.folder.join("sites"), 2 << 20)?;
        for host in 0..hosts {
            let folder = rack.folder.join(host.to_string());
            fs::create_dir_all(folder.join("run")).map_err(at(&folder))?;
            copy_with_holes(&rack.file, &[folder.join("copy"), folder.join("base")])?;
            sized(folder.join("recent"), 8 << 10)?;
            sized(folder.join("moved"), 8)?;
            let id = format!("{:032x}", Uuid::fresh().0);
            let pieces = [&id[..8], &id[8..12], &id[12..16], &id[16..20], &id[20..]];
            let boot = folder.join("boot_id");
            fs::write(&boot, pieces.join("-") + "\n").map_err(at(&boot))?;
        }
        Ok(rack)
    }

    /// What was not rehearsed, each in a sentence.
    fn gaps(&self) -> Result<Vec<String>, Failure> {
        let (file, mut gaps) = (self.file.display(), vec![]);
        let bytes = |path: &Path| fs::metadata(path).map(|metadata| metadata.len()).map_err(at(path));
        let memory = bytes(&self.file)?;
        let mut idle = vec![];
        for host in 0..self.hosts {
            let folder = self.folder.join(host.to_string());
            let now = bytes(&folder.join("copy"))?;
            if now != memory {
                gaps.push(format!(
                    "host {host} changed the size of {file} from {memory} to {now} bytes, and no line past either moves; give the file its size first"
                ));
            }
            let moved = fs::read(folder.join("moved")).map_err(at(&folder))?;
            if moved.iter().all(|byte| *byte == 0) {
                idle.push(host);
            }
        }
        if idle.len() == usize::from(self.hosts) {
            gaps.push(format!(
                "no line was moved between hosts: does the program flush what it maps of {file}?"
            ));
        } else {
            gaps.extend(idle.iter().map(|host| {
                format!(
                    "host {host} moved no line: does its program flush what it maps of {file}, and is it linked dynamically and started with LD_PRELOAD?"
                )
            }));
        }
        Ok(gaps)
    }

    /// Whether a host has met the site that is left out.
    fn has_skipped(&self) -> bool {
        self.folder.join("skipped").exists()
    }

    /// The sites that were reached, with their counts, those of a file together.
    fn sites(&self) -> Result<Vec<(u64, String)>, Failure> {
        let path = self.folder.join("sites");
        let bytes = fs::read(&path).map_err(at(&path))?;
        let site = |record: &[u8]| {
            let (count, text) = (record.first_chunk::<8>()?, &record[16..]);
            let length = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
            let count = u64::from_le_bytes(*count);
            (count > 0).then(|| (count, String::from_utf8_lossy(&text[..length]).into_owned()))
        };
        let mut sites: Vec<_> = bytes.chunks_exact(SITE).filter_map(site).collect();
        sites.sort_by(|one, other| one.1.cmp(&other.1));
        Ok(sites)
    }
}

impl Drop for Rack {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.folder));
    }
}

/// Names the file that an error is about.
fn at(path: &Path) -> impl Fn(std::io::Error) -> Failure {
    move |error| Failure(format!("{}: {error}", path.display()))
}

/// Copies a file, pages of zeros left out.
fn copy_with_holes(from: &Path, to: &[PathBuf]) -> Result<(), Failure> {
    let mut source = File::open(from).map_err(at(from))?;
    let bytes = source.metadata().map_err(at(from))?.len();
    let made = |path: &PathBuf| {
        let target = File::create(path).map_err(at(path))?;
        target.set_len(bytes).map_err(at(path)).map(|()| (path.clone(), target))
    };
    let targets = to.iter().map(made).collect::<Result<Vec<_>, _>>()?;
    let (mut block, mut offset) = (vec![0; 1 << 16], 0);
    loop {
        let count = source.read(&mut block).map_err(at(from))?;
        if count == 0 {
            return Ok(());
        }
        if block[..count].iter().any(|byte| *byte != 0) {
            for (path, target) in &targets {
                target.write_all_at(&block[..count], offset).map_err(at(path))?;
            }
        }
        offset += count as u64;
    }
}

/// Removes what rehearsals of this user have left that were killed.
fn remove_leftovers() {
    for entry in fs::read_dir(HostPlan::DIRECTORY).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let maker = name.to_str().and_then(|name| name.strip_prefix(FOLDER)?.parse().ok());
        let Some(maker) = maker.and_then(Pid::from_raw) else { continue };
        if test_kill_process(maker).is_err_and(|error| error == rustix::io::Errno::SRCH) {
            drop(fs::remove_dir_all(entry.path()));
        }
    }
}
