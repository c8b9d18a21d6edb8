"""Pictures as PNG files: runs, plans, sweeps and traces, in one style (``style.py``). matplotlib is loaded on use."""
