"""Unit tests of ``gptpar/offload/``."""
