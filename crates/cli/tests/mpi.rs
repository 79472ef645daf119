//! `polder mpi`: what it sets, what it starts and what it hands on, with programs that play mpiexec.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use polder_attach::session::{self, Session};
use polder_attach::settings::Settings;
use polder_mem::testing::{Running, Scratch, install};
use polder_pool::Geometry;
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
        let geometry = Geometry { hosts: 3, processes: 8, ..Geometry::for_region(16 << 20) };
        session::create(&bench.path("pool"), 16 << 20, &geometry).unwrap();
        std::fs::create_dir(bench.path("bin")).unwrap();
        std::fs::create_dir(bench.path("lib")).unwrap();
        std::fs::write(bench.path("lib/libpolder-fi.so"), "").unwrap();
        std::fs::create_dir(bench.path("polder")).unwrap();
        for shim in ["libpolder-mpich.so", "libpolder-openmpi.so"] {
            std::fs::write(bench.path("polder").join(shim), "").unwrap();
        }
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// A program that says `version` when it is asked, and else does `body`.
    fn install(&self, name: &str, version: &str, body: &str) {
        let script = format!("#!/bin/sh\n[ \"$1\" = --version ] && {{ echo '{version}'; exit; }}\n{body}\n");
        install(&self.path(name), &script);
    }

    fn command(&self, arguments: &str) -> Command {
        self.polder(&format!("mpi {arguments}"))
    }

    fn polder(&self, arguments: &str) -> Command {
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
        command.args(arguments.split(' '));
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
    assert!(mpich.contains("export LD_PRELOAD=polder/libpolder-mpich.so\n"), "{mpich}");
    assert!(!bench.say("env mpich --no-windows").contains("LD_PRELOAD"));
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
fn windows_are_in_the_pool_unless_that_is_declined_and_other_preloaded_libraries_stay() {
    let bench = Bench::new();
    bench.install("bin/mpiexec", MPICH, "echo preloaded ${LD_PRELOAD-nothing}");
    let said = |arguments: &str| {
        let mut command = bench.command("run --provider-path");
        command.arg(bench.path("lib")).args(arguments.split(' ')).args(["-n", "1", "true"]);
        // A library that the loader does not find is left out with a line on stderr.
        let output = command.env("LD_PRELOAD", "libnone.so").output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let shim = bench.path("polder/libpolder-mpich.so");
    assert_eq!(said("--all-through-pool"), format!("preloaded {}:libnone.so\n", shim.display()));
    assert_eq!(said("--no-windows"), "preloaded libnone.so\n");
    std::fs::remove_file(&shim).unwrap();
    let refused = bench.refusal("run -n 1 true");
    assert!(refused.contains("there is no") && refused.contains("give --no-windows"), "{refused}");
    bench.say("run -n 1 --no-windows true");
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
            "-n 2 --host a:2 -x POLDER_POOL -x POLDER_JOB -x FI_PROVIDER_PATH -x FI_PROVIDER -x LD_PRELOAD -x OMPI_MCA_pml \
             -x OMPI_MCA_mtl -x OMPI_MCA_osc -x POLDER_HOST=0 true : -n 2 --host b:2 -x POLDER_POOL -x POLDER_JOB \
             -x FI_PROVIDER_PATH -x FI_PROVIDER -x LD_PRELOAD -x OMPI_MCA_pml -x OMPI_MCA_mtl -x OMPI_MCA_osc -x POLDER_HOST=1 true",
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
    let install =
        "no mpiexec of an MPI library is in PATH; give --mpiexec PATH, or install one: pip install mpich";
    assert!(refused.contains(install), "{refused}");
    bench.install("bin/mpiexec", MPICH, "");
    let plain = bench.path("bin/plain");
    std::fs::write(&plain, "print()").unwrap();
    let [folder, plain] = [bench.scratch.path(), &plain].map(|path| path.display().to_string());
    for (program, expected) in [
        ("no-such-program", "no-such-program: no such program in PATH; check its name"),
        // Of the folder that the tests run in.
        ("Cargo.toml", "Cargo.toml: no such program in PATH; ./Cargo.toml is the one of this folder"),
        ("./no-such-program", "./no-such-program: no such program; check its path"),
        (&folder, "it is a directory; name a program"),
        (
            &plain,
            &format!("it may not be executed; run chmod +x on it, or name what runs it, as python3 {plain}"),
        ),
        ("plain", "plain: no such program in PATH"),
    ] {
        let refused = bench.refusal(&format!("run -n 2 -- {program}"));
        assert!(refused.contains(expected), "{program}: {refused}");
    }
    let refused = bench.refusal("run -n 1 -- true : -n 1 true");
    assert!(refused.contains("`polder mpi run` starts one; start several with mpiexec"), "{refused}");
    let small = bench.path("small");
    let geometry = Geometry { hosts: 3, processes: 8, ..Geometry::for_region(4 << 20) };
    session::create(&small, 4 << 20, &geometry).unwrap();
    for (arguments, expected) in [
        ("-n 8 --emulate 4", "is made for 3 hosts, not for 4; take fewer"),
        ("-n 2 --emulate 3", "3 hosts are too many for 2 ranks"),
        ("-n 17 --no-windows --emulate 2", "has room for 8 ranks on a host, not 9; take more hosts"),
        (
            "-n 5",
            "room for 4 ranks on a host, not 5; take more hosts, or format a pool with --processes 10, or leave windows out",
        ),
        (
            &format!("-n 16 --emulate 2 --no-windows --pool {}", small.display()),
            "of 4.0 MiB is too small for the 240 small rings between 16 ranks; format one with --size 8MiB, or take fewer",
        ),
        ("-n 2 --hosts a,a", "a is named twice"),
        ("-n 2 --hosts a,", "--hosts: the name of a machine is empty; write one comma"),
        ("-n 2 --host 1", "--host does not apply here"),
        ("-n 2 --pool /dev/shm/none", "/dev/shm/none: no such file or device; check the path"),
        ("-n 2 --mpi openmpi", "no mpiexec of Open MPI is in PATH"),
        ("-n 2 --mpiexec /bin/true", "/bin/true is not of MPICH, Open MPI or Intel MPI"),
        (
            "-n 2 --mpiexec /none/mpiexec",
            "/none/mpiexec: cannot run it: No such file or directory (os error 2); name the",
        ),
    ] {
        let refused = bench.refusal(&format!("run {arguments} -- true"));
        assert!(refused.contains(expected), "{arguments}: {refused}");
    }
    // What the ranks of one host send to one another does not come here, nor what they do not send.
    for arguments in ["-n 4", "-n 4 --hosts a,b", "-n 8 --emulate 2 --no-windows"] {
        bench.dry(arguments);
    }
    bench.install("bin/mpiexec.hydra", INTEL_MPI, "");
    bench.say("run --mpi impi --dry-run -n 2 -- true");
    bench.install("bin/mpiexec", "HYDRA build details:\n  --with-device=ch4:ucx", "");
    let refused = bench.refusal("run -n 2 --mpi mpich -- true");
    assert!(refused.contains("this MPICH was built without libfabric; take one"), "{refused}");
    let line = bench.command("env mpich").output().unwrap().stderr;
    assert!(String::from_utf8(line).unwrap().contains("has no libpolder-fi.so; run `make setup`"));
}

#[test]
fn of_two_libraries_in_path_the_first_counts_and_both_are_named() {
    let bench = Bench::new();
    bench.install("bin/mpiexec.hydra", INTEL_MPI, "");
    bench.install("later/mpiexec", OPEN_MPI, "");
    let provider = format!("run --dry-run --provider-path {}", bench.path("lib").display());
    let run = |arguments: &str| {
        let mut command = bench.command(&format!("{provider}{arguments} -n 2 true"));
        let path = ["bin", "later"].map(|folder| bench.path(folder).display().to_string()).join(":");
        let output = command.env("PATH", format!("{path}:/usr/bin:/bin")).output().unwrap();
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap())
    };
    let [command, stderr] = run("");
    assert!(command.contains("/bin/mpiexec.hydra -n 2 true\n"), "{command}");
    let [first, other] =
        ["bin/mpiexec.hydra", "later/mpiexec"].map(|name| bench.path(name).display().to_string());
    let remedy = "--mpi or --mpiexec takes another, such as";
    let named = format!("polder: Intel MPI of {first} is the first in PATH; {remedy} Open MPI of {other}\n");
    assert_eq!(stderr, named);
    let [command, stderr] = run(" --mpi openmpi");
    assert!(command.contains("/later/mpiexec -n 2 true\n") && stderr.is_empty(), "{command}{stderr}");
}

#[test]
fn a_program_and_its_arguments_stand_behind_two_dashes_or_without_them() {
    let bench = Bench::new();
    bench.install("bin/mpiexec", MPICH, "");
    for (arguments, expected) in [
        ("-n 2 -- true -np 3 --flag", "-n 2 true -np 3 --flag"),
        ("-n 2 true -np 3 --flag -- -n 4", "-n 2 true -np 3 --flag -- -n 4"),
        ("-np 2 true -np 3", "-n 2 true -np 3"),
        ("-np 3 --emulate 2 -- true", "-n 2 -env POLDER_HOST 0 true : -n 1 -env POLDER_HOST 1 true"),
        ("-n2 true --no-windows", "-n 2 true --no-windows"),
        ("--ranks 2 true -np", "-n 2 true -np"),
    ] {
        let line = bench.say(&format!("run --dry-run {arguments}"));
        assert_eq!(line.split_once("bin/mpiexec ").unwrap().1.trim_end(), expected, "{arguments}");
    }
    let output = bench.output("run -n 2 --emulat 2 true");
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("unexpected argument '--emulat'"), "{stderr}");
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
fn machines_that_are_not_reached_are_said_once_and_what_to_sweep_there() {
    let bench = Bench::new();
    bench.install("bin/mpiexec", MPICH, "echo unreachable: b >&2; exit 255");
    let output = bench.output("run -n 2 --hosts a,b -- true");
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), said.matches("unreachable: b\n").count()), (Some(255), 1), "{said}");
    assert!(said.contains("polder: cannot clean up after the job: not all of a, b were reached"), "{said}");
    // After a job that went well nothing has said it yet.
    let sweep_fails = "case \"$*\" in *sweep*) echo unreachable: b >&2; exit 255;; esac";
    bench.install("bin/mpiexec", MPICH, sweep_fails);
    let output = bench.output("run -n 2 --hosts a,b -- true");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && said.contains("unreachable: b\npolder: cannot clean up"), "{said}");
    bench.install("bin/mpiexec", MPICH, "case \"$*\" in *sweep*) echo swept >&2;; esac");
    let output = bench.output("run -n 2 --hosts a,b -- true");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && said.contains("swept\n") && !said.contains("clean up"), "{said}");
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

