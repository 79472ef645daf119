"""Counts the parameters of every family of models that ``polder plan`` reads as a ``config.json``, by transformers.

Writes ``crates/sim/tests/families.jsonl``, which a test of ``polder-sim`` holds its own counts against: of each family
the defaults of its class, and then sizes that are no defaults, with all keys that the class writes. Run it with an
environment that has transformers: ``.cache/transformers/bin/python scripts/families.py``.
"""

import json
import warnings
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
    2: ["num_experts_per_tok", "moe_topk", "n_shared_experts", "moe_num_shared_experts"],
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


def counted(kind: str, classes: list[str], sizes: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The configuration of such a model as its class writes it, and the parameters of the model."""
    config = CONFIG_MAPPING[kind](**sizes)
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


def main() -> None:
    """Writes a line for the defaults of each family, and one for other sizes."""
    warnings.filterwarnings("ignore")
    families = json.loads((CRATE / "src/formats/families.json").read_text())
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
        config = CONFIG_MAPPING[kind]()
        sizes = {name: size for size, names in SIZES.items() for name in names if name in family["keys"]}
        sizes = {name: size for name, size in sizes.items() if hasattr(config, name) or family["keys"][name] is None}
        aliases = set(config.attribute_map or {})
        sizes = {name: size for name, size in sizes.items() if name not in aliases} | own
        sizes |= {"tie_word_embeddings": not getattr(config, "tie_word_embeddings", False)}
        said, parameters = counted(kind, family["class"], sizes)
        said = {key: it for key, it in (said | sizes).items() if it and key not in ASIDE}
        lines.append({"config": said | {"tie_word_embeddings": sizes["tie_word_embeddings"]}, "parameters": parameters})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (CRATE / "tests/families.jsonl").write_text(text)


if __name__ == "__main__":
    main()
