//! `polder bench mpi`: stock MPI libraries over a pool, beside the same libraries over TCP and over their own shared
//! memory. A program that each library's own mpicc compiles takes the time; each way is a job of its own, in turn.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use polder_pool::Geometry;
use polder_pool::session;
use polder_pool::settings::CoherenceChoice;

use super::row::{Better, Row, Sample};
use super::size;
use crate::Failure;
use crate::mpi::library::{Install, Library, Section};
use crate::scratch::Scratch;

/// What to measure with.
#[derive(Args)]
pub(super) struct Arguments {
    /// The mpiexec of each library to measure, with commas between them; the one in PATH when this is left out.
    #[arg(long, value_name = "PATHS", value_delimiter = ',', value_hint = clap::ValueHint::ExecutablePath)]
    mpi: Vec<PathBuf>,
    /// The folder with libpolder-fi.so; the one that belongs to this command when this is left out.
    #[arg(long, value_name = "DIRECTORY", value_hint = clap::ValueHint::DirPath)]
    provider_path: Option<PathBuf>,
    /// Jobs of each way, which take turns.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
}

/// Hosts that the ranks are dealt out to.
const HOSTS: u16 = 2;
const POOL_BYTES: u64 = 1 << 30;
const PROGRAM: &str = include_str!("mpi.c");

/// Measures one library after the other.
pub(super) fn run(
    arguments: &Arguments,
    mut print: impl FnMut(&Row) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let installs = match &arguments.mpi[..] {
        [] => vec![Install::find(None, None)?],
        paths => paths.iter().map(|path| Install::find(Some(path), None)).collect::<Result<_, _>>()?,
    };
    for install in &installs {
        let bench = Bench::new(arguments, install)?;
        for (ranks, cases) in [(2, PAIRS), (4, PATTERNS)] {
            let cases: Vec<_> =
                cases.iter().filter(|case| case.operation.is_carried(install.library)).collect();
            let figures = bench.figures(ranks, &cases)?;
            for case in cases {
                rows(case, ranks, install.library, &figures).iter().try_for_each(&mut print)?;
            }
        }
    }
    Ok(())
}

/// An operation on so many bytes, as the program calls it.
#[derive(Clone, Copy, Debug)]
struct Case {
    operation: Operation,
    bytes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Latency,
    Stream,
    Put,
    Halo,
    AllToAll,
}

const fn case(operation: Operation, bytes: usize) -> Case {
    Case { operation, bytes }
}

/// Between two ranks.
const PAIRS: &[Case] = &[
    case(Operation::Latency, 8),
    case(Operation::Stream, 16 << 10),
    case(Operation::Stream, 1 << 20),
    case(Operation::Put, 8),
];

/// Among four.
const PATTERNS: &[Case] = &[
    case(Operation::Halo, 1 << 10),
    case(Operation::Halo, 16 << 10),
    case(Operation::Halo, 256 << 10),
    case(Operation::AllToAll, 64),
    case(Operation::AllToAll, 4 << 10),
    case(Operation::AllToAll, 64 << 10),
];

impl Operation {
    const fn word(self) -> &'static str {
        match self {
            Self::Latency => "latency",
            Self::Stream => "stream",
            Self::Put => "put",
            Self::Halo => "halo",
            Self::AllToAll => "alltoall",
        }
    }

    /// In plain words.
    const fn name(self) -> &'static str {
        match self {
            Self::Latency => "message",
            Self::Stream => "stream",
            Self::Put => "put and flush",
            Self::Halo => "halo exchange and dot products",
            Self::AllToAll => "all-to-all",
        }
    }

    /// Open MPI keeps windows of one machine in its own shared memory, also where hosts are emulated.
    fn is_carried(self, library: Library) -> bool {
        self != Self::Put || library != Library::Openmpi
    }
}

impl Case {
    fn word(self) -> String {
        format!("{}:{}", self.operation.word(), self.bytes)
    }
}

/// How the messages of a job go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    Coherent,
    Software,
    /// Over TCP on this machine, through libfabric's provider.
    Tcp,
    /// Over TCP on this machine, through a transport of the library's own.
    OwnTcp,
    /// Through the library's own shared memory.
    Shm,
}

