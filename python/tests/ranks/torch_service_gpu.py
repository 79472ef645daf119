"""A parameter service over parameters and gradients on a GPU, as `torch_gpu.py`: the weights are those of a CPU."""

from collections.abc import Callable
from typing import Any

import stand_in
import torch
import torch.distributed as dist
from stand_in import IS_REAL, given, main, on_gpu, plain
from torch_meet import meet

from polder.torch import ParameterService

meet()
rank = dist.get_rank()
if not IS_REAL:
    stand_in.install()

Make = Callable[[Any], torch.optim.Optimizer]


class Net(torch.nn.Module):
    """Layers of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 300), torch.nn.Linear(300, 64)
        self.last = torch.nn.Linear(64, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        x = torch.relu(self.first(x).to(self.second.weight.dtype))
        return self.last(torch.relu(self.second(x)).float())


def moved(model: torch.nn.Module) -> torch.nn.Module:
    """The model on the GPU. Its gradients are there once the stream has come so far."""
    if IS_REAL:
        return model.to("cuda")

    def leave(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = given(plain(parameter.grad).clone())

    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            there = torch.nn.Parameter(on_gpu(parameter.detach()))
            there.register_post_accumulate_grad_hook(leave)
            setattr(module, name, there)
    return model


def trained(service: ParameterService, make: Make, dtype: torch.dtype, is_on_gpu: bool, steps: int = 6) -> list[Any]:
    """The weights after some steps, and the optimizer's state."""
    torch.manual_seed(rank)
    model = Net()
    model.second.to(dtype)
    if is_on_gpu:
        moved(model)
    optimizer = make(model.parameters())
    service.attach(model, optimizer)
    draw = torch.Generator().manual_seed(rank)
    for step in range(steps):
        x = torch.randn(16, 64, generator=draw)
        loss = model(x.to("cuda") if IS_REAL and is_on_gpu else x).square().mean()
        # The stand-in's backward pass would make plain tensors of all that its hooks do.
        loss.as_subclass(torch.Tensor).backward()
        if not IS_REAL and (step < 3 or service.split == 0.5):
            # The stand-in's kernels run at once, and copies on the GPU when they are waited for. What proxies average
            # is there without a wait.
            main.synchronize()
        optimizer.step()
        optimizer.zero_grad()
    plan = service.plan
    assert plan is not None and plan.proxied_bytes > 0
    service.close()
    kept = [value for of in optimizer.state.values() for value in of.values() if isinstance(value, torch.Tensor)]
    tensors = [parameter.detach() for parameter in model.parameters()] + kept
    return [tensor.cpu() if IS_REAL else plain(tensor).clone() for tensor in tensors]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


cases: list[tuple[dict[str, Any], torch.dtype]] = [
    ({"profile_steps": 2, "split": 1.0}, torch.bfloat16),
    ({"profile_steps": 2, "split": 0.5}, torch.float32),
    ({"profile_steps": 2, "split": 1.0, "overlap": False}, torch.float32),
    ({"optimizer": "proxy"}, torch.float32),
    ({"optimizer": "proxy", "early": True}, torch.float32),
    ({"optimizer": "proxy", "clips": True}, torch.float32),
]
for options, dtype in cases:
    found = []
    for is_on_gpu in (False, True):
        with ParameterService(shard_bytes=16384, **options) as service:
            found.append(trained(service, sgd, dtype, is_on_gpu))
    pairs = list(zip(*found, strict=True))
    assert len(pairs) > 6
    # A GPU adds in another order in its own products.
    close = torch.allclose if IS_REAL else torch.equal
    assert all(close(one, other) for one, other in pairs), (options, dtype)
print("equal")
dist.destroy_process_group()
