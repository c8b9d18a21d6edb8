"""Unit tests of ``gptpar/run/``."""
