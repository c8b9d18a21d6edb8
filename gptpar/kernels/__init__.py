"""Fused kernels that torch.compile does not produce, in Triton for GPUs and in torch's operators."""
