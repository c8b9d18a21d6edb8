"""Runs a module's steps over sharded parameters: gathers them, sums gradients, updates; it knows no offload."""
