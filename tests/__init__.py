"""Helpers of several test folders: ``golden.py`` (numbers that must not change), ``spawn.py`` (starts processes)."""
