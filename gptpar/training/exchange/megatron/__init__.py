"""Checkpoints of Megatron-LM and Megatron-DeepSpeed: weights, and the optimizer's state where it can be had.

A file of this folder for each form of theirs gives what is :class:`~gptpar.training.exchange.megatron.found.Found`;
``convert.py`` makes a checkpoint of it.
"""
