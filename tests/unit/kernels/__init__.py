"""Unit tests of ``gptpar/kernels/``."""
