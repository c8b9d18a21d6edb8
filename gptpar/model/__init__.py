"""The GPT: layers, their list, and what they cost."""
