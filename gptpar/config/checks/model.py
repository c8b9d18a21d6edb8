"""Checks the model's shape: heads, widths, norms, windows, rotary positions, vocabulary, muP."""

from __future__ import annotations

from collections.abc import Iterator

from gptpar.config import Flags, ModelFlags
from gptpar.config.checks.experts import check_experts
from gptpar.config.fields import Missing, flag_name
from gptpar.config.layer_patterns import LAYER_LISTS, layer_pattern

MAX_TOKEN_IDS = 2**31 - 1
"""Corpora hold token ids in 32 bits."""
MAX_ELEMENTS = 10**14
"""Of all parameters, and of one micro-batch's activations in one place; a hundred times what anybody has trained."""


def check_model(flags: Flags) -> Iterator[str]:
    """The model's shape."""
    m = flags.model
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        if getattr(m, name) is None:
            yield Missing(f"the model's {name} is not known: give {flag_name(name)}, or a --preset such as 350M.")
    yield from _heads(m)
    yield from _size(flags)
    yield from _rotation(m)
    yield from _norms(m)
    yield from _scaling(m)
    yield from _layer_lists(m)
    yield from _windows(m)
    yield from _mlp(m)
    yield from _gates(flags)
    yield from _sinks(m)
    yield from _mup(m)
    yield from check_experts(flags)
    if m.seq_length and m.max_position_embeddings and m.max_position_embeddings < m.seq_length:
        yield (
            f"--max-position-embeddings {m.max_position_embeddings} is less than --seq-length {m.seq_length}: "
            f"raise it to {m.seq_length}."
        )
    for name in ("attention_dropout", "hidden_dropout"):
        if not 0 <= getattr(m, name) < 1:
            yield f"--{name.replace('_', '-')} is {getattr(m, name):g}; it must be at least 0 and less than 1."


def _norms(m: ModelFlags) -> Iterator[str]:
    """What is normalised, and over what."""
    over_width = m.qk_layernorm_scope == "width"
    if m.qk_layernorm and not over_width and m.kv_channels == 1:
        yield "--qk-layernorm normalises over the channels of a head, and --kv-channels is 1: use at least 2."
    if over_width and not m.qk_layernorm:
        yield "--qk-layernorm-scope width says what --qk-layernorm normalises over: give that flag, too."
    if over_width and m.normalization != "RMSNorm":
        yield (
            f"--qk-layernorm-scope width is there for --normalization RMSNorm alone, not for {m.normalization}: "
            "change one of them."
        )


def _windows(m: ModelFlags) -> Iterator[str]:
    pattern = m.window_pattern
    if pattern is not None and set(pattern) - set("SF"):
        yield f"--window-pattern {pattern[:80]} may hold the letters S (sliding) and F (full) alone, as in SSSF."
    if pattern is not None and m.window_size is None:
        yield "--window-pattern says which layers have a sliding window: give its --window-size, too."


def _sinks(m: ModelFlags) -> Iterator[str]:
    if m.softmax_type == "learnable" and m.attention_dropout:
        yield (
            f"--softmax-type learnable has no dropout of probabilities yet, and --attention-dropout is "
            f"{m.attention_dropout:g}: give --attention-dropout 0."
        )


def _mlp(m: ModelFlags) -> Iterator[str]:
    if m.swiglu and m.mlp_activation != "gelu_tanh":
        yield f"--swiglu has an activation function of its own: drop --mlp-activation {m.mlp_activation}, or --swiglu."
    if m.swiglu and m.glu_activation not in (None, "swiglu"):
        yield f"--swiglu and --glu-activation {m.glu_activation} are different gates: keep one."
    if m.quick_geglu and (m.swiglu or m.glu_activation not in (None, "quick_geglu")):
        other = "--swiglu" if m.swiglu else f"--glu-activation {m.glu_activation}"
        yield f"--quick-geglu and {other} are different gates: keep one."


def _gates(flags: Flags) -> Iterator[str]:
    """Options that only an MLP with a gate has."""
    m = flags.model
    of_gates = [
        flag_name(name)
        for name in ("activation_func_clamp_value", "glu_linear_offset")
        if getattr(m, name) != getattr(ModelFlags(), name)
    ]
    if of_gates and not (m.gated or m.glu_activation or m.quick_geglu):
        yield f"{', '.join(of_gates)}: an MLP without a gate has neither: give --swiglu or --quick-geglu, or drop this."
    if of_gates and flags.recompute.mlp_chunks_for_training > 1:
        yield f"{', '.join(of_gates)}: --mlp-chunks-for-training has no such gate yet: drop one of them."


def _mup(m: ModelFlags) -> Iterator[str]:
    if m.mup and m.mup_base_hidden_size is None:
        yield Missing("--mup scales from the width of the model that was tuned: give --mup-base-hidden-size.")
    for name in ("mup_base_hidden_size", "mup_base_kv_channels"):
        if not m.mup and getattr(m, name) is not None:
            yield f"{flag_name(name)} has a meaning with --mup alone: give that flag, or drop this one."


def _heads(m: ModelFlags) -> Iterator[str]:
    """How channels are shared among attention heads, and heads among key/value heads."""
    hidden, heads = m.hidden_size, m.num_attention_heads
    if hidden and heads and hidden % heads and m.kv_channels == hidden // heads > 0:
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


