"""A run's folder as a whole: who writes into it, which branches it has, and what it holds.

SAVE/iter_0000010/             checkpoints: see ``gptpar.checkpoint``
SAVE/metrics.jsonl             history: see ``gptpar.reporting``
SAVE/tensorboard/
SAVE/owner-1.json              the run that writes here: ``owner``
SAVE/branches/1-from-0000010/  what a run left when it went back to iteration 10, a run folder itself: ``branches``
"""
