//! `polder mpi`: an MPI library that is installed, over a pool, through the libfabric provider.

mod cleanup;
mod guard;
mod job;
mod leftovers;
mod library;
mod room;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use polder_attach::session::SessionError;
use polder_attach::settings::Settings;
use polder_platform::{quoted, shell_word};
use polder_pool::Uuid;

use crate::Failure;
pub(crate) use job::{PASSED, code_of, meanwhile};
pub(crate) use library::in_path;

pub use guard::Guard;
pub use library::{Install, Library, Section};

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Print the variables that make an MPI library use a pool: eval "$(polder mpi env mpich)".
    Env(Env),
    /// Start an MPI program over a pool, and clean up after it.
    Run(job::Run),
    /// Wait until `polder mpi run` has ended, and clean up if it was killed.
    #[command(hide = true)]
    Guard(guard::Guarded),
}

#[derive(Args)]
pub(crate) struct Env {
    /// The MPI library.
    library: Library,
    #[command(flatten)]
    choice: Choice,
    /// The shell that reads the variables.
    #[arg(long, value_enum, default_value_t = Shell::Sh)]
    shell: Shell,
}

/// What both commands need to know.
#[derive(Args)]
pub(crate) struct Choice {
    /// The library's mpiexec [default: the one in PATH].
    #[arg(long, value_name = "PATH", value_hint = clap::ValueHint::ExecutablePath)]
    mpiexec: Option<PathBuf>,
    /// The folder with libpolder-fi.so [default: that of this installation].
    #[arg(long, value_name = "DIRECTORY", value_hint = clap::ValueHint::DirPath)]
    provider_path: Option<PathBuf>,
    /// Send messages between ranks of one host through the pool too, instead of through the library's own shared memory.
    #[arg(long)]
    all_through_pool: bool,
    /// Leave windows to the MPI library: without it a preloaded shim puts them into the pool too.
    #[arg(long)]
    no_windows: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Shell {
    /// sh, bash, zsh.
    Sh,
    /// csh, tcsh.
    Csh,
    /// fish.
    Fish,
}

/// The words of a command, with `-n` for the `-np` that mpiexec has too: an option of one dash has one letter here.
pub(crate) fn with_np(mut words: Vec<OsString>) -> Vec<OsString> {
    let run = words.windows(2).position(|pair| pair[0] == "mpi" && pair[1] == "run");
    let gives_ranks = |word: &OsString| {
        let word = word.to_string_lossy();
        word == "--" || word.starts_with("-n") || word.starts_with("--ranks")
    };
    // Behind the number of ranks it may be the program's.
    if let Some(word) = run.and_then(|run| words[run..].iter_mut().find(|word| gives_ranks(word)))
        && *word == "-np"
    {
        *word = "-n".into();
    }
    words
}

/// Runs one of the commands.
pub(crate) fn run(command: Command, settings: &Settings) -> Result<ExitCode, Failure> {
    match command {
        Command::Env(arguments) => env(&arguments, settings),
        Command::Run(arguments) => job::run(&arguments, settings),
        Command::Guard(guarded) => guard::run(&guarded, settings),
    }
}

fn env(arguments: &Env, settings: &Settings) -> Result<ExitCode, Failure> {
    let Env { library, choice, shell } = arguments;
    let mpiexec = match library {
        // Only Intel's has something beside it that is needed.
        Library::Impi => Some(Install::find(choice.mpiexec.as_deref(), Some(*library))?.mpiexec),
        Library::Mpich | Library::Openmpi => None,
    };
    let variables =
        choice.variables(*library, mpiexec.as_deref(), choice.all_through_pool, settings, None)?;
    for (name, value) in variables {
        match shell {
            Shell::Sh => println!("export {name}={}", shell_word(&value)),
            Shell::Csh => println!("setenv {name} {}", shell_word(&value)),
            Shell::Fish => println!("set -gx {name} {}", shell_word(&value)),
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl Choice {
    /// Processes of the pool that each rank is: its provider is one, and its shim another once it has a window.
    const fn places(&self) -> u16 {
        if self.no_windows { 1 } else { 2 }
    }

    /// What the environment of every rank has to say.
    fn variables(
        &self,
        library: Library,
        mpiexec: Option<&Path>,
        through_pool: bool,
        settings: &Settings,
        program: Option<&str>,
    ) -> Result<Vec<(String, String)>, Failure> {
        let pool = settings.pool.as_deref().ok_or(SessionError::NoPool)?;
        let provider = provider(self.provider_path.as_deref())?;
        text_of(&provider)?;
        let folders = library.provider_folders(&provider, mpiexec);
        let mut variables = vec![
            ("POLDER_POOL", text_of(&std::path::absolute(pool)?)?),
            ("POLDER_JOB", job_id(settings).to_string()),
            ("FI_PROVIDER_PATH", folders),
            ("FI_PROVIDER", "polder".to_owned()),
        ];
        if !self.no_windows {
            variables.push(("LD_PRELOAD", preloaded(&shim(&provider, library, program)?)));
        }
        variables.extend(settings.coherence.map(|coherence| ("POLDER_COHERENCE", coherence.to_string())));
        variables.extend(settings.timeout.map(|span| ("POLDER_TIMEOUT", span.0.as_secs_f64().to_string())));
        variables.extend(settings.log.as_ref().map(|filter| ("POLDER_LOG", filter.to_string())));
        variables
            .extend(library.variables(through_pool).iter().map(|(name, value)| (*name, (*value).to_owned())));
        Ok(variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
    }
}

/// A path as ranks get it in their environment.
///
/// # Errors
/// When it is no UTF-8: an mpiexec would hand on another one.
fn text_of(path: &Path) -> Result<String, Failure> {
    path.to_str().map(str::to_owned).ok_or_else(|| {
        Failure(format!(
            "{}: it is no UTF-8, and ranks get paths of UTF-8 alone; give it another name",
            quoted(path)
        ))
    })
}

/// The shim, before what the caller preloads already.
fn preloaded(shim: &Path) -> String {
    let others = std::env::var("LD_PRELOAD").unwrap_or_default();
    let shim = shim.display().to_string();
    let others = others.split([':', ' ']).filter(|other| !other.is_empty() && *other != shim);
    [&*shim].into_iter().chain(others).collect::<Vec<_>>().join(":")
}

/// The folder with the provider, beside this command or where it was said to be.
///
/// # Errors
/// When it is not there.
pub fn provider(named: Option<&Path>) -> Result<PathBuf, Failure> {
    const FILE: &str = "libpolder-fi.so";
    let folder = match named {
        Some(folder) => std::path::absolute(folder)?,
        None => {
            let command = polder_measure::polder()?;
            command.ancestors().nth(2).unwrap_or(Path::new("/")).join("lib/libfabric")
        }
    };
    match folder.join(FILE).is_file() {
        true => Ok(folder),
        false => Err(Failure(format!(
            "{} has no {FILE}; run `make setup` and take .venv/bin/polder, or give --provider-path DIRECTORY",
            folder.display()
        ))),
    }
}

/// The window shim for a program of a library, which lies in a folder beside the provider's.
///
/// # Errors
/// When it is not there.
pub fn shim(provider: &Path, library: Library, program: Option<&str>) -> Result<PathBuf, Failure> {
    let shim = provider.with_file_name("polder").join(match library {
        Library::Mpich | Library::Impi if program.is_some_and(is_of_standard) => "libpolder-mpi-abi.so",
        Library::Mpich | Library::Impi => "libpolder-mpich.so",
        Library::Openmpi => "libpolder-openmpi.so",
    });
    match shim.is_file() {
        true => Ok(shim),
        false => {
            Err(Failure(format!("there is no {}; run `make setup`, or give --no-windows", shim.display())))
        }
    }
}

/// Whether a program was linked with the library of the standard ABI: its name stands in the file.
fn is_of_standard(program: &str) -> bool {
    const LIBRARY: &[u8] = b"libmpi_abi.so.";
    let found = if program.contains('/') { vec![program.into()] } else { in_path(&[program]) };
    let bytes = found.first().and_then(|path| std::fs::read(path).ok()).unwrap_or_default();
    bytes.starts_with(b"\x7fELF") && bytes.windows(LIBRARY.len()).any(|window| window == LIBRARY)
}

/// The job that was set, or one of its own: short enough to type.
fn job_id(settings: &Settings) -> u64 {
    settings.job.unwrap_or_else(|| u64::from((Uuid::fresh().0 as u32).max(1)))
}
