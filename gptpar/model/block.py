"""One transformer block: the MLP and its activation, and the order of norms, attention, MLP and sums.

Legend: B batch, S sequence, N tokens, D model width, F this rank's part of the MLP's width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gptpar.config import ModelConfig
from gptpar.kernels.bias_gradient import SUMMING
from gptpar.model.activated_product import activated_row
from gptpar.model.activations import FUNCTIONS, gated
from gptpar.model.attention import Attention
from gptpar.model.dropout import ATTENTION_OUTPUT, MLP_OUTPUT, HiddenDropout, LayerSeeds
from gptpar.model.experts.dispatch import ExpertAxis
from gptpar.model.experts.layer import Experts
from gptpar.model.experts.routing import losses_of
from gptpar.model.linear import Linears, Reader
from gptpar.model.mlp_tiles import tiled_mlp
from gptpar.model.norm import OutputLayerNorm, ResidualLayerNorm, make_norm
from gptpar.tensor_parallel import ALONE, RowParallelLinear, TensorAxis
from gptpar.tensor_parallel.cost import BatchShape, Cost

NOTHING: frozenset[str] = frozenset()
PLACEMENTS = {"pre": (True, False), "post": (False, True), "peri": (True, True)}
"""``--norm-placement`` -> (whether norms precede attention and MLP, whether norms follow them)."""

# Elements that kernels read and write for each channel of the residual stream, in the forward and backward pass: of two
# norms with their sums, and of each further norm. A norm's backward reads its gradient and input, and writes one.
STREAM, FURTHER_NORM = (10, 15), (1, 3)
KERNELS = (9, 22)
"""Kernels of a block, fused by the compiler; the backward's with the addition to the gradient sums."""


def _of_gate(linears: Linears) -> dict[str, Any]:
    limit, offset = linears.config.activation_func_clamp_value, linears.config.glu_linear_offset
    return {"limit": inf if limit is None else limit, "offset": offset}


def make_experts(linears: Linears, placed: ExpertAxis) -> Experts:
    """A mixture of experts in place of an MLP."""
    config = linears.config
    name, shared = "swiglu" if config.swiglu else config.mlp_activation, config.moe_shared_expert_intermediate_size
    activate = FUNCTIONS[name][0]
    if config.gated:
        activate = partial(gated, name, **_of_gate(linears), again=linears.activation_again)
    # What reads the sum of experts forms no gradient of the shared one's bias.
    of_shared = replace(linears, output_norm=False)
    return Experts(linears, activate, None if shared is None else MLP(of_shared, shared), placed)


