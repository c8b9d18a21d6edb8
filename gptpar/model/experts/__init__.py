"""A mixture of experts: the router, the products of experts, the layer, and what balances it from step to step."""
