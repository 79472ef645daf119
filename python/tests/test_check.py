"""`polder offload check`: what it finds in a script, what it predicts, and that what it says to paste runs."""

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Rank

torch = pytest.importorskip("torch")


from polder import offload  # noqa: E402
from polder.errors import ArgumentError  # noqa: E402
from polder.offload import check  # noqa: E402

pytestmark = pytest.mark.torch

SCRIPT = """
import sys, torch
from torch.nn import Embedding, Linear, Sequential, Tanh
model = Sequential(Embedding(64, 64), Linear(64, 512), Tanh(), Linear(512, 64))
mine = torch.optim.AdamW(model.parameters())
ids = torch.zeros(2, int(sys.argv[1]), dtype=torch.long)
for step in range(1000):
    mine.zero_grad()
    model(ids).square().mean().backward()
    mine.step()
    print("after the first step")
"""


#: Runs the module as `python -m` does.
CHECK = """
import os, runpy, sys, warnings
warnings.resetwarnings()
os.chdir({!r})
os.dup2(os.open("said", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
runpy.run_module("polder.offload.check", run_name="__main__", alter_sys=True)
"""


def checked(tmp_path: Path, script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(script)
    with Rank(CHECK.format(str(tmp_path)), *arguments) as rank:
        output = rank.communicate()[0]
        return subprocess.CompletedProcess([], rank.wait(), output, (tmp_path / "said").read_text())


def test_a_check_runs_no_module_of_the_folder_in_which_it_starts(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('the planted module ran')")
    (tmp_path / "own").mkdir()
    (tmp_path / "own/beside.py").write_text("length = 96")
    (tmp_path / "own/train.py").write_text(SCRIPT.replace("int(sys.argv[1])", "__import__('beside').length"))
    command = [Path(sys.executable).with_name("polder"), "offload", "check", "--json", "own/train.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and json.loads(ended.stdout)["context"] == 96, ended.stderr


def test_a_check_stops_a_script_after_one_step_and_prints_its_memory(tmp_path: Path) -> None:
    ended = checked(tmp_path, SCRIPT, "--json", "train.py", 96)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    weights = 4 * (64 * 64 + 64 * 512 + 512 + 512 * 64 + 64)
    assert report["bytes"]["cpu"]["weights"] == report["bytes"]["cpu"]["gradients"] == weights
    # Both moments and a step count for each of five tensors.
    assert report["bytes"]["cpu"]["optimizer states"] == 2 * weights + 5 * 4
    # Indices, the embedding, its tanh, and the squared output.
    assert report["bytes"]["cpu"]["activations"] == 2 * 96 * (8 + 4 * (64 + 512 + 64))
    assert (report["context"], report["batch"]) == (96, 2)
    assert report["first_too_long"] > 96
    assert report["paste"][1].startswith('placed = polder.offload.place(model, mine, "optimal", tiers=')
    assert report["paste"][2] == "placed.cover(model)"
    text = checked(tmp_path, SCRIPT, "train.py", 96).stdout
    assert "optimizer states" in text and "first context that will not fit in " in text and "after the" not in text


def test_the_first_context_that_will_not_fit_is_where_the_bytes_pass_the_room() -> None:
    # 500 bytes that stay, 400 + 100 that grow.
    of = {"cpu": {"weights": 500, "activations": 500}}
    finding = check.Found(of, {"cpu": 100}, 0, 10, 1, [(1000, 500), (900, 100)], [], "")
    # 1000 + 40 a token + 1 a token squared.
    assert check.first_too_long(finding, 1000 + 40 * 50 + 50 * 50) == 51
    assert check.first_too_long(finding, 1000 + 40 * 50 + 50 * 50 - 1) == 50
    # A moment at which nothing grows is a limit of its own.
    finding.moments = [(1001, 500), (1200, 0)]
    assert check.first_too_long(finding, 1000 + 40 * 3 + 3 * 3) == 1
    assert check.first_too_long(finding, 1001 + 40 * 30 + 30 * 30) == 31
    finding.moments = [(1000, 0)]
    assert check.first_too_long(finding, 1 << 40) == 0


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("print('nothing')", "ended without a step of a torch.optim.Optimizer"),
        ("import sys; sys.exit(3)", "ended with 3 before its first step"),
        ("raise ValueError('no data')", "failed before its first step ended: ValueError: no data"),
    ],
)
def test_a_check_of_a_script_that_takes_no_step_is_one_clear_error(tmp_path: Path, script: str, reason: str) -> None:
    ended = checked(tmp_path, script, "train.py")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(f"polder: train.py: {reason}")


def test_a_check_of_a_script_that_is_not_there_says_so(tmp_path: Path) -> None:
    assert checked(tmp_path, SCRIPT, "other.py").stderr == "polder: other.py: no such script\n"


def test_the_command_passes_everything_after_the_script_to_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("sys.argv[1]", "sys.argv[sys.argv.index('--json') + 2]"))
    polder = Path(sys.executable).with_name("polder")
    command = [polder, "offload", "check", "--json", "train.py", "--json", "--context", "48"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["context"] == 48
    (tmp_path / "train.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("polder: train.py: killed before its first step ended; if the kernel did it, ")


def found_in(tmp_path: Path, script: str, *arguments: object) -> tuple[check.Found, str]:
    """What a check finds, and what it tells people."""
    return read(checked(tmp_path, script, "--json", "train.py", *arguments))


def read(ended: subprocess.CompletedProcess[str]) -> tuple[check.Found, str]:
    """What `found_in` gives, of a check that has ended."""
    assert ended.returncode == 0, ended.stderr
    given = json.loads(ended.stdout)
    fields = {it.name: given[it.name] for it in dataclasses.fields(check.Found)}
    found = check.Found(**{**fields, "optimizers": [check.Stepper(**it) for it in given["optimizers"]]})
    return found, check.table(found, given["room"], None, given["tiers"])


TRAINED = """
import torch
torch.manual_seed(0)
def main():
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
    opt = torch.optim.AdamW([{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.1}], lr=1e-2)
    PASTE
    for step in range(3):
        opt.zero_grad()
        net(torch.ones(512, 64) * step).square().mean().backward()
        opt.step()
    print(type(opt).__module__, *(it.detach().double().sum().item() for it in net.parameters()))
main()
"""


def test_what_is_to_be_pasted_runs_as_it_is_printed_and_trains_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, said = found_in(tmp_path, TRAINED.replace("PASTE", "pass"))
    _, _, pasted = said.partition("paste below the line that makes opt:\n")
    pasted, _, hint = pasted.partition("\n\n")
    # It has tiers of its own, and names what measures them once.
    assert "platform.toml" not in pasted and "polder probe --disk FOLDER --out platform.toml" in hint
    # As users do, but with less of the disk.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(offload, "measured", functools.partial(offload.measured, nbytes=1 << 20))
    outputs = []
    for lines in ("    pass", pasted):
        exec(compile(TRAINED.replace("    PASTE", lines), "train.py", "exec"), {"__name__": "__main__"})
        outputs.append(capsys.readouterr().out.split())
    # The optimizer is the script's own, and so are the bits.
    assert outputs[0][0] == "torch.optim.adamw" and outputs[0] == outputs[1]


def test_every_optimizer_of_a_script_is_named_with_what_it_trains(tmp_path: Path) -> None:
    script = """
import torch
g, d = torch.nn.Linear(128, 512), torch.nn.Linear(512, 1)
og, od = torch.optim.Adam(g.parameters()), torch.optim.Adam(d.parameters())
late = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])
for _ in range(2):
    od.zero_grad(); d(g(torch.ones(4, 128)).detach()).mean().backward(); od.step()
    og.zero_grad(); d(g(torch.ones(4, 128))).mean().backward(); og.step()
"""
    finding, text = found_in(tmp_path, script)
    large, small = 4 * (128 * 512 + 512), 4 * (512 + 1)
    assert [(stepper.name, stepper.model, stepper.weights, stepper.has_stepped) for stepper in finding.optimizers] == [
        ("og", "g", large, True),
        ("od", "d", small, True),
        ("late", "model", 12, False),
    ]
    assert finding.bytes["cpu"]["weights"] == finding.bytes["cpu"]["gradients"] + 12 == large + small + 12
    assert finding.bytes["cpu"]["optimizer states"] == 2 * (large + small) + 4 * 4
    assert "another optimizer: od (torch.optim.adam.Adam) over d: 0.0 MB of weights, 0.0 MB of states" in text
    assert "another optimizer: late (torch.optim.sgd.SGD) over model: 0.0 MB of weights, no step yet" in text


class Together(torch.optim.Optimizer):
    """Steps with all parameters at once or not at all."""

    def step(self, closure: object = None) -> None:
        """Looks at both."""
        first, second = self.param_groups[0]["params"]
        first.data.add_(second.grad.sum())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.LBFGS, "optimizer torch.optim.lbfgs.LBFGS: its states cannot be placed, because it takes no step"),
        (lambda of: Together(of, {}), "optimizer test_check.Together: its states cannot be placed, because it takes"),
        (
            lambda of: torch.optim.SGD([torch.nn.Parameter(torch.ones(3))]),
            "optimizer: expected parameters of the model",
        ),
        (torch.optim.SGD, ""),
        (functools.partial(torch.optim.Adam, amsgrad=True), ""),
        (lambda of: torch.optim.Muon(list(of)[:1]), ""),
        (offload.Lion, ""),
    ],
)
def test_nothing_is_to_be_pasted_that_cannot_be_placed(make: Any, reason: str) -> None:
    net = torch.nn.Linear(4, 4)
    optimizer = make(net.parameters())
    refused = check._refused(optimizer, net)
    assert refused.startswith(reason) and bool(refused) == bool(reason)
    stepper = check.Stepper("", "mine", "net", True, refused, 1, 1, True)
    finding = check.Found({"cpu": dict.fromkeys(check._OBJECTS, 1)}, {}, 1, 0, 0, [(1, 1)], [stepper], "")
    told = check.table(finding, 1 << 30, None, "tiers=polder.offload.measured()")
    assert ("import polder.offload" in told) is not bool(reason)
    assert (f"nothing to paste: mine cannot be placed: {reason}" in told) is bool(reason)
    if reason:
        with pytest.raises(ArgumentError) as raised:
            offload.place(net, optimizer, tiers=[offload.Tier("dram", "1 GiB", 1, 1)])
        assert refused == str(raised.value)


