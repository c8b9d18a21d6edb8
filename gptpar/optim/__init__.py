"""The optimizer, its schedules, gradient sums and loss scale."""
