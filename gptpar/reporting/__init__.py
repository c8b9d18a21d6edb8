"""A run's output: start banner, console lines, metrics.jsonl, TensorBoard, Weights & Biases, plots."""
