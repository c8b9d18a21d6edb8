"""Unit tests of ``gptpar/topology/``."""