#[test]
fn a_job_without_a_pool_has_one_of_its_own_which_goes_with_it() {
    let bench = Bench::new();
    bench.install("bin/mpiexec", MPICH, "test -s $POLDER_POOL && echo $POLDER_POOL");
    let mut command = bench.command("run --provider-path");
    command.arg(bench.path("lib")).args(["-n", "3", "--emulate", "2", "--", "true"]);
    let output = command.env_remove("POLDER_POOL").output().unwrap();
    let pool = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && pool.starts_with("/dev/shm/polder-mpi-"), "{pool}");
    assert!(!PathBuf::from(pool.trim_end()).exists());
    let refused = bench.command("run -n 2 --hosts a,b -- true").env_remove("POLDER_POOL").output().unwrap();
    assert!(String::from_utf8(refused.stderr).unwrap().contains("no pool is named"));
}

#[test]
fn more_ranks_than_a_host_can_have_are_refused_before_anything_starts() {
    let bench = Bench::new();
    bench.install("bin/mpiexec", MPICH, "echo started");
    for (line, words) in [
        ("run -n 513 --no-windows -- true", "513 ranks are too many for one host: 512 fit; take more hosts"),
        (
            "run -n 514 --emulate 2 -- true",
            "257 ranks are too many for one host: 256 fit with windows; take more hosts",
        ),
    ] {
        let output = bench.command(line).env_remove("POLDER_POOL").output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && output.stdout.is_empty() && said.contains(words), "{said}");
    }
}

