"""The parameter service: against DDP, and when processes die."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Ranks
from test_torch import left_behind, on_a_gpu_or_its_stand_in

import polder
from polder import _core, proxy

pytest.importorskip("torch")
pytestmark = pytest.mark.torch
EXAMPLE = Path(__file__).parents[2] / "examples" / "coarse.py"


def soon(what: Callable[[], bool]) -> None:
    """Waits until something is so; the test's own limit is the deadline."""
    until = time.monotonic() + 60
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


def proxies_of(folder: Path) -> list[int]:
    """The pids of the proxies, once a worker has written them down."""
    soon(lambda: all((folder / f"pids-{rank}").exists() for rank in range(2)))
    soon(lambda: len((folder / "pids-0").read_text().split()) == 2)
    return [int(pid) for pid in (folder / "pids-0").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def endless(tmp_path: Path) -> Ranks:
    environment = {"POLDER_EMULATE": "2", "POLDER_COHERENCE": "software"}
    return Ranks("torch_service.py", 2, tmp_path, "endless", **environment)


def test_weights_are_those_of_ddp_bit_for_bit_and_sums_ran_in_the_proxies(tmp_path: Path) -> None:
    environment = {"POLDER_EMULATE": "2", "POLDER_COHERENCE": "software"}
    with Ranks("torch_service.py", 2, tmp_path, "equal", **environment) as run:
        assert [output.splitlines()[-1] for output in run.outputs()] == ["equal"] * 2
    assert not left_behind()


EMULATED = {"POLDER_EMULATE": "2", "POLDER_COHERENCE": "software"}


@pytest.mark.parametrize(
    ("kind", "ranks", "said", "environment"),
    [
        ("ddp", 2, "equal", EMULATED),
        ("four", 4, "equal", {}),
        ("overlap", 2, "overlapped", EMULATED),
        ("proxy-death", 2, "equal", EMULATED),
        ("replan", 2, "equal", {}),
        ("central", 2, "equal", EMULATED),
        ("windows", 2, "equal", EMULATED),
        ("mixed", 2, "equal", EMULATED),
        ("large", 2, "equal", EMULATED),
        ("sharded", 2, "equal", EMULATED),
        ("sharded-death", 2, "equal", {}),
        ("held", 2, "equal", EMULATED),
        ("held-clipped", 2, "equal", EMULATED),
        ("held-early", 2, "equal", EMULATED),
        ("held-misused", 2, "equal", EMULATED),
        ("misused", 2, "equal", {}),
        ("held-death", 2, "equal", EMULATED),
    ],
    ids=[
        "ddp_with_accumulation_clipping_ties_groups_a_scheduler_autocast_checkpoints_and_unused_parameters",
        "four_workers_add_in_a_fixed_order",
        "sums_run_in_the_proxies_while_the_backward_pass_runs",
        "proxies_that_are_killed_leave_their_tensors_to_the_workers",
        "links_that_change_change_the_plan",
        "one_central_server_sums_whole_tensors",
        "shards_take_turns_in_windows_that_are_smaller_than_all_gradients",
        "parameters_of_two_types_in_one_model",
        "gradients_of_16_bits_whose_sum_is_too_large_for_them",
        "proxies_average_what_fsdp2_shards",
        "proxies_of_fsdp2_that_are_killed_leave_the_rest_to_the_workers",
        "an_optimizer_on_the_proxies_has_the_bits_of_the_workers_own",
        "gradients_on_the_proxies_are_clipped_and_unscaled_with_the_bits_of_the_workers_own",
        "a_forward_pass_that_begins_before_all_parameters_have_come_computes_with_the_same_weights",
        "what_the_proxies_would_undo_or_have_done_otherwise_is_refused_and_what_helps_helps",
        "what_would_step_with_the_gradients_of_one_worker_alone_is_refused_by_name",
        "other_proxies_take_over_the_optimizer_of_one_that_is_killed",
    ],
)
def test_weights_are_those_of_ddp(
    kind: str, ranks: int, said: str, environment: dict[str, str], tmp_path: Path
) -> None:
    with Ranks("torch_service.py", ranks, tmp_path, kind, **environment) as run:
        assert [output.splitlines()[-1] for output in run.outputs()] == [said] * ranks
    assert not left_behind()


def test_what_the_service_does_not_carry_is_refused_by_name(tmp_path: Path) -> None:
    with Ranks("torch_service.py", 1, tmp_path, "refused") as run:
        lines = run.outputs()[0].splitlines()
    expected = [
        "DDP has a communication hook already",
        "a parameter of shape (2, 2) and torch.complex64 on cpu",
        "the model has sparse gradients",
        "FSDP2 shards over a mesh of shape (1,) with the ranks [0]",
        "some parameters are DTensors; the service carries plain ones, and those of FSDP2",
        "a parameter of shape (2,) is not sharded",
        "the model has no parameters to train",
        "the optimizer has no parameter of the model",
        "attach got a Linear and a Linear; give a Module and its Optimizer",
        "another ParameterService averages parameters of the model already",
        "attached",
        "the optimizer is RMSprop; proxies carry torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW",
        "group 0 of the optimizer has amsgrad",
        "the optimizer has 1 parameters, the model trains 2",
        "DDP keeps all gradients",
        "FSDP2 shards gradients and state",
        "a parameter of torch.float64",
        "split 0.5 and overlap True with the optimizer on the proxies",
        "split is 'a'; give a number from 0 to 1",
        "shard_bytes is 0; give a whole number of bytes from 1 on",
        "2 emulated links for 1 proxies; give one each",
        *["the optimizer's parameters have done [0, 1] steps, and proxies carry one number"] * 2,
        "split 0.5 and overlap True with the optimizer on the proxies",
    ]
    assert len(lines) == len(expected), lines
    assert all(part in line for part, line in zip(expected, lines, strict=True)), lines


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("sharded-twice", "the FSDP2 module layers.3 reduces gradients twice in a backward pass"),
        ("sharded-unused", "the FSDP2 module spare got no gradients in this step"),
    ],
)
def test_groups_of_fsdp2_that_come_twice_or_never_are_refused(kind: str, expected: str, tmp_path: Path) -> None:
    with Ranks("torch_service.py", 2, tmp_path, kind) as run:
        assert all(expected in output for output in run.outputs())
    assert not left_behind()


