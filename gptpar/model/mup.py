"""muP's rules: what tuned hyperparameters are multiplied by in a wider model (Yang et al. 2022, arXiv 2203.03466).

The rules are those of the paper's table 8, for Adam, with the ratio m = hidden size / base hidden size. They do not
change the base model (m = 1):

| parameters | initial deviation | learning rate | multiplier |
|---|---|---|---|
| embeddings, norms, biases | as without | 1 | 1 |
| matrices of the blocks, and of each expert | divided by sqrt(m) | 1 / m | 1 |
| router, gate of the shared expert | divided by m | 1 / m | 1 |
| LM head | as without | 1 | its input: 1 / m |

For Muon the blocks' matrices have the learning rate 1 / sqrt(m) where the update is scaled to AdamW's size, and 1 where
it follows rows / columns: a layer's output then changes by as much at every width (Bernstein and Newhouse 2024). For
routers and the shared expert's gate it is 1 / m, 1 / sqrt(m) with ``shape_scaling``, and 1 with ``unit_rms_norm``.

Attention divides scores by the heads' width K in place of its root: the scale is sqrt(base K) / K, which is 1 / sqrt(K)
for the base model. The paper has three equivalent tables; table 8 is the one that allows a tied embedding. The MLP's
width has to grow with the hidden size, and so has that of experts. A router's output does not grow; its row is that of
output weights in the paper's table 3, which needs no multiplier.
"""

from __future__ import annotations

from gptpar.config import ModelConfig


def width_ratio(config: ModelConfig) -> float:
    """Hidden size over base hidden size; 1 without muP."""
    return config.hidden_size / config.mup_base_hidden_size if config.mup and config.mup_base_hidden_size else 1.0


def hidden_std(config: ModelConfig) -> float:
    """The initial standard deviation of the blocks' matrices, before the residual branches' own factor."""
    return config.init_method_std / width_ratio(config) ** 0.5


def router_std(config: ModelConfig) -> float:
    """The initial standard deviation of matrices of the blocks whose output is as wide in every model."""
    return config.init_method_std / width_ratio(config)


def has_fixed_outputs(name: str) -> bool:
    """Whether a matrix of the blocks, by its name, has as many outputs in every model: see :func:`router_std`."""
    return name.endswith((".router.weight", ".mlp.gate"))


def output_multiplier(config: ModelConfig) -> float:
    """The factor of the LM head's input."""
    return 1 / width_ratio(config)


def attention_scale(config: ModelConfig) -> float | None:
    """The factor of attention's scores; ``None``: 1 / sqrt(K)."""
    base = config.mup_base_kv_channels
    return base**0.5 / config.kv_channels if config.mup and base else None


def learning_rate_multiplier(config: ModelConfig, in_block: bool, is_matrix: bool, growth: float = 1.0) -> float:
    """The factor of a parameter's learning rate.

    Args:
        in_block: whether it is in one of the blocks.
        is_matrix: whether it is a matrix, not a bias or the weight of a norm.
        growth: with this power of the width, an update changes the layer's outputs; for Adam it is 1.
    """
    return 1 / width_ratio(config) ** growth if in_block and is_matrix else 1.0
