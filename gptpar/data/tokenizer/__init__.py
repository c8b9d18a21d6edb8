"""The list of tokenizers by Megatron-LM's names. A tokenizer's library is imported only when the tokenizer is built."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptpar.data.tokenizer.base import Tokenizer, file_at
from gptpar.data.tokenizer.bpe import GPT2BPETokenizer
from gptpar.data.tokenizer.hf import HFTokenizer
from gptpar.data.tokenizer.sentence_piece import Llama2Tokenizer, SentencePieceTokenizer
from gptpar.data.tokenizer.simple import ByteLevelTokenizer, NullTokenizer
from gptpar.data.tokenizer.tik import TikTokenizer
from gptpar.errors import ConfigError
from gptpar.system.data_flags import TOKENIZER_TYPES, TOKENIZERS

_LEARNT = (GPT2BPETokenizer, SentencePieceTokenizer, Llama2Tokenizer, HFTokenizer, TikTokenizer)
_CLASSES: dict[str, type[Tokenizer]] = {cls.__name__: cls for cls in (*_LEARNT, NullTokenizer, ByteLevelTokenizer)}

__all__ = ["TOKENIZER_TYPES", "Tokenizer", "build_tokenizer", "tokenizer_problems"]


def build_tokenizer(tokenizer_type: str, **given: Any) -> Tokenizer:
    """Build a tokenizer of one of TOKENIZER_TYPES. Arguments that its type does not need are ignored.

    Args:
        tokenizer_type: one of TOKENIZER_TYPES.
        given: ``vocab_file``, ``merge_file`` and ``tokenizer_model`` are paths; ``data_flags.TOKENIZER_FILES`` says
            which type needs which. ``vocab_size`` is the number of ids, without the eod of a NullTokenizer. A
            TikTokenizer also takes ``tiktoken_pattern`` and ``tiktoken_num_special_tokens``. ``None``: not given.

    Raises:
        ConfigError: flags or files are missing; it names all of them.
        TokenizerError: a file is not a tokenizer of this type.
    """
    problems = tokenizer_problems(tokenizer_type, **given)
    if problems:
        raise ConfigError(problems)
    cls = _CLASSES[TOKENIZERS[tokenizer_type]]
    taken = {name: given[name] for name in (*cls.options, *cls.optional) if given.get(name) is not None}
    return cls(**taken)


def named_files(tokenizer_type: str | None, **given: Any) -> dict[str, Path]:
    """Argument of ``build_tokenizer`` -> the file that it means, of those that a tokenizer of this type reads."""
    if tokenizer_type not in TOKENIZERS:
        return {}
    cls = _CLASSES[TOKENIZERS[tokenizer_type]]
    return {role: file_at(str(path), cls.in_folder) for role in cls.file_names if (path := given.get(role)) is not None}


def usual_names(tokenizer_type: str | None) -> Mapping[str, str]:
    """Argument of ``build_tokenizer`` that is a file's path -> the file's name in a tokenizer's ``files``."""
    return _CLASSES[TOKENIZERS[tokenizer_type]].file_names if tokenizer_type in TOKENIZERS else {}


def files_of(tokenizer_type: str | None, **given: Any) -> dict[str, bytes]:
    """The ``files`` of the tokenizer that ``build_tokenizer`` makes of these arguments; its library is not needed.

    Raises:
        TokenizerError: one cannot be read.
    """
    files: dict[str, bytes] = {}
    for role, path in named_files(tokenizer_type, **given).items():
        files |= _CLASSES[TOKENIZERS[str(tokenizer_type)]].files_at(role, path)
    return files


def tokenizer_problems(tokenizer_type: str, **given: str | int | None) -> list[str]:
    """A sentence for each flag or file that ``build_tokenizer`` would miss; reads no file."""
    if tokenizer_type not in TOKENIZERS:
        near = difflib.get_close_matches(tokenizer_type, TOKENIZER_TYPES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(TOKENIZER_TYPES)}"
        return [f"--tokenizer-type {tokenizer_type} does not exist; {hint}"]
    problems = []
    cls = _CLASSES[TOKENIZERS[tokenizer_type]]
    for option in cls.options:
        flag, value = f"--{option.replace('_', '-')}", given.get(option)
        if value is None:
            problems.append(f"--tokenizer-type {tokenizer_type} needs {flag}")
        elif isinstance(value, str) and not file_at(value, cls.in_folder).is_file():
            problems.append(f"{flag} {value} {_why_no_file(Path(value), cls.in_folder)}")
    return problems


_OTHERS = {
    "tokenizer.json": "--tokenizer-type HFTokenizer --tokenizer-model {0}",
    "tokenizer.model": "--tokenizer-type SentencePieceTokenizer --tokenizer-model {0}",
    "merges.txt": "--tokenizer-type GPT2BPETokenizer --vocab-file {0}/vocab.json --merge-file {0}/merges.txt",
}
"""A tokenizer's file, as folders of published models have it -> the flags that read it."""


def _why_no_file(path: Path, in_folder: str) -> str:
    """The sentence about a path that is neither the file nor a folder with it."""
    if not path.is_dir():
        return f"is not there: give the path of a file, seen from {Path.cwd()}"
    found = next((name for name in _OTHERS if (path / name).is_file()), None)
    missing = f"holds no {in_folder}" if in_folder else "is a folder, and a file is needed"
    return missing if found is None else f"{missing}, but {found}: give {_OTHERS[found].format(path)}"
