"""Flags of the model's shape and options, and whether they agree: heads, widths, norms, windows, vocabulary, muP."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from gptpar.config.fields import Derived, Missing, Notes, Open, completed, flag, flag_name, on_unless
from gptpar.config.layer_patterns import LAYER_LISTS, layer_pattern
from gptpar.config.presets import PRESETS
from gptpar.config.sections.mlp import GATES, ExpertOptions, MLPOptions, check_experts, check_mlp, derive_mlp
from gptpar.config.sections.positions import PositionOptions, check_rotation, check_scaling, derive_positions

if TYPE_CHECKING:
    from gptpar.config import Flags, TokenizerConfig

MAX_TOKEN_IDS = 2**31 - 1
"""Corpora hold token ids in 32 bits."""
MAX_ELEMENTS = 10**14
"""Most elements of all parameters, and of a micro-batch's activations in one place: 100 times what anybody trained."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(PositionOptions, ExpertOptions, MLPOptions, Generic[Open]):
    """A GPT, completely described."""

    normalization: str = flag(
        "LayerNorm",
        "kind of normalisation",
        choices=("LayerNorm", "RMSNorm"),
        spellings={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"},
    )
    norm_epsilon: float = flag(1e-5, "added to the variance in norms", names=("--layernorm-epsilon",), above=0)
    apply_layernorm_1p: bool = flag(False, "norms store their weights less one, and begin at 0")
    embed_layernorm: bool = flag(False, "normalise token embeddings, before positions are added (BLOOM)")
    norm_placement: str = flag(
        "pre",
        "norms of a block: before attention and MLP (pre), after them and before the residual sum (post, as OLMo-2), "
        "or both (peri)",
        choices=("pre", "post", "peri"),
    )
    use_parallel_residual: bool = flag(
        False, "attention and MLP of a block read the same input, and their outputs are added to it (GPT-NeoX)"
    )
    qk_layernorm: bool = flag(
        False, "normalise each head's queries and keys by --normalization, before rotary positions"
    )
    qk_layernorm_scope: str = flag(
        "head",
        "channels over which --qk-layernorm normalises: those of a head (Qwen3), or of all heads together (OLMo-2)",
        choices=("head", "width"),
    )
    attention_output_gate: bool = flag(
        False, "multiply attention's output by the sigmoid of a gate that is projected beside the queries (Qwen3-Next)"
    )
    softmax_type: str = flag(
        "vanilla",
        "softmax of attention: of a token's scores alone, or beside a learned logit of each head, the attention sink "
        "(learnable)",
        choices=("vanilla", "learnable"),
    )
    window_size: int | None = flag(
        None, "tokens that a sliding-window layer sees, including the token itself", least=1, most=100_000_000
    )
    window_pattern: str | None = flag(
        None,
        "layers with --window-size: a letter a layer, S sliding or F full, repeated over the layers (default: S)",
        metavar="SSSF",
    )
    add_bias_linear: bool = on_unless(
        "--disable-bias-linear", "no biases in linear layers, nor in experts and their router"
    )
    add_qkv_bias: bool = flag(False, "bias on the QKV projection even with --disable-bias-linear")
    untie_embeddings_and_output_weights: bool = flag(False, "give the output layer a matrix of its own")
    make_vocab_size_divisible_by: int = flag(
        128, "pad the vocabulary to a multiple of this (whatever the layout)", least=1, most=10_000_000
    )
    pad_vocab_size_to: int | None = flag(
        None,
        "rows of the embedding, in place of a multiple: the same for tokenizers of different sizes",
        names=("--padded-vocab-size",),
        least=1,
        most=10_000_000,
    )
    softmax_over_padding: bool = flag(
        False,
        "rows that pad the vocabulary take part in the softmax, as in Megatron-LM (default: they change no number)",
    )
    init_method_std: float = flag(0.02, "standard deviation of the initial weights", least=0)
    logit_softcap: float = flag(
        0.0, "c: logits become c * tanh(logits / c); 0 is off", names=("--output-logit-softcapping",), least=0
    )
    z_loss_weight: float = flag(
        0.0,
        "in training, add this times the mean of logsumexp(logits)^2 to the loss; 0 is off",
        names=("--z-loss-strength",),
        least=0,
    )
    mup: bool = flag(
        False,
        "muP: a learning rate that was tuned on a model of --mup-base-hidden-size holds for this one "
        "(gptpar/model/mup.py)",
    )
    mup_base_hidden_size: int | None = flag(
        None, "with --mup: the --hidden-size of the model that was tuned", least=1, most=1_000_000
    )
    mup_base_kv_channels: int | None = flag(
        None,
        "with --mup: the --kv-channels of that model (default: this model's; wider models then have more heads)",
        least=1,
        most=1_000_000,
    )
    attention_dropout: float = flag(0.1, "dropout on attention probabilities")
    hidden_dropout: float = flag(0.1, "dropout on embeddings and on each block's two outputs")

    num_layers: int | Open = flag(None, "number of transformer blocks", least=1, most=10_000)
    hidden_size: int | Open = flag(None, "width of the residual stream", least=1, most=1_000_000)
    ffn_hidden_size: int | Open = flag(
        None, "width of the MLP (default: 4 x hidden, with a gate 8/3 x hidden)", least=1, most=10_000_000
    )
    num_attention_heads: int | Open = flag(None, "number of query heads", least=1, most=100_000)
    num_query_groups: int | Open = flag(
        None,
        "number of key/value heads (default: one a query head)",
        names=("--num-key-value-heads",),
        least=1,
        most=100_000,
    )
    kv_channels: int | Open = flag(None, "width of one head (default: hidden / heads)", least=1, most=1_000_000)
    seq_length: int | Open = flag(None, "tokens in one sample", least=1, most=100_000_000)
    max_position_embeddings: int | Open = flag(
        None, "learned positions (default: --seq-length)", least=1, most=100_000_000
    )
    padded_vocab_size: int | Open = None  # type: ignore[assignment]
    """Rows of the embedding; 0 until the tokenizer has been read, where ``--vocab-size`` does not say them."""
    softmax_vocab_size: int | Open = None  # type: ignore[assignment]
    """Rows over which the softmax is: the first ones, one a token id; the others pad the vocabulary. With
    ``--softmax-over-padding``, and in models of other programs, all rows. Where a checkpoint does not say it: all."""

    @property
    def has_dropout(self) -> bool:
        """Whether training draws random numbers."""
        return self.attention_dropout > 0 or self.hidden_dropout > 0

    @property
    def tied(self) -> bool:
        """Whether the output layer reuses the embedding matrix."""
        return not self.untie_embeddings_and_output_weights


@dataclass(frozen=True, kw_only=True)
class ModelFlags(ModelConfig[None]):
    """A GPT's shape and options."""

    preset: str | None = flag(
        None, "fill the model's shape from this preset", choices=tuple(PRESETS), before="num_layers"
    )
    group_query_attention: bool = flag(
        False, "share each key/value head among several query heads", before="num_query_groups"
    )
    glu_activation: str | None = flag(
        None, "same as --swiglu, or as --mlp-activation with a gate (BigScience)", choices=("swiglu", *GATES)
    )
    quick_geglu: bool = flag(
        False, "same as --mlp-activation quick_geglu, but the MLP is 4 x hidden wide by default, as in Megatron-LM"
    )
    squared_relu: bool = flag(False, "same as --mlp-activation squared_relu")
    bias_gelu_fusion: bool = on_unless(
        "--no-bias-gelu-fusion",
        "no tanh form of GELU: same as --mlp-activation gelu, as in Megatron-LM, unless another function is given",
    )
    use_rotary_position_embeddings: bool = flag(False, "same as --position-embedding-type rope")
    use_rope_scaling: bool = flag(False, "same as --rope-scaling-type llama3")
    no_rope_freq: str | None = flag(
        None,
        "every N-th layer has no positions, or a list with 1 for such layers (see --rope-pattern)",
        metavar="N|LIST",
    )
    window_attn_skip_freq: str | None = flag(
        None,
        "with --window-size: every N-th layer is full, or a list with 0 for such layers (see --window-pattern)",
        metavar="N|LIST",
    )
    add_position_embedding: bool = on_unless(
        "--no-position-embedding", "no positions: same as --position-embedding-type none"
    )


def check_model(flags: Flags) -> Iterator[str]:
    """The model's shape."""
    m = flags.model
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        if getattr(m, name) is None:
            yield Missing(f"the model's {name} is not known: give {flag_name(name)}, or a --preset such as 350M.")
    yield from _heads(m)
    yield from _size(flags)
    yield from check_rotation(m)
    yield from _norms(m)
    yield from check_scaling(m)
    yield from _layer_lists(m)
    yield from _windows(m)
    yield from check_mlp(flags)
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
    """Check what is normalised, and over what."""
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


def _mup(m: ModelFlags) -> Iterator[str]:
    if m.mup and m.mup_base_hidden_size is None:
        yield Missing("--mup scales from the width of the model that was tuned: give --mup-base-hidden-size.")
    for name in ("mup_base_hidden_size", "mup_base_kv_channels"):
        if not m.mup and getattr(m, name) is not None:
            yield f"{flag_name(name)} has a meaning with --mup alone: give that flag, or drop this one."


def _heads(m: ModelFlags) -> Iterator[str]:
    """Check how channels are divided among attention heads, and heads among key/value heads."""
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


def expand_preset(flags: Flags, given: Set[str]) -> tuple[Flags, list[Derived]]:
    """Set the model's options that its preset stands for.

    Args:
        given: fields that keep what was typed, as ``section.field``.
    """
    notes, preset = Notes(flags), flags.model.preset
    for name, value in PRESETS.get(preset or "", {}).items():
        if f"model.{name}" not in given:
            notes.replace("model", name, value, f"--preset {preset}")
    return notes.flags, notes.derived


def derive_model(notes: Notes) -> None:
    derive_positions(notes)
    _derive_layer_lists(notes)
    derive_mlp(notes)
    model = notes.flags.model
    if model.hidden_size and model.num_attention_heads:
        notes.fill("model", "kv_channels", model.hidden_size // model.num_attention_heads, "hidden / heads")
    if not model.group_query_attention and model.num_query_groups:
        notes.replace("model", "group_query_attention", True, "--num-query-groups is given")
    elif not model.group_query_attention:
        notes.fill("model", "num_query_groups", model.num_attention_heads, "one key/value head a query head")
    if model.seq_length and model.position_embedding_type == "learned_absolute":
        notes.fill("model", "max_position_embeddings", model.seq_length, "--seq-length")


def _derive_layer_lists(notes: Notes) -> None:
    """Derive layers without positions or windows from Megatron's lists."""
    for name, pattern, letters, most in LAYER_LISTS:
        if (text := getattr(notes.flags.model, name)) is not None:
            with contextlib.suppress(ValueError):  # the checks report it
                notes.fill("model", pattern, layer_pattern(text, letters, most), f"{flag_name(name)} {text}")


def padded_vocab(vocab_size: int, multiple: int, rows: int | None = None) -> int:
    """Rows of the embedding: as given, else the vocabulary rounded up to a multiple; never a function of the layout."""
    return -(-vocab_size // multiple) * multiple if rows is None else rows


def softmax_vocab(vocab_size: int, rows: int, *, over_padding: bool) -> int:
    """Rows over which the softmax runs."""
    return rows if over_padding else vocab_size


def complete_model(flags: ModelFlags, tokenizer: TokenizerConfig) -> ModelConfig:
    """The model; its vocabulary is that of a checkpoint, or of ``--vocab-size``.

    A checkpoint that says its rows alone has all of them in the softmax: one of another program, or an older one.
    """
    size, stored = tokenizer.vocab_size or 0, flags.padded_vocab_size
    rows = stored or padded_vocab(size, flags.make_vocab_size_divisible_by, flags.pad_vocab_size_to)
    over_padding = flags.softmax_over_padding or stored is not None
    filled = dataclasses.replace(
        flags,
        max_position_embeddings=flags.max_position_embeddings or flags.seq_length,
        padded_vocab_size=rows,
        softmax_vocab_size=flags.softmax_vocab_size or softmax_vocab(size, rows, over_padding=over_padding),
        softmax_over_padding=flags.softmax_over_padding if flags.softmax_vocab_size else over_padding,
    )
    return completed(ModelConfig, filled)
