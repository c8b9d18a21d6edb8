"""Time our own GPT as a foreign module of gptpar.initialize beside the same GPT on the pretraining path.

    PYTHONPATH=. python benchmarks/own_gpt_as_module.py [--rounds 2] [--steps 20] [--warmup-steps 15] [--tiny]
        [--json FILE] [flags of gptpar benchmark]

The pretraining path is `gptpar benchmark`. The module takes its steps by `train_batch`. Both record steps as graphs on
a GPU and compile the blocks. Both read the same flags; by default 350M, sequence 1024, micro-batch 16, bf16 with fp32
master parameters. Each run is a process of its own, on one device. A round is four runs: module, pretraining,
pretraining, module. The JSON line has the speed of each path (the median over its runs of the speed at the run's median
step) and the ratio of the two.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gptpar
from gptpar.cli.benchmark.machine import about_machine, peak_memory
from gptpar.cli.benchmark.measure import parse
from gptpar.cli.benchmark.runner import append_line, run_command, terminated_like_ctrl_c
from gptpar.config import Config
from gptpar.config.sections.precision import wants_graph
from gptpar.config.validate import resolve
from gptpar.engine.readings import TimingEvent
from gptpar.model.block import Block
from gptpar.model.gpt import gpt_model
from gptpar.pipeline.stage import Stage
from gptpar.run.data import vocabulary_of, with_vocabulary
from gptpar.system.command_line import not_negative_int, positive_int
from gptpar.topology.initial_values import initialise
from gptpar.topology.world import open_world

NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
DEFAULT = f"--preset 350M --seq-length 1024 --micro-batch-size 16 --bf16 {NO_DROPOUT}"
TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 512 "
    f"--make-vocab-size-divisible-by 512 --micro-batch-size 4 --bf16 {NO_DROPOUT}"
)
PRETRAINING, MODULE = "pretraining", "module"
TURNS = (MODULE, PRETRAINING, PRETRAINING, MODULE)
TIMEOUT_S = 600.0
TIMEOUT_MINUTES = 10.0  # of a collective


class Gpt(nn.Module):
    """Our layers as anybody's module: tokens and labels [samples, length] -> [] the mean loss.

    Args:
        config: complete, with its vocabulary.
        device: of the parameters, which are fp32.
    """

    def __init__(self, config: Config, device: torch.device):
        super().__init__()
        self.stage = Stage(gpt_model(config.model).specs)
        infos = self.stage.infos()
        memory = {name: torch.empty(info.shape, device=device) for name, info in infos.items()}
        buffers = self.stage.buffer_infos()
        memory |= {name: torch.empty(info.shape, dtype=info.dtype, device=device) for name, info in buffers.items()}
        self.stage.place(memory)
        initialise(
            {name: memory[name] for name in infos}, {name: info.init for name, info in infos.items()}, config.data.seed
        )

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.stage(tokens, {"labels": labels, "seq_length": tokens.shape[1]})


def deepspeed_config(config: Config) -> dict[str, Any]:
    """The same training as a DeepSpeed user writes it; the learning rate is constant."""
    how, dtype, on_gpu = config.optimizer, config.precision.dtype, torch.cuda.is_available()
    betas = [how.adam_beta1, how.adam_beta2]
    return {
        "train_micro_batch_size_per_gpu": config.batch.micro_batch_size,
        "gradient_accumulation_steps": config.batch.global_batch_size // config.batch.micro_batch_size,
        "gradient_clipping": how.clip_grad,
        **({dtype: {"enabled": True}} if dtype in ("bf16", "fp16") else {}),
        "optimizer": {"type": "AdamW", "params": {"lr": how.lr, "betas": betas, "eps": how.adam_eps}},
        "gptpar": {
            "units": [Block.__name__],
            "compile": on_gpu and config.precision.compile,
            "step_graph": on_gpu and wants_graph(config, 1),
        },
        "steps_per_print": 10**9,
    }


def micro_batches(config: Config) -> Iterator[dict[str, torch.Tensor]]:
    """Random tokens without end, in pinned host memory where there is a GPU, drawn once."""
    generator = torch.Generator().manual_seed(config.data.seed)
    shape = (config.batch.micro_batch_size, config.model.seq_length + 1)
    drawn = [torch.randint(0, config.model.padded_vocab_size, shape, generator=generator) for _ in range(8)]
    made = [{"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()} for tokens in drawn]
    if torch.cuda.is_available():
        made = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in made]
    while True:
        yield from made


def time_module(argv: list[str]) -> None:
    """Print the JSON line of one run through gptpar.initialize."""
    warnings.filterwarnings("error", message="train_batch launches each step")  # steps without graphs are not compared
    parsed = parse(argv)
    config, _ = resolve(parsed, 1)
    config = with_vocabulary(config, vocabulary_of(config.tokenizer))
    with open_world(None, TIMEOUT_MINUTES) as (_, device):
        module = Gpt(config, device)
        named, decay = module.stage.global_parameters(), config.optimizer.weight_decay
        groups = [
            {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": decay},
            {"params": [p for p in named.values() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        engine, *_ = gptpar.initialize(model=module, model_parameters=groups, config=deepspeed_config(config))
        batches, moments = micro_batches(config), []
        for _ in range(parsed.rest.warmup_steps + parsed.rest.steps + 1):
            moments.append(TimingEvent(device))
            loss = engine.train_batch(batches)
        last_loss = loss.item()  # waits for the device, so that all events are recorded
        ms = [1e3 * later.seconds_since(earlier) for earlier, later in zip(moments, moments[1:], strict=False)]
        median = statistics.median(ms[parsed.rest.warmup_steps :])
        tokens = config.batch.global_batch_size * config.model.seq_length
        line = {
            "params": sum(p.numel() for p in named.values()),
            "tokens_per_s": round(tokens / median * 1e3, 1),
            "ms_per_step": round(median, 3),
            **peak_memory(device.type == "cuda"),
            "loss": round(last_loss, 4),
        }
        engine.close()
    print(json.dumps(line), flush=True)


def take_turns(words: list[str], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Run both paths, in turns.

    Returns:
        The JSON lines of each path's runs.

    Raises:
        SystemExit: a run failed.
    """
    commands = {
        MODULE: [sys.executable, str(Path(__file__).resolve()), "--one-run-as-module", *words],
        PRETRAINING: [sys.executable, "-m", "gptpar", "benchmark", "--nproc-per-node", "1", *words],
    }
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for name in TURNS * rounds:
        done = run_command(commands[name], TIMEOUT_S)
        if done.result is None:
            raise SystemExit(f"{' '.join(commands[name])} failed: {done.failure}")
        print(f"{name}: {done.result['tokens_per_s']:,} tokens/s", file=sys.stderr, flush=True)
        lines[name].append(done.result)
    return lines


