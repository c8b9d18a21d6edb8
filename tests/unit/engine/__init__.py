"""Unit tests of ``gptpar/engine/``."""
