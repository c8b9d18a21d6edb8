"""Learning rate, weight decay and the optimizer's numbers."""

from __future__ import annotations

from collections.abc import Iterator

from gptpar.config import BatchConfig, Flags, OptimizerConfig, OptimizerFlags
from gptpar.config.batch_sizes import BatchSizes, run_samples
from gptpar.config.complete import completed
from gptpar.config.fields import Missing, flag_name
from gptpar.config.schedule_lengths import schedule_lengths


def check_schedule(flags: Flags) -> Iterator[str]:
    """Learning rate, weight decay and the optimizer's numbers."""
    o, b = flags.optimizer, flags.batch
    if o.lr is None and not flags.logging.skip_train:
        yield Missing("--lr is missing: the peak learning rate, for example 3e-4.")
    elif o.lr is not None and not 0 <= o.min_lr <= o.lr:
        yield f"--min-lr {o.min_lr:g} must lie between 0 and --lr {o.lr:g}."
    if o.lr is not None and not 0 <= o.lr_warmup_init <= o.lr:
        yield f"--lr-warmup-init {o.lr_warmup_init:g} must lie between 0 and --lr {o.lr:g}."
    in_iters = {"--lr-decay-iters": o.lr_decay_iters, "--lr-wsd-decay-iters": o.lr_wsd_decay_iters}
    in_iters["--lr-warmup-iters"] = o.lr_warmup_iters or None
    in_samples = {"--lr-decay-samples": o.lr_decay_samples, "--lr-wsd-decay-samples": o.lr_wsd_decay_samples}
    in_samples["--lr-warmup-samples"] = o.lr_warmup_samples or None
    wrong, unit = (in_iters, "samples") if b.train_iters is None else (in_samples, "iterations")
    for name, value in wrong.items():
        if value is not None and not flags.logging.skip_train:
            yield f"{name} {value}: this run is measured in {unit}; use the flag that counts {unit}."
    warmups = (o.lr_warmup_iters or o.lr_warmup_samples, o.lr_warmup_fraction, o.lr_warmup_tokens)
    if sum(w is not None and w != 0 for w in warmups) > 1:
        yield "the warm-up is given more than once (iterations or samples, fraction, tokens): keep one."
    if o.lr_warmup_fraction is not None and not 0 <= o.lr_warmup_fraction < 1:
        yield f"--lr-warmup-fraction {o.lr_warmup_fraction:g} must be at least 0 and less than 1."
    if o.lr_decay_style == "WSD" and o.lr_wsd_decay_iters is None and o.lr_wsd_decay_samples is None:
        yield Missing(
            "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples, the length of its tail."
        )
    if o.weight_decay_incr_style != "constant" and (o.start_weight_decay is None or o.end_weight_decay is None):
        yield (
            f"--weight-decay-incr-style {o.weight_decay_incr_style} needs --start-weight-decay and --end-weight-decay."
        )
    elif o.weight_decay_incr_style == "constant" and (o.start_weight_decay, o.end_weight_decay) != (None, None):
        yield (
            "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine: add it, or "
            "give --weight-decay instead."
        )
    elif o.weight_decay_incr_style != "constant" and not 0 <= (o.start_weight_decay or 0) <= (o.end_weight_decay or 0):
        yield (
            f"the weight decay is to grow from {o.start_weight_decay:g} to {o.end_weight_decay:g}: both must be at "
            "least 0 and the end not below the start."
        )
    for name, betas in (("adam", (o.adam_beta1, o.adam_beta2)), ("lion", (o.lion_beta1, o.lion_beta2))):
        if not all(0 <= beta < 1 for beta in betas):
            first, second = betas
            yield f"--{name}-beta1 {first:g} and --{name}-beta2 {second:g} must be at least 0 and less than 1."
    if o.override_opt_param_scheduler and o.use_checkpoint_opt_param_scheduler:
        yield "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other."


def check_schedule_lengths(flags: Flags) -> Iterator[str]:
    """Whether warm-up, decay and WSD's tail fit into each other; the batches and the length must be in order."""
    o, seq_length = flags.optimizer, flags.model.seq_length
    if flags.logging.skip_train or not seq_length:
        return
    batch = completed(BatchConfig, flags.batch)
    lengths = schedule_lengths(completed(OptimizerConfig, o), batch, seq_length, run_samples(batch))
    warmup, decay = lengths.warmup, lengths.decay

    def in_unit_of(name: str, length: float) -> int:
        """A length of the schedule in what the field counts: tokens, samples or steps."""
        if name.endswith("tokens"):
            return int(length)
        samples = int(length) // seq_length if lengths.in_tokens else int(length)
        return BatchSizes.of(batch).steps_within(samples) if name.endswith("iters") else samples

    given = _given(o, ("lr_warmup_tokens", "lr_warmup_samples", "lr_warmup_iters"))
    if given and warmup >= decay:
        name, value = given
        whole = in_unit_of(name, decay)
        yield f"{flag_name(name)} {value} must be less than the decay's {whole}, or --lr is never reached."
    given = _given(o, ("lr_wsd_decay_samples", "lr_wsd_decay_iters"))
    if o.lr_decay_style == "WSD" and given and warmup < decay and lengths.tail > decay - warmup:
        name, value = given
        ends = (in_unit_of(name, end) for end in (decay, warmup))
        yield (
            f"{flag_name(name)} {value} must be at most what the warm-up leaves of the decay, "
            f"{' - '.join(map(str, ends))}, or the rate falls as soon as the warm-up is over."
        )


def _given(optimizer: OptimizerFlags, names: tuple[str, ...]) -> tuple[str, int] | None:
    """The first of these fields that says something, and its value."""
    return next(((name, value) for name in names if (value := getattr(optimizer, name))), None)
