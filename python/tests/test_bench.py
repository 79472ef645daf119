"""Benchmarks run, check their sums, and quote their peers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import POLDER_DEV


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
    command = [str(POLDER_DEV), "bench", *arguments, "--json"]
    # Those of a ring take more than a minute beside the other lanes of `make test`.
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) >= 8
    assert all(row["value"] > 0 and row["bench"] == arguments[0] for row in rows)


def test_the_sums_of_proxies_have_a_row_for_each_kind_of_pool_beside_their_floor() -> None:
    command = [str(POLDER_DEV), "bench", "sync", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["case"].rsplit(" ", 1)[1] for row in rows] == ["coherent", "software"]
    assert all(row["peer"] == "floor" and row["ratio"] > 0 for row in rows)


@pytest.mark.torch
def test_snapshots_have_rows_beside_torchs_own_checkpoints() -> None:
    pytest.importorskip("torch")
    command = [str(POLDER_DEV), "bench", "snapshot", "--millions", "1", "--rounds", "1"]
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    found = {(row["case"].split()[0], row["case"].split()[-1], row["metric"], row["peer"]) for row in rows}
    assert len(found) == len(rows)
    assert found == {
        row
        for kind in ("coherent", "software")
        for row in [
            *(("snapshot", kind, "time blocked", peer) for peer in ("DefaultStager", "async_save", "floor")),
            ("snapshot", kind, "time until whole", "async_save"),
            ("restore", kind, "time to first forward", "dcp.load"),
        ]
    }
    for row in rows:
        assert 0 < row["low"] <= row["value"] <= row["high"], row
        assert row["ratio"] == pytest.approx(row["peer_value"] / row["value"]), row


@pytest.mark.torch
def test_weights_have_rows_beside_safetensors() -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    command = [str(POLDER_DEV), "bench", "weights", "--mib", "8", "--procs", "2", "--rounds", "1", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    cases = [f"{what} {kind}" for kind in ("coherent", "software") for what in ("publish 8 MiB", "load 8 MiB")]
    assert [row["case"].replace(" of weights", "").replace(" 2 procs", "") for row in rows] == cases
    for row in rows:
        assert 0 < row["low"] <= row["value"] <= row["high"] and row["peer"] == "safetensors", row


@pytest.mark.mpi
def test_mpi_has_rows_beside_tcp_and_beside_shared_memory() -> None:
    mpiexec = Path(__file__).parents[2] / ".cache/mpich/bin/mpiexec"
    if not mpiexec.exists():
        pytest.skip("MPICH is not installed: run `make mpi`")
    command = [POLDER_DEV, "bench", "mpi", "--rounds", "1", "--mpi", mpiexec, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    beside = {(row["case"], row["peer"]) for row in rows}
    for case in ("message 8 B 2 procs", "stream 1 MiB 2 procs", "all-to-all 4 KiB 4 procs"):
        assert {(f"{case} {pool} mpich", "tcp") for pool in ("coherent", "software")} <= beside
        assert (f"{case} coherent mpich", "shm") in beside
    for row in rows:
        better = row["value"] / row["peer_value"]
        assert abs(row["ratio"] * (better if row["unit"] == "us" else 1 / better) - 1) < 1e-9, row


@pytest.mark.torch
def test_offload_quotes_counted_bytes_and_its_targets() -> None:
    pytest.importorskip("torch")
    from polder.offload import bench

    names = ("bf16", "bf16 DeepSpeed", "bf16 floor", "fp32", "fp32 floor", "fp32 torch fused", "fp32 DeepSpeedCPUAdam")
    times = dict(zip(names, ([2.0, 1.0, 3.0], [4.0], [1.5], [1.0], [0.8], [1.2], [0.9]), strict=True))
    rows = bench.rows(times, 50, 1)
    assert {row["case"] for row in rows} == {f"AdamW {kind} 50 M elements 1 thread" for kind in ("bf16", "fp32")}
    by_case = {(row["case"].split()[1], row["metric"], row["peer"]): row for row in rows}
    assert len(by_case) == len(rows) == 9
    step = by_case["bf16", "time", "DeepSpeed"]
    assert (step["low"], step["value"], step["high"], step["ratio"]) == (1.0, 2.0, 3.0, 2.0)
    # Ours: norm 2, gradient 2, copy 2, parameter and both moments 8 each. Theirs: cast 2 + 4, norm 4, unscale 4 + 4,
    # step 4 + 8 + 8 + 8, copy 4 + 2.
    counted = by_case["bf16", "counted bytes", "DeepSpeed"]
    assert (counted["value"], counted["peer_value"]) == (2 + 2 + 2 + 8 * 3, 6 + 4 + 8 + 28 + 6)
    share = by_case["bf16", "time gained over bytes saved", "at least"]
    assert share["value"] == pytest.approx(2.0 / (52 / 30))
    assert share["ratio"] == pytest.approx(share["value"] / 0.9)
    floor = by_case["fp32", "time over floor", "at most"]
    assert (floor["value"], floor["ratio"]) == (pytest.approx(1.25), pytest.approx(1.05 / 1.25))
    assert by_case["fp32", "time", "torch fused"]["ratio"] == pytest.approx(1.2)
    assert by_case["fp32", "bandwidth", "floor"]["value"] == pytest.approx(28.0)
    # A peer that moves the same bytes in less time is the floor.
    faster = bench.rows(times | {"fp32 torch fused": [0.5]}, 50, 1)
    assert [row["value"] for row in faster if row["metric"] == "time over floor"] == [pytest.approx(2.0)]


@pytest.mark.torch
def test_offload_without_deepspeed_says_how_to_get_it_and_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    from polder.offload import bench

    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setattr(sys, "argv", ["bench"])
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda _: None)
    assert bench.main() == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [bench.MISSING]
    # An environment that was not made to the end does not count.
    (tmp_path / ".cache/deepspeed/bin").mkdir(parents=True)
    assert bench.with_deepspeed() is None
    (tmp_path / ".cache/deepspeed/.ready").touch()
    assert bench.with_deepspeed() == str(tmp_path / ".cache/deepspeed/bin/python")


@pytest.mark.torch
def test_offload_runs_all_contenders() -> None:
    made = Path(__file__).parents[2] / ".cache/deepspeed/.ready"
    extensions = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache/torch_extensions"))
    if not made.exists() or not list(extensions.glob("*/cpu_adam/cpu_adam.so")):
        pytest.skip("DeepSpeed's cpu_adam is not compiled, which takes minutes: `polder-dev bench offload` compiles it")
    command = [sys.executable, "-m", "polder.offload.bench", "--millions", "1", "--threads", "1", "--rounds", "1"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 9
    assert all(row["value"] > 0 and row["peer_value"] > 0 for row in rows)
    # Both sides of the bf16 rows come to the same weights.
    check = (
        "import torch; from polder.offload import bench; a, b = bench.arrays(5003), bench.arrays(5003);"
        "bench.contenders(a)['bf16'](); bench.contenders(b)['bf16 DeepSpeed']();"
        "assert (a.parameters - b.parameters).abs().max() < 1e-6 and (a.mean - b.mean).abs().max() < 1e-7;"
        "assert (a.parameters - bench.arrays(5003).parameters).abs().min() > 1e-5;"
        "print((a.half_parameters == b.half_parameters).float().mean().item())"
    )
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    command = [str(made.with_name("bin") / "python"), "-c", check]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    assert float(done.stdout.splitlines()[-1]) > 0.99


def test_blocks_of_a_cache_have_rows_beside_their_floor_and_look_ups_stand_natively_too() -> None:
    command = [str(POLDER_DEV), "bench", "kv", "--sizes", "65536", "--procs", "2", "--mib", "1", "--rounds", "1"]
    done = subprocess.run([*command, "--alone", "--json"], stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    ours = [f"{kind}{sums}" for kind in ("coherent", "software") for sums in ("", " checksum")]
    blocks = {(row["case"], row["metric"]) for row in rows if row.get("peer") == "floor"}
    assert blocks == {
        (f"{what} 64 KiB 2 procs {cache}", metric)
        for what in ("put", "get")
        for cache in ours
        for metric in ("CPU", "time")
    }
    asked = {row["case"] for row in rows if row["case"].startswith("look-up")}
    assert asked == {
        f"look-up of 1000 keys {what} {kind} {hosts} hosts {way}"
        for what in ("hit", "miss")
        for kind in ("coherent", "software")
        for hosts in (2, 16)
        for way in ("through Python", "natively")
    }
    for row in rows:
        assert 0 < row["low"] <= row["value"] <= row["high"], row