def _rotation(m: ModelFlags) -> Iterator[str]:
    if m.position_embedding_type == "rope" and m.kv_channels:
        rotated = int(m.kv_channels * m.rotary_percent)
        if rotated % 2 or not 2 <= rotated <= m.kv_channels:
            yield (
                f"rotary positions turn pairs of channels, but {m.rotary_percent:g} of a head of "
                f"{m.kv_channels} is {rotated}: choose an even number."
            )


def _scaling(m: ModelFlags) -> Iterator[str]:
    """How rotary frequencies are lowered."""
    kind, rotary = m.rope_scaling_type, m.position_embedding_type == "rope" or m.use_rotary_position_embeddings
    flag = "--use-rope-scaling" if m.use_rope_scaling else "--rope-scaling-type"
    if kind is not None and not rotary:
        yield f"{flag} changes rotary positions: give --position-embedding-type rope, or drop it."
    if m.use_rope_scaling and kind not in (None, "llama3"):
        yield f"--use-rope-scaling is --rope-scaling-type llama3, and {kind} is given: drop one of them."
    if kind in ("dynamic", "yarn") and m.original_max_position_embeddings is None:
        yield Missing(
            f"--rope-scaling-type {kind} starts from the samples of the first training: give their length, "
            "--original-max-position-embeddings."
        )
    yield from _scaling_numbers(m)


def _scaling_numbers(m: ModelFlags) -> Iterator[str]:
    """Whether the numbers of a form of scaled frequencies can be computed with."""
    kind = m.rope_scaling_type
    if kind == "llama3" and m.low_freq_factor >= m.high_freq_factor:
        yield (
            f"--low-freq-factor {m.low_freq_factor:g} must be less than --high-freq-factor {m.high_freq_factor:g}: "
            "Llama 3.1 has 1 and 4."
        )
    if kind == "yarn" and m.yarn_beta_slow >= m.yarn_beta_fast:
        yield (
            f"--yarn-beta-slow {m.yarn_beta_slow:g} must be less than --yarn-beta-fast {m.yarn_beta_fast:g}: "
            "YaRN has 1 and 32."
        )
    if kind == "yarn" and m.rotary_base == 1:
        yield "--rope-scaling-type yarn tells frequencies apart, and with --rotary-base 1 all are equal: raise it."
    if kind == "dynamic" and m.kv_channels and int(m.kv_channels * m.rotary_percent) == 2:
        yield "--rope-scaling-type dynamic needs two pairs of channels or more, and a head turns one: use another type."


def _layer_lists(m: ModelFlags) -> Iterator[str]:
    """Which layers have positions, and lists of layers as Megatron-LM has them."""
    if m.rope_pattern is not None and set(m.rope_pattern) - set("RN"):
        yield f"--rope-pattern {m.rope_pattern[:80]} may hold the letters R (rotary) and N (none) alone, as in RRRN."
    if m.rope_pattern is not None and m.position_embedding_type != "rope" and not m.use_rotary_position_embeddings:
        yield "--rope-pattern says which layers have rotary positions: give --position-embedding-type rope, or drop it."
    for name, pattern, letters, most in LAYER_LISTS:
        text, ours = getattr(m, name), getattr(m, pattern)
        if text is None:
            continue
        try:
            if ours not in (None, found := layer_pattern(text, letters, most)):
                flag = flag_name(pattern)
                yield f"{flag_name(name)} is {flag} {found[:80]}, and {ours[:80]} is given: drop one of them."
        except ValueError as why:
            yield f"{flag_name(name)} {text[:80]}: {why}."


def _size(flags: Flags) -> Iterator[str]:
    """Whether the model can exist at all; whether it fits the memory is known later."""
    vocab_size = flags.tokenizer.vocab_size or 0
    if vocab_size > MAX_TOKEN_IDS:
        yield f"--vocab-size is {vocab_size:.3g}; it must be at most {MAX_TOKEN_IDS:,}, as token ids have 32 bits."
    rows = flags.model.pad_vocab_size_to
    if rows is not None and vocab_size > rows:
        yield f"--vocab-size {vocab_size} is more than the {rows} rows of --pad-vocab-size-to: raise those."
    yield from _elements(flags, vocab_size)


def _elements(flags: Flags, vocab_size: int) -> Iterator[str]:
    """Whether its parameters and activations can be counted."""
    m = flags.model
    hidden, layers, length, micro = m.hidden_size, m.num_layers, m.seq_length, flags.batch.micro_batch_size or 1
    if not (hidden and layers and length and m.num_attention_heads and m.kv_channels and m.ffn_hidden_size):
        return
    attention = 2 * hidden * m.kv_channels * (m.num_attention_heads + (m.num_query_groups or 1))
    mlp = (3 if m.gated else 2) * hidden * m.num_experts * m.width_of_experts(m.ffn_hidden_size)
    rows = max(vocab_size, m.make_vocab_size_divisible_by, m.pad_vocab_size_to or 0) + (m.max_position_embeddings or 0)
    parameters = layers * (attention + mlp) + rows * hidden
    if parameters > MAX_ELEMENTS:
        yield (
            f"the model would have {parameters:.3g} parameters (--num-layers {layers}, --hidden-size {hidden}, "
            f"--ffn-hidden-size {m.ffn_hidden_size}, {rows:,} rows of embeddings), more than {MAX_ELEMENTS:.0e}: lower "
            "these."
        )
    activation = micro * length * max(hidden, m.ffn_hidden_size, vocab_size)
    if activation > MAX_ELEMENTS:
        yield (
            f"one activation would have {activation:.3g} elements (--micro-batch-size {micro} x --seq-length "
            f"{length} x the widest layer), more than {MAX_ELEMENTS:.0e}: lower these."
        )
