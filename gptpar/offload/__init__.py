"""The optimizer's state in host memory and its update by the CPU, beside the device's work."""