@on_a_gpu_or_its_stand_in
@pytest.mark.parametrize("hosts", [1, 2])
def test_gradients_on_a_gpu_have_the_weights_of_a_cpu(tmp_path: Path, gpu: str, hosts: int) -> None:
    environment = {} if hosts == 1 else EMULATED
    with Ranks("torch_service_gpu.py", 2, tmp_path, gpu, **environment) as run:
        assert [output.splitlines()[-1] for output in run.outputs()] == ["equal"] * 2
    assert not left_behind()


def test_gradients_are_carried_by_their_values_or_refused_by_name(tmp_path: Path) -> None:
    with Ranks("torch_service.py", 2, tmp_path, "gradients") as run:
        for output in run.outputs():
            assert "the parameter service got elements of torch.bfloat16 where torch.float32 belong" in output, output
    assert not left_behind()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("proxies", "a", "a whole number from 1 to 1024"),
        ("proxies", 1025, "a whole number from 1 to 1024"),
        ("proxies", True, "a whole number from 1 to 1024"),
        ("profile_steps", 2.5, "a whole number from 2 on"),
        ("profile_steps", None, "a whole number from 2 on"),
        ("replan_steps", -1, "a whole number from 0 on"),
        ("timeout", float("nan"), "seconds from 1e-9 to 1e9"),
        ("timeout", None, "seconds from 1e-9 to 1e9"),
        ("split", 1.5, "a number from 0 to 1"),
        ("shard_bytes", 0, "a whole number of bytes from 1 on"),
        ("overlap", "no", "True or False"),
        ("first_layers_first", None, "True or False"),
        ("snapshots", 5, "text"),
        ("emulated", 1e9, "EmulatedLinks or None"),
        ("emulated", [(0.0, 0.0)], "bytes a second from 1 to 1e18"),
        ("emulated", [1e9], "bytes a second from 1 to 1e18"),
    ],
)
def test_a_number_that_the_service_cannot_use_is_refused_by_name(name: str, value: Any, expected: str) -> None:
    from polder.torch import EmulatedLinks, ParameterService

    given = EmulatedLinks(value, 1e9) if isinstance(value, list) else value
    with pytest.raises(polder.errors.ArgumentError) as refused:
        ParameterService(**{name: given})
    assert str(refused.value).startswith(f"{name} is {given!r}; give "), refused.value
    assert expected in str(refused.value)


def test_going_on_after_a_death_is_refused_where_one_agent_of_torchrun_has_all_workers(tmp_path: Path) -> None:
    with Ranks("torch_service.py", 2, tmp_path, "shrink-refused", TORCHELASTIC_RUN_ID="none") as run:
        for output in run.outputs():
            assert 'on_death is "shrink" in a job of one torchrun agent, which ends all workers' in output
    assert not left_behind()


