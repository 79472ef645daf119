"""vLLM's load format ``polder``: an engine's weights come from a pool.

A user types it as docs/weights.md says::

    vllm serve MODEL --load-format polder --model-loader-extra-config '{"pool": "/dev/dax0.0", "name": "llm"}'

``MODEL`` is a folder or a repository with the model's configuration and tokenizer.
"""

from collections.abc import Mapping
from typing import Any

try:
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
except ImportError as error:
    raise ImportError(f"polder.weights.vllm needs vLLM 0.30 to 0.33 beside Polder: {error}") from error

from polder import weights
from polder.errors import ArgumentError
from polder.pool import Pool

# vLLM is no part of the environment in which Polder is checked.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false, reportUntypedBaseClass=false
# pyright: reportUntypedFunctionDecorator=false, reportUntypedClassDecorator=false

__all__ = ["PolderLoader", "fingerprint_of"]

_OPTIONS = {"name": str, "number": int, "pool": str}


def _options(config: Any) -> Mapping[str, Any]:
    """What the user has typed, checked."""
    given = config.model_loader_extra_config or {}
    for key, value in given.items():
        kind = _OPTIONS.get(key)
        if kind is None or type(value) is not kind:
            raise ArgumentError(
                f"--model-loader-extra-config: {key!r} is {value!r}; it takes name, a text, number, a whole "
                "number, and pool, a path"
            )
    if "name" not in given:
        raise ArgumentError('--load-format polder: say whose weights, --model-loader-extra-config \'{"name": "llm"}\'')
    return given


def _opened(config: Any, pool: Pool) -> weights.Weights:
    options = _options(config)
    return weights.open(options["name"], options.get("number"), pool=pool)


def fingerprint_of(config: Any) -> str:
    """The fingerprint of the weights that a ``LoadConfig`` of this format names.

    Raises
    ------
    ArgumentError
        It names no number: between two processes of an engine, the newest version may be another.
    """
    options = _options(config)
    if "number" not in options:
        raise ArgumentError(
            'a cache of blocks needs to know whose they are: give --model-loader-extra-config a "number", that of the '
            "version to load, as polder.weights.open(NAME).number says it"
        )
    with Pool(options.get("pool")) as pool, _opened(config, pool) as found:
        return found.fingerprint


@register_model_loader("polder")
class PolderLoader(BaseModelLoader):
    """Loads the weights of an engine from a pool, each tensor once for each worker.

    Options, by ``--model-loader-extra-config``: ``name``, that of the weights; ``number``, that of a version, by
    default the newest; ``pool``, its path, by default that of `polder.Pool`.
    """

    def download_model(self, model_config: Any) -> None:
        """Nothing: the weights are in the pool."""
        _options(self.load_config)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Loads a version into a model.

        Raises
        ------
        ArgumentError
            The pool has not all parameters of the model, or several workers load and no number is given.
        """
        workers = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        options = _options(self.load_config)
        if workers > 1 and "number" not in options:
            raise ArgumentError(
                f"{workers} workers load these weights, and the newest version may be another for each; give "
                '--model-loader-extra-config a "number"'
            )
        with Pool(options.get("pool")) as pool, _opened(self.load_config, pool) as weights:
            loaded = model.load_weights(weights.items())
            missing = {name for name, _ in model.named_parameters()} - (loaded or set())
            if loaded is not None and missing and model_config.quantization is None:
                raise ArgumentError(
                    f"version {weights.number} of the weights {weights.name} lacks {', '.join(sorted(missing)[:5])}"
                    f"{' and more' if len(missing) > 5 else ''}; publish all of the model's state_dict()"
                )
