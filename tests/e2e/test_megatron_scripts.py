"""Flags of two of DeepSpeed's tutorials for Megatron's GPT, in fp32 and in small: a plain PyTorch loop's numbers."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from gptpar.data.build import SampleSpec, build_train_valid_test
from tests.documents import ROOT
from tests.e2e.commands import gptpar, said_by

LENGTH, VOCABULARY = 32, 61
SMALL = (
    f"--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length {LENGTH} --max-position-embeddings {LENGTH} "
    f"--mock-data --vocab-size {VOCABULARY} --attention-dropout 0 --hidden-dropout 0 --log-interval 1"
)


class Script(NamedTuple):
    """A launch script's flags and JSON, and what they mean.

    Attributes:
        warmup, decay: tokens until the peak of the learning rate and until its lowest, with the batches of one process.
        batches: samples of each step with one process, repeated by as many processes as ``grows`` says.
        grows: whether the batch is a number of samples a process.
    """

    flags: str
    config: dict[str, Any]
    peak: float
    lowest: float
    beta2: float
    weight_decay: float
    warmup: int
    decay: int
    batches: list[int]
    grows: bool

    def rate(self, tokens: int) -> float:
        if tokens <= self.warmup:
            return self.peak * tokens / self.warmup
        ratio = min(1.0, (tokens - self.warmup) / (self.decay - self.warmup))
        return self.lowest + (self.peak - self.lowest) * 0.5 * (math.cos(math.pi * ratio) + 1)


TWIN_FLOW = Script(
    "--override-opt_param-scheduler --adam-beta1 0.9 --adam-beta2 0.95 --tensor-model-parallel-size 1 --num-experts 1 "
    "--moe-expert-parallel-size 1 --moe-loss-coeff 0.01 --moe-train-capacity-factor 1.0 --moe-min-capacity 4 "
    "--lr-decay-tokens 4096 --lr-warmup-tokens 1024 --micro-batch-size 2 --exit-duration-in-mins 30000000 "
    "--rampup-batch-size 4 4 24 --global-batch-size 16 --train-tokens 4992 --train-samples 468 --lr 3.0e-4 "
    "--min-lr 3.0e-5 --lr-decay-style cosine --eval-interval 100 --eval-iters 1 --save-interval 1000 "
    "--weight-decay 0.1 --clip-grad 1.0 --hysteresis 2 --num-workers 0 --timing-log-level 1 --no-pipeline-parallel "
    "--cpu-optimizer --checkpoint-activations --pipeline-model-parallel-size 1 --deepspeed-activation-checkpointing",
    {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.3},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "fp16": {"enabled": False, "loss_scale": 0, "hysteresis": 2},
        "bf16": {"enabled": False},
    },
    *(3e-4, 3e-5, 0.95, 0.1, 1024, 4096),
    [4, 4, 8, 12, *[16] * 8],
    grows=False,
)
TEN_BILLION = Script(
    "--model-parallel-size 1 --batch-size 2 --train-iters 12 --resume-dataloader --lazy-loader --lr 0.00015 "
    "--no-load-optim --lr-decay-style cosine --weight-decay 1e-2 --clip-grad 1.0 --warmup .25 --eval-iters 1 "
    "--checkpoint-activations --deepspeed-activation-checkpointing",
    {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.00015, "weight_decay": 1e-2}},
        "zero_optimization": {"stage": 2, "cpu_offload": True, "reduce_bucket_size": 50000000},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
    },
    *(1.5e-4, 0.0, 0.999, 1e-2, 3 * 2 * LENGTH, 12 * 2 * LENGTH),
    [2] * 12,
    grows=True,
)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny GPT-2, saved by transformers; its norms and biases are random, too, not 1 and 0."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder)
    return folder


def read(folder: Path) -> torch.nn.Module:
    """The folder's GPT-2 in evaluation mode, without dropout."""
    import transformers

    return transformers.GPT2LMHeadModel.from_pretrained(folder)


def plain_steps(model: torch.nn.Module, script: Script, grown: int) -> Iterator[tuple[float, float]]:
    """(loss, learning rate) of each step of nothing but torch; ``model`` is trained."""
    batches = [grown * size for size in script.batches]
    train, _, _ = build_train_valid_test((sum(batches), 0, 0), SampleSpec(LENGTH, 1234), mock_vocab_size=VOCABULARY)
    parameters, consumed = list(model.parameters()), 0
    groups = [
        {"params": [one for one in parameters if one.dim() > 1], "weight_decay": script.weight_decay},
        {"params": [one for one in parameters if one.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, script.beta2))
    for size in batches:
        assert train is not None
        tokens = torch.stack([torch.as_tensor(train[consumed + row]).long() for row in range(size)])
        logits = model(tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        rate = script.rate(consumed // grown * LENGTH)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        consumed += size
        yield loss.item(), rate


@pytest.mark.parametrize(
    ("script", "nproc"),
    [(TWIN_FLOW, 1), (TWIN_FLOW, 2), (TEN_BILLION, 2)],
    ids=["twin_flow", "twin_flow by two", "ten_billion by two"],
)
def test_scripts_of_deepspeeds_tutorials_follow_plain_torch(
    script: Script, nproc: int, start: Path, tmp_path: Path
) -> None:
    config, run, exported = tmp_path / "ds.json", tmp_path / "run", tmp_path / "exported"
    config.write_text(json.dumps(script.config))
    program = ["launch", "--num_gpus", str(nproc), "pretrain_gpt.py", *f"{SMALL} {script.flags}".split()]
    folders = ["--load-hf", str(start), "--save", str(run), "--load", str(run)]
    said_by([*program, *folders, "--deepspeed", "--deepspeed_config", str(config)], folder=ROOT / "examples")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if "lm_loss" in line]
    steps = [(line["lm_loss"], line["learning_rate"]) for line in lines]

    model = read(start)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    plain = list(plain_steps(model, script, nproc if script.grows else 1))
    assert [rate for _, rate in steps] == pytest.approx([rate for _, rate in plain], rel=1e-12)
    assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in plain], rel=0, abs=1e-6 * plain[0][0])
    assert lines[-1]["consumed_tokens"] == LENGTH * sum(line["global_batch_size"] for line in lines)
    gptpar(f"{run} {exported} --no-tokenizer", "convert")
    for first, wanted, got in zip(before, model.parameters(), read(exported).parameters(), strict=True):
        assert (wanted - first).abs().max() > 1e-4
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)
