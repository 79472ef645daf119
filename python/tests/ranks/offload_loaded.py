"""`from_pretrained` of transformers inside a scope: the weights lie in its tier, as the kernel says.

Arguments: a folder.
"""

import sys
import warnings

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from polder import offload

(folder,) = sys.argv[1:]
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512}
known = LlamaForCausalLM(LlamaConfig(**SHAPE, num_attention_heads=4, tie_word_embeddings=True)).bfloat16()
known.save_pretrained(folder)
warnings.simplefilter("error", offload.PlacementWarning)
with offload.tier("node:0") as scope:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
placed = sum(it.nbytes for it in model.parameters() if it.nbytes >= 64 << 10)
((place, nbytes),) = scope.where()
assert place == "node 0" and nbytes >= placed > 0, (scope.where(), placed)
# Whole pages, and nothing twice.
assert nbytes <= placed + 4096 * len(list(model.parameters())) + (128 << 10), (scope.where(), placed)
assert all(map(torch.equal, model.parameters(), known.parameters()))
assert model.lm_head.weight is model.model.embed_tokens.weight
sys.stdout.write("placed\n")
