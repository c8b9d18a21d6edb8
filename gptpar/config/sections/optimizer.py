"""Flags of the optimizer, its learning rate and weight decay, and their schedules; whether these fit together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeAlias

from gptpar.config.batch_sizes import BatchSizes, run_samples, schedule_lengths
from gptpar.config.fields import Missing, Open, completed, flag, flag_name, on_unless
from gptpar.config.sections.batch import BatchConfig

if TYPE_CHECKING:
    from gptpar.config import Flags


MOMENT_DTYPES = ("fp32", "bf16", "fp8")
FIRST_IN_ROOTS = 7.71875
"""The largest first moment in 8 bits, 31/2 - 1/16 times the power of 2 below the second one's root, in such roots."""
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
        "number format in which AdamW's first moment is kept: fp32 (fp64 in a run with --fp64), or with stochastic "
        "rounding bf16 or fp8, which take 2 or 3 bytes less for each parameter",
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
    def rounded_moments(self) -> dict[str, str]:
        """The states that are kept in 16 or 8 bits, with their number formats."""
        formats = {"exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}
        return {name: one for name, one in formats.items() if one != "fp32"}


OptimizerFlags: TypeAlias = OptimizerConfig[None]


def read_override(word: str) -> tuple[str, float]:
    """``embedding*=0`` -> (``embedding*``, 0.0).

    Raises:
        ValueError: why it cannot be read, as a part of a sentence.
    """
    pattern, equals, text = word.rpartition("=")
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not equals or not pattern or not 0 <= factor < math.inf:
        raise ValueError("PATTERN=FACTOR is needed, such as 'embedding*=0', with a factor of 0 or more")
    return pattern, factor


def check_schedule(flags: Flags) -> Iterator[str]:
    """Learning rate, weight decay and the optimizer's numbers."""
    o = flags.optimizer
    yield from _learning_rates(flags)
    yield from _units(flags)
    yield from _warmup(o)
    decay = "lr_decay_samples" if flags.batch.train_iters is None else "lr_decay_iters"
    if o.lr_decay_tokens is not None and (length := getattr(o, decay)) is not None:
        yield f"{flag_name(decay)} {length} and --lr-decay-tokens {o.lr_decay_tokens} are one length: keep one of them."
    if o.lr_decay_style == "WSD" and o.lr_wsd_decay_iters is None and o.lr_wsd_decay_samples is None:
        yield Missing(
            "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples, the length of its tail."
        )
    yield from _weight_decay(o)
    yield from _override_problems("--weight-decay-override", o.weight_decay_override)
    yield from _override_problems("--lr-override", o.lr_override)
    yield from _betas(o)
    yield from _moments(o)
    yield from _muon(o)
    if o.override_opt_param_scheduler and o.use_checkpoint_opt_param_scheduler:
        yield "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other."
    if flags.checkpoint.no_load_lr_state and o.use_checkpoint_opt_param_scheduler:
        yield "--no-load-lr-state and --use-checkpoint-opt-param-scheduler exclude each other."


def _learning_rates(flags: Flags) -> Iterator[str]:
    """The peak, and the rates on both sides of it."""
    o = flags.optimizer
    if o.lr is None:
        if not flags.logging.skip_train:
            yield Missing("--lr is missing: the peak learning rate, for example 3e-4.")
        return
    for name, rate in (("--min-lr", o.min_lr), ("--lr-warmup-init", o.lr_warmup_init)):
        if not 0 <= rate <= o.lr:
            yield f"{name} {rate:g} must lie between 0 and --lr {o.lr:g}."
    yield from _decoupled_rates(o)


def _decoupled_rates(o: OptimizerFlags) -> Iterator[str]:
    """The rates of the token embedding and the output layer."""
    if o.decoupled_lr is None:
        if o.decoupled_min_lr is not None:
            yield "--decoupled-min-lr is the lowest rate of --decoupled-lr: give that flag, too."
        return
    lowest = o.min_lr if o.decoupled_min_lr is None else o.decoupled_min_lr
    if lowest > o.decoupled_lr:
        name = "--min-lr" if o.decoupled_min_lr is None else "--decoupled-min-lr"
        yield f"{name} {lowest:g} is more than --decoupled-lr {o.decoupled_lr:g}: lower it, or give --decoupled-min-lr."
    if o.scheduler is not None:
        yield (
            "--decoupled-lr follows the schedule of --lr-decay-style, and the DeepSpeed configuration has a scheduler "
            "of its own: leave one of them out, or give --lr-override 'embedding*=FACTOR'."
        )


def _units(flags: Flags) -> Iterator[str]:
    """Lengths of the schedule are counted as the run's length is: in iterations or in samples."""
    o = flags.optimizer
    in_iterations = {
        "--lr-decay-iters": o.lr_decay_iters,
        "--lr-wsd-decay-iters": o.lr_wsd_decay_iters,
        "--lr-warmup-iters": o.lr_warmup_iters or None,
    }
    in_samples = {
        "--lr-decay-samples": o.lr_decay_samples,
        "--lr-wsd-decay-samples": o.lr_wsd_decay_samples,
        "--lr-warmup-samples": o.lr_warmup_samples or None,
    }
    wrong, unit = (in_iterations, "samples") if flags.batch.train_iters is None else (in_samples, "iterations")
    for name, value in wrong.items():
        if value is not None and not flags.logging.skip_train:
            yield f"{name} {value}: this run is measured in {unit}; use the flag that counts {unit}."


def _warmup(o: OptimizerFlags) -> Iterator[str]:
    warmups = (o.lr_warmup_iters or o.lr_warmup_samples, o.lr_warmup_fraction, o.lr_warmup_tokens)
    if sum(w is not None and w != 0 for w in warmups) > 1:
        yield "the warm-up is given more than once (iterations or samples, fraction, tokens): keep one."
    if o.lr_warmup_fraction is not None and not 0 <= o.lr_warmup_fraction < 1:
        yield f"--lr-warmup-fraction {o.lr_warmup_fraction:g} must be at least 0 and less than 1."


def _weight_decay(o: OptimizerFlags) -> Iterator[str]:
    style, start, end = o.weight_decay_incr_style, o.start_weight_decay, o.end_weight_decay
    if style == "constant":
        if (start, end) != (None, None):
            yield (
                "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine: add it, "
                "or give --weight-decay instead."
            )
    elif start is None or end is None:
        yield f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay."
    elif not 0 <= start <= end:
        yield (
            f"the weight decay is to grow from {start:g} to {end:g}: both must be at least 0 and the end not below "
            "the start."
        )


def _override_problems(flag: str, words: Sequence[str] | None) -> Iterator[str]:
    """A sentence for each word that cannot be read."""
    for word in words or ():
        try:
            read_override(word)
        except ValueError as error:
            yield f"{flag} {word[:80]}: {error}."


def _betas(o: OptimizerFlags) -> Iterator[str]:
    for name, first, second in (("adam", o.adam_beta1, o.adam_beta2), ("lion", o.lion_beta1, o.lion_beta2)):
        if not (0 <= first < 1 and 0 <= second < 1):
            yield f"--{name}-beta1 {first:g} and --{name}-beta2 {second:g} must be at least 0 and less than 1."


def _moments(o: OptimizerFlags) -> Iterator[str]:
    """Rounded moments are AdamW's."""
    for name, one in o.rounded_moments.items() if o.optimizer != "adam" else ():
        yield (
            f"{flag_name(f'{name}_dtype')} {one} is built for --optimizer adam alone, and this run has --optimizer "
            f"{o.optimizer}: leave one of them out."
        )
    beta1, beta2 = o.adam_beta1, o.adam_beta2
    if o.exp_avg_dtype == "fp8" and o.optimizer == "adam" and 0 <= beta1 < 1 and 0 <= beta2 < 1:
        # By Cauchy and Schwarz, whatever the gradients are: E2 and E3 of gptpar.optim.adam_update.
        spread = (1 - beta2) * (1 - (beta1**2 / beta2 if beta2 else math.ceil(beta1)))
        largest = (1 - beta1) / math.sqrt(spread) if spread > 0 else math.inf
        if largest > FIRST_IN_ROOTS:
            yield (
                f"--exp-avg-dtype fp8 keeps a first moment up to {FIRST_IN_ROOTS:g} roots of the second one, and with "
                f"--adam-beta1 {beta1:g} and --adam-beta2 {beta2:g} it may be {largest:.3g} of them: take bf16 or fp32."
            )


def _muon(o: OptimizerFlags) -> Iterator[str]:
    """Muon's momentum, coefficients and learning rate."""
    if not 0 <= o.muon_momentum < 1:
        yield f"--muon-momentum {o.muon_momentum:g} must be at least 0 and less than 1."
    if o.muon_coefficient_type == "quintic" and o.muon_num_ns_steps % 5:
        yield (
            f"--muon-num-ns-steps {o.muon_num_ns_steps}: the five sets of --muon-coefficient-type quintic belong "
            "together, so it takes 5, 10, ... iterations; or choose simple or polar_express."
        )
    if o.muon_lr not in (None, o.lr) and o.scheduler is not None:
        yield (
            "--muon-lr follows the schedule of --lr-decay-style, and the DeepSpeed configuration has a scheduler that "
            "gives all parameters one rate: leave one of them out."
        )
    elif o.muon_lr and not o.lr and o.lr is not None:
        yield f"--muon-lr {o.muon_lr:g} follows the schedule of --lr, which is {o.lr:g}: give a rate above 0."


def check_schedule_lengths(flags: Flags) -> Iterator[str]:
    """Whether warm-up, decay and WSD's tail fit into each other; the batches and the length must be in order."""
    o, seq_length = flags.optimizer, flags.model.seq_length
    warmup_given = _given(o, ("lr_warmup_tokens", "lr_warmup_samples", "lr_warmup_iters"))
    tail_given = _given(o, ("lr_wsd_decay_samples", "lr_wsd_decay_iters")) if o.lr_decay_style == "WSD" else None
    if not flags.logging.skip_train and seq_length and o.scheduler is None and (warmup_given or tail_given):
        yield from _lengths(flags, seq_length, warmup_given, tail_given)


def _lengths(
    flags: Flags, seq_length: int, warmup_given: tuple[str, int] | None, tail_given: tuple[str, int] | None
) -> Iterator[str]:
    """Problems of a warm-up, or of a tail, with the field that gives it."""
    o = flags.optimizer
    batch = completed(BatchConfig, flags.batch)
    lengths = schedule_lengths(completed(OptimizerConfig, o), batch, seq_length, run_samples(batch))
    warmup, decay = lengths.warmup, lengths.decay

    def in_unit_of(name: str, length: float) -> int:
        """A length of the schedule in what the field counts: tokens, samples or steps."""
        if name.endswith("tokens"):
            return int(length)
        samples = int(length) // seq_length if lengths.in_tokens else int(length)
        return BatchSizes.of(batch).steps_within(samples) if name.endswith("iters") else samples

    if warmup_given and warmup >= decay:
        name, value = warmup_given
        whole = in_unit_of(name, decay)
        yield f"{flag_name(name)} {value} must be less than the decay's {whole}, or --lr is never reached."
    if tail_given and warmup < decay and lengths.tail > decay - warmup:
        name, value = tail_given
        ends = (in_unit_of(name, end) for end in (decay, warmup))
        yield (
            f"{flag_name(name)} {value} must be at most what the warm-up leaves of the decay, "
            f"{' - '.join(map(str, ends))}, or the rate falls as soon as the warm-up is over."
        )


def _given(optimizer: OptimizerFlags, names: tuple[str, ...]) -> tuple[str, int] | None:
    """The first of these fields that says something, and its value."""
    return next(((name, value) for name in names if (value := getattr(optimizer, name))), None)
