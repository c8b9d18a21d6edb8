"""Passes over memory that a compiler does not make one of: kernels for GPUs, and the same in torch's operators."""
