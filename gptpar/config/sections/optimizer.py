"""Flags of the optimizer, its learning rate and weight decay, and their schedules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeAlias

from gptpar.config.fields import Open, flag, on_unless

MOMENT_DTYPES = ("fp32", "bf16")
DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Generic[Open]):
    """The optimizer with decoupled weight decay, its schedules and gradient clipping."""

    optimizer: str = flag(
        "adam",
        "adam is AdamW; lion has one state vector and no fused kernel; muon orthogonalizes the momentum of the blocks' "
        "matrices, and leaves everything else to AdamW; all decouple the weight decay",
        choices=("adam", "lion", "muon"),
        spellings={"adamw": "adam", "fusedadamw": "adam", "dist_muon": "muon"},
    )
    min_lr: float = flag(0.0, "the schedule never goes below this after warm-up")
    decoupled_lr: float | None = flag(
        None, "peak learning rate of the token embedding and the output layer, on the schedule of --lr", least=0
    )
    decoupled_min_lr: float | None = flag(None, "their lowest rate (default: --min-lr)", least=0)
    lr_decay_style: str = flag("linear", "shape of the decay", choices=DECAY_STYLES)
    lr_decay_iters: int | None = flag(None, "steps until --min-lr (default: the whole run)", least=1, counts=True)
    lr_decay_samples: int | None = flag(None, "samples until --min-lr (default: the whole run)", least=1, counts=True)
    lr_decay_tokens: int | None = flag(None, "tokens until --min-lr", least=1, counts=True)
    lr_warmup_fraction: float | None = flag(None, "share of the decay span spent warming up", names=("--warmup",))
    lr_warmup_iters: int = flag(0, "steps of linear warm-up", least=0, counts=True)
    lr_warmup_samples: int = flag(0, "samples of linear warm-up", least=0, counts=True)
    lr_warmup_tokens: int | None = flag(None, "tokens of linear warm-up", least=0, counts=True)
    lr_warmup_init: float = flag(0.0, "learning rate at the start of the warm-up")
    lr_wsd_decay_style: str = flag(
        "exponential", "shape of WSD's tail", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = flag(None, "length of WSD's tail in steps", least=1, counts=True)
    lr_wsd_decay_samples: int | None = flag(None, "length of WSD's tail in samples", least=1, counts=True)
    weight_decay: float = flag(0.01, "decoupled weight decay (matrices only; not biases, not norms)", least=0)
    weight_decay_incr_style: str = flag(
        "constant", "how the weight decay grows", choices=("constant", "linear", "cosine")
    )
    weight_decay_override: tuple[str, ...] | None = flag(
        None,
        "factors of the weight decay for parameters by name, such as 'embedding*=0'; the last pattern that matches "
        "counts",
        metavar="PATTERN=X",
    )
    lr_override: tuple[str, ...] | None = flag(
        None,
        "factors of the learning rate for parameters by name, such as 'layers.*.mlp.*=0.5'; the last pattern that "
        "matches counts",
        metavar="PATTERN=X",
    )
    clip_grad: float = flag(1.0, "clip the global L2 norm of the gradient to this; 0 is off", least=0)
    adam_beta1: float = flag(0.9, "decay of the first moment")
    adam_beta2: float = flag(0.999, "decay of the second moment")
    adam_eps: float = flag(1e-8, "added to the square root of the second moment", above=0)
    adam_bias_correction: bool = on_unless(
        "--no-adam-bias-correction", "do not correct the moments' bias towards their initial zeros (as BERT's Adam)"
    )
    exp_avg_dtype: str = flag(
        "fp32",
        "number format in which AdamW's first moment is kept: fp32 (fp64 in a run with --fp64), or bf16 with "
        "stochastic rounding, which takes 2 bytes less for each parameter",
        choices=MOMENT_DTYPES,
    )
    exp_avg_sq_dtype: str = flag("fp32", "the same for AdamW's second moment", choices=MOMENT_DTYPES)
    lion_beta1: float = flag(0.9, "weight of the momentum in the sign that is the update")
    lion_beta2: float = flag(0.99, "decay of the momentum")
    muon_momentum: float = flag(0.95, "Muon: decay of the momentum", least=0)
    muon_nesterov: bool = on_unless("--no-muon-nesterov", "do not look ahead: orthogonalize Muon's momentum itself")
    muon_num_ns_steps: int = flag(5, "Muon: iterations of Newton-Schulz", least=1, most=99)
    muon_coefficient_type: str = flag(
        "quintic",
        "Muon: coefficients of the iterations: simple repeats one set, quintic five; polar_express has eight",
        choices=("simple", "quintic", "polar_express"),
    )
    muon_scale_mode: str = flag(
        "spectral",
        "Muon: an update is multiplied by the root of max(rows, columns) (spectral), of rows / columns "
        "(unit_rms_norm) or of max(1, rows / columns) (shape_scaling)",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_extra_scale_factor: float = flag(
        0.2, "Muon: a further factor of updates; with spectral, 0.2 makes them as large as AdamW's", above=0
    )
    muon_lr: float | None = flag(
        None, "Muon: peak learning rate of its matrices, on the schedule of --lr (default: --lr)", least=0
    )
    muon_qkv: str = flag(
        "split",
        "Muon: what is one matrix of a QKV weight: the queries, the keys and the values (split), each head (heads), or "
        "the whole weight (fused)",
        choices=("split", "heads", "fused"),
    )
    override_opt_param_scheduler: bool = flag(
        False,
        "on resume, let this command line's schedule replace the checkpoint's",
        names=("--override-opt_param-scheduler", "--override-lr-scheduler"),
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "on resume, let the checkpoint's schedule replace this command line's",
        names=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-lr-scheduler"),
    )
    scheduler: dict | None = field(default=None, hash=False)
    """The ``scheduler`` of a DeepSpeed configuration, ``type`` and complete ``params``; it goes before the schedule of
    the flags."""

    lr: float | Open = flag(None, "peak learning rate", least=0, complete=0.0)
    """Open with ``--skip-train`` alone, which takes no step."""
    start_weight_decay: float | Open = flag(
        None, "weight decay at the start (with --weight-decay-incr-style)", least=0, complete=0.0
    )
    end_weight_decay: float | Open = flag(None, "weight decay at the end", least=0, complete=0.0)

    @property
    def rounded_moments(self) -> frozenset[str]:
        """The states that are kept in 16 bits."""
        return frozenset(name for name in ("exp_avg", "exp_avg_sq") if getattr(self, f"{name}_dtype") == "bf16")


OptimizerFlags: TypeAlias = OptimizerConfig[None]
