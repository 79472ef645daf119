//! `polder-dev bench mpi`: stock MPI libraries over a pool, beside the same libraries over TCP and over their own shared
//! memory. A program that each library's own mpicc compiles takes the time; each way is a job of its own, in turn.

mod figure;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use polder_attach::session;
use polder_attach::settings::CoherenceChoice;
use polder_pool::Geometry;

use self::figure::Sweep;
use polder_measure::ring::floor;
use polder_measure::size;
use polder_measure::{Better, Row, Sample};

use super::print;
use crate::Failure;
use polder_cli::{Guard, Install, Library, Section, provider, shim};
use polder_measure::{Scratch, Tied};

/// What to measure with.
#[derive(Args)]
pub(super) struct Arguments {
    /// The mpiexec of each library to measure, with commas between them [default: the one in PATH].
    #[arg(long, value_name = "PATHS", value_delimiter = ',', value_hint = clap::ValueHint::ExecutablePath)]
    mpi: Vec<PathBuf>,
    /// The folder with libpolder-fi.so [default: that of this installation].
    #[arg(long, value_name = "DIRECTORY", value_hint = clap::ValueHint::DirPath)]
    provider_path: Option<PathBuf>,
    #[command(flatten)]
    sweep: Sweep,
    /// Rounds; in each one, every transport runs once [default: 7, with --figure 3].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: Option<u16>,
}

impl Arguments {
    fn rounds(&self) -> u16 {
        self.rounds.unwrap_or(if self.sweep.figure.is_some() { 3 } else { 7 })
    }
}

/// Hosts that the ranks are dealt out to.
const HOSTS: u16 = 2;
const POOL_BYTES: u64 = 1 << 30;
const PROGRAM: &str = include_str!("mpi.c");

/// Measures one library after the other.
pub(super) fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    arguments.sweep.expect_plot()?;
    let installs = match &arguments.mpi[..] {
        [] => vec![Install::find(None, None)?],
        paths => paths.iter().map(|path| Install::find(Some(path), None)).collect::<Result<_, _>>()?,
    };
    let suites = match arguments.sweep.figure {
        Some(figure) => arguments.sweep.suites(figure),
        None => vec![(2, PAIRS.to_vec()), (4, PATTERNS.to_vec())],
    };
    let mut all = vec![];
    for install in &installs {
        let bench = Bench::new(arguments, install)?;
        for (ranks, cases) in &suites {
            let figures = bench.figures(*ranks, cases)?;
            let rows: Vec<_> = cases.iter().flat_map(|case| bench.rows(*case, *ranks, &figures)).collect();
            match arguments.sweep.figure.filter(|_| !json) {
                Some(figure) => println!("{}", bench.table(figure, *ranks, cases, &figures)),
                None => rows.iter().try_for_each(|row| print(row, json))?,
            }
            all.extend(rows);
        }
    }
    if let Some(figure) = arguments.sweep.figure {
        let published = figure::published(figure, suites[0].1[0]);
        published.iter().try_for_each(|row| print(row, json))?;
        all.extend(published);
    }
    arguments.sweep.plot(&all)
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
    PutStream,
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
            Self::PutStream => "put-stream",
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
            Self::PutStream => "puts and flush",
            Self::Halo => "halo exchange and dot products",
            Self::AllToAll => "all-to-all",
        }
    }

    const fn has_window(self) -> bool {
        matches!(self, Self::Put | Self::PutStream)
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
    /// With windows in the pool too, by the shim.
    CoherentShim,
    SoftwareShim,
    /// Over TCP on this machine, through libfabric's provider.
    Tcp,
    /// Over TCP on this machine, through a transport of the library's own.
    OwnTcp,
    /// Through the library's own shared memory.
    Shm,
}

impl Way {
    const ALL: [Self; 7] = [
        Self::Coherent,
        Self::Software,
        Self::CoherentShim,
        Self::SoftwareShim,
        Self::Tcp,
        Self::OwnTcp,
        Self::Shm,
    ];

