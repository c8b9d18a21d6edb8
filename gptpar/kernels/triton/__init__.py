"""Kernels in Triton, for tensors on a GPU."""
