"""Turns texts into rows of tokens; the last tokens of a row are scored.

The rules are those of lm-evaluation-harness (lm_eval/api/model.py, ``_encode_pair``; lm_eval/models/huggingface.py;
lm_eval/utils.py, ``get_rolling_token_windows``):

- white space at the end of a query moves to the beginning of its continuation;
- query and continuation are encoded together; if the query alone has n tokens, the continuation's tokens are those
  after the first n;
- an empty query is the token with which documents begin: bos where the tokenizer's files declare it, or eod;
- a row that is longer than the context loses tokens on the left;
- a document is cut into windows as long as the context, and each token is predicted once. The last window reaches back
  over the one before, so that its tokens see as much context as there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gptpar.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenRow:
    """A row of tokens, the last of which are scored.

    Attributes:
        tokens: one more than the model reads: the last token is only predicted.
        num_scored: number of tokens at the end that are scored.
    """

    tokens: Sequence[int]
    num_scored: int

    def __len__(self) -> int:
        """Number of tokens that the model reads."""
        return len(self.tokens) - 1


def continuation_rows(tokenizer: Tokenizer, query: str, continuations: Sequence[str], context: int) -> list[TokenRow]:
    """A row for each continuation of a query.

    Args:
        context: the most tokens that the model reads.

    Raises:
        ValueError: a continuation has no tokens of its own, or more than the context; a part of a sentence.
    """
    stripped = query.rstrip()
    space = query[len(stripped) :]
    encode = tokenizer.encode if stripped else tokenizer.encode_document
    query_ids = encode(stripped)
    rows = []
    for number, continuation in enumerate(continuations):
        ids = encode(stripped + space + continuation)
        scored = len(ids) - len(query_ids)
        if scored <= 0:
            raise ValueError(f"choice {number} (counted from 0) has no tokens beside those of the query")
        if scored > context:
            raise ValueError(f"choice {number} (counted from 0) has {scored:,} tokens, the model reads {context:,}")
        rows.append(TokenRow(ids[-(context + 1) :], scored))
    return rows


def document_rows(tokenizer: Tokenizer, text: str, context: int) -> Iterator[TokenRow]:
    """The windows of a document; each of its tokens is scored in one of them.

    Args:
        context: the most tokens that the model reads.
    """
    ids = tokenizer.encode_document(text)
    for start in range(0, len(ids) - 1, context):
        end = min(start + context, len(ids) - 1)
        yield TokenRow(ids[max(0, end - context) : end + 1], end - start)
