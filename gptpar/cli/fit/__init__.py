"""``gptpar fit``: flags for a machine, and what a run folder was made with."""
