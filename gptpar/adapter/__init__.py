"""Presents any module to the engine: units, hooks, memory and values, and the settings of all that."""
