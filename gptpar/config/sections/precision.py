"""Flags of number formats, the loss scale, compilation and CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

from gptpar.config.fields import flag, on_unless


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats. Master weights, moments and gradient sums are always fp32 (fp64 with --fp64)."""

    fp16: bool = flag(False, "16-bit floats with a dynamic loss scale")
    bf16: bool = flag(False, "bfloat16 weights and activations")
    fp64: bool = flag(False, "64-bit floats throughout, for checks of exactness")
    loss_scale: float | None = flag(None, "constant loss scale for --fp16 (default: dynamic)", above=0)
    initial_loss_scale: float = flag(2.0**32, "where the dynamic loss scale starts")
    min_loss_scale: float = flag(1.0, "the dynamic loss scale stops the run below this", above=0)
    loss_scale_window: int = flag(1000, "good steps before the loss scale doubles", least=1)
    hysteresis: int = flag(2, "overflows tolerated before the loss scale halves", least=1)
    compile: bool = on_unless("--no-compile", "do not compile the blocks (they are compiled on GPUs only)")
    cuda_graph: str = flag(
        "auto",
        "launch forward and backward of a step as one CUDA graph (auto: on GPUs, if nothing forbids it); with "
        "--cpu-optimizer on one process only, in parts between which the host waits for layers and takes gradients",
        choices=("auto", "on", "off"),
    )

    deterministic_mode: bool = flag(
        False, "the same command on the same devices computes the same bits each time; kernels that cannot are refused"
    )
    disable_bf16_reduced_precision_matmul: bool = flag(
        False, "the parts into which a GPU cuts a bf16 product's sum are added in fp32 (cuBLAS may add them in bf16)"
    )

    @property
    def dtype(self) -> str:
        """``"fp16"``, ``"bf16"``, ``"fp64"`` or ``"fp32"``."""
        return next((name for name in ("fp16", "bf16", "fp64") if getattr(self, name)), "fp32")
