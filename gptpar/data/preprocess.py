"""Tokenizes a corpus into .bin/.idx files, and reports broken lines.

The files are byte for byte those of Megatron-LM's preprocess_data.py with the same flags, for any number of
workers.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import lru_cache

import numpy as np

from gptpar.data.indexed import IndexedDatasetWriter, removed_line, token_dtype
from gptpar.data.readers import Part, TextBlock, find_inputs, parse_block, parse_part, read_parts
from gptpar.data.tokenizer import Tokenizer, build_tokenizer
from gptpar.data.workers import ordered_map, terminate_cleanly
from gptpar.errors import DataError, TokenizerError

BAD_LINES_SHOWN = CHARACTERS_SHOWN = 5
"""Number of examples that the summary names."""


@dataclass(frozen=True)
class TokenizerSpec:
    """The arguments of ``build_tokenizer``: what a worker needs to build its own."""

    tokenizer_type: str
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_model: str | None = None
    vocab_size: int | None = None
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int | None = None


@lru_cache(maxsize=1)
def _tokenizer(spec: TokenizerSpec) -> Tokenizer:
    return build_tokenizer(**asdict(spec))


@dataclass
class TextLoss:
    """What a tokenizer loses of texts; its text is empty if it loses nothing.

    Attributes:
        dropped: how often each character occurs that no token represents.
        unknown: tokens that stand for text which the vocabulary lacks.
    """

    dropped: Counter[str] = field(default_factory=Counter)
    unknown: int = 0

    def add(self, other: TextLoss) -> None:
        self.dropped.update(other.dropped)
        self.unknown += other.unknown

    def __str__(self) -> str:
        found = self.dropped.most_common(CHARACTERS_SHOWN)
        shown = ", ".join(f"{character!r} {count:,} times" for character, count in found)
        more = f" and {len(self.dropped) - len(found):,} others" if len(self.dropped) > len(found) else ""
        lines = [
            *([f"lost {self.dropped.total():,} characters that no token represents: {shown}{more}"] if found else []),
            *([f"lost what {self.unknown:,} tokens stand for: the vocabulary lacks it"] if self.unknown else []),
        ]
        return "".join(f"\n{line}" for line in lines)


@dataclass(frozen=True)
class EncodedBlock:
    """The documents of one block, or one part of a document.

    Attributes:
        columns: for each key, (tokens of all documents end to end, number of tokens of each document).
        bad_lines: a sentence for each line that was skipped; of a part, why its document has to be removed.
        text_bytes: UTF-8 bytes that were encoded.
        consumed: as in TextBlock.
        part: whether this is part of a document, or a block.
        last: the document ends here.
        loss: what the tokenizer lost of the texts.
    """

    columns: list[tuple[np.ndarray, np.ndarray]]
    bad_lines: list[str]
    text_bytes: int
    consumed: int
    part: bool = False
    last: bool = True
    loss: TextLoss = field(default_factory=lambda: TextLoss())

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens) for tokens, _ in self.columns)


@dataclass(frozen=True)
class Encoder:
    """Turns a block of bytes into tokens. It is small to send to a process, which builds its own tokenizer once."""

    spec: TokenizerSpec
    keys: tuple[str, ...]
    append_eod: bool
    skip_bad_lines: bool
    prepend_bos: bool = False

    def __call__(self, block: TextBlock | Part) -> EncodedBlock:
        return self._encode_part(block) if isinstance(block, Part) else self._encode_block(block)

    def _encode_block(self, block: TextBlock) -> EncodedBlock:
        bad_lines: list[str] = []
        documents = list(parse_block(block, self.keys, bad_lines if self.skip_bad_lines else None))
        try:
            columns = self._columns([texts for _, texts in documents])
        except TokenizerError:
            documents = [document for document in documents if self._can_encode(block.path, *document, bad_lines)]
            columns = self._columns([texts for _, texts in documents])
        tokenizer, texts = _tokenizer(self.spec), [text for _, texts in documents for text in texts]
        unknown = sum(int((tokens == tokenizer.unknown).sum()) for tokens, _ in columns)
        loss = TextLoss(tokenizer.dropped(texts), unknown)
        return EncodedBlock(columns, bad_lines, sum(len(text.encode()) for text in texts), block.consumed, loss=loss)

    def _encode_part(self, part: Part) -> EncodedBlock:
        try:
            columns = self._columns([parse_part(part)], ends=part.last)
        except DataError as error:
            if not self.skip_bad_lines:
                raise
            return EncodedBlock([], [str(error)], 0, part.consumed, True, part.last)
        return EncodedBlock(columns, [], sum(map(len, part.texts)), part.consumed, True, part.last)

    def _columns(self, documents: list[tuple[str, ...]], ends: bool = True) -> list[tuple[np.ndarray, np.ndarray]]:
        tokenizer = _tokenizer(self.spec)
        ends_with = tokenizer.eod if self.append_eod and ends else None
        begins_with = tokenizer.bos if self.prepend_bos else None
        dtype = token_dtype(tokenizer.vocab_size)
        columns = ([texts[k] for texts in documents] for k in range(len(self.keys)))
        batches = (tokenizer.encode_batch(texts, ends_with, begins_with) for texts in columns)
        return [(tokens.astype(dtype, copy=False), lengths) for tokens, lengths in batches]

    def _can_encode(self, path: str, line: int, texts: tuple[str, ...], bad_lines: list[str]) -> bool:
        try:
            _tokenizer(self.spec).encode_batch(texts)
        except TokenizerError as error:
            problem = f"{path}, line {line}: {error}"
            if not self.skip_bad_lines:
                raise DataError(problem) from error
            bad_lines.append(problem)
            return False
        return True


def preprocess(
    inputs: Sequence[str], output_prefix: str, encoder: Encoder, *, workers: int = 1, log_interval: int | None = None
) -> str:
    """Write ``<output_prefix>_<key>_document.{bin,idx}`` for each key; returns a summary for the user.

    Memory use does not grow with the inputs. Files of an earlier run are replaced when the new ones are complete; after
    an error or an interrupt they are unchanged.

    Raises:
        ConfigError, TokenizerError: the tokenizer cannot be built.
        DataError: an input is missing or holds a bad line (unless they are skipped), there is no document or no token
            at all, a key cannot name a file of its own, or documents cannot begin with a bos token.
    """
    _check_keys(encoder.keys)
    files = find_inputs(inputs)
    tokenizer = _tokenizer(encoder.spec)
    if encoder.prepend_bos and (tokenizer.bos is None or tokenizer.begins_texts):
        reason = "has no bos token" if tokenizer.bos is None else "begins each text with its bos token"
        raise DataError(f"--prepend-bos: the {tokenizer.name} {reason}; leave it out")
    dtype = token_dtype(tokenizer.vocab_size)
    prefixes = [f"{output_prefix}_{key}_document" for key in encoder.keys]
    progress = CorpusProgress(sum(map(os.path.getsize, files)), log_interval)
    bad = BadLines()
    with terminate_cleanly(), ExitStack() as stack:
        writers = [stack.enter_context(IndexedDatasetWriter(prefix, dtype)) for prefix in prefixes]
        stack.callback(progress.finish)
        parts = read_parts(files, encoder.keys, tokenizer.cutter)
        output = Output(writers, progress, bad)
        for block in stack.enter_context(ordered_map(encoder, parts, workers, threads=tokenizer.threads)):
            output.add(block)
        if not progress.documents:
            raise DataError(f"no document in {', '.join(files)}{bad}")
        if not progress.tokens:
            raise DataError(
                f"{', '.join(files)}: the texts of all {progress.documents:,} documents are empty, and nothing can be "
                f"trained on no token: name the key of the texts (--json-keys {' '.join(encoder.keys)} has none){bad}"
            )
    return (
        f"{progress.documents:,} documents, {progress.tokens:,} tokens ({dtype.name}) "
        f"in {progress.seconds():.1f} s: {progress.rates()}\n"
        f"wrote {', '.join(f'{prefix}.bin and .idx' for prefix in prefixes)}{bad}"
        f"{output.loss}{removed_line(writers)}"
    )


def _check_keys(keys: Sequence[str]) -> None:
    problems = [
        f"--json-keys: {key!r} is given {keys.count(key)} times, but each key gets files of its own; give it once"
        for key in dict.fromkeys(keys)
        if keys.count(key) > 1
    ]
    problems += [
        f"--json-keys: {key!r} cannot be part of a file's name because of {bad!r}; rename the key in the input"
        for key in dict.fromkeys(keys)
        for bad in ("/", "\0")
        if bad in key
    ]
    if problems:
        raise DataError("\n".join(problems))


class Output:
    """Receives the encoded documents, in order."""

    def __init__(self, writers: list[IndexedDatasetWriter], progress: CorpusProgress, bad: BadLines):
        self._writers, self._progress, self._bad = writers, progress, bad
        self._tokens = self._text_bytes = 0  # of the parts so far of a document that has not ended
        self._forgetting = False  # one of its parts was bad
        self.loss = TextLoss()

    def add(self, block: EncodedBlock) -> None:
        if block.part:
            return self._add_part(block)
        for writer, column in zip(self._writers, block.columns, strict=True):
            writer.add_documents(*column)
        self._bad.add(block.bad_lines)
        self.loss.add(block.loss)
        self._progress.update(block.consumed, len(block.columns[0][1]), block.num_tokens, block.text_bytes)

    def _add_part(self, block: EncodedBlock) -> None:
        if block.bad_lines and not self._forgetting:
            self._forgetting = True
            self._bad.add(block.bad_lines)
            for writer in self._writers:
                writer.forget_parts()
            self._progress.update(block.consumed, 0, -self._tokens, -self._text_bytes)
        if not self._forgetting:
            for writer, (tokens, _) in zip(self._writers, block.columns, strict=True):
                writer.add_part(tokens, last=block.last)
            self._progress.update(block.consumed, int(block.last), block.num_tokens, block.text_bytes)
            self._tokens += block.num_tokens
            self._text_bytes += block.text_bytes
        if block.last:
            self._tokens = self._text_bytes = 0
            self._forgetting = False


class BadLines:
    """Counts skipped lines and remembers the first few; its text is empty if there were none."""

    def __init__(self) -> None:
        self._count = 0
        self._examples: list[str] = []

    def add(self, problems: list[str]) -> None:
        self._count += len(problems)
        self._examples += problems[: BAD_LINES_SHOWN - len(self._examples)]

    def __str__(self) -> str:
        more = self._count - len(self._examples)
        lines = [f"skipped {self._count:,} bad lines:", *self._examples, *([f"... and {more:,} more"] if more else [])]
        return "".join(f"\n{line}" for line in lines) if self._count else ""


TERMINAL_SECONDS = 0.2
LOG_SECONDS = 5.0
"""Seconds between two messages of progress, on a terminal and in a log."""


class CorpusProgress:
    """Counts documents and tokens; redraws its line on a terminal, else prints a line every few seconds.

    Args:
        total: bytes of all inputs on disk.
        log_interval: without a terminal, the number of documents after which to print a line instead.
    """

    def __init__(self, total: int, log_interval: int | None = None):
        self.documents = self.tokens = self.text_bytes = 0
        self._total = total
        self._consumed = 0
        self._log_interval = log_interval
        self._terminal = sys.stderr.isatty()
        self._start = self._shown = time.monotonic()
        self._shown_documents = 0

    def update(self, consumed: int, documents: int, tokens: int, text_bytes: int) -> None:
        """Add to the counts; ``consumed`` is the position in the inputs, in bytes on disk."""
        self._consumed = consumed
        self.documents += documents
        self.tokens += tokens
        self.text_bytes += text_bytes
        if self._due():
            self._show()

    def finish(self) -> None:
        """Show the final progress, and end the terminal's line."""
        if self._terminal:
            self._show()
            print(file=sys.stderr, flush=True)

    def rates(self) -> str:
        """Documents, megabytes of text and tokens per second since the start."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        return (
            f"{self.documents / seconds:,.0f} docs/s, {self.text_bytes / 1e6 / seconds:.2f} MB/s, "
            f"{self.tokens / seconds:,.0f} tokens/s"
        )

    def seconds(self) -> float:
        return time.monotonic() - self._start

    def _due(self) -> bool:
        if self._log_interval is not None and not self._terminal:
            return self.documents - self._shown_documents >= self._log_interval
        return time.monotonic() - self._shown >= (TERMINAL_SECONDS if self._terminal else LOG_SECONDS)

    def _show(self) -> None:
        self._shown, self._shown_documents = time.monotonic(), self.documents
        done = min(self._consumed / self._total, 1.0) if self._total else 1.0
        left = self.seconds() * (1 - done) / done if done else 0.0
        line = f"{done:6.1%}  {self.documents:,} documents, {self.rates()}, {_clock(left)} left"
        print(
            f"\r{line}\x1b[K" if self._terminal else line,
            end="" if self._terminal else "\n",
            file=sys.stderr,
            flush=True,
        )


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
