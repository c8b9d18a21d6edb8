"""Stages of a model, and the schedules that run them. Without a pipeline, a run has one stage."""

from gptpar.pipeline.runtime import Pipeline
from gptpar.pipeline.stage import Stage

__all__ = ["Pipeline", "Stage"]
