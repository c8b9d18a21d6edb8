"""Evaluation on tasks: multiple choice and bits per byte, from local files, through the forward pass of training.

``items`` reads the files, ``rows`` turns texts into tokens, ``batches`` forms micro-batches of rows, ``tasks`` turns
log-likelihoods into scores, ``evaluator`` runs the model, ``in_run`` evaluates during a pretraining run, ``checkpoint``
loads the model of a checkpoint.
"""
