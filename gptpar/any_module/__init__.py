"""Any module on the engine: units, DeepSpeed's verbs, its optimizer."""
