"""Decides which tokenizer files a checkpoint may use: those with the recorded SHA-256, and those that flags name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gptpar.config import TokenizerConfig
from gptpar.data.tokenizer import named_files
from gptpar.errors import TokenizerError, printable
from gptpar.system.files import lies_in, read_regular
from gptpar.training.exchange.kept import kept_folder
from gptpar.training.stored import StoredModel


def digests_of(config: TokenizerConfig) -> dict[str, str]:
    """The SHA-256 of each of a tokenizer's files that can be read, by the argument that names the file."""
    found = {}
    for role, path in named_files(config.tokenizer_type, **config.options).items():
        try:
            found[role] = hashlib.sha256(read_regular(path)).hexdigest()
        except OSError:
            continue  # whoever makes the tokenizer says so
    return found


def tokenizer_of_checkpoint(stored: StoredModel, given: Mapping[str, Any]) -> TokenizerConfig:
    """The tokenizer of a checkpoint, with files that were not exchanged since.

    A stranger's checkpoint may name any file of this machine, so a name alone is not trusted. Imports of former
    versions recorded no SHA-256; of theirs, the kept files are used.

    Args:
        given: fields that flags replace; what they name is used as it is.

    Raises:
        TokenizerError: a file is another one than in training; with all such files.
    """
    kept = kept_folder(stored.path.parent)
    config = replace(stored.tokenizer, **given)
    identity = stored.meta.get("tokenizer")
    recorded = identity.get("sha256") if isinstance(identity, dict) else None
    recorded = recorded if isinstance(recorded, dict) else {}
    paths = named_files(config.tokenizer_type, **config.options)
    problems = []
    for role, digest in digests_of(config).items():
        if role in given or (role not in recorded and kept is not None and lies_in(paths[role], kept)):
            continue
        if digest != recorded.get(role):
            before = f"SHA-256 {printable(str(recorded[role])[:64])}" if role in recorded else "no SHA-256"
            problems.append(
                f"{printable(str(paths[role]))} is not used: its SHA-256 is {digest}, and the checkpoint recorded "
                f"{before}; name the right file with --{role.replace('_', '-')}"
            )
    if problems:
        raise TokenizerError("\n".join(problems))
    return config
