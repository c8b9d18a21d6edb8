"""Unit tests of ``gptpar/data/``."""
