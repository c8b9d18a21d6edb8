"""Unit tests of ``gptpar/plan/``."""
