"""Pretrain a GPT: the entry point that launch scripts of Megatron-LM and Megatron-DeepSpeed name.

    torchrun --nproc-per-node 8 examples/pretrain_gpt.py FLAGS
    deepspeed examples/pretrain_gpt.py FLAGS

The same as ``gptpar pretrain FLAGS``; without a launcher, one worker is started for each visible GPU.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gptpar.__main__ import run_as_program

if __name__ == "__main__":
    run_as_program(["pretrain", *sys.argv[1:]])
