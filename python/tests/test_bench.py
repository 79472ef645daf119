"""Benchmarks run, check their sums, and quote their peers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def test_collectives_have_a_row_for_each_library_and_way_of_calling() -> None:
    command = [sys.executable, "-m", "polder.bench", "--procs", "2", "--sizes", "4096"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    ours = [
        f"{kind} {where}{way}"
        for kind in ("coherent", "software")
        for where in ("staged", "in-pool")
        for way in ("", " from Rust")
    ]
    ours += [f"{kind} staged through torch" for kind in ("coherent", "software")]
    # Open MPI stands beside where it is installed.
    seen = {row["case"].removeprefix("all-reduce 4 KiB 2 procs ") for row in rows} - {"openmpi"}
    assert seen == {"gloo", *ours}
    for row in rows:
        assert 0 < row["low"] <= row["value"] <= row["high"], row
        assert row["kind"] == "measured", row
        assert row["case"].endswith(("gloo", "openmpi")) or row["peer"] in ("gloo", "openmpi"), row
        if "ratio" in row:
            assert abs(row["ratio"] - row["peer_value"] / row["value"]) < 1e-9 * row["ratio"], row


def test_collectives_of_python_alone_are_four() -> None:
    command = [sys.executable, "-m", "polder.bench", "--procs", "2", "--sizes", "4096"]
    command += ["--rounds", "1", "--alone", "--pin", "--without-rust"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    cases = [json.loads(line)["case"].removeprefix("all-reduce 4 KiB 2 procs ") for line in done.stdout.splitlines()]
    assert cases == ["coherent staged", "coherent in-pool", "software staged", "software in-pool"]


@pytest.mark.torch
def test_torch_has_a_row_for_each_operation_kind_of_pool_and_peer() -> None:
    pytest.importorskip("torch")
    from polder.torch.bench import KINDS, OPERATIONS

    command = [sys.executable, "-m", "polder.torch.bench", "--procs", "2", "--sizes", "1048576", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    beside = {row["case"] for row in rows if row["peer"] == "gloo"}
    assert beside == {f"{operation} 1 MiB 2 procs {kind}" for operation in OPERATIONS for kind in KINDS}
    assert f"beside gloo: {len(beside)} rows" in done.stderr
    for row in rows:
        assert 0 < row["low"] <= row["value"] <= row["high"], row


@pytest.mark.parametrize("arguments", [["lines"], ["ring"], ["objects", "--objects", "100000"]])
def test_a_benchmark_of_the_command_prints_rows(arguments: list[str]) -> None:
    command = [str(Path(sys.executable).with_name("polder")), "bench", *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) >= 8
    assert all(row["value"] > 0 and row["bench"] == arguments[0] for row in rows)


@pytest.mark.mpi
def test_mpi_has_rows_beside_tcp_and_beside_shared_memory() -> None:
    mpiexec = Path(__file__).parents[2] / ".cache/mpich/bin/mpiexec"
    if not mpiexec.exists():
        pytest.skip("MPICH is not installed: run `make mpi`")
    command = [Path(sys.executable).with_name("polder"), "bench", "mpi", "--rounds", "1", "--mpi", mpiexec, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    beside = {(row["case"], row["peer"]) for row in rows}
    for case in ("message 8 B 2 procs", "stream 1 MiB 2 procs", "all-to-all 4 KiB 4 procs"):
        assert {(f"{case} {pool} mpich", "tcp") for pool in ("coherent", "software")} <= beside
        assert (f"{case} coherent mpich", "shm") in beside
    for row in rows:
        better = row["value"] / row["peer_value"]
        assert abs(row["ratio"] * (better if row["unit"] == "us" else 1 / better) - 1) < 1e-9, row
