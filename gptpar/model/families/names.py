"""How transformers names and stores a model's weights: a table of tensors, each a view of one of our parameters.

A :class:`HfTensor` says which of our parameters holds a tensor of transformers, and where in the parameter. The table
serves both directions: an export reads the view, an import writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from gptpar.config import ModelConfig
from gptpar.config.roles import Role
from gptpar.model.attention import Attention
from gptpar.model.gpt import gpt_model
from gptpar.model.layer_spec import build_on_meta

View = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Within:
    """The place of a transformers tensor in one of our parameters.

    Attributes:
        view: our whole parameter -> a view whose elements, row by row, are the tensor's.
        merged: the first of the view's dims that are merged into one dim of the tensor, if the view has more dims.
        dims: of the tensor; 0: one of a bias, else at most two.
    """

    view: View
    merged: int = 0
    dims: int = 0


def _whole(ours: torch.Tensor) -> torch.Tensor:
    return ours


def _transposed(ours: torch.Tensor) -> torch.Tensor:
    return ours.t() if ours.dim() == 2 else ours


WHOLE = Within(_whole)
TRANSPOSED = Within(_transposed)
"""GPT-2 stores a linear layer's matrix as [inputs, outputs] (``Conv1D``); biases are alike."""


def part(index: int) -> Within:
    """One of the equal parts of a gated MLP's first layer."""
    return Within(lambda ours: ours[index])


def of_expert(number: int, half: int | None = None) -> Within:
    """One expert's matrix; of its gated first product, the gate (0) or the value (1)."""
    return Within(lambda ours: ours[number] if half is None else ours[number, half])


def rows(number: int) -> Within:
    """The vocabulary without the rows that only pad it."""
    return Within(lambda ours: ours[:number])


def projections(attention: Attention) -> dict[str, Within]:
    """Queries, keys and values (``q``, ``k``, ``v``) of the QKV projection."""
    queries = attention.queries_per_group

    def of_each_group(first: int, stop: int) -> Within:
        return Within(lambda ours: attention.by_group(ours)[:, first:stop])

    return {
        "q": of_each_group(0, queries),
        "k": of_each_group(queries, queries + 1),
        "v": of_each_group(queries + 1, queries + 2),
    }


def all_q_all_k_all_v(attention: Attention) -> Within:
    """GPT-2's ``c_attn``: all heads' queries, then all keys, then all values, transposed as its other matrices."""

    def view(ours: torch.Tensor) -> torch.Tensor:
        in_order = attention.by_group(ours).transpose(0, 1)
        return in_order.movedim(-1, 0) if ours.dim() == 2 else in_order

    return Within(view, merged=-3)


@dataclass(frozen=True)
class HfTensor:
    """One tensor of transformers.

    Attributes:
        name: transformers' name.
        ours: global name of our parameter that holds it.
        place: its place in that parameter.
        shape: the tensor's shape in transformers.
    """

    name: str
    ours: str
    place: Within
    shape: tuple[int, ...]

    def view(self, ours: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of our whole parameter; the view may have more dims than the tensor."""
        return self.place.view(ours)


@dataclass(frozen=True)
class WeightNames:
    """A family's names of weights, without ``weight`` and ``bias``.

    Parameters with a name of their own (those of experts) stand there under it, with transformers' whole names.

    Attributes:
        base: prefix of all names but the LM head's; files of older versions may lack it.
        outer: names of the layers around the blocks: ours -> transformers'.
        blocks: prefix of a block's number.
        block: a built block -> (our name within it -> transformers' names, each with its place in our parameter).
    """

    base: str
    outer: Mapping[str, str]
    blocks: str
    block: Callable[[Any], Mapping[str, Mapping[str, Within]]]


def hf_tensors(model: ModelConfig, names: WeightNames, vocab_rows: int) -> Iterator[HfTensor]:
    """All tensors of a model, as transformers names them, in the order of the forward pass.

    Args:
        vocab_rows: rows of the vocabulary in transformers.

    Raises:
        KeyError: a parameter that the family does not have.
    """
    seen = set()
    for layer in gpt_model(model).layers:
        if layer.spec.name in seen:
            continue
        seen.add(layer.spec.name)
        is_block, is_vocabulary = layer.role is Role.BLOCK, layer.role in (Role.EMBEDDING, Role.LM_HEAD)
        prefix = f"{names.base}{names.blocks}.{layer.spec.name.rpartition('.')[2]}." if is_block else ""
        built = build_on_meta(layer.spec)
        table = names.block(built) if is_block else None
        for ours, parameter in built.named_parameters():
            inner, _, end = ours.rpartition(".")
            theirs: Mapping[str, Within]
            if table is None:
                theirs = {names.outer[layer.spec.name]: rows(vocab_rows) if is_vocabulary else WHOLE}
            else:
                theirs = table[inner] if end in ("weight", "bias") else table[ours]
            for name, place in theirs.items():
                view = place.view(parameter)
                num_dims = place.dims or (1 if end == "bias" else min(2, parameter.dim()))
                shape = _merged(tuple(view.shape), place.merged, num_dims)
                name = f"{prefix}{name}.{end}" if end in ("weight", "bias") else f"{prefix}{name}"
                yield HfTensor(name, f"{layer.spec.name}.{ours}", place, shape)


def _merged(shape: tuple[int, ...], first: int, num_dims: int) -> tuple[int, ...]:
    """A shape whose dims from ``first`` on are merged until ``num_dims`` are left."""
    first = first % len(shape)
    stop = first + len(shape) - num_dims + 1
    return (*shape[:first], prod(shape[first:stop]), *shape[stop:])
