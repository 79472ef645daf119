"""The Trainer of transformers: a placed run that a checkpoint cuts in two processes, held against an unplaced one.

Arguments: a folder on a disk, the fraction of states there, and the part of the run: first or last.
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from polder import offload, plan

folder, far, part = sys.argv[1:]
STEPS, SAVED = 50, 20
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}


class Stop(TrainerCallback):
    """Stops when the checkpoint is written, so that the rates fall as in a run of all steps."""

    def on_step_end(self, args, state, control, **_):
        if part == "first" and state.global_step == SAVED:
            control.should_training_stop = True


def run(placed: bool) -> LlamaForCausalLM:
    """The weights after all steps of this part; two accumulated batches a step, clipped gradients."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_attention_heads=4, num_key_value_heads=2, use_cache=False))
    model.activation_checkpointing_enable()
    args = TrainingArguments(
        output_dir=f"{folder}/{'placed' if placed else 'unplaced'}",
        max_steps=STEPS,
        save_steps=SAVED if placed else STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=0.1,
        learning_rate=1e-2,
        weight_decay=0.1,
        optim="adamw_torch_fused",
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        report_to=[],
    )
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(128, (128,), generator=draw) for _ in range(64)]
    batch = {"input_ids": torch.stack(rows[:4]), "labels": torch.stack(rows[:4])}
    tiers = [offload.Tier("dram", "1 GiB", 2e10, 2e10), offload.Tier("disk", "64 MiB", 2e9, 1e9, folder)]
    policy = {"optimizer states": [1 - float(far), float(far)], "activations": [0, 1]}
    saved = offload.saved_bytes(model, **batch)
    # What a plan takes from the live module are its own parameters; vectors are counted in round numbers.
    planned = plan.offload(model, "finetuning-a", context=128)
    weights = planned["placed_bytes"][planned["objects"].tolist().index("fp32 parameters")].sum()
    assert abs(weights / (4 * sum(it.numel() for it in model.parameters())) - 1) < 0.005, weights
    ours = {"optimizer_cls_and_kwargs": offload.trainer(model, args, policy, tiers=tiers, activations=saved)}
    rows = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, args, train_dataset=rows, callbacks=[Stop()], **(ours if placed else {}))
    trainer.train(resume_from_checkpoint=placed and part == "last")
    if placed:
        optimizer = trainer.optimizer.optimizer
        assert all(set(state) == {"step"} for state in optimizer.state.values()), "a state lies outside the placement"
        held = {(row.object, row.tier): row.bytes for row in optimizer.placed.rows()}
        assert held["activations", "disk"] >= saved > 0, held
        assert held["optimizer states", "disk"] >= float(far) * 8 * optimizer.elements() - 8192, held
    return model


torch.set_num_threads(1)
ours = run(placed=True)
if part == "first":
    assert (Path(folder) / "placed" / f"checkpoint-{SAVED}" / "optimizer.pt").is_file()
    sys.stdout.write("written\n")
else:
    reference = run(placed=False)
    assert all(map(torch.equal, ours.parameters(), reference.parameters())), "other weights"
    sys.stdout.write("equal\n")