class MLP(nn.Module):
    """Two linear layers with an activation function between them, or a gate such as SwiGLU (Shazeer 2020).

    Args:
        linears: makes the layers.
        inner: width between them; by default the model's.
        recompute_activation: whether the activation's output is computed again in the backward pass, in the pass over
            memory that forms its input's gradient (:mod:`gptpar.model.activated_product`).
        tiles: if several, the tokens are taken in this many tiles, and only the input is kept.
    """

    def __init__(
        self, linears: Linears, inner: int | None = None, *, recompute_activation: bool = False, tiles: int = 1
    ):
        super().__init__()
        self.recompute_activation, self.tiles = recompute_activation and tiles == 1, tiles
        config = linears.config
        width, inner, bias = config.hidden_size, inner or config.ffn_hidden_size, config.add_bias_linear
        self.gated, self.activation = config.gated, "swiglu" if config.swiglu else config.mlp_activation
        self.of_gate, self.again, parts = _of_gate(linears), linears.activation_again, 2 if self.gated else 1
        self.up = linears.column(width, parts * inner, bias=bias, reader=Reader.ACTIVATION, parts=parts)
        self.down = linears.row(inner, width, bias=bias, reader=Reader.END)

    @property
    def unsummed_bias(self) -> nn.Parameter | None:
        """The bias of the output, if the function that reads the output forms its gradient."""
        return self.down.unsummed_bias

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Returns y_ND."""
        how = self.activation, self.gated, *self.of_gate.values()
        if self.tiles > 1:
            return self._in_tiles(x_ND, *how)
        up = self.up(x_ND)
        if self.recompute_activation and self.training:
            return self.down(up, lambda up, weight, bias, *more: activated_row(up, weight, bias, *how, *more))
        if self.gated:
            return self.down(gated(self.activation, up, **self.of_gate, again=self.again))
        bias = self.up.unsummed_bias
        return self.down(FUNCTIONS[self.activation][0](up) if bias is None else SUMMING[self.activation](up, bias))

    def _in_tiles(self, x_ND: torch.Tensor, *how: Any) -> torch.Tensor:
        up, down = self.up, self.down
        weight, bias = up.weight.flatten(0, -2), None if up.bias is None else up.bias.flatten()
        y_ND: torch.Tensor = tiled_mlp(x_ND, weight, bias, down.weight, *how, self.tiles, *up.transfer, up.format)
        return y_ND if down.bias is None else y_ND + (down.bias if down.bias_gradient else down.bias.detach())

    def cost(self, batch: BatchShape) -> Cost:
        """The cost of both products and of the activation function, which keeps its input (a gate recomputes it)."""
        up, down = self.up.cost(batch), self.down.cost(batch)
        width = up.products[0].columns
        kept = width * batch.dtype.itemsize
        activation = Cost(forward=2 * width, backward=3 * width, kept=kept, workspace=down.kept)
        if self.recompute_activation:
            again = Cost(forward=down.products[0].inner)  # is written; its input is read once for both
            activation, down = replace(activation, again=(again,)), replace(down, kept=0.0)
        cost = up + activation + down
        if self.tiles > 1:
            return replace(cost.computed_again(up.kept), workspace=self._tile_bytes(batch))
        return cost

    def _tile_bytes(self, batch: BatchShape) -> float:
        """Bytes, for each token of all tiles, of a tile's largest tensors in the backward pass and of gradient sums."""
        weights = self.up.weight.numel() + self.down.weight.numel()
        tile = (2 * self.up.weight.flatten(0, -2).shape[0] + self.down.weight.shape[1]) * batch.dtype.itemsize
        return tile / self.tiles + weights * batch.statistic_size / batch.tokens


