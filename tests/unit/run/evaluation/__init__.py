"""Unit tests of ``gptpar/run/evaluation/``."""