def test_numbers_of_numpy_and_those_that_are_left_out_are_taken() -> None:
    from polder.torch import ParameterService

    numbers = {"proxies": np.int64(2), "timeout": np.float32(2), "split": 1, "shard_bytes": None}
    # Only then is the group missed.
    with pytest.raises(polder.errors.ArgumentError, match="there is no process group"):
        ParameterService(**numbers)


def test_a_worker_that_dies_is_named_and_the_proxies_end(tmp_path: Path) -> None:
    with endless(tmp_path) as run:
        proxies = proxies_of(tmp_path)
        run.processes[1].kill()
        output = run.processes[0].communicate(timeout=60)[0]
        error, pid, text = next(line for line in output.splitlines() if "|" in line).split("|")
        assert (error, pid) == ("PeerDeadError", str(run.processes[1].pid)), output
        assert f"rank 1 (host 1, pid {run.processes[1].pid}) died" in text
        soon(lambda: not any(map(is_running, proxies)))
    assert not left_behind()


def named_pool(scratch: Path) -> dict[str, str]:
    """Makes a pool that outlives a job, and names it."""
    with polder.Pool(scratch / "pool", size="256MiB", run=scratch):
        return {"POLDER_POOL": str(scratch / "pool"), "POLDER_RUN": str(scratch)}


def test_a_snapshot_has_the_state_that_the_proxies_keep(tmp_path: Path, scratch: Path) -> None:
    with Ranks("torch_service.py", 2, tmp_path, "held-snapshot", **named_pool(scratch)) as run:
        assert [output.splitlines()[-1] for output in run.outputs()] == ["equal"] * 2
    assert not left_behind()


def test_a_snapshot_is_restored_with_another_number_of_proxies(tmp_path: Path, scratch: Path) -> None:
    """They keep an optimizer's state, in other parts each time."""
    pool = named_pool(scratch)
    for start, proxies in enumerate((2, 1, 3)):
        with Ranks("torch_service.py", 2, tmp_path / str(start), f"held-proxies-{proxies}", **pool) as run:
            assert [output.splitlines()[-1] for output in run.outputs()] == [f"{2 * start} equal"] * 2
    assert not left_behind()


@pytest.mark.parametrize("kind", ["shrink", "shrink-held"], ids=["optimizer_on_workers", "optimizer_on_proxies"])
def test_when_a_worker_is_killed_the_others_go_on_as_a_group_of_their_size_does(
    kind: str, tmp_path: Path, scratch: Path
) -> None:
    with Ranks("torch_service.py", 3, tmp_path, kind, **named_pool(scratch)) as run:
        outputs = [process.communicate(timeout=120)[0] for process in run.processes]
        assert [process.returncode for process in run.processes] == [0, -signal.SIGKILL, 0], "\n".join(outputs)
        assert [outputs[rank].splitlines()[-1] for rank in (0, 2)] == ["equal"] * 2
    assert not left_behind()


@pytest.mark.parametrize("kind", ["shrink-two", "shrink-meanwhile"])
def test_workers_that_lose_two_of_them_go_on_in_one_group(kind: str, tmp_path: Path, scratch: Path) -> None:
    with Ranks("torch_service.py", 4, tmp_path, kind, **named_pool(scratch)) as run:
        outputs = [process.communicate(timeout=120)[0] for process in run.processes]
        codes = [process.returncode for process in run.processes]
        assert codes == [0, -signal.SIGKILL, 0, -signal.SIGKILL], "\n".join(outputs)
        assert [outputs[rank].splitlines()[-1] for rank in (0, 2)] == ["equal"] * 2
    assert not left_behind()


def test_top_shows_what_workers_wait_for_and_which_proxies_live(tmp_path: Path) -> None:
    with endless(tmp_path) as run:
        proxies = proxies_of(tmp_path)
        command = [Path(sys.executable).with_name("polder"), "top", "sync", "--once", "--pool"]
        command.append((tmp_path / "pool").read_text())
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "2 of 2 proxies alive" in text, text
        assert all(f"pid {pid}: alive" in text for pid in proxies), text
        ended = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
        (service,) = json.loads(ended.stdout)
        assert [worker["pid"] for worker in service["workers"]] == [process.pid for process in run.processes]
        assert [proxy["pid"] for proxy in service["proxies"]] == proxies
        worker = service["workers"][0]
        assert worker["steps"] > 2
        assert worker["blocked_ns"] > 0
        assert 0 < worker["proxied_bytes"] <= worker["total_bytes"]
        for process in run.processes:
            process.kill()
        # A killed worker may hold the lock of the pool until the proxies have ended. Then the next job removes it.
        soon(lambda: not any(map(is_running, proxies)))