def make_mlp(
    linears: Linears, experts: ExpertAxis | None, recompute_modules: frozenset[str], tiles: int
) -> MLP | Experts:
    """A block's MLP, or the mixture of experts in its place; the arguments are those of :class:`Block`."""
    if experts is not None:
        return make_experts(linears, experts)
    act = "mlp_act" in recompute_modules and "mlp" not in recompute_modules
    return MLP(linears, recompute_activation=act, tiles=tiles)


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))`` (pre-norm, as GPT-2).

    With ``--norm-placement post`` the norms follow attention and MLP: ``x + norm(attention(x))``. With ``peri`` norms
    precede and follow them: ``x + norm(attention(norm(x)))``. With ``--use-parallel-residual`` the MLP reads the
    block's input, too: ``x + attention(norm(x)) + mlp(norm(x))``, where each has a norm of its own.

    Args:
        axis: this process's place on the tensor axis.
        recompute_modules: parts whose activations are computed again in the backward pass: ``core_attn`` (attention
            without its projections), ``mlp``, ``mlp_act`` (its activation function), ``layernorm``. With ``mlp`` and
            ``layernorm`` the norm before an MLP is computed again with it, so that the norm's output is not kept.
        mlp_tiles: see :class:`MLP`; several recompute the MLP.
        window, rotary: see :class:`Attention`.
        experts: this process's place on the expert axis, if the MLP is a mixture of experts; the block then returns
            their losses, too, if there are any.
    """

    def __init__(
        self,
        config: ModelConfig,
        axis: TensorAxis = ALONE,
        *,
        recompute_modules: frozenset[str] = NOTHING,
        mlp_tiles: int = 1,
        window: int | None = None,
        rotary: bool = True,
        experts: ExpertAxis | None = None,
    ):
        super().__init__()
        unknown = recompute_modules - {"core_attn", "mlp", "mlp_act", "layernorm"}
        assert not unknown, f"a block has no {sorted(unknown)} to recompute"
        if mlp_tiles > 1:
            recompute_modules -= {"mlp", "mlp_act"}
        self.recompute_modules, self.token_splits = recompute_modules, axis.token_splits
        self.width = config.hidden_size
        self.parallel, before, after = config.use_parallel_residual, *PLACEMENTS[config.norm_placement]
        fuses = config.normalization == "LayerNorm" and "layernorm" not in recompute_modules
        of_stream = ResidualLayerNorm if fuses and not self.parallel else None
        of_output = OutputLayerNorm if fuses else None
        again = not recompute_modules.isdisjoint({"mlp", "mlp_act"})
        linears = Linears(config, axis, before and bool(of_stream), after and bool(of_output), activation_again=again)
        norm = partial(make_norm, config, config.hidden_size, axis.between_layers)
        self.attention_norm = norm(fused=of_stream) if before else None
        recompute_core = "core_attn" in recompute_modules
        self.attention = Attention(linears, window=window, rotary=rotary, recompute_core=recompute_core)
        self.attention_post_norm = norm(fused=of_output) if after else None
        self.mlp_norm = norm(fused=of_stream) if before else None
        self.mlp = make_mlp(linears, experts, recompute_modules, mlp_tiles)
        self.returns_losses = bool(experts and losses_of(config))
        self.mlp_post_norm = norm(fused=of_output) if after else None
        self.attention_output_dropout = HiddenDropout(config.hidden_dropout, ATTENTION_OUTPUT, axis)
        self.mlp_output_dropout = HiddenDropout(config.hidden_dropout, MLP_OUTPUT, axis)

    @property
    def norm_is_in_mlp(self) -> bool:
        """Whether the norm before the MLP is computed again together with it."""
        both = {"mlp", "layernorm"} <= self.recompute_modules and isinstance(self.mlp, MLP)
        return both and self.mlp_norm is not None and not self.parallel

    def forward(
        self,
        x_ND: torch.Tensor,
        positions_BS: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        seq_length: int,
        seeds: LayerSeeds | None = None,
        choice_NK: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns y_ND, or (y_ND, losses of experts); under sequence parallelism x and y hold this rank's tokens.

        Args:
            positions_BS: each token's position; ``None``: 0, 1, 2, ...
            cu_seqlens: tokens see their own document only; ``None``: a sample is one document.
            seq_length: S.
            seeds: seeds of dropout's masks; needed in training if the model has dropout.
            choice_NK: keeps the experts that are chosen (:mod:`gptpar.model.experts.routing`).
        """
        x_ND, normed_ND = self._norm(self.attention_norm, x_ND)
        attended_ND = self.attention(normed_ND, positions_BS, cu_seqlens, seq_length, seeds)
        attended_ND = self._norm_output(self.attention_post_norm, attended_ND, self.attention.out)
        attended_ND = self.attention_output_dropout(attended_ND, seeds)
        if self.parallel:
            normed_ND = self._run("layernorm", self.mlp_norm, x_ND)
            x_ND = x_ND + attended_ND
        elif self.norm_is_in_mlp:
            x_ND = normed_ND = x_ND + attended_ND
        else:
            x_ND, normed_ND = self._norm(self.mlp_norm, x_ND, attended_ND)
        losses: dict[str, torch.Tensor] = {}
        if isinstance(self.mlp, Experts):
            y_ND, losses = self._run("mlp", self.mlp, normed_ND, seq_length, choice_NK)
        else:
            y_ND = self._run("mlp", self._mlp_of_norm if self.norm_is_in_mlp else self.mlp, normed_ND)
        y_ND = x_ND + self.mlp_output_dropout(self._norm_output(self.mlp_post_norm, y_ND, self.mlp), seeds)
        return (y_ND, losses) if self.returns_losses else y_ND

    def cost(self, batch: BatchShape) -> Cost:
        """The cost of attention, MLP, and this rank's norms and sums of the residual stream."""
        mlp = self.mlp.cost(batch)
        if "mlp" in self.recompute_modules:
            last = isinstance(self.mlp, Experts) and self.mlp.reads_last_product
            hidden = 0.0 if self.norm_is_in_mlp else self.width * batch.dtype.itemsize / self.token_splits
            mlp = mlp.computed_again(hidden, last=last)
        kernels = Cost(forward_kernels=KERNELS[0], backward_kernels=KERNELS[1])
        return self.attention.cost(batch) + mlp + self._stream_cost(batch) + kernels

    def _stream_cost(self, batch: BatchShape) -> Cost:
        before, after = (self.attention_norm, self.mlp_norm), (self.attention_post_norm, self.mlp_post_norm)
        norms = [norm.cost(batch) for norm in (*before, *after) if norm is not None]
        width, further = self.width, len(norms) - 2
        hidden = width * batch.dtype.itemsize
        masks = [dropout.p > 0 for dropout in (self.attention_output_dropout, self.mlp_output_dropout)]
        kept = sum(norm.kept for norm in norms) - self.parallel * hidden + sum(masks) * width
        again: tuple[Cost, ...] = ()
        if "layernorm" in self.recompute_modules:
            # Of a norm its input is kept. Its output, which is another layer's input, is computed again with it, unless
            # the other layer keeps it to compute itself again, or shares it with a second norm of the same input.
            outputs = sum(norm is not None for norm in before) - ("mlp" in self.recompute_modules or self.parallel)
            kept -= sum(norm.kept - hidden for norm in norms) + max(0, outputs) * hidden
            again = (Cost(forward=(STREAM[0] / 2 + FURTHER_NORM[0] * further) * width / self.token_splits),)
        forward, backward = ((two + one * further) * width for two, one in zip(STREAM, FURTHER_NORM, strict=True))
        splits = self.token_splits
        return Cost(forward=forward / splits, backward=backward / splits, kept=kept / splits, again=again)

    def _norm(
        self, norm: nn.Module | None, x_ND: torch.Tensor, added_ND: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(``x + added``, the sum normalised)."""
        if isinstance(norm, ResidualLayerNorm):
            adds = added_ND is not None and self.attention_post_norm is None
            return norm(x_ND, added_ND, self.attention.out.unsummed_bias if adds else None)
        x_ND = x_ND if added_ND is None else x_ND + added_ND
        return x_ND, self._run("layernorm", norm, x_ND)

    def _norm_output(
        self, norm: nn.Module | None, x_ND: torch.Tensor, layer: RowParallelLinear | MLP | Experts
    ) -> torch.Tensor:
        """A layer's output, normalised if a norm follows it."""
        if isinstance(norm, OutputLayerNorm):
            return norm(x_ND, layer.unsummed_bias)
        return self._run("layernorm", norm, x_ND)

    def _mlp_of_norm(self, x_ND: torch.Tensor) -> torch.Tensor:
        assert self.mlp_norm is not None
        y_ND: torch.Tensor = self.mlp(self.mlp_norm(x_ND))
        return y_ND

    def _run(self, name: str, part: Callable[..., Any] | None, x_ND: torch.Tensor, *args: Any) -> Any:
        if part is None:
            return x_ND
        if name in self.recompute_modules and self.training:
            # ``part`` writes to some of ``args``. Checkpoint forbids that of its own arguments, so a lambda hides them.
            return checkpoint(lambda x: part(x, *args), x_ND, use_reentrant=False, preserve_rng_state=False)
        return part(x_ND, *args)
