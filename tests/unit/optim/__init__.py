"""Unit tests of ``gptpar/optim/``."""
