"""Unit tests of ``gptpar/checkpoint/``."""
