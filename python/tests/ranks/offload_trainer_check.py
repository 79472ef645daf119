"""What `polder offload check` says to paste below a Trainer: it runs as it is printed, and trains the same bits.

Arguments: a folder on a disk, and the name of the optimizer, as the Trainer calls it.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

from polder import offload

SCRIPT = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_attention_heads=4, num_key_value_heads=2, use_cache=False))
args = TrainingArguments("out", max_steps=50, per_device_train_batch_size=4, gradient_accumulation_steps=2, optim=OPTIM,
    learning_rate=1e-2, use_cpu=True, disable_tqdm=True, logging_strategy="no", report_to=[], save_strategy="no")
draw = torch.Generator().manual_seed(1)
rows = [torch.randint(128, (128,), generator=draw) for _ in range(64)]
mine = Trainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
PASTE
mine.train()
"""

folder, optim = sys.argv[1:]
os.chdir(folder)
script = SCRIPT.replace("OPTIM", repr(optim))
Path("train.py").write_text(script.replace("PASTE", ""))
command = [sys.executable, "-P", "-m", "polder.offload.check", "--json", "train.py"]
found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
# As users do, but with less of the disk.
offload.measured = functools.partial(offload.measured, nbytes=1 << 20)
runs = []
for lines in ([], found["paste"]):
    known = {"__name__": "__main__"}
    exec(script.replace("PASTE", "\n".join(lines)), known)
    runs.append(known)
plain, placed = ([it.detach() for it in known["model"].parameters()] for known in runs)
assert "activations" in {row.object for row in runs[1]["placed"].rows()}, runs[1]["placed"].rows()
assert all(one.equal(other) for one, other in zip(plain, placed, strict=True)), "other weights"
sys.stdout.write("equal\n")
