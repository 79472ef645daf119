"""The wheel, installed into an empty environment as a user would, with no compiler of Rust and no network in reach."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What `make mpi` has fetched for this: numpy and MPICH.
WHEELS = ROOT / ".cache/wheels"
README_PROGRAM = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
MEGABYTE = 1_000_000


def wheel() -> Path:
    built = list((ROOT / "dist").glob("polder_memory-*.whl"))
    assert len(built) == 1, f"{built}: `make dist` builds the one wheel"
    return built[0]


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator["User"]:
    if not any(WHEELS.glob("mpich-*.whl")):
        pytest.skip("the wheels beside it are not here; `make mpi` fetches them")
    yield User(tmp_path_factory.mktemp("user"))


class User:
    """An empty folder with an environment of its own, and the variables of a fresh login."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run(sys.executable, "-m", "venv", folder / "env")
        links = ["--find-links", str(ROOT / "dist"), "--find-links", str(WHEELS)]
        self.run(
            "env/bin/pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--no-index",
            *links,
            "polder-memory",
            "mpich",
        )

    def run(self, *command: object, path: str = "/usr/bin:/bin") -> str:
        ended = subprocess.run(
            [str(word) for word in command],
            cwd=self.folder,
            env={"PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
        return ended.stdout


def test_the_first_program_of_the_readme_runs_from_the_wheel(user: User, scratch: Path) -> None:
    assert README_PROGRAM is not None
    program = README_PROGRAM[1].replace("/dev/shm/readme", str(scratch / "readme"))
    assert user.run("env/bin/python", "-c", program) == "10.0\n"


def test_the_installed_planner_gives_the_digits_of_the_build(user: User) -> None:
    question = ["plan", "train", "--model", "llama3-405b", "--platform", "nvl72-ndr", "--gpus", "16384", "--json"]
    assert user.run("env/bin/polder", *question) == user.run(ROOT / "target/dist/polder", *question)


def test_a_check_without_torch_says_what_to_install(user: User) -> None:
    command = [user.folder / "env/bin/polder", "offload", "check", "train.py"]
    ended = subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)
    remedy = f"{user.folder}/env/bin/python -m pip install torch"
    assert ended.returncode == 1
    assert ended.stderr == f"polder: a check needs PyTorch, which is not installed; {remedy}\n"


def test_two_emulated_hosts_send_messages_with_the_wheel_of_mpich(user: User) -> None:
    both = f"{user.folder}/env/bin:/usr/bin:/bin"
    user.run("env/bin/mpicc", ROOT / "examples/hello.c", "-o", "hello", path=both)
    said = user.run("env/bin/polder", "mpi", "run", "-n", "4", "--emulate", "2", "--", "./hello", path=both)
    assert said.count("rank ") >= 4, said


def test_c_programs_find_the_header_and_the_library_of_the_wheel(user: User) -> None:
    environment = user.folder / "env"
    flags = ["-I", environment / "include", "-L", environment / "lib", f"-Wl,-rpath,{environment}/lib", "-lpolder"]
    user.run("cc", ROOT / "examples/objects.c", "-o", "objects", *flags)
    assert (environment / "lib/pkgconfig/polder.pc").exists()


def test_the_wheel_is_small_and_its_name_says_the_oldest_c_library_that_it_runs_with(user: User) -> None:
    assert wheel().stat().st_size <= 20 * MEGABYTE
    assert (user.folder / "env/bin/polder").stat().st_size <= 12 * MEGABYTE
    named = re.search(r"manylinux_2_(\d+)_x86_64", wheel().name)
    assert named is not None, wheel().name
    record = next((user.folder / "env/lib").glob("python3*/site-packages/polder_memory-*.dist-info/RECORD"))
    files = [(record.parents[1] / line.split(",")[0]).resolve() for line in record.read_text().splitlines()]
    programs = [file for file in files if file.is_file() and file.read_bytes()[:4] == b"\x7fELF"]
    assert len(programs) == 8, programs
    for program in programs:
        symbols = subprocess.run(["objdump", "-T", program], capture_output=True, text=True, check=True).stdout
        asked = max(int(minor) for minor in re.findall(r"GLIBC_2\.(\d+)", symbols))
        assert asked <= int(named[1]), f"{program} asks for 2.{asked}"
        needed = subprocess.run(["objdump", "-p", program], capture_output=True, text=True, check=True).stdout
        libraries = set(re.findall(r"NEEDED\s+(\S+)", needed))
        assert libraries <= {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}, (
            f"{program}: {libraries}"
        )


def test_nothing_of_the_source_tree_is_in_reach_of_the_installed_module(user: User) -> None:
    where = user.run("env/bin/python", "-c", "import polder, polder._core; print(polder._core.__file__)")
    assert where.startswith(str(user.folder)), where
    assert os.environ.get("PYTHONPATH") is None
