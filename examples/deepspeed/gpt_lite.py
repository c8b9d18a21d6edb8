"""Trains a small GPT on a file's bytes: data parallel, ZeRO, twin-flow, a pipeline, or 10 billion parameters.

gptpar launch --num_gpus=8 gpt_lite.py --deepspeed_config gpt_lite.json                  # ZeRO: add --zero 3
gptpar launch --num_gpus=8 gpt_lite.py --deepspeed_config gpt_lite.json --pipeline       # and --pipeline_spec_layers
gptpar launch --num_gpus=1 gpt_lite.py --deepspeed_config gpt_lite.json --run_memory_estimation_only
gptpar launch --num_gpus=1 gpt_lite.py --deepspeed_config twin_flow.json --zero 3 \\
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024        # 350M
gptpar launch --num_nodes 1 --num_gpus 1 gpt_lite.py --model-parallel-size 1 \\
    --num-layers 50 --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 --batch-size 10 \\
    --deepspeed_config ds_zero_offload.json --checkpoint-activations                     # 10B
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import gptpar.deepspeed as deepspeed
from common import initialize, make_parser, read_config, report, train_step
from model import Gpt, layer_specs, loss_fn


class Text(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """(inputs, labels), each [length], that begin at each byte of a file."""

    def __init__(self, path: Path, length: int):
        self.bytes, self.length = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long(), length

    def __len__(self) -> int:
        return max(0, len(self.bytes) - self.length)

    def __getitem__(self, begin: int) -> tuple[torch.Tensor, torch.Tensor]:
        sample = self.bytes[begin : begin + self.length + 1]
        return sample[:-1], sample[1:]


def make_model(args: argparse.Namespace) -> nn.Module:
    """The same initial values in each mode."""
    torch.manual_seed(0)
    specs = layer_specs(args.num_layers, args.hidden_size, args.num_attention_heads, args.seq_length)
    if not args.pipeline or args.plain:
        with deepspeed.zero.Init(enabled=not args.plain):
            return Gpt(specs, recompute=args.checkpoint_activations)
    stages = int(os.environ.get("WORLD_SIZE", 1))
    layers = specs if args.pipeline_spec_layers else [spec.build() for spec in specs]
    return deepspeed.pipe.PipelineModule(
        layers, stages, loss_fn=loss_fn, activation_checkpoint_interval=int(args.checkpoint_activations)
    )


def main() -> None:
    """Train."""
    parser = make_parser(__doc__, "gpt_lite.json")
    parser.add_argument("--text", type=Path, default=Path(__file__), metavar="FILE", help="default: this program")
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--num-attention-heads", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--batch-size", type=int, metavar="N", help="samples of a micro-batch, in place of the file's")
    parser.add_argument("--model-parallel-size", type=int, choices=[1], help="layers are not cut")
    parser.add_argument("--zero", type=int, choices=range(4), help="ZeRO stage, in place of the file's")
    parser.add_argument("--checkpoint-activations", action="store_true", help="recompute blocks in the backward pass")
    parser.add_argument("--pipeline", action="store_true", help="a stage on each process")
    parser.add_argument(
        "--pipeline_spec_layers", action="store_true", help="build only a stage's layers on its process"
    )
    parser.add_argument("--run_memory_estimation_only", action="store_true")
    args = parser.parse_args()
    model = make_model(args)
    if args.run_memory_estimation_only:
        zero = deepspeed.runtime.zero
        zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=8, num_nodes=1)
        zero.stage3.estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=8, num_nodes=1)
        return
    config = read_config(args)
    if args.zero is not None:
        config["zero_optimization"]["stage"] = args.zero
    if args.batch_size is not None:
        config["train_micro_batch_size_per_gpu"] = args.batch_size
    engine, batches = initialize(args, model, config, Text(args.text, args.seq_length))
    for step in range(args.steps):
        if args.pipeline and not args.plain:
            report(step, engine.train_batch())
        else:
            report(step, train_step(engine, batches, lambda tokens, labels: loss_fn(engine(tokens), labels)))


if __name__ == "__main__":
    main()
