"""The torch backend, against gloo."""

import collections
import importlib
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Ranks, torchrun

import polder

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

MINE = f"polder-{os.getuid()}-"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def left_behind() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(MINE)}


def test_more_emulated_hosts_than_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = importlib.import_module("polder.torch.meeting")
    for name, value in [("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2"), ("POLDER_EMULATE", "65")]:
        monkeypatch.setenv(name, value)
    with pytest.raises(polder.ArgumentError, match="POLDER_EMULATE=65: this machine has 2 ranks"):
        meeting.introduction(1, 2)
    monkeypatch.setenv("POLDER_EMULATE", "2")
    assert meeting.introduction(1, 2)["emulated"] == 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_collective_gives_what_gloo_gives(tmp_path: Path, ranks: int) -> None:
    with Ranks("torch_collectives.py", ranks, tmp_path, POLDER_EMULATE="2", POLDER_COHERENCE="software") as run:
        assert [output.splitlines()[-1] for output in run.outputs()] == ["equal"] * ranks
    assert not left_behind()


@pytest.mark.parametrize(("ranks", "hosts"), [(2, 1), (4, 2)])
def test_messages_and_the_rest_of_c10d_give_what_gloo_gives(tmp_path: Path, ranks: int, hosts: int) -> None:
    emulated = {"POLDER_EMULATE": str(hosts), "POLDER_COHERENCE": "software" if hosts > 1 else "coherent"}
    with Ranks("torch_messages.py", ranks, tmp_path, **emulated) as run:
        assert [output.splitlines()[-1] for output in run.outputs()] == ["equal"] * ranks
    assert not left_behind()


@pytest.mark.parametrize(("ranks", "hosts"), [(2, 1), (3, 3)])
def test_lazy_views_strides_and_modes_of_the_program_give_values_and_not_bytes(
    tmp_path: Path, ranks: int, hosts: int
) -> None:
    emulated = {"POLDER_EMULATE": str(hosts), "POLDER_COHERENCE": "software" if hosts > 1 else "coherent"}
    with Ranks("torch_views.py", ranks, tmp_path, **emulated) as run:
        assert [output.splitlines()[-1] for output in run.outputs()] == ["equal"] * ranks
    assert not left_behind()


def test_a_future_is_set_before_its_work_says_that_it_is_over(tmp_path: Path) -> None:
    with Ranks("torch_futures.py", 2, tmp_path) as run:
        assert [output.splitlines()[-1] for output in run.outputs()] == ["equal"] * 2
    assert not left_behind()


def test_compiled_programs_call_the_backend_as_they_are(tmp_path: Path) -> None:
    with Ranks("torch_compiled.py", 2, tmp_path) as run:
        assert [output.splitlines()[-1] for output in run.outputs()] == ["equal"] * 2
    assert not left_behind()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: torch gathers shards there")
def test_shards_on_a_cpu_are_gathered_there_where_no_gpu_is(tmp_path: Path) -> None:
    with Ranks("torch_shards.py", 2, tmp_path) as run:
        assert [output.splitlines()[-1] for output in run.outputs()] == ["equal"] * 2


