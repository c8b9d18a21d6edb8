"""Unit tests of ``gptpar/guards/``."""
