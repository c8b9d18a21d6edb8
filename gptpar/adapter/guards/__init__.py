"""Watches user code for what would give wrong numbers or wait forever, and says so in time."""
