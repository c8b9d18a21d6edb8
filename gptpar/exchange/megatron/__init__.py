"""Reads checkpoints of Megatron-LM and Megatron-DeepSpeed: weights, and the optimizer's state where it can be read.

This folder has a file for each of their formats. Each returns :class:`~gptpar.exchange.megatron.found.Found`,
and ``convert.py`` makes a checkpoint of it.
"""
