"""Optimizers' updates, learning-rate schedules, the gradient norm and loss scales."""
