"""Unit tests of ``gptpar/config/``."""
