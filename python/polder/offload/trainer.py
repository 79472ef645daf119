"""The Trainer of transformers, with its optimizer's states and saved activations placed."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from polder.offload.optimizer import AdamW
from polder.offload.placed import Placed, place
from polder.offload.tiers import Tier


class PlacedAdamW(AdamW):
    """An `AdamW` that is placed when it is made. ``placed`` is its placement."""

    def __init__(self, params: Any, placement: Callable[[AdamW], Placed], **settings: Any) -> None:
        super().__init__(params, **settings)
        self.placed = placement(self)


def trainer(
    model: torch.nn.Module,
    args: Any,
    policy: str | Path | Mapping[str, Sequence[float]] = "optimal",
    *,
    tiers: Sequence[Tier] | None = None,
    platform: str | Path | None = None,
    activations: int = 0,
    computation: tuple[float, float] = (0.0, 0.0),
) -> tuple[type[PlacedAdamW], dict[str, Any]]:
    """What ``Trainer(optimizer_cls_and_kwargs=...)`` takes: an `AdamW` that places itself.

    Parameters
    ----------
    model : torch.nn.Module
        The Trainer's model. What its forward passes save is placed if ``activations`` is given.
    args : TrainingArguments
        The Trainer's. The rates, betas, epsilon and weight decay are read there.
    policy, tiers, platform, activations, computation
        As in `place`.

    Returns
    -------
    tuple
        A class and its arguments. ``trainer.optimizer.optimizer.placed`` is the placement once training has begun.
    """

    def placement(optimizer: AdamW) -> Placed:
        placed = place(
            model, optimizer, policy, tiers=tiers, platform=platform, activations=activations, computation=computation
        )
        if activations > 0:
            placed.cover(model)
        return placed

    settings = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }
    return PlacedAdamW, {"placement": placement, **settings}
