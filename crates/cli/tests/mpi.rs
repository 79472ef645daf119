//! `polder mpi`: what it sets, what it starts and what it hands on, with programs that play mpiexec.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use polder_mem::testing::Scratch;
use polder_pool::Geometry;
use polder_pool::session;
use rustix::process::{Pid, Signal, kill_process};

const MPICH: &str = "HYDRA build details:\n    Configure options: --with-device=ch4:ofi";
const OPEN_MPI: &str = "mpiexec (Open MPI) 5.0.11";
const INTEL_MPI: &str = "Intel(R) MPI Library for Linux* OS, Version 2021.18.1";

/// A pool, a provider, and a folder for programs that is all of PATH but the system's.
struct Bench {
    scratch: Scratch,
}

impl Bench {
    fn new() -> Self {
        let bench = Self { scratch: Scratch::new() };
        let geometry = Geometry { hosts: 3, processes: 4, ..Geometry::for_region(16 << 20) };
        session::create(&bench.path("pool"), 16 << 20, &geometry).unwrap();
        std::fs::create_dir(bench.path("bin")).unwrap();
        std::fs::create_dir(bench.path("lib")).unwrap();
        std::fs::write(bench.path("lib/libpolder-fi.so"), "").unwrap();
        std::fs::create_dir(bench.path("polder")).unwrap();
        std::fs::write(bench.path("polder/libpolder-mpich.so"), "").unwrap();
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// A program that says `version` when it is asked, and else does `body`.
    fn install(&self, name: &str, version: &str, body: &str) {
        // Written by another process: a test that forks meanwhile would keep it open, and nobody may run it then.
        let mut install = Command::new("install");
        install.args(["-D", "-m", "755", "/dev/stdin"]).arg(self.path(name)).stdin(Stdio::piped());
        let mut install = install.spawn().unwrap();
        let script = format!("#!/bin/sh\n[ \"$1\" = --version ] && {{ echo '{version}'; exit; }}\n{body}\n");
        install.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
        assert!(install.wait().unwrap().success());
    }

    fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_polder"));
        for key in [
            "POLDER_HOST",
            "POLDER_JOB",
            "POLDER_COHERENCE",
            "POLDER_TIMEOUT",
            "FI_PROVIDER_PATH",
            "LD_PRELOAD",
        ] {
            command.env_remove(key);
        }
        command.env("POLDER_POOL", self.path("pool")).env("POLDER_RUN", self.scratch.path());
        command.env("POLDER_CONFIG", "/dev/null");
        command.env("PATH", format!("{}:/usr/bin:/bin", self.path("bin").display()));
        command.arg("mpi").args(arguments.split(' '));
        command
    }

    fn output(&self, arguments: &str) -> Output {
        let (verb, rest) = arguments.split_once(' ').unwrap();
        let provider = self.path("lib");
        self.command(&format!("{verb} --provider-path {} {rest}", provider.display())).output().unwrap()
    }

    /// What a command says that does what it should, without the folder that all lies in.
    fn say(&self, arguments: &str) -> String {
        let output = self.output(arguments);
        assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
        let folder = format!("{}/", self.scratch.path().display());
        String::from_utf8(output.stdout).unwrap().replace(&folder, "")
    }

    /// The line with which a command refuses.
    fn refusal(&self, arguments: &str) -> String {
        let output = self.output(arguments);
        let line = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), line.lines().count()), (Some(1), 1), "{line}");
        line
    }

    /// What stands behind mpiexec in the command that would be run.
    fn dry(&self, arguments: &str) -> String {
        let said = self.say(&format!("run --dry-run {arguments} -- true"));
        said.split_once("bin/mpiexec ").expect(&said).1.trim_end().to_owned()
    }
}

/// Ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

