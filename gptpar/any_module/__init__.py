"""Any ``nn.Module`` trained by the engine: what ``gptpar.initialize`` is made of."""
