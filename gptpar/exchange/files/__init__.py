"""Checkpoint files of other programs, read without running anything in them, and written."""