def summary(lines: dict[str, list[dict[str, Any]]], flags: str) -> dict[str, Any]:
    """One JSON line about both paths."""
    runs = {name: [line["tokens_per_s"] for line in of] for name, of in lines.items()}
    speed = {name: statistics.median(of) for name, of in runs.items()}
    module, pretraining = lines[MODULE][-1], lines[PRETRAINING][-1]
    if module["params"] != pretraining["params"]:
        raise SystemExit(f"the models differ: {module['params']} and {pretraining['params']} parameters")
    same = "model params layout seq_length micro_batch_size global_batch_size tokens_per_step precision cuda_graph"
    return {
        "contender": "our GPT through gptpar.initialize, beside the pretraining path",
        "tokens_per_s": round(speed[MODULE], 1),
        "pretraining_tokens_per_s": round(speed[PRETRAINING], 1),
        "ratio": round(speed[MODULE] / speed[PRETRAINING], 4),
        "tokens_per_s_of_runs": runs[MODULE],
        "pretraining_tokens_per_s_of_runs": runs[PRETRAINING],
        "peak_mem_gib": module["peak_mem_gib"],
        "pretraining_peak_mem_gib": pretraining["peak_mem_gib"],
        **{name: pretraining[name] for name in same.split()},
        "steps": pretraining["steps"],
        "flags": flags,
        **about_machine(1),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive_int, default=1, help="rounds of four runs each")
    parser.add_argument("--steps", type=positive_int, default=20, help="timed steps of a run")
    parser.add_argument("--warmup-steps", type=not_negative_int, default=15, help="steps before the timed ones")
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU trains in milliseconds")
    parser.add_argument("--json", type=Path, help="append the line to this file")
    if sys.argv[1:2] == ["--one-run-as-module"]:
        time_module(sys.argv[2:])
        return
    arguments, given = parser.parse_known_args()
    words = [*(TINY if arguments.tiny else DEFAULT).split(), *given]
    words += ["--steps", str(arguments.steps), "--warmup-steps", str(arguments.warmup_steps)]
    with terminated_like_ctrl_c():
        line = summary(take_turns(words, arguments.rounds), " ".join(words))
    if arguments.json is not None:
        append_line(arguments.json, line)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
