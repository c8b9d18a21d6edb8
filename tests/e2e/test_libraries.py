"""Libraries that import ``deepspeed`` train, save and resume under ``gptpar as-deepspeed``, with plain torch's numbers.

Tried with transformers 5.24 and accelerate 1.15. PYTHONPATH may name a folder that has them.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.e2e.commands import ROOT

WANTED = ("transformers", "accelerate")
MISSING = [name for name in WANTED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

MODEL = """
import json, sys, torch
from accelerate import Accelerator, PartialState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
SIZES = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, dtype=torch.float64)).double()
tokens = torch.randint(0, 97, (32, 16), generator=torch.Generator().manual_seed(5))
"""
TRAINER = """
out, config, resume = sys.argv[1:]
args = TrainingArguments(
    out, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, learning_rate=1e-3, logging_steps=1,
    save_steps=2, use_cpu=True, report_to=[], warmup_steps=1, disable_tqdm=True, deepspeed=config or None,
)
trainer = Trainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
trainer.train(resume_from_checkpoint=resume or None)
trainer.save_model(out + "/final")
if trainer.is_world_process_zero():
    print(json.dumps([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))
"""
ACCELERATE = """
PartialState(cpu=True)
out, resume = sys.argv[1:]
accelerator = Accelerator(gradient_accumulation_steps=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(tokens, batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if resume:
    accelerator.load_state(resume)
losses = []
for number, batch in enumerate(loader):
    if resume and number < 4:
        continue
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach()).mean().item())
    if number == 3 and not resume:
        accelerator.save_state(out)
state = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    torch.save(state, out + ".pt")
    print(json.dumps(losses))
"""
CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
        "reduce_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
LAUNCH = ("-m", "gptpar", "launch", "--nproc-per-node", "2")
AS_DEEPSPEED = ("-m", "gptpar", "as-deepspeed", "--", sys.executable)


def losses(*words: object, **variables: str) -> list[float]:
    """The losses that a program prints in its last line of JSON."""
    paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("[")][-1])


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=tolerance, atol=tolerance)


def test_trainer_with_zero3_on_the_cpu_is_as_without(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    program, config = tmp_path / "train.py", tmp_path / "ds.json"
    program.write_text(MODEL + TRAINER)
    config.write_text(json.dumps(CONFIG))
    plain, ours, resumed = (tmp_path / name for name in ("plain", "ours", "resumed"))
    expected = losses(*LAUNCH, program, plain, "", "")
    found = losses(*AS_DEEPSPEED, *LAUNCH, program, ours, config, "")
    assert len(found) == 4 and found == pytest.approx(expected, rel=1e-10)
    again = losses(*AS_DEEPSPEED, *LAUNCH, program, resumed, config, ours / "checkpoint-2")
    assert again == found
    weights = [load_file(folder / "final/model.safetensors") for folder in (plain, ours, resumed)]
    equal(weights[1], weights[0], 1e-10)
    equal(weights[2], weights[1], 0.0)


def test_an_accelerate_script_with_zero3_is_as_without(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(MODEL + ACCELERATE)
    plain, ours, resumed = (tmp_path / name for name in ("plain", "ours", "resumed"))
    expected = losses(*LAUNCH, program, plain, "", ACCELERATE_USE_CPU="true")
    launch = "-m accelerate.commands.launch --use_deepspeed --zero_stage 3 --offload_optimizer_device cpu "
    launch += "--gradient_accumulation_steps 2 --gradient_clipping 1.0 --zero3_save_16bit_model true "
    launch += "--zero3_init_flag true --mixed_precision no --num_processes 2 --main_process_port 0"
    found = losses(*AS_DEEPSPEED, *launch.split(), program, ours, "")
    assert found == pytest.approx(expected, rel=1e-10)
    again = losses(*AS_DEEPSPEED, *launch.split(), program, resumed, ours)
    assert again == found[4:]
    states = [torch.load(f"{folder}.pt") for folder in (plain, ours, resumed)]
    equal(states[1], {name.removeprefix("module."): value for name, value in states[0].items()}, 1e-10)
    equal(states[2], states[1], 0.0)
