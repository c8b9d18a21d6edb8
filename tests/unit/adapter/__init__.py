"""Unit tests of ``gptpar/adapter/``."""
