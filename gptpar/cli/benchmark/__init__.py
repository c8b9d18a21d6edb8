"""``gptpar benchmark --sweep``: the benchmark over combinations of layouts and other choices."""