    /// Whether it is measured. Open MPI keeps windows of one machine in its own shared memory, whatever its messages take.
    const fn goes(self, library: Library, operation: Operation) -> bool {
        let is_openmpi = matches!(library, Library::Openmpi);
        match self {
            Self::CoherentShim | Self::SoftwareShim => operation.has_window(),
            Self::OwnTcp => is_openmpi && !operation.has_window(),
            Self::Coherent | Self::Software | Self::Tcp => !(is_openmpi && operation.has_window()),
            Self::Shm => true,
        }
    }

    /// At the head of a column.
    const fn word(self) -> &'static str {
        match self {
            Self::Coherent => "coherent",
            Self::Software => "software",
            Self::CoherentShim => "coherent+shim",
            Self::SoftwareShim => "software+shim",
            Self::Tcp => "tcp",
            Self::OwnTcp => "own tcp",
            Self::Shm => "shm",
        }
    }

    const fn coherence(self) -> Option<CoherenceChoice> {
        match self {
            Self::Coherent | Self::CoherentShim => Some(CoherenceChoice::Coherent),
            Self::Software | Self::SoftwareShim => Some(CoherenceChoice::Software),
            Self::Tcp | Self::OwnTcp | Self::Shm => None,
        }
    }

    const fn has_shim(self) -> bool {
        matches!(self, Self::CoherentShim | Self::SoftwareShim)
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

/// Under this word stands what the copies of a long message take.
const FLOOR: &str = "floor";

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
    fn figures(&self, ranks: u16, cases: &[Case]) -> Result<Figures, Failure> {
        let mut figures = Figures::new();
        let rounds = self.arguments.rounds();
        for round in 1..=rounds {
            eprintln!("{}, {ranks} ranks: round {round} of {rounds}", self.install.library);
            for way in Way::ALL {
                let goes = |case: &&Case| way.goes(self.install.library, case.operation);
                let words: Vec<_> = cases.iter().filter(goes).map(|case| case.word()).collect();
                let is_there = !way.has_shim() || self.has_shim()?;
                let is_asked = self.arguments.sweep.figure.is_none() || way != Way::Shm;
                if words.is_empty() || !is_there || !is_asked {
                    continue;
                }
                let output = self.said(way, ranks, &words)?;
                for (word, seconds) in output.lines().filter_map(|line| line.split_once(' ')) {
                    let seconds = seconds.trim().parse()?;
                    figures.entry((way, word.to_owned())).or_default().push(seconds);
                }
                let long = case(Operation::Stream, 1 << 20);
                if let (Some(coherence), None) = (way.coherence(), self.arguments.sweep.figure)
                    && words.contains(&long.word())
                {
                    let seconds = floor(coherence)?.map(|rate| long.bytes as f64 / rate / 1e9);
                    figures.entry((way, FLOOR.to_owned())).or_default().extend(seconds);
                }
            }
        }
        Ok(figures)
    }

    fn has_shim(&self) -> Result<bool, Failure> {
        let provider = provider(self.arguments.provider_path.as_deref())?;
        Ok(shim(&provider, self.install.library, None).is_ok())
    }

    /// What one job of `ranks` prints.
    fn said(&self, way: Way, ranks: u16, cases: &[String]) -> Result<String, Failure> {
        let program: Vec<_> = [self.program.clone()].into_iter().chain(cases.iter().cloned()).collect();
        let Install { library, mpiexec } = self.install;
        let (mut command, _guard) = match way.coherence() {
            // Which has a guard of its own.
            Some(coherence) => (self.over_pool(coherence, way.has_shim(), ranks, &program)?, None),
            None => {
                let mut command = Command::new(mpiexec);
                let sections: Vec<_> = Section::deal(ranks, HOSTS).collect();
                command.args(library.arguments(&sections, &[], &program));
                command.envs(way.variables(*library).iter().copied());
                let guard = Guard::over_job(&mut command, "`polder-dev bench mpi`")?;
                (command, Some(guard))
            }
        };
        // Containers have no other user.
        for variable in ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] {
            command.env(variable, "1");
        }
        // No pipe: a guard that outlives this process, and says so, would end of SIGPIPE before it has cleaned up.
        let errors = self.scratch.path().join("stderr");
        let ended = Tied::output(command.stderr(File::create(&errors)?))?;
        match ended.status.success() {
            true => Ok(String::from_utf8_lossy(&ended.stdout).into_owned()),
            false => {
                let why = std::fs::read_to_string(&errors).unwrap_or_default();
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
        has_shim: bool,
        ranks: u16,
        program: &[String],
    ) -> Result<Command, Failure> {
        let mut command = Command::new(polder_measure::polder()?);
        command.args(["mpi", "run", "--coherence", &coherence.to_string(), "-n", &ranks.to_string()]);
        command.args(["--emulate", &HOSTS.to_string(), "--mpiexec"]).arg(&self.install.mpiexec);
        command.arg("--pool").arg(self.scratch.path().join("pool")).env("POLDER_RUN", self.scratch.path());
        if let Some(folder) = &self.arguments.provider_path {
            command.arg("--provider-path").arg(folder);
        }
        command.args((!has_shim).then_some("--no-windows")).arg("--").args(program);
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

impl Bench<'_> {
    /// The rows of a case: each pool beside TCP, the faster where there are two, a coherent pool beside shared memory, and long
    /// messages beside their floor.
    fn rows(&self, case: Case, ranks: u16, figures: &Figures) -> Vec<Row> {
        let (metric, unit, better) = case.measure();
        let of = |way, word: String| case.sample(ranks, figures.get(&(way, word))?);
        let median = |way, word| of(way, word).map(|sample: Sample| sample.median);
        let tcp = case.tcp(ranks, figures);
        let figure =
            self.arguments.sweep.figure.map_or_else(String::new, |figure| format!("figure {figure} "));
        let (operation, size) = (case.operation.name(), size(case.bytes));
        let mut rows = vec![];
        for way in Way::ALL {
            let Some((sample, coherence)) = of(way, case.word()).zip(way.coherence()) else { continue };
            let shim = if way.has_shim() { " with shim" } else { "" };
            let name =
                format!("{operation} {size} {ranks} procs {coherence} {}{shim}", self.install.library.word());
            let row = Row::measured("mpi", figure.clone() + &name, metric, sample, unit);
            let is_coherent = coherence == CoherenceChoice::Coherent;
            let shm = median(Way::Shm, case.word()).filter(|_| is_coherent);
            let is_long = case.word() == self::case(Operation::Stream, 1 << 20).word();
            let floor = median(way, FLOOR.to_owned()).filter(|_| is_long);
            let peers = [("tcp", tcp), ("shm", shm), ("floor", floor)];
            let beside = peers.map(|(peer, value)| Some(row.clone().beside(peer, value?, better)));
            match beside.iter().all(Option::is_none) {
                true => rows.push(row),
                false => rows.extend(beside.into_iter().flatten()),
            }
        }
        rows
    }
}

impl Case {
    const fn measure(self) -> (&'static str, &'static str, Better) {
        match self.operation {
            Operation::Stream | Operation::PutStream => ("bandwidth", "GB/s", Better::More),
            Operation::Latency | Operation::Put => ("latency", "us", Better::Less),
            Operation::Halo | Operation::AllToAll => ("time", "us", Better::Less),
        }
    }

    /// The figures of a case in its unit.
    fn sample(self, ranks: u16, seconds: &[f64]) -> Option<Sample> {
        let (_, _, better) = self.measure();
        let figure = |seconds: &f64| match better {
            // Half of the ranks send at the same time.
            Better::More => f64::from(ranks / 2) * self.bytes as f64 / seconds / 1e9,
            Better::Less => seconds * 1e6,
        };
        Sample::of(seconds.iter().map(figure).collect())
    }

    /// The median over TCP, of the faster where a library has two ways.
    fn tcp(self, ranks: u16, figures: &Figures) -> Option<f64> {
        let (_, _, better) = self.measure();
        let ways = [Way::Tcp, Way::OwnTcp].into_iter();
        let medians =
            ways.filter_map(|way| Some(self.sample(ranks, figures.get(&(way, self.word()))?)?.median));
        medians.reduce(|one, other| match better {
            Better::Less => one.min(other),
            Better::More => one.max(other),
        })
    }
}
