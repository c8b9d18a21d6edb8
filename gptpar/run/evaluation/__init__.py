"""Evaluation on tasks: multiple choice and bits per byte, from local files, through the forward pass of training.

``items`` reads the files, ``tasks`` turns texts into rows of tokens and log-likelihoods into scores, ``evaluator``
forms micro-batches of rows and runs the model, ``in_run`` evaluates during a pretraining run, ``checkpoint`` loads the
model of a checkpoint.
"""
