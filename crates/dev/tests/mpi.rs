//! `polder-dev bench mpi`, with programs that play mpiexec.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use polder_mem::testing::{Running, Scratch, install};

const MPICH: &str = "HYDRA build details:\n    Configure options: --with-device=ch4:ofi";

#[test]
fn a_benchmark_of_mpi_that_is_ended_leaves_no_rank_and_no_file_of_mpich() {
    for (provider, signal) in [("tcp", "KILL"), ("tcp", "TERM"), ("polder", "KILL"), ("polder", "TERM")] {
        let scratch = Scratch::new();
        let path = |name: &str| scratch.path().join(name);
        for file in ["lib/libpolder-fi.so", "polder/libpolder-mpich.so"] {
            std::fs::create_dir(path(file).parent().unwrap()).unwrap();
            std::fs::write(path(file), "").unwrap();
        }
        let file = format!("/dev/shm/mpich_shm_bench_{}_{provider}_{signal}", std::process::id());
        // Jobs another way end at once; those of this have a rank out of mpiexec's session.
        let body = format!(
            "[ \"$FI_PROVIDER\" = {provider} ] || exit 0; echo > {file}; cd {}; \
             setsid sleep 1000 & echo $! $$ > new; mv new ranks; wait",
            scratch.path().display()
        );
        install(
            &path("bin/mpiexec"),
            &format!("#!/bin/sh\n[ \"$1\" = --version ] && {{ echo '{MPICH}'; exit; }}\n{body}\n"),
        );
        install(
            &path("bin/mpicc"),
            "#!/bin/sh\nwhile [ \"$1\" != -o ]; do shift; done; : > \"$2\"; chmod +x \"$2\"\n",
        );
        let mut command = Command::new(env!("CARGO_BIN_EXE_polder-dev"));
        for key in [
            "POLDER_POOL",
            "POLDER_HOST",
            "POLDER_JOB",
            "POLDER_COHERENCE",
            "POLDER_TIMEOUT",
            "FI_PROVIDER_PATH",
            "LD_PRELOAD",
        ] {
            command.env_remove(key);
        }
        command.env("POLDER_CONFIG", "/dev/null").env("POLDER_RUN", scratch.path());
        command.env("PATH", format!("{}:/usr/bin:/bin", path("bin").display()));
        command
            .args(["bench", "mpi", "--provider-path"])
            .arg(path("lib"))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut running = Running(command.spawn().unwrap());
        while !path("ranks").exists() {
            assert!(running.0.try_wait().unwrap().is_none(), "it ended");
            std::thread::yield_now();
        }
        let ranks = std::fs::read_to_string(path("ranks")).unwrap();
        let told = Command::new("kill").args(["-s", signal, &running.0.id().to_string()]).status().unwrap();
        assert!(told.success());
        running.0.wait().unwrap();
        let runs = |pid: &str| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            !stat.is_empty() && !stat.contains(") Z")
        };
        // The kernel tells those that clean up.
        while PathBuf::from(&file).exists() || ranks.split_whitespace().any(runs) {
            std::thread::yield_now();
        }
    }
}
