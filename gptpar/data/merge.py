"""Joins tokenized corpora into one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from gptpar.data.indexed import IndexedDataset, IndexedDatasetWriter, removed_line
from gptpar.data.workers import terminate_cleanly
from gptpar.errors import DataError


def find_prefixes(inputs: Sequence[str]) -> list[str]:
    """The prefixes of corpora that are given as folders (all their corpora, sorted), prefixes, or .bin or .idx files.

    Raises:
        DataError: a corpus lacks a file or is named twice; it names all of them.
    """
    prefixes: list[str] = []
    problems = []
    for name in inputs:
        if os.path.isdir(name):
            found = sorted({str(p.with_suffix("")) for p in Path(name).iterdir() if p.suffix in (".bin", ".idx")})
            if not found:
                problems.append(f"{name} holds no .bin or .idx file")
            prefixes += found
        else:
            prefixes.append(name[:-4] if name.endswith((".bin", ".idx")) else name)
    for prefix in prefixes:
        problems += [f"{prefix}{end} does not exist" for end in (".bin", ".idx") if not os.path.isfile(prefix + end)]
    problems += _named_twice(prefixes)
    if problems:
        raise DataError("\n".join(problems))
    return prefixes


def _named_twice(prefixes: Sequence[str]) -> Iterator[str]:
    seen: dict[str, str] = {}
    for prefix in prefixes:
        file = os.path.realpath(prefix + ".bin")
        if file in seen:
            also = "" if seen[file] == prefix else f" (also as {seen[file]})"
            yield f"{prefix} is named twice{also}, which would repeat its documents"
        seen.setdefault(file, prefix)


def merge(inputs: Sequence[str], output_prefix: str) -> str:
    """Write the inputs' documents, in order, to ``<output_prefix>.{bin,idx}``; returns a summary for the user.

    Raises:
        DataError: an input is missing or damaged, the token types differ, or the output is one of the inputs.
    """
    prefixes = find_prefixes(inputs)
    if os.path.realpath(output_prefix) in map(os.path.realpath, prefixes):
        raise DataError(f"--output-prefix {output_prefix} is one of the inputs; write somewhere else")
    dtypes = {prefix: IndexedDataset(prefix).dtype for prefix in prefixes}
    if len(set(dtypes.values())) > 1:
        listing = "\n".join(f"  {prefix}: {dtype.name}" for prefix, dtype in dtypes.items())
        raise DataError(f"the corpora hold different token types, so different tokenizers made them:\n{listing}")
    with terminate_cleanly(), IndexedDatasetWriter(output_prefix, dtypes[prefixes[0]]) as writer:
        for prefix in prefixes:
            writer.append(prefix)
        removed = removed_line([writer])
    merged = IndexedDataset(output_prefix)
    return (
        f"merged {len(prefixes)} corpora: {len(merged.document_index) - 1:,} documents, "
        f"{merged.num_tokens:,} tokens in {output_prefix}.bin and .idx{removed}"
    )
