"""Every reason why a configuration cannot run, found before any long work starts. Pure but for looking at paths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from gptpar.config import Config
from gptpar.config.derive import Derived, derive
from gptpar.config.flags import ParsedFlags, flag_name
from gptpar.errors import ConfigError


def resolve(
    parsed: ParsedFlags, world_size: int, *, more: Callable[[Config], Iterable[str]] | None = None
) -> tuple[Config, list[Derived]]:
    """Derive and validate.

    Args:
        more: finds problems that this room cannot know of.

    Raises:
        ConfigError: with all problems of the command line and of the configuration.
    """
    config, derived = derive(parsed.config, world_size)
    problems = [*parsed.problems, *out_of_range(parsed.config), *find_problems(config, world_size)]
    problems += more(config) if more else ()
    if problems:
        raise ConfigError(problems)
    return config, derived


def out_of_range(config: Config) -> Iterator[str]:
    """Numbers beyond the limits that their flags declare; what was derived from them needs no sentence of its own."""
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        for spec in dataclasses.fields(values):
            value, limits = getattr(values, spec.name), spec.metadata
            if value is None or not limits:
                continue
            if limits["least"] is not None and value < limits["least"]:
                yield f"{flag_name(spec.name)} is {value:g}; it must be at least {limits['least']}."
            elif limits["above"] is not None and value <= limits["above"]:
                yield f"{flag_name(spec.name)} is {value:g}; it must be more than {limits['above']}."


def find_problems(config: Config, world_size: int) -> list[str]:
    """One sentence for each problem, with the numbers and a remedy; empty when the configuration can run."""
    checks = (_model, _parallel(world_size), _batch(world_size), _duration, _schedule, _precision, _data, _files)
    return [problem for check in checks for problem in check(config)]


def _model(config: Config) -> Iterator[str]:
    m = config.model
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        if getattr(m, name) is None:
            yield f"the model's {name} is not known: give {flag_name(name)}, or a --preset such as 350M."
    hidden, heads = m.hidden_size, m.num_attention_heads
    if hidden and heads and hidden % heads and m.kv_channels == hidden // heads:
        yield (
            f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}: "
            f"use {hidden - hidden % heads} or {hidden - hidden % heads + heads}, or give --kv-channels."
        )
    if m.group_query_attention and not m.num_query_groups:
        yield "--group-query-attention needs --num-query-groups, the number of key/value heads."
    if m.num_query_groups and heads and heads % m.num_query_groups:
        yield (
            f"--num-attention-heads {heads} is not divisible by --num-query-groups {m.num_query_groups}; "
            f"divisors of {heads} are {', '.join(str(i) for i in range(1, heads + 1) if heads % i == 0)}."
        )
    if m.position_embedding_type == "rope" and m.kv_channels:
        rotated = int(m.kv_channels * m.rotary_percent)
        if rotated % 2 or not 2 <= rotated <= m.kv_channels:
            yield (
                f"rotary positions turn pairs of channels, but {m.rotary_percent:g} of a head of "
                f"{m.kv_channels} is {rotated}: choose an even number."
            )
    if m.seq_length and m.max_position_embeddings and m.max_position_embeddings < m.seq_length:
        yield (
            f"--max-position-embeddings {m.max_position_embeddings} is less than --seq-length {m.seq_length}: "
            f"raise it to {m.seq_length}."
        )
    for name in ("attention_dropout", "hidden_dropout"):
        if not 0 <= getattr(m, name) < 1:
            yield f"--{name.replace('_', '-')} is {getattr(m, name):g}; it must be at least 0 and less than 1."


def _parallel(world_size: int):  # type: ignore[no-untyped-def]
    def check(config: Config) -> Iterator[str]:
        p = config.parallel
        sizes = {
            "--tensor-model-parallel-size": p.tensor_model_parallel_size,
            "--pipeline-model-parallel-size": p.pipeline_model_parallel_size,
        }
        for name, size in sizes.items():
            if size > 1:
                yield f"{name} {size}: this version trains with data parallelism only; use 1."
        model_parallel = p.tensor_model_parallel_size * p.pipeline_model_parallel_size
        if model_parallel > 0 and world_size % model_parallel:
            yield (
                f"{world_size} processes cannot be cut into groups of {p.tensor_model_parallel_size} x "
                f"{p.pipeline_model_parallel_size} = {model_parallel} (tensor x pipeline)."
            )
        if p.no_pipeline_parallel and p.pipeline_model_parallel_size > 1:
            yield "--no-pipeline-parallel contradicts --pipeline-model-parallel-size > 1: drop one of them."

    return check


def _batch(world_size: int):  # type: ignore[no-untyped-def]
    def check(config: Config) -> Iterator[str]:
        b, p = config.batch, config.parallel
        if b.micro_batch_size is None:
            yield "--micro-batch-size is missing: the number of samples one process runs at once, for example 4."
            return
        data_parallel = max(1, world_size // max(1, p.tensor_model_parallel_size * p.pipeline_model_parallel_size))
        unit = max(1, b.micro_batch_size) * data_parallel
        if b.global_batch_size is not None and b.global_batch_size % unit:
            yield (
                f"--global-batch-size {b.global_batch_size} is not a multiple of --micro-batch-size "
                f"{b.micro_batch_size} x {data_parallel} data-parallel process(es) = {unit}: "
                f"the nearest that fits is {max(unit, round(b.global_batch_size / unit) * unit)}."
            )
        if b.rampup_batch_size is not None:
            yield from _rampup(b.rampup_batch_size, b.global_batch_size or unit, unit)

    return check


def _rampup(ramp: tuple[int, ...], target: int, unit: int) -> Iterator[str]:
    if len(ramp) != 3:
        yield f"--rampup-batch-size takes START INCREMENT SAMPLES; {len(ramp)} value(s) were given."
        return
    start, increment, samples = ramp
    if min(ramp) < 1 or start > target:
        yield f"--rampup-batch-size {start} {increment} {samples}: positive numbers and a start <= {target} are needed."
        return
    if (target - start) % increment:
        yield f"--rampup-batch-size: from {start} to {target} is not a whole number of steps of {increment}."
    if start % unit or increment % unit:
        yield (
            f"--rampup-batch-size: start {start} and increment {increment} must be multiples of "
            f"micro-batch x data-parallel = {unit}, or some steps could not be cut."
        )


def _duration(config: Config) -> Iterator[str]:
    b, c = config.batch, config.checkpoint
    spans = {"--train-iters": b.train_iters, "--train-samples or --train-tokens": b.train_samples}
    given = [name for name, value in spans.items() if value is not None]
    if config.logging.skip_train:
        if not c.load:
            yield "--skip-train evaluates a checkpoint: give --load."
    elif not given:
        yield "how long to train is not said: give --train-iters, --train-samples or --train-tokens."
    elif len(given) > 1:
        yield f"how long to train is said twice ({' and '.join(given)}): keep one."
    if b.rampup_batch_size is not None and b.train_iters is not None:
        yield "--rampup-batch-size needs --train-samples or --train-tokens: with it, steps differ in size."
    if c.save_interval is not None and not c.save:
        yield "--save-interval is given but --save is not: say where to save."


def _schedule(config: Config) -> Iterator[str]:
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


def _precision(config: Config) -> Iterator[str]:
    p = config.precision
    chosen = [f"--{name}" for name in ("fp16", "bf16", "fp64") if getattr(p, name)]
    if len(chosen) > 1:
        yield f"{' and '.join(chosen)} exclude each other: choose one number format."
    if p.loss_scale is not None and not p.fp16:
        yield f"--loss-scale {p.loss_scale:g} has a meaning with --fp16 only."
    if p.initial_loss_scale < p.min_loss_scale:
        yield (f"--initial-loss-scale {p.initial_loss_scale:g} must be at least --min-loss-scale {p.min_loss_scale:g}.")
    layers = config.recompute.recompute_num_layers
    if layers is not None and config.recompute.recompute_granularity is None:
        yield "--recompute-num-layers needs --recompute-granularity full."


def _data(config: Config) -> Iterator[str]:
    d, t = config.data, config.tokenizer
    parts = [d.train_data_path, d.valid_data_path, d.test_data_path]
    sources = {"--mock-data": d.mock_data, "--data-path": bool(d.data_path), "--train-data-path": any(parts)}
    given = [name for name, present in sources.items() if present]
    if not given:
        yield "there is nothing to train on: give --data-path PREFIX (see gptpar preprocess), or --mock-data."
    elif len(given) > 1:
        yield f"data is given twice ({' and '.join(given)}): keep one."
    if any(parts) and d.split is not None:
        yield "--split cuts one --data-path into three; with --train-data-path it has no meaning: drop it."
    if t.tokenizer_type is None and t.vocab_size is None:
        yield "the vocabulary is not known: give --tokenizer-type and its files, or --vocab-size."
    if (d.eod_mask_loss or d.reset_position_ids or d.reset_attention_mask) and t.tokenizer_type is None:
        yield "--eod-mask-loss and --reset-* need to know the end-of-document id: give --tokenizer-type."


def _files(config: Config) -> Iterator[str]:
    d, c = config.data, config.checkpoint
    for paths in (d.data_path, d.train_data_path, d.valid_data_path, d.test_data_path):
        for prefix in _prefixes(paths or ()):
            missing = [f"{prefix}{end}" for end in (".bin", ".idx") if not Path(f"{prefix}{end}").is_file()]
            if missing:
                yield (
                    f"the data set {prefix} is not complete: {' and '.join(missing)} not found; give the path without "
                    ".bin or .idx."
                )
    if c.load and not Path(c.load).is_dir() and c.load != c.save:
        yield f"--load {c.load}: there is no such folder."
    if c.save and Path(c.save).exists() and not Path(c.save).is_dir():
        yield f"--save {c.save} is a file; a folder is needed."
    if (c.ckpt_step is not None or c.finetune) and not c.load:
        yield "--ckpt-step and --finetune need --load, the folder to load from."


def _prefixes(paths: tuple[str, ...]) -> list[str]:
    """The prefixes in a --data-path list, weights left out (an even-length list may hold WEIGHT PREFIX pairs)."""

    def is_number(text: str) -> bool:
        try:
            float(text)
        except ValueError:
            return False
        return True

    if len(paths) % 2 == 0 and all(is_number(w) for w in paths[::2]):
        return list(paths[1::2])
    return list(paths)
