"""Pictures as PNG files: runs, plans, sweeps and traces, in one style (``style.py``). matplotlib is imported on use."""
