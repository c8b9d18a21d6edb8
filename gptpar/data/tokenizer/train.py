"""Trains a SentencePiece tokenizer that loses nothing.

Texts are not normalised, spaces are kept, and characters that the vocabulary lacks become bytes. So
decode(encode(text)) == text for every text without U+2581, SentencePiece's sign for a space.
"""

from __future__ import annotations

import io
import random
import time
from collections.abc import Iterable, Iterator, Sequence

from gptpar.data.readers import read_documents
from gptpar.errors import DataError, TokenizerError
from gptpar.system.files import atomic_output

CHUNK_CHARS = 4096
"""Characters of the longest text that the trainer gets as one."""
THREADS = 4  # a constant, because the trainer writes it into the model
MODEL_TYPES = ("bpe", "unigram")


def train(
    texts: Iterable[str], vocab_size: int, *, model_type: str = "bpe", character_coverage: float = 0.9995
) -> bytes:
    """Train a SentencePiece model; returns it serialized. The same input gives the same model.

    Its ids are 0 unk, 1 bos, 2 eos, 3..258 the bytes, then the pieces.

    Args:
        texts: each at most 4,096 characters.
        vocab_size: number of ids.
        model_type: one of MODEL_TYPES.
        character_coverage: fraction of the characters that get pieces of their own.

    Raises:
        TokenizerError: the text has too many or too few different characters or words for the vocabulary.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.Train(
            # A NUL would make the trainer drop its sentence; it is encoded as a byte.
            sentence_iterator=(text.replace("\0", "") for text in texts),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            character_coverage=character_coverage,
            num_threads=THREADS,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            max_sentence_length=4 * CHUNK_CHARS,
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        raise TokenizerError(
            f"SentencePiece cannot train a {model_type} vocabulary of {vocab_size:,} on this text: {error}. "
            "Too small: raise --vocab-size or lower --character-coverage; too large: lower it or add text"
        ) from error
    return model.getvalue()


def sample_chunks(documents: Iterable[str], max_bytes: int, seed: int) -> tuple[list[str], int]:
    """(chunks of the documents, about ``max_bytes`` in all, drawn uniformly; number of UTF-8 bytes of all documents).

    Every chunk gets a random key, and the chunks with the smallest keys are kept (reservoir sampling), so that memory
    is bounded.
    """
    generator = random.Random(seed)
    kept: list[tuple[float, int, str]] = []
    kept_bytes = seen = 0
    for number, chunk in enumerate(_chunks(documents)):
        size = len(chunk.encode())
        seen += size
        kept.append((generator.random(), number, chunk))
        kept_bytes += size
        if kept_bytes > 2 * max_bytes:
            kept, kept_bytes = _smallest(kept, max_bytes)
    kept, _ = _smallest(kept, max_bytes)
    return [chunk for _, _, chunk in sorted(kept, key=lambda entry: entry[1])], seen


def _smallest(kept: list[tuple[float, int, str]], max_bytes: int) -> tuple[list[tuple[float, int, str]], int]:
    total = 0
    for count, (_, _, chunk) in enumerate(sorted_kept := sorted(kept)):
        size = len(chunk.encode())
        if total + size > max_bytes and count:
            return sorted_kept[:count], total
        total += size
    return sorted_kept, total


def _chunks(documents: Iterable[str]) -> Iterator[str]:
    """Parts of at most CHUNK_CHARS characters, which end at a line's end if there is one within that length."""
    for document in documents:
        start = 0
        while start < len(document):
            end = start + CHUNK_CHARS
            if end < len(document):
                end = document.rfind("\n", start, end) + 1 or end
            yield document[start:end]
            start = end


def train_file(
    inputs: Sequence[str],
    output: str,
    vocab_size: int,
    *,
    key: str = "text",
    model_type: str = "bpe",
    character_coverage: float = 0.9995,
    sample_bytes: int = 10_000_000,
    seed: int = 1234,
) -> str:
    """Train on the inputs' documents and write the model to ``output``; returns a summary for the user.

    Args:
        key: the key of texts in JSON lines.
        sample_bytes: UTF-8 bytes of the documents' text that are used.
        seed: seed of their choice.

    Raises:
        DataError: the inputs cannot be read or hold no text.
        TokenizerError: see ``train``.
    """
    start = time.monotonic()
    sample, total_bytes = sample_chunks(read_documents(inputs, key), sample_bytes, seed)
    if not sample:
        raise DataError(f"no text in {', '.join(inputs)}")
    model = train(sample, vocab_size, model_type=model_type, character_coverage=character_coverage)
    with atomic_output(output) as file:
        file.write(model)
    sampled = sum(len(chunk.encode()) for chunk in sample)
    return (
        f"wrote {output}: {vocab_size:,} {model_type} pieces, eod 2, from {sampled / 1e6:.1f} "
        f"of {total_bytes / 1e6:.1f} MB of text in {time.monotonic() - start:.1f} s; "
        "use it with --tokenizer-type SentencePieceTokenizer"
    )