LORA = """
import torch
class Adapted(torch.nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down, self.up = torch.nn.Linear(256, 8, bias=False), torch.nn.Linear(8, 256, bias=False)
    def forward(self, x):
        return self.base(x) + self.up(self.down(x))
base = torch.nn.Linear(256, 256).requires_grad_(False)
net = Adapted(base).bfloat16()
masters = {it: torch.nn.Parameter(it.detach().float()) for it in net.parameters() if it.requires_grad}
opt = torch.optim.AdamW(masters.values())
for step in range(2):
    net(torch.ones(4, 256).bfloat16()).float().square().mean().backward()
    for it, master in masters.items():
        master.grad, it.grad = it.grad.float(), None
    opt.step()
"""


def test_adapters_of_16_bits_and_their_masters_are_found_under_the_outer_model(tmp_path: Path) -> None:
    found, said = found_in(tmp_path, LORA)
    assert found.optimizers[0].model == "net" and not found.optimizers[0].refused
    assert found.bytes["cpu"]["frozen weights"] == 2 * (256 * 256 + 256)
    assert found.bytes["cpu"]["weights"] == 2 * 2 * 256 * 8
    assert 'placed = polder.offload.place(net, opt, "optimal", tiers=' in said


def test_a_script_that_catches_everything_ends_after_its_first_step_with_the_answer(tmp_path: Path) -> None:
    script = """
import torch
net = torch.nn.Linear(64, 64)
opt = torch.optim.AdamW(net.parameters())
for step in range(3):
    try:
        net(torch.ones(4, 64)).sum().backward(); opt.step()
    except:
        pass
raise SystemExit("the script went on")
"""
    found, said = found_in(tmp_path, script)
    assert found.optimizers[0].name == "opt" and "paste below the line that makes opt:" in said


LONG = """
import sys, torch
WIDTH, WORDS = 128, 2000
layers = [torch.nn.TransformerEncoderLayer(WIDTH, 4, 256, batch_first=True, dropout=0.0) for _ in range(2)]
net = torch.nn.Sequential(torch.nn.Embedding(WORDS, WIDTH), *layers, torch.nn.Linear(WIDTH, WORDS))
opt = torch.optim.AdamW(net.parameters())
for step in range(2):
    ids = torch.randint(WORDS, (2, int(sys.argv[1])))
    opt.zero_grad()
    torch.nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten()).backward()
    opt.step()
print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
"""


def test_the_predicted_context_is_that_of_which_a_run_needs_the_memory(tmp_path: Path) -> None:
    # Half of what grows here is saved for no backward pass: it is made of what was saved, for a while.
    (tmp_path / "train.py").write_text(LONG)
    # Not forked, because the memory of a whole process counts.
    command = [sys.executable, "-m", "polder.offload.check", "--json", "train.py", "512"]
    finding, _ = read(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False))
    command = [sys.executable, "train.py", "2048"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    predicted = check.first_too_long(finding, int(ended.stdout) << 10)
    assert 0.7 * 2048 <= predicted <= 1.4 * 2048, (predicted, finding)
