"""Unit tests of ``gptpar/system/``."""
