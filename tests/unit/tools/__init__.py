"""Unit tests of ``tools/``."""
