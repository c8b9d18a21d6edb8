"""Tests of what several processes do together, on CPUs with gloo."""
