"""``gptpar.initialize``: trains any module on the engine, with DeepSpeed's verbs and configuration."""
