"""Unit tests of ``gptpar/training/evaluation/``."""
