"""Unit tests of ``gptpar/exchange/``."""
