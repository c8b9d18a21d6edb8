"""Where everything is: processes on named axes, parameters and their values on these axes, boxes of tensors."""
