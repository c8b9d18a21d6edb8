"""Unit tests of ``gptpar/deepspeed/``."""
