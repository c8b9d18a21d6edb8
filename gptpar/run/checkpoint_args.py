"""Takes flags from the checkpoint at ``--load``: with ``--use-checkpoint-args`` its model and tokenizer.

Without that flag a run keeps the checkpoint's value of the few fields whose default has changed or follows from flags.
So the same command goes on with the same loss.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

from gptpar.config import Flags, ModelFlags, TokenizerConfig
from gptpar.config.fields import Derived, flag_name
from gptpar.config.flags import ParsedFlags, keys_of_model
from gptpar.config.sections.mlp import FUSED_GELU, UNFUSED_GELU
from gptpar.config.sections.positions import STRETCHING
from gptpar.config.stored import StoredModel, stored_model
from gptpar.errors import CheckpointError, TokenizerError
from gptpar.exchange import tokenizer_of_checkpoint
from gptpar.run.resume import path_to_resume
from gptpar.run.same_run import RULES, Rule
from gptpar.system.data_flags import TOKENIZER_FILES

_REASON = "--use-checkpoint-args"


def with_checkpoint_args(parsed: ParsedFlags) -> ParsedFlags:
    """The command line, its model and tokenizer filled from the checkpoint where ``--use-checkpoint-args`` asks for it.

    A flag that makes another model, or another tokenizer, than the checkpoint's is a problem. Others win over the
    checkpoint: dropout, the sequence length, the tokenizer's files, which may have moved, and, with ``--finetune``,
    what stretches rotary positions.

    Raises:
        CheckpointError: there is no checkpoint to read, or it is damaged or foreign.
    """
    c = parsed.flags.checkpoint
    if not c.use_checkpoint_args:
        return _with_kept_rules(parsed)
    if c.load is None:
        return _with_problem(parsed, f"{_REASON} needs --load, a folder with checkpoints.")
    stored = _stored(parsed.flags)
    if stored is None:
        return _with_problem(parsed, f"{_REASON}: there is no checkpoint in --load {c.load} yet: drop it at the start.")
    typed = [name for name in TOKENIZER_FILES if f"tokenizer.{name}" in parsed.given]
    tokenizer = tokenizer_of_checkpoint(stored, {name: getattr(parsed.flags.tokenizer, name) for name in typed})
    return _filled(parsed, dataclasses.replace(stored, tokenizer=tokenizer), Path(c.load))


def _stored(flags: Flags) -> StoredModel | None:
    """The model of the checkpoint from which the run goes on; ``None``: there is no checkpoint yet."""
    if (found := path_to_resume(flags)) is None:
        return None
    path, manifest = found
    return stored_model(path, manifest.meta)


def _with_kept_rules(parsed: ParsedFlags) -> ParsedFlags:
    """Fill in the checkpoint's ``--softmax-over-padding``, ``--mlp-activation`` and tokenizer, unless they are typed.

    Problems of the checkpoint are reported later, with all others.
    """
    c = parsed.flags.checkpoint
    if c.load is None:
        return parsed
    with contextlib.suppress(CheckpointError):
        stored = _stored(parsed.flags)
        if stored is not None:
            model, parsed = stored.model, _with_tokenizer(parsed, stored)
            kept: dict[str, object] = {"softmax_over_padding": model.softmax_over_padding}
            if parsed.flags.model.mlp_activation == UNFUSED_GELU and model.mlp_activation == FUSED_GELU:
                kept["mlp_activation"] = FUSED_GELU
            return _keeping(parsed, kept, c.load)
    return parsed


def _with_tokenizer(parsed: ParsedFlags, stored: StoredModel) -> ParsedFlags:
    """Fill in the checkpoint's tokenizer, or its problem, where the command line says nothing of a tokenizer."""
    if parsed.flags.tokenizer != TokenizerConfig():
        return parsed
    try:
        found = tokenizer_of_checkpoint(stored, {})
    except TokenizerError as error:
        return _with_problem(parsed, str(error))
    reason = f"the checkpoint in --load {parsed.flags.checkpoint.load}"
    derived = [*parsed.derived, Derived("tokenizer", found.tokenizer_type or "none", reason)]
    return dataclasses.replace(parsed, flags=dataclasses.replace(parsed.flags, tokenizer=found), derived=derived)


def _keeping(parsed: ParsedFlags, kept: dict[str, object], load: str) -> ParsedFlags:
    """Fill in the kept values of fields, unless they are typed."""
    flags, derived = parsed.flags, parsed.derived
    for name, value in kept.items():
        if f"model.{name}" not in parsed.given and value != getattr(flags.model, name):
            shown = name.replace("_", " ")
            flags = flags.update("model", **{name: value})
            derived = [one for one in derived if one.name != shown]
            derived.append(Derived(shown, value, f"the checkpoint in --load {load}"))
    return dataclasses.replace(parsed, flags=flags, derived=derived)


def _with_problem(parsed: ParsedFlags, problem: str) -> ParsedFlags:
    refused = parsed.refused | keys_of_model()  # nobody need be asked for what the checkpoint was to say
    return dataclasses.replace(parsed, problems=[*parsed.problems, problem], refused=refused)


def _filled(parsed: ParsedFlags, stored: StoredModel, load: Path) -> ParsedFlags:
    flags, derived, conflicts = parsed.flags, list(parsed.derived), []
    if flags.model.preset is not None:
        conflicts.append(f"--preset {flags.model.preset} and {_REASON} both say what the model is: drop one of them.")
    for section, kind, there in (("model", ModelFlags, stored.model), ("tokenizer", TokenizerConfig, stored.tokenizer)):
        for spec in dataclasses.fields(kind):
            here = flags.value(key := f"{section}.{spec.name}")
            value = here if _follows_from_length(key, stored) else getattr(there, spec.name, here)
            if key in parsed.given and value != here and _must_agree(key, flags.checkpoint.finetune):
                conflicts.append(
                    f"{flag_name(spec.name)} {here}, but the checkpoint in {load} has "
                    f"{'none' if value is None else value}: drop it, or drop {_REASON}."
                )
            elif key not in parsed.given and value != here and spec.metadata:
                flags = flags.update(section, **{spec.name: value})
                shown = "not given" if value is None else str(value)
                derived.append(Derived(spec.name.replace("_", " "), shown, _REASON))
    return dataclasses.replace(parsed, flags=flags, derived=derived, problems=[*parsed.problems, *conflicts])


def _follows_from_length(key: str, stored: StoredModel) -> bool:
    """Whether a field is the number of positions of a model that has one for each token of a sample."""
    return key == "model.max_position_embeddings" and stored.model.position_embedding_type != "learned_absolute"


def _must_agree(key: str, finetune: bool) -> bool:
    """Whether a field must agree: another value would make another model or tokenizer, not just stretch positions."""
    if finetune and key.removeprefix("model.") in STRETCHING:
        return False
    return key in ("tokenizer.tokenizer_type", "tokenizer.vocab_size") or RULES.get(key) is Rule.MODEL
