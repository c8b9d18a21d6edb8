"""Keeps optimizer state in host memory and updates it on the CPU while the device computes."""