#[test]
fn the_settings_of_each_library_are_printed_for_each_shell() {
    let bench = Bench::new();
    let mpich = bench.say("env mpich --all-through-pool --coherence software");
    for line in [
        "export POLDER_POOL=pool",
        "export FI_PROVIDER_PATH=lib",
        "export FI_PROVIDER=polder",
        "export POLDER_COHERENCE=software",
        "export MPIR_CVAR_CH4_NETMOD=ofi",
        "export MPIR_CVAR_NOLOCAL=1",
    ] {
        assert!(mpich.lines().any(|said| said == line), "{line} is not in\n{mpich}");
    }
    assert!(!bench.say("env mpich").contains("NOLOCAL"));
    let windows = bench.say("env mpich --windows");
    assert!(windows.contains("export LD_PRELOAD=polder/libpolder-mpich.so\n"), "{windows}");
    let refused = bench.refusal("env openmpi --windows");
    assert!(refused.contains("there is no") && refused.contains("leave out --windows"), "{refused}");
    let openmpi = bench.say("env openmpi --shell csh");
    assert!(openmpi.contains("setenv OMPI_MCA_pml cm\nsetenv OMPI_MCA_mtl ofi\n"), "{openmpi}");
    // Intel's own providers stay in reach, behind ours.
    bench.install("impi/bin/mpiexec", INTEL_MPI, "");
    std::fs::create_dir(bench.path("impi/lib")).unwrap();
    std::fs::write(bench.path("impi/lib/libtcp-fi.so"), "").unwrap();
    let mpiexec = bench.path("impi/bin/mpiexec");
    let intel = bench.say(&format!("env impi --shell fish --mpiexec {}", mpiexec.display()));
    assert!(intel.contains("set -gx FI_PROVIDER_PATH lib:impi/lib\n"), "{intel}");
    assert!(intel.contains("set -gx I_MPI_FABRICS shm:ofi\n"), "{intel}");
}

#[test]
fn a_shell_reads_back_whatever_stands_in_a_setting() {
    let bench = Bench::new();
    let odd = "/dev/shm/it's \"$HOME\" & co";
    let mut command = bench.command("env openmpi --provider-path");
    let output = command.arg(bench.path("lib")).arg("--pool").arg(odd).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let script = format!("{said}\nprintf %s \"$POLDER_POOL\"");
    let read = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert_eq!(String::from_utf8(read.stdout).unwrap(), odd);
}

#[test]
fn each_job_gets_an_id_of_its_own_unless_one_is_set() {
    let bench = Bench::new();
    let job = || bench.say("env mpich").lines().find(|line| line.contains("POLDER_JOB")).map(str::to_owned);
    assert!(job().is_some() && job() != job());
    let mut set = bench.command("env mpich");
    let set = set.arg("--provider-path").arg(bench.path("lib")).env("POLDER_JOB", "7").output().unwrap();
    assert!(String::from_utf8(set.stdout).unwrap().contains("export POLDER_JOB=7\n"));
}

#[test]
fn ranks_are_dealt_out_to_hosts_as_each_library_is_told() {
    for (version, emulated, real) in [
        (
            MPICH,
            "-n 2 -env POLDER_HOST 0 true : -n 1 -env POLDER_HOST 1 true",
            "-hosts a:2,b:2 -n 2 -env POLDER_HOST 0 true : -n 2 -env POLDER_HOST 1 true",
        ),
        (
            INTEL_MPI,
            "-n 2 -env POLDER_HOST 0 true : -n 1 -env POLDER_HOST 1 true",
            "-n 2 -host a -env POLDER_HOST 0 true : -n 2 -host b -env POLDER_HOST 1 true",
        ),
        (
            OPEN_MPI,
            "--oversubscribe --bind-to none -n 2 -x POLDER_HOST=0 true : -n 1 -x POLDER_HOST=1 true",
            "-n 2 --host a:2 -x POLDER_POOL -x POLDER_JOB -x FI_PROVIDER_PATH -x FI_PROVIDER -x OMPI_MCA_pml \
             -x OMPI_MCA_mtl -x OMPI_MCA_osc -x POLDER_HOST=0 true : -n 2 --host b:2 -x POLDER_POOL -x POLDER_JOB \
             -x FI_PROVIDER_PATH -x FI_PROVIDER -x OMPI_MCA_pml -x OMPI_MCA_mtl -x OMPI_MCA_osc -x POLDER_HOST=1 true",
        ),
    ] {
        let bench = Bench::new();
        bench.install("bin/mpiexec", version, "");
        assert_eq!(bench.dry("-n 3 --emulate 2"), emulated);
        assert_eq!(bench.dry("-n 4 --hosts a,b"), real);
        assert_eq!(bench.dry("-n 4"), "-n 4 true");
    }
}

