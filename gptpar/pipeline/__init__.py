"""Stages of a model and the schedules that run them. A run without a pipeline is one stage."""

from gptpar.pipeline.module import PipelineModule
from gptpar.pipeline.stage import Stage

__all__ = ["PipelineModule", "Stage"]
