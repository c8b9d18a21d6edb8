"""Passes over memory that a compiler does not make one of: in Triton on GPUs, in torch's operators elsewhere."""
