"""Flags of a block's MLP: its activation function and gate, and whether they agree."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptpar.config.fields import Derived, Notes, flag, flag_name

if TYPE_CHECKING:
    from gptpar.config import Flags

GATES = ("geglu", "geglu_tanh", "quick_geglu", "reglu", "liglu")
"""Activations that multiply one half of the first layer's output by a function of the other half; so does SwiGLU."""

FUSED_GELU, UNFUSED_GELU = "gelu_tanh", "gelu"
"""Megatron-LM's GELU: fused with a bias it is the tanh form, else the exact one."""


@dataclass(frozen=True, kw_only=True)
class MLPOptions:
    """The activation function of an MLP, or its gate."""

    swiglu: bool = flag(False, "gated SiLU MLP instead of GELU")
    mlp_activation: str = flag(
        FUSED_GELU,
        "the MLP's activation function without --swiglu (without biases the default is gelu, as in Megatron-LM); "
        "geglu, geglu_tanh, quick_geglu, reglu and liglu are gates, as SwiGLU is: of the exact GELU, its tanh form, "
        "x * sigmoid(1.702 x), the ReLU, and none",
        choices=(FUSED_GELU, UNFUSED_GELU, "squared_relu", *GATES),
        spellings={"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "squared_relu"},
    )
    activation_func_clamp_value: float | None = flag(
        None,
        "c: in an MLP with a gate, clamp the gate's input to at most c, and the other half to -c ... c (gpt-oss: 7)",
        above=0,
    )
    glu_linear_offset: float = flag(
        0.0, "in an MLP with a gate, add this to the half that the gate multiplies (gpt-oss: 1)"
    )

    @property
    def gated(self) -> bool:
        """Whether one half of the MLP's first layer is multiplied by an activation of the other half."""
        return self.swiglu or self.mlp_activation in GATES


def choose_gelu(flags: Flags, given: Set[str]) -> tuple[Flags, list[Derived]]:
    """Set Megatron's GELU of an MLP that has no bias to fuse it with, or whose fusion is off.

    Args:
        given: fields that keep what was typed, as ``section.field``.
    """
    notes, model = Notes(flags), flags.model
    switches = model.swiglu, model.glu_activation, model.quick_geglu, model.squared_relu
    other = any(switches) or model.mlp_activation != FUSED_GELU
    if not other and "model.mlp_activation" not in given and not (model.add_bias_linear and model.bias_gelu_fusion):
        reason = "--disable-bias-linear" if not model.add_bias_linear else "--no-bias-gelu-fusion"
        notes.replace("model", "mlp_activation", UNFUSED_GELU, f"{reason}, as in Megatron-LM")
    return notes.flags, notes.derived


def derive_mlp(notes: Notes) -> None:
    """Derive the gate from other programs' words, and the width: with a gate two thirds, as Megatron has it."""
    model = notes.flags.model
    gate, reason = model.glu_activation, f"--glu-activation {model.glu_activation}"
    if gate is None and model.quick_geglu:
        gate, reason = "quick_geglu", "--quick-geglu"
    if gate is not None and not model.swiglu:
        name, value = ("swiglu", True) if gate == "swiglu" else ("mlp_activation", gate)
        notes.replace("model", name, value, reason)
        if model.hidden_size:
            width = 4 * model.hidden_size
            notes.fill("model", "ffn_hidden_size", width, f"4 x hidden, as {reason.split()[0]} has it")
    if model.squared_relu:
        notes.replace("model", "mlp_activation", "squared_relu", "--squared-relu")
    if model.hidden_size and notes.flags.model.gated:
        width = int(4 * model.hidden_size * 2 / 3 / 64) * 64
        notes.fill("model", "ffn_hidden_size", width, "8/3 x hidden for a gated MLP, a multiple of 64")
    elif model.hidden_size:
        notes.fill("model", "ffn_hidden_size", 4 * model.hidden_size, "4 x hidden")


def check_mlp(flags: Flags) -> Iterator[str]:
    """Gates that contradict each other, and options that only an MLP with a gate has."""
    m = flags.model
    yield from _options_of_gates(flags)
    if m.swiglu and m.mlp_activation != "gelu_tanh":
        yield f"--swiglu has an activation function of its own: drop --mlp-activation {m.mlp_activation}, or --swiglu."
    if m.swiglu and m.glu_activation not in (None, "swiglu"):
        yield f"--swiglu and --glu-activation {m.glu_activation} are different gates: keep one."
    if m.quick_geglu and (m.swiglu or m.glu_activation not in (None, "quick_geglu")):
        other = "--swiglu" if m.swiglu else f"--glu-activation {m.glu_activation}"
        yield f"--quick-geglu and {other} are different gates: keep one."


def _options_of_gates(flags: Flags) -> Iterator[str]:
    m = flags.model
    of_gates = [
        flag_name(name)
        for name in ("activation_func_clamp_value", "glu_linear_offset")
        if getattr(m, name) != getattr(MLPOptions(), name)
    ]
    if of_gates and not (m.gated or m.glu_activation or m.quick_geglu):
        yield f"{', '.join(of_gates)}: an MLP without a gate has neither: give --swiglu or --quick-geglu, or drop this."
