"""``gptpar check-layouts``: proof, on this machine, that every layout computes the same."""
