"""Where an offloaded training step keeps its tensors: placed over memory, NUMA nodes and disks, by a policy.

Examples
--------
>>> import tempfile
>>> import torch
>>> import polder.offload
>>> model = torch.nn.Linear(64, 64)
>>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
>>> placed = polder.offload.place(model, optimizer, tiers=[polder.offload.Tier("dram", "1 GiB", read=2e10, write=2e10)])
>>> with placed.activations():
...     loss = model(torch.ones(8, 64)).square().mean()
>>> loss.backward()
>>> optimizer.step()
>>> placed.fractions["optimizer states"]
[1.0]
>>> placed.close()
"""

from polder import _distribution

try:
    import torch  # noqa: F401  # pyright: ignore[reportUnusedImport]
except ImportError as error:
    raise _distribution.missing("polder.offload", "torch", error) from error

from polder.errors import PlacementError, PlacementWarning, TierError, TierFullError
from polder.offload.optimizer import Adam, AdamW, Lion
from polder.offload.placed import POLICIES, Placed, Row, place
from polder.offload.saved import saved_bytes
from polder.offload.scope import tier
from polder.offload.tiers import Tier, check_tiers, measured, tiers_of
from polder.offload.trainer import trainer
from polder.offload.zero import zero

__all__ = [
    "POLICIES",
    "Adam",
    "AdamW",
    "Lion",
    "Placed",
    "PlacementError",
    "PlacementWarning",
    "Row",
    "Tier",
    "TierError",
    "TierFullError",
    "check_tiers",
    "measured",
    "place",
    "saved_bytes",
    "tier",
    "tiers_of",
    "trainer",
    "zero",
]