#[test]
fn what_the_ranks_have_counted_is_the_last_line() {
    let bench = Bench::new();
    for (counts, expected) in [
        (
            "7 1000000\\n8 2400000\\n8 100000\\n",
            "polder: 2 ranks, 2 hosts, 3.5 MB through the pool (coherent)",
        ),
        ("7 1000000\\n", "polder: 2 ranks, 2 hosts, 1.0 MB through the pool (coherent) from 1 of them"),
        ("", "polder: 2 ranks, 2 hosts"),
    ] {
        bench.install("bin/mpiexec", MPICH, &format!("printf '{counts}' >> $POLDER_MPI_TALLY"));
        let output = bench.output("run -n 2 --emulate 2 -- true");
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(said.lines().last(), Some(expected), "{said}");
    }
    assert!(
        !bench
            .path("")
            .read_dir()
            .unwrap()
            .any(|file| { file.unwrap().file_name().to_string_lossy().contains("tally") })
    );
}

#[test]
fn open_mpi_that_refuses_root_is_explained() {
    let bench = Bench::new();
    bench.install("bin/mpiexec", OPEN_MPI, "exit 1");
    let mut command = bench.command("run --provider-path");
    command.arg(bench.path("lib")).args(["-n", "1", "--", "true"]);
    let says = |command: &mut Command| {
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap().contains("OMPI_ALLOW_RUN_AS_ROOT=1 and")
    };
    for name in ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] {
        command.env_remove(name);
    }
    assert_eq!(says(&mut command), rustix::process::getuid().is_root());
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    assert!(!says(&mut command));
}

