"""Placement: processes on named axes, parameters and their initial values on these axes, boxes of tensors."""
