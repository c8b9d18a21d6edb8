"""Decides which tokenizer files a checkpoint uses: those that flags name, its own copy, or others as recorded."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from gptpar.checkpoint.tokenizer_copy import FOLDER, KEY, damaged_copy
from gptpar.config import TokenizerConfig
from gptpar.config.stored import StoredModel
from gptpar.data.tokenizer import files_of, named_files, usual_names
from gptpar.errors import TokenizerError, printable
from gptpar.exchange.kept import kept_folder
from gptpar.system.files import lies_in, read_regular


def digests_of(config: TokenizerConfig) -> dict[str, str]:
    """The SHA-256 of each of a tokenizer's files that can be read, by the argument that names the file."""
    found = {}
    for role, path in named_files(config.tokenizer_type, **config.options).items():
        try:
            found[role] = hashlib.sha256(read_regular(path)).hexdigest()
        except OSError:
            continue  # whoever makes the tokenizer says so
    return found


def tokenizer_of_checkpoint(
    stored: StoredModel, given: Mapping[str, Any], *, for_export: bool = False
) -> TokenizerConfig:
    """The tokenizer of a checkpoint, with files that were not exchanged since.

    Flags win; then comes the checkpoint's own copy. A checkpoint of a former version has none, so that the files that
    it names are used. A stranger's may name any file of this machine: a name alone is not trusted. Imports of former
    versions recorded no SHA-256; of theirs, the kept files are used.

    Args:
        given: fields that flags replace; what they name is used as it is.
        for_export: the files will be copied; files outside the run folder are then refused.

    Raises:
        TokenizerError: a file is another one than in training; with all such files.
    """
    config = replace(stored.tokenizer, **given)
    names = usual_names(config.tokenizer_type)
    own = _own_files(stored, {role: name for role, name in names.items() if role not in given})
    config = replace(config, **own)
    if problems := list(_not_trusted(stored, config, {*given, *own}, for_export=for_export)):
        raise TokenizerError("\n".join(problems))
    return config


def _not_trusted(
    stored: StoredModel, config: TokenizerConfig, trusted: Collection[str], *, for_export: bool
) -> Iterator[str]:
    """A sentence for each file that may not be used although the checkpoint names it.

    Args:
        trusted: arguments whose files are used as they are.
    """
    kept, identity = kept_folder(stored.path.parent), stored.meta.get("tokenizer")
    recorded = identity.get("sha256") if isinstance(identity, dict) else None
    recorded = recorded if isinstance(recorded, dict) else {}
    paths = named_files(config.tokenizer_type, **config.options)
    for role, digest in digests_of(config).items():
        path, is_kept = printable(str(paths[role])), kept is not None and lies_in(paths[role], kept)
        if role in trusted or (role not in recorded and is_kept):
            continue
        if digest != recorded.get(role):
            before = f"SHA-256 {printable(str(recorded[role])[:64])}" if role in recorded else "no SHA-256"
            yield (
                f"{path} is not used: its SHA-256 is {digest}, and the checkpoint recorded {before}; name the right "
                f"file with {_flags([role])}"
            )
        elif for_export and not is_kept and len(files_of(config.tokenizer_type, **{role: paths[role]})) > 1:
            yield (
                f"{path} is not exported: it is outside of the run folder, and of the files beside it the checkpoint "
                f"recorded no SHA-256; name it with {_flags([role])}"
            )


def _own_files(stored: StoredModel, names: Mapping[str, str]) -> dict[str, Any]:
    """Argument -> path in the checkpoint's own copy, of the files that are there.

    Args:
        names: the usual name of each argument's file.

    Raises:
        TokenizerError: the copy is damaged.
    """
    if names and (problems := damaged_copy(stored.path, stored.meta)):
        raise TokenizerError("\n".join([*problems, f"The copy is not used: name the right files with {_flags(names)}"]))
    return {role: str(stored.path / FOLDER / name) for role, name in names.items() if name in stored.meta.get(KEY, {})}


def _flags(roles: Iterable[str]) -> str:
    return " and ".join(f"--{role.replace('_', '-')}" for role in roles)
