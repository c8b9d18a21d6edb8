"""Unit tests of ``gptpar/training/exchange/``."""
