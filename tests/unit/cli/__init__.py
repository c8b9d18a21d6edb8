"""Unit tests of ``gptpar/cli/``."""
