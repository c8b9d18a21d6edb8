"""How the data-parallel processes share parameters, gradients and optimizer state (ZeRO, arXiv 1910.02054)."""
