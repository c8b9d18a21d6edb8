"""Pretraining: from a configuration to a trained, saved and reported model."""
