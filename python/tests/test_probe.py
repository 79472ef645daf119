"""What ``polder probe`` measures in Python."""

import json
import subprocess
import sys

import pytest

from polder import probe

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_run_and_reach_something(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "WEIGHTS", 64 << 10)
    monkeypatch.setattr(probe, "SAMPLE", 1e-4)
    kernels = probe.kernels(
        torch.device("cpu"), getattr(torch, dtype), [16, 32], [8 << 10], 1 << 10, heads=2, length=32
    )
    timed = probe.samples([kernel.call for kernel in kernels], 2)
    reached = probe.reached([kernel.what() for kernel in kernels], [min(times) for times in timed])
    products, moved = reached["products"], reached["moved"]
    launch, attention = reached["launch_s"], reached["attention"]
    assert isinstance(products, list)
    assert isinstance(moved, list)
    assert isinstance(launch, float)
    assert isinstance(attention, float)
    # Two operations for each of side ** 3; two norms, an activation four times as wide and two sums; an optimizer.
    assert [size for size, _ in products] == [2 * 16**3, 2 * 32**3]
    assert [size for size, _ in moved] == [18 / 5 * (8 << 10), 7 * 4 * (1 << 10)]
    assert all(rate > 0 for _, rate in [*products, *moved])
    assert launch > 0
    assert attention > 0


def test_the_program_prints_what_all_cores_do_at_once() -> None:
    program = [sys.executable, "-m", "polder.probe", "--samples", "3"]
    done = subprocess.run(program, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found["library"].startswith("torch ")
    core = found["core"]
    assert len(core["products"]) == len(probe.ON_A_CORE[0])
    assert len(core["moved"]) == len(probe.ON_A_CORE[1]) + 1
    assert core["straggle"] >= 0 and found["noise"] >= 0
