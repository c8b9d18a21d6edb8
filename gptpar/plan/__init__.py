"""Predicts a run's memory and speed before anything is started: no GPU, no processes, no weights."""
