"""Unit tests of ``gptpar/pipeline/``."""
