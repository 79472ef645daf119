"""Predicted steps from Python are those of the command, and tables of many those of one."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import polder
from polder import plan

POLDER = Path(sys.executable).with_name("polder")


def test_the_columns_of_a_table_are_the_fields_of_a_layout() -> None:
    fields = {field.name: field.type for field in dataclasses.fields(plan.Layout)}
    within = {
        name: dataclasses.fields(of)
        for name, of in fields.items()
        if isinstance(of, type) and of not in (int, bool, str)
    }
    flat = [f"{name}_{it.name}" for name in fields if name in within for it in within[name]]
    assert [*(name for name in fields if name not in within), *flat] == list(plan._NUMBERS)
    assert {*plan._CHOICES, *plan._LEFT_OUT} <= {*plan._NUMBERS}


def test_a_plan_has_the_fields_and_the_figures_of_the_command() -> None:
    words = "plan train --model llama3-405b --platform nvl72-ndr --gpus 1024 --tp 8 --against nvl72-cxl --json"
    answer = json.loads(subprocess.run([POLDER, *words.split()], capture_output=True, text=True, check=True).stdout)
    ours = plan.train("llama3-405b", "nvl72-ndr", 1024, tp=8, against="nvl72-cxl")
    assert ours == plan._typed(plan.Plan, answer)
    assert ours.against is not None and ours.against.step.total_s < ours.step.total_s
    assert answer.keys() == ours.__dataclass_fields__.keys()
    assert ours.machine == "CPUs attach by c2c; no fabric carries CXL"
    inside, between = ours.fabrics.inside, ours.fabrics.between
    assert inside is not None and between is not None
    assert inside.reached_bytes_per_s < inside.payload_bytes_per_s > between.payload_bytes_per_s
    assert 0 < inside.latency_s < between.latency_s
    assert answer["step"].keys() == ours.step.__dataclass_fields__.keys()
    assert answer["layout"]["overlap"].keys() == ours.layout.overlap.__dataclass_fields__.keys()
    assert answer["step"]["memory"][0].keys() == ours.step.memory[0].__dataclass_fields__.keys()

    def leaves(value: object, at: str = "") -> list[str]:
        if isinstance(value, list):
            value = dict(enumerate(value))
        if not isinstance(value, dict):
            return [at]
        return [leaf for key, inner in value.items() for leaf in leaves(inner, f"{at}.{key}".lstrip("."))]

    # Tiers have names, and gradients are never offloaded.
    none = {"memory.0.tier", "memory.1.tier", "memory.1.gradients_bytes"}
    figures = [leaf for leaf in leaves(answer["step"]) if leaf not in none]
    assert figures == [path for _, path, *_ in plan._OF_STEP]
    assert sum(stage.blocks for stage in ours.stages) == 126
    assert (ours.sequence, ours.rack) == (8192, "nvl72")


def test_flows_are_those_of_the_command() -> None:
    words = (
        "plan train --model llama3-70b --platform nvl72-cxl --gpus 288 --batch 288 --tp 8 --pp 4 --fidelity L1 --json"
    )
    said = json.loads(subprocess.run([POLDER, *words.split()], capture_output=True, text=True, check=True).stdout)
    ours = plan.train("llama3-70b", "nvl72-cxl", 288, batch=288, tp=8, pp=4, fidelity="L1")
    assert ours == plan._typed(plan.Plan, said) and ours.fidelity == "L1"
    with pytest.raises(polder.ArgumentError, match="fidelity: unknown variant `L3`, expected one of `L0`, `L1`, `L2`"):
        plan.train("llama3-70b", "nvl72-cxl", 288, fidelity="L3")
    cut = plan.train("llama3-70b", "nvl72-ndr", 288, batch=288, tp=8, pp=4, fidelity="L1", failed=[(0, 2048)])
    assert cut.failed == [[0, 2048]]
    flits = plan.train("llama3-70b", "nvl72-cxl", 144, batch=144, tp=8, pp=2, fidelity="L2", window=65536)
    alone = plan.train("llama3-70b", "nvl72-cxl", 144, batch=144, tp=8, pp=2)
    assert alone.flits is None and flits.flits and flits.flits.flit_hops > 0
    assert flits.step.total_s == pytest.approx(alone.step.total_s, rel=0.02)
    with pytest.raises(polder.ArgumentError, match=r"flit-hops, more than the .* that are followed; give --window"):
        plan.train("llama3-70b", "nvl72-cxl", 4608, batch=4608, tp=8, pp=4, fidelity="L2")
    with pytest.raises(polder.ArgumentError, match="failed links change flows alone; take fidelity L1"):
        plan.train("llama3-70b", "nvl72-ndr", 288, batch=288, tp=8, pp=4, failed=[(0, 2048)])


def test_an_overlap_is_what_it_names_as_that_of_the_command() -> None:
    cut = "--gpus 64 --batch 64 --tp 8 --cp 2 --pp 2 --overlap data --json"
    words = f"plan train --model llama3-70b --platform dgx-h100 {cut}"
    said = json.loads(subprocess.run([POLDER, *words.split()], capture_output=True, text=True, check=True).stdout)
    overlap = plan.Overlap(data=True)
    ours = plan.train("llama3-70b", "dgx-h100", 64, batch=64, tp=8, cp=2, pp=2, overlap=overlap)
    assert ours == plan._typed(plan.Plan, said)
    assert ours.layout.overlap == overlap and not overlap.context


def test_a_step_is_drawn_from_what_the_command_writes(scratch: Path) -> None:
    words = "plan train --model llama3-70b --platform dgx-h100 --gpus 64 --batch 16 --tp 8 --cp 1 --pp 4 --json --trace"
    printed = subprocess.run([POLDER, *words.split(), scratch / "step.json"], capture_output=True, check=True).stdout
    drawn: list[str] = []
    for name in ("once.svg", "again.svg"):
        command = [sys.executable, "-m", "polder.figures", scratch / name, scratch / "step.json"]
        subprocess.run(command, input=printed, check=True)
        drawn.append((scratch / name).read_text())
    assert drawn[0] == drawn[1], "the same step gives the same file"
    step = json.loads(printed)["step"]
    for text in ("stage 3", "data, between racks", "bubble", f"{step['total_s']:.2f} s a step, simulated"):
        assert text in drawn[0], text
    assert "stage 4" not in drawn[0] and "expert" not in drawn[0]


def test_a_platform_is_drawn_from_its_file(scratch: Path) -> None:
    example = Path(__file__).parents[2] / "docs" / "platform.toml"
    drawn = scratch / "platform.svg"
    subprocess.run([sys.executable, "-m", "polder.figures", drawn, example], check=True)
    for text in (
        "rack.pod: 32 accelerators",
        "attach: pcie-switch",
        "8 links each of 2 lanes at 200 GT/s",
        "memory nodes",
    ):
        assert text in drawn.read_text(), text


def test_access_times_are_those_of_the_command_and_are_drawn(scratch: Path) -> None:
    words = ["plan", "memory", "--platform", "nvl72-cxl", "--against", "nvl72-ndr", "--nodes", "near", "--json"]
    printed = subprocess.run([POLDER, *words], capture_output=True, text=True, check=True).stdout
    answer = json.loads(printed)
    points = answer["points"]
    access, sets = (np.array([point[name] for point in points]) for name in ("access_bytes", "working_set_bytes"))
    table = plan.memory("nvl72-cxl", "nvl72-ndr", nodes="near", access=access, working_set=sets)
    for index, name in enumerate(["baseline_s", "clusters_s", "tiered_s"]):
        seconds = [point["seconds"][index] for point in points]
        assert np.array_equal(table[name], np.array(seconds, dtype=np.float64), equal_nan=True)
    assert np.isnan(table["clusters_s"]).any(), "beyond what accelerators hold"
    assert plan.memory("nvl72-cxl", access=[[64], [4096]], working_set=[1e9, 1e12, 1e13])["tiered_s"].shape == (2, 3)
    drawn: list[str] = []
    for name in ("once.svg", "again.svg"):
        subprocess.run([sys.executable, "-m", "polder.figures", scratch / name], input=printed, text=True, check=True)
        drawn.append((scratch / name).read_text())
    assert drawn[0] == drawn[1], "the same times give the same file"
    for text in ("working set, GB", "mean access time of 64 B, ns", "tiered, nvl72-cxl", "end of rack", "simulated"):
        assert text in drawn[0], text


def test_access_times_of_what_makes_no_sense_are_refused() -> None:
    for given, expected in [
        ({"working_set": 0}, "working_set is 0.0; give bytes above 0"),
        ({"working_set": 1e9, "access": [64, -1]}, r"access is \[64.0, -1.0\]; give bytes above 0"),
        ({"working_set": 1e9, "nodes": "here"}, "nodes: unknown variant `here`, expected `near` or `far`"),
        ({"working_set": 1e9, "accelerators": 0}, "nvl72-cxl: a count of accelerators is 0"),
    ]:
        with pytest.raises(polder.ArgumentError, match=expected):
            plan.memory("nvl72-cxl", **given)


def test_patterns_on_fabrics_are_those_of_the_command() -> None:
    table = plan.fabric("nvl72-cxl", [144, 288], pattern=[["incast"], ["all-reduce"]], message=2**20, fidelity="L1")
    assert table["total_s"].shape == (2, 2)
    command = [POLDER, "plan", "fabric", "--platform", "nvl72-cxl", "--gpus", "288", "--pattern", "all-reduce"]
    done = subprocess.run([*command, "--message", "1MiB", "--json"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert table["total_s"][1, 1] == found["total_s"]
    assert table["p99_s"][1, 1] == found["seconds"]["p99_s"]
    with pytest.raises(polder.ArgumentError, match="pattern: unknown variant `storm`"):
        plan.fabric("nvl72-cxl", 144, pattern="storm")
    with pytest.raises(polder.ArgumentError, match="flows, more than the 4194304"):
        plan.fabric("nvl72-cxl", 10**8)
    # What is left out is what the command takes, a permutation's seed too.
    assert plan.fabric("nvl72-ndr", 144)["total_s"] == said("fabric --platform nvl72-ndr --gpus 144")["total_s"]
    for given, why in (
        ({"message": float("nan")}, "message is nan; give finite numbers"),
        ({"window": float("inf")}, "window is inf; give finite numbers"),
        ({"error_rate": np.float32("nan")}, "error_rate is nan; give finite numbers"),
    ):
        with pytest.raises(polder.ArgumentError, match=f"^{why}$"):
            plan.fabric("nvl72-cxl", 144, fidelity="L2", **given)


def test_every_front_takes_what_flits_need(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {"fidelity": "L2", "error_rate": 0.9}
    trace = traced(tmp_path / "trace")
    network: dict[str, Any] = {
        "latency": 1e-6,
        "bandwidth": 1e9,
        "hosts": 2,
        "platform": "cmpi",
        "path": "tcp-smartnic",
    }
    called = {"collective_name": "alltoall", "dtype": "Float", "in_msg_nelems": 1 << 20, "pg_size": 8}
    empty = {"shapes": [], "types": []}
    attrs = [{"name": it, "value": of} for it, of in called.items()]
    node = {"id": 2, "name": "record_param_comms", "inputs": empty, "outputs": empty, "attrs": attrs}
    Path(tmp_path, "rank-0.json").write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "nodes": [node]}))
    rates: dict[str, Any] = {"compute": 1e9, "memory": 1e9, "launch": 0.0}
    with pytest.raises(polder.ArgumentError, match=r"^.*error rate: expected 0 to 0\.5, found 0\.9$"):
        plan.train("llama3-8b", "dgx-h100", 8, **wrong)
    with pytest.raises(polder.ArgumentError, match=r"^.*error rate: expected 0 to 0\.5, found 0\.9$"):
        plan.mpi(trace, **network, **wrong)
    with pytest.raises(polder.ArgumentError, match=r"^.*error rate: expected 0 to 0\.5, found 0\.9$"):
        plan.chakra(tmp_path, **rates, platform="dgx-h100", **wrong)
    mixed = plan.mixed("llama3-8b", {"nvl72": 8, "ualink": 8}, tp=8, batch=20, **wrong)
    assert "error rate: expected 0 to 0.5, found 0.9" in mixed["reason"][()]
    for flits in ({"virtual_channels": 2}, {"buffer": 64}):
        clean = plan.chakra(tmp_path, **rates, platform="dgx-h100", fidelity="L2", **flits)
        assert clean["communication_s"][0] > 0


def said(words: str) -> Any:
    """What a command of plan prints with --json."""
    done = subprocess.run([POLDER, "plan", *words.split(), "--json"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_inference_is_that_of_the_command() -> None:
    table = plan.inference("nvl72-cxl", "nvl72-ndr", sequences=[64, 4096], context=[[8192], [131072]])
    rows = said("inference --platform nvl72-cxl --against nvl72-ndr --sequences 64,4096 --context 131072")["rows"]
    for at, row in enumerate(rows):
        for name, step in row["steps"].items():
            ours = table[f"{name}_s"][1, at]
            assert np.isnan(ours) if step is None else ours == step["seconds"]
        assert table["set_bytes"][1, at] == row["load"]["set_bytes"] * 72
    table = plan.inference("nvl72-cxl", sequences=8, load="retrieval", serving=8, access=[512, 4096], host=True)
    (row,) = said("inference --platform nvl72-cxl --sequences 8 --load retrieval --serving 8 --host")["rows"]
    assert table["tiered_s"][1] == row["steps"]["tiered"]["seconds"] > table["tiered_s"][0]
    table = plan.inference("nvl72-cxl", sequences=[300, 600], serving=64, fidelity="L1")
    rows = said("inference --platform nvl72-cxl --serving 64 --sequences 300,600 --fidelity L1")["rows"]
    assert table["tiered_s"].tolist() == [row["steps"]["tiered"]["seconds"] for row in rows]
    for given, why in (
        ({"sequences": 1, "window": 2**20}, "fidelity: expected L2, which windows"),
        ({"sequences": 0}, "sequences: expected a number above 0, found 0"),
        ({"sequences": 1.5}, "sequences: invalid type: floating point `1.5`"),
        ({"sequences": 1, "access": float("nan")}, "access is nan; give finite numbers"),
        ({"sequences": 1, "serving": 73}, "serving: expected 1 to 72, the accelerators of a rack, found 73"),
        ({"sequences": 1, "nodes": "up"}, "nodes: unknown variant `up`"),
        ({"sequences": 1, "load": "storm"}, "load: unknown variant `storm`"),
        ({"sequences": 1, "working_set": 1e12}, "set: a step of load kv does not read it"),
        ({"sequences": 1, "load": "embedding", "context": 8}, "context: a step of load embedding does not read it"),
        ({"sequences": 1, "cache": 1e9}, "cache: a step of load kv does not read it"),
    ):
        with pytest.raises(polder.ArgumentError, match=why):
            plan.inference("nvl72-cxl", **given)


def test_hits_of_caches_count_as_in_the_command() -> None:
    table = plan.memory("nvl72-cxl", working_set=[1e12, 10e12], cache=1e9, snoop_filter=100e9, skew=0.9)
    points = said("memory --platform nvl72-cxl --working-set 1TB,10TB --cache 1GB --snoop-filter 100GB --skew 0.9")[
        "points"
    ]
    assert table["tiered_s"].tolist() == [point["seconds"][-1] for point in points]
    plain = plan.memory("nvl72-cxl", working_set=[1e12, 10e12])
    assert (table["tiered_s"] < plain["tiered_s"]).all() and all(0 < point["hits"][-1] < 1 for point in points)
    rows = plan.inference("nvl72-cxl", sequences=4096, load="embedding", cache=1e9, skew=0.9)
    (row,) = said("inference --platform nvl72-cxl --sequences 4096 --load embedding --cache 1GB --skew 0.9")["rows"]
    assert rows["tiered_s"] == row["steps"]["tiered"]["seconds"]


def test_coherent_regions_are_those_of_the_command() -> None:
    table = plan.coherence("nvl72-cxl", region=[[16e6], [4e9]], writes=[0.0, 0.3])
    for at, writes in enumerate((0.0, 0.3)):
        regions = said(f"coherence --platform nvl72-cxl --region 16MB,4GB --writes {writes}")["regions"]
        for column, region in zip(table["hits"][:, at], regions, strict=True):
            assert column == region["rates"]["hits"]
        assert table["coherent_s"][:, at].tolist() == [region["coherent_s"] for region in regions]
        assert table["waited"][:, at].tolist() == [region["rates"]["waited"] for region in regions]
    for platform, given, why in (
        ("nvl72-ndr", {"region": 1e6}, "coherent: expected CXL inside the rack"),
        ("nvl72-cxl", {"region": 1}, "region: expected a line or more, found 0.0"),
        ("nvl72-cxl", {"region": 1e6, "writes": 2.0}, "writes: expected a number from 0 to 1, found 2"),
        ("nvl72-cxl", {"region": 1e6, "skew": 5}, "skew: expected a number from 0 to 4, found 5"),
    ):
        with pytest.raises(polder.ArgumentError, match=why):
            plan.coherence(platform, **given)


def test_a_map_of_two_fabrics_is_that_of_the_command() -> None:
    given = {"gpus": 128, "batch": 512, "between": [25e9, 100e9], "pool": [12.5e9, 50e9], "prices": "watts"}
    table = plan.pays("llama3-8b", **given)
    asked = "pays --model llama3-8b --gpus 128 --batch 512 --prices watts"
    found = said(f"{asked} --between 25GB/s,100GB/s --pool 12.5GB/s,50GB/s")
    cells = found["cells"]
    # A pool of 50 GB/s is held back by a link of 25.
    assert table["times"].shape == (4, 2) and len(cells) == 8
    for name, of in (
        ("against_between", lambda cell: cell["between_bytes_per_s"][1]),
        ("pool", lambda cell: cell["pool_bytes_per_s"]),
        ("total_s", lambda cell: cell["seconds"][0]),
        ("times", lambda cell: cell["times"]),
        ("times_most", lambda cell: cell["range"][1]),
        ("against_energy_j", lambda cell: cell["costs"][0]["step"][1]),
        ("energy_j_times_least", lambda cell: cell["costs"][0]["range"][0]),
    ):
        assert table[name].ravel().tolist() == [of(cell) for cell in cells], name
    is_sure = [1.0 if cell["range"][0] > 1 else 0.0 if cell["range"][1] < 1 else None for cell in cells]
    assert [None if np.isnan(value) else value for value in table["pays"].ravel()] == is_sure
    assert dataclasses.asdict(table["against_layout"][0, 0]) == cells[0]["layouts"][1]
    own = plan.pays("llama3-8b", gpus=128, batch=512)
    assert own["times"].tolist() == [[said("pays --model llama3-8b --gpus 128 --batch 512")["own"]["times"]]]
    for more, why in (
        ({"between": 0.0}, "between is \\[0.0\\]; give bytes a second above 0"),
        ({"pool": 1e9}, "pool: its bandwidths are tried with those of the fabric; give between too"),
        ({"prices": "nowhere"}, "nowhere"),
        ({"against": "nvl72", "between": 1e9}, "nvl72: no fabric joins its racks"),
    ):
        with pytest.raises(polder.ArgumentError, match=why):
            plan.pays("llama3-8b", gpus=64, **more)
    with pytest.raises(TypeError, match="no field of a layout"):
        plan.pays("llama3-8b", gpus=64, tiles=3)


def test_steps_on_racks_of_two_kinds_are_those_of_the_command() -> None:
    table = plan.mixed("llama3-70b", {"nvl72": [144, 288, 145], "ualink": 144}, tp=8, batch=720)
    two = "--platform mixed-nvlink-ualink-cxl,mixed-nvlink-ualink-cxl"
    answer = said(f"train --model llama3-70b {two} --rack nvl72,ualink --gpus 144,144 --tp 8 --pp 1 --batch 720")
    assert table["total_s"][0] == answer["total_s"] and table["even_s"][0] == answer["even_s"]
    for name in ("copies", "sequences", "step_s", "alone_s"):
        assert table[name][0].tolist() == [part[name] for part in answer["parts"]]
    assert table["total_s"][1] < table["total_s"][0] and np.isnan(table["total_s"][2])
    assert table["reason"].tolist()[:2] == ["", ""]
    assert table["reason"][2] == "145 accelerators in racks nvl72: expected a multiple of the 8 of a copy"
    with pytest.raises(polder.ArgumentError, match="cannot be in one rack"):
        plan.mixed("llama3-70b", {"nvl72+ualink": 72, "nvl72": 72}, tp=8, batch=720)
    with pytest.raises(polder.ArgumentError, match="nowhere"):
        plan.mixed("nowhere", {"nvl72": 144, "ualink": 144}, tp=8, batch=720)
    with pytest.raises(TypeError, match="expected two kinds, found nvl72"):
        plan.mixed("llama3-70b", {"nvl72": 144}, tp=8, batch=720)


def traced(folder: Path) -> Path:
    """A trace of two ranks on one host: one computes for 1 ms and sends 1 MB, the other waits for it."""
    folder.mkdir()
    comm, sends = "comm 0 0,1", "1000000 1100000 send 1 7 1000000"
    text = "polder-mpi-trace 1\nrank {} 2 here\n{}\n{}\nend 1200000\n"
    Path(folder, "rank-0").write_text(text.format(0, comm, sends))
    Path(folder, "rank-1").write_text(text.format(1, comm, "0 1100000 receive 0 7"))
    return folder


def test_a_traced_program_is_predicted_as_by_the_command(tmp_path: Path) -> None:
    trace = traced(tmp_path / "trace")
    table = plan.mpi(trace, latency=1e-6, bandwidth=[1e9, 4e9], computing=[[1.0], [2.0]], fidelity="L1")
    for at, computing in enumerate((1, 2)):
        found = said(f"mpi {trace} --latency 1us --bandwidth 4GB/s --computing {computing}")
        assert table["total_s"][at, 1] == found["predicted"]["total_s"]
        assert float(table["measured_s"]) == found["measured_s"]
    # Twice the computing is a millisecond more; a quarter of the bandwidth three quarters of one.
    assert np.diff(table["total_s"], axis=0) == pytest.approx(1.1e-3, rel=0.15)
    assert table["total_s"][:, 0] - table["total_s"][:, 1] == pytest.approx(0.75e-3, rel=1e-6)
    split = plan.mpi(trace, latency=1e-6, bandwidth=1e9, hosts=2, platform="cmpi", path="two-sided-pool")
    assert split["messages"] == 1 and split["bytes"] == 1e6
    wire = plan.mpi(
        trace, latency=1e-6, bandwidth=1e9, hosts=2, platform="cmpi", path="tcp-smartnic", fidelity=["L0", "L1", "L2"]
    )
    assert wire["total_s"] == pytest.approx(wire["total_s"][0], rel=0.02)
    for given, why in (
        ({"hosts": 2}, "platform: ranks run on several hosts"),
        ({"hosts": 3}, "hosts: expected 1 to 2, the ranks of the trace, found 3"),
        ({"bandwidth": 0.0}, "bandwidth: expected a number above 0, found 0"),
        ({"latency": -1.0}, "latency: expected a number from 0 on, found -1"),
        ({"fidelity": "L2"}, "fidelity: expected L0 or L1, found L2: all ranks run on one host"),
        ({"platform": "cmpi", "path": "wire"}, "path: expected one of cmpi, which has "),
    ):
        with pytest.raises(polder.ArgumentError, match=why):
            plan.mpi(trace, **{"latency": 1e-6, "bandwidth": 1e9} | given)
    with pytest.raises(polder.ArgumentError, match="no file rank-0"):
        plan.mpi(tmp_path, latency=0, bandwidth=1)


def test_a_traced_step_is_predicted_as_by_the_command(tmp_path: Path) -> None:
    def node(number: int, name: str, shapes: list[list[int]]) -> dict[str, Any]:
        tensors = {"shapes": shapes, "types": ["Tensor(float)"] * len(shapes)}
        out = {"shapes": [[256, 256]], "types": ["Tensor(float)"]}
        schema = {"name": "op_schema", "value": name}
        return {"id": number, "name": name, "ctrl_deps": 1, "inputs": tensors, "outputs": out, "attrs": [schema]}

    nodes = [node(2, "aten::mm", [[256, 256], [256, 256]]), node(3, "aten::add", [[256, 256], [256, 256]])]
    for rank, its in enumerate((nodes, [*nodes, node(4, "aten::mm", [[256, 256], [256, 256]])])):
        file = {"schema": "1.1.1-chakra.0.0.4", "nodes": its}
        Path(tmp_path, f"rank-{rank}.json").write_text(json.dumps(file))
    table = plan.chakra(tmp_path, compute=[1e9, 1e11], memory=1e10, launch=1e-6)
    answer = said(f"chakra {tmp_path} --compute 100GFLOP/s --memory 10GB/s --launch 1us")
    assert table["total_s"][1] == answer["predicted_s"]
    assert table["rank_s"][1].tolist() == [rank["step"]["total_s"] for rank in answer["ranks"]]
    assert table["operators"].tolist() == ["aten::add", "aten::mm"] and table["operator_s"].shape == (2, 2)
    assert table["operator_s"].sum(axis=-1) == pytest.approx(table["total_s"])
    # A product of 256 x 256 x 256 has 33.5 million operations, and the slower rank has two of them.
    assert table["operator_s"][0, 1] == pytest.approx(2 * (2 * 256**3 / 1e9 + 1e-6))
    with pytest.raises(polder.ArgumentError, match="platform: expected what collective calls run on"):
        plan.chakra(tmp_path, compute=1e9, memory=1e10, launch=0, fidelity="L1")
    names = {"collective_name": "allreduce", "dtype": "Float", "in_msg_nelems": 1 << 20, "pg_size": 8}
    called = node(5, "record_param_comms", []) | {"attrs": [{"name": name, "value": of} for name, of in names.items()]}
    file = {"schema": "1.1.1-chakra.0.0.4", "nodes": [*nodes, called]}
    Path(tmp_path, "rank-1.json").write_text(json.dumps(file))
    for fidelity in ("L0", "L2"):
        step = {"compute": 1e11, "memory": 1e10, "launch": 1e-6}
        more = plan.chakra(tmp_path, **step, platform="dgx-h100", fidelity=fidelity)
        words = f"--compute 100GFLOP/s --memory 10GB/s --launch 1us --platform dgx-h100 --fidelity {fidelity}"
        answer = said(f"chakra {tmp_path} {words}")
        assert more["total_s"] == answer["predicted_s"] and answer["fidelity"] == fidelity
        assert more["communication_s"].tolist() == [rank["communication"]["total_s"] for rank in answer["ranks"]]
        assert more["communication_s"][0] == 0 < more["communication_s"][1] and more["collectives"] == 0
    with pytest.raises(polder.ArgumentError, match="compute: expected a number above 0, found 0"):
        plan.chakra(tmp_path, compute=0.0, memory=1e10, launch=1e-6)
    with pytest.raises(polder.ArgumentError, match="register a file of it with"):
        plan.chakra(Path(__file__).parent / "ranks", compute=1e9, memory=1e9, launch=0)


def test_servers_with_slow_memory_are_those_of_the_command() -> None:
    table = plan.tier(idle=[["cache"], ["web1"]], ratio=[4, 1])
    for at, idle in enumerate(("cache", "web1")):
        rows = said(f"tier --idle {idle} --ratio 4:1,1:1")["rows"]
        for name in plan._OF_TIER:
            expected = [np.nan if row[name] is None else row[name] for row in rows]
            assert np.array_equal(table[name][at], expected, equal_nan=True), name
    own = plan.tier(idle=[(0.25, 258), (0.5, 1164), (0.75, 2628), (0.99, 5040)], ratio=4)
    assert own["units"] == table["units"][0, 0]
    for given, why in (
        ({"idle": "lunch"}, "idle: expected one of ads, cache, web1, web2"),
        ({"idle": [(0.5, 3), (0.4, 5)]}, "idle: idle times .*: expected shares that rise"),
        ({"idle": "ads", "unit": 1e12}, "unit: 1 TB is more than local has, 768 GB; give less"),
        ({"idle": "ads", "waits": 50}, "waits: expected a number from 0 to 1, found 50"),
        ({"idle": "ads", "slow": "hbm"}, 'slow: memserver has no server with a tier "hbm"'),
    ):
        with pytest.raises(polder.ArgumentError, match=why):
            plan.tier(**{"ratio": 1} | given)


def test_offloaded_steps_equal_those_of_the_command() -> None:
    given = ["--model", "mistral-nemo-12b", "--platform", "finetuning-b", "--dram", "128 GiB", "--gpus", "2"]
    asked = ["--context", "4096,8192", "--batch", "1,4", "--policy", "dram,optimal", "--json"]
    said = subprocess.run([POLDER, "plan", "offload", *given, *asked], capture_output=True, text=True, check=True)
    points = json.loads(said.stdout)["points"]
    contexts, batches = np.array([4096, 8192])[:, None, None], np.array([1, 4])[:, None]
    table = plan.offload(
        "mistral-nemo-12b",
        "finetuning-b",
        gpus=2,
        dram="128 GiB",
        context=contexts,
        batch=batches,
        policy=["dram", "optimal"],
    )
    assert table["total_s"].shape == (2, 2, 2)
    for index, point in enumerate(points):
        where = divmod(index, 2)
        dram, optimal = point["policies"]
        assert table["total_s"][*where, 1] == optimal["step_s"]
        assert np.array_equal(table["placed_bytes"][*where, 1], np.array(optimal["bytes"]))
        assert np.isnan(table["total_s"][*where, 0]) and not table["fits"][*where, 0]
        assert (table["lacks"][*where, 0], table["would_fit"][*where, 0]) == (dram["lacks"], dram["would_fit"])
    for wrong, expected in [
        ({"gpus": 3}, "--gpus: finetuning-b has 2 accelerators to a host, found 3"),
        ({"optimizer": "sgd"}, "optimizer: unknown variant `sgd`, expected `adam` or `lion`"),
        ({"colour": 1}, "colour: unknown field"),
    ]:
        with pytest.raises(polder.ArgumentError, match=expected):
            plan.offload("mistral-nemo-12b", "finetuning-b", context=4096, **wrong)


def test_steps_with_a_parameter_service_equal_those_of_the_command() -> None:
    layers = [125_000_000, *[50_000_000] * 24]
    passes = {"forward_s": 0.04, "backward_s": 0.08, "worker_bandwidth": 12e9, "link_bandwidth": 24e9}
    table = plan.sync(layers, workers=4, proxies=[[1], [4]], shard=[2 << 20, 8 << 20], **passes)
    assert table["best_step_s"].shape == (2, 2)
    command = "sync --layers 125MB,24x50MB --workers 4 --forward 40ms --backward 80ms --worker-bandwidth 12GB/s"
    for row, proxies in enumerate((1, 4)):
        for column, shard in enumerate(("2MiB", "8MiB")):
            answer = said(f"{command} --link-bandwidth 24GB/s --proxies {proxies} --shard {shard}")
            for way in ("all_reduce", "overlapped", "service", "best"):
                for of in ("step_s", "blocked_s"):
                    assert table[f"{way}_{of}"][row, column] == answer[way][of]
            assert table["best_bytes"][row, column] == answer["best"]["proxied_bytes"]
            assert table["split_bytes"][row, column] == answer["split_bytes"]
    # More devices carry more.
    assert (table["service_step_s"][0] > table["service_step_s"][1]).all()
    assert plan.sync("llama3-8b", **passes)["all_reduce_step_s"].shape == ()
    for given, why in (
        ({"workers": 1}, "workers is 1 and proxies 1; give 2 and 1 or more"),
        ({"worker_bandwidth": 0.0}, "worker_bandwidth is 0; give bytes a second above 0"),
        ({"latency_s": -1.0}, "latency_s is -1; give seconds from 0 on"),
        ({"shard": 1}, "shard is 1: 1325000000 bytes are more than 4194304 of them"),
    ):
        with pytest.raises(polder.ArgumentError, match=why):
            plan.sync(layers, **{**passes, **given})


def test_the_step_of_a_live_module_is_that_of_its_configuration(tmp_path: Path) -> None:
    class Config:
        shape: ClassVar = {
            "model_type": "llama",
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "vocab_size": 1000,
            "max_position_embeddings": 4096,
        }

        def to_json_string(self, use_diff: bool = True) -> str:
            # As in transformers: by default what has its default is left out.
            return json.dumps({"model_type": "llama"} if use_diff else self.shape)

    class Live:
        config = Config()

    (tmp_path / "config.json").write_text(json.dumps(Config.shape))
    live, read = (plan.offload(it, "finetuning-a", context=1024) for it in (Live(), str(tmp_path / "config.json")))
    assert live["total_s"] == read["total_s"] and np.array_equal(live["placed_bytes"], read["placed_bytes"])
    with pytest.raises(
        polder.ArgumentError, match=r"expected a name, a path or a module of transformers, found builtins"
    ):
        plan.offload(3, "finetuning-a", context=1024)


def test_a_table_equals_single_predictions() -> None:
    zero = ["none", "optimizer", "gradients", "weights"]
    table = plan.search(
        "gpt3-175b",
        "dgx-h100",
        tp=8,
        pp=np.array([[4], [8], [16]]),
        dp=np.array([[32], [16], [8]]),
        batch=1536,
        zero=np.array(zero),
        sequence_parallel=True,
    )
    assert table["total_s"].shape == (3, 4)
    for row, (pp, dp) in enumerate([(4, 32), (8, 16), (16, 8)]):
        for column, kind in enumerate(zero):
            one = plan.train(
                "gpt3-175b",
                "dgx-h100",
                1024,
                tp=8,
                cp=1,
                pp=pp,
                dp=dp,
                interleave=1,
                micro_batch=1,
                batch=1536,
                zero=kind,
                sequence_parallel=True,
                recompute="none",
                offload=plan.Offload(),
            )
            figures = {
                "total_s": one.step.total_s,
                "used_bytes": one.step.memory[0].used_bytes,
                "bubble_s": one.step.bubble_s,
            }
            assert figures == {name: table[name][row, column] for name in figures}
            assert table["fits"][row, column] == one.fits


MODEL = {"hidden": 6144, "feedforward": 24576, "seq_size": 2048, "attn_heads": 64, "attn_size": 96, "num_blocks": 48}
NETWORK = {"bandwidth": 25, "efficiency": 0.9, "size": 64, "latency": 2e-5, "ops": {"all_reduce": [1.0, 0]}}
SYSTEM = {
    "matrix": {"float16": {"tflops": 312, "gflops_efficiency": [[16, 0.9], [0, 0.1]]}},
    "mem1": {"GiB": 80, "GBps": 2048, "MB_efficiency": [[100, 0.9], [0, 0.5]]},
    "mem2": {"GiB": 0, "GBps": 32, "MB_efficiency": [[0, 1]]},
    "processing_mode": "roofline",
    "networks": [NETWORK | {"size": 8}, NETWORK],
}


EXECUTION = {
    "num_procs": 64,
    "tensor_par": 4,
    "pipeline_par": 4,
    "data_par": 4,
    "tensor_par_net": 0,
    "pipeline_par_net": 1,
    "data_par_net": 1,
    "batch_size": 64,
    "microbatch_size": 1,
    "datatype": "float16",
    "fused_activation": True,
    "attention_type": "multihead",
    "activation_recompute": "none",
    "pipeline_interleaving": 1,
    "optimizer_sharding": False,
    "tensor_par_comm_type": "rs_ag",
    "tensor_par_overlap": "none",
    "seq_par_ag_redo": True,
    "data_par_overlap": False,
    "weight_offload": False,
    "activations_offload": False,
    "optimizer_offload": False,
    "training": True,
}


def test_an_execution_of_calculon_is_a_layout_and_arguments_count_before_it(tmp_path: Path) -> None:
    file = tmp_path / "execution.json"
    file.write_text(json.dumps(EXECUTION))
    one = plan.train("megatron-22b", "dgx-a100", layout=str(file))
    assert (one.accelerators, one.points, one.fill) == (64, 1, 4)
    assert (one.layout.tp, one.layout.pp, one.layout.dp, one.layout.zero) == (4, 4, 4, "none")
    other = plan.train("megatron-22b", "dgx-a100", 32, layout=str(file), dp=2, fill=8)
    assert (other.accelerators, other.fill, other.layout.tp, other.layout.dp) == (32, 8, 4, 2)
    file.write_text(json.dumps(EXECUTION | {"tensor_par": "four"}))
    with pytest.raises(polder.ArgumentError, match=r"execution\.json: tensor_par: expected a whole number"):
        plan.train("megatron-22b", "dgx-a100", layout=str(file))
    with pytest.raises(TypeError, match="accelerators: expected a number, or a file as layout"):
        plan.train("megatron-22b", "dgx-a100")


def test_files_of_calculon_are_models_and_platforms(tmp_path: Path) -> None:
    model, system = str(tmp_path / "model.json"), str(tmp_path / "system.json")
    Path(model).write_text(json.dumps(MODEL))
    Path(system).write_text(json.dumps(SYSTEM))
    one = plan.train(model, system, 64, tp=4, cp=1, pp=4, batch=64, recompute="none", zero="none", flash=False)
    layout = one.layout
    table = plan.search(
        model,
        system,
        tp=4,
        pp=4,
        dp=4,
        batch=64,
        interleave=layout.interleave,
        micro_batch=layout.micro_batch,
        sequence_parallel=layout.sequence_parallel,
        gather_again=layout.gather_again,
        flash=0,
    )
    assert one.fits and table["total_s"] == one.step.total_s
    Path(system).write_text(json.dumps(SYSTEM | {"processing_mode": "both"}))
    expected = 'system.json: processing_mode: expected "roofline" or "no_overlap", found "both"'
    with pytest.raises(polder.ArgumentError, match=expected):
        plan.train(model, system, 8)
    with pytest.raises(polder.ArgumentError, match=expected):
        plan.search(model, system, tp=1, dp=8, batch=8)


def test_what_cannot_run_is_nan_in_a_table_and_an_error_alone() -> None:
    table = plan.search("gpt3-175b", "dgx-a100", tp=[7, 8], dp=8, pp=16, batch=1536)
    assert np.isnan(table["total_s"]).tolist() == [True, False]
    assert table["fits"].tolist()[0] is False
    with pytest.raises(polder.ArgumentError, match="tp of 7 does not divide heads of 96; tp of 8 would run"):
        plan.train("gpt3-175b", "dgx-a100", 1024, batch=1536, tp=7)


def test_platforms_counts_and_sequences_are_columns_too() -> None:
    table = plan.search(
        "llama3-8b",
        np.array(["dgx-h100", "dgx-a100"]),
        gpus=[[64], [128]],
        sequence=np.array([[[8192]], [[4096]]]),
        tp=8,
        batch=512,
        zero="optimizer",
        sequence_parallel=True,
    )
    assert table["total_s"].shape == (2, 2, 2) and table["platform"][0, 0].tolist() == ["dgx-h100", "dgx-a100"]
    assert table["reason"].tolist() == [[["", ""]] * 2] * 2
    cut = {"tp": 8, "cp": 1, "pp": 1, "interleave": 1, "micro_batch": 1, "batch": 512, "zero": "optimizer"}
    for place in np.ndindex(2, 2, 2):
        one = plan.train(
            "llama3-8b",
            str(table["platform"][place]),
            int(table["gpus"][place]),
            sequence=int(table["sequence"][place]),
            sequence_parallel=True,
            recompute="none",
            **cut,
        )
        assert (one.step.total_s, one.step.memory[0].used_bytes) == (
            table["total_s"][place],
            table["used_bytes"][place],
        )


def test_what_cannot_run_has_its_reason_in_the_table() -> None:
    table = plan.search(
        "gpt3-175b",
        ["nvl72", "dgx-a100"],
        gpus=[128, 1024],
        tp=[8, 7],
        pp=[[1], [4]],
        batch=1536,
        offload_tier="pool",
        offload_weights=[[False], [True]],
    )
    assert np.isnan(table["total_s"]).all() and not table["fits"].any()
    for said, expected in zip(table["reason"].flat, ("between racks", "1,024", "memory nodes", "1,024"), strict=True):
        assert expected in said and "\n" not in said, said
    with pytest.raises(polder.ArgumentError, match="nowhere: no platform of this name"):
        plan.search("gpt3-175b", ["nvl72", "nowhere"], gpus=8, tp=8, batch=8)


def test_what_does_not_fit_says_what_would_and_a_tier_goes_by_its_name() -> None:
    one = plan.train("llama3-70b", "dgx-a100", 8, batch=8, offload=plan.Offload())
    assert not one.fits and one.note is None
    assert one.would_fit[0] == "weights and optimizer states offloaded to the host"
    offload = plan.Offload(tier="cxl", optimizer=True)
    card = plan.train("llama3-8b", "finetuning-a", 2, batch=16, offload=offload)
    assert card.fits and card.would_fit == [] and card.layout.offload == offload
    cut = {"tp": 1, "dp": 2, "batch": 16, "recompute": "full", "offload_optimizer": True}
    table = plan.search("llama3-8b", ["finetuning-a", "dgx-a100"], offload_tier=[["cxl"], ["host"]], **cut)
    assert np.isfinite(table["total_s"]).tolist() == [[True, False], [True, True]]
    assert table["reason"][0, 1] == 'the host has no memory "cxl"; it has host'
    numbered = plan.search("llama3-8b", "finetuning-a", offload_tier=[2, 0], **cut)
    assert table["total_s"][:, 0].tolist() == numbered["total_s"].tolist()
    with pytest.raises(polder.ArgumentError, match=r'no memory "cxm"; it has cxl, host, pool$'):
        plan.search("llama3-8b", ["finetuning-a", "dgx-a100"], offload_tier="cxm", **cut)
    other = plan.train("llama3-8b", "finetuning-a", 2, batch=16, offload=offload, against="dgx-a100")
    assert other.against is None and other.left_out == 'dgx-a100: the host has no memory "cxl"; it has host'


def test_what_fits_nowhere_else_lies_elsewhere_and_the_note_says_so() -> None:
    words = "plan train --model llama3-70b --platform dgx-a100 --gpus 8 --batch 8 --json"
    said = json.loads(subprocess.run([POLDER, *words.split()], capture_output=True, text=True, check=True).stdout)
    ours = plan.train("llama3-70b", "dgx-a100", 8, batch=8)
    assert ours == plan._typed(plan.Plan, said)
    assert ours.fits and ours.layout.offload == plan.Offload(optimizer=True, activations=True)
    assert ours.note is not None and ours.note.startswith("nothing fits in the accelerators' memory on dgx-a100: ")
    roomy = plan.train("llama3-8b", "dgx-a100", 64, batch=64)
    assert roomy.fits and roomy.layout.offload == plan.Offload() and roomy.note is None


def test_ranks_are_counted_in_the_order_that_is_given() -> None:
    cut = {"tp": 8, "cp": 1, "pp": 8, "dp": 4, "interleave": 1, "micro_batch": 1, "batch": 1024, "zero": "none"}
    order = "tp-cp-ep-pp-dp"
    one = plan.train("llama3-70b", "nvl72-ndr", 256, order=order, **cut)
    assert one.order == order and one.step.communication.pipeline.between.exposed_s == 0.0
    assert one.step.communication.pipeline.inside.exposed_s > 0.0
    table = plan.search("llama3-70b", "nvl72-ndr", order=order, **cut)
    assert table["pipeline_between_exposed_s"] == 0.0 and table["pipeline_inside_exposed_s"] > 0.0
    with pytest.raises(polder.ArgumentError, match="expected an order of tp, cp, ep, dp and pp, each once"):
        plan.search("llama3-70b", "nvl72-ndr", order="tp", **cut)


def test_bad_arguments_say_what_was_expected() -> None:
    with pytest.raises(polder.ArgumentError, match="no platform of this name"):
        plan.train("gpt3-175b", "nowhere", 8)
    with pytest.raises(TypeError, match="no field of a layout: \\['pt'\\]; fields are tp, cp"):
        plan.train("gpt3-175b", "dgx-a100", 8, pt=8)
    with pytest.raises(
        polder.ArgumentError, match=r'^tp: invalid type: string "8", expected a whole number from 0 on$'
    ):
        plan.train("gpt3-175b", "dgx-a100", 8, tp="8")
    with pytest.raises(TypeError, match="must be given: \\['tp'\\]"):
        plan.search("gpt3-175b", "dgx-a100", gpus=8, batch=8)
    with pytest.raises(TypeError, match="must be given: \\['batch'\\]"):
        plan.search("gpt3-175b", "dgx-a100", tp=8, dp=8)
    with pytest.raises(TypeError, match="no field of a layout: \\['pt'\\]"):
        plan.search("gpt3-175b", "dgx-a100", tp=8, dp=8, batch=8, pt=8)
    with pytest.raises(polder.ArgumentError, match="zero is 'all'; give one of none, optimizer"):
        plan.search("gpt3-175b", "dgx-a100", tp=8, dp=8, batch=8, zero="all")
    with pytest.raises(polder.ArgumentError, match="tp x cp x pp of 8 and dp of 7 do not make 64 accelerators"):
        plan.train("gpt3-175b", "dgx-a100", 64, batch=56, tp=8, cp=1, pp=1, dp=7)
    assert plan.train("llama3-8b", "dgx-h100", 64, batch=np.int64(64)).layout.batch == 64
    assert plan.search("gpt3-175b", "dgx-a100", tp=[], dp=8, batch=8)["total_s"].shape == (0,)
    huge = plan.search("gpt3-175b", "dgx-a100", tp=8, dp=2**31, pp=16, batch=2**31)
    assert np.isnan(huge["total_s"]) and not huge["fits"]
    with pytest.raises(polder.ArgumentError, match="give whole numbers"):
        plan.search("gpt3-175b", "dgx-a100", tp=-8, dp=8, batch=8)