on_a_gpu_or_its_stand_in = pytest.mark.parametrize(
    "gpu",
    [
        "stand-in",
        pytest.param("real", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: run on one")),
    ],
)


@on_a_gpu_or_its_stand_in
def test_tensors_on_a_gpu_are_carried_through_registered_memory(tmp_path: Path, gpu: str) -> None:
    with Ranks("torch_gpu.py", 2, tmp_path, gpu) as run:
        assert [output.splitlines()[-1] for output in run.outputs()] == ["equal"] * 2
    assert not left_behind()


@on_a_gpu_or_its_stand_in
@pytest.mark.parametrize(("ranks", "hosts"), [(2, 1), (3, 3)])
def test_long_tensors_of_a_gpu_go_through_the_pool(tmp_path: Path, gpu: str, ranks: int, hosts: int) -> None:
    emulated = {"POLDER_EMULATE": str(hosts), "POLDER_COHERENCE": "software" if hosts > 1 else "coherent"}
    with Ranks("torch_gpu_pool.py", ranks, tmp_path, gpu, **emulated) as run:
        assert [output.splitlines()[-1] for output in run.outputs()] == ["equal"] * ranks
    assert not left_behind()


def with_faults(folder: Path, kind: str, **named: str) -> list[tuple[str, str]]:
    """What each rank says of a long tensor of a GPU: how the call ended, and a text."""
    with Ranks("torch_gpu_pool_faults.py", 2, folder, kind, **named) as run:
        said = [output.splitlines()[-1].partition("|") for output in run.outputs()]
    return [(name, text) for name, _, text in said]


def test_ranks_of_a_pool_without_room_for_all_of_them_use_private_memory(scratch: Path, tmp_path: Path) -> None:
    # One rank's place fits.
    polder._core.format(scratch / "pool", "32MiB")
    said = with_faults(tmp_path, "full", POLDER_POOL=str(scratch / "pool"), POLDER_RUN=str(scratch))
    assert [name for name, _ in said] == ["[4.0]"] * 2, said
    told = [text for _, text in said if text != "[]"]
    assert len(told) == 1 and "tensors of a GPU take a longer way, through private memory: " in told[0], said
    with polder.Pool(scratch / "pool", run=scratch) as pool:
        assert not pool.list()


def test_a_long_tensor_of_a_gpu_and_one_of_a_cpu_are_a_mismatch(tmp_path: Path) -> None:
    for name, text in with_faults(tmp_path, "mixed"):
        assert name == "MismatchError", text
        assert "all-reduce of 8388608 bytes (sum of float32)" in text, text
        assert "all-reduce of 8388608 bytes (min of uint8) in the pool" in text, text
    assert not left_behind()


def test_long_tensors_whose_lengths_differ_by_whole_pieces_are_a_mismatch(tmp_path: Path) -> None:
    for name, text in with_faults(tmp_path, "longer"):
        assert name == "MismatchError", text
        assert "of 8388608 bytes" in text and "of 16777216 bytes" in text, text
    assert not left_behind()


def test_a_rank_that_fails_between_two_pieces_gives_the_group_up(tmp_path: Path) -> None:
    assert [name for name, _ in with_faults(tmp_path, "broken")] == ["PeerGaveUpError", "ZeroDivisionError"]
    assert not left_behind()


def test_a_sparse_tensor_in_a_call_that_has_none_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    for name, text in with_faults(tmp_path, "sparse"):
        assert name == "ArgumentError" and ".to_dense()" in text


def test_a_call_of_c10d_is_translated_with_its_type_and_its_reduction() -> None:
    backend = importlib.import_module("polder.torch.backend")
    ops = torch.distributed.ReduceOp
    made = backend._operation("reduce_scatter_tensor", torch.float32, hash(ops(ops.AVG)), 3)
    found = (made.call, made.collective, made.reduction, made.root)
    assert found == ("reduce_scatter_tensor", "reduce-scatter", "avg", 3)
    assert all(backend._operation(call, torch.complex64) for call in backend._COLLECTIVES if "reduce" not in call)
    for dtype, op, problem in (
        (torch.bool, ops.AVG, "bools have no average"),
        (torch.complex64, ops.SUM, "complex64 cannot be combined"),
        (torch.quint8, ops.SUM, "no tensor of type quint8"),
    ):
        with pytest.raises(polder.ArgumentError, match=problem):
            backend._operation("all_reduce", dtype, hash(ops(op)))


class Touched(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the elements that operators of torch give, and not those of views."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        is_of_elements = isinstance(made, torch.Tensor) and not func.is_view
        self.elements += made.numel() if is_of_elements else 0
        # What is asked for one flag looks at all of its argument.
        self.elements += args[0].numel() if is_of_elements and made.numel() == 1 else 0
        return made


def test_columns_are_told_apart_by_their_strides_and_other_outputs_by_a_look_at_each_element() -> None:
    backend = importlib.import_module("polder.torch.backend")
    whole = torch.empty(1000, 64)
    uneven = [whole.view(-1)[at::60] for at in range(60)]
    for outputs in (whole.unbind(1), whole.chunk(5, 1), whole.view(10, 100, 64).unbind(1), uneven, [*whole.t()[::3]]):
        with Touched() as touched:
            backend._expect_apart(list(outputs), "all_gather")
        assert touched.elements == 0, outputs[0].stride()
    # Of two shapes.
    mixed = [*whole[:, ::2].unbind(1), *whole[:, 1::2].split(1, 1)]
    random.Random(0).shuffle(mixed)
    with Touched() as touched:
        backend._expect_apart(mixed, "all_gather")
    assert 0 < touched.elements <= 4 * whole.numel()


def test_outputs_are_refused_exactly_where_two_have_a_byte_in_common() -> None:
    backend = importlib.import_module("polder.torch.backend")
    draw = random.Random(7)
    memory = bytearray(400)
    # The second lies between elements of the first.
    storages = [torch.frombuffer(memory, dtype=torch.int16, offset=shift, count=199) for shift in (0, 1)]
    seen = collections.Counter[bool]()
    for trial in range(4000):
        same = (draw.randrange(1, 4), draw.randrange(1, 4)), (draw.randrange(1, 13), draw.randrange(1, 13))
        outputs: list[Any] = []
        for _ in range(draw.randrange(2, 5)):
            shape, stride = same
            if draw.random() < 0.3:
                shape, stride = (draw.randrange(0, 4), draw.randrange(1, 4)), (draw.randrange(1, 13), stride[1])
            storage = storages[draw.random() < 0.1]
            outputs.append(storage.as_strided(shape, stride, draw.randrange(0, 30)))
        places = [
            [it[at].data_ptr() + byte for at in itertools.product(*map(range, it.shape)) for byte in (0, 1)]
            for it in outputs
        ]
        every = list(itertools.chain(*places))
        try:
            backend._expect_apart(outputs, "all_gather")
            is_refused = False
        except polder.ArgumentError as error:
            is_refused = True
            if named := re.findall(r"outputs (\d+) and (\d+) that", str(error)):
                ((one, other),) = named
                assert set(places[int(one)]) & set(places[int(other)]), (trial, error)
        assert is_refused == (len(set(every)) < len(every)), (trial, outputs)
        seen[is_refused] += 1
    assert min(seen.values()) > 500, seen


def test_registered_memory_is_used_again_when_no_view_of_it_is_left() -> None:
    gpu = importlib.import_module("polder.torch.gpu")
    rooms = [gpu._room(torch.empty(1000)) for _ in range(2)]
    first, second = (room.data_ptr() for room in rooms)
    assert first != second
    view = rooms[0][10:].view(torch.int32)
    del rooms
    third = gpu._room(torch.empty(10, 100))
    assert (third.data_ptr(), third.shape) == (second, (10, 100))
    del view
    assert gpu._room(torch.empty(900)).data_ptr() == first
    gpu.forget()


def test_polder_carries_one_device_of_a_group_and_another_backend_the_other(tmp_path: Path) -> None:
    with Ranks("torch_mixed.py", 2, tmp_path, "gloo") as run:
        assert [output.splitlines()[-1] for output in run.outputs()] == ["equal"] * 2
    assert not left_behind()


def test_torch_itself_never_calls_a_work_completed_that_came_from_python() -> None:
    # What docs/torch.md says of is_completed() in a group of several backends: here without Polder, around gloo.
    import torch.distributed as dist

    made: list[Any] = []

    class AroundGloo(torch._C._distributed_c10d.Backend):
        def __init__(self, options: Any) -> None:
            super().__init__(options.group_rank, options.group_size)
            self.gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
            made.append(self)

        def getBackendName(self) -> str:
            return "around_gloo"

        def allreduce(self, tensors: Any, options: Any) -> Any:
            self.work = self.gloo.allreduce(tensors, options)
            return self.work

    dist.Backend.register_backend(
        "around_gloo", lambda options, _: AroundGloo(options), extended_api=True, devices=["cpu"]
    )
    for backend, is_told in (("gloo", True), ("around_gloo", False)):
        dist.init_process_group(f"cpu:{backend},cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            work = dist.all_reduce(torch.ones(2), async_op=True)
            work.wait()
            assert work.is_completed() == is_told, backend
            assert work.get_future().done()
        finally:
            dist.destroy_process_group()
    assert made[0].work.is_completed()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs here: NCCL needs one for each rank")
def test_polder_carries_tensors_on_the_cpu_beside_nccl(tmp_path: Path) -> None:
    with Ranks("torch_mixed.py", 2, tmp_path, "nccl") as run:
        assert [output.splitlines()[-1] for output in run.outputs()] == ["equal"] * 2


def test_frameworks_compute_the_same_over_polder_and_over_gloo(tmp_path: Path) -> None:
    with Ranks("torch_frameworks.py", 2, tmp_path, POLDER_EMULATE="2") as run:
        outputs = [output.splitlines() for output in run.outputs()]
    assert [output[-1] for output in outputs] == ["equal"] * 2
    if skipped := [line for line in outputs[0] if line.startswith("skipped: ")]:
        pytest.skip("; ".join(skipped))
    assert not left_behind()


@pytest.mark.parametrize("operation", ["receive", "receive from any rank", "send", "all-to-all", "gather"])
def test_a_rank_that_dies_while_another_waits_for_it_is_named_with_the_operation(
    tmp_path: Path, operation: str
) -> None:
    with Ranks("torch_waiting.py", 2, tmp_path, operation, POLDER_EMULATE="2") as run:
        survivor, killed = run.processes
        assert survivor.stdout
        assert survivor.stdout.readline() == "going\n"
        killed.kill()
        output = survivor.communicate(timeout=20)[0]
        assert output.startswith(f"1 1 {killed.pid}|rank 1 (host 1, pid {killed.pid}) died"), output
        assert operation in output


def test_errors_in_a_group_of_some_ranks_name_the_rank_of_the_job(tmp_path: Path) -> None:
    with Ranks("torch_subgroup.py", 3, tmp_path, POLDER_EMULATE="2") as run:
        survivor, third, killed = run.processes
        assert survivor.stdout
        assert survivor.stdout.readline() == "going\n"
        killed.kill()
        lines = survivor.communicate(timeout=20)[0].splitlines()
        told = third.communicate(timeout=20)[0].splitlines()[-1]
    kinds = ["PeerDeadError", "BrokenError", "PeerDeadError", "PeerDeadError", "PeerDeadError"]
    assert [line.partition("|")[0] for line in lines] == [f"{kind} 2" for kind in kinds], lines
    assert all(line.count("rank 1 of this group is rank 2 of the job") == 1 for line in lines), lines
    # The survivor left the group of these two because of the death.
    assert told.startswith(f"PeerDeadError 2 {killed.pid}|host 1 pid {killed.pid} died or stopped: "), told
    assert told.count(f"host 1 pid {killed.pid} is rank 2 of the job") == 1, told


@pytest.mark.parametrize(("ranks", "hosts"), [(2, 1), (4, 2)])
def test_ddp_trains_to_the_same_weights_as_over_gloo(tmp_path: Path, ranks: int, hosts: int) -> None:
    with Ranks("torch_ddp.py", ranks, tmp_path, POLDER_EMULATE=str(hosts)) as run:
        assert [output.splitlines()[-1] for output in run.outputs()] == ["equal"] * ranks
    assert not left_behind()


def test_every_rank_is_told_that_a_named_pool_is_not_there_and_none_is_made(tmp_path: Path) -> None:
    mistyped = tmp_path / "po l"
    with Ranks("torch_endless.py", 2, tmp_path / "meet", POLDER_POOL=str(mistyped)) as run:
        first, second = [process.communicate(timeout=60)[0].splitlines()[-1] for process in run.processes]
    assert not mistyped.exists()
    remedy = f"{mistyped}: there is no pool; make one with `polder pool format --pool '{mistyped}' --size 1GiB`"
    assert first.startswith(f"polder.errors.RegionError: {remedy}"), first
    assert second.startswith("polder.errors.RegionError: rank 0 could not make the pool: "), second


@pytest.mark.parametrize(
    ("kind", "culprit", "error", "cause"),
    [
        ("settings", 0, "SettingsError", "meet the others: "),
        ("attach", 0, "RegionError", "attach the pool: the device is gone"),
        ("odd", 1, "PolderError", "attach the pool: ZeroDivisionError: by a bug"),
        ("join", 1, "PoolFullError", "join the group: the pool is full"),
    ],
)
def test_a_failed_init_is_told_to_every_rank_and_leaves_nothing_open(
    tmp_path: Path, kind: str, culprit: int, error: str, cause: str
) -> None:
    # Whoever is not told waits for 600 s, and for longer than `outputs` does.
    with Ranks("torch_failing.py", 2, tmp_path, kind, free_port()) as run:
        outputs = [output.splitlines()[-1].split("|") for output in run.outputs()]
    for rank, (name, is_ours, text, attached) in enumerate(outputs):
        assert (name, is_ours, attached) == (error, "True", "{}"), outputs
        if rank != culprit:
            assert f"rank {culprit} could not {cause}" in text, text
    assert not left_behind()


def test_ranks_that_make_their_groups_in_another_order_do_not_mix(tmp_path: Path) -> None:
    with Ranks("torch_order.py", 3, tmp_path) as run:
        outputs = run.outputs()
    expected = "rank 0 makes a group of the ranks [0, 1] where rank 2 makes one of [0, 2]; call new_group on all ranks"
    assert [expected in output for output in outputs] == [True, False, True], outputs
    assert not left_behind()


@pytest.mark.parametrize(("kind", "error"), [("hosts", "ArgumentError"), ("files", "RegionError")])
def test_ranks_of_two_machines_without_a_common_pool_are_told_both_hosts_and_the_path(
    scratch: Path, tmp_path: Path, kind: str, error: str
) -> None:
    path = scratch / "pool"
    polder._core.format(path, "256MiB")
    named = {"POLDER_POOL": str(path), "POLDER_RUN": str(scratch)} if kind == "files" else {}
    # Whoever is not told waits for 600 s.
    with Ranks("torch_failing.py", 2, tmp_path, kind, free_port(), **named) as run:
        outputs = [output.splitlines()[-1].split("|") for output in run.outputs()]
    for name, is_ours, text, attached in outputs:
        assert (name, is_ours, attached) == (error, "True", "{}"), outputs
        assert "node0" in text and "node1" in text and "POLDER_POOL" in text, text
        assert (str(path) if kind == "files" else "/dev/shm/polder-") in text, text


def test_a_trace_has_every_collective_of_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    # torch's PowerSGD waits for a GPU where there is one, also of tensors on CPUs, and fails.
    with Ranks("torch_callbacks.py", 2, tmp_path / "run", POLDER_TRACE=str(path), CUDA_VISIBLE_DEVICES="") as run:
        run.outputs()
    events = json.loads(path.read_text().removesuffix(",\n") + "]")
    names = [{event["name"] for event in events if event["pid"] == rank} for rank in range(2)]
    assert names[0] == names[1] >= {"all-reduce", "barrier", "broadcast", "all-gather"}, names
    assert all(event["ph"] == "X" and event["dur"] > 0 and event["args"]["bytes"] >= 0 for event in events)
    assert [event["args"]["error"] for event in events if "error" in event["args"]], "one timed out"


def test_a_trace_that_cannot_be_written_ends_with_a_warning_and_the_job_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Ranks("torch_trace.py", 2, tmp_path / "run", "full", POLDER_TRACE=str(path)) as run:
        for output in run.outputs():
            *said, end = output.splitlines()
            assert end == "equal" and said == [f"polder: POLDER_TRACE={path}: File too large; the trace ends here"]
    events = json.loads(path.read_text().removesuffix(",\n") + "]")
    assert [sum(event["name"] == name for event in events) for name in ("all-reduce", "barrier")] == [2, 2]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("link", "it is a link, which is not followed"),
        ("pipe", "No such device or address"),
        ("folder", "Is a directory"),
        ("nowhere", "No such file or directory"),
    ],
)
def test_a_trace_goes_into_no_link_and_no_pipe(tmp_path: Path, kind: str, reason: str) -> None:
    path, other = tmp_path / "trace.json", tmp_path / "other"
    other.write_text("kept")
    made = {"link": lambda: path.symlink_to(other), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}
    made.get(kind, lambda: None)()
    named = path / "deeper" if kind == "nowhere" else path
    with Ranks("torch_trace.py", 2, tmp_path / "run", "", POLDER_TRACE=str(named)) as run:
        warning = f"polder: POLDER_TRACE={named}: {reason}; this process is not traced"
        assert [output.splitlines() for output in run.outputs()] == [[warning, "equal"]] * 2
    assert other.read_text() == "kept"


def test_a_rank_that_ends_while_the_others_meet_is_told_as_a_lost_store(tmp_path: Path) -> None:
    with Ranks("torch_failing.py", 2, tmp_path, "ends", free_port()) as run:
        outputs = [process.communicate(timeout=120)[0].splitlines()[-1].split("|") for process in run.processes[1:]]
    for rank, (name, is_ours, text, attached) in enumerate(outputs, 1):
        assert (name, is_ours, attached) == ("PolderError", "True", "{}"), outputs
        assert f"rank {rank} lost the c10d store while it waited for rank 0" in text, text


def test_callbacks_may_wait_for_collectives(tmp_path: Path) -> None:
    with Ranks("torch_callbacks.py", 2, tmp_path, CUDA_VISIBLE_DEVICES="") as run:
        assert [output.splitlines()[-1] for output in run.outputs()] == ["equal"] * 2
    assert not left_behind()


def test_a_job_says_once_at_info_which_pool_and_memory_it_runs_over(tmp_path: Path) -> None:
    code = (
        "import logging, torch.distributed as dist, polder.torch\n"
        "logging.basicConfig(level='INFO')\n"
        f"dist.init_process_group('polder', init_method='file://{tmp_path}/meet', rank=0, world_size=1)\n"
        "dist.new_group([0])\n"
        "dist.destroy_process_group()\n"
    )
    environment = {**os.environ, "POLDER_COHERENCE": "software"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("INFO:polder.torch:")]
    assert "torch.distributed runs over /dev/shm/polder-" in line
    assert "(made for this job, software memory) as host 0" in line


@pytest.mark.parametrize("device", ["cpu", "stand-in"])
def test_a_killed_rank_is_named_and_the_next_start_cleans_up(tmp_path: Path, device: str) -> None:
    launcher = {"TORCHELASTIC_RUN_ID": "none"} if device == "cpu" else {}
    with Ranks("torch_endless.py", 2, tmp_path, device, **launcher) as run:
        survivor, killed = run.processes
        assert survivor.stdout
        assert survivor.stdout.readline() == "going\n"
        killed.send_signal(signal.SIGKILL)
        began = time.monotonic()
        output = survivor.communicate(timeout=20)[0]
        assert time.monotonic() - began < 10
        assert output.splitlines()[-1] == f"PeerDeadError {killed.pid}", output
        assert ("; see that rank's output for the reason; torchrun ends this rank too" in output) == bool(launcher)
    with Ranks("torch_endless.py", 2, tmp_path / "all-killed", device) as run:
        assert run.processes[0].stdout
        assert run.processes[0].stdout.readline() == "going\n"
        for process in run.processes:
            process.kill()
        for process in run.processes:
            process.wait()
        assert left_behind()
    with Ranks("torch_ddp.py", 2, tmp_path / "next") as run:
        run.outputs()
    assert not left_behind()


def test_a_rank_that_dies_in_a_backward_pass_is_named_by_the_error_of_the_others(tmp_path: Path) -> None:
    with Ranks("torch_backward.py", 2, tmp_path, POLDER_EMULATE="2") as run:
        survivor, killed = run.processes
        output = survivor.communicate(timeout=60)[0]
        assert killed.wait(20) == -signal.SIGKILL
        assert f"rank 1 (host 1, pid {killed.pid}) died" in output.splitlines()[-1], output
    with Ranks("torch_ddp.py", 2, tmp_path / "next") as run:
        run.outputs()
    assert not left_behind()


def test_ranks_follow_the_coherence_of_a_named_pool_and_another_is_refused(scratch: Path, tmp_path: Path) -> None:
    named = {"POLDER_POOL": str(scratch / "pool"), "POLDER_RUN": str(scratch)}
    polder._core.format(scratch / "pool", "256MiB", coherence="software")
    with Ranks("torch_ddp.py", 2, tmp_path, POLDER_LOG="info", **named) as run:
        for output in run.outputs():
            assert "coherence=Software" in output, output
    with Ranks("torch_failing.py", 2, tmp_path, "kept", free_port(), POLDER_COHERENCE="coherent", **named) as run:
        outputs = [output.splitlines()[-1].split("|") for output in run.outputs()]
    for name, _, text, attached in outputs:
        assert (name, attached) == ("SettingsError", "{}"), outputs
        assert "was formatted with --coherence software, and coherent is set here" in text, text


def test_two_jobs_on_one_named_pool_do_not_meet(scratch: Path, tmp_path: Path) -> None:
    named = {"POLDER_POOL": str(scratch / "pool"), "POLDER_RUN": str(scratch)}
    with polder.Pool(scratch / "pool", size="256MiB", run=scratch):
        pass
    with (
        Ranks("torch_ddp.py", 2, tmp_path / "one", **named) as one,
        Ranks("torch_ddp.py", 2, tmp_path / "two", **named) as two,
    ):
        for run in (one, two):
            assert [output.splitlines()[-1] for output in run.outputs()] == ["equal"] * 2
    assert os.listdir(scratch) == ["pool"]


def test_a_job_takes_the_host_id_that_the_keeper_has_given_this_machine(scratch: Path, tmp_path: Path) -> None:
    path = scratch / "pool"
    command = [Path(sys.executable).with_name("polder"), "--pool", path]
    subprocess.run([*command, "pool", "format", "--size", "256MiB"], check=True)
    with subprocess.Popen([*command, "keeper", "--ids", "keeper"], stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout
            assert "runs" in running.stdout.readline()
            with polder.Pool(path, host=1, run=scratch) as pool:
                with Ranks("torch_ddp.py", 2, tmp_path, POLDER_POOL=str(path), POLDER_RUN=str(scratch)) as run:
                    assert [output.splitlines()[-1] for output in run.outputs()] == ["equal"] * 2
                assert [host["host"] for host in pool.stat()["hosts"]] == [1]
        finally:
            running.kill()


def test_an_attach_waits_as_long_as_the_timeout_of_the_group_says(scratch: Path, tmp_path: Path) -> None:
    path = scratch / "pool"
    command = [Path(sys.executable).with_name("polder"), "--pool", path]
    subprocess.run([*command, "pool", "format", "--size", "64MiB"], check=True)
    with subprocess.Popen([*command, "keeper", "--ids", "keeper"], stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout
        assert "runs" in keeper.stdout.readline()
        keeper.kill()
    named = {"POLDER_POOL": str(path), "POLDER_RUN": str(scratch)}
    with Ranks("torch_failing.py", 2, tmp_path, "late", free_port(), **named) as run:
        outputs = [output.splitlines()[-1].split("|") for output in run.outputs()]
    for name, _, text, attached in outputs:
        assert (name, attached) == ("MembershipError", "{}"), outputs
        # Of the 4 s of the group, a quarter is left to tell the others.
        assert "no keeper answered within 3000 ms" in text, text


def test_torchrun_restarts_a_job_that_lost_a_rank() -> None:
    ended = torchrun("torch_restart.py")
    assert sorted(ended.stdout.split()) == ["attempt-1-rank-0", "attempt-1-rank-1"]
    assert "PeerDeadError" in ended.stderr
    assert not left_behind()


def test_a_program_names_the_backend_without_an_import_of_it(tmp_path: Path) -> None:
    with Ranks("torch_named.py", 2, tmp_path) as run:
        assert [output.splitlines()[-1] for output in run.outputs()] == ["ProcessGroupPolder 2"] * 2
    assert not left_behind()


def test_without_torch_or_matplotlib_the_error_says_what_to_install() -> None:
    program = """if True:
        import runpy, sys
        sys.modules |= {"torch": None, "matplotlib": None}
        for module in ("torch", "weights", "offload", "figures"):
            try:
                runpy.run_module(f"polder.{module}", {}, "__main__")
            except (ImportError, SystemExit) as error:
                print(error)
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    commands = [line.rsplit(": ", 1)[1] for line in ended.stdout.splitlines()]
    assert commands == [*["pip install 'torch>=2.12,<2.16'"] * 3, "pip install 'matplotlib>=3.9'"]