#[test]
fn what_cannot_be_started_is_refused_in_one_line_that_says_what_to_do() {
    let bench = Bench::new();
    let refused = bench.refusal("run -n 2 -- true");
    assert!(refused.contains("no mpiexec of an MPI library is in PATH; give --mpiexec"), "{refused}");
    bench.install("bin/mpiexec", MPICH, "");
    let refused = bench.refusal("run -n 2 -- no-such-program");
    assert!(refused.contains("no-such-program: no such program"), "{refused}");
    for (arguments, expected) in [
        ("-n 8 --emulate 4", "is made for 3 hosts, not for 4; take fewer"),
        ("-n 2 --emulate 3", "3 hosts are too many for 2 ranks"),
        ("-n 9 --emulate 2", "has room for 4 ranks on a host, not 5; take more hosts"),
        ("-n 3 --windows", "has room for 2 ranks on a host, not 3"),
        ("-n 2 --hosts a,a", "a is named twice"),
        ("-n 2 --host 1", "--host does not apply here"),
        ("-n 2 --pool /dev/shm/none", "/dev/shm/none: no such file or device; check the path"),
        ("-n 2 --mpi openmpi", "no mpiexec of Open MPI is in PATH"),
        ("-n 2 --mpiexec /bin/true", "/bin/true is of no MPI library that is known here"),
        ("-n 2 --mpiexec /none/mpiexec", "/none/mpiexec: No such file"),
    ] {
        let refused = bench.refusal(&format!("run {arguments} -- true"));
        assert!(refused.contains(expected), "{arguments}: {refused}");
    }
    bench.install("bin/mpiexec.hydra", INTEL_MPI, "");
    let refused = bench.refusal("run -n 2 -- true");
    assert!(refused.contains("several MPI libraries are in PATH") && refused.contains("--mpi"), "{refused}");
    bench.say("run --mpi impi --dry-run -n 2 -- true");
    bench.install("bin/mpiexec", "HYDRA build details:\n  --with-device=ch4:ucx", "");
    let refused = bench.refusal("run -n 2 --mpi mpich -- true");
    assert!(refused.contains("this MPICH was built without libfabric; take one"), "{refused}");
    let line = bench.command("env mpich").output().unwrap().stderr;
    assert!(String::from_utf8(line).unwrap().contains("has no libpolder-fi.so; run `make setup`"));
}

#[test]
fn the_program_gets_the_settings_and_its_end_is_that_of_the_command() {
    let bench = Bench::new();
    bench.install("bin/mpiexec", MPICH, "echo $FI_PROVIDER $POLDER_POOL $*; exit 7");
    let output = bench.output("run -n 1 -- true --flag");
    assert_eq!(output.status.code(), Some(7));
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(said, format!("polder {} -n 1 true --flag\n", bench.path("pool").display()));
    bench.install("bin/mpiexec", MPICH, "kill -9 $$");
    assert_eq!(bench.output("run -n 1 -- true").status.code(), Some(128 + 9));
}

#[test]
fn a_signal_is_handed_on_and_the_end_waited_for() {
    let bench = Bench::new();
    bench.install("bin/mpiexec", MPICH, "trap 'exit 3' TERM; echo ready; while :; do sleep 0.01; done");
    let mut command = bench.command("run --provider-path");
    command.arg(bench.path("lib")).args(["-n", "1", "--", "true"]).stdout(Stdio::piped());
    let mut running = Running(command.spawn().unwrap());
    let mut lines = BufReader::new(running.0.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    kill_process(Pid::from_child(&running.0), Signal::TERM).unwrap();
    assert_eq!(running.0.wait().unwrap().code(), Some(3));
}
