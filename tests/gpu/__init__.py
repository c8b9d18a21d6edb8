"""Tests that need a GPU: kernels, transfers, recorded steps, offload."""
