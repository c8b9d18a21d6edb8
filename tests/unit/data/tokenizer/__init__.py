"""Unit tests of ``gptpar/data/tokenizer/``."""
