"""The optimizer, its schedules and number formats."""

from __future__ import annotations

from collections.abc import Iterator

from gptpar.config import Config
from gptpar.config.graph import graph_obstacles


def check_schedule(config: Config) -> Iterator[str]:
    """Learning rate, weight decay and Adam's numbers."""
    o, b = config.optimizer, config.batch
    if o.lr is None and not config.logging.skip_train:
        yield "--lr is missing: the peak learning rate, for example 3e-4."
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
        if value is not None and not config.logging.skip_train:
            yield f"{name} {value}: this run is measured in {unit}; use the flag that counts {unit}."
    warmups = (o.lr_warmup_iters or o.lr_warmup_samples, o.lr_warmup_fraction, o.lr_warmup_tokens)
    if sum(w is not None and w != 0 for w in warmups) > 1:
        yield "the warm-up is given more than once (iterations or samples, fraction, tokens): keep one."
    if o.lr_warmup_fraction is not None and not 0 <= o.lr_warmup_fraction < 1:
        yield f"--lr-warmup-fraction {o.lr_warmup_fraction:g} must be at least 0 and less than 1."
    yield from _warmup_is_shorter(config)
    if o.lr_decay_style == "WSD" and o.lr_wsd_decay_iters is None and o.lr_wsd_decay_samples is None:
        yield "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples, the length of its tail."
    if o.weight_decay_incr_style != "constant" and (o.start_weight_decay is None or o.end_weight_decay is None):
        yield (
            f"--weight-decay-incr-style {o.weight_decay_incr_style} needs --start-weight-decay and --end-weight-decay."
        )
    elif o.weight_decay_incr_style != "constant" and not 0 <= (o.start_weight_decay or 0) <= (o.end_weight_decay or 0):
        yield (
            f"the weight decay is to grow from {o.start_weight_decay:g} to {o.end_weight_decay:g}: both must be at "
            "least 0 and the end not below the start."
        )
    if not 0 <= o.adam_beta1 < 1 or not 0 <= o.adam_beta2 < 1:
        yield f"--adam-beta1 {o.adam_beta1:g} and --adam-beta2 {o.adam_beta2:g} must be at least 0 and less than 1."
    if o.override_opt_param_scheduler and o.use_checkpoint_opt_param_scheduler:
        yield "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other."


def _warmup_is_shorter(config: Config) -> Iterator[str]:
    """The peak rate must be reached before the decay is over."""
    o, b = config.optimizer, config.batch
    spans = {
        "iters": (o.lr_warmup_iters, o.lr_decay_iters or b.train_iters),
        "samples": (o.lr_warmup_samples, o.lr_decay_samples or b.train_samples),
        "tokens": (o.lr_warmup_tokens, o.lr_decay_tokens),
    }
    for unit, (warmup, decay) in spans.items():
        if warmup and decay and warmup >= decay:
            yield f"--lr-warmup-{unit} {warmup} must be less than the decay's {decay}, or --lr is never reached."


def check_precision(config: Config, world_size: int) -> Iterator[str]:
    """Number formats and the loss scale."""
    p = config.precision
    chosen = [f"--{name}" for name in ("fp16", "bf16", "fp64") if getattr(p, name)]
    if len(chosen) > 1:
        yield f"{' and '.join(chosen)} exclude each other: choose one number format."
    if p.loss_scale is not None and not p.fp16:
        yield f"--loss-scale {p.loss_scale:g} has a meaning with --fp16 only."
    if p.initial_loss_scale < p.min_loss_scale:
        yield (f"--initial-loss-scale {p.initial_loss_scale:g} must be at least --min-loss-scale {p.min_loss_scale:g}.")
    if p.fp64 and config.parallel.grad_reduce_in_bf16:
        yield "--grad-reduce-in-bf16 rounds the gradients that --fp64 is to keep exact: drop one of them."
    if p.cuda_graph == "on":
        for obstacle in graph_obstacles(config, config.parallel.data_parallel_size(world_size)):
            yield f"--cuda-graph on: {obstacle}."