def test_proxies_do_not_survive_the_sigkill_of_their_workers(tmp_path: Path) -> None:
    with endless(tmp_path) as run:
        proxies = proxies_of(tmp_path)
        for process in run.processes:
            process.kill()
        soon(lambda: not any(map(is_running, proxies)))


def test_a_parameter_without_a_gradient_is_an_error_and_no_hang(tmp_path: Path) -> None:
    with Ranks("torch_service.py", 2, tmp_path, "missing") as run:
        for output in run.outputs():
            error, _, text = next(line for line in output.splitlines() if "|" in line).split("|")
            assert error == "ArgumentError"
            assert text.startswith("2 of 8 parameters got no gradient in this step"), text
    assert not left_behind()


def test_a_proxy_without_its_workers_says_so_in_one_line(scratch: Path) -> None:
    with polder.Pool(scratch / "pool", size="64MiB", run=scratch):
        command = [sys.executable, "-m", "polder.proxy", "--pool", scratch / "pool", "--host", "1", "--service", "/s"]
        command += ["--proxy", "0", "--proxies", "1", "--clients", "1", "--timeout", "0.2"]
        environment = {**os.environ, "POLDER_RUN": str(scratch)}
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert ended.returncode == 1
    assert ended.stderr.startswith("proxy 0 (pid "), ended.stderr
    assert "PeerTimeoutError: rank 0 has not come to group /s within 200 ms" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_proxy_that_is_interrupted_ends_in_silence_and_leaves_nothing(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    serve = _core.service_proxy

    def interrupted(*arguments: Any, given_up: Callable[[], bool], **options: Any) -> None:
        def interrupt() -> bool:
            # While it waits for its workers, as Ctrl-C finds it.
            signal.raise_signal(signal.SIGINT)
            return given_up()

        serve(*arguments, given_up=interrupt, **options)

    monkeypatch.setattr(_core, "service_proxy", interrupted)
    monkeypatch.setenv("POLDER_RUN", str(scratch))
    path = str(scratch / "pool")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with polder.Pool(path, size="64MiB", run=scratch) as pool:
            command = ["--pool", path, "--service", "/s", "--proxy", "0", "--proxies", "1", "--clients", "1"]
            assert proxy.main([*command, "--host", "1"]) == 130
            assert capfd.readouterr().err == ""
            assert not pool.list()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_plan_takes_whole_tensors_whose_gradients_come_first() -> None:
    # 8 s for 80 bytes by the workers, 4 s by the proxies, and a backward pass of 1 s: m = (1 + 8) / (8/80 + 4/80) = 60.
    links = [(0.0, 20.0), (0.0, 20.0)]
    split, taken = _core.service_split([40, 20, 10, 10], 2, 0.0, 1.0, 20.0, 10.0)
    assert (round(split, 6), taken) == (60.0, 2)
    assert _core.service_split([40, 20, 10, 10], 2, 0.0, 1.0, 20.0, 10.0, part=0.5) == (40.0, 1)
    # Equal links change nothing: there is no threshold, and shards take turns.
    assert _core.service_shards([40, 20], 64, links, 0.2) == (0.0, [(0, 0, 40, 0), (1, 0, 20, 1)])
    anti_local = [(1e-6, 6e9), (3e-6, 12e9)]
    threshold, shards = _core.service_shards([1 << 20, 1 << 10], 1 << 20, anti_local, 0.2)
    assert (round(threshold), [shard[3] for shard in shards]) == (24_000, [1, 0])
    assert _core.service_shard_bytes([(1, 5.0), (2, 9.8), (4, 10.0)], 0.05) == 2
    with pytest.raises(polder.errors.ArgumentError, match="give positive ones"):
        _core.service_split([1], 2, 0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize("options", [[], ["--rate", "100", "--sweep"]], ids=["real_links", "emulated_links"])
def test_the_example_ends_with_a_table_and_equal_weights(options: list[str], tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "words.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    command = [sys.executable, EXAMPLE, "--text", text, "--steps", "2", "--width", "48", "--layers", "1", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "weights  equal bit for bit: 2 workers, 6 ways" in ended.stdout, ended.stdout
    names = ("all-reduce, blocking", "DDP", "central", "service")
    assert len([line for line in ended.stdout.splitlines() if line.startswith(names)]) == 6
    assert "blocked  the service blocks" in ended.stdout
    # The planned m, 11 others, three orders, six sizes of shards.
    steps = [line for line in ended.stdout.splitlines() if line.startswith("  ") and " step " in line]
    assert len(steps) == (20 if options else 0), ended.stdout
    assert ("of the best of 11" in ended.stdout) == bool(options)
