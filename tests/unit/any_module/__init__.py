"""Unit tests of ``gptpar/any_module/``."""
