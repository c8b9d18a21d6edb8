"""Unit tests of ``gptpar/model/``."""
