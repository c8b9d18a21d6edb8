"""Unit tests of ``gptpar/reporting/``."""
