"""Values that follow from others, each with its reason. Pure; run before validation, so it tolerates missing fields."""

from __future__ import annotations

from dataclasses import dataclass

from gptpar.config import Config
from gptpar.config.presets import PRESETS


@dataclass(frozen=True)
class Derived:
    """A value nobody typed: its name, what it became, and why."""

    name: str
    value: object
    reason: str


class _Notes:
    """Fills fields that are ``None`` and remembers why."""

    def __init__(self, config: Config):
        self.config = config
        self.derived: list[Derived] = []

    def fill(self, section: str, name: str, value: object, reason: str) -> None:
        if getattr(getattr(self.config, section), name) is None:
            self.replace(section, name, value, reason)

    def replace(self, section: str, name: str, value: object, reason: str) -> None:
        self.config = self.config.update(section, **{name: value})
        self.derived.append(Derived(name.replace("_", " "), value, reason))


def ffn_width(hidden_size: int, swiglu: bool) -> int:
    """4 x hidden; with SwiGLU two thirds of it, a multiple of 64 (as Megatron: ``int(8h/3/64)*64``)."""
    return int(4 * hidden_size * 2 / 3 / 64) * 64 if swiglu else 4 * hidden_size


def padded_vocab(vocab_size: int, multiple: int) -> int:
    """The vocabulary rounded up to a multiple; never a function of the layout."""
    return -(-vocab_size // multiple) * multiple


def derive(config: Config, world_size: int) -> tuple[Config, list[Derived]]:
    """Fill what can be filled.

    Args:
        config: as typed.
        world_size: number of processes the run will have.

    Returns:
        The completed configuration and the list of derived values with their reasons.
    """
    notes = _Notes(config)
    _derive_model(notes)
    _derive_batch(notes, world_size)
    _derive_rest(notes)
    return notes.config, notes.derived


def _derive_model(notes: _Notes) -> None:
    preset = notes.config.model.preset
    for name, value in PRESETS.get(preset or "", {}).items():
        notes.fill("model", name, value, f"--preset {preset}")
    model = notes.config.model
    if model.use_rotary_position_embeddings and model.position_embedding_type != "rope":
        notes.replace("model", "position_embedding_type", "rope", "--use-rotary-position-embeddings")
    elif not model.add_position_embedding and model.position_embedding_type == "learned_absolute":
        notes.replace("model", "position_embedding_type", "none", "--no-position-embedding")
    model = notes.config.model
    if model.hidden_size:
        reason = "8/3 x hidden for SwiGLU, a multiple of 64" if model.swiglu else "4 x hidden"
        notes.fill("model", "ffn_hidden_size", ffn_width(model.hidden_size, model.swiglu), reason)
        if model.num_attention_heads:
            width = model.hidden_size // model.num_attention_heads
            notes.fill("model", "kv_channels", width, "hidden / heads")
    if not model.group_query_attention and model.num_query_groups:
        notes.replace("model", "group_query_attention", True, "--num-query-groups is given")
    elif not model.group_query_attention:
        notes.fill("model", "num_query_groups", model.num_attention_heads, "one key/value head a query head")
    if model.seq_length and model.position_embedding_type == "learned_absolute":
        notes.fill("model", "max_position_embeddings", model.seq_length, "--seq-length")


def _derive_batch(notes: _Notes, world_size: int) -> None:
    config = notes.config
    parallel, batch = config.parallel, config.batch
    data_parallel = world_size // max(1, parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
    if batch.micro_batch_size and data_parallel > 0:
        reason = f"micro-batch {batch.micro_batch_size} x {data_parallel} data-parallel process(es)"
        notes.fill("batch", "global_batch_size", batch.micro_batch_size * data_parallel, reason)
    seq_length = config.model.seq_length
    if batch.train_tokens and seq_length and batch.train_iters is None:
        samples = -(-batch.train_tokens // seq_length)
        notes.fill("batch", "train_samples", samples, f"{batch.train_tokens:,} tokens / {seq_length} a sample")


def _derive_rest(notes: _Notes) -> None:
    config = notes.config
    if config.recompute.checkpoint_activations:
        notes.fill("recompute", "recompute_granularity", "full", "--checkpoint-activations")
    if config.data.data_path:
        notes.fill("data", "split", "969, 30, 1", "Megatron's default")
    if config.logging.eval_iters:
        notes.fill("logging", "eval_interval", 1000, "default")
    if config.checkpoint.save:
        notes.fill("logging", "tensorboard_dir", f"{config.checkpoint.save}/tensorboard", "inside --save")
