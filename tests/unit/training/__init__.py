"""Unit tests of ``gptpar/training/``."""
