"""A state for another number of ranks: what all ranks have alike, and DTensors that are laid out anew."""

from collections.abc import Callable
from typing import Any

import torch

from polder.errors import UnusableError
from polder.torch.identity import Part
from polder.torch.state import Leaf, by_dotted_name, dtensor_of, layout_of

# torch's stubs leave planners and their plans without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

__all__ = ["Resharded", "expect_replicated"]

Reader = Callable[[Part], tuple[Any, Callable[[Leaf], torch.Tensor]]]


def expect_replicated(name: str, saved: Any, parts: dict[int, Part], sums_of: Callable[[Part], dict[str, str]]) -> None:
    """Refuses a version whose ranks do not have the same, but for random states and parts of DTensors."""
    own = {leaf["shard"]["tensor"] for leaf in by_dotted_name(saved["state"]).values() if "shard" in leaf}
    first: dict[str, str] = {}
    for rank, part in sorted(parts.items()):
        sums = {
            key: value for key, value in sums_of(part).items() if key not in own and not key.startswith("/'random'")
        }
        first = first or sums
        other = next((key for key in first.keys() | sums.keys() if first.get(key) != sums.get(key)), None)
        if other is not None:
            what = "what is no tensor" if other == "plain" else other
            raise UnusableError(
                f"{len(parts)} ranks made version {part.identity.number or part.number} of the snapshot {name}, of "
                f"step {part.identity.step}, and {what} of rank {rank} is not that of rank {min(parts)}; restore it on "
                f"{len(parts)} ranks, or snapshot under another name. Nothing was changed"
            )


class Resharded:
    """The DTensors of a version, as the model of this job lays them out.

    Parameters
    ----------
    name : str
        The name of the snapshot.
    mine : Part
        The part from which this rank takes the state.
    parts : dict of int to Part
        Those of all ranks.
    reader : callable
        How the state of a part is made, and what reads its tensors.
    model, optimizer
        What is filled: their DTensors say how.
    has_same_ranks : bool
        Whether as many ranks made it as restore it.
    """

    def __init__(
        self,
        name: str,
        mine: Part,
        parts: dict[int, Part],
        reader: Reader,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        has_same_ranks: bool,
    ) -> None:
        self._name, self._mine, self._parts, self._reader = name, mine, parts, reader
        self._has_same_ranks = has_same_ranks
        self._model, self._optimizer = model, optimizer
        self._targets: dict[str, Any] | None = None
        self._made: dict[str, Any] | None = None

    def of(self, leaf: Leaf, saved: Any, read: Callable[[Leaf], torch.Tensor]) -> Any:
        """The DTensor of a leaf."""
        path = leaf["shard"]["tensor"]
        target = self._target(path)
        if target is None:
            raise UnusableError(
                f"{path} of the snapshot {self._name} is a DTensor, and in this job it is none; shard the model as the "
                "job that made it"
            )
        layout = layout_of(target)
        is_same = all(layout[key] == leaf["layout"][key] for key in ("ranks", "placed"))
        if is_same and self._has_same_ranks:
            return dtensor_of(leaf, read(leaf["shard"]), target.device_mesh, target.placements)
        if self._made is None:
            self._made = self._reshard(saved)
        return self._made[path]

    def _target(self, path: str) -> Any:
        """The DTensor of this job that lies as the one of this place does."""
        if self._targets is None:
            self._targets = {f"/'model'/{key!r}": it for key, it in self._model.state_dict().items()}
            groups = [] if self._optimizer is None else self._optimizer.param_groups
            for index, parameter in enumerate(parameter for group in groups for parameter in group["params"]):
                self._targets[f"/'optimizer'/'state'/{index!r}"] = parameter
        found = self._targets.get(path)
        if found is None:
            found = self._targets.get(path.rpartition("/")[0])
        return found if hasattr(found, "placements") else None

    def _reshard(self, saved: Any) -> dict[str, Any]:
        """All DTensors of the version, by the planner of ``torch.distributed.checkpoint``."""
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.tensor import DTensor

        leaves = {name: leaf for name, leaf in by_dotted_name(saved["state"]).items() if "shard" in leaf}
        made: dict[str, Any] = {}
        for name, leaf in leaves.items():
            target = self._target(leaf["shard"]["tensor"])
            if target is None or list(target.shape) != list(leaf["layout"]["shape"]):
                continue
            local = torch.empty_like(target.to_local(), dtype=leaf["shard"]["dtype"], device="cpu")
            made[name] = dtensor_of(leaf, local, target.device_mesh, target.placements)
        reader = _parts_reader(leaves, self._parts, self._reader)
        planner = DefaultLoadPlanner()
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, False)
        planner.set_up_planner(made, metadata, False)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(planner.finish_plan(plan), planner).wait()
        assert all(isinstance(it, DTensor) for it in made.values())
        return {leaf["shard"]["tensor"]: made[name] for name, leaf in leaves.items() if name in made}


def _parts_reader_class() -> Any:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.storage import StorageReader
    from torch.futures import Future

    class PartsReader(StorageReader):
        """Reads chunks of DTensors from the parts of all ranks, in the pool or on disk."""

        def __init__(self, leaves: dict[str, Leaf], parts: dict[int, Part], reader: Reader) -> None:
            self._of: dict[Any, tuple[int, Leaf]] = {}
            self._parts, self._reader = parts, reader
            self._open: dict[int, Any] = {}
            kinds: dict[str, Any] = {}
            for rank, part in parts.items():
                saved, read = reader(part)
                self._open[rank] = read
                for name, leaf in by_dotted_name(saved["state"]).items():
                    if name not in leaves or "shard" not in leaf:
                        continue
                    chunk = ChunkStorageMetadata(
                        torch.Size(leaf["layout"]["offset"]), torch.Size(leaf["shard"]["shape"])
                    )
                    properties = TensorProperties(dtype=leaf["shard"]["dtype"])
                    known = kinds.setdefault(
                        name, TensorStorageMetadata(properties, torch.Size(leaf["layout"]["shape"]), [])
                    )
                    if 0 in chunk.sizes or any(it.offsets == chunk.offsets for it in known.chunks):
                        continue
                    self._of[MetadataIndex(name, chunk.offsets, len(known.chunks))] = rank, leaf["shard"]
                    known.chunks.append(chunk)
            self._metadata = Metadata(kinds, storage_data=self._of)

        def reset(self, checkpoint_id: Any = None) -> None:
            """Has nothing to begin."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            """That of all parts together."""
            return self._metadata

        def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
            """Has nothing to set up."""

        def prepare_local_plan(self, plan: Any) -> Any:
            """The plan as it is."""
            return plan

        def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
            """The plans as they are."""
            return plans

        def read_data(self, plan: Any, planner: Any) -> Any:
            """Reads the items of a plan."""
            for item in plan.items:
                rank, leaf = self._of[item.storage_index]
                whole = self._open[rank](leaf)
                for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    whole = whole.narrow(dim, offset, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(whole)
                planner.commit_tensor(item, target)
            done: Any = Future()
            done.set_result(None)
            return done

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
            """It has none."""
            return True

    return PartsReader


def _parts_reader(leaves: dict[str, Leaf], parts: dict[int, Part], reader: Reader) -> Any:
    # Its import takes a second, and few jobs need it.
    return _parts_reader_class()(leaves, parts, reader)
