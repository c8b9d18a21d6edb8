"""Unit tests of ``gptpar/deepspeed/engines/``."""