impl Way {
    /// Those that a library has.
    const fn of(library: Library) -> &'static [Self] {
        match library {
            Library::Mpich | Library::Impi => &[Self::Coherent, Self::Software, Self::Tcp, Self::Shm],
            Library::Openmpi => &[Self::Coherent, Self::Software, Self::Tcp, Self::OwnTcp, Self::Shm],
        }
    }

    const fn coherence(self) -> Option<CoherenceChoice> {
        match self {
            Self::Coherent => Some(CoherenceChoice::Coherent),
            Self::Software => Some(CoherenceChoice::Software),
            Self::Tcp | Self::OwnTcp | Self::Shm => None,
        }
    }

    /// What makes a library go this way without a pool.
    const fn variables(self, library: Library) -> &'static [(&'static str, &'static str)] {
        match (library, self) {
            (Library::Mpich, Self::Shm) => &[("MPIR_CVAR_CH4_NETMOD", "ofi"), ("FI_PROVIDER", "tcp")],
            (Library::Mpich, _) => {
                &[("MPIR_CVAR_CH4_NETMOD", "ofi"), ("FI_PROVIDER", "tcp"), ("MPIR_CVAR_NOLOCAL", "1")]
            }
            (Library::Openmpi, Self::Shm) => &[("OMPI_MCA_pml", "ob1"), ("OMPI_MCA_btl", "sm,self")],
            (Library::Openmpi, Self::OwnTcp) => &[("OMPI_MCA_pml", "ob1"), ("OMPI_MCA_btl", "tcp,self")],
            (Library::Openmpi, _) => &[
                ("OMPI_MCA_pml", "cm"),
                ("OMPI_MCA_mtl", "ofi"),
                ("OMPI_MCA_mtl_ofi_provider_include", "tcp"),
            ],
            (Library::Impi, Self::Shm) => &[("I_MPI_FABRICS", "shm")],
            (Library::Impi, _) => &[("I_MPI_FABRICS", "ofi"), ("FI_PROVIDER", "tcp")],
        }
    }
}

/// What each way took for each case, in seconds: one figure a round.
type Figures = BTreeMap<(Way, String), Vec<f64>>;

/// One library, with the program that it compiled and a pool.
struct Bench<'a> {
    arguments: &'a Arguments,
    install: &'a Install,
    scratch: Scratch,
    program: String,
}

impl<'a> Bench<'a> {
    fn new(arguments: &'a Arguments, install: &'a Install) -> Result<Self, Failure> {
        let scratch = Scratch::new()?;
        let pool = scratch.path().join("pool");
        session::create(&pool, POOL_BYTES, &Geometry { hosts: HOSTS, ..Geometry::for_region(POOL_BYTES) })?;
        let program = compile(&install.mpiexec, scratch.path())?;
        Ok(Self { arguments, install, scratch, program })
    }

    /// All ways in turn, round by round, so that noise meets all of them alike.
    fn figures(&self, ranks: u16, cases: &[&Case]) -> Result<Figures, Failure> {
        let mut figures = Figures::new();
        let words: Vec<_> = cases.iter().map(|case| case.word()).collect();
        for round in 1..=self.arguments.rounds {
            eprintln!("{}, {ranks} ranks: round {round} of {}", self.install.library, self.arguments.rounds);
            for way in Way::of(self.install.library) {
                let said = self.said(*way, ranks, &words)?;
                for (word, seconds) in said.lines().filter_map(|line| line.split_once(' ')) {
                    let seconds = seconds.trim().parse()?;
                    figures.entry((*way, word.to_owned())).or_default().push(seconds);
                }
            }
        }
        Ok(figures)
    }