#[test]
fn a_job_whose_polder_is_killed_ends_with_all_that_it_started_and_its_pool() {
    let bench = Bench::new();
    // Out of mpiexec's session, as a proxy may be.
    let body = "setsid sleep 1000 & echo $! $$ $POLDER_POOL $POLDER_MPI_TALLY; wait";
    bench.install("bin/mpiexec", MPICH, body);
    let mut command = bench.command("run --provider-path");
    command.arg(bench.path("lib")).args(["-n", "1", "--", "true"]).env_remove("POLDER_POOL");
    let mut running = Running(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let line = BufReader::new(running.0.stdout.take().unwrap()).lines().next().unwrap().unwrap();
    let [sleeper, mpiexec, pool, tally] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
    running.0.kill().unwrap();
    // The guard closes it when it has done all.
    let output = std::io::read_to_string(running.0.stderr.take().unwrap()).unwrap();
    assert!(output.contains("was killed; its ranks were ended"), "{output}");
    for pid in [sleeper, mpiexec] {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        assert!(stat.is_empty() || stat.contains(") Z"), "{pid} runs: {stat}");
    }
    assert!(!PathBuf::from(pool).exists() && !PathBuf::from(tally).exists());
}

/// A run that goes on until its input ends, and what its mpiexec said: its process, its pool and its tally.
fn begun(bench: &Bench, with_pool: bool) -> (Running, [String; 3]) {
    bench.install("bin/mpiexec", MPICH, "echo $$ $POLDER_POOL $POLDER_MPI_TALLY; read line");
    let mut command = bench.command("run --provider-path");
    command.arg(bench.path("lib")).args(["-n", "1", "--", "true"]).env("POLDER_JOB", "7");
    if !with_pool {
        command.env_remove("POLDER_POOL");
    }
    let mut running = Running(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
    let line = BufReader::new(running.0.stdout.take().unwrap()).lines().next().unwrap().unwrap();
    let said = line.split(' ').map(str::to_owned).collect::<Vec<_>>().try_into().unwrap();
    (running, said)
}

#[test]
fn what_a_run_has_left_that_was_killed_with_its_guard_goes_with_the_next_and_nothing_else() {
    let bench = Bench::new();
    let (mut killed, [mpiexec, pool, tally]) = begun(&bench, false);
    let (mut other, [_, pool_of_other, tally_of_other]) = begun(&bench, false);
    let children = format!("/proc/{0}/task/{0}/children", killed.0.id());
    let children = std::fs::read_to_string(children).unwrap();
    // The guard first, which would clean up.
    for pid in children.split_whitespace().filter(|pid| **pid != *mpiexec).chain([&*mpiexec]) {
        kill_process(Pid::from_raw(pid.parse().unwrap()).unwrap(), Signal::KILL).unwrap();
        if pid != mpiexec {
            killed.0.kill().unwrap();
            killed.0.wait().unwrap();
        }
    }
    let exist = || [&pool, &tally, &pool_of_other, &tally_of_other].map(|file| PathBuf::from(file).exists());
    assert_eq!(exist(), [true; 4]);
    let (mut next, _) = begun(&bench, true);
    assert_eq!(exist(), [false, false, true, true]);
    for running in [&mut next, &mut other] {
        drop(running.0.stdin.take());
        running.0.wait().unwrap();
    }
    assert_eq!(exist(), [false; 4]);
}

#[test]
fn a_run_does_not_wait_for_the_ranks_of_another_with_its_job() {
    let bench = Bench::new();
    bench.install("bin/mpiexec", MPICH, "exit 0");
    let (pool, run) = (Some(bench.path("pool")), Some(bench.scratch.path().into()));
    let session = Session::open(&Settings { pool, run, job: Some(7), ..Settings::default() }).unwrap();
    let held = session.pool().create("/endpoint/7/mine", 5000).unwrap();
    let mut command = bench.command("run --provider-path");
    command.arg(bench.path("lib")).args(["-n", "1", "--", "true"]).env("POLDER_JOB", "7");
    let said = String::from_utf8(command.output().unwrap().stderr).unwrap();
    assert!(said.ends_with("polder: 1 rank, 1 host\n") && !said.contains("outlive"), "{said}");
    session.pool().close(held);
}

#[test]
fn a_pool_whose_name_no_rank_would_get_is_refused_by_it() {
    let bench = Bench::new();
    bench.install("bin/mpiexec", MPICH, "");
    let odd = bench.scratch.path().join(OsStr::from_bytes(b"x\xff"));
    std::fs::rename(bench.path("pool"), &odd).unwrap();
    let mut command = bench.command("run --provider-path");
    command.arg(bench.path("lib")).args(["-n", "1", "--pool"]).arg(&odd).args(["--", "true"]);
    let said = String::from_utf8(command.output().unwrap().stderr).unwrap();
    assert!(said.contains("x\u{fffd}: it is no UTF-8, and ranks get paths of UTF-8 alone"), "{said}");
}

#[test]
fn files_of_mpi_libraries_that_nothing_uses_any_more_go_with_the_job() {
    for begin in [
        "mpich_shm_",
        "mpich_shar_tmp",
        "vader_segment.node.0.6bd10001.",
        "sm_segment.node.0.6bd10001.",
        "psm2_shm.",
    ] {
        leaves_what_is_used_or_old(begin);
    }
}

fn leaves_what_is_used_or_old(begin: &str) {
    let bench = Bench::new();
    let names = ["left", "held"].map(|name| format!("/dev/shm/{begin}{name}_{}", std::process::id()));
    let [left, held] = &names;
    let old = format!("/dev/shm/{begin}old_{}", std::process::id());
    std::fs::write(&old, "").unwrap();
    std::fs::File::open(&old).unwrap().set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    // Another job's, which begins meanwhile: a process has it open.
    let body = format!("echo > {left}; echo > {held}; echo made; read line");
    bench.install("bin/mpiexec", MPICH, &body);
    let mut command = bench.command("run --provider-path");
    command.arg(bench.path("lib")).args(["-n", "1", "--", "true"]);
    let mut running = Running(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
    let made = BufReader::new(running.0.stdout.take().unwrap()).lines().next();
    assert_eq!(made.unwrap().unwrap(), "made");
    let open = std::fs::File::open(held).unwrap();
    drop(running.0.stdin.take());
    running.0.wait().unwrap();
    let is_there = [left, held, &old].map(|file| PathBuf::from(file).exists());
    drop(open);
    names.iter().chain([&old]).for_each(|file| drop(std::fs::remove_file(file)));
    assert_eq!(is_there, [false, true, true], "{begin}");
}
