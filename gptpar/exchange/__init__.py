"""Models and checkpoints of other programs: Hugging Face in and out, Megatron-LM and DeepSpeed in."""
