"""Pictures as PNG files: runs, plans and sweeps, in one style (``style.py``). matplotlib is imported on use."""
