"""Watches a run's numbers: norms of layers, bundles of outliers, weights that several processes hold."""
