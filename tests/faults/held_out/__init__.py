"""Faults that were written down before anyone had read the suite: what people, systems and clusters do to runs."""
