"""Counts the parameters of every family of models that ``polder plan`` reads as a ``config.json``, by transformers.

Writes ``crates/sim/tests/families.jsonl``, which a test of ``polder-sim`` holds its own counts against: of each family
the defaults of its class, and then sizes that are no defaults, with all keys that the class writes. Run it with an
environment that has transformers: ``.cache/transformers/bin/python scripts/families.py``.

With ``--vary target/release/polder-plan`` it writes nothing. It changes and leaves out one key at a time of each
family's file, and prints what that command counts otherwise than transformers. A file that it refuses is not printed.
"""

import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

CRATE = Path(__file__).parents[1] / "crates/sim"
#: Sizes that are no class's defaults, under any name that a family has for them.
SIZES = {
    2048: ["hidden_size", "n_embd", "d_model"],
    3: ["num_hidden_layers", "n_layer", "n_layers", "num_layers", "expansion_ratio", "intermediate_multiple_size"],
    16: ["num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"],
    4: ["num_key_value_heads", "num_kv_heads"],
    160: ["head_dim"],
    5632: ["intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "dff"],
    1024: ["moe_intermediate_size"],
    6: ["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"],
    2: ["num_experts_per_tok", "num_experts_per_token", "moe_topk", "n_shared_experts", "moe_num_shared_experts"],
    160000: ["vocab_size"],
}
#: What some families need beside, or have no default for.
BESIDE: dict[str, dict[str, Any]] = {
    # As many channels as the residual stream has after its expansion.
    "bamba": {"hidden_size": 4096},
    "falcon": {"new_decoder_architecture": True},
    "glm4_moe": {"head_dim": 128},
    "gpt_neo": {"num_layers": 3, "attention_types": [[["global"], 3]]},
    "granitemoehybrid": {"hidden_size": 4096},
    # Its output projection is square, so that no other width runs.
    "helium": {"head_dim": 128},
    # Its class passes over experts; published files say that there is one.
    "hunyuan_v1_dense": {"head_dim": 160, "num_experts": 1},
    "hunyuan_v1_moe": {"head_dim": 160},
    # Its padding is the last of its own vocabulary.
    "kimi_linear": {"pad_token_id": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"hidden_size": 4096, "num_heads": 128, "head_dim": 64},
    "ministral": {"head_dim": 160},
    # transformers' class takes 4 whatever this says; the code that published models are trained by does not.
    "mpt": {"expansion_ratio": 4},
    "nemotron": {"num_key_value_heads": 48},
}
#: What every class writes, and nothing is said by.
ASIDE = {
    "id2label",
    "label2id",
    "transformers_version",
    "return_dict",
    "use_cache",
    "initializer_range",
    "time_step_limit",
}
#: Families whose class has no sizes for all blocks; tests/models.jsonl has published files of them.
LISTED = {"gemma4_text"}
#: Files in which a class reads something else than its defaults and the sizes above show; ``--vary`` found their kinds.
OTHERS: list[dict[str, Any]] = [
    # The width that a file has counts, not what `expand` makes of the residual stream.
    {
        "model_type": "falcon_mamba",
        "num_hidden_layers": 4,
        "hidden_size": 2048,
        "expand": 16,
        "intermediate_size": 2048,
    },
    {"model_type": "mamba", "num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 2048},
    # A mixture of one expert is one, but for Jamba.
    {"model_type": "aria_text", "num_hidden_layers": 4, "moe_num_experts": 1, "moe_topk": 1},
    {"model_type": "hunyuan_v1_moe", "num_hidden_layers": 4, "head_dim": 128, "num_experts": 1, "moe_topk": 1},
    {"model_type": "jamba", "num_hidden_layers": 8, "num_experts": 1, "num_experts_per_tok": 1},
    {"model_type": "kimi_linear", "num_hidden_layers": 4, "num_experts": 1, "num_experts_per_token": 1},
    {"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 1, "num_experts_per_tok": 1},
    # No block attends.
    {"model_type": "minimax", "num_hidden_layers": 2, "head_dim": 160, "layer_types": ["linear_attention"] * 2},
    # What transformers writes of blocks that look at all tokens.
    {
        "model_type": "gemma4_text",
        "num_hidden_layers": 2,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {"1": {"head_dim": 1024, "num_key_value_heads": 2}},
    },
]


def counted(kind: str, classes: list[str], sizes: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The configuration of such a model as its class writes it, and the parameters of the model."""
    config = CONFIG_MAPPING[kind].from_dict(dict(sizes))
    known = [name for name in classes if hasattr(transformers, name)]
    with torch.device("meta"):
        if known:
            model = getattr(transformers, known[-1])(config)
            model.tie_weights()
            head = 0
        else:
            # The text part of a model that sees: its head is a matrix of its own, or the embedding.
            model = transformers.AutoModel.from_config(config)
            head = 0 if config.tie_word_embeddings else config.hidden_size * config.vocab_size
    return config.to_dict(), head + sum(it.numel() for it in model.parameters())


def sized(kind: str, family: dict[str, Any]) -> dict[str, Any]:
    """Sizes of a family that are no defaults of its class."""
    config = CONFIG_MAPPING[kind]()
    own = BESIDE.get(kind, {})
    sizes = {name: size for size, names in SIZES.items() for name in names if name in family["keys"]}
    sizes = {name: size for name, size in sizes.items() if hasattr(config, name) or family["keys"][name] is None}
    aliases = set(config.attribute_map or {})
    sizes = {name: size for name, size in sizes.items() if name not in aliases} | own
    return sizes | {"tie_word_embeddings": not getattr(config, "tie_word_embeddings", False)}


def changes(file: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Files in which one key is left out or says something else, with what that is."""
    for key, value in file.items():
        match value:
            case bool():
                others: list[Any] = [not value]
            case int():
                others = [0, 1, value // 2, value + 1, value * 2]
            case float():
                others = [0.5, 2 * value]
            case list():
                others = [value[::-1], value[:1] * len(value), value[-1:] * len(value), []]
            case None:
                others = [True, 2, 64, 1536]
            case _:
                others = []
        if key != "model_type":
            yield f"without {key}", {name: it for name, it in file.items() if name != key}
        yield from ((f"{key}: {other}", file | {key: other}) for other in others if other != value)


def vary(command: str, families: dict[str, Any]) -> None:
    """Prints the files with one change whose parameters a command counts otherwise than transformers."""
    asked = [command, "offload", "--platform", "finetuning-a", "--context", "128", "--dram", "100000 TiB", "--json"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        for kind, family in families.items():
            if kind not in CONFIG_MAPPING or kind in LISTED:
                continue
            # A small vocabulary, beside which the blocks count.
            sizes = sized(kind, family) | {"vocab_size": 4096, "tie_word_embeddings": False, "pad_token_id": None}
            written, _ = counted(kind, family["class"], sizes)
            file = {key: it for key, it in (written | sizes).items() if key not in ASIDE} | {"model_type": kind}
            for change, changed in changes(file):
                try:
                    _, parameters = counted(kind, family["class"], changed)
                except Exception:
                    continue
                path.write_text(json.dumps(changed))
                ran = subprocess.run([*asked, "--model", str(path)], capture_output=True, text=True, check=False)
                objects = json.loads(ran.stdout)["points"][0]["objects"] if ran.returncode == 0 else []
                for count in (it["bytes"] / 2 for it in objects if it["name"] == "bf16 parameters"):
                    # Biases and norms count in a model that is hardly there.
                    if parameters > 10_000_000 and abs(count / parameters - 1) > 1e-3:
                        print(f"{kind}, {change}: {count:.0f}, transformers {parameters}")


def main() -> None:
    """Writes a line for the defaults of each family, one for other sizes, and those of other files."""
    warnings.filterwarnings("ignore")
    families = json.loads((CRATE / "src/formats/families.json").read_text())
    if "--vary" in sys.argv:
        return vary(sys.argv[-1], families)
    lines: list[dict[str, Any]] = []
    for kind, family in families.items():
        if kind not in CONFIG_MAPPING or kind in LISTED:
            continue
        own = BESIDE.get(kind, {})
        must = {"tie_word_embeddings": False} if family["keys"].get("tie_word_embeddings") == "must" else {}
        if "must" not in family["keys"].values() or must:
            _, parameters = counted(kind, family["class"], own | must)
            shown = {} if kind == "nemotron" else own
            lines.append({"config": {"model_type": kind} | shown | must, "parameters": parameters})
        sizes = sized(kind, family)
        said, parameters = counted(kind, family["class"], sizes)
        said = {key: it for key, it in (said | sizes).items() if it and key not in ASIDE}
        lines.append({"config": said | {"tie_word_embeddings": sizes["tie_word_embeddings"]}, "parameters": parameters})
    for file in OTHERS:
        kind = file["model_type"]
        lines.append({"config": file, "parameters": counted(kind, families[kind]["class"], file)[1]})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (CRATE / "tests/families.jsonl").write_text(text)


if __name__ == "__main__":
    main()