    /// What one job of `ranks` prints.
    fn said(&self, way: Way, ranks: u16, cases: &[String]) -> Result<String, Failure> {
        let program: Vec<_> = [self.program.clone()].into_iter().chain(cases.iter().cloned()).collect();
        let Install { library, mpiexec } = self.install;
        let mut command = match way.coherence() {
            Some(coherence) => self.over_pool(coherence, ranks, &program)?,
            None => {
                let mut command = Command::new(mpiexec);
                let sections: Vec<_> = Section::deal(ranks, HOSTS).collect();
                command.args(library.arguments(&sections, &[], &program));
                command.envs(way.variables(*library).iter().copied());
                command
            }
        };
        // Containers have no other user.
        for variable in ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] {
            command.env(variable, "1");
        }
        let ended = command.output()?;
        match ended.status.success() {
            true => Ok(String::from_utf8_lossy(&ended.stdout).into_owned()),
            false => {
                let why = String::from_utf8_lossy(&ended.stderr);
                Err(Failure(format!(
                    "{library} by way of {way:?} ended with {}: {}",
                    ended.status,
                    why.trim()
                )))
            }
        }
    }

    /// As users start it.
    fn over_pool(
        &self,
        coherence: CoherenceChoice,
        ranks: u16,
        program: &[String],
    ) -> Result<Command, Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["mpi", "run", "--coherence", &coherence.to_string(), "-n", &ranks.to_string()]);
        command.args(["--emulate", &HOSTS.to_string(), "--mpiexec"]).arg(&self.install.mpiexec);
        command.arg("--pool").arg(self.scratch.path().join("pool")).env("POLDER_RUN", self.scratch.path());
        if let Some(folder) = &self.arguments.provider_path {
            command.arg("--provider-path").arg(folder);
        }
        command.arg("--").args(program);
        Ok(command)
    }
}

/// Compiles the program with the mpicc beside `mpiexec`.
fn compile(mpiexec: &Path, folder: &Path) -> Result<String, Failure> {
    let (mpicc, program) = (mpiexec.with_file_name("mpicc"), folder.join("program"));
    let source = folder.join("mpi.c");
    std::fs::write(&source, PROGRAM)?;
    let ended = Command::new(&mpicc).args(["-O2", "-std=c11", "-o"]).arg(&program).arg(&source).output();
    let ended = ended.map_err(|error| Failure(format!("{}: {error}", mpicc.display())))?;
    match ended.status.success() {
        true => Ok(program.display().to_string()),
        false => {
            let why = String::from_utf8_lossy(&ended.stderr);
            Err(Failure(format!("{} cannot compile the benchmark: {}", mpicc.display(), why.trim())))
        }
    }
}

/// The rows of a case: each pool beside TCP, the faster where there are two, and a coherent pool beside shared memory.
fn rows(case: &Case, ranks: u16, library: Library, figures: &Figures) -> Vec<Row> {
    let sample = |way| case.sample(figures.get(&(way, case.word()))?);
    let median = |way| sample(way).map(|sample: Sample| sample.median);
    let (metric, unit, better) = case.measure();
    let tcp = [Way::Tcp, Way::OwnTcp].into_iter().filter_map(median).reduce(|one, other| match better {
        Better::Less => one.min(other),
        Better::More => one.max(other),
    });
    let mut rows = vec![];
    for way in [Way::Coherent, Way::Software] {
        let (Some(sample), Some(coherence)) = (sample(way), way.coherence()) else { continue };
        let name = library.word();
        let (operation, size) = (case.operation.name(), size(case.bytes));
        let row = Row::measured(
            "mpi",
            format!("{operation} {size} {ranks} procs {coherence} {name}"),
            metric,
            sample,
            unit,
        );
        let shm = median(Way::Shm).filter(|_| way == Way::Coherent);
        rows.extend(tcp.map(|tcp| row.clone().beside("tcp", tcp, better)));
        rows.extend(shm.map(|shm| row.clone().beside("shm", shm, better)));
    }
    rows
}

impl Case {
    const fn measure(&self) -> (&'static str, &'static str, Better) {
        match self.operation {
            Operation::Stream => ("bandwidth", "GB/s", Better::More),
            Operation::Latency | Operation::Put => ("latency", "us", Better::Less),
            Operation::Halo | Operation::AllToAll => ("time", "us", Better::Less),
        }
    }

    /// The figures of a case in its unit.
    fn sample(&self, seconds: &[f64]) -> Option<Sample> {
        let (_, _, better) = self.measure();
        let figure = |seconds: &f64| match better {
            Better::More => self.bytes as f64 / seconds / 1e9,
            Better::Less => seconds * 1e6,
        };
        Sample::of(seconds.iter().map(figure).collect())
    }
}
