"""What a run tells the world: start banner, console lines, metrics.jsonl, TensorBoard, plots."""
