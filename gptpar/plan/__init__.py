"""What a run will need and how fast it will be, told before anything is started: no GPU, no processes, no weights."""
