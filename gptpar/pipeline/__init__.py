"""Stages of a model. A run without a pipeline is one stage."""

from gptpar.pipeline.stage import Stage

__all__ = ["Stage"]
