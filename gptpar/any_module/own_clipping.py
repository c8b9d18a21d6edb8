"""Refuses torch's clipping of gradients that are not in ``.grad``, which would change nothing and say nothing."""

from __future__ import annotations

from types import FrameType

from gptpar.errors import GptparError

CLIPS = "torch.nn.utils.clip_grad"
"""The module of ``clip_grad_norm_`` and ``clip_grad_value_``."""


def refuse_clipping(reader: FrameType | None) -> None:
    """Raise if it is torch's clipping that reads parameters or ``.grad``.

    Args:
        reader: the frame that reads.

    Raises:
        GptparError: it is.
    """
    if reader is not None and reader.f_globals.get("__name__") == CLIPS:
        raise GptparError(
            "torch's clipping of an engine's parameters would change nothing: with ZeRO, offload or 16-bit sums, "
            "gradients are in the engine and not in parameter.grad. Set gradient_clipping in the configuration: each "
            "step clips by it, and engine.get_global_grad_norm() has the norm."
        )
